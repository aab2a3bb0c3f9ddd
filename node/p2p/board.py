"""The book of one fetch: what is missing, who holds what of it, what is under way and for how long.

Pure: time and randomness are arguments. A claim is only a hint; nothing here counts as held until it arrived.
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
"""Lines that one may stand in for the same chunk; who begins to send ends the others."""
IN_LINE_S = 2.0
"""Who stands in line for longer may trouble the origin."""
LATE = 3.0
"""Times the median after which a chunk is late."""
LATE_LEAST_S = 0.5
SILENT_S = 2.0
"""A download that brings nothing for this long is late whatever the others do."""


@dataclass(eq=False)
class Pull:
    """One download under way."""

    source: bytes
    begun: float
    touched: float
    """When something last came of it."""
    chunk: ChunkRef | None = None
    """None while the source has not chosen yet."""
    sending: bool = False
    """Its bytes come; until then we stand in line."""
    received: int = 0
    leash: asyncio.Timeout | None = None

    def stop(self) -> None:
        """End it from outside: another one was faster."""
        if self.leash is not None:
            self.leash.reschedule(asyncio.get_running_loop().time())


@dataclass
class Board:
    """Made with what is missing; chunks leave it as they arrive."""

    missing: dict[bytes, ChunkRef]
    chance: Random
    _claims: dict[bytes, set[bytes]] = field(default_factory=dict[bytes, set[bytes]])
    """Source -> missing chunks that it says it holds."""
    _holders: Counter[bytes] = field(default_factory=Counter[bytes])
    _pulls: dict[bytes, list[Pull]] = field(default_factory=dict[bytes, list[Pull]])
    _seconds: deque[float] = field(default_factory=lambda: deque[float](maxlen=32))

    @property
    def typical_s(self) -> float | None:
        """Median seconds of the last chunks; None before the first."""
        return median(self._seconds) if self._seconds else None

    @property
    def sending(self) -> int:
        """Downloads whose bytes are coming."""
        return sum(pull.sending for pulls in self._pulls.values() for pull in pulls)

    @property
    def touched(self) -> float:
        """When something last came of any download under way."""
        return max((pull.touched for some in self._pulls.values() for pull in some), default=0.0)

    def claim(self, source: bytes, names: Iterable[bytes]) -> bool:
        """`source` says that it holds these; whether that is news."""
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
        """The chunk that `source` holds, nobody fetches and fewest hold; ties by chance."""
        free = (name for name in self._claims.get(source, ()) if name not in self._pulls)
        names = list(islice(free, LOOK_AT))
        if not names:
            return None
        rarest = min(names, key=lambda name: (self._holders[name], self.chance.random()))
        return self.missing[rarest]

    def late_of(self, source: bytes, now: float) -> ChunkRef | None:
        """A chunk that `source` holds too and that others let us wait for, or take too long to give."""
        for name, pulls in self._pulls.items():
            if self.claims(source, name) and self._may_join(pulls, source, now):
                return self.missing[name]
        return None

    def unheld(self, source: bytes, now: float) -> list[ChunkRef]:
        """What only `source`, who has everything, can give: no claims, or none that keeps its promise."""
        stuck = self._stuck(now)
        stuck_claims = Counter(name for one in stuck for name in self._claims.get(one, ()))
        return [
            chunk
            for name, chunk in self.missing.items()
            if (
                self._is_overdue(pulls, source, now) and not self._others(name, pulls, stuck)
                if (pulls := self._pulls.get(name))
                else self._holders[name] <= stuck_claims[name]
            )
        ]

    def untouched(self, source: bytes, now: float) -> list[ChunkRef]:
        """Everything that is not on its way, or is late, whoever holds it."""
        return [
            chunk
            for name, chunk in self.missing.items()
            if not (pulls := self._pulls.get(name)) or self._is_overdue(pulls, source, now)
        ]

    def wants(self, name: bytes, source: bytes, now: float) -> bool:
        """Whether it helps that `source` sends a chunk now."""
        pulls = self._pulls.get(name, [])
        return name in self.missing and self._may_join(pulls, source, now)

    def starts(self, pull: Pull, now: float) -> bool:
        """The bytes of `pull` come now; False when the same bytes come from elsewhere already."""
        pulls = self._pulls.get(pull.chunk.digest, []) if pull.chunk else []
        others = [one for one in pulls if one is not pull]
        if any(one.sending and not self._late(one, now) for one in others):
            return False
        pull.sending = True
        for one in others:
            if not one.sending:
                one.stop()
        return True

    def begin(self, chunk: ChunkRef, pull: Pull) -> None:
        """`pull` fetches `chunk` from now on."""
        pull.chunk = chunk
        self._pulls.setdefault(chunk.digest, []).append(pull)

    def end(self, pull: Pull) -> None:
        """`pull` is over, however it went."""
        if pull.chunk is None:
            return
        pulls = self._pulls.get(pull.chunk.digest, [])
        if pull in pulls:
            pulls.remove(pull)
        if not pulls:
            self._pulls.pop(pull.chunk.digest, None)

    def arrived(self, chunk: ChunkRef, seconds: float) -> list[Pull] | None:
        """A chunk is here: whose downloads of it are in vain now; None if it was here already."""
        if self.missing.pop(chunk.digest, None) is None:
            return None
        self._seconds.append(seconds)
        del self._holders[chunk.digest]
        for held in self._claims.values():
            held.discard(chunk.digest)
        return self._pulls.pop(chunk.digest, [])

    def _may_join(self, pulls: list[Pull], source: bytes, now: float) -> bool:
        if any(pull.source == source for pull in pulls):
            return False
        if not any(pull.sending for pull in pulls):
            return len(pulls) < LINES_AT_ONCE
        alive = [one for one in pulls if one.sending and now - one.touched <= SILENT_S]
        return len(alive) < COPIES_AT_ONCE and all(self._late(one, now) for one in alive)

    def _stuck(self, now: float) -> set[bytes]:
        """Sources that do not give what they promised: nobody should wait for the rest of their claims."""
        return {
            pull.source
            for pulls in self._pulls.values()
            for pull in pulls
            if (now - pull.touched > SILENT_S if pull.sending else now - pull.begun > 2 * IN_LINE_S)
        }

    def _others(self, name: bytes, pulls: list[Pull], stuck: set[bytes]) -> bool:
        """Whether somebody else could be asked for a chunk that is under way."""
        busy = stuck | {pull.source for pull in pulls}
        return any(name in held for one, held in self._claims.items() if one not in busy)

    def _is_overdue(self, pulls: list[Pull], source: bytes, now: float) -> bool:
        waited = (one.sending or now - one.begun > IN_LINE_S for one in pulls)
        return all(waited) and self._may_join(pulls, source, now)

    def _late(self, pull: Pull, now: float) -> bool:
        typical = self.typical_s
        slow = typical is not None and now - pull.begun > max(LATE * typical, LATE_LEAST_S)
        return slow or now - pull.touched > SILENT_S
