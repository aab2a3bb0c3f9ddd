"""What worker.py runs with: the model, and the configs of engine, trainer and worker."""

import argparse
import json
from pathlib import Path
from typing import Any

from shapes import SHAPES

from primerl.node.config.run import ModelCreateConfig
from primerl.node.models import huggingface

RUN = "w"
LIKELY = 10.0
"""Factor of the output rows of the tokenizer's own tokens."""
TOKENIZER = 288
"""Ids below it are the tokenizer's."""


def engine(options: argparse.Namespace, sequences: int = 0) -> dict[str, Any]:
    """Of the engine; a worker's computes so many `sequences` at once, and finds out how many to be given."""
    engine: dict[str, Any] = {
        "type": options.engine,
        "dtype": "bfloat16" if options.cuda else "float32",
        "max_batch": sequences or max(options.sequences),
        "max_model_len": options.length,
    }
    if options.inflight:
        engine["concurrency"] = dict.fromkeys(("min_inflight", "max_inflight"), options.inflight)
    if options.cuda and options.engine == "vllm":
        engine["vllm"] = {"gpu_memory_utilization": options.memory}
    return engine


def run_settings(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Of the trainer: batches of four times what is in flight, so that there is always work."""
    group = options.group
    return {
        "name": RUN,
        "output_dir": str(directory),
        "max_steps": 1_000_000,
        "fsync": False,
        "network": {"host": "127.0.0.1", "libp2p": False},
        "model": {"name": str(directory / "model")},
        "engine": engine(options) | {"vllm": {}},
        "environment": {
            "id": "reverse-text",
            "args": {"min_len": options.prompt // 2, "max_len": options.prompt},
        },
        "sampling": {"max_tokens": options.tokens},
        "rollouts": {
            "group_size": group,
            "groups_per_batch": 4 * max(options.sequences) // group,
            "groups_per_lease": options.lease,
            "max_off_policy_steps": 16,
            "lease_timeout_s": 600.0,
            "leases_per_worker": 64,
        },
        # rewards of random weights are all 0: every batch makes a version all the same
        "training": {"seq_len": options.length, "filter_zero_advantages": False},
        "verification": {"audit_rate": 0.0, "bounds": "built-in"},
        "weights": {"anchor_interval": 1_000_000},
        "checkpoint": {"interval": 1_000_000},
        "evaluation": {"prompts": 0},
    }


def join_settings(
    options: argparse.Namespace, data_dir: Path, ticket: str, sequences: int
) -> dict[str, Any]:
    """Of the worker: defaults, but for the number of sequences."""
    return {
        "ticket": ticket,
        "data_dir": str(data_dir),
        "fsync": False,
        "network": {"host": "127.0.0.1", "libp2p": False},
        "engine": engine(options, sequences),
    }


def make_model(directory: Path, shape: str, length: int, tokens: int) -> None:
    """Random weights in which the tokenizer's own tokens are likely, and others where replies are to be longer.

    Some of them end a completion, so that lengths differ as they do in a run: else all that begin together
    would end together, and every pause between two completions would be the engine's.
    """
    import torch
    from safetensors.torch import load_file, save_file

    changes: dict[str, Any] = {"head_dim": 32} if shape == "tiny" else {}
    # a head of its own: a tied one would repeat the last token, the likelier the larger its rows
    changes |= {"tie_word_embeddings": False, "max_position_embeddings": length}
    config = ModelCreateConfig.model_validate({**SHAPES[shape], **changes})
    huggingface.create(directory, config, seed=0)
    path = directory / "model.safetensors"
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}
    tensors["lm_head.weight"][: max(TOKENIZER, tokens)] *= LIKELY
    save_file(tensors, path, metadata={"format": "pt"})
    generation = directory / "generation_config.json"
    settings = json.loads(generation.read_text())
    settings["eos_token_id"] = [settings["eos_token_id"], *range(max(1, TOKENIZER // tokens))]
    generation.write_text(json.dumps(settings))
