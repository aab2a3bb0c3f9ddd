"""Where a learner computes: on a GPU in a process of its own, whatever else is configured."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from primerl.node.app.factories import make_backend
from primerl.node.config.run import RunConfig
from primerl.node.config.training import TrainingConfig
from primerl.node.gpus import is_on_gpu
from primerl.node.training.backend import resolve_backend
from primerl.node.training.fsdp_backend import FsdpBackend
from primerl.node.training.local_backend import LocalBackend

ONE = ("0",)


def resolved(gpus: Sequence[str], **options: Any) -> TrainingConfig:
    return resolve_backend(TrainingConfig.model_validate(options), lambda: gpus)


@pytest.mark.parametrize(
    ("device", "gpus", "gpu"),
    [
        ("auto", ONE, True),
        ("auto", (), False),
        ("cpu", ONE, False),
        ("cuda", (), True),
        ("cuda:1", ("0", "1"), True),
    ],
)
def test_the_learner_leaves_the_daemon_where_it_computes_on_a_gpu(
    device: str, gpus: Sequence[str], gpu: bool
) -> None:
    assert is_on_gpu(device, lambda: gpus) == gpu
    found = resolved(gpus, device=device)
    assert found.backend == ("fsdp" if gpu else "local")
    assert found.fsdp.ranks == (1 if gpu else 0)


def test_what_was_configured_for_many_ranks_is_not_for_the_only_one() -> None:
    many = {"ranks": 4, "nodes": 2, "replicas": 2, "rendezvous": "here:1", "timeout_s": 7.0}
    found = resolved(ONE, fsdp=many, lr=0.5)
    fsdp = found.fsdp
    assert (fsdp.ranks, fsdp.nodes, fsdp.replicas, fsdp.rendezvous) == (1, 1, 1, "")
    assert (fsdp.timeout_s, found.lr) == (7.0, 0.5)


def test_ranks_stay_as_they_are_and_no_gpu_is_looked_for() -> None:
    def nobody() -> Sequence[str]:
        raise AssertionError("there is nothing to decide")

    asked = TrainingConfig.model_validate({"backend": "fsdp", "fsdp": {"ranks": 4}})
    assert resolve_backend(asked, nobody) == asked
    assert resolve_backend(TrainingConfig(device="cpu"), nobody).backend == "local"


def test_a_learner_in_the_daemon_on_a_gpu_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert resolved((), backend="local").backend == "local"
        assert not caplog.records
        assert resolved(ONE, backend="local").backend == "local"
    assert [one.getMessage() for one in caplog.records] == [
        'training.backend = "local" computes in the daemon: on a GPU its network stands still for seconds '
        "at a time; leave it out, and the learner has a process of its own"
    ]


@pytest.mark.parametrize(("gpus", "kind"), [(ONE, FsdpBackend), ((), LocalBackend)])
def test_a_node_builds_what_was_chosen(gpus: Sequence[str], kind: type) -> None:
    assert isinstance(make_backend(RunConfig(), lambda: gpus), kind)
