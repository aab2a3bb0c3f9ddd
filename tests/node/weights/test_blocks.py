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
    Block,
    encode_blocks,
    encode_changes,
    encode_raw,
    find_known,
    max_body,
)
from primerl.node.weights.sparse import (
    Changes,
    Positions,
    code_moves,
    code_positions,
    decode_changes,
    encode_sparse,
    join_moves,
    join_positions,
    read_moves,
    read_positions,
    where,
)
from primerl.node.weights.streams import StreamReader

Coded = tuple[int, bytes]

# -- positions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [1e-5, 0.001, 0.03, 0.15, 0.17, 0.5, 0.99, 1.0])
def test_positions_of_any_density_come_back(share: float) -> None:
    flags = np.random.default_rng(1).random(300_000) < share
    assert np.array_equal(where(flags), np.flatnonzero(flags))
    index = np.flatnonzero(flags)
    (body,) = code_positions(index, np.array([index.size]), [flags.size])
    coded = read_positions(StreamReader(body), flags.size)
    assert np.array_equal(join_positions([coded], [0]), index)
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
    (body,) = code_moves(moves, np.array([moves.size]))
    coded = read_moves(StreamReader(body), moves.size, 8 * moves.itemsize)
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
    return find_known([Block(base, new, dtype, np.arange(base.size))])[0]


def encode_block(base: NDArray[Any], new: NDArray[Any], hint: Positions | None = None) -> Coded:
    (coded,) = encode_blocks([Block(base, new, "BF16", hint)])
    return coded


def coded_alone(changes: Changes, size: int) -> Coded:
    (coded,) = encode_changes(changes, [changes.index.size], [size])
    return coded


@pytest.mark.parametrize("share", [0.01, 0.1, 1, 2, 8, 40])
def test_delta_is_within_5_percent_of_the_entropy_of_gaps_and_moves(share: float) -> None:
    base, new = trained(share)
    method, body = encode_block(base, new)
    changes = changes_of(base, new)
    bound = entropy(np.diff(changes.index, prepend=-1)) + entropy(changes.moves)
    # The gaps of a thousand changes have more values than changes: their frequencies say too little.
    assert 8 * len(body) < (1.05 if changes.index.size > 5000 else 1.15) * bound
    assert (cases.decoded_block(method, body, base, "BF16")[0] == new).all()


@pytest.mark.parametrize(("share", "method"), [(0.2, SPARSE), (1.0, SPARSE), (40.0, DENSE)])
def test_changes_are_coded_as_the_block_is(share: float, method: int) -> None:
    base, new = trained(share)
    changes = changes_of(base, new)
    coded = encode_block(base, new)
    assert coded == coded_alone(changes, BLOCK)
    assert coded == encode_block(base, new, changes.index)
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
    assert encode_block(base, base) == (SKIP, b"")
    assert encode_raw(base)[0] == RAW
    assert encode_block(base, np.zeros_like(base))[0] == RAW
    assert encode_block(base[:SMALL], new[:SMALL])[0] == DENSE
    one = base[:SMALL].copy()
    one[77] ^= 1
    method, body = encode_block(base[:SMALL], one)
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
        method, body = coded_alone(changes_of(base, part, dtype), size)
        assert len(body) <= max_body(size, bits.itemsize)
        assert (cases.decoded_block(method, body, base, dtype)[0] == part).all()


@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32", "F64"])
def test_blocks_that_are_coded_together_are_coded_and_come_back_as_each_alone(dtype: str) -> None:
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
        method, body = coded_alone(Changes(index, moves), size)
        assert method == SPARSE
        coded.append((memoryview(body), slice(start, start + size)))
        expected.append(Changes(index + start, moves))
    together = Changes(
        np.concatenate(
            [alone.index - part.start for alone, (_, part) in zip(expected, coded, strict=True)]
        ),
        np.concatenate([alone.moves for alone in expected]),
    )
    counts = [alone.index.size for alone in expected]
    sizes = [part.stop - part.start for _, part in coded]
    assert encode_sparse(together, counts, sizes) == [body for body, _ in coded]
    changes, parts = decode_changes(coded, bits)
    assert len(parts) == len(expected)
    for part, alone in zip(parts, expected, strict=True):
        assert np.array_equal(changes.index[part], alone.index)
        assert np.array_equal(changes.moves[part], alone.moves)
