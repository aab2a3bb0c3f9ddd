"""Run supervised fine-tuning: batches, steps, validation and checkpoints.

- The next batch depends only on the cursor of the last checkpoint; a batch that was prefetched and not trained
  is read again.
- A checkpoint holds the cursor of its step, and the validation losses so far.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..config.run import ResumeConfig
from ..config.sft import SftConfig
from ..errors import BAD_FILE, RunFailed, StorageError, UsageError
from ..ops.metrics import MetricsLog, PhaseClock
from ..ops.monitors import WandbMonitor
from ..storage.run_files import CHECKPOINTS, METRICS, weights_dir
from ..training.backend import TrainBackend, TrainBatch
from ..training.checkpoint import Checkpoints
from ..training.skipped_steps import SkippedSteps
from .data import BatchReader, Data, DataBatch, DataCursor

logger = logging.getLogger(__name__)

CURSOR = "cursor"
"""Name of the checkpoint part that holds SftState."""
WINDOW = 20
"""Steps over which the summary averages the loss."""


@dataclass(frozen=True)
class SftProgress:
    """Progress figures, reported after every step."""

    step: int
    max_steps: int
    loss: float
    validation_loss: float | None
    epoch: float
    tokens_per_s: float
    phase: str = "training"


Watch = Callable[[SftProgress], None]


class SftState(msgspec.Struct, frozen=True):
    """The part of a checkpoint beside the learner's state."""

    cursor: DataCursor
    identity: str
    """Identity of the data that the cursor refers to."""
    validation: list[tuple[int, float]] = []
    """(step, validation loss) so far."""
    losses: list[float] = []
    """Training losses of the last WINDOW steps."""
    line: dict[str, float | None] = {}
    """Metrics of the step, for a resumed run whose metrics file lacks them."""
    skipped: int = 0
    """Steps so far whose gradient was not finite, and those since the last one that learned."""
    skipped_in_a_row: int = 0


@dataclass(frozen=True)
class Restored:
    """A complete checkpoint; the backend loads `directory`."""

    step: int
    state: SftState
    directory: Path


