import os
from pathlib import Path

import pytest
from training_cases import batch

from primerl.node.errors import StorageError
from primerl.node.training.checkpoints import COMPLETE, Checkpoints
from primerl.node.training.counting import CountingBackend
from primerl.node.weights.state import digests

PARTS = {"buffer": b"\x00\xff", "ledger.msgpack": b""}


class FullDisk(CountingBackend):
    async def save(self, directory: Path) -> None:
        raise OSError(28, "No space left on device")


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


async def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    backend = await counting(tmp_path, 0)
    for step in (8, 9, 10, 11):
        await checkpoints.write(step, {}, backend)
    assert checkpoints.steps() == [10, 11]
    assert sorted(os.listdir(tmp_path)) == ["step_10", "step_11"]


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


@pytest.mark.parametrize("file", ["parts/buffer", "backend/counting.json"])
async def test_an_altered_file_is_noticed_before_anything_is_resumed(
    tmp_path: Path, file: str
) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    await checkpoints.write(4, PARTS, await counting(tmp_path, 1))
    altered = tmp_path / "step_4" / file
    altered.write_bytes(altered.read_bytes() + b" ")
    with pytest.raises(StorageError, match="altered"):
        await checkpoints.read(4)


async def test_a_smuggled_or_missing_file_is_noticed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    backend = await counting(tmp_path, 0)
    await checkpoints.write(1, PARTS, backend)
    await checkpoints.write(2, PARTS, backend)
    (tmp_path / "step_1" / "parts" / "extra").write_bytes(b"")
    (tmp_path / "step_2" / "parts" / "buffer").unlink()
    for step in (1, 2):
        with pytest.raises(StorageError, match="altered"):
            await checkpoints.read(step)


async def test_a_renamed_checkpoint_does_not_pass_for_another_step(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    await checkpoints.write(4, PARTS, await counting(tmp_path, 0))
    (tmp_path / "step_4").rename(tmp_path / "step_9")
    with pytest.raises(StorageError, match="another kind"):
        await checkpoints.read(9)


@pytest.mark.parametrize("record", [b"", b"{", b'{"format":1,"step":4,"files":3}'])
async def test_a_broken_record_is_a_storage_error(tmp_path: Path, record: bytes) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    await checkpoints.write(4, PARTS, await counting(tmp_path, 0))
    (tmp_path / "step_4" / COMPLETE).write_bytes(record)
    with pytest.raises(StorageError, match="remove"):
        await checkpoints.read(4)


async def test_a_full_disk_leaves_the_older_checkpoint_of_the_step(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    await checkpoints.write(4, PARTS, await counting(tmp_path, 0))
    with pytest.raises(StorageError, match="free some disk"):
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
