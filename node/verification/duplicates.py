"""Find repeated and copied rollouts: the text that was received second is the copy.

The order of receipt alone decides: an earlier arrival is never called a copy, even if its copy is verified
first.

A rollout is stored as adjacent windows of its sampled tokens, 32 to 512 tokens each, and as a whole; lookups
use every offset, so that shifting a text hides nothing. A window counts only if it has SURPRISE nats by the
logprobs of its own sender: another honest worker samples it again with probability e^-40 (4e-18), so short and
near-certain replies never count as copies, and no claim of one worker can make another's text a copy. Under a
top-p, tokens whose supports are not stated are up to 1 / top_p likelier than their logprobs say, and so much
less of a surprise. A worker that understates the surprise at every size is not found here, but by audits of
logprobs and seeds.

Windows are known by 64 bits that a secret decides (WindowHashes): two texts share them with probability 4e-18,
whatever their sender chose, as nobody knows the secret. Each step is numpy's over all windows of a size, never
Python's over single ones: time grows with the tokens, and not with how many windows are alike.
"""

import secrets
import threading
from array import array
from collections.abc import Iterator, Sequence
from math import log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...crypto.hashing import derive, short
from ...protocol.errors import Reason
from ..environments.environment import Branch
from .checks import CheckedRollout, Rejected

SURPRISE = 40.0
"""Least surprise of a window that counts, nats."""
SHARE = 0.5
"""Share of a rollout's sampled tokens, received before, that makes it a copy."""
SIZES = (32, 64, 128, 256, 512)
"""Sizes of windows, tokens, each twice the one before; the whole text of a branch is one more window."""
MAX_WINDOWS = 1 << 20
"""Most stored windows, one per 16 tokens: 1,024 rollouts of 16,384 tokens. The least recently found one is
dropped first."""
WINDOW_BYTES = 60
"""Bytes of memory per window that may be stored: 60 MiB for MAX_WINDOWS, less while few are stored."""

_MOST_SURPRISE = 2.5
"""Cap on a token's surprise, nats: no window that counts has fewer than 16 tokens."""
_PLACES = 4096
"""Most rollouts in a group (protocol/rollouts.py)."""
_STRIDE = 256
"""Least number of entries of the log that are looked through at a time."""
_AT_ONCE = 1 << 15
"""Most tokens of texts, padded to the longest of them, that are looked up at once."""
_NAME_BYTES = 8
"""Bytes of a node's id that are kept, to name it."""

Keys = NDArray[np.uint64]
Counts = NDArray[np.int64]
Rows = NDArray[np.int32]
Flags = NDArray[np.bool_]


class Owner(NamedTuple):
    """Sender of a rollout; of two, the one with the smaller (arrival, place) came first."""

    arrival: int
    place: int
    """Number of the rollout within the arrival; the same when it is verified again."""
    node: bytes


