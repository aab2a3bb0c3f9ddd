"""The state of one fetch: missing chunks, the sources that hold them, downloads in progress.

Pure: time and randomness are arguments. A claim is only a hint; a chunk counts as held once it has arrived.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from statistics import median

from ...protocol.manifests import ChunkRef

LOOK_AT = 1024
"""Chunks compared for one choice; among more, sets are in random order anyway."""
COPIES_AT_ONCE = 2
"""Sources that may send one chunk at a time, the second because the first is late."""
LINES_AT_ONCE = 3
"""Upload queues to wait in for the same chunk; the first source that sends ends the others."""
IN_LINE_S = 2.0
"""Time in upload queues after which a chunk may be requested from the origin."""
LATE = 3.0
"""Times the median after which a chunk is late."""
LATE_LEAST_S = 0.5
SILENT_S = 2.0
"""A download without data for this long is late, also if the others are slower."""


@dataclass(eq=False)
class ChunkDownload:
    """One download under way."""

    source: bytes
    begun: float
    touched: float
    """Time of its last progress."""
    chunk: ChunkRef | None = None
    """None while the source has not chosen yet."""
    sending: bool = False
    """Whether its bytes are arriving; until then it waits in a queue."""
    received: int = 0
    leash: asyncio.Timeout | None = None

    def stop(self) -> None:
        """End it from outside: another one was faster."""
        if self.leash is not None:
            self.leash.reschedule(asyncio.get_running_loop().time())


@dataclass
class DownloadState:
    """The missing chunks, which leave as they arrive, and their sources and downloads."""

    missing: dict[bytes, ChunkRef]
    chance: Random
    _claims: dict[bytes, set[bytes]] = field(default_factory=dict[bytes, set[bytes]])
    """Source -> missing chunks that it says it holds."""
    _holders: Counter[bytes] = field(default_factory=Counter[bytes])
    _downloads: dict[bytes, list[ChunkDownload]] = field(
        default_factory=dict[bytes, list[ChunkDownload]]
    )
    _seconds: deque[float] = field(default_factory=lambda: deque[float](maxlen=32))

    @property
    def typical_s(self) -> float | None:
        """Median seconds of the last chunks; None before the first."""
        return median(self._seconds) if self._seconds else None

    @property
    def sending(self) -> int:
        """Number of downloads with bytes arriving."""
        return sum(
            download.sending for downloads in self._downloads.values() for download in downloads
        )

    @property
    def touched(self) -> float:
        """Time of the last progress of any download."""
        return max(
            (download.touched for some in self._downloads.values() for download in some),
            default=0.0,
        )

    def claim(self, source: bytes, names: Iterable[bytes]) -> bool:
        """Record that `source` says it holds these; return whether any of it is new."""
        held = self._claims.setdefault(source, set())
        fresh = {name for name in names if name in self.missing} - held
        held |= fresh
        self._holders.update(fresh)
        return bool(fresh)

    def claims(self, source: bytes, name: bytes) -> bool:
        """Whether `source` says that it holds a chunk that is missing."""
        return name in self._claims.get(source, ())

    def withdraw(self, source: bytes) -> None:
        """Forget what `source` says."""
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
            if self.claims(source, name) and self._may_join(downloads, source, now):
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
                self._is_overdue(downloads, source, now)
                and not self._others(name, downloads, stuck)
                if (downloads := self._downloads.get(name))
                else self._holders[name] <= stuck_claims[name]
            )
        ]

    def untouched(self, source: bytes, now: float) -> list[ChunkRef]:
        """List chunks that are not under way, or late, whether others hold them or not."""
        return [
            chunk
            for name, chunk in self.missing.items()
            if not (downloads := self._downloads.get(name))
            or self._is_overdue(downloads, source, now)
        ]

    def wants(self, name: bytes, source: bytes, now: float) -> bool:
        """Whether it helps that `source` sends a chunk now."""
        downloads = self._downloads.get(name, [])
        return name in self.missing and self._may_join(downloads, source, now)

    def starts(self, download: ChunkDownload, now: float) -> bool:
        """Record that the bytes of `download` come now; return False if another source sends them already."""
        downloads = self._downloads.get(download.chunk.digest, []) if download.chunk else []
        others = [one for one in downloads if one is not download]
        if any(one.sending and not self._late(one, now) for one in others):
            return False
        download.sending = True
        for one in others:
            if not one.sending:
                one.stop()
        return True

    def begin(self, chunk: ChunkRef, download: ChunkDownload) -> None:
        """Record that `download` fetches `chunk` from now on."""
        download.chunk = chunk
        self._downloads.setdefault(chunk.digest, []).append(download)

    def end(self, download: ChunkDownload) -> None:
        """Remove a download that is over, however it went."""
        if download.chunk is None:
            return
        downloads = self._downloads.get(download.chunk.digest, [])
        if download in downloads:
            downloads.remove(download)
        if not downloads:
            self._downloads.pop(download.chunk.digest, None)

    def arrived(self, chunk: ChunkRef, seconds: float) -> list[ChunkDownload] | None:
        """Note the arrival of a chunk; return its other downloads, now needless, or None if it was here
        already."""
        if self.missing.pop(chunk.digest, None) is None:
            return None
        self._seconds.append(seconds)
        del self._holders[chunk.digest]
        for held in self._claims.values():
            held.discard(chunk.digest)
        return self._downloads.pop(chunk.digest, [])

    def _may_join(self, downloads: list[ChunkDownload], source: bytes, now: float) -> bool:
        if any(download.source == source for download in downloads):
            return False
        if not any(download.sending for download in downloads):
            return len(downloads) < LINES_AT_ONCE
        alive = [one for one in downloads if one.sending and now - one.touched <= SILENT_S]
        return len(alive) < COPIES_AT_ONCE and all(self._late(one, now) for one in alive)

    def _stuck(self, now: float) -> set[bytes]:
        """Sources that do not deliver: their other claims do not count either."""
        return {
            download.source
            for downloads in self._downloads.values()
            for download in downloads
            if (
                now - download.touched > SILENT_S
                if download.sending
                else now - download.begun > 2 * IN_LINE_S
            )
        }

    def _others(self, name: bytes, downloads: list[ChunkDownload], stuck: set[bytes]) -> bool:
        """Return whether another source could be asked for a chunk in progress."""
        busy = stuck | {download.source for download in downloads}
        return any(name in held for one, held in self._claims.items() if one not in busy)

    def _is_overdue(self, downloads: list[ChunkDownload], source: bytes, now: float) -> bool:
        waited = (one.sending or now - one.begun > IN_LINE_S for one in downloads)
        return all(waited) and self._may_join(downloads, source, now)

    def _late(self, download: ChunkDownload, now: float) -> bool:
        typical = self.typical_s
        slow = typical is not None and now - download.begun > max(LATE * typical, LATE_LEAST_S)
        return slow or now - download.touched > SILENT_S
