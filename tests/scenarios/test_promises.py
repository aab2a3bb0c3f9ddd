"""The checker of promises finds each kind of broken promise in a run that kept all of them."""

import asyncio
import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from support.swarm import RUN, Swarm
from support.waiting import until
from support.witness import Fakes

from primerl.node.storage.rollouts import RolloutFiles
from primerl.node.trainer.state import TrainerState
from primerl.node.training.resume_points import ResumePoints
from primerl.scripts.bench import promises
from primerl.scripts.bench.promises import Witness


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    """A run of a few steps and its worker, both killed."""
    directory = tmp_path_factory.mktemp("run")

    async def play() -> None:
        async with Swarm(directory, model_dir, fakes=Fakes(last_step=3), max_steps=30) as swarm:
            await swarm.start_trainer()
            swarm.add_worker("w1")
            await swarm.wait_step(3)
            await until(lambda: swarm.fakes.newest("w1") == 3)
            await until(lambda: len(RolloutFiles(directory / RUN / "rollouts").steps()) == 3)
            await swarm.crash_worker("w1")
            await swarm.crash_trainer()

    asyncio.run(play())
    assert promises.broken(directory / RUN, [directory / "w1"]) == []
    return directory


def sql(directory: Path, statement: str, node: str = f"{RUN}/trainer") -> None:
    (path,) = directory.glob(f"{node}/ledger.db")
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(statement)


def damage_chunk(directory: Path) -> None:
    path = next((directory / "w1").glob("runs/*/chunks/*/*/*"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def lose_resume_points(directory: Path) -> None:
    for path in (directory / RUN / "checkpoints").glob("*.resume"):
        path.unlink()


def lose_chunks(directory: Path) -> None:
    shutil.rmtree(directory / RUN / "trainer" / "chunks")


def name_no_work(directory: Path) -> None:
    """What a trainer writes that forgets which later submissions a state contains."""
    points = ResumePoints(directory / RUN / "checkpoints")
    for point in points.newest_first(-1):
        state = msgspec.json.decode(point.parts["cursor"], type=TrainerState)
        forgets = msgspec.structs.replace(state, used=[], verified_up_to=0)
        parts = {**point.parts, "cursor": msgspec.json.encode(forgets)}
        points._write(point.step, parts)  # pyright: ignore[reportPrivateUsage]


def use_twice(directory: Path) -> None:
    files = RolloutFiles(directory / RUN / "rollouts")
    first, *_, last = files.steps()
    files.write(files.record(last), [*files.read(last), *files.read(first)])


BREAKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a submission": (lambda d: sql(d, "DELETE FROM inbox WHERE arrival = 2"), "are lost"),
    "a version": (
        lambda d: sql(d, "DELETE FROM heads WHERE version = (SELECT MAX(version) FROM heads)"),
        "is known to .* and is lost",
    ),
    "a chunk": (damage_chunk, "keeps a chunk that is not"),
    "a head": (
        lambda d: sql(d, "UPDATE heads SET sealed = zeroblob(200)", "w1/runs/*"),
        "took version",
    ),
    "resume points": (lose_resume_points, "no checkpoint or resume point of it"),
    "weights": (lose_chunks, "cannot be made from the chunks"),
    "names of work": (name_no_work, "does not name it: it would be used twice"),
    "work used once": (use_twice, "was used by steps"),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_promise_is_found(run: Path, tmp_path: Path, what: str) -> None:
    damage, fault = BREAKS[what]
    directory = tmp_path / "copy"
    shutil.copytree(run, directory, ignore=shutil.ignore_patterns("*.sock"))
    damage(directory)
    faults = promises.broken(directory / RUN, [directory / "w1"])
    assert any(re.search(fault, text) for text in faults), faults


def test_a_receipt_for_what_is_not_there_and_a_node_that_stands_still_are_found(run: Path) -> None:
    run_dir, workers = run / RUN, [run / "w1"]
    before = promises.marks(run_dir, workers, 2.0**40)
    faults = promises.broken(run_dir, workers, Witness({b"lost"}), before)
    assert [text.partition(" ")[0] for text in faults] == ["submission", "trainer", "w1"]
