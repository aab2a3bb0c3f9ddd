"""Hostile peers and a hostile trainer against a worker: it loads nothing that is not proved, or stops."""

import asyncio
import resource
import struct
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zstandard
from msgspec.structs import replace
from support.hostile import HostileTrainer, Rogue, policy, tensor_table
from support.protocol_cases import LEASE
from support.swarm import Running, Swarm, side_by_side
from support.waiting import until

from primerl.crypto.hashing import digest
from primerl.crypto.keys import SecretKey
from primerl.node.errors import RunFailed
from primerl.node.p2p.rpc import receive, send
from primerl.node.p2p.transport import Stream
from primerl.node.weights.codec import encode_full
from primerl.node.weights.replica import prove
from primerl.protocol.envelope import Purpose, seal
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.manifests import TensorInfo
from primerl.protocol.messages import (
    BlobRequest,
    ChunkFollows,
    GetChunk,
    GetHeads,
    HaveChunks,
    HeadNotice,
    Heads,
    Hello,
    RunEnded,
    WatchChunks,
    WatchHeads,
)
from primerl.protocol.version import MAX_CHUNK

STRANGER = SecretKey.from_seed(b"s" * 32)
Answer = Callable[[Stream, Any], Awaitable[None]]
KEEP = {"keep_versions": 1000}
"""So that every head is still there at the end."""
QUESTIONS = WatchHeads | GetHeads | Hello


async def stay_silent(stream: Stream, request: Any) -> None:
    await asyncio.sleep(3600)


async def have_nothing(stream: Stream, request: Any) -> None:
    raise RemoteProtocolError(Reason.NOT_FOUND, "ask somebody else")


def say_always(*messages: Any) -> Answer:
    async def answer(stream: Stream, request: Any) -> None:
        for message in messages:
            await send(stream, message)
        await stream.finish()

    return answer


