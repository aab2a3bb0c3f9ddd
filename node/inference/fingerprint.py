"""Fingerprints of hidden states: seven signed sums of each state, 8 bytes a token.

A hidden state is the input of the language-model head that led to a sampled token: one vector per token. A
worker commits to the fingerprints of its states while it generates; an auditor compares them with its own.

    p[j] = sum_i s[i, j] h[i] / sqrt(width),  s = +-1 from an integer hash of (i, j)

Random signs preserve lengths (Johnson and Lindenstrauss): E |p|^2 = 7 |h|^2 / width, so p has the relative
error of h. A token is encoded as one byte b > 0 for the scale 2^((b - 160) / 8), the smallest with every |p| /
scale < 127.5, and seven signed bytes, p / scale rounded. Eight zero bytes encode a state of zeros, or one below
the smallest scale.

- Proofs are untrusted bytes: their size is checked against the number of tokens before anything is read.
- A state has exactly one encoding: a scale byte other than the one that the largest code implies is refused. So
  a proof is either far from the truth or made from a similar state; no bytes match every state.
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

from ...protocol.rollouts import FINGERPRINT_NUMBERS
from ..errors import EngineError

Hidden = NDArray[np.float32]
"""Hidden states [tokens, width]."""
Floats = NDArray[np.float64]
Codes = NDArray[np.integer]
"""The bytes of a proof: scales, or codes."""
Integers = NDArray[np.int64]

TOKEN_BYTES = FINGERPRINT_NUMBERS + 1
LENGTH = FINGERPRINT_NUMBERS
"""Column of own states at a stage boundary: |state| / sqrt(width), after the projections."""
COLUMNS = FINGERPRINT_NUMBERS + 1
FURTHEST = 4.0
"""Largest distance: one token with an absurd scale cannot count for more."""
AT_ONCE = 32
"""Replies compared in one batch: their numbers stay in a processor's cache."""

_MOST = 127
_LEAST = 117
"""Range of the largest code: at least 127.5 / 2^(1/8) = 116.92 before rounding, else a
smaller scale would fit."""
_BORDER = 127.5
_UNIT_SCALE = 160
_STEPS = 8
"""Steps of the scale per factor of two."""
_SOFTNESS = 1.0
"""Softness of the weights. A residual sums seven numbers, so chance alone spreads it little."""

_LEAST_RESIDUAL = 1e-9
"""Least median residual: a smaller one is only rounding (residuals are relative, squared)."""


class BadProof(Exception):
    """Bytes that are no proof of this number of tokens."""


class ProofFailed(Exception):
    """Hidden states that no proof can be made of, for example because they are not finite."""


@dataclass(frozen=True)
class Compared:
    """Comparison of one reply's proof with the hidden states of a validator."""

    distance: float
    """Relative distance: 0 is equal, about 1 or more is unrelated."""
    samples: int
    """Number of committed numbers that were compared."""
    own: float
    """Sum over `samples` of squared relative differences between committed and own hidden
    states, weighted so that a few tokens cannot dominate. 0 without samples."""
    others: tuple[float, ...]
    """The same for the hidden states of other policies, in order, over the same samples."""
    shift: tuple[float, ...] = ()
    """Sums over the tokens of the seven signed relative differences, at most of length 1 each."""


@dataclass(frozen=True)
class Replayed:
    """One reply's proof, and its states as a validator recomputed and projected them."""

    proof: bytes
    projected: Hidden
    """Projected states hidden @ signs(width) [tokens, 7]."""
    others: Sequence[Hidden] = ()
    """Projected states under other policies."""


