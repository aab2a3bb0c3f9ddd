"""Fingerprints of hidden states: each state as seven signed sums of its numbers, 8 bytes a token.

A hidden state is what feeds the language-model head, one vector per sampled token: that which led to it. A
worker commits to the fingerprints of its states while it generates; an auditor compares them with its own.

    p[j] = sum_i s[i, j] h[i] / sqrt(width),  s = +-1 from an integer hash of (i, j)

Random signs keep lengths (Johnson and Lindenstrauss): E |p|^2 = 7 |h|^2 / width, so the relative error of p
is that of h. A token is one byte b > 0 for the scale 2^((b - 160) / 8), the smallest with every
|p| / scale < 127.5, and seven signed bytes, p / scale rounded. Eight zero bytes are a state of
zeros, or one that is below the smallest scale.

- A proof is foreign bytes: its size is checked against the number of tokens before anything is read.
- One state has one encoding: a scale byte other than the one that the largest code implies is refused, so
  a proof is either far from the truth or made of something near it; no bytes fit everything.
- numpy only: comparing needs no torch.

Suite: tests/node/inference/test_fingerprint.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import sqrt

import numpy as np
from numpy.typing import NDArray

Hidden = NDArray[np.float32]
"""Hidden states [tokens, width]."""
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

NUMBERS = 7
TOKEN_BYTES = NUMBERS + 1
LENGTH = NUMBERS
"""Column of own states at a boundary between stages: |state| / sqrt(width), behind the NUMBERS projections."""
COLUMNS = NUMBERS + 1
FURTHEST = 4.0
"""The largest distance: one token with an absurd scale says no more than that."""
AT_ONCE = 32
"""Replies that are compared together: their numbers stay in a processor's cache."""

_MOST = 127
_LEAST = 117
"""The largest code is at least 127.5 / 2^(1/8) = 116.92 before rounding, else the scale were too large."""
_BORDER = 127.5
_UNIT_SCALE = 160
_STEPS = 8
"""Steps of the scale for each factor of two."""
_SOFTNESS = 1.0
"""Of the weights: a token's residual is of seven numbers, so chance alone spreads it little."""

_LEAST_RESIDUAL = 1e-9
"""Below this a median residual is rounding only (residuals are relative, squared)."""


class BadProof(Exception):
    """The bytes are no proof of this number of tokens."""


class ProofFailed(Exception):
    """No proof can be made of these hidden states (they are not finite)."""


@dataclass(frozen=True)
class Compared:
    """One reply's proof against the hidden states of a validator."""

    distance: float
    """Relative, 0 is equal, about 1 or more is unrelated."""
    samples: int
    """How many committed numbers were compared."""
    own: float
    """Sum of squared relative differences between the committed and the own hidden states, over `samples`,
    weighed so that no few tokens drown the rest. 0 if `samples` is."""
    others: tuple[float, ...]
    """The same against the hidden states of other policies, in order, over the same samples."""


@dataclass(frozen=True)
class Replayed:
    """One reply's proof, and its states as a validator computed and projected them."""

    proof: bytes
    projected: Hidden
    """hidden @ signs(width) [tokens, 7]."""
    others: Sequence[Hidden] = ()
    """The same under other policies."""


class Projection:
    """Make, check and compare proofs of replies. Stateless; safe in any thread."""

    @property
    def name(self) -> str:
        """As in the run manifest."""
        return "projection"

    def size(self, tokens: int) -> int:
        """Bytes of the proof of a reply of `tokens` > 0 tokens: 8 a token."""
        return tokens * TOKEN_BYTES

    def make(self, hidden: Hidden) -> bytes:
        """The proof of the hidden states [tokens, width] of one reply. Raises ProofFailed."""
        return pack(_project(hidden))

    def check(self, proof: bytes, tokens: int) -> None:
        """Raise BadProof unless every token's bytes are the one encoding of some state."""
        _decode([proof], [tokens])

    def compare(self, proof: bytes, hidden: Hidden, others: Sequence[Hidden] = ()) -> Compared:
        """Compare a proof with own hidden states [tokens, width] of the same reply.

        `others` are those of the same tokens under other policies. The distance is |decoded - own| / |own| over
        the whole reply, own being rounded like a proof. `own` and `others` compare with unrounded states,
        each token in units of its own mean square, and weighed (_weighed_sums()). A token whose bytes are the
        very ones of its own state never speaks for another policy: what is left is rounding, and where states
        are alike from token to token another policy can be nearer to what they are rounded to, every time.
        Raises BadProof; ProofFailed if own or other hidden states are not finite, which is not the sender's
        fault.
        """
        replayed = Replayed(proof, _project(hidden), [_project(one) for one in others])
        return self.compare_projected([replayed])[0]

    def compare_projected(self, replies: Sequence[Replayed]) -> list[Compared]:
        """As compare() of each reply, of states that were projected already."""
        found: dict[int, Compared] = {}
        for others in {len(one.others) for one in replies}:
            alike = [place for place, one in enumerate(replies) if len(one.others) == others]
            for start in range(0, len(alike), AT_ONCE):
                part = alike[start : start + AT_ONCE]
                found |= zip(part, _compare([replies[place] for place in part]), strict=True)
        return [found[place] for place in range(len(replies))]


