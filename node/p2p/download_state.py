"""The state of one fetch: missing chunks, the sources that hold them, downloads in progress.

Pure: time and randomness are arguments. A claim is only a hint; a chunk counts as held once it has arrived.

A claim keeps a chunk from the origin, and a line keeps other holders from it, only as long as its source has
patience left (SourceAccount). A source that lets us wait for more than that is doubted until the end of the
fetch: it may still send, but nobody waits for it. One that gave nothing yet keeps no chunk from one that did.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from statistics import median, median_low

from ...protocol.manifests import ChunkRef

LOOK_AT = 1024
"""Chunks compared for one choice; among more, sets are in random order anyway."""
COPIES_AT_ONCE = 2
"""Sources that may send one chunk at a time, the second because the first is late."""
LINES_AT_ONCE = 3
"""Upload queues to wait in for the same chunk; the first source that sends ends the others."""
IN_LINE_S = 2.0
"""Time after which a chunk that was requested may be requested from the origin, and the time that a source may
let us wait for nothing in one fetch before it is doubted. Both are shorter in a fetch that is usually short."""
LATE = 3.0
"""Times the median after which a chunk is late."""
LATE_LEAST_S = 0.5
SILENT_S = 2.0
"""A download without data for this long is late, also if the others are slower."""
PLACE_S = 0.1
"""Seconds that a source which was asked and sends nothing keeps its place in a fetch."""
FIRST_RATE = 256 * 1024
"""Bytes per second that a download is to reach before any chunk has arrived; later the others' median, divided
by LATE."""


@dataclass(eq=False)
class ChunkDownload:
    """One download under way."""

    source: bytes
    begun: float
    touched: float
    """Time of its last progress."""
    asked: float | None = None
    """Time of the request; `begun` moves on when the bytes come."""
    chunk: ChunkRef | None = None
    """None while the source has not chosen yet."""
    sending: bool = False
    """Whether its bytes are arriving; until then it waits in a queue."""
    received: int = 0
    heard: float = 0.0
    """Time of the last word of its source, also that we are in line."""
    leash: asyncio.Timeout | None = None

    def stop(self) -> None:
        """End it from outside: another one was faster."""
        if self.leash is not None:
            self.leash.reschedule(asyncio.get_running_loop().time())


@dataclass
class SourceAccount:
    """The time that a source has let us wait for nothing in this fetch."""

    patience: float
    """Seconds of that after which it is doubted."""
    spent: float = 0.0
    """Such seconds, without those since `owes_since`."""
    owes_since: float | None = None
    """Time of its last chunk, or of our first request after it owed us nothing; None: it owes us nothing."""
    requests: int = 0
    """Requests under way."""
    delivered: int = 0
    """Chunks that it gave."""
    asked: bool = False
    """Whether a request to it has ended."""

    def settle(self, now: float, allowance: float) -> None:
        """End the present wait, of which `allowance` seconds are usual."""
        if self.owes_since is not None:
            self.spent += max(0.0, now - self.owes_since - allowance)
            self.owes_since = None


@dataclass
class DownloadState:
    """The missing chunks, which leave as they arrive, and their sources and downloads."""

    missing: dict[bytes, ChunkRef]
    chance: Random
    patience: float = IN_LINE_S
    """Seconds after which the origin may be asked for a chunk that was requested from others."""
    place_s: float = PLACE_S
    """Seconds after which a source that was asked and sends nothing keeps no other one from taking part."""
    accounts: dict[bytes, SourceAccount] = field(default_factory=dict[bytes, SourceAccount])
    """Of the sources that claimed something."""
    _claims: dict[bytes, set[bytes]] = field(default_factory=dict[bytes, set[bytes]])
    """Source -> missing chunks that it says it holds."""
    _holders: Counter[bytes] = field(default_factory=Counter[bytes])
    _downloads: dict[bytes, list[ChunkDownload]] = field(
        default_factory=dict[bytes, list[ChunkDownload]]
    )
    _seconds: deque[float] = field(default_factory=lambda: deque[float](maxlen=32))
    _waits: deque[float] = field(default_factory=lambda: deque[float](maxlen=32))
    """Seconds from the request for a chunk to its arrival."""
    _rates: deque[float] = field(default_factory=lambda: deque[float](maxlen=32))
    _requested: dict[bytes, float] = field(default_factory=dict[bytes, float])
    """Time of the first request for each missing chunk."""

    @property
    def typical_s(self) -> float | None:
        """Median seconds of the last chunks; None before the first."""
        return median(self._seconds) if self._seconds else None

    def sending(self, now: float) -> int:
        """Number of downloads with bytes arriving, without those of doubted sources, and without slow ones of
        sources that gave nothing yet, each of which has one."""
        return sum(
            download.sending
            and not self.doubted(download.source, now)
            and (self._has_delivered(download.source) or self._keeps_pace(download, now))
            for downloads in self._downloads.values()
            for download in downloads
        )

    @property
    def touched(self) -> float:
        """Time of the last progress of the downloads whose bytes arrive."""
        downloads = (one for some in self._downloads.values() for one in some)
        return max((one.touched for one in downloads if one.sending), default=0.0)

    @property
    def heard(self) -> float:
        """Time at which a source last spoke about a download."""
        downloads = (one for some in self._downloads.values() for one in some)
        return max((one.heard for one in downloads), default=0.0)

    def claim(
        self, source: bytes, names: Iterable[bytes], *, patience: float | None = None
    ) -> bool:
        """Record that `source` says it holds these; return whether any of it is new.

        `patience`: seconds that it may let us wait for nothing; the first claim counts, None: as for chunks.
        """
        patience = self.patience if patience is None else min(patience, self.patience)
        self.accounts.setdefault(source, SourceAccount(patience))
        held = self._claims.setdefault(source, set())
        fresh = {name for name in names if name in self.missing} - held
        held |= fresh
        self._holders.update(fresh)
        return bool(fresh)

    def claims(self, source: bytes, name: bytes) -> bool:
        """Whether `source` says that it holds a chunk that is missing."""
        return name in self._claims.get(source, ())

    def doubted(self, source: bytes, now: float) -> bool:
        """Whether `source` has let us wait for too long to be counted upon in this fetch."""
        account = self.accounts.get(source)
        return account is not None and self.waited(source, now) >= account.patience

    def waited(self, source: bytes, now: float) -> float:
        """Seconds that `source` has let us wait for nothing, beyond what is usual."""
        account = self.accounts.get(source)
        if account is None:
            return 0.0
        if account.owes_since is None or self._flows(source, now):
            return account.spent
        return account.spent + max(0.0, now - account.owes_since - self._allowance)

    def gives(self, source: bytes, now: float) -> bool:
        """Whether `source` takes part to some purpose: it owes us nothing, or sends about as fast as others."""
        account = self.accounts.get(source)
        if account is None or source not in self._claims or self.doubted(source, now):
            return False
        if account.owes_since is None:
            return True
        usual = self._allowance if account.delivered else 0.0
        if now - account.owes_since <= max(self.place_s, usual):
            return True
        return any(
            one.source == source and one.sending and self._keeps_pace(one, now)
            for downloads in self._downloads.values()
            for one in downloads
        )

    def idle(self, source: bytes, now: float) -> bool:
        """Whether `source` gave nothing when it was asked, in more than the time that others take."""
        account = self.accounts.get(source)
        if account is None or account.delivered or not self._waits:
            return False
        return account.asked or (
            account.owes_since is not None and now - account.owes_since > self._allowance
        )

    def late(self, now: float) -> int:
        """Number of downloads that another source may join because they are late."""
        return sum(
            self._late(one, now, LATE_LEAST_S if self._has_delivered(one.source) else self.place_s)
            for downloads in self._downloads.values()
            for one in downloads
            if one.sending
        )

    def withdraw(self, source: bytes, now: float) -> None:
        """Forget what `source` says: it takes no part any more."""
        account = self.accounts.get(source)
        if account is not None:
            account.settle(now, self._allowance)
        for name in self._claims.pop(source, ()):
            self._holders[name] -= 1

    def next_of(self, source: bytes) -> ChunkRef | None:
        """Choose the rarest chunk that `source` holds and that is not under way; ties by chance."""
        free = (name for name in self._claims.get(source, ()) if name not in self._downloads)
        names = list(islice(free, LOOK_AT))
        if not names:
            return None
        rarest = min(names, key=lambda name: (self._holders[name], self.chance.random()))
        return self.missing[rarest]

    def late_of(self, source: bytes, now: float) -> ChunkRef | None:
        """A chunk that `source` holds too and that others let us wait for, or take too long to give."""
        for name, downloads in self._downloads.items():
            if self.claims(source, name) and self._may_join(name, downloads, source, now):
                return self.missing[name]
        return None

    def unheld(self, source: bytes, now: float) -> list[ChunkRef]:
        """List chunks for `source`, which has all: unclaimed, or claimed by stuck sources alone."""
        stuck = self._stuck(now)
        stuck_claims = Counter(name for one in stuck for name in self._claims.get(one, ()))
        return [
            chunk
            for name, chunk in self.missing.items()
            if (
                self._is_overdue(name, downloads, source, now)
                and (self._waited_long(name, now) or not self._others(name, downloads, stuck))
                if (downloads := self._downloads.get(name))
                else self._waited_long(name, now) or self._holders[name] <= stuck_claims[name]
            )
        ]

    def untouched(self, source: bytes, now: float) -> list[ChunkRef]:
        """List chunks that are not under way, or late, whether others hold them or not."""
        return [
            chunk
            for name, chunk in self.missing.items()
            if not (downloads := self._downloads.get(name))
            or self._is_overdue(name, downloads, source, now)
        ]

    def wants(self, name: bytes, source: bytes, now: float) -> bool:
        """Whether it helps that `source` sends a chunk now."""
        downloads = self._downloads.get(name, [])
        return name in self.missing and self._may_join(name, downloads, source, now)

    def starts(self, download: ChunkDownload, now: float) -> bool:
        """Record that the bytes of `download` come now; return False if another source sends them already."""
        downloads = self._downloads.get(download.chunk.digest, []) if download.chunk else []
        proven = self._has_delivered(download.source)
        others = [one for one in downloads if one is not download]
        rivals = [one for one in others if self._has_delivered(one.source) or not proven]
        if any(one.sending and not self._late(one, now) for one in rivals):
            return False
        download.sending = True
        for one in others:
            if not one.sending and (proven or not self._has_delivered(one.source)):
                one.stop()
        return True

    def begin(self, chunk: ChunkRef, download: ChunkDownload) -> None:
        """Record that `download` fetches `chunk` from now on."""
        download.chunk = chunk
        if download.asked is None:
            download.asked = download.begun
        self._downloads.setdefault(chunk.digest, []).append(download)
        self._requested.setdefault(chunk.digest, download.asked)
        account = self.accounts.get(download.source)
        if account is not None:
            account.requests += 1
            if account.owes_since is None:
                account.owes_since = download.asked

    def end(self, download: ChunkDownload, now: float, *, failed: bool = False) -> None:
        """Remove a download that is over; a source that `failed` to send goes on owing us a chunk."""
        if download.chunk is None:
            return
        account = self.accounts.get(download.source)
        if account is not None:
            account.requests -= 1
            account.asked = True
            if not failed and not account.requests:
                account.settle(now, self._allowance)
        downloads = self._downloads.get(download.chunk.digest, [])
        if download in downloads:
            downloads.remove(download)
        if not downloads:
            self._downloads.pop(download.chunk.digest, None)

    def arrived(
        self, chunk: ChunkRef, download: ChunkDownload, now: float
    ) -> list[ChunkDownload] | None:
        """Note that `download` brought a chunk; return all its downloads, now needless, or None if it was here
        already."""
        if self.missing.pop(chunk.digest, None) is None:
            return None
        account = self.accounts.get(download.source)
        if account is not None:
            account.delivered += 1
            account.settle(now, max(self._allowance, chunk.size / self._least_rate))
            account.owes_since = now
        # Only now: no source is measured by itself.
        seconds = now - download.begun
        self._seconds.append(seconds)
        self._waits.append(now - (download.begun if download.asked is None else download.asked))
        self._rates.append(chunk.size / max(seconds, 1e-4))
        del self._holders[chunk.digest]
        for source, held in self._claims.items():
            held.discard(chunk.digest)
            if not held:
                self.accounts[source].settle(now, self._allowance)
        self._requested.pop(chunk.digest, None)
        return self._downloads.pop(chunk.digest, [])

    @property
    def _allowance(self) -> float:
        """Seconds for a chunk, in queues and under way, that are not much more than the usual.

        Bounded: where slow sources alone deliver, what is usual is up to them.
        """
        usual = median_low(self._waits) if self._waits else 0.0
        return min(LATE * usual, usual + LATE * IN_LINE_S)

    @property
    def _least_rate(self) -> float:
        """Bytes per second below which a download counts as late."""
        return median(self._rates) / LATE if self._rates else FIRST_RATE

    def _in_time(self, download: ChunkDownload, now: float) -> bool:
        """Whether the bytes of a download come, and fast enough to be waited for."""
        due = self._least_rate * (now - download.begun - SILENT_S)
        return download.sending and now - download.touched <= SILENT_S and download.received >= due

    def _flows(self, source: bytes, now: float) -> bool:
        return any(
            download.source == source and self._in_time(download, now)
            for downloads in self._downloads.values()
            for download in downloads
        )

    def _waited_long(self, name: bytes, now: float) -> bool:
        """Whether a chunk was first requested so long ago that whoever claims it counts no more."""
        since = self._requested.get(name)
        if since is None or any(self._in_time(one, now) for one in self._downloads.get(name, ())):
            return False
        return now - since > self.patience + self._allowance

    def _may_join(
        self, name: bytes, downloads: list[ChunkDownload], source: bytes, now: float
    ) -> bool:
        if any(download.source == source for download in downloads) or self._has_failed(source):
            return False
        if source not in self.accounts and self._waited_long(name, now):
            return True  # whatever the others do
        if not any(download.sending for download in downloads):
            return self._lines(downloads, source, now) < LINES_AT_ONCE
        alive = [one for one in downloads if one.sending and now - one.touched <= SILENT_S]
        counted = [one for one in alive if not self.doubted(one.source, now)]
        if source not in self.accounts or not self._has_delivered(source):
            return len(counted) < COPIES_AT_ONCE and all(self._late(one, now) for one in alive)
        unproven = [one for one in alive if not self._has_delivered(one.source)]
        if unproven and not any(self._late(one, now, self.place_s) for one in unproven):
            return False
        proven = [one for one in counted if self._has_delivered(one.source)]
        return len(proven) < COPIES_AT_ONCE and all(self._late(one, now) for one in proven)

    def _lines(self, downloads: list[ChunkDownload], source: bytes, now: float) -> int:
        """Count the lines for a chunk that keep `source` from another one.

        Those at doubted sources do not, unless it is doubted itself. Those at sources that gave nothing yet do
        not keep out one that did, nor one that claims nothing: the origin, or a seed.
        """
        account = self.accounts.get(source)
        if self.doubted(source, now):
            return len(downloads)
        counted = [one for one in downloads if not self.doubted(one.source, now)]
        if account is None or account.delivered:
            counted = [one for one in counted if self._has_delivered(one.source)]
        return len(counted)

    def _has_delivered(self, source: bytes) -> bool:
        account = self.accounts.get(source)
        return account is None or account.delivered > 0

    def _has_failed(self, source: bytes) -> bool:
        """Whether `source` was asked in vain, gave nothing yet, and others did."""
        account = self.accounts.get(source)
        if account is None or not account.asked or account.delivered:
            return False
        return any(one.delivered for one in self.accounts.values())

    def _stuck(self, now: float) -> set[bytes]:
        """Sources that do not deliver: their other claims do not count either."""
        silent = {
            download.source
            for downloads in self._downloads.values()
            for download in downloads
            if download.sending and now - download.touched > SILENT_S
        }
        return silent | {source for source in self._claims if self.doubted(source, now)}

    def _others(self, name: bytes, downloads: list[ChunkDownload], stuck: set[bytes]) -> bool:
        """Return whether another source could be asked for a chunk in progress."""
        busy = stuck | {download.source for download in downloads}
        return any(name in held for one, held in self._claims.items() if one not in busy)

    def _is_overdue(
        self, name: bytes, downloads: list[ChunkDownload], source: bytes, now: float
    ) -> bool:
        waited = self._waited_long(name, now) or all(
            one.sending or now - one.begun > self.patience or self.doubted(one.source, now)
            for one in downloads
        )
        return waited and self._may_join(name, downloads, source, now)

    def _keeps_pace(self, download: ChunkDownload, now: float) -> bool:
        """Whether a download came at the least rate from `place_s` on."""
        due = self._least_rate * (now - download.begun - self.place_s)
        return download.received >= due and not self._late(download, now)

    def _late(self, download: ChunkDownload, now: float, least: float = LATE_LEAST_S) -> bool:
        if now - download.touched > SILENT_S:
            return True
        typical = self.typical_s
        if typical is None:
            return not self._in_time(download, now)
        return now - download.begun > max(LATE * typical, least)
