"""Every file that a trainer and a worker keep, damaged in every way, one at a time; then both start again.

Each goes on, or ends with one NodeError: never another error, never in silence.
"""

import asyncio
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.swarm import Running, Swarm, side_by_side

from primerl.node.errors import NodeError, first_cause

STEPS = 60
KEEP = {"keep_last": 2}


def not_utf8(path: Path) -> None:
    """Make some bytes in the middle no UTF-8."""
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 2] = b"\xff\xfe"
    path.write_bytes(data)


def directory(path: Path) -> None:
    """Put a directory in its place."""
    path.unlink()
    path.mkdir()


def empty(path: Path) -> None:
    """Leave nothing in it."""
    path.write_bytes(b"")


def last_byte(path: Path) -> None:
    """Change its last byte."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 0xFF]))


def cut(path: Path) -> None:
    """Keep its first half."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


FOUND: dict[str, Callable[[Path], None]] = {
    "COMPLETE": not_utf8,
    "cursor": not_utf8,
    "metrics.jsonl": last_byte,
    "ledger.db": last_byte,
    "model/": directory,
}
"""Damages that once ended a node with a traceback, or that it did not notice, by a part of the file's name."""
DAMAGES: tuple[Callable[[Path], None], ...] = (not_utf8, directory, empty, last_byte, cut)


def kind_of(path: str) -> str:
    """The name of a file without the numbers and digests by which files of a kind differ."""
    return re.sub(r"[0-9a-f]{8,}|(?<=/)[0-9a-f]{2}(?=/)|\d+", "*", path)


async def ran(tmp_path: Path, model_dir: Path) -> tuple[Path, list[str]]:
    """Directories of a trainer and a worker that were stopped, and the files in them."""
    whole = tmp_path / "whole"
    async with Swarm(whole, model_dir, max_steps=STEPS, checkpoint=KEEP) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        await swarm.wait_step(2)
        await swarm.stop_worker("w1")
        await swarm.stop_trainer()
    files = (path for path in whole.rglob("*") if path.is_file() and path.stat().st_size)
    return whole, sorted(path.relative_to(whole).as_posix() for path in files)


async def error_of(running: Running) -> Exception | None:
    """The error with which a node ended; None if it ended in order."""
    assert running.task is not None
    try:
        await running.task
    except BaseExceptionGroup as group:
        error = first_cause(group)
        assert isinstance(error, Exception)
        return error
    except Exception as error:
        return error
    return None


async def starts_again(directory: Path, model_dir: Path) -> str:
    """Start both nodes: "" if they train a step together, else the error that ends one of them, in one line.

    Fails for an error that is no NodeError.
    """
    async with Swarm(directory, model_dir, max_steps=STEPS, checkpoint=KEEP) as swarm:
        try:
            await swarm.start_trainer(resume=True)
        except NodeError as error:
            return str(error)
        begun = (await swarm.trainer.status())["version"]
        worker = swarm.add_worker("w1")
        assert worker.task is not None
        trained = asyncio.create_task(swarm.wait_step(max(begun, 0) + 2))
        async with asyncio.timeout(50.0):
            await asyncio.wait({worker.task, trained}, return_when=asyncio.FIRST_COMPLETED)
        error = None
        if worker.task.done():
            trained.cancel()
            error = await error_of(worker)
        elif trained.exception() is not None:
            error = await error_of(swarm.trainer)
        if error is not None and not isinstance(error, NodeError):
            raise error
        return "" if error is None else str(error)


async def each(
    tmp_path: Path, model_dir: Path, whole: Path, cases: list[tuple[str, Callable[[Path], None]]]
) -> dict[tuple[str, str], str]:
    """What came of each case: "" where both nodes go on, else the line that says why one does not."""
    said: dict[tuple[str, str], str] = {}

    async def case(one: tuple[str, Callable[[Path], None]]) -> None:
        name, damage = one
        place = tmp_path / f"{len(said)}"
        said[name, damage.__name__] = "under way"
        shutil.copytree(whole, place)
        damage(place / name)
        said[name, damage.__name__] = await starts_again(place, model_dir)
        shutil.rmtree(place, ignore_errors=True)

    for start in range(0, len(cases), 8):
        await side_by_side(case, cases[start : start + 8])
    return said


def check(said: dict[tuple[str, str], str]) -> None:
    """Only a ledger, or a directory in a file's place, may keep a node from going on, and then it is named."""
    for (name, damage), line in said.items():
        assert "\n" not in line
        assert not line or damage == "directory" or "ledger.db" in name, (name, damage, line)
        assert not line or Path(name).name in line, line
        if "ledger.db" in name and damage == "cut":
            assert "is damaged" in line


@pytest.mark.parametrize("node", ["r/", "w1/"])
async def test_a_damaged_file_of_any_kind_is_mended_or_named_in_one_line(
    tmp_path: Path, model_dir: Path, node: str
) -> None:
    whole, files = await ran(tmp_path, model_dir)
    cases: list[tuple[str, Callable[[Path], None]]] = []
    kinds = {kind_of(name): name for name in files if name.startswith(node)}
    for number, name in enumerate(kinds.values()):
        usual = (damage for part, damage in FOUND.items() if part in name)
        cases.append((name, next(usual, (empty, cut, last_byte)[number % 3])))
    check(await each(tmp_path, model_dir, whole, cases))


@pytest.mark.nightly
async def test_every_damage_of_every_file_is_mended_or_named_in_one_line(
    tmp_path: Path, model_dir: Path
) -> None:
    whole, files = await ran(tmp_path, model_dir)
    cases = [(name, damage) for name in files for damage in DAMAGES]
    check(await each(tmp_path, model_dir, whole, cases))
