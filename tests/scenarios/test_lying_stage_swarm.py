"""A whole run with a stage that holds other weights: it is found and named, and the run goes on without it."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.scripted_stages import ScriptedStage
from support.stage_swarm import StageSwarm, make_cut_model
from support.swarm import Running

from primerl.node.app import factories
from primerl.node.storage.ledger import LedgerView
from primerl.node.weights.state import Changed, State, Tensor
from primerl.protocol.envelope import Purpose, unseal
from primerl.protocol.reputation import NAMED_AT
from primerl.protocol.rollouts import PipelineVerdict, Verdict

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

    async def __aenter__(self) -> "LyingSwarm":
        return self

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
