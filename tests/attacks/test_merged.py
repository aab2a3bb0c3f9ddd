"""Merged deltas under attack: no answer is believed, none costs much, and no flood gets work done."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from merged_cases import LineTrainer
from rogue import Rogue, reason_of
from swarm import Running, Swarm, until

from primerl.node.network.arrivals import Arrivals
from primerl.node.network.blobs import BlobServer
from primerl.node.network.limits import Pacer
from primerl.node.network.rpc import ask, receive, send
from primerl.node.network.transport import Stream
from primerl.node.roles.merging import PEER_BURST
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.manifests import Artifact, ChunkRef
from primerl.protocol.messages import GetHeads, GetMerged, Hello, Merged, WatchHeads
from primerl.protocol.version import ALPN_CONTROL

LONG = 1000
"""Steps that no test reaches."""
Answer = Callable[[LineTrainer, Stream, GetMerged], Awaitable[None]]
Lie = Callable[[LineTrainer, GetMerged], Artifact]


class Liar:
    """A peer that workers take for an upstream, and what it was asked."""

    def __init__(self, trainer: LineTrainer, answer: Answer) -> None:
        self.asked = 0
        self.silent = False
        """Whether it gives no chunks either."""
        self._trainer = trainer
        self._answer = answer
        self._blobs = BlobServer(trainer.store, Arrivals(), Pacer(0))

    async def on_control(self, peer: bytes, stream: Stream) -> None:
        """Lie about merged deltas, and have nothing else to say."""
        kinds: Any = WatchHeads | GetHeads | GetMerged | Hello
        request = await receive(stream, kinds)
        if not isinstance(request, GetMerged):
            raise RemoteProtocolError(Reason.NOT_FOUND, "ask somebody else")
        self.asked += 1
        await self._answer(self._trainer, stream, request)

    async def on_blobs(self, peer: bytes, stream: Stream) -> None:
        """Give what was promised, or nothing for ever."""
        if self.silent:
            await asyncio.sleep(3600)
        await self._blobs.handle(peer, stream)


@asynccontextmanager
async def under(
    directory: Path, model: Path, answer: Answer, *, merges: bool = True
) -> AsyncGenerator[tuple[Swarm, LineTrainer, Liar, Running]]:
    """A trainer at version 0, a worker that follows it, and a liar that the worker asks first."""
    async with (
        Swarm(directory, model, max_steps=LONG) as swarm,
        LineTrainer(swarm, merges=merges) as trainer,
    ):
        liar = Liar(trainer, answer)
        await trainer.tell()
        async with Rogue(swarm, "liar") as rogue:
            rogue.serve(control=liar.on_control, blobs=liar.on_blobs)
            trainer.upstreams.append(rogue.record())
            worker = swarm.add_worker("w1")
            await loaded(swarm, trainer, 0)
            yield swarm, trainer, liar, worker


async def loaded(swarm: Swarm, trainer: LineTrainer, version: int) -> None:
    """Wait until the worker has a version; everything that it ever loaded was what was signed."""
    await until(lambda: [e.version for e in swarm.fakes.loads("w1")][-1:] == [version])
    for event in swarm.fakes.loads("w1"):
        assert event.state == trainer.line.state(event.version)


async def blamed(worker: Running) -> bool:
    """Whether any peer has lost standing with the worker."""
    return any(row["reliability"] < 1.0 for row in await worker.peers())


def telling(lie: Lie) -> Answer:
    """Answer with an artifact."""

    async def answer(trainer: LineTrainer, stream: Stream, request: GetMerged) -> None:
        await send(stream, Merged(lie(trainer, request)))
        await stream.finish()

    return answer


def altered(**changes: Any) -> Lie:
    """The honest artifact but for some fields."""

    def lie(trainer: LineTrainer, request: GetMerged) -> Artifact:
        return msgspec.structs.replace(honest(trainer, request, request.version), **changes)

    return lie


def honest(trainer: LineTrainer, request: GetMerged, target: int) -> Artifact:
    """A delta from the base that was asked for to a version."""
    payload = trainer.line.delta(request.base_version, target)
    return trainer.line.put([payload], request.base_version, request.base_state)


def noise(trainer: LineTrainer, request: GetMerged) -> Artifact:
    payload = np.random.default_rng(1).bytes(100_000)
    return trainer.line.put([payload], request.base_version, request.base_state)


def cut_short(trainer: LineTrainer, request: GetMerged) -> Artifact:
    good = honest(trainer, request, request.version)
    (payload,) = trainer.line.payload(good)
    return trainer.line.put([payload[:-10]], request.base_version, request.base_state)


LIES: dict[str, Lie] = {
    "noise": noise,
    "cut short": cut_short,
    "to another state": lambda trainer, request: honest(trainer, request, request.version - 1),
    "from another version": altered(base_version=7),
    "from another state": altered(base_state=b"x" * 32),
    "an anchor": altered(kind="anchor", base_version=-1, base_state=bytes(32)),
    "another codec": altered(codec="zip"),
    "endless": altered(size=2**48),
    "smaller than its chunks": altered(size=1000),
    "crumbs": altered(
        size=4096, chunks=tuple(ChunkRef(bytes([i % 256]) * 32, 1) for i in range(4096))
    ),
    "of no chunks": altered(size=0, chunks=()),
}


@pytest.mark.parametrize("kind", LIES)
async def test_a_wrong_merged_delta_costs_its_author_and_not_the_worker(
    tmp_path: Path, model_dir: Path, kind: str
) -> None:
    async with under(tmp_path, model_dir, telling(LIES[kind])) as (swarm, trainer, liar, worker):
        await trainer.tell(8)
        await loaded(swarm, trainer, 8)
        assert liar.asked == 1
        assert trainer.desk.made == 1
        assert await blamed(worker)
        await trainer.tell(8)
        await loaded(swarm, trainer, 16)
        assert liar.asked == 1


async def test_with_nobody_honest_to_merge_the_single_deltas_are_still_there(
    tmp_path: Path, model_dir: Path
) -> None:
    lie = telling(LIES["to another state"])
    async with under(tmp_path, model_dir, lie, merges=False) as (swarm, trainer, liar, _):
        await trainer.tell(8)
        await loaded(swarm, trainer, 8)
        assert liar.asked == 1


async def say_garbage(trainer: LineTrainer, stream: Stream, request: GetMerged) -> None:
    await stream.write(b"\x00\x00\x00\x02\xc1\xc1")
    await stream.finish()


async def say_nothing(trainer: LineTrainer, stream: Stream, request: GetMerged) -> None:
    await asyncio.sleep(3600)


async def have_none(trainer: LineTrainer, stream: Stream, request: GetMerged) -> None:
    raise RemoteProtocolError(Reason.NOT_FOUND, "not here")


@pytest.mark.parametrize(
    ("answer", "again"), [(say_garbage, False), (say_nothing, False), (have_none, True)]
)
async def test_who_says_no_or_nothing_or_garbage_is_passed_over(
    tmp_path: Path, model_dir: Path, answer: Answer, again: bool
) -> None:
    async with under(tmp_path, model_dir, answer) as (swarm, trainer, liar, _):
        await trainer.tell(8)
        await loaded(swarm, trainer, 8)
        assert trainer.desk.made == 1
        await trainer.tell(8)
        await loaded(swarm, trainer, 16)
        assert trainer.desk.made == 2
        assert liar.asked == 1 + again


async def test_who_promises_chunks_and_gives_none_is_given_up(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("primerl.node.roles.shortcuts.FETCH_S", 0.5)
    promise = telling(lambda trainer, request: honest(trainer, request, request.version))
    async with under(tmp_path, model_dir, promise) as (swarm, trainer, liar, _):
        liar.silent = True
        await trainer.tell(8)
        await loaded(swarm, trainer, 8)
        assert trainer.desk.made == 1


# -- who asks for too much -----------------------------------------------------------------------


UNKNOWN = GetMerged(0, b"a" * 32, 1, b"b" * 32)


@pytest.mark.asyncio(loop_scope="session")
async def test_a_stranger_gets_nothing_made_by_a_trainer(siege: Swarm) -> None:
    async with Rogue(siege, "stranger") as rogue:
        assert await reason_of(rogue.ask(UNKNOWN, Merged)) == Reason.NOT_ADMITTED


@pytest.mark.asyncio(loop_scope="session")
async def test_unknown_states_and_floods_are_refused_and_the_trainer_goes_on(siege: Swarm) -> None:
    huge = GetMerged(0, b"a" * 32, 2**53, b"b" * 32)
    async with Rogue(siege, "flooder") as rogue:
        await rogue.hello()
        replies = [await reason_of(rogue.ask(one, Merged)) for one in [UNKNOWN, huge] * 20]
        assert set(replies[:PEER_BURST]) == {Reason.NOT_FOUND}
        assert replies.count(Reason.BUSY) >= 30
        assert await rogue.head()


async def test_a_worker_refuses_what_it_cannot_make_and_stays_usable(
    tmp_path: Path, model_dir: Path
) -> None:
    async with (
        Swarm(tmp_path, model_dir, max_steps=LONG) as swarm,
        LineTrainer(swarm) as trainer,
    ):
        await trainer.tell(2)
        worker = swarm.add_worker("w1")
        await loaded(swarm, trainer, 1)
        async with Rogue(swarm, "stranger") as rogue:
            address = f"{worker.node_id[:4].hex()}:4433"
            connection = await rogue.transport.connect(
                worker.node_id, (address,), ALPN_CONTROL, deadline=60.0
            )
            replies = [
                await reason_of(ask(connection, UNKNOWN, Merged, deadline=60.0)) for _ in range(20)
            ]
        assert set(replies) == {Reason.NOT_FOUND, Reason.BUSY}
        await trainer.tell(8)
        await loaded(swarm, trainer, 9)
