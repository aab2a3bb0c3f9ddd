"""The state of one fetch: missing chunks, the sources that hold them, downloads in progress.

Pure: time and randomness are arguments. A claim is only a hint; a chunk counts as held once it has arrived. A
claim keeps a chunk from being asked of the origin, and a place in a queue keeps other holders from being asked,
only while its source has patience left (SourceAccount). A source that keeps us waiting longer is doubted until
the end of the fetch: it may still send, but nobody waits for it. A source that gave nothing yet keeps no chunk
from one that did.
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
"""Chunks compared for one choice."""
COPIES_AT_ONCE = 2
"""Sources that may send one chunk at a time: the second because the first is late."""
LINES_AT_ONCE = 3
"""Upload queues to wait in for the same chunk; the first source that sends ends the others."""
IN_LINE_S = 2.0
"""Seconds after which a requested chunk may be requested from the origin, and for which a source may keep us
waiting in vain in one fetch before it is doubted. Both are shorter if the fetch is usually short."""
LATE = 3.0
"""Factor of the median time after which a chunk is late."""
LATE_LEAST_S = 0.5
SILENT_S = 2.0
"""Seconds without data after which a download is late, even if the others are slower."""
PLACE_S = 0.1
"""Seconds for which a source that was asked and sends nothing keeps its place in a fetch."""
FIRST_RATE = 256 * 1024
"""Bytes per second that a download should reach before any chunk has arrived, without a limit of our own; later
the others' median divided by LATE."""


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
    """None while the source has not chosen one yet."""
    sending: bool = False
    """Whether its bytes are arriving; until then it waits in a queue."""
    received: int = 0
    heard: float = 0.0
    """Time at which its source last sent anything, even that we are in its queue."""
    leash: asyncio.Timeout | None = None
    ended: bool = False

    def stop(self) -> None:
        """Call it to end the download from outside: another source was faster. Twice is fine."""
        if self.leash is not None and not self.leash.expired():
            self.leash.reschedule(asyncio.get_running_loop().time())


