"""A swarm of our bare nodes on a star of limited links: how a new version reaches all of them.

Node 0 is the trainer. Times count from one moment of the machine's monotonic clock, which all processes share.
"""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from swarm_links import Star
from swarm_programs import START_S, Meter, Program, Version, launcher

SCRIPT = Path(__file__).with_name("swarm_node.py")
LEAD_S = 0.5
"""For the order to reach every process before it starts."""
SETTLE_S = 3.0
"""For what is still in the queues of the links to drain before the next version."""
ASK_S = 30.0

Row = dict[str, Any]


class Swarm:
    """Running nodes that know each other."""

    def __init__(self, star: Star, nodes: list[Program], names: list[str]) -> None:
        self._star = star
        self._nodes = nodes
        self._names = names
        self._liar: int | None = None

    @property
    def liar(self) -> str:
        """The id of the node that gives out wrong bytes."""
        return "" if self._liar is None else self._names[self._liar]

    def workers(self) -> list[int]:
        """Everybody who fetches."""
        return [i for i in range(1, len(self._nodes)) if i != self._liar]

    async def corrupt(self, index: int, version: Version) -> None:
        """Let a node claim to hold `version`, and give out wrong bytes."""
        self._liar = index
        await self._hold(index, version, lie=True)

    async def spread(self, version: Version, deadline: float) -> Row:
        """Publish `version` at the trainer; returns when every worker holds it."""
        chunks = await self._hold(0, version, lie=False)
        await asyncio.sleep(SETTLE_S)
        before = await self.reports()
        meter = Meter(self._star)
        start = time.monotonic() + LEAD_S
        answers = await asyncio.gather(
            *(self._fetch(worker, chunks, start, deadline) for worker in self.workers())
        )
        figures = meter.read(version.size, self.workers())
        after = await self.reports()
        if any(answer["missing"] for answer in answers):
            raise RuntimeError("a node said that it had fetched what it does not hold")
        times = [answer["done"] - start for answer in answers]
        cpu = sum(one["cpu"] for one in after) - sum(one["cpu"] for one in before)
        given = sum(after[0]["served"].values()) - sum(before[0]["served"].values())
        return {
            "system": "primerl",
            "file": version.name,
            "workers": len(answers),
            "bytes": version.size,
            "first_s": min(times),
            "last_s": max(times),
            "given": given / version.size,
            "wasted": sum(answer["wasted"] for answer in answers),
            "cpu_s": cpu,
            "peak_mib": max(one["peak_kib"] for one in after) / 1024,
            **figures,
        }

    async def reports(self) -> list[Row]:
        """What every process says of itself."""
        return [await node.ask(ASK_S, do="report") for node in self._nodes]

    async def _hold(self, index: int, version: Version, *, lie: bool) -> list[list[Any]]:
        answer = await self._nodes[index].ask(
            ASK_S, do="hold", file=str(version.file), chunk=version.chunk, lie=lie
        )
        return answer["chunks"]

    async def _fetch(
        self, worker: int, chunks: list[list[Any]], start: float, deadline: float
    ) -> Row:
        neighbours = [name for i, name in enumerate(self._names) if i not in (0, worker)]
        return await self._nodes[worker].ask(
            deadline,
            do="fetch",
            chunks=chunks,
            neighbours=neighbours,
            origin=self._names[0],
            place=worker - 1,
            at=start,
        )


async def measure(
    star: Star, folder: Path, workers: int, versions: Sequence[Version], deadline: float
) -> list[Row]:
    """One row for each of `versions` but the first, which only makes the nodes meet."""
    rows: list[Row] = []
    async with _swarm(star, folder, workers + 1) as swarm:
        for version in versions:
            rows.append(await swarm.spread(version, deadline))
    return rows[1:]


async def measure_corruption(
    star: Star, folder: Path, workers: int, versions: Sequence[Version], deadline: float
) -> Row:
    """As measure(), with one more worker that claims to hold the second version and serves wrong bytes.

    `extra` is the most wrong chunks that one fetcher took from it over all versions; `late` what it took
    after that version, when it should be known.
    """
    warm_up, attacked, *later = versions
    liar = workers + 1
    async with _swarm(star, folder, workers + 2) as swarm:
        await swarm.spread(warm_up, deadline)
        honest = (await swarm.reports())[liar]["served"]
        for version in (attacked, *later):
            await swarm.corrupt(liar, version)
        row = await swarm.spread(attacked, deadline)
        first = (await swarm.reports())[liar]["served"]
        for version in later:
            await swarm.spread(version, deadline)
        last = (await swarm.reports())[liar]["served"]
    wrong = {peer: size - honest.get(peer, 0) for peer, size in last.items()}
    return row | {
        "system": "primerl, one liar",
        "extra": max(wrong.values(), default=0) / attacked.chunk,
        "extra_mean": sum(wrong.values()) / attacked.chunk / workers,
        "late": (sum(last.values()) - sum(first.values())) / attacked.chunk,
    }


@asynccontextmanager
async def _swarm(star: Star, folder: Path, count: int) -> AsyncGenerator[Swarm]:
    """`count` running nodes that know each other's addresses."""
    async with launcher(star, folder) as programs:
        nodes = [
            await programs.start([sys.executable, str(SCRIPT), star.address(index)])
            for index in range(count)
        ]
        hellos = await asyncio.gather(*(node.hear(START_S) for node in nodes))
        roster = [[hello["node"], hello["addresses"]] for hello in hellos]
        await asyncio.gather(*(node.ask(ASK_S, do="meet", nodes=roster) for node in nodes))
        yield Swarm(star, nodes, [hello["node"] for hello in hellos])
