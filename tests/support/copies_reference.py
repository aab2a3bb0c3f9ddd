"""The search for copies as it was first written: every window of every size is looked up by itself, in order.

Slow, and easy to read: what node/verification/duplicates.py finds is compared with it. Do not make it faster.
"""

from collections.abc import Iterator
from itertools import compress
from math import log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from primerl.crypto.hashing import digest, short
from primerl.node.environments.environment import Branch
from primerl.node.verification.checks import CheckedRollout, Rejected
from primerl.protocol.errors import Reason

SURPRISE = 40.0
"""Least surprise of a window that counts, nats."""
SHARE = 0.5
"""Share of a rollout's sampled tokens, received before, that makes it a copy."""
SIZES = (32, 64, 128, 256, 512)
"""Sizes of windows, tokens; the whole text of a branch is one more window."""
MAX_WINDOWS = 1 << 17
"""Most stored windows, about 200 bytes each, one per 16 tokens; the least recently found one is dropped
first."""

_MOST_SURPRISE = 2.5
"""Cap on a token's surprise, nats: no window that counts has fewer than 16 tokens."""
_NAME_BYTES = 16
_PLACES = 4096
"""Most rollouts in a group (protocol/rollouts.py)."""
_BASE = np.uint64(0x9E3779B97F4A7C15)
_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 1 << 64))

Keys = NDArray[np.uint64]


class Owner(NamedTuple):
    """Sender of a rollout, sorted by the order of receipt: the smaller came first."""

    arrival: int
    place: int
    """Number of the rollout within the arrival; the same when it is verified again."""
    node: bytes


class ReferenceDetector:
    """Store of recently verified rollouts' texts, with the first sender of each."""

    def __init__(self, max_windows: int = MAX_WINDOWS) -> None:
        self._max_windows = max_windows
        self._windows: dict[int, tuple[bytes, Owner]] = {}
        """Key -> name and owner."""

    def __len__(self) -> int:
        return len(self._windows)

    def check(
        self, arrival: int, node: bytes, rollout: CheckedRollout, *, top_p: float = 1.0
    ) -> None:
        """Store the new text of a rollout; raise Rejected(DUPLICATE) if it is a copy.

        `top_p` is that of its environment. Call it once for each rollout that passed the cheap checks;
        repeating a call is harmless.
        """
        owner = Owner(arrival, rollout.group * _PLACES + rollout.index, node)
        texts = [_Text(one, top_p) for one in rollout.branches]
        earlier: dict[Owner, int] = {}
        for text in texts:
            self._find(text, owner, earlier)
        share = sum(earlier.values()) / max(1, sum(len(text.tokens) for text in texts))
        if share >= SHARE:  # not stored: copies of the copy are the source's, too
            source = min(earlier, key=lambda one: (-earlier[one], one))
            raise Rejected(
                Reason.DUPLICATE,
                f"{share:.0%} of its tokens came with arrival {source.arrival} of {short(source.node)}",
            )
        for text in texts:
            self._remember(text, owner)

    def _find(self, text: "_Text", owner: Owner, earlier: dict[Owner, int]) -> None:
        """Add the tokens that were received earlier, each once, to the counts of their owners."""
        covered = np.zeros(len(text.tokens), bool)
        for start, size, key in text.everywhere():
            name, other = self._windows.get(key, (b"", owner))
            part = covered[start : start + size]
            fresh = size - int(part.sum())
            if other[:2] < owner[:2] and fresh and name == text.name(start, size):
                part[:] = True
                self._windows[key] = self._windows.pop(key)
                earlier[other] = earlier.get(other, 0) + fresh

    def _remember(self, text: "_Text", owner: Owner) -> None:
        for start, size, key in text.aligned():
            known = self._windows.get(key)
            if known is None or owner[:2] < known[1][:2]:
                self._windows.pop(key, None)
                self._windows[key] = text.name(start, size), owner
        for key in list(self._windows)[: max(0, len(self._windows) - self._max_windows)]:
            del self._windows[key]


class _Text:
    """Sampled tokens of a branch, and its windows that have enough surprise."""

    def __init__(self, branch: Branch, top_p: float) -> None:
        self.tokens = np.array(list(compress(branch.token_ids, branch.sampled)), np.uint32)
        nats = -np.array(list(compress(branch.logprobs, branch.sampled)), np.float64)
        nats = np.clip(np.where(np.isnan(nats), 0.0, nats) + log(top_p), 0.0, _MOST_SURPRISE)
        self._nats = np.concatenate([[0.0], np.cumsum(nats)])
        self._sums, self._shifts = _rolling(self.tokens)

    def everywhere(self) -> Iterator[tuple[int, int, int]]:
        """Yield (start, size, key) at every offset, the smallest windows first."""
        for size in self._sizes():
            yield from self._keyed(np.arange(len(self.tokens) - size + 1), size)

    def aligned(self) -> Iterator[tuple[int, int, int]]:
        """Yield (start, size, key) of adjacent windows from the start, at every size.

        Every size is stored, so that slightly understated logprobs do not lead to a size that is not.
        """
        for size in self._sizes():
            yield from self._keyed(np.arange(0, len(self.tokens) - size + 1, size), size)

    def name(self, start: int, size: int) -> bytes:
        """Return the name of a window, a digest of its text."""
        return digest(self.tokens[start : start + size].tobytes())[:_NAME_BYTES]

    def _sizes(self) -> list[int]:
        length = len(self.tokens)
        return [size for size in SIZES if size <= length] + [length] * (length not in (0, *SIZES))

    def _keyed(self, starts: NDArray[np.int64], size: int) -> Iterator[tuple[int, int, int]]:
        starts = starts[self._nats[starts + size] - self._nats[starts] >= SURPRISE]
        hashed = (self._sums[starts + size] - self._sums[starts]) * self._shifts[starts]
        for start, key in zip(starts.tolist(), hashed.tolist(), strict=True):
            yield start, size, key ^ size


def _rolling(tokens: NDArray[np.uint32]) -> tuple[Keys, Keys]:
    """Return prefix sums of mixed tokens times powers of an odd base, and the inverse powers.

    All modulo 2^64. The sums only preselect: windows are equal only if their names are.
    """
    mixed = tokens.astype(np.uint64) + _BASE
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    zero = np.zeros(1, np.uint64)
    return (
        np.concatenate([zero, np.cumsum(mixed * _powers(_BASE, len(tokens)), dtype=np.uint64)]),
        _powers(_INVERSE, len(tokens) + 1),
    )


def _powers(base: np.uint64, count: int) -> Keys:
    powers = np.full(count, base)
    powers[:1] = 1
    return np.cumprod(powers, dtype=np.uint64)