def split(proof: bytes, lengths: Sequence[int], fingerprint: Projection) -> list[tuple[bytes, int]]:
    """Split the proof of a branch, that of its replies in a row, into (proof, tokens) of each reply.

    `lengths` are the tokens of the replies. Raises BadProof for any other size.
    """
    sizes = [fingerprint.size(length) for length in lengths]
    if len(proof) != sum(sizes):
        raise BadProof(
            f"{len(proof)} bytes of proof where replies of {list(lengths[:8])} tokens take {sum(sizes)}"
        )
    ends = accumulate(sizes)
    return [
        (proof[end - size : end], length)
        for end, size, length in zip(ends, sizes, lengths, strict=True)
    ]


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


def _encode(projected: NDArray[np.floating], largest: Floats) -> tuple[Integers, Floats]:
    """The scale bytes [tokens] and the codes [tokens, 7] of finite states, the largest of each [tokens]."""
    scale = _scale_bytes(largest)
    if scale.max() > 255:
        raise ProofFailed(f"hidden states are too large: {largest.max():.3g} after projection")
    zero = scale < 1
    codes = np.rint(projected.astype(np.float64) / _scale(scale)[:, None])
    codes[zero] = 0
    return np.where(zero, 0, scale), codes


def _compare(replies: Sequence[Replayed]) -> list[Compared]:
    """Compare replies that have as many other policies each; see Projection.compare().

    Their tokens are in a row, since numpy takes as long to begin as for some hundred tokens. What a reply gives
    does not depend on those beside it, to the last bit.
    """
    lengths = [len(one.projected) for one in replies]
    decoded = _decode([one.proof for one in replies], lengths)
    policies = zip(*((one.projected, *one.others) for one in replies), strict=True)
    own, *others = [_finite(np.concatenate(states)) for states in policies]
    power = np.mean(own**2, axis=1)
    power[power == 0] = 1
    squares = np.stack([((decoded - one) ** 2).sum(axis=1) / power for one in (own, *others)])
    expected = rounded(own)
    explained = (decoded == expected).all(axis=1)
    squares[:, explained] = np.maximum(squares[:, explained], squares[0, explained])
    sizes = [length * NUMBERS for length in lengths]
    apart = sums(((decoded - expected) ** 2).ravel(), sizes).tolist()
    length = sums((expected**2).ravel(), sizes).tolist()
    found = zip(map(_distance, apart, length), sizes, _weighed_sums(squares, lengths), strict=True)
    return [Compared(distance, size, own, tuple(rest)) for distance, size, (own, *rest) in found]


def sums(values: Floats, lengths: Sequence[int]) -> Floats:
    """Sum the last axis of `values` over parts of `lengths`, none empty: each to the last bit as np.sum() does.

    np.sum() adds its pairs from the first number on, np.add.reduceat() from the second: so a zero goes before.
    """
    ends = list(accumulate(lengths))
    zero = np.zeros((*values.shape[:-1], 1))
    parts = (values[..., end - length : end] for end, length in zip(ends, lengths, strict=True))
    padded = np.concatenate([each for part in parts for each in (zero, part)], axis=-1)
    return np.add.reduceat(padded, np.array([0, *ends[:-1]]) + np.arange(len(ends)), axis=-1)


def _scale_bytes(largest: Floats) -> Integers:
    """The smallest b with largest < 127.5 * 2^((b - 160) / 8); at most 0 means zero."""
    ratio = np.maximum(largest, np.finfo(np.float64).tiny) / _BORDER
    found = np.ceil(_STEPS * np.log2(ratio)).astype(np.int64) + _UNIT_SCALE
    # on the border itself, also where log2 is off by its last bit: no code may come out beyond 127
    found += largest >= _BORDER * _scale(found)
    return found


def _scale(scale_bytes: Integers) -> Floats:
    return np.exp2((scale_bytes - _UNIT_SCALE) / _STEPS)


_SCALES = _scale(np.arange(256))


def _project(hidden: Hidden) -> Hidden:
    if hidden.ndim != 2 or not hidden.size:
        raise ProofFailed(f"hidden states are [tokens, width], not {hidden.shape}")
    with np.errstate(over="ignore", invalid="ignore"):
        projected = hidden.astype(np.float32, copy=False) @ _signs(hidden.shape[1])
    _finite(projected)
    return projected