@dataclass
class SourceAccount:
    """Account of the time for which a source has kept us waiting in vain in this fetch."""

    patience: float
    """Seconds of that after which it is doubted."""
    spent: float = 0.0
    """Seconds waited in vain, without those since `owes_since`."""
    owes_since: float | None = None
    """Time of its last chunk, or of our first request after it owed us nothing; None if it owes us nothing."""
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
    """The missing chunks, which leave as they arrive, with their sources and downloads."""

    missing: dict[bytes, ChunkRef]
    chance: Random
    patience: float = IN_LINE_S
    """Seconds after which the origin may be asked for a chunk that was requested from others."""
    first_rate: float = FIRST_RATE
    """Bytes per second that a download should reach before any chunk has arrived."""
    place_s: float = PLACE_S
    """Seconds after which a source that was asked and sends nothing keeps no other source from taking part."""
    accounts: dict[bytes, SourceAccount] = field(default_factory=dict[bytes, SourceAccount])
    """Accounts of the sources that claimed something."""
    _claims: dict[bytes, dict[bytes, None]] = field(default_factory=dict[bytes, dict[bytes, None]])
    """The missing chunks that each source claims to hold, in order, so that a simulation repeats."""
    _holders: Counter[bytes] = field(default_factory=Counter[bytes])
    _downloads: dict[bytes, list[ChunkDownload]] = field(
        default_factory=dict[bytes, list[ChunkDownload]]
    )
    _by_source: dict[bytes, list[ChunkDownload]] = field(
        default_factory=dict[bytes, list[ChunkDownload]]
    )
    """The same downloads, by their source."""
    _seconds: deque[float] = field(default_factory=lambda: deque[float](maxlen=32))
    _waits: deque[float] = field(default_factory=lambda: deque[float](maxlen=32))
    """Seconds from the request for a chunk to its arrival."""
    _rates: deque[float] = field(default_factory=lambda: deque[float](maxlen=32))
    _requested: dict[bytes, float] = field(default_factory=dict[bytes, float])
    """Time of the first request for each missing chunk."""
    typical_s: float | None = None
    """Median seconds of the last chunks; None before the first."""
    _allowance: float = 0.0
    """Seconds within which a chunk, queues included, counts as usual."""
    _least_rate: float = 0.0
    """Bytes per second below which a download counts as late."""

    def __post_init__(self) -> None:
        self._least_rate = self.first_rate

    @property
    def under_way(self) -> int:
        """Count all downloads, also those that wait in a queue."""
        return sum(map(len, self._downloads.values()))

    def sending(self, now: float) -> int:
        """Count downloads whose bytes arrive, without those of doubted sources, and without slow ones of
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
        downloads = (download for some in self._downloads.values() for download in some)
        return max((download.touched for download in downloads if download.sending), default=0.0)

    @property
    def heard(self) -> float:
        """Time at which a source last spoke about a download."""
        downloads = (download for some in self._downloads.values() for download in some)
        return max((download.heard for download in downloads), default=0.0)

    def claim(
        self, source: bytes, names: Iterable[bytes], *, patience: float | None = None
    ) -> bool:
        """Record that `source` claims these chunks; return whether any claim is new.

        `patience`: seconds that it may keep us waiting in vain, by its first claim; None: as for chunks.
        """
        patience = self.patience if patience is None else min(patience, self.patience)
        self.accounts.setdefault(source, SourceAccount(patience))
        claimed = self._claims.setdefault(source, {})
        fresh = [
            name for name in dict.fromkeys(names) if name in self.missing and name not in claimed
        ]
        claimed.update(dict.fromkeys(fresh))
        self._holders.update(fresh)
        return bool(fresh)

    def may_give(self, source: bytes) -> bool:
        """Return whether `source` claims to hold anything that is missing."""
        return bool(self._claims.get(source))

    def claims(self, source: bytes, name: bytes) -> bool:
        """Return whether `source` claims to hold a chunk that is missing."""
        return name in self._claims.get(source, ())

    def doubted(self, source: bytes, now: float) -> bool:
        """Return whether `source` has kept us waiting too long to be relied on in this fetch."""
        account = self.accounts.get(source)
        return account is not None and self.waited(source, now) >= account.patience

    def waited(self, source: bytes, now: float) -> float:
        """Return the seconds that `source` has kept us waiting in vain, beyond what is usual."""
        account = self.accounts.get(source)
        if account is None:
            return 0.0
        if account.owes_since is None or self._flows(source, now):
            return account.spent
        return account.spent + max(0.0, now - account.owes_since - self._allowance)

    def gives(self, source: bytes, now: float) -> bool:
        """Return whether `source` is useful: it owes us nothing, or sends about as fast as others."""
        account = self.accounts.get(source)
        if account is None or source not in self._claims or self.doubted(source, now):
            return False
        if account.owes_since is None:
            return True
        usual = self._allowance if account.delivered else 0.0
        if now - account.owes_since <= max(self.place_s, usual):
            return True
        return any(
            download.sending and self._keeps_pace(download, now)
            for download in self._by_source.get(source, ())
        )

    def idle(self, source: bytes, now: float) -> bool:
        """Return whether `source` was asked and gave nothing, in more than the time that others take."""
        account = self.accounts.get(source)
        if account is None or account.delivered or not self._waits:
            return False
        return account.asked or (
            account.owes_since is not None and now - account.owes_since > self._allowance
        )

    def late(self, now: float) -> int:
        """Count downloads that another source may join because they are late."""
        return sum(
            self._late(
                download,
                now,
                LATE_LEAST_S if self._has_delivered(download.source) else self.place_s,
            )
            for downloads in self._downloads.values()
            for download in downloads
            if download.sending
        )

    def withdraw(self, source: bytes, now: float) -> None:
        """Forget what `source` claims: it takes part no more."""
        account = self.accounts.get(source)
        if account is not None:
            account.settle(now, self._allowance)
        for name in self._claims.pop(source, ()):
            self._holders[name] -= 1

    def next_of(self, source: bytes) -> ChunkRef | None:
        """Choose the rarest chunk that `source` holds and that is not under way; ties at random."""
        free = (name for name in self._claims.get(source, ()) if name not in self._downloads)
        names = list(islice(free, LOOK_AT))
        if not names:
            return None
        rarest = min(names, key=lambda name: (self._holders[name], self.chance.random()))
        return self.missing[rarest]

    def late_of(self, source: bytes, now: float) -> ChunkRef | None:
        """Choose a chunk that `source` has too and that other sources are late with."""
        for name, downloads in self._downloads.items():
            if self.claims(source, name) and self._may_join(name, downloads, source, now):
                return self.missing[name]
        return None

    def unheld(self, source: bytes, now: float) -> list[ChunkRef]:
        """List chunks to ask of `source`, which has all: unclaimed, or claimed only by sources that do not
        deliver."""
        stuck = self._stuck(now)
        stuck_claims = Counter(name for holder in stuck for name in self._claims.get(holder, ()))
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
        """Return whether it helps if `source` sends a chunk now."""
        downloads = self._downloads.get(name, [])
        return name in self.missing and self._may_join(name, downloads, source, now)

    def starts(self, download: ChunkDownload, now: float) -> bool:
        """Record that the bytes of `download` come now; return False if another source sends them already."""
        downloads = self._downloads.get(download.chunk.digest, []) if download.chunk else []
        proven = self._has_delivered(download.source)
        others = [other for other in downloads if other is not download]
        rivals = [other for other in others if self._has_delivered(other.source) or not proven]
        if any(rival.sending and not self._late(rival, now) for rival in rivals):
            return False
        download.sending = True
        for other in others:
            if not other.sending and (proven or not self._has_delivered(other.source)):
                other.stop()
        return True

    def begin(self, chunk: ChunkRef, download: ChunkDownload) -> None:
        """Record that `download` fetches `chunk` from now on."""
        download.chunk = chunk
        if download.asked is None:
            download.asked = download.begun
        self._downloads.setdefault(chunk.digest, []).append(download)
        self._by_source.setdefault(download.source, []).append(download)
        self._requested.setdefault(chunk.digest, download.asked)
        account = self.accounts.get(download.source)
        if account is not None:
            account.requests += 1
            if account.owes_since is None:
                account.owes_since = download.asked

    def end(self, download: ChunkDownload, now: float, *, failed: bool = False) -> None:
        """Remove a download that is over, once; a source that `failed` to send still owes us a chunk."""
        if download.chunk is None or download.ended:
            return
        download.ended = True
        account = self.accounts.get(download.source)
        if account is not None:
            account.requests -= 1
            account.asked = True
            if not failed and not account.requests:
                account.settle(now, self._allowance)
        downloads = self._downloads.get(download.chunk.digest, [])
        if download in downloads:
            downloads.remove(download)
            self._by_source[download.source].remove(download)
        if not downloads:
            self._downloads.pop(download.chunk.digest, None)

    def arrived(
        self, chunk: ChunkRef, download: ChunkDownload, now: float
    ) -> list[ChunkDownload] | None:
        """Note that `download` brought a chunk; return all its downloads, no longer needed, or None if it was
        here before."""
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
        self._learn_pace()
        del self._holders[chunk.digest]
        for source, claimed in self._claims.items():
            claimed.pop(chunk.digest, None)
            if not claimed:
                self.accounts[source].settle(now, self._allowance)
        self._requested.pop(chunk.digest, None)
        downloads = self._downloads.pop(chunk.digest, [])
        for other in downloads:
            self._by_source[other.source].remove(other)
        return downloads

    def _learn_pace(self) -> None:
        """Learn what is usual from the last chunks.

        The allowance is bounded: where only slow sources deliver, they would set what is usual.
        """
        self.typical_s = median(self._seconds)
        usual = median_low(self._waits)
        self._allowance = min(LATE * usual, usual + LATE * IN_LINE_S)
        self._least_rate = median(self._rates) / LATE

    def _in_time(self, download: ChunkDownload, now: float) -> bool:
        """Return whether a download's bytes arrive fast enough to wait for them."""
        due = self._least_rate * (now - download.begun - SILENT_S)
        return download.sending and now - download.touched <= SILENT_S and download.received >= due

    def _flows(self, source: bytes, now: float) -> bool:
        return any(self._in_time(download, now) for download in self._by_source.get(source, ()))

    def _waited_long(self, name: bytes, now: float) -> bool:
        """Return whether a chunk was first requested so long ago that claims to hold it no longer count."""
        since = self._requested.get(name)
        if since is None or any(
            self._in_time(download, now) for download in self._downloads.get(name, ())
        ):
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
        alive = [
            download
            for download in downloads
            if download.sending and now - download.touched <= SILENT_S
        ]
        counted = [download for download in alive if not self.doubted(download.source, now)]
        if source not in self.accounts or not self._has_delivered(source):
            return len(counted) < COPIES_AT_ONCE and all(
                self._late(download, now) for download in alive
            )
        unproven = [download for download in alive if not self._has_delivered(download.source)]
        if unproven and not any(self._late(download, now, self.place_s) for download in unproven):
            return False
        proven = [download for download in counted if self._has_delivered(download.source)]
        return len(proven) < COPIES_AT_ONCE and all(
            self._late(download, now) for download in proven
        )

    def _lines(self, downloads: list[ChunkDownload], source: bytes, now: float) -> int:
        """Count the queues for a chunk that keep `source` from joining another one.

        Those at doubted sources do not count, unless it is doubted itself. Those at sources that gave nothing
        yet do not keep out a source that did, nor one that claims nothing: the origin, or a seed.
        """
        account = self.accounts.get(source)
        if self.doubted(source, now):
            return len(downloads)
        counted = [download for download in downloads if not self.doubted(download.source, now)]
        if account is None or account.delivered:
            counted = [download for download in counted if self._has_delivered(download.source)]
        return len(counted)

    def _has_delivered(self, source: bytes) -> bool:
        account = self.accounts.get(source)
        return account is None or account.delivered > 0

    def _has_failed(self, source: bytes) -> bool:
        """Return whether `source` was asked and gave nothing yet, while others did."""
        account = self.accounts.get(source)
        if account is None or not account.asked or account.delivered:
            return False
        return any(account.delivered for account in self.accounts.values())

    def _stuck(self, now: float) -> set[bytes]:
        """Return the sources that do not deliver: their other claims do not count either."""
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
        return any(name in claimed for other, claimed in self._claims.items() if other not in busy)

    def _is_overdue(
        self, name: bytes, downloads: list[ChunkDownload], source: bytes, now: float
    ) -> bool:
        waited = self._waited_long(name, now) or all(
            download.sending
            or now - download.begun > self.patience
            or self.doubted(download.source, now)
            for download in downloads
        )
        return waited and self._may_join(name, downloads, source, now)

    def _keeps_pace(self, download: ChunkDownload, now: float) -> bool:
        """Return whether a download has come at the lowest allowed rate since `place_s`."""
        due = self._least_rate * (now - download.begun - self.place_s)
        return download.received >= due and not self._late(download, now)

    def _late(self, download: ChunkDownload, now: float, least: float = LATE_LEAST_S) -> bool:
        if now - download.touched > SILENT_S:
            return True
        typical = self.typical_s
        if typical is None:
            return not self._in_time(download, now)
        return now - download.begun > max(LATE * typical, least)
