"""Snapshots from one process to another, by a file in shared memory.

A file is complete once its footer is written. Its content is not trusted: offsets and counts are checked before
anything is allocated or written. No torch here: the daemon reads.
"""

import contextlib
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError, StorageError
from ..weights.state import BITS, Changed, State, Tensor, numel
from ..weights.state_history import Edit, StepChanges, join_edits
from .backend import Snapshot

MAX_THREADS = 16
"""More threads copy no faster."""
AHEAD_THREADS = 2
"""Few: the delta is being encoded meanwhile, and the next export is a step away."""
MAX_WAITING = 1 << 30
"""Bytes in page-locked memory before the host writes them; exceeded by one tensor's changes at most."""


class DeviceEvent(Protocol):
    """An event on a device, such as torch.cuda.Event."""

    def synchronize(self) -> object:
        """Block until the event has occurred."""
        ...


class Piece(Protocol):
    """New values of some elements of one tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the piece holds until it is written."""
        ...

    def write(self, data: NDArray[Any]) -> Edit | None:
        """Write the elements into the whole tensor's bits; return where and over which, if few."""
        ...


@dataclass(frozen=True)
class HostPiece:
    """A piece in host memory, or being copied there."""

    start: int
    """Tensor position that `index` counts from; below 0 if the first elements belong to another tensor."""
    index: NDArray[np.int32] | None
    """Positions counted from `start`, increasing; None: `bits` are contiguous from there."""
    bits: NDArray[Any]
    ready: DeviceEvent | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the piece holds until it is written."""
        return self.bits.nbytes + (0 if self.index is None else self.index.nbytes)

    def wait(self) -> None:
        """Block until everything has arrived."""
        if self.ready is not None:
            self.ready.synchronize()

    def write(self, data: NDArray[Any]) -> Edit | None:
        """Write the elements into the whole tensor's bits; return where and over which, if few."""
        self.wait()
        if self.index is None:
            np.copyto(data[self.start : self.start + self.bits.size], self.bits)
            return None
        index = self.index.astype(np.int64)
        index += self.start
        return overwrite(data, index, self.bits)


def overwrite(data: NDArray[Any], index: NDArray[np.int64], bits: NDArray[Any]) -> Edit:
    """Write `bits` at `index`; return the difference."""
    older = data.take(index)
    data[index] = bits
    return Edit(index, older, bits)


@dataclass(frozen=True)
class TensorDiff:
    """Changes of one tensor found by an export."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    whole: bool
    """Whether the pieces are the whole tensor; otherwise they are its changes."""
    pieces: Sequence[Piece] = ()


class HostState:
    """Builder of states that holds the last one."""

    def __init__(self, *, threads: int = 0, ahead: bool = False) -> None:
        """`threads` is the number of copying threads, 0 for one per core, at most MAX_THREADS.

        With `ahead` the last state is copied while the next one is learned: build() then only writes changes,
        at the cost of memory for a second state.
        """
        self._threads = threads or min(MAX_THREADS, os.cpu_count() or 1)
        self._ahead = _Ahead() if ahead else None
        self._state: State | None = None

    @property
    def state(self) -> State | None:
        """State that the next one may be given as changes of; None: the next one has to be whole."""
        return self._state

    def build(self, diffs: Iterable[TensorDiff]) -> Snapshot:
        """Build the state described by `diffs`; a tensor may come in several parts.

        On failure no state is held any more. Raises EngineError for changes of a tensor that is not held.
        """
        base, self._state = self._state, None
        with ThreadPoolExecutor(self._threads) as pool:
            building = _Building(pool, base, self._ahead)
            for diff in diffs:
                building.add(diff)
            snapshot = building.finish()
        self._state = snapshot.state
        if self._ahead is not None:
            self._ahead.copy(snapshot.state)
        return snapshot

    def forget(self) -> None:
        """Drop the held state: the next state comes whole."""
        self._state = None

    def close(self) -> None:
        """End the threads that copy ahead; built states stay valid."""
        if self._ahead is not None:
            self._ahead.close()


class _Ahead:
    """Background copies of a state's tensors, to write the next state into."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(AHEAD_THREADS, thread_name_prefix="copy-ahead")
        self._copies: dict[str, tuple[Tensor, Future[NDArray[Any]]]] = {}

    def copy(self, state: State) -> None:
        """Copy tensors that are not copied yet."""
        self._copies = {
            name: self._copies[name]
            if name in self._copies and self._copies[name][0] is tensor
            else (tensor, self._pool.submit(tensor.data.copy))
            for name, tensor in state.items()
        }

    def take(self, name: str, tensor: Tensor) -> NDArray[Any] | None:
        """Return a copy of the data of `tensor`, owned by the caller; None if there is none."""
        copied, future = self._copies.pop(name, (None, None))
        return future.result() if future is not None and copied is tensor else None

    def close(self) -> None:
        """Drop the copies and end the threads."""
        self._copies = {}
        self._pool.shutdown(wait=True, cancel_futures=True)


