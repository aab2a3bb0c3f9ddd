"""A run directory with weights, of a run that never was."""

import json
from pathlib import Path

import torch

from primerl.node.models import model_files

from .engine_cases import make_qwen3

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16}


def make_run(run: Path) -> Path:
    """Make a run directory with the weights of steps 5 and 10; return its directory of weights."""
    torch.set_num_threads(1)
    base = make_qwen3(run / "model", 0, SHAPE)
    config = {
        "model": {"name": "tiny", "create": SHAPE},
        "environment": {"id": "reverse-text", "args": {"min_len": 4, "max_len": 5}, "max_turns": 8},
        "sampling": {"max_tokens": 4, "temperature": 1.0},
    }
    (run / "config.json").write_text(json.dumps(config))
    for step in (5, 10):
        state = make_qwen3(run.parent / f"m{step}", step, SHAPE)
        model_files.export(state, run / "model", run / "weights" / f"step_{step}")
    model_files.export(base, run / "model", run / "trainer" / "model")
    return run / "weights"
