"""How long a sequence of a run may be: what its manifest says, and every worker serves."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from primerl.node.config.loader import load
from primerl.node.config.run import JoinConfig, RunConfig
from primerl.node.errors import UsageError
from primerl.node.launch.launcher import write_worker_config
from primerl.node.trainer.run_manifest import longest_sequence
from primerl.node.trainer.scheduler import lease_policy
from primerl.protocol.version import MIB


@pytest.mark.parametrize(
    ("flags", "positions", "longest"),
    [
        (["--training.seq-len", "2048"], 1024, 1024),  # rows hold several sequences
        (["--training.seq-len", "512"], 1024, 512),
        (["--training.seq-len", "2048"], 0, 2048),  # a model that does not say
        (
            ["--training.seq-len", "4096"],
            40960,
            4096,
        ),  # engine.max_model_len's default says nothing
        (["--training.seq-len", "2048", "--engine.max-model-len", "256"], 1024, 256),
        (["--training.seq-len", "2048", "--engine.max-model-len", "4096"], 1024, 1024),
    ],
)
def test_a_sequence_fits_into_a_row_the_model_and_the_engine(
    flags: list[str], positions: int, longest: int
) -> None:
    assert longest_sequence(load(RunConfig, flags, {}), positions) == longest


def test_a_submission_has_room_for_a_sample_a_turn_where_reasoning_is_dropped() -> None:
    def room(**environment: object) -> int:
        config = {"rollouts": {"group_size": 2}, "training": {"seq_len": 128}}
        policy = lease_policy(RunConfig.model_validate({**config, "environment": environment}))
        return policy.max_bytes - MIB

    kept = room(max_turns=5)
    for setting in ("drop", "branch"):
        assert room(max_turns=5, earlier_reasoning=setting) == 5 * kept
        with pytest.raises(ValidationError, match="lower it to 64"):
            room(max_turns=65, earlier_reasoning=setting)
    assert room(max_turns=65) == kept


@pytest.mark.parametrize("changes", [{"positions": 16}, {"engine": 10}])
def test_replies_that_never_fit_are_refused(changes: dict[str, Any]) -> None:
    flags = ["--sampling.max-tokens", "16"]
    if "engine" in changes:
        flags += ["--engine.max-model-len", str(changes["engine"])]
    with pytest.raises(UsageError, match=r"sampling\.max_tokens is 16.*lower it"):
        longest_sequence(load(RunConfig, flags, {}), changes.get("positions", 0))


@pytest.mark.parametrize(("flags", "written"), [([], 0), (["--engine.max-model-len", "512"], 512)])
def test_the_workers_of_rl_get_a_length_only_where_it_was_set(
    flags: list[str], written: int, tmp_path: Path
) -> None:
    path = write_worker_config(load(RunConfig, flags, {}), tmp_path)
    engine = load(JoinConfig, ["@", str(path)], {}).engine
    assert (engine.max_model_len if "max_model_len" in engine.model_fields_set else 0) == written