class _Growing:
    """The next version of one tensor."""

    def __init__(self, diff: TensorDiff, old: Tensor | None) -> None:
        self.old = old
        self.data = None if old else np.empty(numel(diff.shape), BITS[diff.dtype])
        """The new bits; None while nothing has changed."""
        self.pieces: list[Piece] = []
        self.edits: list[Edit | None] = []
        """What each piece changed; None: anything in the tensor."""
        self._layout = (diff.dtype, diff.shape)

    def tensor(self) -> Tensor:
        """Return the tensor: the old one, if nothing has changed."""
        if self.data is None:
            assert self.old is not None
            return self.old
        return Tensor(*self._layout, self.data)

    def edit(self) -> Edit | None:
        """Return the difference from the old tensor; None: anywhere."""
        known = [edit for edit in self.edits if edit is not None]
        if len(known) < len(self.edits):
            return None
        known.sort(key=lambda edit: int(edit.positions[0]))
        return known[0] if len(known) == 1 else Edit(*map(np.concatenate, zip(*known, strict=True)))

    def write(self) -> None:
        """Write the received pieces."""
        if self.data is None:
            assert self.old is not None
            self.data = self.old.data.copy()
        for piece in self.pieces:
            self.edits.append(piece.write(self.data))
        self.pieces.clear()


class _Building:
    """One state being built: nothing is written while more is being found, then all at once.

    Threads that copy meanwhile would slow down the thread that makes many short calls to the device.
    """

    def __init__(self, pool: ThreadPoolExecutor, base: State | None, ahead: _Ahead | None) -> None:
        self._pool = pool
        self._base = base
        self._ahead = ahead
        self._growing: dict[str, _Growing] = {}
        self._waiting: dict[str, _Growing] = {}
        self._bytes = 0

    def add(self, diff: TensorDiff) -> None:
        """Add one more tensor, or more pieces of one."""
        if diff.name not in self._growing:
            self._growing[diff.name] = _Growing(diff, self._old(diff))
        if not diff.pieces:
            return
        growing = self._growing[diff.name]
        growing.pieces.extend(diff.pieces)
        self._waiting[diff.name] = growing
        self._bytes += sum(piece.nbytes for piece in diff.pieces)
        if self._bytes >= MAX_WAITING:
            self._write()

    def finish(self) -> Snapshot:
        """Return the state, with its changes from the base if all of it was compared with that."""
        self._write()
        state = {name: tensor.tensor() for name, tensor in self._growing.items()}
        compared = all(tensor.old is not None for tensor in self._growing.values())
        if self._base is None or not compared or state.keys() != self._base.keys():
            return Snapshot(state)
        edits = {name: tensor.edit() for name, tensor in self._growing.items() if tensor.edits}
        return Snapshot(state, self._base, _changed(state, edits))

    def _old(self, diff: TensorDiff) -> Tensor | None:
        """Return the tensor that the pieces of `diff` are changes of; None for a whole one."""
        if diff.whole:
            return None
        old = self._base.get(diff.name) if self._base is not None else None
        if old is None or (old.dtype, old.shape) != (diff.dtype, diff.shape):
            raise EngineError(
                f"a difference from {diff.name!r} came, which is not held: export everything once"
            )
        return old

    def _write(self) -> None:
        for name, growing in self._waiting.items():
            if growing.data is None and self._ahead and growing.old:
                growing.data = self._ahead.take(name, growing.old)
        list(self._pool.map(_Growing.write, self._waiting.values()))
        self._waiting.clear()
        self._bytes = 0


