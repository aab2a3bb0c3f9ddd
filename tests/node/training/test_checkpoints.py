import asyncio
import logging
import multiprocessing
import os
import time
from copy import copy
from pathlib import Path
from typing import Any

import pytest
from support.counting_backend import CountingBackend
from support.training_cases import batch

from primerl.node.errors import EngineError, StorageError
from primerl.node.storage.partial import whole_directory
from primerl.node.storage.run_files import written_to_model
from primerl.node.training.checkpoint import COMPLETE, Checkpoints
from primerl.node.weights.state import digests

PARTS = {"buffer": b"\x00\xff", "ledger.msgpack": b""}


class FullDisk(CountingBackend):
    async def save(self, directory: Path) -> None:
        raise OSError(28, "No space left on device")


class Staging(CountingBackend):
    """Can save while it trains; the write waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.copy = CountingBackend()
        self.fails = False

    async def stage(self) -> None:
        self.copy = copy(self)

    async def write_staged(self, directory: Path) -> None:
        await self.go.wait()
        if self.fails:
            raise EngineError("a rank died")
        await self.copy.save(directory)


async def staging(tmp_path: Path) -> Staging:
    backend = Staging()
    await backend.start(tmp_path)
    await backend.step(batch(1))
    return backend


async def counting(tmp_path: Path, steps: int) -> CountingBackend:
    backend = CountingBackend()
    await backend.start(tmp_path)
    for step in range(1, steps + 1):
        await backend.step(batch(step))
    return backend


async def test_what_was_written_comes_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=2)
    assert checkpoints.latest() is None
    backend = await counting(tmp_path, 3)
    await checkpoints.write(3, PARTS, backend)
    assert checkpoints.latest() == 3
    assert await checkpoints.read(3) == PARTS
    resumed = await counting(tmp_path, 1)
    await resumed.load(checkpoints.backend_directory(3))
    assert digests(await resumed.state()) == digests(await backend.state())


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ({"keep_last": 2}, [6, 7]),
        ({"keep_last": 1, "keep_interval": 3}, [3, 6, 7]),
        ({"keep_last": 2, "keep_first": True}, [0, 6, 7]),
    ],
)
async def test_the_newest_are_kept_and_what_is_wanted_beside_them(
    tmp_path: Path, keep: dict[str, Any], kept: list[int]
) -> None:
    checkpoints = Checkpoints(tmp_path, **keep)
    backend = await counting(tmp_path, 0)
    for step in range(8):
        await checkpoints.write(step, {}, backend)
    assert checkpoints.steps() == kept
    assert sorted(os.listdir(tmp_path)) == [f"step_{step}" for step in kept]


async def test_a_checkpoint_without_its_record_does_not_exist(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=3)
    backend = await counting(tmp_path, 0)
    await checkpoints.write(1, PARTS, backend)
    await checkpoints.write(2, PARTS, backend)
    (tmp_path / "step_2" / COMPLETE).unlink()
    (tmp_path / "step_7.partial").mkdir()
    assert checkpoints.latest() == 1
    with pytest.raises(StorageError, match="step_2"):
        await checkpoints.read(2)


DAMAGE: dict[str, tuple[str, bytes | None, str]] = {
    "a part was altered": ("parts/buffer", b"other", "altered"),
    "the backend's file was altered": ("backend/counting.json", b"{}", "altered"),
    "a file is missing": ("parts/buffer", None, "altered"),
    "a file is smuggled": ("parts/extra", b"", "altered"),
    "no record": (COMPLETE, b"", "remove"),
    "half a record": (COMPLETE, b"{", "remove"),
    "another record": (COMPLETE, b'{"format":1,"step":4,"files":3}', "remove"),
}
"""File, what is in it instead (None: it is gone), and what the error says."""


@pytest.mark.parametrize("damage", DAMAGE)
async def test_damage_is_noticed_before_anything_is_resumed(tmp_path: Path, damage: str) -> None:
    file, held, says = DAMAGE[damage]
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    await checkpoints.write(4, PARTS, await counting(tmp_path, 1))
    path = tmp_path / "step_4" / file
    if held is None:
        path.unlink()
    else:
        path.write_bytes(held)
    with pytest.raises(StorageError, match=says):
        await checkpoints.read(4)


async def test_a_renamed_checkpoint_does_not_pass_for_another_step(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    await checkpoints.write(4, PARTS, await counting(tmp_path, 0))
    (tmp_path / "step_4").rename(tmp_path / "step_9")
    with pytest.raises(StorageError, match="another kind"):
        await checkpoints.read(9)


async def test_a_checkpoint_of_a_newer_release_is_no_damage_and_none_before_it_takes_its_place(
    tmp_path: Path,
) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for step in (3, 4):
        await checkpoints.write(step, PARTS, await counting(tmp_path, 1))
    record = tmp_path / "step_4" / "COMPLETE"
    record.write_text('{"format": 2, "step": 4, "digests": ["of another kind"]}')
    with pytest.raises(StorageError, match=r"4 is of a newer release .*format 2, this one reads 1"):
        await checkpoints.read_newest()
    assert record.exists()


async def test_a_full_disk_leaves_the_older_checkpoint_of_the_step(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    await checkpoints.write(4, PARTS, await counting(tmp_path, 0))
    with pytest.raises(StorageError, match="free disk space"):
        await checkpoints.write(4, {}, FullDisk())
    assert await checkpoints.read(4) == PARTS
    assert sorted(os.listdir(tmp_path)) == ["step_4"]


async def test_writing_a_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    backend = await counting(tmp_path, 0)
    await checkpoints.write(4, PARTS, backend)
    await checkpoints.write(4, {"buffer": b"new"}, backend)
    assert await checkpoints.read(4) == {"buffer": b"new"}


async def test_a_replacement_that_a_crash_cut_in_two_is_undone(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    await checkpoints.write(4, PARTS, await counting(tmp_path, 0))
    (tmp_path / "step_4").rename(tmp_path / "step_4.replaced")
    assert checkpoints.latest() == 4
    assert await checkpoints.read(4) == PARTS


@pytest.mark.parametrize("name", ["../evil", "", "A", ".hidden", "a/b"])
async def test_a_part_cannot_name_a_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="part name"):
        await Checkpoints(tmp_path, keep_last=1).write(1, {name: b""}, CountingBackend())


async def test_a_begun_checkpoint_is_of_then_and_does_not_exist_before_it_is_whole(
    tmp_path: Path,
) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    backend = await staging(tmp_path)
    expected = digests(await backend.state())
    parts = dict(PARTS)
    await checkpoints.begin(1, parts, backend)
    parts.clear()
    await backend.step(batch(2))
    assert checkpoints.latest() is None
    backend.go.set()
    await checkpoints.finish()
    assert await checkpoints.read(1) == PARTS
    resumed = await counting(tmp_path, 0)
    await resumed.load(checkpoints.backend_directory(1))
    assert digests(await resumed.state()) == expected != digests(await backend.state())


async def test_one_checkpoint_is_written_at_a_time(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    backend = await staging(tmp_path)
    await checkpoints.begin(1, PARTS, backend)
    second = asyncio.create_task(checkpoints.begin(2, PARTS, backend))
    await asyncio.sleep(0.05)
    assert not second.done()
    backend.go.set()
    await second
    assert checkpoints.steps()[0] == 1
    await checkpoints.finish()
    assert checkpoints.steps() == [1, 2]
    await checkpoints.finish()


async def test_a_failure_in_the_background_is_raised_once_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    backend = await staging(tmp_path)
    backend.fails = True
    backend.go.set()
    await checkpoints.begin(1, PARTS, backend)
    with pytest.raises(EngineError, match="rank died"):
        await checkpoints.begin(2, PARTS, backend)
    await checkpoints.finish()
    assert os.listdir(tmp_path) == []


async def test_closing_waits_and_only_logs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    backend = await staging(tmp_path)
    backend.go.set()
    await checkpoints.begin(1, PARTS, backend)
    await checkpoints.close()
    assert checkpoints.steps() == [1]
    backend.fails = True
    await checkpoints.begin(2, PARTS, backend)
    with caplog.at_level(logging.WARNING):
        await checkpoints.close()
    assert "not written: a rank died" in caplog.text


async def test_a_caller_that_waits_may_be_cancelled_and_the_writing_goes_on(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    backend = await staging(tmp_path)
    await checkpoints.begin(1, PARTS, backend)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await checkpoints.finish()
    backend.go.set()
    await checkpoints.close()
    assert checkpoints.steps() == [1]


async def test_a_backend_that_cannot_stage_is_saved_at_once(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    await checkpoints.begin(1, PARTS, await counting(tmp_path, 1))
    assert checkpoints.steps() == [1]


async def test_the_newest_that_is_whole_is_read_and_the_others_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=9)
    assert await checkpoints.read_newest() is None
    backend = await counting(tmp_path, 1)
    for step in (1, 2, 3, 4):
        await checkpoints.write(step, {"step": str(step).encode()}, backend)
    (tmp_path / "step_4" / COMPLETE).unlink()
    (tmp_path / "step_3" / "parts" / "step").write_bytes(b"4")
    with caplog.at_level(logging.WARNING):
        assert await checkpoints.read_newest() == (2, {"step": b"2"})
    assert "checkpoint 4 was never completed" in caplog.text
    assert "checkpoint 3 was altered" in caplog.text
    with pytest.raises(StorageError, match="checkpoint 3 was altered"):
        await checkpoints.read(3)
    for step in (1, 2):
        (tmp_path / f"step_{step}" / "parts" / "step").unlink()
    with pytest.raises(StorageError, match="checkpoint 3"):
        await checkpoints.read_newest()


async def test_what_comes_after_a_step_is_set_aside_and_never_deleted(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=4)
    backend = await counting(tmp_path, 1)
    for step in (1, 2, 3):
        await checkpoints.write(step, PARTS, backend)
    (tmp_path / "step_3" / COMPLETE).unlink()
    assert checkpoints.set_aside(3) is None
    assert checkpoints.set_aside(1) == tmp_path / "void_1"
    assert sorted(os.listdir(tmp_path / "void_1")) == ["step_2", "step_3"]
    assert checkpoints.steps() == [1]
    await checkpoints.write(2, PARTS, backend)
    assert checkpoints.set_aside(0) == tmp_path / "void_2"
    for step in range(4, 10):
        await checkpoints.write(step, PARTS, backend)
    assert sorted(os.listdir(tmp_path / "void_1")) == ["step_2", "step_3"]
    assert await Checkpoints(tmp_path / "void_1", keep_last=1).read(2) == PARTS


class Stuck(CountingBackend):
    """Its third checkpoint is never finished."""

    async def save(self, directory: Path) -> None:
        await super().save(directory)
        if self.batches[-1].step == 3:
            await asyncio.sleep(600)


def save_until_killed(directory: Path) -> None:
    """The life of a process that is killed while it saves."""

    async def live() -> None:
        checkpoints, backend = Checkpoints(directory, keep_last=2), Stuck()
        await backend.start(directory)
        for step in (1, 2, 3):
            await backend.step(batch(step))
            await checkpoints.begin(step, PARTS, backend)

    asyncio.run(live())


def kill_in_the_middle(directory: Path) -> None:
    """Run the above until the third checkpoint is half there, then SIGKILL."""
    process = multiprocessing.get_context("spawn").Process(
        target=save_until_killed, args=(directory,)
    )
    process.start()
    try:
        deadline = time.monotonic() + 60
        while not (directory / "step_3.partial" / "backend").exists():
            assert process.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.kill()
        process.join()


async def test_sigkill_in_the_middle_of_a_save_leaves_the_older_one_as_the_newest(
    tmp_path: Path,
) -> None:
    await asyncio.to_thread(kill_in_the_middle, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["step_1", "step_2", "step_3.partial"]
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    assert await checkpoints.read_newest() == (2, PARTS)
    await checkpoints.write(3, PARTS, await counting(tmp_path, 3))
    assert sorted(os.listdir(tmp_path)) == ["step_2", "step_3"]


def test_what_a_crash_left_is_not_mixed_into_the_next_attempt(tmp_path: Path) -> None:
    (tmp_path / "a.partial").mkdir()
    (tmp_path / "a.partial" / "torn").touch()
    with whole_directory(tmp_path / "a", written_to_model) as partial:
        assert list(partial.iterdir()) == []


def test_an_error_of_the_disk_names_the_target(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(StorageError, match=r"cannot write .*below"),
        whole_directory(tmp_path / "file" / "below", written_to_model),
    ):
        pass
