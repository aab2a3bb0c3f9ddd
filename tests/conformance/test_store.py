"""What every Store promises, and what a FileStore promises about crashes and bad disks."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.memory_store import MemoryStore

from primerl.crypto.hashing import digest
from primerl.node.errors import StorageError
from primerl.node.storage.chunk_store import (
    TEMPORARY,
    Disk,
    FileStore,
    QuotaExceeded,
    Store,
    write_atomic,
)

Maker = Callable[[int], Store]


@pytest.fixture(params=["memory", "file"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Maker:
    """A store of so many bytes."""
    if request.param == "memory":
        return lambda limit: MemoryStore(max_bytes=limit)
    return lambda limit: FileStore(tmp_path / "chunks", max_bytes=limit, fsync=False)


# -- every store -------------------------------------------------------------------------------


def test_what_was_put_is_found_by_its_digest(make: Maker) -> None:
    store = make(1000)
    name = store.put(b"weights")
    assert name == digest(b"weights")
    assert store.get(name) == b"weights"
    assert store.has(name)
    assert store.size(name) == 7
    assert store.names() == {name}
    assert store.total_bytes() == 7


def test_absent_names_are_absent_whatever_they_look_like(make: Maker) -> None:
    store = make(1000)
    for name in (digest(b"other"), b"", b"../../etc/passwd", bytes(31), bytes(33)):
        assert store.get(name) is None
        assert not store.has(name)
        assert store.size(name) is None
        store.delete(name)


def test_empty_blob_is_a_blob(make: Maker) -> None:
    store = make(0)
    assert store.get(store.put(b"")) == b""


def test_putting_twice_keeps_one(make: Maker) -> None:
    store = make(10)
    assert store.put(b"12345678") == store.put(b"12345678")
    assert store.total_bytes() == 8


def test_quota_holds_and_deleting_makes_room(make: Maker) -> None:
    store = make(10)
    name = store.put(b"12345678")
    with pytest.raises(QuotaExceeded, match="limit of 10"):
        store.put(b"abc")
    assert store.names() == {name}
    store.put(b"ab")
    store.delete(name)
    assert store.total_bytes() == 2
    assert store.get(store.put(b"87654321")) == b"87654321"


def test_collect_keeps_exactly_the_named_chunks(make: Maker) -> None:
    store = make(1000)
    names = [store.put(bytes([i]) * (i + 1)) for i in range(5)]
    assert store.collect({names[1], names[3], digest(b"absent")}) == 1 + 3 + 5
    assert store.names() == {names[1], names[3]}
    assert store.get(names[3]) == bytes([3]) * 4
    assert store.total_bytes() == 6


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(blobs=st.lists(st.binary(max_size=50), max_size=10), data=st.data())
def test_store_behaves_like_a_dictionary(
    make: Maker, blobs: list[bytes], data: st.DataObject
) -> None:
    store = make(1000)
    store.collect(set())
    model: dict[bytes, bytes] = {}
    for blob in blobs:
        model[store.put(blob)] = blob
        if data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(model)))
            store.delete(gone)
            del model[gone]
    assert store.names() == model.keys()
    assert {name: store.get(name) for name in model} == model
    assert store.total_bytes() == sum(map(len, model.values()))


# -- files -------------------------------------------------------------------------------------


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def test_files_outlive_the_process_under_hexadecimal_names(tmp_path: Path) -> None:
    name = FileStore(tmp_path, max_bytes=100).put(b"weights")
    text = name.hex()
    assert files(tmp_path) == [tmp_path / text[:2] / text[2:4] / text]
    again = FileStore(tmp_path, max_bytes=100)
    assert again.total_bytes() == 7
    assert again.get(name) == b"weights"


@pytest.mark.parametrize("broken", [b"", b"weight", b"weightz", b"weights and more"])
def test_corrupt_file_is_deleted_and_can_be_put_again(
    tmp_path: Path, broken: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    name = FileStore(tmp_path, max_bytes=100).put(b"weights")
    files(tmp_path)[0].write_bytes(broken)
    store = FileStore(tmp_path, max_bytes=100)
    assert store.get(name) is None
    assert "corrupt" in caplog.text
    assert files(tmp_path) == []
    assert not store.has(name)
    assert store.total_bytes() == 0
    assert store.get(store.put(b"weights")) == b"weights"


def test_file_that_vanished_is_absent(tmp_path: Path) -> None:
    store = FileStore(tmp_path, max_bytes=100)
    name = store.put(b"weights")
    files(tmp_path)[0].unlink()
    assert store.get(name) is None
    assert store.get(store.put(b"weights")) == b"weights"


def test_foreign_files_are_neither_served_nor_deleted(tmp_path: Path) -> None:
    name = digest(b"secret")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"secret")
    chunks = tmp_path / "chunks"
    place = chunks / name.hex()[:2] / name.hex()[2:4] / name.hex()
    place.parent.mkdir(parents=True)
    place.symlink_to(elsewhere)
    (chunks / name.hex()).write_bytes(b"secret")  # in the wrong folder
    (chunks / "notes.txt").write_bytes(b"mine")
    store = FileStore(chunks, max_bytes=100)
    assert store.names() == set()
    assert store.collect(set()) == 0
    assert (chunks / "notes.txt").exists()


class PowerLoss(BaseException):
    """Not an Exception: nothing may clean up after it, as nothing does after SIGKILL."""


class MortalDisk(Disk):
    """Dies at the n-th step; a write that it dies in has left half of the bytes."""

    def __init__(self, steps: int) -> None:
        super().__init__(fsync=False)
        self._left = steps

    def _step(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise PowerLoss

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
        self._step()
        if self._left == 0:
            path.write_bytes(b"".join(parts)[:3])
            raise PowerLoss
        super().write(path, parts)

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        super().rename(source, target)

    def sync(self, directory: Path) -> None:
        self._step()
        super().sync(directory)


@pytest.mark.parametrize("steps", range(12))
def test_death_between_any_two_writes_loses_nothing_acknowledged(
    tmp_path: Path, steps: int
) -> None:
    acknowledged: list[bytes] = []
    dying = FileStore(tmp_path / "chunks", max_bytes=100, disk=MortalDisk(steps))

    def fill() -> None:
        for blob in (b"first blob", b"second blob", b"third blob"):
            acknowledged.append(dying.put(blob))

    with pytest.raises(PowerLoss):
        fill()
    store = FileStore(tmp_path / "chunks", max_bytes=100)
    for name in acknowledged:
        assert store.get(name)
    for name in store.names():
        assert store.get(name), "a file under its final name is whole"
    assert not [path for path in files(tmp_path) if path.name.startswith(TEMPORARY)]
    assert len(files(tmp_path)) == len(store.names())
    for blob in (b"first blob", b"second blob", b"third blob"):
        assert store.get(store.put(blob)) == blob


class FullDisk(Disk):
    """Has no space left at the given step."""

    def __init__(self, step: str, number: int) -> None:
        super().__init__(fsync=False)
        self._step = step
        self._number = number

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
        super().write(path, parts)
        if self._step == "write":
            raise OSError(self._number, "out of luck")

    def sync(self, directory: Path) -> None:
        if self._step == "sync":
            raise OSError(self._number, "out of luck")


@pytest.mark.parametrize("step", ["write", "sync"])
@pytest.mark.parametrize(("number", "words"), [(28, "full: free space"), (5, "check the disk")])
def test_disk_error_is_one_clear_line_and_leaves_no_debris(
    tmp_path: Path, step: str, number: int, words: str
) -> None:
    store = FileStore(tmp_path, max_bytes=10, disk=FullDisk(step, number))
    for _ in range(3):  # the quota does not leak away either
        with pytest.raises(StorageError, match=words):
            store.put(b"weights")
    assert not [path for path in files(tmp_path) if path.name.startswith(TEMPORARY)]
    assert store.total_bytes() == 0


class CountingDisk(Disk):
    """Notes the order of what is made durable."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
        self.calls.append("write")
        super().write(path, parts)

    def rename(self, source: Path, target: Path) -> None:
        self.calls.append("rename")
        super().rename(source, target)

    def sync(self, directory: Path) -> None:
        self.calls.append(f"sync {len(directory.parts)}")
        super().sync(directory)


def test_data_is_synced_before_its_name_and_the_name_before_the_answer(tmp_path: Path) -> None:
    disk = CountingDisk()
    store = FileStore(tmp_path / "chunks", max_bytes=100, disk=disk)
    store.put(b"weights")
    depth = len(tmp_path.parts)
    made = [f"sync {depth + level}" for level in (0, 1, 2)]
    assert disk.calls == [*made, "write", "rename", f"sync {depth + 3}"]
    disk.calls.clear()
    store.put(b"weights")
    assert disk.calls == []


def test_atomic_write_replaces_whole_files_and_keeps_them_private(tmp_path: Path) -> None:
    path = tmp_path / "record"
    write_atomic(path, [b"old"])
    write_atomic(path, [b"n", memoryview(b"ew")])
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]