@asynccontextmanager
async def bad_neighbour(
    swarm: Swarm, *, control: Answer = stay_silent, blobs: Answer = have_nothing
) -> AsyncGenerator[Rogue]:
    """A node that may serve others and serves them this."""

    async def on_control(peer: bytes, stream: Stream) -> None:
        await control(stream, await receive(stream, QUESTIONS))  # type: ignore[arg-type]

    async def on_blobs(peer: bytes, stream: Stream) -> None:
        request: BlobRequest = await receive(stream, BlobRequest)  # type: ignore[arg-type]
        if isinstance(request, WatchChunks):  # it claims whatever anybody wants
            count = len(request.chunks)
            await send(stream, HaveChunks(((1 << count) - 1).to_bytes((count + 7) // 8, "little")))
            await asyncio.sleep(3600)
        await blobs(stream, request)

    async with Rogue(swarm, "neighbour") as rogue:
        rogue.serve(control=on_control, blobs=on_blobs)
        yield rogue


# -- against a run with an honest trainer ---------------------------------------------------------------


TAMPERED = ["flipped", "short", "long", "huge", "refusal of form"]


async def test_a_tampered_chunk_costs_its_sender_and_not_the_run(
    tmp_path: Path, model_dir: Path
) -> None:
    await side_by_side(lambda kind: tampered(tmp_path, model_dir, kind), TAMPERED)


async def tampered(tmp_path: Path, model_dir: Path, kind: str) -> None:
    directory = tmp_path / f"{TAMPERED.index(kind)}"
    async with Swarm(directory, model_dir, max_steps=10_000, weights=KEEP) as swarm:
        await swarm.start_trainer()
        await swarm.wait_step(0)

        async def tamper(stream: Stream, request: GetChunk) -> None:
            size = chunk_sizes(swarm)[request.digest]
            data = {
                "flipped": bytes(size),
                "short": bytes(size // 2),
                "long": bytes(size + 1),
            }.get(kind, b"")
            says = {"huge": 2**26, "short": size}.get(kind, len(data))
            if kind == "refusal of form":
                await stream.write(b"\x00\x00\x00\x02\xc1\xc1")
            else:
                await send(stream, ChunkFollows(says))
                await stream.write(data)
            await stream.finish()

        async with bad_neighbour(swarm, blobs=tamper) as rogue:
            await rogue.hello()
            await rogue.poll(0, version=0)
            worker = swarm.add_worker("w1")
            await swarm.wait_step(3)
            row = next(r for r in await worker.peers() if r["id"] == rogue.key.node_id.hex())
            sources = (await worker.status())["chunk_bytes_by_source"]
        assert row["reliability"] < 1.0
        assert set(sources) == {"trainer"}
        await swarm.stop_trainer()
        heads = swarm.heads()
    for event in swarm.fakes.loads("w1"):
        assert event.state == heads[0, event.version].state


def chunk_sizes(swarm: Swarm) -> dict[bytes, int]:
    """Sizes of everything in the trainer's store."""
    files = (swarm.trainer.data_dir / "chunks").rglob("*")
    return {bytes.fromhex(f.name): f.stat().st_size for f in files if len(f.name) == 64}


LIES = ("another key", "garbage", "the end")
MORE_LIES = ("noise", "nothing", "an old one", "a replayed one")


@pytest.mark.parametrize("lies", [LIES, pytest.param(MORE_LIES, marks=pytest.mark.slow)])
async def test_lies_about_heads_from_a_neighbour_neither_mislead_nor_stop_a_late_joiner(
    tmp_path: Path, model_dir: Path, lies: Sequence[str]
) -> None:
    await side_by_side(lambda kind: lied_to(tmp_path / kind, model_dir, kind), lies)


async def lied_to(directory: Path, model_dir: Path, kind: str) -> None:
    async with Swarm(directory, model_dir, max_steps=10_000, weights=KEEP) as swarm:
        await swarm.start_trainer()
        await swarm.wait_step(0)
        run = swarm.read_ticket().run
        async with Rogue(swarm, "spy") as spy:
            (old,) = (await spy.ask(GetHeads(-1), Heads)).notices
            first = await spy.head()
        swarm.add_worker("first")
        await swarm.wait_step(2)
        await swarm.stop_worker("first")
        foreign = seal(STRANGER, Purpose.HEAD, run, first, expires=first.expires)
        other_run = seal(swarm.trainer.key, Purpose.HEAD, b"o" * 32, first, expires=first.expires)

        async def lie(stream: Stream, request: Any) -> None:
            watching = isinstance(request, WatchHeads)
            notices = {
                "another key": (HeadNotice(foreign),),
                "noise": (HeadNotice(b"\xc1" * 100),),
                "an old one": (old,),
                "a replayed one": (HeadNotice(other_run),),
            }.get(kind, ())
            if kind == "garbage":
                await stream.write(b"\x00\x00\x00\x02\xc1\xc1")
            elif kind == "the end" and watching:
                await send(stream, RunEnded("go home"))
            elif watching:
                for notice in notices:
                    await send(stream, notice)
            else:
                await send(stream, Heads(notices))
            await stream.finish()

        async with bad_neighbour(swarm, control=lie) as rogue:
            await rogue.hello()
            await rogue.poll(0, version=2)
            swarm.add_worker("late")
            await swarm.wait_step(5)
        loads = swarm.fakes.loads("late")
        await swarm.stop_trainer()
        heads = swarm.heads()
    assert [event.state for event in loads] == [heads[0, e.version].state for e in loads]
    versions = [event.version for event in loads]
    assert versions == sorted(versions)
    assert versions[0] >= 1


# -- against a trainer that lies under its own signature ------------------------------------------------


@pytest.mark.parametrize("way", ["a neighbour", "the trainer", "gossip"])
async def test_a_trainer_that_contradicts_itself_is_left(
    tmp_path: Path, model_dir: Path, way: str
) -> None:
    async with (
        Swarm(tmp_path, model_dir, gossip=way == "gossip") as swarm,
        HostileTrainer(swarm) as trainer,
    ):
        notice = await trainer.publish(0, policy(0))
        document = trainer.manifest(0, policy(1))
        second = HeadNotice(trainer.head(0, policy(1), document), document)
        control = say_always(notice, second)
        async with bad_neighbour(swarm, control=control) as rogue:
            if way == "a neighbour":
                trainer.upstreams.append(rogue.record())
            if way == "the trainer":
                trainer.lie = second
            worker = swarm.add_worker("w1")
            if way == "gossip":
                await until(lambda: bool(swarm.fakes.loads("w1")))
                liar = swarm.network.discovery(trainer.key.node_id)
                await liar.start([f"/memory/{worker.node_id.hex()}"])
                await liar.publish(second.head)
            with pytest.raises(RunFailed, match=r"contradicts itself .*: stop trusting this run"):
                await worker.ended()
    assert {event.state for event in swarm.fakes.loads("w1")} <= {prove(0, policy(0)).digest}


async def test_a_trainer_that_hears_its_own_key_sign_another_version_stops(
    tmp_path: Path, model_dir: Path
) -> None:
    """Two trainers with one key, say from a copied directory: neither may go on as if nothing was."""
    async with Swarm(tmp_path, model_dir, max_steps=10_000, gossip=True) as swarm:
        await swarm.start_trainer()
        await swarm.wait_step(0)
        run = swarm.read_ticket().run
        async with Rogue(swarm, "spy") as spy:
            head = await spy.head()
        twin = replace(head, state=digest(b"another"))
        sealed = seal(swarm.trainer.key, Purpose.HEAD, run, twin, expires=twin.expires)
        liar = swarm.network.discovery(STRANGER.node_id)
        await liar.start([f"/memory/{swarm.trainer.node_id.hex()}"])
        for _ in range(40):
            await liar.publish(sealed)
        with pytest.raises(RunFailed, match="another process signs with this run's key"):
            await swarm.trainer.ended()


def bomb(size: int) -> bytes:
    """A zstd frame of a few bytes that grows to `size`, and says so nowhere."""
    writer = zstandard.ZstdCompressor(level=1).compressobj()
    parts = [writer.compress(bytes(1 << 20)) for _ in range(size >> 20)]
    return b"".join([*parts, writer.flush()])


def announced_bomb(size: int) -> bytes:
    """As bomb(), with its size in the header."""
    writer = zstandard.ZstdCompressor(level=1).compressobj(size=size)
    parts = [writer.compress(bytes(1 << 20)) for _ in range(size >> 20)]
    return b"".join([*parts, writer.flush()])


def raw_block(words: int, frame: bytes) -> bytes:
    """A snapshot of one tensor whose first byte plane is `frame`."""
    whole = b"".join(encode_full(policy(7, words)))
    header = whole[: 4 + 1 + 16]
    body = struct.pack("<I", len(frame)) + frame
    return header + b"\x03" + struct.pack("<I", len(body)) + body


GIB = 1 << 30
WORDS = 1 << 19

PAYLOADS: dict[str, Callable[[], list[bytes]]] = {
    "noise": lambda: [b"\xa5" * 5000],
    "cut short": lambda: [b"".join(encode_full(policy(7, WORDS)))[:-100]],
    "with more behind": lambda: [b"".join(encode_full(policy(7, WORDS))) + b"more"],
    "of other weights": lambda: [b"".join(encode_full(policy(8, WORDS)))],
    "a bomb": lambda: [raw_block(WORDS, bomb(GIB))],
    "an announced bomb": lambda: [raw_block(WORDS, announced_bomb(GIB))],
    "a bomb in many chunks": lambda: [raw_block(WORDS, bomb(GIB))[:100], b"\x28\xb5" * 50],
}


@pytest.mark.parametrize("name", PAYLOADS)
async def test_weights_that_do_not_decode_to_what_was_signed_are_never_loaded(
    tmp_path: Path, model_dir: Path, name: str
) -> None:
    chunks = PAYLOADS[name]()
    assert all(len(chunk) <= MAX_CHUNK for chunk in chunks)
    async with Swarm(tmp_path, model_dir) as swarm, HostileTrainer(swarm) as trainer:
        await trainer.publish(0, policy(0, WORDS))
        swarm.add_worker("w1")
        await until(lambda: len(swarm.fakes.loads("w1")) == 1)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        await trainer.publish(1, policy(7, WORDS), chunks)
        await asyncio.sleep(0.3)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 200 * 1024  # KiB
        assert len(swarm.fakes.loads("w1")) == 1
        # The next version that is genuine is loaded: nothing was wedged.
        await trainer.publish(2, policy(2, WORDS))
        await until(lambda: swarm.fakes.loads("w1")[-1].version == 2)
    states = [event.state for event in swarm.fakes.loads("w1")]
    assert states == [prove(0, policy(0, WORDS)).digest, prove(2, policy(2, WORDS)).digest]


async def test_a_lease_that_has_expired_by_our_clock_is_named_and_the_worker_goes_on(
    tmp_path: Path, model_dir: Path
) -> None:
    """Found by a worker's clock that jumped ten minutes ahead: it ended, as "refused by the other side"."""
    async with Swarm(tmp_path, model_dir) as swarm, HostileTrainer(swarm) as trainer:
        await trainer.publish(0, policy(0))
        past = int(time.time()) - 600

        def expired(node: bytes) -> tuple[bytes, ...]:
            return (
                seal(trainer.key, Purpose.LEASE, trainer.run, LEASE, expires=past, recipient=node),
            )

        trainer.leases = expired
        worker = swarm.add_worker("w1")
        await until(lambda: bool(swarm.fakes.loads("w1")))
        await until_status(worker, lambda status: "expired" in status["waiting_for"])
        trainer.leases = lambda node: ()
        await until_status(worker, lambda status: "expired" not in status["waiting_for"])


async def until_status(worker: Running, holds: Callable[[dict[str, Any]], bool]) -> None:
    """Wait until a worker's status satisfies a condition, unless it ends."""
    async with asyncio.timeout(60.0):
        while not holds(await worker.status()):
            assert worker.task is not None
            assert not worker.task.done()
            await asyncio.sleep(0.05)


async def test_a_manifest_of_tensors_without_bound_is_refused(
    tmp_path: Path, model_dir: Path
) -> None:
    vast = TensorInfo("some.weight", "BF16", (2**20, 2**20, 2**10), bytes(32))
    async with Swarm(tmp_path, model_dir) as swarm, HostileTrainer(swarm) as trainer:
        await trainer.publish(0, policy(0), tensors=[vast, *tensor_table(policy(0))])
        swarm.add_worker("w1")
        await asyncio.sleep(0.5)
        assert swarm.fakes.loads("w1") == []
        await trainer.publish(1, policy(1))
        await until(lambda: len(swarm.fakes.loads("w1")) == 1)


async def test_a_worker_does_not_go_back_to_a_term_that_was_left(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir) as swarm, HostileTrainer(swarm) as trainer:
        await trainer.publish(0, policy(0))
        swarm.add_worker("w1")
        await until(lambda: len(swarm.fakes.loads("w1")) == 1)
        document = trainer.manifest(0, policy(5))
        await trainer.book.admit(HeadNotice(trainer.head(0, policy(5), document, term=1), document))
        await until(lambda: len(swarm.fakes.loads("w1")) == 2)
        await swarm.crash_worker("w1")
        # After a restart, too: the ledger knows what was loaded.
        document = trainer.manifest(9, policy(9))
        stale = HeadNotice(trainer.head(9, policy(9), document, term=0), document)
        async with bad_neighbour(swarm, control=say_always(stale)) as rogue:
            trainer.upstreams.append(rogue.record())
            swarm.add_worker("w1")
            await asyncio.sleep(0.7)
    states = [event.state for event in swarm.fakes.loads("w1")]
    assert prove(9, policy(9)).digest not in states
    assert states[-1] == prove(0, policy(5)).digest
