import asyncio
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.counting_backend import CountingBackend
from support.memory_store import MemoryStore
from support.sft_cases import pairs, write_rows
from support.training_cases import FAST, TINY

from primerl.crypto.keys import SecretKey
from primerl.node.app import rundir
from primerl.node.app.sft import SftFactories, sft
from primerl.node.config.run import EnvironmentConfig, ModelConfig, ResumeConfig, RunConfig
from primerl.node.config.sft import SftConfig, SftTrainingConfig
from primerl.node.errors import BusyError, EngineError, RankFailed, RunFailed, UsageError
from primerl.node.models import huggingface
from primerl.node.sft.loop import SftProgress
from primerl.node.storage.ledger import Ledger
from primerl.node.storage.run_files import MARK, begun_on, claim
from primerl.node.trainer import run_manifest
from primerl.node.training.backend import Sample, StepMetrics, TrainBatch
from primerl.node.training.local_backend import LocalBackend
from primerl.node.training.skipped_steps import MAX_SKIPPED

TRAINING = SftTrainingConfig.model_validate(FAST.model_dump() | {"lr": 5e-3, "scheduler": "linear"})
Watch = Callable[[SftProgress], None]


class Backends:
    """Makes counting backends, and remembers what they were given."""

    def __init__(self) -> None:
        self.made: list[Recording] = []
        self.slept: list[float] = []
        self.fail_at: list[int] = []
        """Steps at which a rank dies, one for each backend."""

    def factories(self) -> SftFactories:
        return SftFactories(backend=self._make, sleep=self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    def _make(self, config: SftConfig) -> "Recording":
        fail_at = self.fail_at.pop(0) if self.fail_at else 0
        self.made.append(Recording(config.seed, fail_at))
        return self.made[-1]


class Recording(CountingBackend):
    def __init__(self, seed: int, fail_at: int) -> None:
        super().__init__(seed=seed)
        self.trained: list[TrainBatch] = []
        self.closed = False
        self._fail_at = fail_at

    async def step(self, batch: TrainBatch) -> StepMetrics:
        if batch.step == self._fail_at:
            raise RankFailed("rank 1 died")
        metrics = await super().step(batch)
        self.trained.append(batch)
        return StepMetrics({**metrics.values, "loss/mean": 1.0 / batch.step})

    async def evaluate(self, samples: Sequence[Sample]) -> dict[str, float]:
        return {"loss/mean": 2.0, "tokens": float(len(samples))}

    async def close(self) -> None:
        self.closed = True
        await super().close()


@pytest.fixture(autouse=True)
def log() -> Iterator[None]:
    """A run configures the program's log: give the tests theirs back."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    for handler in set(root.handlers) - set(before):
        root.removeHandler(handler)
        handler.close()
    root.handlers[:] = before
    root.setLevel(level)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., SftConfig]:
    """Configs of runs on the same 40 rows."""
    data = write_rows(tmp_path / "rows.jsonl", pairs(40))

    def config(name: str = "run", **changes: Any) -> SftConfig:
        values: dict[str, Any] = {
            "name": name,
            "output_dir": tmp_path / "out",
            "max_steps": 12,
            "batch_size": 6,
            "fsync": False,
            "model": ModelConfig(name="tiny", create=TINY),
            "data": {"files": [str(data)]},
            "training": TRAINING.model_dump(),
            "checkpoint": {"interval": 5},
            **changes,
        }
        return SftConfig.model_validate(values)

    return config


def quiet(progress: SftProgress) -> None:
    del progress


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def text(directory: Path) -> list[str]:
    return (directory / "metrics.jsonl").read_text().splitlines()


def no_json(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def weights(directory: Path) -> bytes:
    (found,) = (directory / "weights").iterdir()
    return (found / "model.safetensors").read_bytes()


async def test_a_run_leaves_metrics_checkpoints_weights_and_a_summary(make: Any) -> None:
    backends, seen = Backends(), list[SftProgress]()
    config = make(validation={"fraction": 0.3, "interval": 4})
    directory = await sft(config, watch=seen.append, factories=backends.factories())
    assert [line["step"] for line in lines(directory)] == list(range(13))
    assert [line["step"] for line in lines(directory) if "val/loss" in line] == [0, 4, 8, 12]
    assert {"loss/mean", "perf/throughput", "progress/epoch", "time/load_data"} <= set(
        lines(directory)[1]
    )
    assert [progress.step for progress in seen] == list(range(1, 13))
    assert seen[-1].validation_loss == 2.0
    kept = {path.name for path in (directory / "checkpoints").iterdir()}
    assert kept == {"step_10", "step_12"}
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["steps"] == 12
    assert summary["samples"] == 72
    assert summary["validation_samples"] + summary["samples"] // summary["epochs"] > 0
    assert (Path(summary["weights"]) / "tokenizer.json").is_file()
    (backend,) = backends.made
    assert backend.closed
    assert {batch.objective for batch in backend.trained} == {"ce"}
    assert all(len(batch.samples) == 6 for batch in backend.trained)


async def test_a_template_writes_the_day_on_which_training_began(make: Any, tmp_path: Path) -> None:
    model = tmp_path / "model"
    huggingface.create(model, TINY, 0)
    template = model / "chat_template.jinja"
    template.write_text("{{ strftime_now('%Y') }}" + template.read_text())
    config = make(max_steps=1, model=ModelConfig(name=str(model)))
    claim(config.run_dir)
    mark = config.run_dir / MARK
    mark.write_text(mark.read_text().replace(begun_on(config.run_dir), "2020-02-20"))
    backends = Backends()
    await sft(config, watch=quiet, factories=backends.factories())
    rows = [sample.token_ids for batch in backends.made[0].trained for sample in batch.samples]
    assert rows
    assert all(bytes(row[:4]) == b"2020" for row in rows)


async def test_what_is_held_out_is_never_trained(make: Any) -> None:
    class Remembering(Recording):
        measured: Sequence[Sample] = ()

        async def evaluate(self, samples: Sequence[Sample]) -> dict[str, float]:
            self.measured = samples
            return await super().evaluate(samples)

    backend = Remembering(0, 0)
    factories = SftFactories(backend=lambda _: backend)
    await sft(make(validation={"fraction": 0.3}), watch=quiet, factories=factories)
    held_out = {tuple(sample.token_ids) for sample in backend.measured}
    trained = {tuple(s.token_ids) for batch in backend.trained for s in batch.samples}
    assert held_out
    assert held_out.isdisjoint(trained)
    assert len(held_out | trained) == 40


async def test_stopped_and_resumed_equals_unbroken_bit_by_bit(make: Any) -> None:
    """On the real backend: weights, figures and the place in the data."""
    whole = await sft(make("whole", validation={"fraction": 0.2}), watch=quiet)

    def stop_at_7(progress: SftProgress) -> None:
        if progress.step == 7:
            raise EngineError("power cut")

    config = make("cut", validation={"fraction": 0.2}, checkpoint={"interval": 1})
    with pytest.raises(EngineError, match="power cut"):
        await sft(config, watch=stop_at_7)
    again = config.model_copy(update={"resume": ResumeConfig()})
    cut = await sft(again, watch=quiet)
    assert weights(cut) == weights(whole)
    figures = ("step", "loss/mean", "optim/grad_norm", "progress/total_tokens", "val/loss")
    assert [[line.get(name) for name in figures] for line in lines(cut)] == [
        [line.get(name) for name in figures] for line in lines(whole)
    ]
    first, last = lines(whole)[0]["val/loss"], lines(whole)[-1]["val/loss"]
    assert last < first - 0.5


async def test_a_run_goes_back_to_a_step_and_forks_from_another_run(make: Any) -> None:
    config = make("base", checkpoint={"interval": 4, "keep_last": 3})
    base = await sft(config, watch=quiet, factories=Backends().factories())
    back = Backends()
    again = make("base", resume={"step": 4}, checkpoint={"interval": 4, "keep_last": 3})
    await sft(again, watch=quiet, factories=back.factories())
    assert [batch.step for batch in back.made[0].trained] == list(range(5, 13))
    fork = Backends()
    forked = make("fork", resume={"dir": str(base), "step": 8}, max_steps=10)
    await sft(forked, watch=quiet, factories=fork.factories())
    assert fork.made[0].trained == back.made[0].trained[4:6]
    with pytest.raises(UsageError, match="no checkpoint of step 5"):
        await sft(make("base", resume={"step": 5}), watch=quiet, factories=Backends().factories())


async def test_a_run_that_is_stopped_finishes_the_step_and_saves_it(make: Any) -> None:
    whole, broken = Backends(), Backends()
    await sft(make("whole"), watch=quiet, factories=whole.factories())
    running: list[asyncio.Task[Path]] = []

    def stop_at_6(progress: SftProgress) -> None:
        if progress.step == 6:
            running[0].cancel()

    running.append(
        asyncio.create_task(sft(make("cut"), watch=stop_at_6, factories=broken.factories()))
    )
    with pytest.raises(asyncio.CancelledError):
        await running[0]
    assert broken.made[0].closed
    done = len(broken.made[0].trained)
    assert done in (6, 7)
    await sft(make("cut", resume=True), watch=quiet, factories=broken.factories())
    assert broken.made[0].trained + broken.made[1].trained == whole.made[0].trained


async def test_a_dead_rank_costs_the_steps_since_the_last_checkpoint(make: Any) -> None:
    whole, backends = Backends(), Backends()
    await sft(make("whole"), watch=quiet, factories=whole.factories())
    backends.fail_at = [3, 8]
    directory = await sft(make("dying"), watch=quiet, factories=backends.factories())
    assert [[batch.step for batch in made.trained] for made in backends.made] == [
        [1, 2],
        list(range(1, 8)),
        list(range(6, 13)),
    ]
    assert backends.made[2].trained == whole.made[0].trained[5:]
    assert all(made.closed for made in backends.made)
    assert [line["step"] for line in lines(directory)] == list(range(1, 13))


async def test_ranks_that_die_again_and_again_end_the_run(make: Any) -> None:
    backends = Backends()
    backends.fail_at = [1] * 9
    with pytest.raises(RankFailed):
        await sft(make(), watch=quiet, factories=backends.factories())
    assert len(backends.made) == 1 + TRAINING.fsdp.max_restarts


async def test_a_directory_is_used_once_unless_the_command_says_otherwise(make: Any) -> None:
    backends = Backends()
    await sft(make(max_steps=1), watch=quiet, factories=backends.factories())
    with pytest.raises(UsageError, match="--resume, --clean"):
        await sft(make(), watch=quiet, factories=backends.factories())
    with pytest.raises(UsageError, match="nothing to resume"):
        await sft(make("other", resume=True), watch=quiet, factories=backends.factories())
    directory = await sft(
        make(max_steps=2, clean=True), watch=quiet, factories=backends.factories()
    )
    assert [line["step"] for line in lines(directory)] == [1, 2]


async def test_two_runs_never_share_a_directory(make: Any) -> None:
    async def intrude(config: SftConfig) -> None:
        with pytest.raises(BusyError):
            await sft(config, watch=quiet, factories=Backends().factories())

    class Shared(Recording):
        async def step(self, batch: TrainBatch) -> StepMetrics:
            await intrude(make(clean=True))
            return await super().step(batch)

    directory = await sft(
        make(max_steps=2), watch=quiet, factories=SftFactories(lambda _: Shared(0, 0))
    )
    assert len(lines(directory)) == 2


async def test_other_data_are_not_resumed(make: Any, tmp_path: Path) -> None:
    await sft(make(max_steps=2), watch=quiet, factories=Backends().factories())
    write_rows(tmp_path / "rows.jsonl", pairs(39))
    with pytest.raises(UsageError, match="differ from those that the run began with"):
        await sft(make(resume=True), watch=quiet, factories=Backends().factories())


async def test_bad_data_end_the_run_with_file_and_line(make: Any, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [*pairs(5), {"prompt": "no completion"}])
    config = make(data={"files": [str(tmp_path / "rows.jsonl")], "shuffle": False})
    with pytest.raises(RunFailed, match=r"rows\.jsonl:6: a row needs"):
        await sft(config, watch=quiet, factories=Backends().factories())


async def test_max_epochs_end_a_run_early(make: Any) -> None:
    backends = Backends()
    directory = await sft(make(max_epochs=1), watch=quiet, factories=backends.factories())
    assert [len(batch.samples) for batch in backends.made[0].trained] == [6] * 6 + [4]
    assert (directory / "weights" / "step_7").is_dir()


async def test_steps_without_a_gradient_do_not_go_on_for_ever(make: Any) -> None:
    class Sick(Recording):
        async def step(self, batch: TrainBatch) -> StepMetrics:
            metrics = await super().step(batch)
            return StepMetrics({**metrics.values, "optim/skipped": 1.0})

    with pytest.raises(RunFailed, match=r"training\.lr .* --clean"):
        await sft(make(), watch=quiet, factories=SftFactories(lambda _: Sick(0, 0)))


async def test_a_rate_that_ruins_the_weights_ends_a_run_and_exports_nothing(make: Any) -> None:
    """A short run ends in skipped steps before there are enough in a row; resumed, it is no better."""
    wild = {**TRAINING.model_dump(), "lr": 1e30, "max_norm": 1e30, "warmup_steps": 0}
    for name, steps, saves in (("short", 4, {"interval": 1}), ("long", 12, {"interval": 5})):
        config = make(name, training=wild, max_steps=steps, checkpoint=saves)
        with pytest.raises(RunFailed, match="probably ruined, and were not exported") as told:
            await sft(config, watch=quiet)
        assert told.value.exit_code == 8
        directory = config.run_dir
        log = (directory / "logs" / "sft.jsonl").read_text()
        assert log.count(" was skipped: ") == log.count("step 2 was skipped: ") == 1
        assert not (directory / "weights").exists()
        assert not (directory / "summary.json").exists()
        found = [json.loads(line, parse_constant=no_json) for line in text(directory)]
        skipped = [line["step"] for line in found if line["optim/skipped"]]
        assert skipped == list(range(2, 2 + min(steps - 1, MAX_SKIPPED)))
    with pytest.raises(RunFailed, match="not exported"):
        await sft(
            make("short", training=wild, max_steps=4, checkpoint={"interval": 1}, resume=True),
            watch=quiet,
        )


async def test_a_validation_loss_that_is_no_number_ends_a_run_and_exports_nothing(
    make: Any,
) -> None:
    """The last step may ruin the weights: no later one would be skipped."""

    class Ruined(Recording):
        async def evaluate(self, samples: Sequence[Sample]) -> dict[str, float]:
            loss = math.nan if self.trained else 2.0
            return {"loss/mean": loss, "tokens": float(len(samples))}

    config = make(max_steps=3, validation={"fraction": 0.2})
    with pytest.raises(RunFailed, match="the validation loss after step 3 is not a number"):
        await sft(config, watch=quiet, factories=SftFactories(lambda _: Ruined(0, 0)))
    assert not (config.run_dir / "weights").exists()


async def test_a_run_with_one_skipped_step_counts_it_and_exports(make: Any) -> None:
    class Once(Recording):
        async def step(self, batch: TrainBatch) -> StepMetrics:
            metrics = await super().step(batch)
            bad = {"optim/skipped": 1.0, "loss/mean": math.nan} if batch.step == 5 else {}
            return StepMetrics({**metrics.values, **bad})

    factories = SftFactories(lambda _: Once(0, 0))
    directory = await sft(make(), watch=quiet, factories=factories)
    summary = json.loads((directory / "summary.json").read_text(), parse_constant=no_json)
    assert summary["skipped_steps"] == 1
    assert (directory / "weights" / "step_12").is_dir()
    await sft(
        make("again", resume={"dir": directory, "step": 10}), watch=quiet, factories=factories
    )


async def test_a_run_without_data_names_the_key_to_set(make: Any) -> None:
    with pytest.raises(UsageError, match=r"--data\.files"):
        await sft(make(data={}), watch=quiet, factories=Backends().factories())


@pytest.mark.slow
async def test_an_environment_teaches_and_its_weights_begin_a_run(
    make: Any, tmp_path: Path
) -> None:
    """sft on reverse-text's answers, then the run manifest of a `train` that begins there."""
    environment = EnvironmentConfig(id="reverse-text", args={"min_len": 2, "max_len": 3})
    config = make(
        data={"environment": environment.model_dump()},
        validation={"rows": 32},
        max_steps=20,
        batch_size=16,
    )
    directory = await sft(config, watch=quiet)
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["validation_loss_after"] < summary["validation_loss_before"] - 1.0
    run = RunConfig(
        name="rl",
        output_dir=tmp_path / "out",
        model=ModelConfig(name=summary["weights"]),
        environment=environment,
    )
    model_dir = await rundir.prepare_model(run, run.run_dir / "model")
    assert model_dir == Path(summary["weights"])
    ledger = Ledger(tmp_path / "ledger.db")
    try:
        documents = await run_manifest.documents(
            run, SecretKey.generate(), ledger, MemoryStore(max_bytes=1 << 24), model_dir
        )
    finally:
        ledger.close()
    assert documents.manifest.model.stop_token_ids == huggingface.stop_token_ids(
        directory / "model"
    )
    learned = await measured(model_dir, config)
    assert learned == pytest.approx(summary["validation_loss_after"], abs=0.02)  # bf16


async def measured(model_dir: Path, config: SftConfig) -> float:
    """Loss of the weights in `model_dir` on one held-out string of the environment."""
    from contextlib import AsyncExitStack

    from primerl.node.app.factories import make_environment
    from primerl.node.sft.data import open_tasks

    assert config.data.environment is not None
    async with AsyncExitStack() as stack:
        environment = make_environment(config.data.environment, model_dir, 0, 64, 1.0)
        await environment.start()
        stack.push_async_callback(environment.close)
        loop = asyncio.get_running_loop()
        data = await asyncio.to_thread(open_tasks, config, environment, 0, loop)
        samples = data.validation
        backend = LocalBackend(config.training, max_steps=1, seed=0)
        stack.push_async_callback(backend.close)
        await backend.start(model_dir)
        return (await backend.evaluate(samples))["loss/mean"]
