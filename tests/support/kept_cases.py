"""Kept rollouts: a store, groups with distinct token lists, rows of a file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from primerl.node.config.run import KeepConfig
from primerl.node.storage.rollouts import KeptRollout, RolloutFiles
from primerl.node.trainer.kept_rollouts import RolloutKeeper
from primerl.node.training.buffer import BranchTokens, RolloutGroup, ScoredRollout

WORKER = bytes(31) + b"w"


def keeper(directory: Path, model_dir: Path | None = None, **keep: Any) -> RolloutKeeper:
    """A keeper of a run in `directory`; without more it keeps nothing."""
    config = KeepConfig.model_validate({"share": 0.0} | keep)
    files = RolloutFiles(directory / "rollouts", fsync=False)
    return RolloutKeeper(files, config, environments=["counting"], model_dir=model_dir or directory)


def make_group(
    rewards: Sequence[float], *, first: int = 1, versions: tuple[int, int] = (2, 3), lease: int = 7
) -> RolloutGroup:
    """A group of one task: the prompt [first, 5], then [6, 7 + i] drawn and a last token that was not."""
    mask = [False, False, True, True, False]
    rollouts = [
        ScoredRollout(
            [
                BranchTokens(
                    [first, 5, 6, 7 + index, 9], list(mask), [0, 0, -0.5, -1.5, 0], versions
                )
            ],
            reward,
        )
        for index, reward in enumerate(rewards)
    ]
    name = lease.to_bytes(8, "big")
    return RolloutGroup(bytes([first]) * 32, "counting", rollouts, versions[0], WORKER, name)


def row(step: int = 1, group: int = 0, rollout: int = 0, **changes: Any) -> KeptRollout:
    """A trained rollout of 4 tokens; `changes` are other fields."""
    values: dict[str, Any] = {
        "branch": 0,
        "verdict": "trained",
        "reason": "",
        "detail": "",
        "reward": 0.5,
        "advantage": 0.25,
        "environment": "counting",
        "task": "ab" * 32,
        "worker": WORKER.hex(),
        "lease": 7,
        "policy_first": 0,
        "policy_last": 1,
        "prompt": "two plus",
        "completion": " two",
        "prompt_ids": [1, 2],
        "completion_ids": [3, 4],
        "completion_mask": [True, False],
        "completion_logprobs": [-0.5, 0.0],
    }
    return KeptRollout(step=step, group=group, rollout=rollout, **(values | changes))
