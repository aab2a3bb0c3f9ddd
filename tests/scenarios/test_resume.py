"""A worker that is killed while a version is on its way fetches the rest of it, and nothing twice."""

import asyncio
import multiprocessing
import time
from pathlib import Path

from support.drift_cases import LineTrainer, drifted
from support.memory_network import MemoryNetwork
from support.swarm import Swarm, until

from primerl.crypto.hashing import digest
from primerl.node.weights.codec import encode_full
from primerl.node.weights.payload import cut
from primerl.protocol.manifests import ChunkRef

WORDS, SHARE = 1_500_000, 0.1
LONG = 1000
"""Steps that no test reaches."""
PIECE_S = 0.15
"""For every piece of data: slow enough to be killed in between."""
ENOUGH = 3


def anchor_chunks() -> dict[bytes, int]:
    """Digest and size of the chunks of version 0."""
    pieces = cut(encode_full(drifted(WORDS, SHARE, 0)), 1 << 22)
    return {digest(piece): len(piece) for piece in pieces}


def held(directory: Path) -> set[bytes]:
    """Chunks in a worker's store, by the names of its files."""
    files = (directory / "w1").rglob("*")
    return {bytes.fromhex(file.name) for file in files if len(file.name) == 64}


def work_until_killed(directory: Path, model: Path) -> None:
    """The life of a trainer and a worker on a slow network, in a process of their own.

    Nothing comes any more once enough is here: who watches may be late.
    """
    anchor = anchor_chunks().keys()

    async def slow(source: bytes, target: bytes) -> None:
        enough = len(held(directory) & anchor) >= ENOUGH
        await asyncio.sleep(3600 if enough else PIECE_S)

    async def live() -> None:
        network = MemoryNetwork(delay=slow)
        async with (
            Swarm(directory, model, network=network, max_steps=LONG) as swarm,
            LineTrainer(swarm, words=WORDS, share=SHARE) as trainer,
        ):
            await trainer.tell(1)
            swarm.add_worker("w1")
            await asyncio.sleep(60)

    asyncio.run(live())


def kill_in_the_middle(directory: Path, model: Path) -> set[bytes]:
    """Run the above until some chunks of the anchor are here, then SIGKILL; what the store holds of it."""
    wanted = anchor_chunks().keys()
    process = multiprocessing.get_context("spawn").Process(
        target=work_until_killed, args=(directory, model)
    )
    process.start()
    try:
        deadline = time.monotonic() + 60
        while len(held(directory) & wanted) < ENOUGH:
            assert process.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        process.kill()
        process.join()
    return held(directory) & wanted


async def test_sigkill_in_the_middle_of_a_version_refetches_nothing_that_is_held(
    tmp_path: Path, model_dir: Path
) -> None:
    before = await asyncio.to_thread(kill_in_the_middle, tmp_path, model_dir)
    sizes = anchor_chunks()
    assert ENOUGH <= len(before) < len(sizes)
    async with (
        Swarm(tmp_path, model_dir, max_steps=LONG) as swarm,
        LineTrainer(swarm, words=WORDS, share=SHARE) as trainer,
    ):
        trainer.recall(1)
        anchor = trainer.line.manifests[0].artifacts[0]
        assert set(anchor.chunks) == {ChunkRef(name, size) for name, size in sizes.items()}
        worker = swarm.add_worker("w1")
        await until(lambda: bool(swarm.fakes.loads("w1")))
        sources = (await worker.status())["chunk_bytes_by_source"]
        assert swarm.fakes.loads("w1")[0].state == trainer.line.state(0)
    assert sum(sources.values()) == sum(sizes[name] for name in sizes.keys() - before)
