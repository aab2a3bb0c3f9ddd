"""Checkpoint files agree with the safetensors library, survive a crash whole, and are read as hostile."""

from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import weights_cases as cases

from primerl.node.errors import StorageError
from primerl.node.storage.chunk_store import Disk
from primerl.node.weights.checkpoint import (
    read_checkpoint,
    read_flat,
    read_metadata,
    write_checkpoint,
)
from primerl.node.weights.state import BITS, State

ONE_PATH = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
STATE = {"w": cases.bf16(0x8000, 0x7FC1, 3), "m": cases.tensor("F32", (2, 1), bytes(range(8)))}


@ONE_PATH
@given(st.dictionaries(cases.NAMES, cases.tensors(), max_size=5))
def test_file_gives_back_every_bit_and_the_library_agrees(tmp_path: Path, state: State) -> None:
    path = tmp_path / "x.safetensors"
    write_checkpoint(path, state, disk=Disk(fsync=False))
    assert cases.same(read_checkpoint(path), state)
    theirs = dict(safetensors.deserialize(path.read_bytes()))
    assert theirs.keys() == state.keys()
    for name, t in state.items():
        assert (theirs[name]["dtype"], tuple(theirs[name]["shape"])) == (t.dtype, t.shape)
        assert bytes(theirs[name]["data"]) == t.data.tobytes()


@ONE_PATH
@given(st.dictionaries(cases.NAMES, cases.tensors(), max_size=5))
def test_all_bytes_are_read_at_once_into_memory_of_the_caller(tmp_path: Path, state: State) -> None:
    path = tmp_path / "x.safetensors"
    write_checkpoint(path, state, disk=Disk(fsync=False))
    flat = np.zeros(path.stat().st_size, np.uint8)
    found = read_flat(path, flat)
    assert found.keys() == state.keys()
    for name, t in state.items():
        dtype, shape, part = found[name]
        assert (dtype, shape) == (t.dtype, t.shape)
        assert flat[part].tobytes() == t.data.tobytes()


def test_file_that_the_library_wrote_is_read(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "x.safetensors"
    arrays = {"m": STATE["m"].data.view("<f4").reshape(2, 1), "i": STATE["w"].data.view("<i2")}
    numpy.save_file(arrays, path, metadata={"format": "pt"})
    state = read_checkpoint(path)
    assert state["m"].data.tobytes() == STATE["m"].data.tobytes()
    assert (state["i"].dtype, state["i"].data.tobytes()) == ("I16", STATE["w"].data.tobytes())
    assert read_metadata(path) == {"format": "pt"}


def test_metadata_comes_back_and_equal_states_give_equal_files(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    write_checkpoint(first, STATE, metadata={"version": "7"})
    write_checkpoint(second, dict(reversed(list(STATE.items()))), metadata={"version": "7"})
    assert first.read_bytes() == second.read_bytes()
    assert read_metadata(first) == {"version": "7"}
    assert cases.same(read_checkpoint(first), STATE)


class PowerLoss(BaseException):
    """Not an Exception: nothing may clean up after it."""


class FailingDisk(Disk):
    """Stops before, in, or after the write, and before the rename."""

    def __init__(self, at: str, error: BaseException) -> None:
        super().__init__(fsync=False)
        self._at = at
        self._error = error

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
        super().write(path, list(parts)[:1] if self._at == "write" else parts)
        if self._at == "write":
            raise self._error

    def rename(self, source: Path, target: Path) -> None:
        if self._at == "rename":
            raise self._error
        super().rename(source, target)


@pytest.mark.parametrize("at", ["write", "rename"])
@pytest.mark.parametrize("error", [PowerLoss(), OSError(28, "No space left on device")])
def test_crash_leaves_the_old_file_whole(tmp_path: Path, at: str, error: BaseException) -> None:
    path = tmp_path / "x.safetensors"
    write_checkpoint(path, STATE)
    expected = PowerLoss if isinstance(error, PowerLoss) else StorageError
    with pytest.raises(expected):
        write_checkpoint(path, {"other": cases.bf16(1)}, disk=FailingDisk(at, error))
    assert cases.same(read_checkpoint(path), STATE)
    assert isinstance(error, PowerLoss) or list(tmp_path.iterdir()) == [path]


def test_full_disk_says_so(tmp_path: Path) -> None:
    error = OSError(28, "No space left on device")
    with pytest.raises(StorageError, match="full: free space"):
        write_checkpoint(tmp_path / "x", STATE, disk=FailingDisk("write", error))


def with_header(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else msgspec.json.encode(header)
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "hostile",
    [
        b"",
        b"\x01",
        b"\xff" * 8,
        (100).to_bytes(8, "little") + b"{}",
        with_header(b"[" * 100_000, b""),
        with_header(b'{"\xff": 1}', b""),
        with_header({"w": 1}, b""),
        with_header({"__metadata__": {"a": 1}}, b""),
        with_header({}, b"x"),
        with_header({"w": entry("BF16", [2], 0, 4)}, b"abc"),
        with_header({"w": entry("BF16", [2], 0, 4)}, b"abcde"),
        with_header({"w": entry("BF16", [3], 0, 4)}, b"abcd"),
        with_header({"w": entry("BF16", [2**40, 2**40], 0, 4)}, b"abcd"),
        with_header({"w": entry("BF16", [-1, -2], 0, 4)}, b"abcd"),
        with_header({"w": entry("Q4", [4], 0, 4)}, b"abcd"),
        with_header({"w": entry("U8", [4], 4, 0)}, b"abcd"),
        with_header({"w": entry("U8", [2], 1, 3)}, b"abcd"),
        with_header({"v": entry("U8", [4], 0, 4), "w": entry("U8", [4], 0, 4)}, b"abcd"),
        with_header({"v": entry("U8", [1], 0, 1), "w": entry("U8", [2], 2, 4)}, b"abcd"),
    ],
)
def test_hostile_file_is_refused(tmp_path: Path, hostile: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(hostile)
    with pytest.raises(StorageError, match="not a sound safetensors file"):
        read_checkpoint(path)
    with pytest.raises(StorageError, match="not a sound safetensors file"):
        read_flat(path, np.empty(len(hostile), np.uint8))


@ONE_PATH
@given(st.data())
def test_mutated_file_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "x.safetensors"
    write_checkpoint(path, STATE, disk=Disk(fsync=False))
    blob = bytearray(path.read_bytes())
    blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(blob[: data.draw(st.integers(0, len(blob)))])
    try:
        assert all(t.data.dtype == BITS[t.dtype] for t in read_checkpoint(path).values())
    except StorageError:
        return


def test_missing_file_says_which(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"nowhere\.safetensors"):
        read_checkpoint(tmp_path / "nowhere.safetensors")


def test_reserved_tensor_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="names"):
        write_checkpoint(tmp_path / "x", {"__metadata__": cases.bf16(1)})
