"""Repeated and copied rollouts: whose text came second, whoever is verified first.

Order of receipt alone decides: an earlier arrival is never called a copy, though its copy be verified first.

A rollout is remembered by windows of its sampled tokens, side by side, 32 to 512 tokens each, and whole; it is
looked for at every offset, so that shifting a text hides nothing. A window counts only if it carries SURPRISE
nats by the logprobs of its own sender: another honest worker draws it again with probability e^-40 (4e-18), so
short and near-certain replies are copies of nobody, and no claim of one worker can make another's text a copy.
Who claims less surprise than there was at every size escapes this book; audits of logprobs and seeds see that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...crypto.hashing import digest, short
from ...protocol.errors import Reason
from ..environments.environment import Branch
from .checks import CheckedRollout, Rejected

SURPRISE = 40.0
"""Nats in a window."""
SHARE = 0.5
"""Of the sampled tokens of a rollout: so much of somebody else's text makes it a copy."""
SIZES = (32, 64, 128, 256, 512)
"""Tokens in a window, and beside them the whole text of a branch."""
MAX_WINDOWS = 1 << 17
"""About 200 bytes each, one for every 16 tokens; a window that nobody met for the longest time goes first."""

_MOST_SURPRISE = 2.5
"""Nats that one token may count for: nothing below 16 tokens is a window, whatever logprobs it comes with."""
_NAME_BYTES = 16
_BASE = np.uint64(0x9E3779B97F4A7C15)
_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 1 << 64))

Keys = NDArray[np.uint64]


class Owner(NamedTuple):
    """A rollout as it was received; the smaller came first."""

    arrival: int
    place: int
    """Within the arrival: any number that orders its rollouts and stays when it is verified again."""
    node: bytes


@dataclass(frozen=True)
class SampledText:
    """The sampled tokens of one branch and their logprobs under the distribution that drew them."""

    tokens: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True)
class KnownText:
    """What is known of a rollout's text; the owners are those of most of it."""

    copy_of: Owner | None = None
    """Who sent at least SHARE of it earlier, alone or with others: the rollout is a copy."""
    copied_by: Owner | None = None
    """Who sent at least SHARE of it later and was verified earlier: that one is the copy."""
    share: float = 0.0
    """Of the sampled tokens, in text that came earlier."""


class _Window(NamedTuple):
    name: bytes
    owner: Owner


SavedWindow = tuple[int, bytes, int]
"""Key, name, and the place of its owner among the owners."""


@dataclass(frozen=True)
class SavedDuplicates:
    """A CopyBook in plain types, the window that goes first in front."""

    owners: list[tuple[int, int, bytes]]
    windows: list[SavedWindow]


class DuplicateIndex:
    """Texts of the rollouts that were verified lately, and who sent each first."""

    def __init__(self, max_windows: int = MAX_WINDOWS) -> None:
        self._max_windows = max_windows
        self._windows: dict[int, _Window] = {}

    def __len__(self) -> int:
        return len(self._windows)

    def add(self, owner: Owner, texts: Sequence[SampledText]) -> KnownText:
        """Look for a rollout's text, then remember what nobody sent before, unless it is a copy.

        To be called once for each rollout that passed the cheap checks; again, for the same owner, is harmless.
        """
        branches = [_Branch(text) for text in texts]
        earlier: dict[Owner, int] = {}
        later: dict[Owner, int] = {}
        for branch in branches:
            self._meet(branch, owner, earlier, later)
        total = max(1, sum(len(branch.tokens) for branch in branches))
        share, after = sum(earlier.values()) / total, sum(later.values()) / total
        if share >= SHARE:  # not remembered: copies of the copy are the source's too
            return KnownText(copy_of=_most(earlier), share=share)
        for branch in branches:
            self._remember(branch, owner)
        return KnownText(copied_by=_most(later) if after >= SHARE else None, share=share)

    def snapshot(self) -> SavedDuplicates:
        """Everything, for a checkpoint."""
        owners = {window.owner: 0 for window in self._windows.values()}
        place = {owner: at for at, owner in enumerate(owners)}
        return SavedDuplicates(
            owners=[(owner.arrival, owner.place, owner.node) for owner in owners],
            windows=[
                (key, window.name, place[window.owner]) for key, window in self._windows.items()
            ],
        )

    def restore(self, saved: SavedDuplicates) -> None:
        """Know what was known when `saved` was made, and nothing else."""
        owners = [Owner(*owner) for owner in saved.owners]
        self._windows = {key: _Window(name, owners[at]) for key, name, at in saved.windows}
        self._forget()

    def _meet(
        self, branch: "_Branch", owner: Owner, earlier: dict[Owner, int], later: dict[Owner, int]
    ) -> None:
        """Count the tokens that others sent earlier or later, each once for either."""
        covered = {
            True: np.zeros(len(branch.tokens), bool),
            False: np.zeros(len(branch.tokens), bool),
        }
        for start, size, key in branch.everywhere():
            window = self._windows.get(key)
            if window is None or window.owner[:2] == owner[:2]:
                continue
            first = window.owner[:2] < owner[:2]
            part = covered[first][start : start + size]
            fresh = size - int(part.sum())
            if fresh and window.name == branch.name(start, size):
                part[:] = True
                self._windows[key] = self._windows.pop(key)
                count = earlier if first else later
                count[window.owner] = count.get(window.owner, 0) + fresh

    def _remember(self, branch: "_Branch", owner: Owner) -> None:
        for start, size, key in branch.aligned():
            known = self._windows.get(key)
            if known is None or owner[:2] < known.owner[:2]:
                self._windows.pop(key, None)
                self._windows[key] = _Window(branch.name(start, size), owner)
        self._forget()

    def _forget(self) -> None:
        for key in list(self._windows)[: max(0, len(self._windows) - self._max_windows)]:
            del self._windows[key]


