"""A worker that samples one environment at the temperature of another."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from support.swarm import Swarm
from support.witness import WitnessEngine

from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.protocol.errors import Reason

ENVIRONMENTS: list[dict[str, Any]] = [
    {"id": "reverse-text", "name": "letters"},
    {"id": "arithmetic", "name": "sums", "sampling": {"temperature": 0.5}},
]


class OneTemperature(WitnessEngine):
    """Samples everything at the temperature of the first environment."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """See Engine."""
        return await super().generate(replace(request, temperature=1.0))


async def test_a_rollout_at_another_environments_temperature_is_fraud_and_at_its_own_is_not(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, environments=ENVIRONMENTS, max_steps=4) as swarm:
        await swarm.start_trainer()
        cheat = swarm.add_worker("cheat", engine=OneTemperature(swarm.fakes, "cheat"))
        row = await swarm.until_row(cheat, lambda row: row["refused"].startswith("banned"), 60.0)
        assert row["top_reason"] == Reason.BAD_LOGPROBS.value
        told = {one["name"]: one for one in (await swarm.trainer.status())["environments"]}
        assert told["sums"]["accepted"] == 0
        honest = swarm.add_worker("honest")
        summary = await swarm.finished()
        await honest.ended()
    assert summary["rejected"].keys() <= {Reason.BAD_LOGPROBS.value, Reason.STALE.value}
    assert all(summary["environments"][name]["accepted"] for name in ("letters", "sums"))
