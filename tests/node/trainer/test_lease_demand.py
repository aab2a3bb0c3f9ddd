"""How many leases a worker asks for: enough for its engine and one in reserve, or what it was told."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.swarm import Swarm, key_of
from support.witness import Fakes, WitnessEngine

ROLLOUTS = {"group_size": 4, "groups_per_batch": 16, "groups_per_lease": 1}


class Valve:
    """Lets engines draw a certain number of tokens."""

    def __init__(self) -> None:
        self.tokens = asyncio.Semaphore(0)
        self.shut = False

    def open(self) -> None:
        self.shut = False
        self.tokens.release()

    async def pause(self) -> None:
        if self.shut:
            await self.tokens.acquire()
            self.tokens.release()


@pytest.mark.parametrize(
    ("section", "leases", "inflight"),
    [
        pytest.param({"max_batch": 8}, 3, 8, marks=pytest.mark.slow),
        pytest.param({"max_batch": 6}, 3, 6, marks=pytest.mark.slow),
        ({"max_batch": 6, "dp": 2}, 4, 12),
    ],
    ids=["another batch", "what it batches", "two engines"],
)
async def test_a_worker_holds_what_its_engine_can_do_and_one_lease_more(
    tmp_path: Path,
    model_dir: Path,
    section: dict[str, Any],
    leases: int,
    inflight: int,
) -> None:
    valve = Valve()
    fakes = Fakes(pause=valve.pause)
    engine = WitnessEngine(fakes, "w1")
    async with Swarm(tmp_path, model_dir, fakes=fakes, max_steps=2, rollouts=ROLLOUTS) as swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("w1", engine=engine, engine_section=section)
        await swarm.wait_step(1)  # it is trusted now
        valve.shut = True
        seen: list[tuple[int, int]] = []
        async with asyncio.timeout(60):
            while seen[-30:] != [(leases, inflight)] * 30:
                await asyncio.sleep(0.01)
                seen.append(((await worker.status())["leases"], engine.waiting))
        assert max(count for _, count in seen) <= inflight
        shown = (await worker.status())["engine"]
        assert (shown["inflight"], shown["running"]) == (inflight, inflight)
        valve.open()
        await swarm.finished()


@pytest.mark.parametrize(("named", "leases"), [(True, 3), (False, 1)], ids=["named", "a stranger"])
async def test_a_worker_that_the_operator_named_need_not_earn_its_first_leases(
    tmp_path: Path, model_dir: Path, named: bool, leases: int
) -> None:
    valve = Valve()
    valve.shut = True
    fakes = Fakes(pause=valve.pause)
    references = [key_of("w1").node_id.hex()] if named else []
    async with Swarm(
        tmp_path,
        model_dir,
        fakes=fakes,
        rollouts=ROLLOUTS,
        engine={"dtype": "bfloat16"},
        verification={"references": references},
    ) as swarm:
        await swarm.start_trainer()
        section = {"dtype": "bfloat16", "max_batch": 8}
        worker = swarm.add_worker("w1", engine=WitnessEngine(fakes, "w1"), engine_section=section)
        seen: list[int] = []
        async with asyncio.timeout(60):
            while seen[-30:] != [leases] * 30:
                await asyncio.sleep(0.01)
                seen.append((await worker.status())["leases"])
        assert max(seen) == leases
        valve.open()
