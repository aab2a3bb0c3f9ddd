"""Sampling supports as bytes: what is packed comes back, what is malformed is named."""

import random
import struct

import numpy as np
import pytest

from primerl.node.models.support import (
    pack_support,
    support_bytes,
    support_fault,
    unpack_support,
)
from primerl.protocol.rollouts import MAX_SUPPORT, cut_support, join_support

DRAWN = [7, 3, 1, 9]
ROWS = np.array([[8, 7, 2], [3, -1, -1], [-1, -1, -1], [9, 4, -1]], np.int32)
PACKED = bytes([2, 0, 255, 1]) + struct.pack("<3I", 2, 8, 4)


def test_a_support_travels_as_its_size_and_the_other_tokens() -> None:
    assert pack_support(ROWS, DRAWN) == PACKED
    back = unpack_support(PACKED, DRAWN)
    assert back.tolist() == [[7, 2, 8], [3, -1, -1], [-1, -1, -1], [9, 4, -1]]
    assert support_fault(PACKED, DRAWN, 1000, 0, 0.9) == ""


def test_supports_of_any_sizes_come_back() -> None:
    rng = random.Random(0)
    drawn = [rng.randrange(1000) for _ in range(50)]
    rows = np.full((50, MAX_SUPPORT), -1, np.int32)
    for at, token in enumerate(drawn):
        count = rng.choice([0, 1, 2, 7, 254, -1])
        others = rng.sample([one for one in range(1000) if one != token], max(0, count))
        chosen = [token, *others] if count >= 0 else []
        rng.shuffle(chosen)
        rows[at, : len(chosen)] = chosen
    data = pack_support(rows, drawn)
    assert support_fault(data, drawn, 1000, 0, 0.5) == ""
    back = unpack_support(data, drawn)
    for mine, theirs in zip(rows, back, strict=True):
        assert set(mine.tolist()) - {-1} == set(theirs.tolist()) - {-1}
    for first in (0, 1, 17, 50):
        cut = cut_support(data, 50, first)
        assert np.array_equal(
            np.sort(unpack_support(cut, drawn[:first]), axis=1)[:, -1:],
            np.sort(back[:first], axis=1)[:, -1:],
        )
        assert support_fault(cut, drawn[:first], 1000, 0, 0.5) == ""
    parts = [
        (cut_support(data, 50, 20), 20),
        (pack_support(rows[20:], drawn[20:]), 30),
    ]
    assert join_support(parts) == data


def test_a_reply_without_supports_leaves_none_for_the_whole() -> None:
    assert join_support([(PACKED, 4), (b"", 3)]) == b""
    assert cut_support(b"", 4, 2) == b""


@pytest.mark.parametrize(
    ("data", "top_k", "top_p", "wanted"),
    [
        (PACKED[:3], 0, 0.9, "3 bytes of supports for 4 tokens"),
        (PACKED[:-1], 0, 0.9, "bytes of supports"),
        (PACKED + b"\0", 0, 0.9, "bytes of supports"),
        (PACKED + bytes(4), 0, 0.9, "bytes of supports"),
        (PACKED[:4] + struct.pack("<3I", 2, 1000, 4), 0, 0.9, "token 1000 in a support"),
        (PACKED[:4] + struct.pack("<3I", 2, 2**32 - 1, 4), 0, 0.9, "in a support"),
        (PACKED[:4] + struct.pack("<3I", 2, 7, 4), 0, 0.9, "a drawn token occurs twice"),
        (PACKED[:4] + struct.pack("<3I", 8, 2, 4), 0, 0.9, "not in ascending order"),
        (PACKED[:4] + struct.pack("<3I", 2, 2, 4), 0, 0.9, "not in ascending order"),
        (PACKED, 2, 0.9, "a support of more than 2 tokens"),
        (PACKED, 3, 0.9, "a support of more than 3 tokens"),  # one is not stated
        (bytes([1, 0, 1, 0]) + struct.pack("<2I", 2, 4), 2, 1.0, "a support of fewer than 2"),
    ],
)
def test_what_is_no_support_is_named(data: bytes, top_k: int, top_p: float, wanted: str) -> None:
    assert wanted in support_fault(data, DRAWN, 1000, top_k, top_p)


def test_a_small_vocabulary_is_all_that_top_k_leaves() -> None:
    all_of_it = bytes([1, 1]) + struct.pack("<2I", 0, 1)
    assert support_fault(all_of_it, [1, 0], 2, 50, 1.0) == ""
    assert "more than 2 tokens" in support_fault(bytes([255, 255]), [1, 0], 2, 50, 1.0)


def test_the_bytes_of_a_support_are_bounded() -> None:
    assert [support_bytes(top_k) for top_k in (1, 20, 255, 10_000, 0)] == [1, 77, 1017, 1017, 1017]