class SftLoop:
    """Trains with a started backend, from a checkpoint or from step 0, to the end."""

    def __init__(
        self,
        config: SftConfig,
        data: Data,
        backend: TrainBackend,
        clock: PhaseClock,
        watch: Watch,
    ) -> None:
        self._config = config
        self._data = data
        self._backend = backend
        self._clock = clock
        self._watch = watch
        self._checkpoints = Checkpoints(
            config.run_dir / CHECKPOINTS,
            keep_last=config.checkpoint.keep_last,
            keep_interval=config.checkpoint.keep_interval,
            keep_first=config.checkpoint.keep_first,
            fsync=config.fsync,
        )
        self._identity = data.training.identity()
        self._state = SftState(DataCursor(), self._identity)
        self._step = 0
        self._skips = SkippedSteps(self._checkpoints)
        self._stopping = False

    async def run(self, resume: ResumeConfig | None) -> dict[str, object]:
        """Train to max_steps or the end of the data, then export. Returns the summary.

        Raises NodeError.
        """
        if resume is not None:
            await self._restore(resume)
        monitor = await asyncio.to_thread(WandbMonitor.of_run, self._config, "sft")
        metrics = MetricsLog(self._config.run_dir / METRICS, monitor)
        try:
            await asyncio.to_thread(metrics.go_back, self._step or -1, self._state.line)
            if not self._state.validation and self._data.validation:
                metrics.write(0, await self._validate())
            await self._train_or_stop(metrics)
            await self._checkpoints.finish()
        finally:
            await asyncio.to_thread(metrics.close)
            await self._checkpoints.close()
        return await self._finish()

    async def _train_or_stop(self, metrics: MetricsLog) -> None:
        """Train; on cancellation, finish the step in progress and write a checkpoint of it."""
        training = asyncio.create_task(self._train(metrics), name="sft training")
        try:
            await asyncio.shield(training)
        except asyncio.CancelledError:
            self._stopping = True
            await training
            await self._save_last()
            logger.info("stopped after step %d; --resume continues there", self._step)
            raise

    async def _train(self, metrics: MetricsLog) -> None:
        config = self._config
        reader = BatchReader(self._data.training, config)

        def read(cursor: DataCursor) -> asyncio.Task[DataBatch]:
            size, tokens = config.batch_size, config.batch_tokens
            reading = asyncio.to_thread(reader.batch, cursor, size=size, tokens=tokens)
            return asyncio.create_task(reading, name="sft data")

        ahead = read(self._state.cursor)
        try:
            while self._step < config.max_steps and not self._stopping:
                waiting = time.monotonic()
                batch = await ahead
                waited = time.monotonic() - waiting
                if not batch.samples:
                    logger.info("the data ended after step %d", self._step)
                    break
                ahead = read(batch.cursor)  # prefetched in a thread while this one is trained
                await self._train_step(batch, waited, metrics)
        finally:
            await asyncio.wait([ahead])
            ahead.exception()  # retrieved, so that asyncio does not report it

    async def _train_step(self, data: DataBatch, waited: float, metrics: MetricsLog) -> None:
        """Train one step; validate, save and export when they are due."""
        started = time.monotonic()
        with self._clock.phase("train"):
            figures = await self._backend.step(TrainBatch(self._step + 1, data.samples, "ce"))
        self._step += 1
        seconds = time.monotonic() - started
        values = self._figures(data, figures.values, seconds, waited)
        if failure := self._skips.after(self._step, values):
            metrics.write(self._step, values)
            raise failure
        self._update_state(data.cursor, values["loss/mean"])
        last = self._step == self._config.max_steps
        if self._data.validation and (last or self._due(self._config.validation.interval)):
            values |= await self._validate()
        line = {**values, "time": round(time.time(), 3)}
        self._state = msgspec.structs.replace(self._state, line=line)
        if last or self._due(self._config.checkpoint.interval):
            values["time/save_ckpt"] = await self._save()
        due = self._due(self._config.checkpoint.weights_interval)
        if due and not last and not self._skips.in_a_row:
            await self._export()
        metrics.write(self._step, values)
        self._report(values)

    def _figures(
        self, data: DataBatch, figures: dict[str, float], seconds: float, waited: float
    ) -> dict[str, float]:
        """Join the backend's metrics with those of the data."""
        cursor = data.cursor
        tokens = sum(len(sample.token_ids) for sample in data.samples)
        return {
            "loss/mean": math.nan,
            "perf/throughput": tokens / max(seconds, 1e-9),
            "time/step": seconds,
            **figures,
            "time/load_data": round(waited, 4),
            "batch/samples": len(data.samples),
            "batch/tokens": tokens,
            "progress/epoch": self._epoch(cursor),
            "progress/total_samples": cursor.samples,
            "progress/total_tokens": cursor.tokens,
            **{f"data/skipped/{reason}": count for reason, count in cursor.skipped.items()},
        }

    def _update_state(self, cursor: DataCursor, loss: float) -> None:
        losses = self._state.losses
        if math.isfinite(loss):
            losses = [*losses, loss][-WINDOW:]
        self._state = msgspec.structs.replace(
            self._state,
            cursor=cursor,
            losses=losses,
            skipped=self._skips.total,
            skipped_in_a_row=self._skips.in_a_row,
        )

    def _report(self, values: dict[str, float]) -> None:
        measured = self._state.validation
        progress = SftProgress(
            step=self._step,
            max_steps=self._config.max_steps,
            loss=values["loss/mean"],
            validation_loss=measured[-1][1] if measured else None,
            epoch=values["progress/epoch"],
            tokens_per_s=values["perf/throughput"],
        )
        logger.info(
            "step %d | loss %.4f | lr %.3g | grad norm %.3g | epoch %.2f | %.0f tokens/s",
            self._step,
            progress.loss,
            values.get("optim/lr", math.nan),
            values.get("optim/grad_norm", math.nan),
            progress.epoch,
            progress.tokens_per_s,
        )
        self._watch(progress)

    async def _validate(self) -> dict[str, float]:
        """Compute the validation loss, add it to the state, and return its metrics."""
        with self._clock.phase("validation"):
            figures = await self._backend.evaluate(self._data.validation)
        loss = figures["loss/mean"]
        if not math.isfinite(loss):
            raise RunFailed(
                f"the validation loss after step {self._step} is not a number, so the weights are ruined and "
                "were not exported: lower training.lr, and go back with --resume.step"
            )
        history = [*self._state.validation, (self._step, loss)]
        self._state = msgspec.structs.replace(self._state, validation=history)
        logger.info("step %d | validation loss %.4f", self._step, loss)
        return {"val/loss": loss, "val/tokens": figures["tokens"]}

    async def _save(self) -> float:
        """Write a checkpoint; return the seconds it took."""
        started = time.monotonic()
        with self._clock.phase("checkpoint"):
            part = msgspec.json.encode(self._state)
            keep = self._checkpoints
            await keep.begin(self._step, {CURSOR: part}, self._backend)
        return round(time.monotonic() - started, 4)

    async def _save_last(self) -> None:
        """Write a checkpoint of the last step, unless there is one, and wait until it is durable."""
        await self._checkpoints.finish()
        if self._step and await asyncio.to_thread(self._checkpoints.latest) != self._step:
            await self._save()
            await self._checkpoints.finish()

    async def _restore(self, resume: ResumeConfig) -> None:
        checkpoint = await restore(resume, self._checkpoints, self._identity)
        if checkpoint is None:
            logger.warning("no checkpoint: starting at step 0")
            return
        await self._backend.load(checkpoint.directory)
        self._state, self._step = checkpoint.state, checkpoint.step
        self._skips.restore(
            checkpoint.step, checkpoint.state.skipped, checkpoint.state.skipped_in_a_row
        )
        logger.info(
            "resumed at step %d, epoch %.2f", self._step, self._epoch(checkpoint.state.cursor)
        )

    async def _finish(self) -> dict[str, object]:
        """Validate, save and export the last step, as far as not done yet; return the summary."""
        config = self._config
        if self._data.validation and self._state.validation[-1][0] != self._step:
            await self._validate()
        await self._save_last()
        self._skips.at_end()
        weights = await self._export()
        saved = self._state
        measured = [loss for _, loss in saved.validation] or [None]
        return {
            "run": config.name,
            "seed": config.seed,
            "steps": self._step,
            "loss": sum(saved.losses) / len(saved.losses) if saved.losses else None,
            "validation_loss_before": measured[0],
            "validation_loss_after": measured[-1],
            "validation_samples": len(self._data.validation),
            "epochs": self._epoch(saved.cursor),
            "samples": saved.cursor.samples,
            "tokens": saved.cursor.tokens,
            "skipped_rows": saved.cursor.skipped,
            "skipped_steps": saved.skipped,
            "weights": str(weights),
        }

    async def _export(self) -> Path:
        """Export the weights of the current step; return their directory."""
        weights = weights_dir(self._config.run_dir, self._step)
        with self._clock.phase("export"):
            await self._backend.export(weights)
        logger.info("exported to %s", weights)
        return weights

    def _due(self, interval: int) -> bool:
        return interval > 0 and self._step % interval == 0

    def _epoch(self, cursor: DataCursor) -> float:
        size = self._data.training.size
        return cursor.epoch + (cursor.index / size if size else 0.0)


async def restore(resume: ResumeConfig, own: Checkpoints, identity: str) -> Restored | None:
    """Read the checkpoint that `resume` selects and set later ones aside.

    None if this run has none. Raises UsageError if the selected step or run has none, or its data differ;
    StorageError.
    """
    source = own
    if resume.dir is not None:
        source = Checkpoints(resume.dir / CHECKPOINTS, keep_last=own.keep_last, fsync=own.fsync)
    checkpoint = await source.read_selected(resume)
    if checkpoint is None:
        return None
    step, parts = checkpoint
    try:
        state = msgspec.json.decode(parts[CURSOR], type=SftState)
    except (KeyError, *BAD_FILE) as error:
        raise StorageError(
            f"checkpoint {step} was not written by `sft`: resume it with the command that wrote it"
        ) from error
    if state.identity != identity:
        if resume.dir is None:
            raise UsageError(
                "the data differ from those that the run began with: give the same data, or --resume.dir "
                "and another --name"
            )
        logger.warning("the data differ from those of %s: reading from the start", resume.dir)
        state = SftState(DataCursor(), identity)
    if source is own:
        own.set_aside(step)
    else:
        state = msgspec.structs.replace(state, line={})
    return Restored(step, state, source.backend_directory(step))