def _changed(state: State, edits: Mapping[str, Edit | None]) -> Changed:
    """Return where `state` differs from its base, with the bits there if few of every tensor changed."""
    known = {name: edit for name, edit in edits.items() if edit is not None}
    dtypes = {state[name].dtype for name in known}
    if len(known) == len(edits) and len(dtypes) == 1:
        return StepChanges(join_edits(dtypes.pop(), known))
    changed: dict[str, NDArray[np.int64] | None] = dict.fromkeys(edits)
    return changed | {name: edit.positions for name, edit in known.items()}


MEMORY = Path("/dev/shm")
MAGIC = b"prl-snp1"
ALIGN = 64
MAX_HEADER = 1 << 28
"""Largest header in bytes: 100 for a tensor and 12 for a piece are ample, models have some 10,000 of both."""


class _Piece(msgspec.Struct, frozen=True, array_like=True):
    start: int
    count: int
    bits_at: int
    index_at: int | None = None


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    whole: bool
    pieces: tuple[_Piece, ...]


class _Header(msgspec.Struct, frozen=True, array_like=True):
    writer: str
    number: int
    """Snapshots of a writer count from 1; 0 is a separate state."""
    tensors: tuple[_Entry, ...]


def exchange_directory(size: int, fallback: Path | None = None) -> Path:
    """Return a parent for the exchange directory: in memory if twice `size` bytes are free.

    `size` is that of a state. Otherwise `fallback`, or the directory of temporary files.
    """
    # a container may have 64 MiB there; a file is deleted before the next one is written
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2 * size:
        return MEMORY
    return fallback or Path(tempfile.gettempdir())


# -- writing --------------------------------------------------------------------------------------


class SnapshotFiles:
    """Numbering of one writer's files, by which a reader notices a missed one."""

    def __init__(self) -> None:
        self._writer = secrets.token_hex(8)
        self._number = 0

    def following(self, path: Path) -> "StateFile":
        """Return the file of the next snapshot."""
        self._number += 1
        return StateFile(path, self._writer, self._number)

    def apart(self, path: Path) -> "StateFile":
        """Return the file of a state outside the sequence of snapshots."""
        return StateFile(path, self._writer, 0)


class StateFile:
    """One file being written; it gets its name once it is complete. A context manager."""

    def __init__(self, path: Path, writer: str, number: int) -> None:
        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        self._writer = writer
        self._number = number
        self._entries: list[_Entry] = []
        self._descriptor = -1
        self._at = ALIGN
        """Offset of the next array; never 0: the first bytes are unused."""

    def __enter__(self) -> Self:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            self._descriptor = os.open(self._partial, flags, 0o600)
        except OSError as error:
            raise self._failed(error) from error
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            os.close(self._descriptor)
            with contextlib.suppress(FileNotFoundError):
                self._partial.unlink()

    def add(self, diff: TensorDiff) -> None:
        """Write the changes of one tensor. Raises StorageError."""
        pieces: list[_Piece] = []
        for piece in diff.pieces:
            if not isinstance(piece, HostPiece):
                raise TypeError("only pieces in memory can be written: read the file first")
            piece.wait()
            index_at = None if piece.index is None else self._put(piece.index)
            pieces.append(_Piece(piece.start, piece.bits.size, self._put(piece.bits), index_at))
        entry = _Entry(diff.name, diff.dtype, diff.shape, diff.whole, tuple(pieces))
        self._entries.append(entry)

    def _put(self, array: NDArray[Any]) -> int:
        """Write one array; return its offset."""
        at = self._at
        self._write(array.data.cast("B"))
        self._at += -self._at % ALIGN
        return at

    def _write(self, data: memoryview | bytes) -> None:
        remaining = memoryview(data)
        try:
            while remaining.nbytes:
                done = os.pwrite(self._descriptor, remaining, self._at)
                remaining = remaining[done:]
                self._at += done
        except OSError as error:
            raise self._failed(error) from error

    def _finish(self) -> None:
        """Write the header, its offset, its length, and the magic."""
        start = self._at
        header = msgspec.msgpack.encode(_Header(self._writer, self._number, tuple(self._entries)))
        self._write(header + _footer(start, len(header)))
        try:
            self._partial.rename(self._path)
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> StorageError:
        return StorageError(
            f"the policy cannot be handed over by {self._path} ({error}): make room there"
        )


