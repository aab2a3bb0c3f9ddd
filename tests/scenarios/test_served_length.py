"""How long a sequence a whole engine serves: as long as the run's manifest says."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.swarm import MakeLedger, Running, Swarm

from primerl.node.app.factories import Factories
from primerl.node.config.run import EngineConfig
from primerl.node.inference.engine import Engine


class NotingSwarm(Swarm):
    """Notes the longest sequence of every engine that is made."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.lengths: list[int] = []

    def _factories(self, running: Running, ledger: MakeLedger | None = None) -> Factories:
        factories = super()._factories(running, ledger)

        def engine(config: EngineConfig) -> Engine:
            self.lengths.append(config.max_model_len)
            return factories.engine(config)

        return replace(factories, engine=engine)


@pytest.mark.parametrize(
    ("own", "served"), [({}, 3000), ({"max_model_len": 512}, 512), ({"max_model_len": 4096}, 3000)]
)
async def test_a_worker_serves_the_length_of_its_run(
    own: dict[str, int],
    served: int,
    tmp_path: Path,
    model_dir: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before, the default of 1,024 cut replies of a longer run short, and the trainer refused them."""
    swarm = NotingSwarm(tmp_path, model_dir, training={"seq_len": 3000})
    async with swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1", engine_section=own)
        await swarm.finished()
    assert swarm.lengths == [served]
    assert ("engine.max_model_len is 512, and a sequence" in caplog.text) == (served < 3000)