class Projection:
    """Fingerprint by random projection: makes, checks, compares proofs. Stateless, thread-safe."""

    @property
    def name(self) -> str:
        """Name in the run manifest."""
        return "projection"

    def size(self, tokens: int) -> int:
        """Return the size in bytes of the proof of a reply of `tokens` > 0 tokens: 8 a token."""
        return tokens * TOKEN_BYTES

    def make(self, hidden: Hidden) -> bytes:
        """Make the proof of the hidden states [tokens, width] of one reply. Raises ProofFailed."""
        return pack(_project(hidden))

    def check(self, proof: bytes, tokens: int) -> None:
        """Raise BadProof unless the bytes of every token are the one encoding of some state."""
        self.check_all([(proof, tokens)])

    def check_all(self, replies: Sequence[tuple[bytes, int]]) -> None:
        """Check the (proof, tokens) of many replies at once, as check() does one."""
        _checked([proof for proof, _ in replies], [tokens for _, tokens in replies])

    def compare(self, proof: bytes, hidden: Hidden, others: Sequence[Hidden] = ()) -> Compared:
        """Compare a proof with own hidden states [tokens, width] of the same reply.

        `others` are the states of the same tokens under other policies. The distance is |decoded - own| / |own|
        over the whole reply, with own rounded like a proof. `own` and `others` of the result compare with
        unrounded states: each token is in units of its own mean square, and is weighted (_weighed_sums()). A
        token whose bytes equal those of its own state never counts in favour of another policy: its residual is
        only rounding, and where states hardly change from token to token, those of another policy could be
        nearer to the rounded ones every time.
        Raises BadProof; ProofFailed if own or other states are not finite, which is not the sender's fault.
        """
        replayed = Replayed(proof, _project(hidden), [_project(states) for states in others])
        return self.compare_projected([replayed])[0]

    def compare_projected(self, replies: Sequence[Replayed]) -> list[Compared]:
        """Compare each reply as compare() does, with states that are already projected."""
        compared: dict[int, Compared] = {}
        for others in {len(reply.others) for reply in replies}:
            alike = [place for place, reply in enumerate(replies) if len(reply.others) == others]
            for start in range(0, len(alike), AT_ONCE):
                part = alike[start : start + AT_ONCE]
                compared |= zip(part, _compare([replies[place] for place in part]), strict=True)
        return [compared[place] for place in range(len(replies))]


