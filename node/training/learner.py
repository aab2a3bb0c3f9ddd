"""The synchronous core of training: model, optimizer, schedule. Imports torch: import this file lazily.

One thread at a time. A step whose loss or gradient is not finite changes no weight, and a sample that does
not fit the model is left out and counted before it can raise.
"""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .. import model_files, models
from ..config import TrainingConfig
from ..weights.state import State
from .backend import Batch, Sample, Snapshot, StepMetrics
from .device_export import DeviceExporter
from .forward import trained_tokens
from .losses import LossSums, policy_loss
from .packing import Packed, pack
from .saved import SavedLearner, read_saved, rng_state, set_rng_state
from .schedule import learning_rate

if TYPE_CHECKING:
    from ..models import PreTrainedModel

Example = tuple[Sequence[int], Sequence[int]]
"""(prompt token ids, completion token ids with the stop token)."""

MAX_LOGPROB = 1e-3
"""Rounding may lift the logprob of a sure token above 0; a probability of 2 is a lie."""
WARMUP_BETAS = (0.9, 0.98)


class Learner:
    """Owns fp32 master weights and AdamW; `temperature` is the one that samples were drawn at."""

    def __init__(
        self,
        model: "PreTrainedModel",
        *,
        model_dir: Path,
        config: TrainingConfig,
        max_steps: int,
        temperature: float,
    ) -> None:
        self.step_done = 0
        """Last optimizer step; the policy is this version."""
        self._model = model
        self._model_dir = model_dir
        self._config = config
        self._max_steps = max_steps
        self._temperature = temperature
        self._vocabulary = model_files.vocab_size(model_dir)
        on_gpu = model.device.type != "cpu"
        self._exporter = DeviceExporter(threads=config.threads, ahead=on_gpu)
        self._parameters = dict(model.named_parameters())  # a tied weight appears once
        self._optimizer = self._fresh_optimizer()
        self._warmup_optimizer: torch.optim.AdamW | None = None

    @classmethod
    def build(
        cls,
        model_dir: Path,
        config: TrainingConfig,
        *,
        max_steps: int,
        seed: int,
        temperature: float,
    ) -> "Learner":
        """Load the model and seed torch. Raises EngineError."""
        if config.threads:
            torch.set_num_threads(config.threads)
        torch.manual_seed(seed)
        model = models.load_model(model_dir, dtype="float32", device=pick_device(config.device))
        return cls(
            model,
            model_dir=model_dir,
            config=config,
            max_steps=max_steps,
            temperature=temperature,
        )

    def step(self, batch: Batch) -> StepMetrics:
        """One optimizer step over `batch`; an empty one only advances the schedule."""
        started = time.perf_counter()
        if batch.step <= self.step_done:
            raise ValueError(
                f"step {batch.step} came after step {self.step_done}: number batches upwards"
            )
        fitting = [sample for sample in batch.samples if self._fits(sample)]
        packed = pack(fitting, self._config.seq_len)
        lr = learning_rate(self._config, batch.step, self._max_steps)
        values = {
            "optim/lr": lr,
            "optim/skipped": 0.0,
            "samples/malformed": float(len(batch.samples) - len(fitting)),
            "samples/too_long": float(len(packed.too_long)),
            "tokens": 0.0,
        }
        if packed.tokens:
            sums = self._accumulate(packed, packed.tokens)
            values |= sums.metrics() | self._apply(lr, sums)
        self.step_done = batch.step
        values["time/forward_backward"] = time.perf_counter() - started
        return StepMetrics(values)

    def logprobs(self, samples: Sequence[Sample]) -> list[list[float]]:
        """The trainer's logprob of every trained token of each sample, 0.0 elsewhere; no gradient."""
        found: list[list[float]] = []
        for sample in samples:
            row = [0.0] * len(sample.token_ids)
            places = [t for t, trained in enumerate(sample.mask) if trained and t]
            for micro_batch in pack([sample], len(row)).micro_batches:
                with torch.no_grad():
                    inputs = trained_tokens(self._model, micro_batch, self._temperature)
                for place, value in zip(places, inputs.logprobs.tolist(), strict=True):
                    row[place] = value
            found.append(row)
        return found

    def supervised_step(self, examples: Sequence[Example], lr: float) -> float:
        """One step of plain cross entropy on the completions; returns the loss per token.

        Uses an optimizer of its own (AdamW, betas 0.9/0.98, no decay) until end_supervised().
        """
        if self._warmup_optimizer is None:
            self._warmup_optimizer = torch.optim.AdamW(
                self._parameters.values(), lr=lr, betas=WARMUP_BETAS, weight_decay=0.0
            )
        packed = pack(map(_demonstration, examples), self._config.seq_len)
        self._model.zero_grad(set_to_none=True)
        total = 0.0
        for micro_batch in packed.micro_batches:
            loss = -trained_tokens(self._model, micro_batch, 1.0).logprobs.sum() / packed.tokens
            loss.backward()
            total += float(loss.detach())
        norm = self._clip()
        if packed.tokens and math.isfinite(total) and math.isfinite(norm):
            _descend(self._warmup_optimizer, lr)
        self._model.zero_grad(set_to_none=True)
        return total

    def end_supervised(self) -> None:
        """Forget every optimizer moment: reinforcement learning starts from the weights alone."""
        self._warmup_optimizer = None
        self._optimizer = self._fresh_optimizer()

    def state(self) -> State:
        """The bf16 policy."""
        return models.policy_state(self._model)

    def snapshot(self) -> Snapshot:
        """The bf16 policy, compared with the last snapshot where the weights are."""
        return self._exporter.export(models.policy_tensors(self._model))

    def export(self, directory: Path) -> None:
        """Write the bf16 policy as a Hugging Face model. Raises StorageError."""
        model_files.export(self.state(), self._model_dir, directory)

    def save(self, directory: Path) -> None:
        """Write weights, moments, step and RNG; `directory` is whole or absent. Raises StorageError."""
        moments = {
            f"{name}:{key}": value
            for name, parameter in self._parameters.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }
        SavedLearner(self.step_done, self._parameters, moments, rng_state()).write(directory)

    def load(self, directory: Path) -> None:
        """Become what save() wrote there, bit by bit. Raises StorageError, then nothing has changed."""
        saved = read_saved(directory, self._parameters)
        with torch.no_grad():
            for name, tensor in saved.weights.items():
                self._parameters[name].copy_(tensor)
        self._set_moments(saved.moments)
        set_rng_state(saved.rng)
        self._warmup_optimizer = None
        self.step_done = saved.step

    def close(self) -> None:
        """End the threads of the exporter."""
        self._exporter.close()

    def _fits(self, sample: Sample) -> bool:
        """Whether the lists agree, ids are in the vocabulary and every number can be learned from."""
        length = len(sample.token_ids)
        if len(sample.mask) != length or len(sample.logprobs) != length or length < 2:
            return False
        return (
            0 <= min(sample.token_ids)
            and max(sample.token_ids) < self._vocabulary
            and math.isfinite(sample.advantage)
            and all(-math.inf < logprob <= MAX_LOGPROB for logprob in sample.logprobs)
        )

    def _accumulate(self, packed: Packed, tokens: int) -> LossSums:
        """Forward and backward over all micro-batches; `tokens` counts the step over all ranks."""
        self._model.zero_grad(set_to_none=True)
        sums = LossSums()
        for micro_batch in packed.micro_batches:
            inputs = trained_tokens(self._model, micro_batch, self._temperature)
            loss, part = policy_loss(self._config.loss, inputs, tokens)
            loss.backward()
            sums.add(part)
        return sums

    def _apply(self, lr: float, sums: LossSums) -> dict[str, float]:
        """Clip and step, unless something is not finite: then the step is skipped and counted."""
        norm = self._clip()
        finite = math.isfinite(norm) and all(map(math.isfinite, sums.sums.values()))
        if finite:
            _descend(self._optimizer, lr)
        self._model.zero_grad(set_to_none=True)
        return {"optim/grad_norm": norm, "optim/skipped": 0.0 if finite else 1.0}

    def _clip(self) -> float:
        """Scale the gradient to at most `max_norm`; returns the norm before."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._config.max_norm)
        return float(norm)

    def _fresh_optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            self._parameters.values(),
            lr=self._config.lr,
            betas=self._config.betas,
            weight_decay=self._config.weight_decay,
        )

    def _set_moments(self, moments: Mapping[str, torch.Tensor]) -> None:
        """Replace all moments, also by none."""
        index = {name: position for position, name in enumerate(self._parameters)}
        by_index: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in moments.items():
            name, _, moment = key.rpartition(":")
            by_index.setdefault(index[name], {})[moment] = value
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": by_index, "param_groups": groups})


def pick_device(name: str) -> str:
    """`auto` is cuda where there is one, else cpu."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _descend(optimizer: torch.optim.AdamW, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


def _demonstration(example: Example) -> Sample:
    """A supervised example as a sample whose completion is trained."""
    prompt, completion = example
    length = len(prompt) + len(completion)
    mask = [False] * len(prompt) + [True] * len(completion)
    return Sample([*prompt, *completion], mask, [0.0] * length, 1.0)
