"""Whole runs of workers that share a model: they do what a whole worker does, and outlive their stages."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.scripted_stages import ScriptedStage
from support.stage_swarm import GUARD_S, StageSwarm, make_cut_model, on_small_machines
from support.swarm import Running, Swarm

from primerl.node.app import factories
from primerl.node.storage.ledger import LedgerView
from primerl.node.weights.state import Changed, State, Tensor
from primerl.protocol.envelope import Purpose, unseal
from primerl.protocol.reputation import NAMED_AT
from primerl.protocol.rollouts import PipelineVerdict, Verdict

BATCH = 4 * 4
"""Rollouts of a step."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers."""
    return make_cut_model(tmp_path_factory.mktemp("tiny"))


async def ended_well(swarm: StageSwarm, steps: int, timeout: float = GUARD_S) -> None:
    """The run reached its end, and the whole model found nothing wrong with any rollout.

    What a slow worker makes, or one of before a crash, may come too late to be learned from; a sample that
    began anew after a break, under a newer policy, is withdrawn.
    """
    summary = await swarm.finished(timeout)
    accepted = 0
    for worker in swarm.workers.values():
        if worker.task is not None:
            await worker.ended(GUARD_S)
            assert worker.node is not None
            accepted += (await worker.node._status()).accepted  # pyright: ignore[reportPrivateUsage]
    assert accepted > 0  # the last line of stage 0 has its work, though it leads nothing any more
    assert summary["steps"] == steps
    assert set(summary["rejected"]) <= {"stale", "withdrawn"}
    assert summary["accepted"] >= steps * BATCH


def lasting(steps: int, **settings: Any) -> dict[str, Any]:
    """Settings of a run that something happens in."""
    return {"max_steps": steps, "rollouts": {"lease_timeout_s": 60.0}, **settings}


async def test_two_nodes_that_hold_half_a_model_each_do_the_work_of_one_worker(
    tmp_path: Path, tiny: Path
) -> None:
    """The way between them is cut for a moment, too."""
    async with StageSwarm(tmp_path, tiny, **lasting(4)) as swarm:
        swarm.learn_until(1)
        await swarm.start_trainer()
        first = swarm.add_stage("a", 2, rank=0)
        second = swarm.add_stage("b", 2, rank=1)
        await swarm.wait_step(1)
        _, tail = await swarm.stage(1, lambda row: row["bytes_out"] > 0)
        _, head = await swarm.stage(0, lambda row: row["bytes_out"] > 0)
        assert [head["layers"], tail["layers"]] == ["0-1", "2-3"]
        swarm.network.partition(first.node_id, second.node_id)
        await swarm.until_broken(first, head)
        swarm.network.heal(first.node_id, second.node_id)
        await swarm.stage(0, lambda row: row["epoch"] > head["epoch"])
        swarm.learn_until()
        await ended_well(swarm, 4)


