"""The synchronous core of training: one rank's share of a step.

Imports torch: import this file lazily. Every method is collective: all ranks call it with the same arguments,
and get the same figures. A step whose loss or gradient is not finite changes no weight, and weights that are
not finite are neither saved nor exported; a sample that does not fit the model is left out and counted.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import compress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from ..config.training import LossConfig, TrainingConfig
from ..errors import EngineError, StorageError
from ..memory_plan.memory import fsdp_ranks, row_tokens
from ..memory_plan.shape import read_shape
from ..models import huggingface, model_files
from ..models.architectures import text_config
from ..models.device import upload_array
from ..models.json_files import read_json
from ..models.support import support_fault
from ..models.tensors import bf16_state
from ..weights.state import State
from . import lora
from .backend import (
    RUINED,
    SKIPPED,
    Example,
    Sample,
    SampleTerms,
    Snapshot,
    StepMetrics,
    TrainBatch,
)
from .export import PolicyExporter
from .gather import Source, adopt, named_sources, policy_sources, whole_tensors
from .learner_state import (
    ALONE,
    CutLearner,
    HostRoom,
    SavedLearner,
    read_saved,
    rng_state,
    set_rng_state,
)
from .losses import (
    LossSums,
    TokenInputs,
    bound_by_second_moment,
    cross_entropy,
    formula,
    policy_loss,
    sft,
)
from .meter import Cost, StepMeter, cost_of
from .model import MULTIPLE, TrainedModel, compute_dtype, is_compiled
from .optimizer import Optimizer, learning_rate
from .packing import MicroBatch, Packed, pack
from .world import RankChannel, World, pick_device

if TYPE_CHECKING:
    from ..models.huggingface import PreTrainedModel

logger = logging.getLogger(__name__)

MAX_LOGPROB = 1e-3
"""Tolerance for a sampler's logprob above 0 by rounding; larger values are malformed."""
WARMUP_BETAS = (0.9, 0.98)
MADE_UP = 4
"""Most sequences in a row of compile_step()."""


