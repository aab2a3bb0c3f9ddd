"""The parts of a block come back as they were, in about as many bits as they carry."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support import weights_cases as cases

from primerl.node.weights.blocks import (
    BLOCK,
    DENSE,
    DENSE_FROM,
    RAW,
    SKIP,
    SMALL,
    SPARSE,
    Changes,
    StreamReader,
    StreamWriter,
    decode_changes,
    encode_block,
    encode_changes,
    find,
    join_moves,
    join_positions,
    max_body,
    read_moves,
    read_positions,
    where,
    write_moves,
    write_positions,
)

# -- positions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 1e-6, 0.001, 0.03, 0.15, 0.17, 0.5, 0.99, 1.0])
def test_positions_of_any_density_come_back(share: float) -> None:
    flags = np.random.default_rng(1).random(300_000) < share
    assert np.array_equal(where(flags), np.flatnonzero(flags))
    writer = StreamWriter()
    write_positions(writer, where(flags), flags.size)
    body = writer.finish()
    if flags.any():
        coded = read_positions(StreamReader(body), flags.size)
        assert np.array_equal(join_positions([coded], [0]), np.flatnonzero(flags))
    mean = flags.mean()
    if 0 < mean < DENSE_FROM:
        bound = -(mean * np.log2(mean) + (1 - mean) * np.log2(1 - mean)) * flags.size
        assert 8 * len(body) < 1.05 * bound + 100


# -- moves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [3, 12, 90, 9000])
@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<u8"])
def test_moves_of_any_size_come_back(most: int, dtype: str) -> None:
    rng = np.random.default_rng(most)
    moves = np.maximum(1, np.abs(rng.normal(0, most / 3, 50_001))).astype(dtype)
    moves[[7, 50_000]] = np.iinfo(dtype).max
    writer = StreamWriter()
    write_moves(writer, moves)
    coded = read_moves(StreamReader(writer.finish()), moves.size, 8 * moves.itemsize)
    assert (join_moves([coded], moves.dtype) == moves).all()


# -- blocks --------------------------------------------------------------------------------------


def entropy(values: NDArray[Any]) -> float:
    """Bits of `values`, each coded by its frequency."""
    _, counts = np.unique(values, return_counts=True)
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def trained(share: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """bf16 weights before and after a normal step that changes about this share of them."""
    rng = np.random.default_rng(5)
    weights = rng.normal(0, 0.02, BLOCK).astype(np.float32)
    step = (3.6e-5 * share * rng.normal(0, 1, BLOCK)).astype(np.float32)

    def bits(values: NDArray[np.float32]) -> NDArray[Any]:
        wide = values.view(np.uint32)
        return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype("<u2")

    return bits(weights), bits(weights + step)


def changes_of(base: NDArray[Any], new: NDArray[Any], dtype: str = "BF16") -> Changes:
    """The changes among all positions."""
    found = find(base, new, dtype, np.arange(base.size))
    assert isinstance(found, Changes)
    return found


@pytest.mark.parametrize("share", [0.01, 0.1, 1, 2, 8, 40])
def test_delta_is_within_5_percent_of_the_entropy_of_gaps_and_moves(share: float) -> None:
    base, new = trained(share)
    method, body = encode_block(base, new, "BF16")
    changes = changes_of(base, new)
    bound = entropy(np.diff(changes.index, prepend=-1)) + entropy(changes.moves)
    # The gaps of a thousand changes have more values than changes: their frequencies say too little.
    assert 8 * len(body) < (1.05 if changes.index.size > 5000 else 1.15) * bound
    assert (cases.decoded_block(method, body, base, "BF16")[0] == new).all()


@pytest.mark.parametrize(("share", "method"), [(0.2, SPARSE), (1.0, SPARSE), (40.0, DENSE)])
def test_changes_are_coded_as_the_block_is(share: float, method: int) -> None:
    base, new = trained(share)
    changes = changes_of(base, new)
    coded = encode_block(base, new, "BF16")
    assert coded == encode_changes(changes, BLOCK)
    assert coded == encode_block(base, new, "BF16", changes.index)
    assert coded[0] == method
    out, told = cases.decoded_block(*coded, base, "BF16")
    assert np.array_equal(out, new)
    if method == DENSE:
        assert told is None
    else:
        assert told is not None
        assert np.array_equal(told, changes.index)


def test_each_block_takes_the_method_that_suits_it() -> None:
    base, new = trained(40.0)
    assert encode_block(base, base, "BF16") == (SKIP, b"")
    assert encode_block(None, base, "BF16")[0] == RAW
    assert encode_block(base, np.zeros_like(base), "BF16")[0] == RAW
    assert encode_block(base[:SMALL], new[:SMALL], "BF16")[0] == DENSE
    one = base[:SMALL].copy()
    one[77] ^= 1
    method, body = encode_block(base[:SMALL], one, "BF16")
    assert method == SPARSE
    assert len(body) < 12


@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32", "F64"])
@pytest.mark.parametrize("size", [1, 2, 50, 5000, 60_000])
def test_no_body_is_longer_than_a_decoder_accepts(dtype: str, size: int) -> None:
    """Also where the sample, taken at regular intervals, says the opposite of the whole."""
    bits = cases.BITS[dtype]
    base = np.zeros(size, bits)
    new = np.full(size, np.iinfo(bits).max // 3, bits)
    new[:: max(1, size // (1 << 12))] = 1
    for part in (new, np.where(np.arange(size) % 7 < 4, new, base)):
        method, body = encode_changes(changes_of(base, part, dtype), size)
        assert len(body) <= max_body(size, bits.itemsize)
        assert (cases.decoded_block(method, body, base, dtype)[0] == part).all()


@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32", "F64"])
def test_blocks_that_are_decoded_together_come_back_as_each_alone(dtype: str) -> None:
    """Of any density, with bitmaps and shifts that differ, and with moves of one and of many levels."""
    rng = np.random.default_rng(3)
    bits = cases.BITS[dtype]
    coded: list[tuple[memoryview, slice]] = []
    expected: list[Changes] = []
    for number, share in enumerate((0.3, 1e-3, 0.02, 0.02, 0.6, 1e-5, 0.1)):
        size, start = 3001 * (number + 1), 10_000 * (number % 3)
        index = np.flatnonzero(rng.random(size) < share)
        index = index if index.size else np.array([size - 1])
        moves = rng.geometric(0.3 + 0.1 * number, index.size).astype(bits)
        moves[moves == 0] = 1
        moves[0] = np.iinfo(bits).max
        method, body = encode_changes(Changes(index, moves), size)
        assert method == SPARSE
        coded.append((memoryview(body), slice(start, start + size)))
        expected.append(Changes(index + start, moves))
    changes, parts = decode_changes(coded, bits)
    assert len(parts) == len(expected)
    for part, alone in zip(parts, expected, strict=True):
        assert np.array_equal(changes.index[part], alone.index)
        assert np.array_equal(changes.moves[part], alone.moves)
