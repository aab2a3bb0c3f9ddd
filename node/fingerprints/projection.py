"""The projection fingerprint: each hidden state as seven signed sums of its numbers, 8 bytes a token.

One state has one encoding: a scale byte other than the one that the largest code implies is refused, so
a proof is either far from the truth or made of something near it; no bytes fit everything.

    p[j] = sum_i s[i, j] h[i] / sqrt(width),  s = +-1 from an integer hash of (i, j)

Random signs keep lengths (Johnson and Lindenstrauss): E |p|^2 = 7 |h|^2 / width, so the relative error of p
is that of h. A token is one byte b > 0 for the scale 2^((b - 160) / 8), the smallest with every
|p| / scale < 127.5, and seven signed bytes, p / scale rounded. Eight zero bytes are a state of
zeros, or one that is below the smallest scale.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .fingerprint import (
    BadProof,
    Compared,
    Hidden,
    ProofFailed,
)
from .residuals import weighed_sums

NUMBERS = 7
TOKEN_BYTES = NUMBERS + 1
FURTHEST = 4.0
"""The largest distance: one token with an absurd scale says no more than that."""

_MOST = 127
_LEAST = 117
"""The largest code is at least 127.5 / 2^(1/8) = 116.92 before rounding, else the scale were too large."""
_BORDER = 127.5
_UNIT_SCALE = 160
_STEPS = 8
"""Steps of the scale for each factor of two."""
_SOFTNESS = 1.0
"""Of the weights: a token's residual is of seven numbers, so chance alone spreads it little."""

Floats = NDArray[np.float64]


class Projection:
    """Seven signed sums of each hidden state."""

    @property
    def name(self) -> str:
        """As in the run manifest."""
        return "projection"

    def size(self, tokens: int) -> int:
        """8 bytes a token."""
        return tokens * TOKEN_BYTES

    def make(self, hidden: Hidden) -> bytes:
        """The proof of the hidden states [tokens, width] of one reply. Raises ProofFailed."""
        return pack(_project(hidden).astype(np.float32))

    def check(self, proof: bytes, tokens: int) -> None:
        """Raise BadProof unless every token's bytes are the one encoding of some state."""
        _decode(proof, tokens)

    def compare(self, proof: bytes, hidden: Hidden, others: Sequence[Hidden] = ()) -> Compared:
        """Compare with own hidden states [tokens, width]; `others` have the same shape.

        The distance is |decoded - own| / |own| over the whole reply, own being rounded like a proof. `own`
        and `others` are against what is not rounded, each token in units of its own mean square, and
        weighed (residuals.py).
        Raises BadProof, and ProofFailed if the own hidden states are not finite.
        """
        return _compare(proof, _project(hidden), [_project(one) for one in others])


class Projected(Projection):
    """The same for whoever projects where the hidden states are."""

    def compare(self, proof: bytes, hidden: Hidden, others: Sequence[Hidden] = ()) -> Compared:
        """As Projection's, but of projected states: each is hidden @ signs(width) [tokens, 7]."""
        return _compare(proof, _finite(hidden), [_finite(one) for one in others])


def signs(width: int) -> NDArray[np.float32]:
    """The matrix [width, 7] that projects hidden states of that width: each entry is +-1 / sqrt(width).

    The signs are the top bits of a 32-bit hash (the finaliser "lowbias32" by C. Wellons) of 8 i + j.
    """
    row = np.arange(width, dtype=np.uint32)[:, None]
    hashed = row * np.uint32(8) + np.arange(NUMBERS, dtype=np.uint32) + np.uint32(0x9E3779B9)
    hashed ^= hashed >> np.uint32(16)
    hashed *= np.uint32(0x7FEB352D)
    hashed ^= hashed >> np.uint32(15)
    hashed *= np.uint32(0x846CA68B)
    hashed ^= hashed >> np.uint32(16)
    plus = np.float32(1 / np.sqrt(width))
    return np.where(hashed >> np.uint32(31), -plus, plus).astype(np.float32)


_signs = lru_cache(4)(signs)


def pack(projected: NDArray[np.float32]) -> bytes:
    """The proof of projected states, hidden @ signs(width) [tokens, 7]. Raises ProofFailed."""
    if projected.ndim != 2 or projected.shape[1] != NUMBERS or not len(projected):
        raise ProofFailed(f"projected states are [tokens, 7], not {projected.shape}")
    largest = np.abs(projected).max(axis=1).astype(np.float64)
    if not np.isfinite(largest).all():
        raise ProofFailed("hidden states are not finite; load the policy again")
    scale, codes = _encode(projected, largest)
    packed = np.empty((len(projected), TOKEN_BYTES), np.uint8)
    packed[:, 0] = scale
    packed[:, 1:] = codes.astype(np.int8).view(np.uint8)
    return packed.tobytes()