def _footer(start: int, size: int) -> bytes:
    return start.to_bytes(8, "little") + size.to_bytes(8, "little") + MAGIC


FOOTER = len(_footer(0, 0))


# -- reading --------------------------------------------------------------------------------------


class SnapshotReader:
    """Builds states from the files of a PolicyExporter; holds the last one, as base of the next.

    One thread at a time. Reading deletes a file, also if it fails.
    """

    def __init__(self, *, threads: int = 0, ahead: bool = False) -> None:
        """`threads` and `ahead` as in HostState."""
        self._threads = threads
        self._host = HostState(threads=threads, ahead=ahead)
        self._last = ("", 0)
        """Writer and number of the held snapshot."""

    def snapshot(self, path: Path) -> Snapshot:
        """Read the policy in `path`; if the file holds changes, apply them to the previous policy.

        Raises EngineError if the file is truncated, not a snapshot, or not the successor of the last one;
        nothing is held then: have a whole one written.
        """
        last, self._last = self._last, ("", 0)
        try:
            with _opened(path) as file:
                header = file.header
                whole = all(entry.whole for entry in header.tensors)
                if not whole and (header.writer, header.number - 1) != last:
                    raise EngineError(
                        f"snapshot {header.number} in {path} does not follow the last one that was "
                        "read: export everything once"
                    )
                snapshot = self._host.build(file.found())
        except EngineError:
            self._host.forget()
            raise
        self._last = (header.writer, header.number)
        return snapshot

    def state(self, path: Path) -> State:
        """Read the whole policy in `path`, without affecting snapshots. Raises EngineError."""
        with _opened(path) as file:
            return HostState(threads=self._threads).build(file.found()).state

    def close(self) -> None:
        """End the threads that copy ahead."""
        self._host.close()