def split(proof: bytes, lengths: Sequence[int], fingerprint: Projection) -> list[tuple[bytes, int]]:
    """Split the proof of a branch into (proof, tokens) of each of its replies, in order.

    `lengths` are the tokens of the replies. Raises BadProof if the proof has another size.
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
    """Return the projection matrix [width, 7] of hidden states; each entry is +-1 / sqrt(width).

    The signs are the top bits of a 32-bit hash (the finaliser "lowbias32" by C. Wellons) of 8 i + j.
    """
    row = np.arange(width, dtype=np.uint32)[:, None]
    hashed = (
        row * np.uint32(8) + np.arange(FINGERPRINT_NUMBERS, dtype=np.uint32) + np.uint32(0x9E3779B9)
    )
    hashed ^= hashed >> np.uint32(16)
    hashed *= np.uint32(0x7FEB352D)
    hashed ^= hashed >> np.uint32(15)
    hashed *= np.uint32(0x846CA68B)
    hashed ^= hashed >> np.uint32(16)
    plus = np.float32(1 / np.sqrt(width))
    return np.where(hashed >> np.uint32(31), -plus, plus).astype(np.float32)


_signs = lru_cache(4)(signs)


def pack(projected: NDArray[np.float32]) -> bytes:
    """Encode projected states hidden @ signs(width) [tokens, 7] as a proof. Raises ProofFailed."""
    if projected.ndim != 2 or projected.shape[1] != FINGERPRINT_NUMBERS or not len(projected):
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
    """Return the scale bytes [tokens] and codes [tokens, 7] of finite projected states.

    `largest` [tokens] is the largest magnitude of each state. Raises ProofFailed if one is too large.
    """
    scale = _scale_bytes(largest)
    if scale.max() > 255:
        raise ProofFailed(f"hidden states are too large: {largest.max():.3g} after projection")
    zero = scale < 1
    codes = np.rint(projected.astype(np.float64) / _scale(scale)[:, None])
    codes[zero] = 0
    return np.where(zero, 0, scale), codes


def _compare(replies: Sequence[Replayed]) -> list[Compared]:
    """Compare replies that have the same number of other policies; see Projection.compare().

    Tokens of all replies are concatenated, since a numpy call costs as much as some hundred tokens. Each result
    is bitwise independent of the other replies.
    """
    lengths = [len(reply.projected) for reply in replies]
    decoded = _decode([reply.proof for reply in replies], lengths)
    policies = zip(*((reply.projected, *reply.others) for reply in replies), strict=True)
    own, *others = [_finite(np.concatenate(states)) for states in policies]
    power = np.mean(own**2, axis=1)
    power[power == 0] = 1
    squares = np.stack([((decoded - states) ** 2).sum(axis=1) / power for states in (own, *others)])
    apart = (decoded - own).T / (np.sqrt(power) * np.maximum(1.0, np.sqrt(squares[0])))
    shifts = sums(apart, lengths).T.tolist()
    expected = rounded(own)
    explained = (decoded == expected).all(axis=1)
    squares[:, explained] = np.maximum(squares[:, explained], squares[0, explained])
    sizes = [length * FINGERPRINT_NUMBERS for length in lengths]
    error = sums(((decoded - expected) ** 2).ravel(), sizes).tolist()
    length = sums((expected**2).ravel(), sizes).tolist()
    distances = map(_distance, error, length)
    columns = zip(distances, sizes, _weighed_sums(squares, lengths), shifts, strict=True)
    return [
        Compared(distance, size, own, tuple(rest), tuple(shift))
        for distance, size, (own, *rest), shift in columns
    ]


def sums(values: Floats, lengths: Sequence[int]) -> Floats:
    """Sum parts of the last axis of `values`, each of `lengths` > 0 and bitwise as np.sum().

    np.sum() adds its pairs from the first number on, np.add.reduceat() from the second: a leading zero aligns
    them.
    """
    ends = list(accumulate(lengths))
    zero = np.zeros((*values.shape[:-1], 1))
    parts = (values[..., end - length : end] for end, length in zip(ends, lengths, strict=True))
    padded = np.concatenate([each for part in parts for each in (zero, part)], axis=-1)
    return np.add.reduceat(padded, np.array([0, *ends[:-1]]) + np.arange(len(ends)), axis=-1)


def _scale_bytes(largest: Floats) -> Integers:
    """Return the smallest b with largest < 127.5 * 2^((b - 160) / 8); at most 0 means zero."""
    ratio = np.maximum(largest, np.finfo(np.float64).tiny) / _BORDER
    scales = np.ceil(_STEPS * np.log2(ratio)).astype(np.int64) + _UNIT_SCALE
    # `largest` may lie on the border, or log2 be off by its last bit: no code may exceed 127
    scales += largest >= _BORDER * _scale(scales)
    return scales


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
    """Convert finite states to fp64, column-major: faster to sum per token. Raises ProofFailed."""
    if not np.isfinite(projected).all():
        raise ProofFailed("hidden states are not finite; load the policy again")
    return projected.astype(np.float64, order="F")


def _decode(proofs: Sequence[bytes], lengths: Sequence[int]) -> Floats:
    """Decode the untrusted proofs of replies into projected states [tokens, 7]. Raises BadProof."""
    return _states(*_checked(proofs, lengths))


def _checked(proofs: Sequence[bytes], lengths: Sequence[int]) -> tuple[Codes, Codes]:
    """Return the scales [tokens] and codes [tokens, 7] of the untrusted proofs of replies. Raises BadProof."""
    for proof, tokens in zip(proofs, lengths, strict=True):
        if tokens < 1 or len(proof) != tokens * TOKEN_BYTES:
            raise BadProof(f"{len(proof)} bytes are no projection proof of {tokens} tokens")
    scale, codes, proper = _parse(b"".join(proofs))
    if not proper.all():
        places = np.concatenate([np.arange(length) for length in lengths])
        raise BadProof(f"token {places[np.argmin(proper)]}: its codes do not fit its scale")
    return scale, codes


def decode_rows(proof: bytes) -> tuple[Floats, NDArray[np.bool_]]:
    """Decode rows of untrusted bytes to states [tokens, 7], and return which are valid [tokens]."""
    scale, codes, proper = _parse(proof)
    return _states(scale, codes), proper


def _parse(proof: bytes) -> tuple[Codes, Codes, NDArray[np.bool_]]:
    """Take rows of untrusted bytes apart: scales [tokens], codes [tokens, 7], and which rows are valid."""
    packed = np.asfortranarray(np.frombuffer(proof, np.uint8).reshape(-1, TOKEN_BYTES))
    scale, codes = packed[:, 0], packed[:, 1:].view(np.int8)
    largest = np.abs(codes).view(np.uint8).max(axis=1)  # -128 counts as 128
    proper = np.where(scale == 0, largest == 0, (largest >= _LEAST) & (largest <= _MOST))
    return scale, codes, proper


def _states(scale: Codes, codes: Codes) -> Floats:
    return codes * _SCALES[scale][:, None]


def rounded(projected: NDArray[np.floating]) -> Floats:
    """Round finite projected states [tokens, 7] as a proof of them would. Raises ProofFailed."""
    scale, codes = _encode(projected, np.abs(projected).max(axis=1).astype(np.float64))
    return codes * _scale(scale)[:, None]


def _distance(apart: float, length: float) -> float:
    """Return |decoded - own| / |own| from the squares of both, at most FURTHEST."""
    if apart == 0:
        return 0.0
    if length == 0:
        return FURTHEST
    return min(FURTHEST, sqrt(apart / length))


def _weighed_sums(squares: Floats, lengths: Sequence[int]) -> list[list[float]]:
    """Sum the residuals of each reply with robust weights; returns [replies, policies].

    `squares` [policies, n] are the residuals of replies of `lengths`, concatenated. Weights come from the mean
    over policies and are relative: where no residual of a reply stands out, they are about 1. All policies
    share a weight, so none is favoured, and the contribution of a single token is bounded.

    Plain sums would be a matched filter for uniform noise. Real noise is not uniform (a token may carry three
    times that of its neighbour), and a cheat could send a few tokens far off on purpose, so that the rest do
    not count. Weights 1 / (softness * median + residual) are those of Student-t noise. Simulated on 64 tokens
    of 7 numbers, they cost 3 % of the separation where all tokens are alike, and triple it where the noise is
    spread by a factor e (log-normal).
    """
    mean = squares.mean(axis=0)
    typical = np.repeat(np.maximum(_medians(mean, lengths), _LEAST_RESIDUAL), lengths)
    weights = (_SOFTNESS + 1) * typical / (_SOFTNESS * typical + mean)
    return sums(squares * weights, lengths).T.tolist()


def _medians(values: Floats, lengths: Sequence[int]) -> Floats:
    """Return the median of each part of `lengths`."""
    ordered, count = values.copy(), np.array(lengths)
    ends = np.cumsum(count)
    for start, end in pairwise([0, *ends.tolist()]):
        ordered[start:end].sort()
    return (ordered[ends - count + (count - 1) // 2] + ordered[ends - count + count // 2]) / 2


def token_distances(stated: bytes, own: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return relative distances [tokens] of boundary fingerprints `stated` from `own`.

    Distances are 0 for equal states and at most FURTHEST, also for bytes that encode no state. `stated` has as
    many tokens as `own` [tokens, COLUMNS], which is finite and is rounded like `stated`. Each token is relative
    to its own length: a residual stream is not normed, and one long state would dominate.
    """
    decoded, proper = decode_rows(stated)
    apart = ((decoded - rounded(own[:, :FINGERPRINT_NUMBERS])) ** 2).mean(axis=1)
    length = own[:, LENGTH].astype(np.float64)
    with np.errstate(divide="ignore", over="ignore"):
        distances = np.sqrt(apart) / np.where(length > 0, length, 1)
    distances[(length == 0) & (apart > 0)] = FURTHEST
    return np.where(proper, np.minimum(distances, FURTHEST), FURTHEST)


def find_fingerprint(name: str) -> Projection:
    """Return the fingerprint called `name`. Raises EngineError."""
    if name != Projection().name:
        raise EngineError(f"there is no fingerprint {name!r}: the only one is {Projection().name}")
    return Projection()
