"""The loop of supervised learning: a batch, a step, now and then a measurement and a checkpoint.

- The next batch depends on the cursor of the last checkpoint alone; a batch that was read ahead and not trained
  is read again.
- A checkpoint holds the cursor of its step, and the validation figures so far.
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
from ..ops.errors import RunFailed, StorageError, UsageError
from ..ops.metrics import MetricsLog, PhaseClock
from ..ops.monitors import Monitors
from ..storage.run_files import CHECKPOINTS, METRICS, weights_dir
from ..training.backend import TrainBackend, TrainBatch
from ..training.checkpoint import Checkpoints
from .data import BatchReader, Data, DataBatch, DataCursor

logger = logging.getLogger(__name__)

CURSOR = "cursor"
"""The part of a checkpoint that holds SftState."""
WINDOW = 20
"""Steps whose mean is the loss of the summary."""
MAX_SKIPPED = 10
"""Steps in a row without a finite gradient that end the run."""


@dataclass(frozen=True)
class SftProgress:
    """The figures that a view shows after every step."""

    step: int
    max_steps: int
    loss: float
    validation_loss: float | None
    epoch: float
    tokens_per_s: float
    phase: str = "training"


Watch = Callable[[SftProgress], None]


class SftState(msgspec.Struct, frozen=True):
    """Everything that a checkpoint holds beside the learner."""

    cursor: DataCursor
    identity: str
    """Of the data that the cursor walks."""
    validation: list[tuple[int, float]] = []
    """(step, loss) so far."""
    losses: list[float] = []
    """Of the last steps."""
    line: dict[str, float | None] = {}
    """Metrics of the step: a run that goes on from it may find that they were not written."""


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was found whole; a backend loads `directory`."""

    step: int
    state: SftState
    directory: Path


