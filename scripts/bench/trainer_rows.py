"""The rows of the trainer's table: a name, what it changes in the config, and the sequences of a packed row."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shapes import SHAPES

from primerl.node.config.run import ModelCreateConfig
from primerl.node.config.training import FsdpConfig
from primerl.node.models import huggingface
from primerl.node.training.backend import Objective, Sample

LONG_CONTEXT = 32768
"""From here on rows are long: what is only told about short ones is left out, and the other way round."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    objective: Objective = "policy"
    sequences: int = 1
    anywhere: bool = False
    """Also with long rows."""
    ranks: int = 1
    """Least ranks that it needs."""
    flash4: bool = True
    """Whether FlashAttention-4 may be used."""

    def lengths(self, tokens: int) -> list[int]:
        """Of the sequences of a row of `tokens`."""
        return [tokens // self.sequences] * self.sequences

    def suits(self, tokens: int, ranks: int) -> bool:
        """Whether the line says something at so many tokens on so many ranks."""
        experts = self.options.get("expert_parallel", ranks)
        return (self.anywhere or tokens < LONG_CONTEXT) and ranks >= self.ranks and experts == ranks

    @property
    def mesh(self) -> tuple[int, int]:
        """How the ranks are laid out: copies of the model, ranks that share a sequence."""
        fsdp = self.options.get("fsdp", FsdpConfig())
        return fsdp.replicas, self.options.get("context_parallel", 1)


ROWS = [
    Row("none", anywhere=True),
    Row("selective recompute", {"activation_checkpointing": "selective"}, anywhere=True),
    Row("full recompute", {"activation_checkpointing": "full"}, anywhere=True),
    Row("sft", objective="ce"),
    Row("packed, 16 sequences", sequences=16),
    Row("packed, 64 sequences", sequences=64),
    Row("none, torch's flash kernel", flash4=False, anywhere=True),
    Row("packed, 16 sequences, torch's flash kernel", sequences=16, flash4=False),
    Row("no compile", {"compile": False}),
    Row("optimizer offload", {"optimizer_offload": True}),
    Row("head chunk 1,024", {"head_chunk": 1024}),
    Row("weights kept whole", {"fsdp": FsdpConfig(reshard_after_forward=False)}, ranks=2),
    Row("two copies (HSDP)", {"fsdp": FsdpConfig(replicas=2)}, ranks=4),
    Row("context parallel, 2", {"context_parallel": 2}, anywhere=True, ranks=2),
    Row("context parallel, 4", {"context_parallel": 4}, anywhere=True, ranks=4),
    Row("expert parallel, 2", {"expert_parallel": 2}, ranks=2),
    Row("expert parallel, 4", {"expert_parallel": 4}, ranks=4),
]


def make_model(directory: Path, shape: str) -> None:
    """A model directory of a shape with random weights."""
    sizes = SHAPES[shape]
    huggingface.create(
        directory,
        ModelCreateConfig(**{"max_position_embeddings": 131072, **sizes}),  # pyright: ignore[reportArgumentType]
        seed=0,
    )
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"]["rope_theta"] = 1e6
    path.write_text(json.dumps(config))


def fake_batch(lengths: list[int], vocabulary: int, *, seed: int) -> list[Sample]:
    """Samples of random tokens, all but the first of each trained, as prime-rl's fake loader has it."""
    rng = random.Random(seed)
    found: list[Sample] = []
    for length in lengths:
        ids = rng.choices(range(vocabulary), k=length)
        mask = [False, *([True] * (length - 1))]
        found.append(Sample(ids, mask, [-11.9] * length, rng.choice([-1.0, 1.0])))
    return found