def _finite(projected: Hidden) -> Floats:
    """Finite numbers in double precision, column by column in memory: sums over each token are faster so."""
    if not np.isfinite(projected).all():
        raise ProofFailed("hidden states are not finite; load the policy again")
    return projected.astype(np.float64, order="F")


def _decode(proofs: Sequence[bytes], lengths: Sequence[int]) -> Floats:
    """The projected states [tokens, 7] that the foreign bytes of replies stand for. Raises BadProof."""
    for proof, tokens in zip(proofs, lengths, strict=True):
        if tokens < 1 or len(proof) != tokens * TOKEN_BYTES:
            raise BadProof(f"{len(proof)} bytes are no projection proof of {tokens} tokens")
    decoded, proper = decode_rows(b"".join(proofs))
    if not proper.all():
        places = np.concatenate([np.arange(length) for length in lengths])
        raise BadProof(f"token {places[np.argmin(proper)]}: its codes do not fit its scale")
    return decoded


def decode_rows(proof: bytes) -> tuple[Floats, NDArray[np.bool_]]:
    """The states [tokens, 7] that whole rows of foreign bytes stand for, and which are proper [tokens]."""
    packed = np.asfortranarray(np.frombuffer(proof, np.uint8).reshape(-1, TOKEN_BYTES))
    scale, codes = packed[:, 0], packed[:, 1:].view(np.int8)
    largest = np.abs(codes).view(np.uint8).max(axis=1)  # of -128, too
    proper = np.where(scale == 0, largest == 0, (largest >= _LEAST) & (largest <= _MOST))
    return codes * _SCALES[scale][:, None], proper


def rounded(projected: NDArray[np.floating]) -> Floats:
    """Finite projected states [tokens, 7] as a proof of them would be read. Raises ProofFailed."""
    scale, codes = _encode(projected, np.abs(projected).max(axis=1).astype(np.float64))
    return codes * _scale(scale)[:, None]


def _distance(apart: float, length: float) -> float:
    """|decoded - own| / |own|, at most FURTHEST, of their squares."""
    if apart == 0:
        return 0.0
    if length == 0:
        return FURTHEST
    return min(FURTHEST, sqrt(apart / length))


def _weighed_sums(squares: Floats, lengths: Sequence[int]) -> list[list[float]]:
    """Sum residuals of replies of `lengths` by weights that the mean over policies gives: [replies, policies].

    `squares` are [policies, n]. The weights are relative: where no residual of a reply stands out, they are
    about 1. The same weight counts for every policy, so no weight favours one; what it leaves of a single token
    is bounded.
    Plain sums would be a matched filter for noise that is alike everywhere. Real noise is not (a token may
    carry three times that of its neighbour), and a cheat could send a few tokens far off on purpose, so that
    the rest say nothing. Weights 1 / (softness * median + residual) are those of Student-t noise: simulated on
    64 tokens of 7 numbers they cost 3 % of the separation where all tokens are alike, and triple it where their
    noise is spread by a factor e (log-normal).
    """
    mean = squares.mean(axis=0)
    typical = np.repeat(np.maximum(_medians(mean, lengths), _LEAST_RESIDUAL), lengths)
    weights = (_SOFTNESS + 1) * typical / (_SOFTNESS * typical + mean)
    return sums(squares * weights, lengths).T.tolist()


def _medians(values: Floats, lengths: Sequence[int]) -> Floats:
    """The median of each part of `lengths`."""
    ordered, count = values.copy(), np.array(lengths)
    ends = np.cumsum(count)
    for start, end in pairwise([0, *ends.tolist()]):
        ordered[start:end].sort()
    return (ordered[ends - count + (count - 1) // 2] + ordered[ends - count + count // 2]) / 2


def token_distances(stated: bytes, own: NDArray[np.float32]) -> NDArray[np.float64]:
    """Relative distances [tokens] of fingerprints `stated` of a stage boundary from `own` [tokens, COLUMNS].

    0 is equal, at most FURTHEST, which is also that of bytes that encode no state. `stated` has as many tokens;
    `own` is finite and is rounded like `stated`. Every token counts by its own length: a residual stream
    is not normed, and one long state would drown the rest.
    """
    decoded, proper = decode_rows(stated)
    apart = ((decoded - rounded(own[:, :NUMBERS])) ** 2).mean(axis=1)
    length = own[:, LENGTH].astype(np.float64)
    with np.errstate(divide="ignore", over="ignore"):
        found = np.sqrt(apart) / np.where(length > 0, length, 1)
    found[(length == 0) & (apart > 0)] = FURTHEST
    return np.where(proper, np.minimum(found, FURTHEST), FURTHEST)
