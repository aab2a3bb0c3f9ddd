"""Fetching what no neighbour holds: from seeds first, else from the origin, who has everything and little time.

The origin chooses which chunk it sends, and sends none that others are about to pass on: NOT_YET. Only who
has nobody else, or has seen nothing happen for long, is `urgent`; so nobody waits for ever for anybody.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

from ...crypto.hashing import short
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import ChunkRef
from ..ops.errors import NetworkError
from .board import Pull
from .chunk_source import ChunkSource, PeerPaths
from .job import Job, gone_from_origin, other_way_s
from .rpc import Refused
from .transport import TransportError

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""Without any progress for this long the origin is asked to send whatever it sent to others."""
OFFERED = 512
"""Chunks that one question to the origin names: a sample of what is missing, so that questions stay small."""
REST_FIRST_S = 0.1
REST_MAX_S = 1.0
LOOK_S_PER_CHUNK = 1e-5
GIVE_UP_S = 6.0
"""An origin that fails for so long, while nothing comes from others, ends the fetch."""
STUCK_S = 120.0


class Origin:
    """The origin in one fetch; loops number 0 to n - 1 share it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tools = job.tools
        self._asked = 0
        """Questions that were not answered yet."""
        self._rest = REST_FIRST_S
        self._resting_until = 0.0
        self._failing_since: float | None = None
        self._absent: dict[str, set[bytes]] = {seed.name: set() for seed in job.tools.seeds}

    async def run(self, number: int) -> None:
        """Ask the origin whenever there is something to ask for."""
        while True:
            now = time.monotonic()
            self._give_up(now)
            if now < self._resting_until:
                await asyncio.sleep(self._resting_until - now)
            elif number >= self._job.depth() or self._job.full():
                await self._job.wait_news()
            elif len(wanted := self._wanted(now)) <= self._asked:
                await self._look_later()
            else:
                await self._ask(wanted)

    async def _look_later(self) -> None:
        """Looking takes time in proportion to what is missing: not at every piece of news."""
        await asyncio.sleep(LOOK_S_PER_CHUNK * len(self._job.board.missing))
        await self._job.wait_news()

    # -- the origin ------------------------------------------------------------------------------

    def _wanted(self, now: float) -> list[ChunkRef]:
        board, origin = self._job.board, self._job.origin
        if self._impatient(now):
            return board.untouched(origin, now)
        unheld = board.unheld(origin, now)
        awake = [one for one in self._tools.seeds if self._awake(one, now)]
        if not awake:
            return unheld
        return [
            chunk
            for chunk in unheld
            if all(chunk.digest in self._absent[seed.name] for seed in awake)
        ]

    def _impatient(self, now: float) -> bool:
        return now - self._job.progressed > PATIENCE_S

    async def _ask(self, wanted: list[ChunkRef]) -> None:
        now = time.monotonic()
        urgent = not self._job.neighbours or self._impatient(now)
        chance = self._job.board.chance
        offered = chance.sample(wanted, OFFERED) if len(wanted) > OFFERED else wanted
        pull = self._job.pull(self._job.origin, None)
        self._asked += 1
        paths, standing = self._tools.paths, self._tools.standing
        around = paths if standing.detoured(pull.source, now) else None
        try:
            won = await self._job.attempt(pull, lambda: self._get(offered, pull, urgent, around))
        except Refused as refusal:
            self._refused(refusal, offered)
        except RemoteProtocolError as error:
            logger.warning("bad chunk from %s: %s", short(pull.source), error)
            self._tools.peers.blame(pull.source, error.reason)
            self._failed()
        except TransportError as error:
            logger.info("no chunk from %s: %s", short(pull.source), error)
            self._tools.peers.failed(pull.source)
            if paths is not None:
                standing.path_failed(pull.source, time.monotonic(), detour=around is not None)
            self._failed()
        else:
            if won and pull.chunk is not None:
                self._served(pull, pull.chunk)
        finally:
            if pull.chunk is None:
                self._asked -= 1

    async def _get(
        self, offered: Sequence[ChunkRef], pull: Pull, urgent: bool, around: PeerPaths | None
    ) -> bytes | None:
        if around is not None:
            chunk = self._job.board.chance.choice(offered)
            self._take(chunk, pull)
            return await around.get(pull.source, chunk, deadline=other_way_s(chunk))
        return await self._tools.downloads.any(
            offered, pull, urgent=urgent, take=lambda chunk: self._take(chunk, pull)
        )

    def _take(self, chunk: ChunkRef, pull: Pull) -> bool:
        """The origin chose; whether we still want it."""
        now = time.monotonic()
        wanted = self._job.board.wants(chunk.digest, pull.source, now)
        if wanted:
            pull.begun = now
            self._asked -= 1
            self._job.board.begin(chunk, pull)
            self._job.board.starts(pull, now)
        self._job.told()
        return wanted

    def _served(self, pull: Pull, chunk: ChunkRef) -> None:
        self._rest = REST_FIRST_S
        self._failing_since = None
        self._tools.peers.served(pull.source, chunk.size, time.monotonic() - pull.begun)

    def _refused(self, refusal: Refused, offered: Sequence[ChunkRef]) -> None:
        if refusal.reason == Reason.NOT_FOUND:
            self._job.fail(gone_from_origin(offered))
        elif refusal.reason in (Reason.NOT_YET, Reason.BUSY, Reason.RATE_LIMITED):
            self._failing_since = None
            self._pause()
        else:
            logger.info("%s refuses: %s", short(self._job.origin), refusal)
            self._failed()

    def _failed(self) -> None:
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        self._pause()

    def _pause(self) -> None:
        self._resting_until = time.monotonic() + self._rest
        self._rest = min(2 * self._rest, REST_MAX_S)

    def _give_up(self, now: float) -> None:
        quiet = now - self._job.progressed
        failing = self._failing_since is not None and now - self._failing_since > GIVE_UP_S
        stuck = min(quiet, now - self._job.board.touched) > STUCK_S
        if stuck or (failing and quiet > GIVE_UP_S):
            left = len(self._job.board.missing)
            self._job.fail(NetworkError(f"{left} chunk(s) could not be fetched from anybody"))

    # -- seeds -----------------------------------------------------------------------------------

    async def run_seed(self, seed: ChunkSource) -> None:
        """Fetch from a seed what no neighbour holds."""
        while True:
            now = time.monotonic()
            absent = self._absent[seed.name]
            source = seed.name.encode()
            free = [
                chunk for chunk in self._job.board.unheld(source, now) if chunk.digest not in absent
            ]
            if not self._awake(seed, now) or not free or self._job.full():
                await self._job.wait_news()
            else:
                await self._ask_seed(seed, self._job.board.chance.choice(free))

    def _awake(self, seed: ChunkSource, now: float) -> bool:
        name, standing = seed.name.encode(), self._tools.standing
        return not standing.resting(name, now) and not standing.shunned(name, now)

    async def _ask_seed(self, seed: ChunkSource, chunk: ChunkRef) -> None:
        pull = self._job.pull(seed.name.encode(), chunk, sending=True)
        deadline = other_way_s(chunk)
        try:
            await self._job.attempt(pull, lambda: seed.get(chunk, deadline=deadline))
        except Refused:
            self._absent[seed.name].add(chunk.digest)
        except RemoteProtocolError as error:
            logger.warning("bad chunk from %s: %s", seed.name, error)
            self._tools.standing.lied(pull.source, time.monotonic())
        except TransportError as error:
            logger.info("no chunk from %s: %s", seed.name, error)
            self._tools.standing.rest(pull.source, time.monotonic())
