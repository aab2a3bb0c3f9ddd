"""A worker whose engine dies: others get its leases at once, it goes on when the engine is back, or ends."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.swarm import Swarm
from support.waiting import until
from support.witness import Fakes, WitnessEngine

from primerl.node.errors import EngineError, EngineLost, NodeError
from primerl.node.inference.engine import Completion, EngineStats, GenerateRequest
from primerl.node.weights.state import Changed, State

FAULT = "vLLM ran out of GPU memory: lower engine.max_batch"
ROLLOUTS = {"group_size": 4, "groups_per_batch": 6, "groups_per_lease": 1, "lease_timeout_s": 600.0}


class MortalEngine(WitnessEngine):
    """A WitnessEngine that can be killed, and started again."""

    def __init__(self, fakes: Fakes, name: str) -> None:
        super().__init__(fakes, name, self._wait)
        self._go = asyncio.Event()
        self._told = EngineStats()
        self._died = asyncio.Event()
        self._error: NodeError = EngineLost(FAULT)
        self.loadable = asyncio.Event()
        self.loadable.set()

    async def _wait(self) -> None:
        await self._go.wait()

    def free(self) -> None:
        """Generate without a pause from now on."""
        self._go.set()

    def hold(self) -> None:
        """Draw nothing until it is freed."""
        self._go.clear()

    def die(self, error: NodeError) -> None:
        self._error = error
        self._told = replace(self._told, fault=FAULT)
        self._died.set()

    def revive(self) -> None:
        self._told = replace(self._told, fault="", restarts=self._told.restarts + 1)
        self._died = asyncio.Event()

    async def update(self, version: int, state: State, changed: Changed) -> None:
        """Waits until it is alive, and until the test lets it."""
        await self.loadable.wait()
        await super().update(version, state, changed)

    async def generate(self, request: GenerateRequest) -> Completion:
        if self._died.is_set():
            raise self._error
        drawing = asyncio.create_task(super().generate(request))
        dying = asyncio.create_task(self._died.wait())
        try:
            await asyncio.wait({drawing, dying}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            dying.cancel()
            if not drawing.done():
                drawing.cancel()
        if drawing.done():
            return drawing.result()
        raise self._error

    def stats(self) -> EngineStats:
        return replace(self._told, running=self.waiting)


async def leases_of(swarm: Swarm, name: str) -> int:
    """Leases that the trainer says a worker holds."""
    wanted = swarm.workers[name].node_id.hex()
    rows = await swarm.trainer.peers()
    return next((row["leases"] for row in rows if row["id"] == wanted), 0)


async def wait_leases(swarm: Swarm, name: str, least: int, most: int) -> None:
    """Wait until the trainer says that a worker holds so many."""
    async with asyncio.timeout(60):
        while True:
            if least <= await leases_of(swarm, name) <= most:
                return
            await asyncio.sleep(0.02)


async def test_a_lost_engine_gives_its_leases_to_others_and_works_on_when_it_is_back(
    tmp_path: Path, model_dir: Path
) -> None:
    fakes = Fakes(last_step=2)
    mortal = MortalEngine(fakes, "w1")
    async with Swarm(tmp_path, model_dir, fakes=fakes, max_steps=8, rollouts=ROLLOUTS) as swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("w1", engine=mortal)
        await until(lambda: mortal.waiting == 4)
        asked = fakes.prompts("w1")
        mortal.die(EngineLost(FAULT))
        await wait_leases(swarm, "w1", 0, 0)
        shown = (await worker.status())["engine"]
        assert (shown["fault"], shown["restarts"], shown["inflight"]) == (FAULT, 0, 0)

        swarm.add_worker("w2")
        await swarm.wait_step(2)
        assert asked <= fakes.prompts("w2")
        assert await leases_of(swarm, "w1") == 0
        assert fakes.prompts("w1") == asked

        await swarm.stop_worker("w2")  # what is left is for the one that comes back
        fakes.go.set()
        mortal.free()
        mortal.revive()
        summary = await swarm.finished()
        await worker.ended()
    assert fakes.prompts("w1") > asked
    assert summary["rejected"].keys() <= {"stale"}
    assert (worker.data_dir / "last_status.json").read_text().count('"restarts": 1') == 1


async def test_leases_that_wait_for_a_version_of_a_lost_engine_go_to_others_too(
    tmp_path: Path, model_dir: Path
) -> None:
    fakes = Fakes()
    mortal = MortalEngine(fakes, "w1")
    async with Swarm(tmp_path, model_dir, fakes=fakes, max_steps=6, rollouts=ROLLOUTS) as swarm:
        await swarm.start_trainer()
        mortal.free()
        mortal.loadable.clear()
        worker = swarm.add_worker("w1", engine=mortal)
        await swarm.wait_step(1)
        await wait_leases(swarm, "w1", 1, 16)
        await until(lambda: mortal.waiting == 0)
        mortal.die(EngineLost(FAULT))
        await wait_leases(swarm, "w1", 0, 0)
        mortal.revive()
        mortal.loadable.set()
        await swarm.finished()
        await worker.ended()


async def test_a_restart_with_many_leases_out_costs_no_cooling_off(
    tmp_path: Path, model_dir: Path
) -> None:
    """All of the capacity was leased to one worker when its engine died; it is leased to it again at once."""
    fakes = Fakes(last_step=2)
    mortal = MortalEngine(fakes, "w1")
    rollouts = ROLLOUTS | {"groups_per_batch": 12}
    async with Swarm(tmp_path, model_dir, fakes=fakes, max_steps=7, rollouts=rollouts) as swarm:
        await swarm.start_trainer()
        mortal.free()
        worker = swarm.add_worker("w1", engine=mortal)
        await swarm.wait_step(2)  # it is trusted now
        mortal.hold()
        fakes.go.set()
        await wait_leases(swarm, "w1", 10, 16)
        mortal.die(EngineLost(FAULT))
        await wait_leases(swarm, "w1", 0, 0)
        mortal.revive()
        await wait_leases(swarm, "w1", 1, 16)
        (row,) = await swarm.trainer.peers()
        assert row["reliability"] > 0.75
        mortal.free()
        await swarm.finished()
        await worker.ended()


async def test_an_engine_that_is_given_up_ends_the_node_which_says_goodbye(
    tmp_path: Path, model_dir: Path
) -> None:
    fakes = Fakes()
    mortal = MortalEngine(fakes, "w1")
    async with Swarm(tmp_path, model_dir, fakes=fakes, rollouts=ROLLOUTS) as swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("w1", engine=mortal)
        await until(lambda: mortal.waiting == 4)
        mortal.die(EngineError("it was started five times in a row: give it less to do"))
        with pytest.raises(EngineError, match="five times") as caught:
            await worker.ended()
        assert (caught.value.exit_code, type(caught.value)) == (7, EngineError)
        await wait_leases(swarm, "w1", 0, 0)
        swarm.add_worker("w2")
        await swarm.finished()