@pytest.mark.slow
async def test_a_spare_takes_the_place_of_a_stage_that_dies(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stage 0 goes on with what it has in hand: nothing is given up, and nothing made twice is refused.

    Nobody told these workers to share the model: each of them finds that it is too large.
    """
    on_small_machines(monkeypatch)
    async with StageSwarm(tmp_path, tiny, **lasting(3)) as swarm:
        swarm.learn_until(1)
        await swarm.start_trainer()
        for name in ("a", "b", "c"):
            swarm.add_small(name)
        await swarm.wait_step(1)
        leader, before = await swarm.stage(0)
        lost, _ = await swarm.stage(1)
        await swarm.crash_worker(lost)
        swarm.learn_until(2)
        await swarm.wait_step(2)
        name, after = await swarm.stage(0)
        assert (name, after["group"]) == (leader, before["group"])
        assert after["generation"] > before["generation"]
        assert (await swarm.stage(1))[0] not in (leader, lost)
        swarm.learn_until()
        await ended_well(swarm, 3)


@pytest.mark.nightly
async def test_the_first_of_three_stages_may_die(tmp_path: Path, tiny: Path) -> None:
    """Somebody else takes its place, and its leases go to others though they would not run out for an hour."""
    rollouts = {"lease_timeout_s": 3600.0, "batch_timeout_s": 300.0}
    async with StageSwarm(tmp_path, tiny, **lasting(5, rollouts=rollouts)) as swarm:
        swarm.learn_until(1)
        await swarm.start_trainer()
        for name in ("a", "b", "c", "d"):
            swarm.add_stage(name, 3)
        await swarm.wait_step(1, timeout=120.0)
        lost, _ = await swarm.stage(0)
        async with asyncio.timeout(60.0):
            while not (await swarm.trainer.status())["leases"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await swarm.crash_worker(lost)
        swarm.learn_until()
        await ended_well(swarm, 5, timeout=180.0)
        assert swarm.metrics()[-1]["leases/expired"] > 0


async def test_a_pipeline_outlives_a_crash_of_the_trainer(tmp_path: Path, tiny: Path) -> None:
    async with StageSwarm(tmp_path, tiny, **lasting(5)) as swarm:
        swarm.learn_until(2)
        await swarm.start_trainer()
        swarm.add_stage("a", 2, rank=0)
        swarm.add_stage("b", 2, rank=1)
        await swarm.wait_step(2)
        _, before = await swarm.stage(0)
        await swarm.crash_trainer()
        await asyncio.sleep(1.0)
        swarm.learn_until(4)
        await swarm.start_trainer(resume=True)
        await swarm.wait_step(4)
        _, after = await swarm.stage(0)
        assert (after["group"], after["generation"]) == (before["group"], before["generation"])
        swarm.learn_until()
        await ended_well(swarm, 5)


async def test_a_worker_of_another_engine_that_may_be_too_small_is_warned_and_works_alone(
    tmp_path: Path, tiny: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_small_machines(monkeypatch)
    async with Swarm(tmp_path, tiny, max_steps=1) as swarm:
        await swarm.start_trainer()
        section = {"type": "hf", "device": "cpu"}
        swarm.add_worker("a", engine_section=section, pp={"mode": "auto"})
        summary = await swarm.finished()
    assert summary["accepted"] >= BATCH
    assert "set engine.type to vllm" in caplog.text


LIAR = "liar"


class CoarseStage(ScriptedStage):
    """Saves memory: four bits for every weight that it is given."""

    async def load(self, version: int, state: State) -> None:
        """See Engine."""
        coarse = {
            name: Tensor(tensor.dtype, tensor.shape, tensor.data & 0xF000)
            for name, tensor in state.items()
        }
        await super().load(version, coarse)

    async def update(self, version: int, state: State, changed: Changed) -> None:
        """See Engine."""
        await self.load(version, state)


class LyingSwarm(StageSwarm):
    """One of whose workers lies."""

    def _factories(self, running: Running, ledger: Any = None) -> factories.Factories:
        made = super()._factories(running, ledger)
        return replace(made, pipeline_stage=CoarseStage) if running.data_dir.name == LIAR else made


async def test_a_stage_with_coarse_weights_is_left_out_and_the_run_goes_on_with_another(
    tmp_path: Path,
) -> None:
    rollouts = {"lease_timeout_s": 60.0}
    async with LyingSwarm(
        tmp_path, make_cut_model(tmp_path / "model"), max_steps=2, rollouts=rollouts
    ) as swarm:
        await swarm.start_trainer()
        first = swarm.add_stage("a", 2, rank=0)
        liar = swarm.add_stage(LIAR, 2, rank=1)
        await named(swarm, liar)
        swarm.add_stage("c", 2, rank=1)
        summary = await swarm.finished()
        view = LedgerView(swarm.trainer.data_dir / "ledger.db")
        verdicts = [
            unseal(one.sealed, Purpose.VERDICT, Verdict, now=0).body for one in view.verdicts()
        ]
        view.close()
    assert summary["steps"] == 2
    assert {"wrong_model"} <= set(summary["rejected"]) <= {"wrong_model", "stale"}
    by_partner: dict[bytes, set[tuple[int, ...]]] = {}
    for verdict in verdicts:
        pipeline = verdict.pipeline
        assert isinstance(pipeline, PipelineVerdict)
        assert pipeline.stages[0] == first.node_id
        laid = by_partner.setdefault(pipeline.stages[1], set())
        laid |= {one.stages for one in pipeline.blamed}
    # A rollout that was begun with the liar and ended without it is laid to nobody.
    assert by_partner.pop(liar.node_id) - {()} == {(1,)}
    assert set().union(*by_partner.values()) <= {()}
    assert len(by_partner) == 1


async def named(swarm: LyingSwarm, liar: Running) -> None:
    """Wait until the trainer has had enough of the liar."""
    async with asyncio.timeout(100.0):
        while True:
            rows = {row["id"]: row for row in await swarm.trainer.peers()}
            row = rows.get(liar.node_id.hex())
            if row and row["suspicion"] > NAMED_AT and not row["stage"]:
                return
            await asyncio.sleep(0.1)
