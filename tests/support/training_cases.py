"""Small models, samples and groups for tests of training."""

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

from primerl.node.config.run import TrainingConfig
from primerl.node.models import huggingface
from primerl.node.training.backend import Sample, TrainBatch
from primerl.node.training.buffer import BranchTokens, RolloutGroup, ScoredRollout

if TYPE_CHECKING:
    from primerl.node.training.learner import Learner

TINY = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
}
MIXTURE = TINY | {"num_experts": 6, "moe_intermediate_size": 16}
DEVICE = os.environ.get("PRIMERL_TEST_DEVICE", "cpu")
"""With `cuda` the conformance suite of backends runs on GPUs (scripts/bench/gpu.sh)."""
FAST = TrainingConfig(
    lr=1e-2,
    weight_decay=0.0,
    threads=1,
    device=DEVICE,
    seq_len=64,
    deterministic=DEVICE != "cpu",
    compile=False,
)


def make_model(directory: Path) -> Path:
    huggingface.create(directory, TINY, seed=7)
    return directory


def learner(directory: Path, **changes: Any) -> Any:
    """A learner to look into, of the model in `directory`; `changes` are those of FAST."""
    from primerl.node.training.learner import Learner

    config = FAST.model_copy(update=changes)
    return Learner.build(directory, config, max_steps=9, seed=1, temperature=1.0)


def contents(directory: Path) -> dict[str, bytes]:
    """Every byte below `directory` that counts: files, and in their place the tensors of safetensors files.

    The header of such a file has no fixed order, and so neither has the record of a checkpoint.
    """
    found: dict[str, bytes] = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.suffix == ".safetensors":
            tensors = load_file(path)
            found |= {f"{name}:{key}": tensor.numpy().tobytes() for key, tensor in tensors.items()}
        elif path.is_file() and path.name != "COMPLETE":
            found[name] = path.read_bytes()
    return found


def logprobs(learner: "Learner", samples: list[Sample]) -> list[list[float]]:
    """The learner's logprob of every trained token of each sample, read alone; 0.0 elsewhere."""
    found: list[list[float]] = []
    for one in samples:
        values = iter(learner.packed_logprobs([one]))
        found.append([next(values) if t and on else 0.0 for t, on in enumerate(one.mask)])
    return found


def sample(
    rng: random.Random, *, prompt: int = 4, drawn: int = 5, advantage: float = 1.0
) -> Sample:
    length = prompt + drawn
    return Sample(
        token_ids=[rng.randrange(256) for _ in range(length)],
        mask=[False] * prompt + [True] * drawn,
        logprobs=[0.0] * prompt + [-rng.uniform(4.0, 7.0) for _ in range(drawn)],
        advantage=advantage,
    )


def batch(step: int, seed: int = 0, rows: int = 6) -> TrainBatch:
    """Samples of many lengths with advantages of both signs; the same for the same arguments."""
    rng = random.Random(f"{step} {seed}")
    return TrainBatch(
        step,
        [
            sample(rng, drawn=rng.randint(1, 9), advantage=rng.choice([-1.0, 0.5]))
            for _ in range(rows)
        ],
    )


def group(
    rewards: list[float], *, oldest: int = 0, node: bytes = b"n", task: bytes = b"t"
) -> RolloutGroup:
    branch = BranchTokens([1, 2, 3], [False, True, True], [0.0, -1.0, -2.0])
    rollouts = [ScoredRollout([branch], reward) for reward in rewards]
    return RolloutGroup(task, "reverse-text", rollouts, oldest, node, b"lease")