class CopyDetector:
    """Store of recently verified rollouts' texts, with the first sender of each.

    Takes WINDOW_BYTES for each of `max_windows`, a power of two, and up to 200 bytes for each token that is
    looked up at once: _AT_ONCE, or a longer rollout. Threads may share it: they take turns.
    """

    def __init__(self, max_windows: int = MAX_WINDOWS, *, secret: bytes | None = None) -> None:
        """`secret` decides the hashes; by default it is drawn."""
        self.hashes = WindowHashes(secrets.token_bytes(32) if secret is None else secret)
        self._windows = _Index(max_windows)
        self._turn = threading.RLock()

    def __len__(self) -> int:
        return len(self._windows)

    @property
    def nbytes(self) -> int:
        """Bytes of memory of a full store, now and later."""
        return self._windows.nbytes

    def check(
        self, arrival: int, node: bytes, rollout: CheckedRollout, *, top_p: float = 1.0
    ) -> None:
        """Store the new text of a rollout; raise Rejected(DUPLICATE) if it is a copy.

        `top_p` is that of its environment. Call it once for each rollout that passed the cheap checks;
        repeating a call is harmless. Takes some milliseconds for 16,384 tokens: not for an event loop.
        """
        owner = Owner(arrival, _place(rollout), node)
        with self._turn:
            earlier = _Earlier()
            texts = [self._find(branch, top_p, owner, earlier) for branch in rollout.branches]
            if earlier.tokens >= SHARE * max(1, earlier.of):
                # not stored: copies of the copy are the source's, too
                source = earlier.source(self._windows)
                raise Rejected(
                    Reason.DUPLICATE,
                    f"{earlier.tokens / earlier.of:.0%} of its tokens came with arrival {source.arrival} of "
                    f"{short(source.node)}",
                )
            for keys in texts:
                self._windows.store(keys, owner)

    def check_all(
        self, arrival: int, node: bytes, rollouts: Sequence[CheckedRollout], *, top_p: float = 1.0
    ) -> list[Rejected | None]:
        """Check rollouts in order, as check() does one; return the fault of each copy, None for the others.

        A call of numpy takes as long as some hundred tokens. So rollouts of which nothing was received before,
        as almost all, are looked up and stored together, and check() sees the others.
        """
        faults: list[Rejected | None] = []
        for part in _parts(rollouts):
            with self._turn:
                faults += self._check_part(arrival, node, part, top_p)
        return faults

    def _check_part(
        self, arrival: int, node: bytes, rollouts: Sequence[CheckedRollout], top_p: float
    ) -> list[Rejected | None]:
        texts = _Texts([branch for rollout in rollouts for branch in rollout.branches], top_p)
        windows = texts.windows(self.hashes)
        counts = [len(rollout.branches) for rollout in rollouts]
        owners = np.repeat(np.arange(len(rollouts)), counts)[windows.texts]
        places = np.array([_place(rollout) for rollout in rollouts], np.int32)
        stored = windows.aligned
        faults: list[Rejected | None] = [None] * len(rollouts)
        begin = 0
        for number in [*self._known(windows, owners), len(rollouts)]:
            new = stored[(owners[stored] >= begin) & (owners[stored] < number)]
            if len(new):
                owner = Owner(arrival, 0, node)
                self._windows.store(windows.keys[new], owner, places[owners[new]])
            if number < len(rollouts):
                try:
                    self.check(arrival, node, rollouts[number], top_p=top_p)
                except Rejected as fault:
                    faults[number] = fault
            begin = number + 1
        return faults

    def _known(self, windows: "_Windows", owners: Counts) -> list[int]:
        """List the rollouts with a window that is stored, or will be for one before it here, ascending.

        `owners` are the rollouts of the windows.
        """
        known = owners[self._windows.find(windows.keys)[0]]
        stored, first = np.unique(windows.keys[windows.aligned], return_index=True)
        if len(stored):
            # the first of equal keys is of the first rollout, as windows are in order of rollouts
            firsts = owners[windows.aligned][first]
            at = np.minimum(np.searchsorted(stored, windows.keys), len(stored) - 1)
            repeated = (stored[at] == windows.keys) & (firsts[at] < owners)
            known = np.concatenate([known, owners[repeated]])
        return np.unique(known).tolist()

    def _find(self, branch: Branch, top_p: float, owner: Owner, earlier: "_Earlier") -> Keys:
        """Add the tokens of a branch that were received earlier, each once; return the keys to store.

        Windows are taken in order of size, then of offset: a token counts for the first that holds it.
        """
        # logprobs over a support say all of the surprise
        text = _Text(branch, 1.0 if branch.support else top_p, self.hashes)
        earlier.of += len(text.tokens)
        covered = np.zeros(len(text.tokens), np.bool_)
        aligned: list[Keys] = []
        for size, starts, keys in text.windows():
            # Every size is stored, so that slightly understated logprobs do not lead to a size that is not.
            aligned.append(keys[starts % size == 0])
            fresh = _running(~covered)
            if fresh[-1] < len(covered):
                some = fresh[starts + size] > fresh[starts]
                starts, keys = starts[some], keys[some]
            places, rows = self._windows.find(keys)
            before = self._windows.is_before(rows, owner)
            rows, begin = rows[before], starts[places[before]]
            if not len(rows):
                continue
            end = begin + size
            # what the hit before this one covers is a prefix of this one
            after = np.maximum(begin, np.concatenate([begin[:1], end[:-1]]))
            counts = fresh[end] - fresh[after]
            some = counts > 0
            earlier.add(rows[some], counts[some])
            self._windows.touch(rows[some])
            edges = np.zeros(len(covered) + 1, np.int64)
            edges[begin] += 1
            edges[end] -= 1
            covered |= np.cumsum(edges[:-1]) > 0
        return np.concatenate([np.zeros(0, np.uint64), *aligned])


