"""Encoding hidden states: the decoded states equal the originals up to the encoding's precision."""

import numpy as np
import pytest
import torch
from support.pipeline_cases import shape_of

from primerl.node.errors import EngineError
from primerl.node.pipeline.activations import pack, rounded, unpack
from primerl.node.pipeline.frames import Array, Frame, FrameLimits, Kind, decode, encode, read_head
from primerl.protocol.pipelines import Encoding

WIDTH = 64
ENCODINGS: tuple[Encoding, ...] = ("raw", "fp8", "int8")
DTYPES = (torch.float32, torch.bfloat16)
WITHIN: dict[Encoding, float] = {"raw": 0.0, "fp8": 2.0**-4, "int8": 1 / 254}
"""Of a number for fp8 (3 bits of mantissa), of the token's largest for int8."""


def states(dtype: torch.dtype) -> torch.Tensor:
    """Tokens of very different sizes, one of zeros, and channels that outweigh the rest."""
    made = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))
    made[:, 3] *= 200
    made *= torch.tensor([1.0, 1e-3, 1e3, 0.0, 1e-20, 30.0])[:, None]
    return made.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_comes_out_is_what_went_in_as_near_as_the_encoding_is(
    encoding: Encoding, dtype: torch.dtype
) -> None:
    hidden = states(dtype)
    there = travelled(pack(hidden, encoding))
    found = unpack(there, encoding, dtype=dtype, device=torch.device("cpu"), width=WIDTH)
    assert torch.equal(found, rounded(hidden, encoding))
    largest = hidden.float().abs().amax(1, keepdim=True)
    size = hidden.float().abs() + largest / 2**9 if encoding == "fp8" else largest
    room = WITHIN[encoding] * size * (1.01 if dtype == torch.float32 else 2.5)
    assert bool(((found.float() - hidden.float()).abs() <= room).all())


def travelled(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """Encode a frame to bytes and decode it."""
    limits = FrameLimits.of(shape_of(hidden_size=WIDTH))
    raw = b"".join(encode(Frame(Kind.STEP, 0, 0, b"", arrays), limits))
    end = 4 + int.from_bytes(raw[:4], "big")
    return decode(read_head(raw[4:end], limits), raw[end:]).tensors


@pytest.mark.parametrize("encoding", ["fp8", "int8"])
def test_eight_bits_a_number_travel_and_four_bytes_a_token(encoding: Encoding) -> None:
    assert sum(one.nbytes for one in pack(states(torch.bfloat16), encoding)) == 6 * (WIDTH + 4)


def test_a_token_is_no_other_token_s_business() -> None:
    hidden = states(torch.float32)
    for encoding in ENCODINGS:
        assert torch.equal(rounded(hidden[1:2], encoding), rounded(hidden, encoding)[1:2])


def test_what_is_received_can_be_written_to_and_what_was_sent_stays() -> None:
    hidden = states(torch.float32)
    sent = pack(hidden, "raw")
    found = unpack(sent, "raw", dtype=torch.float32, device=torch.device("cpu"), width=WIDTH)
    found += 1
    assert np.array_equal(sent[0], hidden.numpy())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_is_no_number_spoils_its_own_token_only(encoding: Encoding, value: float) -> None:
    hidden = states(torch.float32)
    wanted = rounded(hidden, encoding)
    hidden[2, 5] = value
    found = rounded(hidden, encoding)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[others], wanted[others])


def floats(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


WRONG: dict[str, tuple[Encoding, tuple[Array, ...]]] = {
    "nothing": ("raw", ()),
    "another width": ("raw", (floats(2, WIDTH + 1),)),
    "another type": ("raw", (np.zeros((2, WIDTH), np.uint16),)),
    "one dimension": ("raw", (floats(WIDTH),)),
    "more than states": ("raw", (floats(2, WIDTH), floats(2, 1))),
    "no scales": ("int8", (np.zeros((2, WIDTH), np.int8),)),
    "scales of other tokens": ("int8", (np.zeros((2, WIDTH), np.int8), floats(3, 1))),
    "another encoding": ("fp8", (np.zeros((2, WIDTH), np.int8), floats(2, 1))),
}


@pytest.mark.parametrize("case", WRONG)
def test_frames_that_are_never_sent_are_refused(case: str) -> None:
    encoding, arrays = WRONG[case]
    with pytest.raises(EngineError, match="previous stage"):
        unpack(arrays, encoding, dtype=torch.float32, device=torch.device("cpu"), width=WIDTH)
