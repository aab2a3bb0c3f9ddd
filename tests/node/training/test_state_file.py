"""A snapshot that crosses a file is the one that was found; no damaged file is believed."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import weights_cases as cases

from primerl.node.errors import EngineError, StorageError
from primerl.node.training import snapshot as state_file
from primerl.node.training.snapshot import (
    HostPiece,
    HostState,
    SnapshotFiles,
    SnapshotReader,
    TensorDiff,
    exchange_directory,
)
from primerl.node.weights.state import BITS, State, Tensor


def tensor(values: Iterable[int], dtype: str = "BF16") -> Tensor:
    data = np.array(list(values), BITS[dtype])
    return Tensor(dtype, (data.size,), data)


def whole(state: State, cut: int = 1 << 20) -> list[TensorDiff]:
    """Everything of `state`, `cut` elements a piece."""
    return [
        TensorDiff(name, one.dtype, one.shape, True, [
            HostPiece(at, None, one.data[at : at + cut]) for at in range(0, one.data.size, cut)
        ])
        for name, one in state.items()
    ]  # fmt: skip


def sparse(old: Tensor, new: Tensor, cut: int) -> list[HostPiece]:
    """Where `new` differs, by position, `cut` elements a piece."""
    pieces: list[HostPiece] = []
    for at in range(0, new.data.size, cut):
        differs = np.flatnonzero(old.data[at : at + cut] != new.data[at : at + cut])
        if differs.size:
            bits = new.data[at : at + cut][differs]
            pieces.append(HostPiece(at, differs.astype(np.int32), bits))
    return pieces


def difference(old: State, new: State, cut: int = 1 << 20) -> list[TensorDiff]:
    return [
        TensorDiff(name, one.dtype, one.shape, False, sparse(old[name], one, cut))
        for name, one in new.items()
    ]


def write(files: SnapshotFiles, path: Path, found: Iterable[TensorDiff]) -> Path:
    with files.following(path) as file:
        for one in found:
            file.add(one)
    return path


FIRST = {"w": tensor(range(100)), "b": tensor([7, 8], "F32"), "none": tensor([])}
SECOND = FIRST | {"w": tensor([*range(50), 9, *range(51, 99), 1])}


# -- what crosses ---------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 59), st.integers(0, 65535))), max_size=5),
    st.integers(1, 70),
    st.integers(1, 3),
)
def test_any_writes_arrive_as_numpy_would_do_them(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[list[tuple[int, int]]],
    cut: int,
    threads: int,
) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    files, reader = SnapshotFiles(), SnapshotReader(threads=threads)
    data = np.zeros(60, np.uint16)
    last: State = {"w": Tensor("BF16", (3, 20), data.copy())}
    before = reader.snapshot(write(files, path, whole(last, cut))).state
    assert cases.same(before, last)
    for step in steps:
        for at, value in step:
            data[at] = value
        new = {"w": Tensor("BF16", (3, 20), data.copy())}
        found = reader.snapshot(write(files, path, difference(last, new, cut)))
        assert cases.same(found.state, new)
        changed = found.changed_since(before)
        assert changed is not None
        differs = np.flatnonzero(last["w"].data != data)
        assert changed.keys() == ({"w"} if differs.size else set())
        told = changed.get("w")
        assert told is None or np.array_equal(told, differs)
        assert cases.same(before, last)  # what was given away has not moved
        last, before = new, found.state


@pytest.mark.parametrize("ahead", [False, True])
def test_what_did_not_change_is_the_same_object_and_the_order_stays(
    tmp_path: Path, ahead: bool
) -> None:
    files, reader = SnapshotFiles(), SnapshotReader(threads=2, ahead=ahead)
    first = reader.snapshot(write(files, tmp_path / "a", whole(FIRST, 30)))
    second = reader.snapshot(write(files, tmp_path / "a", difference(FIRST, SECOND, 30)))
    reader.close()
    assert cases.same(second.state, SECOND)
    assert list(second.state) == list(first.state) == list(FIRST)
    assert second.state["b"] is first.state["b"]
    assert second.changed_since(first.state) is second.changed
    assert [*second.changed["w"]] == [50, 99]  # type: ignore[misc]
    assert list(tmp_path.iterdir()) == []


def test_a_file_gets_shorter_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"w{at}": tensor(range(1000)) for at in range(5)}
    left: list[int] = []
    truncate = os.ftruncate

    def watched(descriptor: int, size: int) -> None:
        left.append(size)
        truncate(descriptor, size)

    monkeypatch.setattr(os, "ftruncate", watched)
    path = write(SnapshotFiles(), tmp_path / "a", whole(state))
    assert cases.same(SnapshotReader(threads=1).state(path), state)
    assert left == sorted(left, reverse=True)
    assert len(left) == 5
    assert left[-1] == state_file.ALIGN


def test_a_state_is_read_without_touching_the_snapshots(tmp_path: Path) -> None:
    files, reader = SnapshotFiles(), SnapshotReader(threads=1)
    first = reader.snapshot(write(files, tmp_path / "a", whole(FIRST)))
    with files.apart(tmp_path / "b") as file:
        for one in whole(SECOND):
            file.add(one)
    assert cases.same(reader.state(tmp_path / "b"), SECOND)
    second = reader.snapshot(write(files, tmp_path / "a", difference(FIRST, SECOND)))
    assert second.base is first.state


def test_memory_is_taken_only_if_there_is_ample_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_file, "MEMORY", tmp_path)
    assert exchange_directory(1) == tmp_path
    assert exchange_directory(1 << 60, tmp_path / "disk") == tmp_path / "disk"
    assert exchange_directory(1 << 60).is_dir()
    monkeypatch.setattr(state_file, "MEMORY", tmp_path / "nowhere")
    assert exchange_directory(1, tmp_path / "disk") == tmp_path / "disk"


# -- what is refused ------------------------------------------------------------------------------


def test_a_difference_from_a_snapshot_that_was_not_read_is_refused_until_a_whole_one_comes(
    tmp_path: Path,
) -> None:
    files, reader = SnapshotFiles(), SnapshotReader(threads=1)
    reader.snapshot(write(files, tmp_path / "a", whole(FIRST)))
    write(files, tmp_path / "lost", difference(FIRST, SECOND)).unlink()
    for _ in range(2):  # the second one follows what was refused
        with pytest.raises(EngineError, match=r"does not follow .*: export everything once"):
            reader.snapshot(write(files, tmp_path / "a", difference(SECOND, SECOND)))
    found = reader.snapshot(write(files, tmp_path / "a", whole(SECOND)))
    assert found.base is None
    other = SnapshotFiles()
    other.following(tmp_path / "x")
    other.following(tmp_path / "x")
    other.following(tmp_path / "x")
    with pytest.raises(EngineError, match="does not follow"):
        reader.snapshot(write(other, tmp_path / "a", difference(SECOND, SECOND)))


def test_a_state_that_is_a_difference_is_refused(tmp_path: Path) -> None:
    path = write(SnapshotFiles(), tmp_path / "a", difference(FIRST, SECOND))
    with pytest.raises(EngineError, match="not held"):
        SnapshotReader(threads=1).state(path)


def test_a_file_cut_anywhere_is_refused_and_gone(tmp_path: Path) -> None:
    data = write(SnapshotFiles(), tmp_path / "a", whole(FIRST)).read_bytes()
    path = tmp_path / "a"
    reader = SnapshotReader(threads=1)
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(EngineError, match="export it again"):
            reader.snapshot(path)
        assert not path.exists()
    with pytest.raises(EngineError, match="export it again"):
        reader.snapshot(path)
    path.write_bytes(data)
    assert cases.same(reader.snapshot(path).state, FIRST)


def test_a_write_that_fails_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="make room"):
        write(SnapshotFiles(), tmp_path / "nowhere" / "a", whole(FIRST))
    with pytest.raises(ValueError, match="stop"), SnapshotFiles().following(tmp_path / "a"):
        raise ValueError("stop")
    assert list(tmp_path.iterdir()) == []


def forged(path: Path, tensors: list[Any], data: bytes = bytes(512)) -> Path:
    """A file with any header over 512 bytes of nothing."""
    header = msgspec.msgpack.encode(["w", 1, tensors])
    sizes = len(data).to_bytes(8, "little") + len(header).to_bytes(8, "little")
    path.write_bytes(data + header + sizes + state_file.MAGIC)
    return path


DENSE, POSITIONS = [0, 10, 64, None], [0, 3, 128, 64]
"""Pieces: start, count, where the bits are, where the positions are."""


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("no such type", [["w", "BF17", [10], True, [DENSE]]]),
        ("a shape below 0", [["w", "BF16", [-10], True, [DENSE]]]),
        ("a huge tensor", [["w", "BF16", [1 << 40], True, [DENSE]]]),
        ("a huge piece", [["w", "BF16", [1 << 40], True, [[0, 1 << 40, 64, None]]]]),
        ("a piece too short", [["w", "BF16", [11], True, [DENSE]]]),
        ("a hole", [["w", "BF16", [20], True, [DENSE, [11, 9, 128, None]]]]),
        ("positions in a whole one", [["w", "BF16", [3], True, [POSITIONS]]]),
        ("no pieces", [["w", "BF16", [3], True, []]]),
        ("an empty piece", [["w", "BF16", [0], True, [[0, 0, 64, None]]]]),
        ("the same bytes twice", [[n, "BF16", [10], True, [DENSE]] for n in "ab"]),
        ("the same name twice", [["w", "BF16", [0], True, []]] * 2),
        ("bytes before the first", [["w", "BF16", [10], True, [[0, 10, -64, None]]]]),
        ("no header at all", [7]),
    ],
    ids=str,
)
def test_a_header_that_does_not_fit_is_refused_before_anything_is_made(
    tmp_path: Path, name: str, tensors: list[Any]
) -> None:
    del name
    path = forged(tmp_path / "a", tensors)
    with pytest.raises(EngineError, match=r"damaged .*: export it again"):
        SnapshotReader(threads=1).snapshot(path)


@pytest.mark.parametrize(
    ("name", "piece", "positions"),
    [
        ("falling", [0, 3, 128, 64], [2, 1, 0]),
        ("twice", [0, 3, 128, 64], [1, 1, 2]),
        ("beyond", [98, 3, 128, 64], [0, 1, 2]),
        ("before", [-1, 3, 128, 64], [0, 1, 2]),
        ("below", [0, 3, 128, 64], [-1, 1, 2]),
        ("dense and beyond", [91, 10, 64, None], []),
        ("dense and before", [-1, 10, 64, None], []),
    ],
    ids=str,
)
def test_positions_that_are_not_in_their_tensor_are_refused(
    tmp_path: Path, name: str, piece: list[Any], positions: list[int]
) -> None:
    del name
    reader, state = SnapshotReader(threads=1), {"w": FIRST["w"]}

    def base() -> None:
        reader.snapshot(write(SnapshotFiles(), tmp_path / "a", whole(state)))
        reader._last = ("w", 0)  # pyright: ignore[reportPrivateUsage]

    base()
    good = np.zeros(128, np.int32)
    good[16:19] = [0, 2, 3]
    fine = forged(tmp_path / "b", [["w", "BF16", [100], False, [[0, 3, 128, 64]]]], good.tobytes())
    assert reader.snapshot(fine).base is not None  # the forger's hand is not what is refused
    base()
    good[16 : 16 + len(positions)] = positions
    bad = forged(tmp_path / "c", [["w", "BF16", [100], False, [piece]]], good.tobytes())
    with pytest.raises(EngineError, match="does not fit"):
        reader.snapshot(bad)


@pytest.mark.parametrize(
    "found",
    [
        TensorDiff("v", "BF16", (100,), False),
        TensorDiff("w", "BF16", (10, 10), False),
        TensorDiff("w", "F16", (100,), False),
    ],
    ids=["another name", "another shape", "another type"],
)
def test_a_difference_from_another_tensor_is_refused_and_nothing_held(found: TensorDiff) -> None:
    host = HostState(threads=1)
    with pytest.raises(EngineError, match="not held"):
        host.build([found])
    host.build(whole({"w": FIRST["w"]}))
    with pytest.raises(EngineError, match="export everything once"):
        host.build([found])
    assert host.state is None