class Learner:
    """A rank's fp32 master weights and moments, and the steps on them."""

    def __init__(
        self,
        model: TrainedModel,
        *,
        model_dir: Path,
        config: TrainingConfig,
        world: World,
        max_steps: int,
        temperature: float,
        own: Mapping[str, tuple[float, LossConfig]] = MappingProxyType({}),
        reference: TrainedModel | None = None,
    ) -> None:
        """Set up the optimizer and the exporter.

        `temperature` is the sampling temperature; environments in `own`, by name, have a temperature and a loss
        of their own.
        """
        self.step_done = 0
        """Last optimizer step, and the version of the policy."""
        self._model = model
        self._reference = reference
        self._model_dir = model_dir
        self._config = config
        self._world = world
        self._channel = RankChannel.open(config.fsdp.timeout_s) if world.size > 1 else ALONE
        """For checkpoints alone: they are written while other ranks' calls go on."""
        self._room = HostRoom()
        self._staged: CutLearner | None = None
        self._max_steps = max_steps
        self._temperature = temperature
        self._temperatures = {name: value for name, (value, _) in own.items()}
        self._losses = [config.loss]
        """All distinct losses: the tokens of one micro-batch may have several."""
        for _, loss in own.values():
            if loss not in self._losses:
                self._losses.append(loss)
        self._loss_of = {name: self._losses.index(loss) for name, (_, loss) in own.items()}
        self.vocabulary = model_files.vocab_size(model_dir)
        """Token ids are below this."""
        on_gpu = world.device.type != "cpu"
        self._exporter = PolicyExporter(world, bundles=on_gpu, threads=config.threads, ahead=on_gpu)
        self._row = _row_tokens(model_dir, config, world)
        """Most tokens of a row."""
        self._parameters = model.masters()
        self._optimizer = Optimizer(self._parameters, config)
        self._warmup_optimizer: Optimizer | None = None
        # before the first forward pass, after which a sharded model shows some parameters whole
        self._sources = self._published()
        self._meter = StepMeter(_cost(model), world.device, world.size)
        self._ruined = not self._is_finite()
        """Whether some weight is not finite: then the policy is neither saved nor exported."""
        if self._ruined:
            raise EngineError(
                f"the weights in {model_dir} are not all finite numbers: fetch or export the model again"
            )

    @classmethod
    def build(
        cls,
        model_dir: Path,
        config: TrainingConfig,
        *,
        max_steps: int,
        seed: int,
        temperature: float,
        own: Mapping[str, SampleTerms] = MappingProxyType({}),
        world: World | None = None,
    ) -> "Learner":
        """Load the model and seed torch. Raises EngineError, UsageError for a custom loss."""
        if config.threads:
            torch.set_num_threads(config.threads)
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
        world = world or World.alone(torch.device(pick_device(config.device)))
        torch.manual_seed(seed)
        terms = {
            name: (terms_of.temperature, LossConfig.model_validate_json(terms_of.loss))
            for name, terms_of in own.items()
        }
        # report a missing custom loss before anything is loaded
        for loss in (config.loss, *(loss for _, loss in terms.values())):
            formula(loss)
        model = TrainedModel.build(model_dir, config, world, attach=_attach(config, seed, world))
        reference = None
        if config.loss.loads_reference:
            reference = _reference(model_dir, config, world)
        return cls(
            model,
            model_dir=model_dir,
            config=config,
            world=world,
            max_steps=max_steps,
            temperature=temperature,
            own=terms,
            reference=reference,
        )

    def step(self, batch: TrainBatch) -> StepMetrics:
        """Make one optimizer step over `batch`; an empty one only advances the schedule."""
        if batch.step <= self.step_done:
            raise ValueError(
                f"step {batch.step} came after step {self.step_done}: number batches upwards"
            )
        self._meter.start()
        fitting = [sample for sample in batch.samples if self._fits(sample)]
        packed = self._pack(fitting)
        self._meter.phase("pack")
        lr = learning_rate(self._config, batch.step, self._max_steps)
        values = {
            "optim/lr": lr,
            SKIPPED: 0.0,
            "samples/malformed": float(len(batch.samples) - len(fitting)),
            "samples/too_long": float(len(packed.too_long)),
            "tokens": 0.0,
        }
        if packed.tokens or packed.echo_tokens or packed.given_tokens:
            values |= self._apply(self._optimizer, lr, self._accumulate(packed, batch))
            values |= self._model.expert_load.figures()
        self.step_done = batch.step
        return StepMetrics(values | self._meter.figures(packed.lengths))

    def compile_step(self) -> None:
        """Compile what a step computes, on made-up samples whose gradients are dropped.

        Three rows: the second has another length and number of sequences, so that there is code for any; a
        single sequence is a case of its own. Does nothing if nothing is compiled.
        """
        if not is_compiled(self._config, self._world):
            return
        longest = self._config.seq_len
        part = min(longest, max(2, self._row // MADE_UP))
        parts = self._row // part
        for count, length in ((parts, part), (parts - 1, part), (1, longest)):
            tokens = [place % self.vocabulary for place in range(length)]
            mask = [False] + [True] * (length - 1)
            samples = [
                Sample(tokens, mask, [-1.0] * length, advantage=1.0 - number % 2 * 2)
                for number in range(count * self._world.data_size)
            ]
            self._accumulate(self._pack(samples), TrainBatch(0, samples))
        self._optimizer.zero_grad()

    def evaluate(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Return the cross entropy per trained token (`loss/mean`) and `tokens`, without learning."""
        packed = self._pack([sample for sample in samples if self._fits(sample)])
        sums = LossSums()
        with torch.no_grad():
            for row in packed.rank(self._world.data_rank):
                inputs = self._model.read(row, 1.0)
                sums.add(cross_entropy(inputs, max(1, packed.tokens))[1])
        figures = self._reduced(sums).metrics()
        return {"loss/mean": figures.get("loss/mean", 0.0), "tokens": float(packed.tokens)}

    def packed_logprobs(self, samples: Sequence[Sample]) -> list[float]:
        """Compute the logprobs of all trained tokens, longest sample first, in one row; no gradient."""
        tokens = sum(len(sample.token_ids) for sample in samples)
        rows = pack(samples, tokens, multiple=self._multiple).rank(0)
        with torch.no_grad():
            read = (self._model.read(row, self._temperature_of(row)) for row in rows)
            return [value for inputs in read for value in inputs.logprobs.tolist()]

    def supervised_step(self, examples: Sequence[Example], lr: float) -> float:
        """Make one step of plain cross entropy on the completions; returns the loss per token.

        NaN if the step was skipped, or ruined the weights.

        Uses a separate optimizer (AdamW, betas 0.9/0.98, no decay) until end_supervised().
        """
        if self._warmup_optimizer is None:
            self._warmup_optimizer = Optimizer(
                self._parameters, self._config, betas=WARMUP_BETAS, weight_decay=0.0
            )
        packed = self._pack([_demonstration(example) for example in examples])
        if not packed.tokens:
            return 0.0
        sums = self._accumulate(packed, TrainBatch(0, [], "ce"))
        figures = self._apply(self._warmup_optimizer, lr, sums)
        changed = not figures[SKIPPED] and not self._ruined
        return figures["loss/mean"] if changed else math.nan

    def end_supervised(self) -> None:
        """Forget all optimizer moments: reinforcement learning starts from the weights alone."""
        self._warmup_optimizer = None
        self._optimizer = Optimizer(self._parameters, self._config)

    def state(self) -> State:
        """Return the bf16 policy, on the first rank; empty on the others."""
        self._check_finite()
        return bf16_state(whole_tensors(self._sources, self._world.rank))

    def snapshot(self) -> Snapshot:
        """Return a single rank's bf16 policy and its changes, found on the weights' device."""
        self._check_finite()
        return self._exporter.snapshot(self._sources)

    def write_state(self, path: Path) -> None:
        """Write the policy as a file for SnapshotReader. Raises StorageError, EngineError."""
        self._check_finite()
        self._exporter.write_state(self._sources, path)

    def write_snapshot(self, path: Path, *, whole: bool) -> None:
        """Write only the changes since the last snapshot, unless `whole`. Errors as write_state()."""
        self._check_finite()
        self._exporter.write_snapshot(self._sources, path, whole=whole)

    def _published(self) -> list[Source]:
        causal, rank = self._model.causal, self._world.rank
        if self._config.lora is None:
            return policy_sources(causal, rank)
        return list(named_sources(lora.adapter_tensors(causal), rank))

    def export(self, directory: Path) -> None:
        """Write the bf16 policy as a Hugging Face model, adapters as PEFT does, on the first rank.

        Raises StorageError there.
        """
        state, config = self.state(), self._config.lora
        if self._world.is_first and config is not None:
            lora.export(state, config, self._model_dir, directory)
        elif self._world.is_first:
            model_files.export(state, self._model_dir, directory)

    def save(self, directory: Path) -> None:
        """Write weights, moments, step and RNG; `directory` is whole or absent. Raises StorageError."""
        self.saved().write(directory, self._channel)

    def stage(self) -> None:
        """Copy the content of a checkpoint into host memory: training may go on."""
        self._staged = self.saved().staged(self._channel, self._room)

    def write_staged(self, directory: Path) -> None:
        """Write the newest stage().

        May run in a thread beside everything but stage(), save() and load(). Raises EngineError if nothing is
        staged.
        """
        staged, self._staged = self._staged, None
        if staged is None:
            raise EngineError("nothing was staged: call stage() first")
        staged.write(directory, self._channel)

    def load(self, directory: Path) -> None:
        """Restore exactly, bit by bit, the state that save() wrote.

        Raises StorageError, and UsageError for another optimizer's moments; then nothing has changed.
        """
        moments_on = "cpu" if self._config.optimizer_offload else None
        trained = self._optimizer.parameters
        saved = read_saved(directory, trained, self._channel, moments_on=moments_on)
        self._optimizer.set_moments(saved.moments)
        with torch.no_grad():
            for name, tensor in saved.weights.items():
                self._parameters[name].copy_(tensor)
        self._model.settle()
        set_rng_state(saved.rng)
        self._warmup_optimizer = None
        self.step_done = saved.step
        self._ruined = not self._is_finite()
        if self._ruined:
            raise StorageError(
                f"the weights in {directory} are not all finite numbers: resume from an earlier checkpoint "
                "(--resume.step)"
            )

    def adopt(self, file: Path, step: int) -> None:
        """Go on after `step` with the published policy in `file`, a safetensors file; moments stay.

        Weights whose rounding is the policy's keep their exact values. Raises EngineError.
        """
        try:
            with safe_open(file, "pt") as tensors, torch.no_grad():

                def flat(name: str) -> torch.Tensor:
                    return tensors.get_tensor(name).reshape(-1)

                adopt(self._sources, flat)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"the policy in {file} is not taken over: {error}") from error
        self._model.adopt()
        self._model.settle()
        self.step_done = step

    def write_masters(self, path: Path) -> None:
        """Write the fp32 masters of all trained parameters to a safetensors file, on the first rank.

        Raises EngineError.
        """
        self._check_finite()
        masters: dict[str, torch.Tensor] = {}
        for name, parameter in self._optimizer.parameters.items():
            own = parameter.detach()
            whole = own.full_tensor() if isinstance(own, DTensor) else own
            if self._world.is_first:
                masters[name] = whole.float().cpu().contiguous()
        if self._world.is_first:
            try:
                save_file(masters, path)
            except (OSError, SafetensorError) as error:
                raise EngineError(f"{path} cannot be written: {error}") from error

    def read_masters(self, path: Path, step: int) -> None:
        """Go on after `step` with the masters of a file of write_masters(). Raises EngineError."""
        parameters = self._optimizer.parameters
        try:
            with safe_open(path, "pt") as tensors, torch.no_grad():
                names: list[str] = list(tensors.keys())
                shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
                if shapes != {name: tuple(own.shape) for name, own in parameters.items()}:
                    raise EngineError(f"the masters in {path} are of another model")
                for name, own in parameters.items():
                    own.copy_(_laid_out_as(own, tensors.get_tensor(name)))
        except (OSError, SafetensorError) as error:
            raise EngineError(f"the masters in {path} are not taken over: {error}") from error
        self._model.settle()
        self.step_done = step
        self._ruined = not self._is_finite()

    def close(self, *, keep_world: bool = False) -> None:
        """End the exporter's threads, and the ranks' connection unless `keep_world` is set."""
        self._exporter.close()
        self._model.release()
        if not keep_world:
            self._world.close()

    def saved(self) -> SavedLearner:
        """Return the trained tensors, without frozen ones and without copying."""
        self._check_finite()
        moments = self._optimizer.moments()
        return SavedLearner(self.step_done, self._optimizer.parameters, moments, rng_state())

    # -- one step ----------------------------------------------------------------------------------

    @property
    def _multiple(self) -> int:
        return self._world.context_size * (1 if self._world.device.type == "cpu" else MULTIPLE)

    def _pack(self, samples: Sequence[Sample]) -> Packed:
        ranks = self._world.data_size
        seq_len, row = self._config.seq_len, self._row
        return pack(samples, seq_len, row=row, ranks=ranks, multiple=self._multiple)

    def _fits(self, sample: Sample) -> bool:
        """Return whether the lists agree, ids are in the vocabulary and every number is usable."""
        length = len(sample.token_ids)
        if len(sample.mask) != length or len(sample.logprobs) != length or length < 2:
            return False
        if sample.echo is not None and len(sample.echo) != length:
            return False
        if sample.given and self._config.sft is None:
            return False
        if sample.hint and not 0 <= min(sample.hint) <= max(sample.hint) < self.vocabulary:
            return False
        return (
            0 <= min(sample.token_ids)
            and max(sample.token_ids) < self.vocabulary
            and not self._model.replay.fault(sample.routes, sample.mask[1:].count(True))
            and not _support_fault(sample, self.vocabulary)
            and math.isfinite(sample.advantage)
            and _can_be_logprobs(sample.logprobs)
        )

    def _accumulate(self, packed: Packed, batch: TrainBatch) -> LossSums:
        """Run forward and backward over this rank's rows; returns their sums, for which it does not wait."""
        self._optimizer.zero_grad()
        learns = batch.objective != "ce"
        losses = self._bounded(packed) if learns else self._losses
        self._model.expert_load.reset()
        sums = LossSums()
        rank = self._world.data_rank
        hinted = packed.rank(rank, hinted=True) if self._config.loss.hint else None
        for row in packed.rank(rank):
            if not learns:
                loss, part = cross_entropy(self._model.read(row, 1.0), packed.tokens)
            else:
                reference = self._reference_logprobs(next(hinted) if hinted else row)
                inputs = self._model.read(row, self._temperature_of(row))
                inputs = replace(inputs, reference=reference)
                loss, part = self._policy_loss(row, inputs, losses, packed)
                if inputs.given is not None and (mixed := self._config.sft) is not None:
                    taught, figures = sft(mixed.weight, inputs, packed.given_tokens)
                    loss = loss + taught
                    part.add(figures)
            # losses are divided by the tokens of all ranks, and gradients are averaged over ranks
            (loss * self._world.size).backward()
            sums.add(part)
        return sums

    def _temperature_of(self, row: MicroBatch) -> float | list[float]:
        """Return the temperature of a row's samples, or one for each if they differ."""
        each = [self._temperatures.get(name, self._temperature) for name in row.environments]
        return each if len(set(each)) > 1 else (each or [self._temperature])[0]

    def _policy_loss(
        self, row: MicroBatch, inputs: TokenInputs, losses: Sequence[LossConfig], packed: Packed
    ) -> tuple[torch.Tensor, LossSums]:
        """Compute the loss of a row, each token's by its environment, divided by the step's tokens."""
        loss_sum, sums = inputs.logprobs.new_zeros(()), LossSums()
        for number, part in self._by_loss(row, inputs):
            if not losses[number].needs_reference:
                part = replace(part, reference=None)
            loss, figures = policy_loss(losses[number], part, packed.tokens, packed.echo_tokens)
            loss_sum = loss_sum + loss
            sums.add(figures)
        return loss_sum, sums

    def _by_loss(self, row: MicroBatch, inputs: TokenInputs) -> list[tuple[int, TokenInputs]]:
        """Split the tokens of a row by the index of their loss."""
        each = [self._loss_of.get(name, 0) for name in row.environments] or [0]
        if len(set(each)) == 1:
            return [(each[0], inputs)]
        numbers = torch.tensor(each, device=inputs.sequences.device)[inputs.sequences]
        return [(number, inputs.of(numbers == number)) for number in sorted(set(each))]

    def _bounded(self, packed: Packed) -> list[LossConfig]:
        """Return the losses with the bounds of this step.

        Where a loss needs them, tokens are read once more, without gradient.
        """
        losses = list(self._losses)
        bounded = [n for n, loss in enumerate(losses) if loss.rejection == "second_moment"]
        if not bounded:
            return losses
        ratios: dict[int, list[torch.Tensor]] = {number: [] for number in bounded}
        with torch.no_grad():
            for row in packed.rank(self._world.data_rank):
                inputs = self._model.read(row, self._temperature_of(row))
                for number, part in self._by_loss(row, inputs):
                    if number in ratios:
                        ratios[number].append(part.drawn().log_ratio)
        total, largest = self._world.total, self._world.largest
        for number in bounded:  # all ranks in the same order
            squares = torch.cat(ratios[number] or [torch.empty(0)]).square()
            losses[number] = bound_by_second_moment(losses[number], squares, total, largest)
        return losses

    def _reference_logprobs(self, row: MicroBatch) -> torch.Tensor | None:
        """Return the reference's logprobs of a row's trained tokens; None without a reference."""
        if any(loss.endpoint is not None for loss in self._losses):
            own = row.part(self._world.context_rank, self._world.context_size)
            return upload_array(own.reference, self._world.device)
        itself = self._config.loss.teacher == "policy"
        teacher = self._model if itself else self._reference
        if teacher is None:
            return None
        with torch.no_grad():
            return teacher.read(row, self._temperature_of(row)).logprobs

    def _reduced(self, sums: LossSums) -> LossSums:
        world, sums = self._world, sums.read()
        return sums if world.size == 1 else sums.reduce(world.total, world.largest)

    def _apply(self, optimizer: Optimizer, lr: float, sums: LossSums) -> dict[str, float]:
        """Clip and step, or skip the step if anything is not finite; return the figures of both.

        A single rank launches all of it before it waits for the device.
        """
        if self._world.size > 1:
            sums = self._reduced(sums)  # ranks have to agree
        norm = optimizer.clip()
        self._meter.phase("forward_backward")
        finite = norm.isfinite() & sums.finite(norm.device)
        optimizer.step(lr, finite)
        self._model.settle()
        optimizer.zero_grad()
        self._meter.phase("optimizer")
        self._ruined = not self._is_finite()
        figures = {"optim/grad_norm": float(norm), SKIPPED: float(not finite)}
        if self._ruined:
            figures[RUINED] = 1.0
        return sums.metrics() | figures

    def _is_finite(self) -> bool:
        """Return whether every trained weight is finite, on all ranks, and in bf16, too. Collective."""
        return self._world.largest([float(not self._optimizer.is_finite())]) == [0.0]

    def _check_finite(self) -> None:
        """Raise EngineError, on all ranks, if some weight is not finite."""
        if self._ruined:
            raise EngineError(
                "the weights are not all finite numbers, so they are neither kept nor published: lower the "
                "learning rate and resume from an earlier checkpoint"
            )


def _laid_out_as(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return `whole`, the same on all ranks, sharded and placed as `parameter` is."""
    whole = whole.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _reference(model_dir: Path, config: TrainingConfig, world: World) -> TrainedModel:
    """Load the frozen reference policy of the loss. Raises EngineError."""
    teacher = huggingface.text_directory(config.loss.reference or model_dir)
    if teacher != model_dir:
        model_files.check_same_tokens(teacher, model_dir)
    return TrainedModel.build(teacher, config, world, frozen=True)


def _attach(
    config: TrainingConfig, seed: int, world: World
) -> "Callable[[PreTrainedModel], None] | None":
    """Return the function that attaches the configured adapters; None without adapters."""
    if config.lora is None:
        return None
    # sharded parameters are cast for forward anyway, so a frozen base may be stored in that dtype
    dtype = compute_dtype(config, world) if world.mesh is not None else None
    return partial(lora.attach, config=config.lora, seed=seed, dtype=dtype)


def _row_tokens(model_dir: Path, config: TrainingConfig, world: World) -> int:
    """Choose how many tokens a row holds, the same on all ranks. Collective."""
    tokens = config.seq_len
    if world.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(world.device).total_memory
        with suppress(EngineError):  # of a model whose memory cannot be planned
            shape = read_shape(text_config(read_json(model_dir / "config.json")))
            tokens = row_tokens(config, shape, gpu, ranks=fsdp_ranks(config))
    (least,) = world.largest([-float(tokens)])
    return -int(least)


def _cost(model: TrainedModel) -> Cost:
    parameters = sum(parameter.numel() for parameter in model.causal.parameters())
    return cost_of(model.causal.config.get_text_config(), parameters)


def _demonstration(example: Example) -> Sample:
    """Convert a supervised example into a sample whose completion is trained."""
    prompt, completion = example
    length = len(prompt) + len(completion)
    mask = [False] * len(prompt) + [True] * len(completion)
    return Sample([*prompt, *completion], mask, [0.0] * length, 1.0)


def _support_fault(sample: Sample, vocabulary: int) -> str:
    """Return why the supports do not fit a sample, of whose limits nothing is known; empty if they do."""
    if not sample.support:
        return ""
    sampled = list(compress(sample.token_ids[1:], sample.mask[1:]))
    return support_fault(sample.support, sampled, vocabulary, 0, 0.0)


def _can_be_logprobs(values: Sequence[float]) -> bool:
    """Return whether all values are numbers that a sampler may give."""
    array = np.fromiter(values, np.float64, len(values))
    return bool(((array > -math.inf) & (array <= MAX_LOGPROB)).all())