def _encode(projected: NDArray[np.float32], largest: Floats) -> tuple[NDArray[np.int64], Floats]:
    """The scale bytes [tokens] and the codes [tokens, 7] of finite states, the largest of each [tokens]."""
    scale = _scale_bytes(largest)
    if scale.max() > 255:
        raise ProofFailed(f"hidden states are too large: {largest.max():.3g} after projection")
    zero = scale < 1
    codes = np.rint(projected.astype(np.float64) / _scale(scale)[:, None])
    codes[zero] = 0
    return np.where(zero, 0, scale), codes


def _compare(proof: bytes, projected: Floats, others: Sequence[Floats]) -> Compared:
    """See Projection.compare(); all states are projected and finite."""
    decoded = _decode(proof, len(projected))
    power = np.mean(projected**2, axis=1)
    power[power == 0] = 1
    squares = np.stack([((decoded - one) ** 2).sum(axis=1) / power for one in (projected, *others)])
    own, *rest = weighed_sums(squares, _SOFTNESS).tolist()
    distance = _distance(decoded, rounded(projected.astype(np.float32)))
    return Compared(distance, decoded.size, own, tuple(rest))


def _scale_bytes(largest: Floats) -> NDArray[np.int64]:
    """The smallest b with largest < 127.5 * 2^((b - 160) / 8); at most 0 means zero."""
    ratio = np.maximum(largest, np.finfo(np.float64).tiny) / _BORDER
    found = np.ceil(_STEPS * np.log2(ratio)).astype(np.int64) + _UNIT_SCALE
    # on the border itself, also where log2 is off by its last bit: no code may come out beyond 127
    found += largest >= _BORDER * _scale(found)
    return found


def _scale(scale_bytes: NDArray[np.int64]) -> Floats:
    return np.exp2((scale_bytes - _UNIT_SCALE) / _STEPS)


def _project(hidden: Hidden) -> Floats:
    if hidden.ndim != 2 or not hidden.size:
        raise ProofFailed(f"hidden states are [tokens, width], not {hidden.shape}")
    with np.errstate(over="ignore", invalid="ignore"):
        return _finite(hidden.astype(np.float32, copy=False) @ _signs(hidden.shape[1]))


def _finite(projected: NDArray[np.float32]) -> Floats:
    if not np.isfinite(projected).all():
        raise ProofFailed("hidden states are not finite; load the policy again")
    return projected.astype(np.float64)


def _decode(proof: bytes, tokens: int) -> Floats:
    """The projected states [tokens, 7] that foreign bytes stand for. Raises BadProof."""
    if tokens < 1 or len(proof) != tokens * TOKEN_BYTES:
        raise BadProof(f"{len(proof)} bytes are no projection proof of {tokens} tokens")
    decoded, proper = decode_rows(proof)
    if not proper.all():
        raise BadProof(f"token {int(np.argmin(proper))}: its codes do not fit its scale")
    return decoded


def decode_rows(proof: bytes) -> tuple[Floats, NDArray[np.bool_]]:
    """The states [tokens, 7] that whole rows of foreign bytes stand for, and which are proper [tokens]."""
    packed = np.frombuffer(proof, np.uint8).reshape(-1, TOKEN_BYTES)
    scale, codes = packed[:, 0].astype(np.int64), packed[:, 1:].view(np.int8).astype(np.int64)
    largest = np.abs(codes).max(axis=1)
    proper = np.where(scale == 0, largest == 0, (largest >= _LEAST) & (largest <= _MOST))
    return codes * _scale(scale)[:, None], proper


def rounded(projected: NDArray[np.float32]) -> Floats:
    """Finite projected states [tokens, 7] as a proof of them would be read. Raises ProofFailed."""
    scale, codes = _encode(projected, np.abs(projected).max(axis=1).astype(np.float64))
    return codes * _scale(scale)[:, None]


def _distance(decoded: Floats, own: Floats) -> float:
    """|decoded - own| / |own|, at most FURTHEST."""
    apart, length = float(np.sum((decoded - own) ** 2)), float(np.sum(own**2))
    if apart == 0:
        return 0.0
    if length == 0:
        return FURTHEST
    return min(FURTHEST, float(np.sqrt(apart / length)))