class _Branch:
    """The windows of one text that carry enough surprise."""

    def __init__(self, text: SampledText) -> None:
        self.tokens = np.asarray(text.tokens, np.uint32)
        nats = -np.asarray(text.logprobs, np.float64)
        nats = np.clip(np.where(np.isnan(nats), 0.0, nats), 0.0, _MOST_SURPRISE)
        self._nats = np.concatenate([[0.0], np.cumsum(nats)])
        self._sums, self._shifts = _rolling(self.tokens)

    def everywhere(self) -> Iterator[tuple[int, int, int]]:
        """(start, size, key) at every offset, the smallest windows first."""
        for size in self._sizes():
            starts = self._surprising(np.arange(len(self.tokens) - size + 1), size)
            yield from self._keyed(starts, size)

    def aligned(self) -> Iterator[tuple[int, int, int]]:
        """(start, size, key) side by side from the start, at every size.

        Every size, so that understating logprobs a little does not lead from a size that is remembered to
        one that is not.
        """
        for size in self._sizes():
            starts = np.arange(0, len(self.tokens) - size + 1, size)
            yield from self._keyed(self._surprising(starts, size), size)

    def name(self, start: int, size: int) -> bytes:
        """What no other window has in common with this one, but for its text."""
        return digest(self.tokens[start : start + size].tobytes())[:_NAME_BYTES]

    def _sizes(self) -> list[int]:
        length = len(self.tokens)
        return [size for size in SIZES if size <= length] + [length] * (length not in (0, *SIZES))

    def _surprising(self, starts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
        return starts[self._nats[starts + size] - self._nats[starts] >= SURPRISE]

    def _keyed(self, starts: NDArray[np.int64], size: int) -> Iterator[tuple[int, int, int]]:
        hashed = (self._sums[starts + size] - self._sums[starts]) * self._shifts[starts]
        for start, key in zip(starts.tolist(), hashed.tolist(), strict=True):
            yield start, size, key ^ size


def _rolling(tokens: NDArray[np.uint32]) -> tuple[Keys, Keys]:
    """Sums of mixed tokens times powers of an odd base, before each place; and what takes such a power away.

    All modulo 2^64. Only a first look: windows are the same only if their names are.
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


def _most(tokens: dict[Owner, int]) -> Owner | None:
    """Who has most of them; of equals, who came first."""
    return min(tokens, key=lambda owner: (-tokens[owner], owner), default=None)


_PLACES = 4096
"""Most rollouts in a group (protocol/rollouts.py)."""


class CopyDetector:
    """Says which rollouts are copies of what was received earlier."""

    def __init__(self) -> None:
        self._book = DuplicateIndex()

    def check(self, arrival: int, node: bytes, rollout: CheckedRollout) -> None:
        """Raise Rejected(DUPLICATE) if most of the rollout was received before."""
        place = rollout.group * _PLACES + rollout.index
        found = self._book.add(
            Owner(arrival, place, node), [_text(one) for one in rollout.branches]
        )
        if found.copy_of is not None:
            source = found.copy_of
            owner = short(source.node)
            detail = (
                f"{found.share:.0%} of its tokens came with arrival {source.arrival} of {owner}"
            )
            raise Rejected(Reason.DUPLICATE, detail)


def _text(branch: Branch) -> SampledText:
    return SampledText(
        list(compress(branch.token_ids, branch.sampled)),
        list(compress(branch.logprobs, branch.sampled)),
    )
