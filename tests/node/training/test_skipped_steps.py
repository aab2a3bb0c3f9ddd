"""Steps without a finite gradient: the first is told, a row ends the run, and ruined weights go nowhere."""

import json
import logging
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.counting_backend import CountingBackend
from support.training_cases import FAST, batch, learner

from primerl.node.config.run import WarmupConfig
from primerl.node.errors import EngineError, RunFailed, StorageError
from primerl.node.ops.metrics import MetricsLog
from primerl.node.training.backend import Example, TrainBatch
from primerl.node.training.checkpoint import Checkpoints
from primerl.node.training.learner import Learner
from primerl.node.training.local_backend import LocalBackend
from primerl.node.training.skipped_steps import MAX_SKIPPED, SkippedSteps
from primerl.node.training.warmup import WarmupProgress, warm_up
from primerl.node.weights.state import State

SKIP = {"optim/skipped": 1.0, "optim/grad_norm": math.inf}
LEARN = {"optim/skipped": 0.0, "optim/grad_norm": 1.0}
RUIN = {"optim/skipped": 0.0, "optim/ruined": 1.0}
WILD = {"lr": 1e30, "max_norm": 1e30, "warmup_steps": 0, "scheduler": "constant"}


def skips(directory: Path) -> SkippedSteps:
    return SkippedSteps(Checkpoints(directory, keep_last=2, fsync=False))


def test_a_row_of_skipped_steps_ends_a_run_and_a_single_one_does_not(tmp_path: Path) -> None:
    counted = skips(tmp_path)
    for step in range(1, 100):
        honest = LEARN if step % 3 == 0 else SKIP
        assert counted.after(step, honest) is None
    assert (counted.total, counted.note()) == (66, "")
    counted.at_end()
    for step in range(100, 99 + MAX_SKIPPED):
        assert counted.after(step, SKIP) is None
    assert "skipped" in counted.note()
    failure = counted.after(99 + MAX_SKIPPED, SKIP)
    assert failure is not None
    assert failure.exit_code == 8
    assert "lower training.lr or training.max_norm" in str(failure)


def test_the_first_skipped_step_of_a_row_is_reported_with_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counted = skips(tmp_path)
    with caplog.at_level(logging.WARNING):
        for step, figures in enumerate((LEARN, SKIP, SKIP, LEARN, SKIP), 1):
            counted.after(step, figures)
    lines = [one.getMessage() for one in caplog.records]
    assert [line.partition(":")[0] for line in lines] == [
        "step 2 was skipped",
        "step 5 was skipped",
    ]
    assert "norm inf" in lines[0]
    assert "training.lr" in lines[0]
    assert "metrics.jsonl" in lines[0]


def test_batches_that_ruined_weights_play_without_signal_belong_to_the_row(tmp_path: Path) -> None:
    """Workers of such a policy draw noise of equal rewards, so a second skipped step may never come."""
    honest, counted = skips(tmp_path), skips(tmp_path)
    honest.after(1, LEARN)
    assert [honest.empty() for _ in range(3 * MAX_SKIPPED)] == [None] * (3 * MAX_SKIPPED)
    counted.after(1, SKIP)
    failures = [counted.empty() for _ in range(MAX_SKIPPED - 1)]
    assert failures[:-1] == [None] * (MAX_SKIPPED - 2)
    assert f"and {MAX_SKIPPED - 1} batches after that no signal" in str(failures[-1])


def test_a_run_that_ends_in_skipped_steps_has_failed_but_one_may_be_an_accident(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counted = skips(tmp_path)
    counted.after(1, LEARN)
    counted.after(2, SKIP)
    with caplog.at_level(logging.WARNING):
        counted.at_end()
    assert "try them before use" in caplog.text
    counted.after(3, SKIP)
    with pytest.raises(RunFailed, match=r"2 steps in a row .* not exported"):
        counted.at_end()
    resumed = skips(tmp_path)
    resumed.restore(3, 2, 2)
    with pytest.raises(RunFailed, match="2 steps in a row"):
        resumed.at_end()


async def test_the_last_good_checkpoint_is_kept_and_named(tmp_path: Path) -> None:
    backend = CountingBackend()
    await backend.start(tmp_path)
    kept = Checkpoints(tmp_path / "checkpoints", keep_last=2, fsync=False)
    counted = SkippedSteps(kept)
    failure = None
    for step in range(1, 4 + MAX_SKIPPED):
        failure = counted.after(step, LEARN if step < 4 else SKIP)
        if failure is None:
            await kept.write(step, {}, backend)
    last = 3 + MAX_SKIPPED
    # step 3 made the weights that are in doubt
    assert kept.steps() == [2, last - 2, last - 1]
    assert str(failure).endswith("--resume.step 2")
    counted.after(last + 1, LEARN)
    await kept.write(last + 1, {}, backend)
    assert kept.steps() == [last - 1, last + 1]


def test_weights_that_are_not_finite_end_a_run_at_once(tmp_path: Path) -> None:
    counted = skips(tmp_path)
    assert counted.after(1, LEARN) is None
    assert "step 2 made weights that are not finite" in str(counted.after(2, RUIN))


# -- the learner -----------------------------------------------------------------------------------


def wild(model_dir: Path) -> Learner:
    return Learner.build(
        model_dir, FAST.model_copy(update=WILD), max_steps=9, seed=1, temperature=1.0
    )


def test_a_wild_rate_is_seen_in_the_next_steps(model_dir: Path, tmp_path: Path) -> None:
    """What the rate 1e30 does: weights of 1e30, which are numbers, and no gradient ever after."""
    subject, counted = wild(model_dir), skips(tmp_path)
    failures = [counted.after(n, subject.step(batch(n)).values) for n in range(1, 2 + MAX_SKIPPED)]
    assert failures[:-1] == [None] * MAX_SKIPPED
    assert failures[-1] is not None
    assert counted.in_a_row == MAX_SKIPPED


def test_a_tame_rate_has_no_skipped_step(model_dir: Path, tmp_path: Path) -> None:
    subject, counted = learner(model_dir), skips(tmp_path)
    figures = [subject.step(batch(number)).values for number in range(1, 6)]
    assert [counted.after(number, one) for number, one in enumerate(figures, 1)] == [None] * 5
    assert counted.total == 0
    assert not any("optim/ruined" in one for one in figures)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3.4e38])