@contextlib.contextmanager
def _opened(path: Path) -> "Generator[_Reading]":
    """Yield the file, deleted as soon as it is open. Raises EngineError."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError as error:
        raise EngineError(
            f"the policy in {path} cannot be read ({error}): export it again"
        ) from error
    try:
        path.unlink(missing_ok=True)
        yield _Reading(descriptor, path)
    except OSError as error:
        raise EngineError(
            f"the policy in {path} cannot be read ({error}): export it again"
        ) from error
    finally:
        os.close(descriptor)


class _Reading:
    """One file being read; its end is truncated once read, to keep no second copy."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self._path = path
        self.header, self._end = self._read_header()
        self._check_all()
        self._lock = threading.Lock()
        self._left: list[int] = []
        """Offsets of unread pieces, ascending."""
        self._read: set[int] = set()

    def found(self) -> Iterator[TensorDiff]:
        """Yield all tensors in order, then all pieces, the last ones first."""
        pieces: list[tuple[int, _FilePiece, _Entry]] = []
        for entry in self.header.tensors:
            yield TensorDiff(entry.name, entry.dtype, entry.shape, entry.whole)
            for place in entry.pieces:
                at = place.bits_at if place.index_at is None else min(place.index_at, place.bits_at)
                pieces.append((at, _FilePiece(self, at, place), entry))
        pieces.sort(key=lambda piece: piece[0])
        self._left = [at for at, _, _ in pieces]
        for _, piece, entry in reversed(pieces):
            yield TensorDiff(entry.name, entry.dtype, entry.shape, entry.whole, [piece])

    def read_into(self, out: NDArray[Any], at: int) -> None:
        """Fill `out` from offset `at`. Raises EngineError."""
        remaining = out.data.cast("B")
        while remaining.nbytes:
            done = os.preadv(self._descriptor, [remaining], at)
            if not done:
                raise self._fault("it has lost its end")
            remaining = remaining[done:]
            at += done

    def done(self, at: int) -> None:
        """Mark the piece at offset `at` as read, and truncate the file behind unread pieces."""
        with self._lock:
            self._read.add(at)
            end = None
            while self._left and self._left[-1] in self._read:
                end = self._left.pop()
            if end is not None:
                os.ftruncate(self._descriptor, end)

    def fault(self, name: str) -> EngineError:
        """Return the error for a piece that does not fit its tensor."""
        return self._fault(f"a piece of {name!r} does not fit")

    def _fault(self, what: str) -> EngineError:
        return EngineError(f"the policy in {self._path} is damaged ({what}): export it again")

    def _read_header(self) -> tuple[_Header, int]:
        """Read the header and its offset: pieces lie before it."""
        size = os.fstat(self._descriptor).st_size
        footer = os.pread(self._descriptor, FOOTER, max(0, size - FOOTER))
        if len(footer) != FOOTER or footer[16:] != MAGIC:
            raise self._fault("its end is missing")
        start, length = (int.from_bytes(footer[at : at + 8], "little") for at in (0, 8))
        if length > MAX_HEADER or start + length + FOOTER != size:
            raise self._fault("its header is not where it should be")
        encoded = os.pread(self._descriptor, length, start)
        try:
            header = msgspec.msgpack.decode(encoded, type=_Header)
        except msgspec.MsgspecError as error:
            raise self._fault(f"its header cannot be read: {error}") from error
        for entry in header.tensors:
            if entry.dtype not in BITS or min(entry.shape, default=0) < 0:
                raise self._fault(f"{entry.name!r} is no tensor that a state can hold")
        return header, start

    def _check_all(self) -> None:
        """Check that no tensor comes twice and no byte belongs to two pieces, which bounds memory."""
        if len({entry.name for entry in self.header.tensors}) < len(self.header.tensors):
            raise self._fault("a tensor comes twice")
        spans = sorted(
            span
            for entry in self.header.tensors
            for piece in entry.pieces
            for span in _spans(entry, piece)
        )
        at = ALIGN
        for start, end in spans:
            if start < at or end <= start:
                raise self._fault("its pieces overlap")
            at = end
        if at > self._end:
            raise self._fault("its pieces are not all there")
        for entry in self.header.tensors:
            self._check(entry)

    def _check(self, entry: _Entry) -> None:
        """Check that pieces lie in their tensor, and that those of a whole tensor cover it."""
        count = numel(entry.shape)
        dense = [
            (piece.start, piece.start + piece.count)
            for piece in entry.pieces
            if piece.index_at is None
        ]
        if any(start < 0 or end > count for start, end in dense):
            raise self.fault(entry.name)
        if entry.whole and (
            len(dense) < len(entry.pieces)
            or [0, *(end for _, end in dense)] != [*(start for start, _ in dense), count]
        ):
            raise self.fault(entry.name)


def _spans(entry: _Entry, piece: _Piece) -> list[tuple[int, int]]:
    """Return the byte ranges of a piece in the file."""
    spans = [(piece.bits_at, piece.bits_at + piece.count * BITS[entry.dtype].itemsize)]
    if piece.index_at is not None:
        spans.append((piece.index_at, piece.index_at + piece.count * 4))
    return spans


@dataclass(frozen=True)
class _FilePiece:
    """A piece that is read when written: straight into the tensor, if it is dense."""

    file: _Reading
    at: int
    told: _Piece
    nbytes: int = 0
    """It holds no memory."""

    def write(self, data: NDArray[Any]) -> Edit | None:
        """Read the elements into the whole tensor's bits; return where and over which, if few."""
        piece = self.told
        if piece.index_at is None:
            self.file.read_into(data[piece.start : piece.start + piece.count], piece.bits_at)
            self.file.done(self.at)
            return None
        index, bits = np.empty(piece.count, np.int32), np.empty(piece.count, data.dtype)
        self.file.read_into(index, piece.index_at)
        self.file.read_into(bits, piece.bits_at)
        self.file.done(self.at)
        first, last = piece.start + int(index[0]), piece.start + int(index[-1])
        if first < 0 or last >= data.size or not (index[1:] > index[:-1]).all():
            raise self.file.fault("one of its tensors")
        return HostPiece(piece.start, index, bits).write(data)
