"""A whole run with a stage that holds other weights: it is found and named, and the run goes on without it."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crossing_cases import coarse
from sharp_model import make_sharp
from stage_swarm import StageSwarm
from swarm import Running

from primerl.node import parts
from primerl.node.config import EngineConfig
from primerl.node.engines.pipelined.hf_stage import HfStage
from primerl.node.engines.pipelined.seams import StageEngine
from primerl.node.ledger import LedgerView
from primerl.node.pipeline.frame_codec import FrameLimits
from primerl.node.pipeline.place import Place
from primerl.node.pipeline.socket_port import SocketPort
from primerl.node.weights.state import Changed, State
from primerl.protocol.envelope import Purpose, unseal
from primerl.protocol.reputation import NAMED_AT
from primerl.protocol.rollouts import PipelineVerdict, Verdict

pytestmark = pytest.mark.slow

LIAR = "liar"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real model of four layers."""
    torch.set_num_threads(1)
    return make_sharp(tmp_path_factory.mktemp("tiny"), layers=4)


class CoarseStage(HfStage):
    """Saves memory: four bits for every weight that it is given."""

    async def load(self, version: int, state: State) -> None:
        """See Engine."""
        await super().load(version, coarse(state, 4))

    async def update(self, version: int, state: State, changed: Changed) -> None:
        """See Engine."""
        await self.load(version, state)


class LyingSwarm(StageSwarm):
    """One of whose workers lies."""

    async def __aenter__(self) -> "LyingSwarm":
        return self

    def _parts(self, running: Running, ledger: Any = None) -> parts.Parts:
        made = super()._parts(running, ledger)
        if running.data_dir.name != LIAR:
            return made

        def stage(config: EngineConfig, place: Place) -> StageEngine:
            limits = FrameLimits.of(place.shape)
            return CoarseStage(config, place, lambda: SocketPort(place.socket, limits))

        return replace(made, pipeline_stage=stage)


async def test_a_stage_with_coarse_weights_is_left_out_and_the_run_goes_on_with_another(
    tmp_path: Path, tiny: Path
) -> None:
    rollouts = {"lease_timeout_s": 60.0}
    async with LyingSwarm(tmp_path, tiny, max_steps=2, rollouts=rollouts) as swarm:
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
    assert by_partner.pop(liar.node_id) == {(1,)}
    # What was half done by the liar is of nobody who is there now.
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