def test_ruined_weights_are_neither_saved_nor_published_nor_exported(
    model_dir: Path, tmp_path: Path, value: float
) -> None:
    """3.4e38 is finite in float32 and infinite in bf16, as which it would be published."""
    subject = learner(model_dir)
    subject.step(batch(1))
    subject.save(tmp_path / "good")
    subject.export(tmp_path / "weights")
    before = (tmp_path / "weights" / "model.safetensors").read_bytes()
    with torch.no_grad():
        next(iter(subject.saved().weights.values())).view(-1)[3] = value
    values = subject.step(TrainBatch(2, [replace(one, advantage=0.0) for one in batch(2).samples]))
    assert values.values["optim/ruined"] == 1.0
    for act in (
        subject.state,
        subject.snapshot,
        subject.stage,
        lambda: subject.save(tmp_path / "bad"),
        lambda: subject.export(tmp_path / "weights"),
        lambda: subject.write_state(tmp_path / "state"),
        lambda: subject.write_snapshot(tmp_path / "snapshot", whole=True),
    ):
        with pytest.raises(EngineError, match="not all finite"):
            act()
    assert (tmp_path / "weights" / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "weights"]
    subject.load(tmp_path / "good")
    assert subject.state()


def test_a_checkpoint_or_a_model_with_ruined_weights_is_refused(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from primerl.node.training.optimizer import Optimizer

    subject = learner(model_dir)
    subject.save(tmp_path / "saved")
    fresh = learner(model_dir)

    def is_finite(optimizer: Optimizer) -> bool:
        del optimizer
        return False

    monkeypatch.setattr(Optimizer, "is_finite", is_finite)
    with pytest.raises(StorageError, match=r"earlier checkpoint \(--resume\.step\)"):
        fresh.load(tmp_path / "saved")
    with pytest.raises(EngineError, match="fetch or export the model again"):
        learner(model_dir)


# -- the warm-up -----------------------------------------------------------------------------------


async def test_a_warm_up_that_ruins_the_weights_ends(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def examples() -> AsyncIterator[Example]:
        while True:
            yield [1, 2, 3], [4, 5]

    async def evaluate(state: State) -> float:
        return 0.0

    def show(progress: WarmupProgress) -> None:
        del progress

    backend = LocalBackend(FAST, max_steps=9, seed=0)
    await backend.start(model_dir)
    config = WarmupConfig(lr=1e30, batch_size=4, eval_interval=100, max_steps=40)
    try:
        with pytest.raises(RunFailed, match=r"lower warmup\.lr"), caplog.at_level(logging.WARNING):
            await warm_up(backend, examples(), config, evaluate=evaluate, progress=show)
        assert caplog.text.count("was skipped") == 1
    finally:
        await backend.close()


# -- metrics.jsonl ---------------------------------------------------------------------------------


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def test_metrics_are_json_whatever_the_numbers(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    found: Sequence[object] = [math.nan, math.inf, {"a": -math.inf}]
    log.write(1, {"optim/grad_norm": math.nan, "loss/mean": -math.inf, "x": found, "y": 0.5})
    log.go_back(1, {"optim/grad_norm": None, "y": 0.5})
    log.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    read = json.loads(line, parse_constant=no_constant)
    assert read.pop("time") > 0
    nulls = [None, None, {"a": None}]
    assert read == {"step": 1, "optim/grad_norm": None, "loss/mean": None, "x": nulls, "y": 0.5}