class SftLoop:
    """Trains with a started backend, from the last checkpoint or the beginning, to the end."""

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
        self._skipped = 0
        self._stopping = False

    async def run(self, resume: ResumeConfig | None) -> dict[str, object]:
        """Train to max_steps or the end of the data, export; returns the summary. Raises NodeError."""
        if resume is not None:
            await self._restore(resume)
        monitors = await asyncio.to_thread(Monitors.of_run, self._config, "sft")
        metrics = MetricsLog(self._config.run_dir / METRICS, monitors)
        try:
            await asyncio.to_thread(metrics.go_back, self._step or -1, self._state.line)
            if not self._state.validation and self._data.validation:
                metrics.write(0, await self._measured())
            await self._train_or_stop(metrics)
            await self._checkpoints.finish()
        finally:
            await asyncio.to_thread(metrics.close)
            await self._checkpoints.close()
        return await self._finish()

    async def _train_or_stop(self, metrics: MetricsLog) -> None:
        """Train; when cancelled, finish the step in progress and leave a checkpoint of it."""
        training = asyncio.create_task(self._train(metrics), name="sft training")
        try:
            await asyncio.shield(training)
        except asyncio.CancelledError:
            self._stopping = True
            await training
            await self._save_last()
            logger.info("stopped after step %d; --resume goes on there", self._step)
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
                ahead = read(batch.cursor)  # in a thread, while this one is trained
                await self._turn(batch, waited, metrics)
        finally:
            await asyncio.wait([ahead])
            ahead.exception()  # retrieved, so that asyncio does not report it

    async def _turn(self, data: DataBatch, waited: float, metrics: MetricsLog) -> None:
        """Train one step; measure, save and export where its number is due."""
        started = time.monotonic()
        with self._clock.phase("train"):
            figures = await self._backend.step(TrainBatch(self._step + 1, data.samples, "ce"))
        self._step += 1
        seconds = time.monotonic() - started
        values = self._figures(data, figures.values, seconds, waited)
        self._check_finite(values)
        self._note(data.cursor, values["loss/mean"])
        last = self._step == self._config.max_steps
        if self._data.validation and (last or self._due(self._config.validation.interval)):
            values |= await self._measured()
        line = {**values, "time": round(time.time(), 3)}
        self._state = msgspec.structs.replace(self._state, line=line)
        if last or self._due(self._config.checkpoint.interval):
            values["time/save_ckpt"] = await self._save()
        if not last and self._due(self._config.checkpoint.weights_interval):
            await self._export()
        metrics.write(self._step, values)
        self._tell(values)

    def _figures(
        self, data: DataBatch, figures: dict[str, float], seconds: float, waited: float
    ) -> dict[str, float]:
        """Add the figures of the data to the backend's."""
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

    def _check_finite(self, values: dict[str, float]) -> None:
        self._skipped = self._skipped + 1 if values.get("optim/skipped") else 0
        if self._skipped >= MAX_SKIPPED:
            raise RunFailed(
                f"{MAX_SKIPPED} steps in a row had no finite gradient: lower training.lr, or go on "
                "from an earlier checkpoint"
            )

    def _note(self, cursor: DataCursor, loss: float) -> None:
        losses = [*self._state.losses, loss][-WINDOW:]
        self._state = msgspec.structs.replace(self._state, cursor=cursor, losses=losses)

    def _tell(self, values: dict[str, float]) -> None:
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

    async def _measured(self) -> dict[str, float]:
        """Measure cross entropy on the validation samples, and keep it in the state."""
        with self._clock.phase("validation"):
            found = await self._backend.evaluate(self._data.validation)
        loss = found["loss/mean"]
        history = [*self._state.validation, (self._step, loss)]
        self._state = msgspec.structs.replace(self._state, validation=history)
        logger.info("step %d | validation loss %.4f", self._step, loss)
        return {"val/loss": loss, "val/tokens": found["tokens"]}

    async def _save(self) -> float:
        """Write a checkpoint; returns the seconds that it took."""
        started = time.monotonic()
        with self._clock.phase("checkpoint"):
            part = msgspec.json.encode(self._state)
            keep = self._checkpoints
            save = keep.begin if self._config.checkpoint.async_save else keep.write
            await save(self._step, {CURSOR: part}, self._backend)
        return round(time.monotonic() - started, 4)

    async def _save_last(self) -> None:
        """Write a durable checkpoint of the last step, if there is none."""
        await self._checkpoints.finish()
        if self._step and await asyncio.to_thread(self._checkpoints.latest) != self._step:
            await self._save()
            await self._checkpoints.finish()

    async def _restore(self, resume: ResumeConfig) -> None:
        found = await restore(resume, self._checkpoints, self._identity)
        if found is None:
            logger.warning("no checkpoint: beginning at step 0")
            return
        await self._backend.load(found.directory)
        self._state, self._step = found.state, found.step
        logger.info("resumed at step %d, epoch %.2f", self._step, self._epoch(found.state.cursor))

    async def _finish(self) -> dict[str, object]:
        """Measure, save and export the last step, where that is not done; return the summary."""
        config = self._config
        if self._data.validation and self._state.validation[-1][0] != self._step:
            await self._measured()
        await self._save_last()
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
            "weights": str(weights),
        }

    async def _export(self) -> Path:
        """Write the weights of this step; returns where."""
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
    """Find the checkpoint that `resume` asks for, and set later ones aside; None if this run has none yet.

    Raises UsageError for a step or a run that has none, and for other data; StorageError.
    """
    source = own
    if resume.dir is not None:
        source = Checkpoints(resume.dir / CHECKPOINTS, keep_last=own.keep_last, fsync=own.fsync)
    found = await _find(resume, source)
    if found is None:
        return None
    step, parts = found
    try:
        state = msgspec.json.decode(parts[CURSOR], type=SftState)
    except (KeyError, msgspec.DecodeError) as error:
        raise StorageError(
            f"checkpoint {step} is none of `sft`: resume it with the command that wrote it"
        ) from error
    if state.identity != identity:
        if resume.dir is None:
            raise UsageError(
                "the data are not those that the run began with: give the same, or --resume.dir and "
                "another --name"
            )
        logger.warning("the data are others than those of %s: read from the start", resume.dir)
        state = SftState(DataCursor(), identity)
    if source is own:
        own.set_aside(step)
    else:
        state = msgspec.structs.replace(state, line={})
    return Restored(step, state, source.backend_directory(step))


async def _find(resume: ResumeConfig, source: Checkpoints) -> tuple[int, dict[str, bytes]] | None:
    known = source.steps()
    if resume.step is not None:
        if resume.step not in known:
            steps = ", ".join(map(str, known)) or "none"
            raise UsageError(
                f"no checkpoint of step {resume.step} in {source.directory} (there are: {steps})"
            )
        return resume.step, await source.read(resume.step)
    found = await source.read_newest()
    if found is None and resume.dir is not None:
        raise UsageError(f"no checkpoint in {source.directory}: correct resume.dir")
    return found
