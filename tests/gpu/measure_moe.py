"""What a mixture of experts trains at: four layers of Qwen3-30B-A3B's shape, random weights. Not a test.

python tests/gpu/measure_moe.py [--layers N] [--tokens N]
torchrun --nproc-per-node 2 tests/gpu/measure_moe.py        FSDP, and experts that stay with tokens that travel
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.training_cases import sample

from primerl.node.config.run import ModelCreateConfig, TrainingConfig
from primerl.node.models import huggingface
from primerl.node.training import experts
from primerl.node.training.backend import TrainBatch
from primerl.node.training.learner import Learner
from primerl.node.training.world import World

STEPS = 5
ROWS: dict[str, dict[str, Any]] = {
    "compiled": {},
    "not compiled": {"compile": False},
    "selective recompute": {"activation_checkpointing": "selective"},
    "full recompute": {"activation_checkpointing": "full"},
    "router in bf16": {},
    "frozen router": {"freeze_router": True},
}
ON_RANKS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "expert parallel": {"expert_parallel": int(os.environ.get("WORLD_SIZE", "1"))},
}


def shape(layers: int) -> ModelCreateConfig:
    return ModelCreateConfig(
        hidden_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=6144,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        vocab_size=32768,
        max_position_embeddings=65536,
    )


def measure(name: str, directory: Path, config: TrainingConfig, world: World | None) -> str:
    import random

    exact = experts._exactly  # pyright: ignore[reportPrivateUsage]
    if name == "router in bf16":
        experts._exactly = lambda router: router.forward  # pyright: ignore
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    mine = Learner.build(directory, config, max_steps=99, seed=0, temperature=1.0, world=world)
    experts._exactly = exact  # pyright: ignore
    size = world.data_size if world else 1
    drawn = config.seq_len // 2
    rows = [sample(random.Random(at), prompt=4, drawn=drawn - 4) for at in range(2 * size)]
    found = [mine.step(TrainBatch(step, rows)).values for step in range(1, STEPS + 3)][2:]
    mine.close(keep_world=world is not None)
    values = sorted(found, key=lambda one: one["time/step"])[STEPS // 2]
    return (
        f"{name:20} {values['time/step'] * 1e3:8.0f} ms {values['perf/throughput']:9.0f} tok/s"
        f" {values.get('perf/mfu', 0):5.1f} % {values.get('perf/peak_memory', 0):6.1f} GiB"
        f"  max/mean {values['expert_load/max_mean/max']:.2f}  loss {values['loss/mean']:+.4f}"
        f"  norm {values['optim/grad_norm']:.4f}"
    )


def main() -> None:
    """Print a table; on several ranks the first does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--dir", type=Path, default=Path("/tmp/moe-model"))
    arguments = parser.parse_args()
    first, ranks = int(os.environ.get("RANK", "0")) == 0, int(os.environ.get("WORLD_SIZE", "1"))
    config = TrainingConfig(seq_len=arguments.tokens, device="cuda")
    world = World.join(config) if ranks > 1 else None
    if first and not (arguments.dir / "config.json").is_file():
        huggingface.create(arguments.dir, shape(arguments.layers), 0)
    if world is not None:
        torch.distributed.barrier()
    for name, changes in (ON_RANKS if ranks > 1 else ROWS).items():
        try:
            line = measure(name, arguments.dir, config.model_copy(update=changes), world)
        except torch.OutOfMemoryError as error:
            line = f"{name:20} {str(error)[:80]}"
        if first:
            print(line, flush=True)
    if world is not None:
        world.close()


if __name__ == "__main__":
    main()
