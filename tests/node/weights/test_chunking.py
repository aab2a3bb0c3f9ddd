"""Chunks: nothing is lost, few for a large version, enough to swap for a small one."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl.node.weights.chunking import PARTS, SMALLEST, cut


@given(st.lists(st.binary(max_size=40)), st.integers(1, 17))
def test_cut_loses_nothing_and_fills_every_chunk_but_the_last(
    parts: list[bytes], size: int
) -> None:
    pieces = list(cut(iter(parts), size))
    assert b"".join(pieces) == b"".join(parts)
    assert all(len(piece) == size for piece in pieces[:-1])
    assert all(0 < len(piece) <= size for piece in pieces)


@pytest.mark.parametrize("size", [0, -1, 2**24 + 1])
def test_cut_refuses_chunks_that_no_peer_would_take(size: int) -> None:
    with pytest.raises(ValueError, match="chunk size"):
        next(cut(iter([b"x"]), size))


def test_chunks_grow_with_what_came_before_up_to_the_largest() -> None:
    mib = b"\0" * 2**20
    sizes = [len(piece) for piece in cut(iter([mib] * 96), 2**20)]
    assert sizes[:PARTS] == [SMALLEST] * PARTS
    assert all(a <= b for a, b in pairwise(sizes[:-1]))
    assert max(sizes) == 2**20
    assert sum(sizes) == 96 * 2**20


@given(st.lists(st.integers(0, 3 * SMALLEST), max_size=8))
def test_equal_payloads_give_equal_chunks_however_they_were_split(splits: list[int]) -> None:
    whole = bytes(1000) * (sum(splits) // 1000 + 1)
    at = 0
    parts: list[bytes] = []
    for size in splits:
        parts.append(whole[at : at + size])
        at += size
    joined = b"".join(parts)
    assert list(cut(iter(parts), 2**20)) == list(cut(iter([joined]), 2**20))