class _Earlier:
    """Tokens of a rollout that were received earlier, by the rows of the index that have them."""

    def __init__(self) -> None:
        self.tokens = 0
        self.of = 0
        """Tokens of the rollout."""
        self._rows: list[Rows] = []
        self._counts: list[Counts] = []

    def add(self, rows: Rows, counts: Counts) -> None:
        self._rows.append(rows)
        self._counts.append(counts)
        self.tokens += int(counts.sum())

    def source(self, windows: "_Index") -> Owner:
        """Return the owner of most of them; of several, the one that came first."""
        return windows.first_of_most(np.concatenate(self._rows), np.concatenate(self._counts))


class WindowHashes:
    """Keyed hashes of windows. A window's hash is made of those of its two halves.

    Two lanes of 32 bits, strongly universal at each doubling (multilinear, D. Lemire and O. Kaser, "Strongly
    universal string hashing is fast"): h = (k1 a + k2 b + k3 mod 2^64) >> 32. Two different windows of up to
    512 tokens collide in both lanes with probability (9 / 2^32)^2 = 4e-18 over the secret.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        doublings = SIZES[-1].bit_length() - 1
        count = doublings * 2 * 3 * 8 // 32 + 1
        random_bytes = b"".join(
            derive("windows of texts", secret, bytes([at])) for at in range(count)
        )
        numbers = np.frombuffer(random_bytes, np.uint64, doublings * 2 * 3)
        self._keys = numbers.reshape(doublings, 3, 2, 1)

    def sliding(self, tokens: NDArray[np.uint32]) -> Iterator[tuple[int, Keys]]:
        """Yield (size, hashes of the windows at every offset), the smallest windows first.

        `tokens` are a text, or several as rows.
        """
        lanes = np.stack([tokens.astype(np.uint64)] * 2)
        half = 1
        for first, second, third in self._keys.reshape(*self._keys.shape[:3], *[1] * tokens.ndim):
            if 2 * half > tokens.shape[-1]:
                return
            left, right = lanes[..., :-half] * first, lanes[..., half:] * second
            left += right
            left += third
            left >>= np.uint64(32)
            lanes, half = left, 2 * half
            if half in SIZES:
                yield half, lanes[0] << np.uint64(32) | lanes[1]

    def whole(self, tokens: NDArray[np.uint32]) -> Keys:
        """Return the hash [1] of a text of any length."""
        named = derive("whole text", self._secret, tokens.tobytes())
        return np.frombuffer(named, np.uint64, 1)


class _Text:
    """Sampled tokens of a branch, and its windows that have enough surprise."""

    def __init__(self, branch: Branch, top_p: float, hashes: WindowHashes) -> None:
        sampled = np.frombuffer(bytes(branch.sampled), np.bool_)
        # numpy takes several times as long to read a list as an array does
        self.tokens = np.frombuffer(array("I", branch.token_ids), np.uint32)[sampled]
        nats = -np.frombuffer(array("d", branch.logprobs))[sampled]
        self._nats = _running(_surprise(nats, log(top_p)))
        self._hashes = hashes

    def windows(self) -> Iterator[tuple[int, Counts, Keys]]:
        """Yield (size, starts, keys) of the windows that count, the smallest first."""
        length = len(self.tokens)
        largest = max((size for size in SIZES if size <= length), default=0)
        if largest and len(self._surprising(largest)):
            for size, keys in self._hashes.sliding(self.tokens):
                starts = self._surprising(size)
                yield size, starts, keys[starts]
        if length and length not in SIZES and self._nats[-1] >= SURPRISE:
            yield length, np.zeros(1, np.int64), self._hashes.whole(self.tokens)

    def _surprising(self, size: int) -> Counts:
        return np.flatnonzero(self._nats[size:] - self._nats[:-size] >= SURPRISE)


class _Windows(NamedTuple):
    """Windows of several texts that count, in order of the texts."""

    keys: Keys
    texts: Counts
    """Number of the text of each."""
    aligned: Counts
    """Those that are stored, ascending."""


class _Texts:
    """Sampled tokens of several branches as rows, each as long as the longest."""

    def __init__(self, branches: Sequence[Branch], top_p: float) -> None:
        sampled = [bytes(branch.sampled) for branch in branches]
        ids, logprobs = array("I"), array("d")
        for branch in branches:
            ids.fromlist(branch.token_ids)
            logprobs.fromlist(branch.logprobs)
        mask = np.frombuffer(b"".join(sampled), np.bool_)
        self._lengths = np.array([flags.count(1) for flags in sampled], np.int64)
        longest = int(self._lengths.max(initial=0))
        there = np.arange(longest) < self._lengths[:, None]
        self._tokens = np.zeros(there.shape, np.uint32)
        self._tokens[there] = np.frombuffer(ids, np.uint32)[mask]
        logs = np.repeat([0.0 if b.support else log(top_p) for b in branches], self._lengths)
        nats = np.zeros((len(branches), longest + 1))
        nats[:, 1:][there] = _surprise(-np.frombuffer(logprobs)[mask], logs)
        self._nats = np.cumsum(nats, axis=1)

    def windows(self, hashes: WindowHashes) -> _Windows:
        """Return the windows of all texts: the smallest of each first, as _Text.windows() has them."""
        keys, texts, aligned = (
            [np.zeros(0, np.uint64)],
            [np.zeros(0, np.int64)],
            [np.zeros(0, bool)],
        )
        for size, hashed in hashes.sliding(self._tokens):
            counts = self._nats[:, size:] - self._nats[:, :-size] >= SURPRISE
            counts &= np.arange(counts.shape[1]) <= self._lengths[:, None] - size
            rows, starts = np.nonzero(counts)
            keys.append(hashed[rows, starts])
            texts.append(rows)
            aligned.append(starts % size == 0)
        whole = [
            row
            for row, length in enumerate(self._lengths.tolist())
            if length and length not in SIZES and self._nats[row, length] >= SURPRISE
        ]
        keys += [hashes.whole(self._tokens[row, : self._lengths[row]]) for row in whole]
        texts.append(np.array(whole, np.int64))
        aligned.append(np.ones(len(whole), bool))
        rows = np.concatenate(texts)
        order = np.argsort(rows, kind="stable")
        return _Windows(
            np.concatenate(keys)[order],
            rows[order],
            np.flatnonzero(np.concatenate(aligned)[order]),
        )


class _Index:
    """Keys of windows with their owners: a hash table with chains, in arrays of a fixed size.

    Rows are dropped in the order in which they were last stored or touched: `_log` lists rows in that order,
    and an entry counts if it is the last of its row.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._used = 0
        """Rows that are in use: the first ones."""
        buckets = 1 << (4 * max_rows - 1).bit_length()
        self._mask = np.uint64(buckets - 1)
        self._heads = np.zeros(buckets, np.int32)
        """Bucket -> 1 + the first row of its chain; 0 where it is empty."""
        self._next = np.zeros(max_rows, np.int32)
        """Row -> 1 + the next row of its chain; 0 at the end."""
        self._keys = np.zeros(max_rows, np.uint64)
        self._arrivals = np.zeros(max_rows, np.int64)
        self._places = np.zeros(max_rows, np.int32)
        self._nodes = np.zeros((max_rows, _NAME_BYTES), np.uint8)
        self._logged = np.zeros(max_rows, np.int32)
        """Row -> its last entry in the log."""
        self._log = np.zeros(2 * max_rows, np.int32)
        self._log_begin = self._log_end = 0

    def __len__(self) -> int:
        return self._used

    @property
    def nbytes(self) -> int:
        arrays = (
            self._heads,
            self._next,
            self._keys,
            self._arrivals,
            self._places,
            self._nodes,
            self._logged,
            self._log,
        )
        return sum(each.nbytes for each in arrays)

    def find(self, keys: Keys) -> tuple[Counts, Rows]:
        """Return the places of the keys that are stored, ascending, and their rows."""
        at = self._heads.take(self._buckets(keys))
        places = np.flatnonzero(at > 0)
        rows, wanted = at[places] - 1, keys[places]
        matches: list[tuple[Counts, Rows]] = []
        while len(places):
            same = self._keys.take(rows) == wanted
            matches.append((places[same], rows[same]))
            at = self._next.take(rows)
            more = np.flatnonzero(~same & (at > 0))
            places, rows, wanted = places[more], at[more] - 1, wanted[more]
        if not matches:
            return np.zeros(0, np.int64), np.zeros(0, np.int32)
        places = np.concatenate([each for each, _ in matches])
        order = np.argsort(places)
        return places[order], np.concatenate([each for _, each in matches])[order]

    def is_before(self, rows: Rows, owner: Owner) -> Flags:
        """Return which rows have owners that came before `owner`."""
        arrivals, places = self._arrivals[rows], self._places[rows]
        return (arrivals < owner.arrival) | ((arrivals == owner.arrival) & (places < owner.place))

    def is_after(self, rows: Rows, owner: Owner) -> Flags:
        """Return which rows have owners that came after `owner`."""
        arrivals, places = self._arrivals[rows], self._places[rows]
        return (arrivals > owner.arrival) | ((arrivals == owner.arrival) & (places > owner.place))

    def owner(self, row: int) -> Owner:
        """Return the owner of a row; its node is the beginning of the id."""
        arrival, place = int(self._arrivals[row]), int(self._places[row])
        return Owner(arrival, place, self._nodes[row].tobytes())

    def first_of_most(self, rows: Rows, counts: Counts) -> Owner:
        """Return the owner whose rows have the largest sum of counts; of several, the one that came first."""
        order = np.lexsort((self._places[rows], self._arrivals[rows]))
        rows, counts = rows[order], counts[order]
        arrivals, places = self._arrivals[rows], self._places[rows]
        others = (arrivals[1:] != arrivals[:-1]) | (places[1:] != places[:-1])
        begins = np.concatenate([[0], np.flatnonzero(others) + 1])
        most = np.argmax(np.add.reduceat(counts, begins))
        return self.owner(int(rows[begins[most]]))

    def touch(self, rows: Rows) -> None:
        """Note that rows were found, in this order: they are dropped last."""
        rows = _last_of_each(rows)
        if self._log_end + len(rows) > len(self._log):
            log = self._log[self._log_begin : self._log_end]
            log = log[self._logged[log] == np.arange(self._log_begin, self._log_end)]
            self._log[: len(log)] = log
            self._logged[log] = np.arange(len(log))
            self._log_begin, self._log_end = 0, len(log)
        end = self._log_end + len(rows)
        self._log[self._log_end : end] = rows
        self._logged[rows] = np.arange(self._log_end, end)
        self._log_end = end

    def store(self, keys: Keys, owner: Owner, own_places: Rows | None = None) -> None:
        """Store keys for an owner, unless they are stored for one that came before; drop the oldest rows.

        `own_places` replace the owner's for each key, where none of them is stored.
        """
        first = np.sort(np.unique(keys, return_index=True)[1])
        keys = keys[first]
        places, rows = self.find(keys)
        after = self.is_after(rows, owner)
        theirs = np.full(len(keys), -1, np.int32)
        theirs[places] = rows
        new = theirs < 0
        mine = new.copy()
        mine[places[after]] = True
        # More than all rows: the last ones would push the others out.
        dropped = np.flatnonzero(mine)[: max(0, int(mine.sum()) - self._max_rows)]
        new[dropped] = mine[dropped] = False
        self.touch(theirs[mine & ~new])
        theirs[new] = self._free(int(new.sum()))
        rows = theirs[mine]
        self._arrivals[rows] = owner.arrival
        self._places[rows] = owner.place if own_places is None else own_places[first][mine]
        name = owner.node[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        self._nodes[rows] = np.frombuffer(name, np.uint8)
        self._link(theirs[new], keys[new])
        self.touch(rows)

    def _buckets(self, keys: Keys) -> Counts:
        return (keys & self._mask).view(np.int64)

    def _free(self, count: int) -> Rows:
        """Return `count` rows that are not in use; drop rows if all are."""
        unused = np.arange(self._used, min(self._used + count, self._max_rows), dtype=np.int32)
        self._used += len(unused)
        oldest: list[Rows] = []
        missing = count - len(unused)
        while missing:
            begin = self._log_begin
            end = min(begin + max(missing, _STRIDE), self._log_end)
            log = self._log[begin:end]
            last = np.flatnonzero(self._logged[log] == np.arange(begin, end))[:missing]
            oldest.append(log[last])
            missing -= len(last)
            self._log_begin = end if missing else begin + int(last[-1]) + 1
        if not oldest:
            return unused
        dropped = np.concatenate(oldest)
        self._unlink(dropped)
        return np.concatenate([unused, dropped])

    def _link(self, rows: Rows, keys: Keys) -> None:
        """Put rows at the heads of the chains of their keys."""
        if not len(rows):
            return
        self._keys[rows] = keys
        buckets = self._buckets(keys)
        order = np.argsort(buckets)
        rows, buckets = rows[order], buckets[order]
        same = buckets[1:] == buckets[:-1]
        # rows of one bucket follow each other, and the last one is followed by the chain
        self._next[rows] = self._heads[buckets]
        self._next[rows[:-1][same]] = rows[1:][same] + 1
        first = np.concatenate([[True], ~same])
        self._heads[buckets[first]] = rows[first] + 1

    def _unlink(self, rows: Rows) -> None:
        """Remove rows from their chains, one row of each bucket at a time."""
        while len(rows):
            buckets, first = np.unique(self._buckets(self._keys[rows]), return_index=True)
            these = rows[first]
            rows = np.delete(rows, first)
            before = np.full(len(these), -1, np.int32)
            at = self._heads[buckets] - 1
            while (ahead := at != these).any():
                before[ahead] = at[ahead]
                at[ahead] = self._next[at[ahead]] - 1
            after, heads = self._next[these], before < 0
            self._heads[buckets[heads]] = after[heads]
            self._next[before[~heads]] = after[~heads]


def _place(rollout: CheckedRollout) -> int:
    """Number a rollout within its arrival."""
    return rollout.group * _PLACES + rollout.index


def _parts(rollouts: Sequence[CheckedRollout]) -> Iterator[list[CheckedRollout]]:
    """Divide rollouts, in order, such that the branches of a part make _AT_ONCE tokens at most, padded."""
    part, branches, longest = list[CheckedRollout](), 0, 0
    for rollout in rollouts:
        lengths = [len(branch.token_ids) for branch in rollout.branches]
        longest, branches = max([longest, *lengths]), branches + len(lengths)
        if part and branches * longest > _AT_ONCE:
            yield part
            part, branches, longest = [], len(lengths), max(lengths, default=0)
        part.append(rollout)
    if part:
        yield part


def _surprise(nats: NDArray[np.float64], log_top_p: Any) -> NDArray[np.float64]:
    """Return what counts of tokens' surprise; `log_top_p` lowers it under a top-p."""
    return np.clip(np.where(np.isnan(nats), 0.0, nats) + log_top_p, 0.0, _MOST_SURPRISE)


def _running(values: NDArray[Any]) -> NDArray[Any]:
    """Return the sums of the first 0, 1, 2, ... values."""
    return np.concatenate([np.zeros(1, values.dtype), np.cumsum(values)])


def _last_of_each(rows: Rows) -> Rows:
    """Return each row once, in the order of their last occurrences."""
    last = len(rows) - 1 - np.unique(rows[::-1], return_index=True)[1]
    return rows[np.sort(last)]
