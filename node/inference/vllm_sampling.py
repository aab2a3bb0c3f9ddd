"""How tokens are drawn inside vLLM's worker: its sampler replaced by ours, at a boundary of plain Python.

vLLM runs a step as execute_model() (the model, compiled or as a CUDA graph) and then sample_tokens().
Both are wrapped, and the sampler's sample() is replaced, all as attributes of one model runner, after
vLLM has captured its graphs. What is wrapped must be what is known here: Hooks.install() refuses a
runner that it does not know, and a step that draws without our sampler raises. Two runners are known
(vLLM 0.25 to 0.33): V1 (`GPUModelRunner`, and the CPU's) and V2 (`gpu.model_runner`, CUDA only).

Nothing here imports vLLM, so tests drive it with a runner of their own.
"""

import inspect
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .vllm_options import GREEDY_BELOW, SAMPLING, SERVED

_WANTED = ("execute_model", "sample_tokens", "execute_model_state", "sampler")
_WANTED_V1 = ("input_batch", "discard_request_mask")


class SampledStep(NamedTuple):
    """One batch, in the order of its rows of logits."""

    ids: list[str]
    """vLLM's own request ids."""
    positions: NDArray[np.int64]
    """How long each sequence is, and so the position of the token that is drawn now."""
    sampling: NDArray[np.bool_]
    """False for a part of a prompt: its row of logits is drawn from, but nobody reads the token."""
    hidden: Tensor
    """[n, width]: what feeds the head."""


class StepRecording(Protocol):
    """What Hooks tells of each step; see vllm_recorder.py."""

    def admit(
        self,
        request_id: str,
        prompt: int,
        key: int,
        seed: int,
        temperature: float,
        top_k: int = 0,
        top_p: float = 1.0,
    ) -> None:
        """A request of `prompt` tokens starts, or goes on after it was preempted. `temperature` > 0."""
        ...

    def begin(self, step: SampledStep) -> None:
        """The model has computed a batch."""
        ...

    def draw(self, logits: Tensor) -> Tensor:
        """The tokens [n] int64 of the batch with these logits [n, vocabulary]."""
        ...

    def end(self) -> None:
        """The batch is done. Raises RuntimeError if it was sampled without draw()."""
        ...


class Hooks:
    """Wraps one model runner."""

    def __init__(self, runner: Any, recording: StepRecording) -> None:
        self._runner = runner
        self._recording = recording
        self._inside = False
        self._served: set[str] = set()
        self._serves = False
        self._execute: Any = None
        self._sample_tokens: Any = None
        self._sample: Any = None

    @property
    def second(self) -> bool:
        """Whether this is the V2 runner, whose logits keep the model's type; V1's are float32."""
        return _second(self._runner)

    def install(self) -> None:
        """Replace the three methods. Raises RuntimeError for a runner that is not known."""
        if fault := _unknown(self._runner):
            raise RuntimeError(
                f"this vLLM's model runner {fault}: seeded sampling needs vLLM 0.25 to 0.33"
            )
        runner = self._runner
        self._execute, runner.execute_model = runner.execute_model, self._execute_model
        self._sample_tokens, runner.sample_tokens = runner.sample_tokens, self._wrapped_tokens
        self._sample, runner.sampler.sample = runner.sampler.sample, self._drawn

    def _execute_model(self, scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
        if self._served:
            self._served.difference_update(scheduler_output.finished_req_ids)
        for new in scheduler_output.scheduled_new_reqs:
            extra = getattr(new.sampling_params, "extra_args", None) or {}
            if SAMPLING not in extra:
                continue  # of vLLM's own dummy runs; a real one is missed by begin()
            self._recording.admit(new.req_id, len(new.prompt_token_ids), *extra[SAMPLING])
            if SERVED in extra:
                self._served.add(new.req_id)
        return self._execute(scheduler_output, *arguments, **named)

    def _wrapped_tokens(self, *arguments: Any, **named: Any) -> Any:
        state = self._runner.execute_model_state
        if state is None or state.hidden_states is None:
            return self._sample_tokens(*arguments, **named)
        with torch.inference_mode():
            step = read_step(self._runner, state)
            self._recording.begin(step)
        self._serves = bool(self._served) and not self._served.isdisjoint(step.ids)
        self._inside = True
        try:
            result = self._sample_tokens(*arguments, **named)
        finally:
            self._inside = False
        self._recording.end()
        return result

    def _drawn(self, logits: Tensor, *arguments: Any, **named: Any) -> Any:
        if not self._inside:  # one of vLLM's dummy runs
            return self._sample(logits, *arguments, **named)
        second = _second(self._runner)
        if not self._serves:
            # the latter is what logprobs are read from, which no request of the node asks for
            return self._recording.draw(logits), logits if second else None
        with torch.inference_mode():
            if second:
                named.pop("return_logprobs", None)
                logits = self._runner.sampler.apply_sampling_params(
                    logits, *arguments, **named, skip_top_k_top_p=True
                )
                return self._recording.draw(logits), logits
            metadata = arguments[0] if arguments else named["sampling_metadata"]
            logits = _scaled(logits, metadata)
            tokens = self._recording.draw(logits)
            told = metadata.max_num_logprobs is not None
            return tokens, torch.log_softmax(logits, -1) if told else None


def read_step(runner: Any, state: Any) -> SampledStep:
    """The batch that a runner has computed and not sampled yet."""
    if _second(runner):
        batch = state.input_batch
        count = batch.num_reqs
        positions = batch.num_computed_tokens_np[:count].astype(np.int64)
        positions += batch.num_scheduled_tokens[:count]
        hidden = state.hidden_states
        if batch.num_tokens == count:
            hidden = hidden[:count]  # each row is the only one of its request
        else:
            hidden = hidden.index_select(0, batch.logits_indices)
        return SampledStep(
            list(batch.req_ids[:count]),
            positions,
            positions >= batch.prefill_len_np[:count],
            hidden,
        )
    batch = runner.input_batch
    count = batch.num_reqs
    ids = list(batch.req_ids[:count])
    scheduled = state.scheduler_output.num_scheduled_tokens
    positions = np.fromiter((scheduled[one] for one in ids), np.int64, count)
    positions += batch.num_computed_tokens_cpu[:count]
    return SampledStep(
        ids, positions, ~runner.discard_request_mask.np[:count], state.sample_hidden_states
    )


def _scaled(logits: Tensor, metadata: Any) -> Tensor:
    """What vLLM's own sample() of V1 draws from, but for top_k and top_p: logits / temperature after min_p.

    Temperature 0 is left as it is: those rows take the likeliest token, or are the node's own.
    """
    scaled = logits.float()
    if metadata.temperature is not None:
        by = metadata.temperature.masked_fill(metadata.temperature < GREEDY_BELOW, 1.0)
        scaled = scaled * by.reciprocal()[:, None]
    for processor in metadata.logitsprocs.argmax_invariant:
        scaled = processor.apply(scaled)
    return scaled


def _second(runner: Any) -> bool:
    """Whether this is the V2 runner."""
    return hasattr(runner, "req_states")


def _unknown(runner: Any) -> str:
    """What this runner lacks; "" if nothing."""
    wanted = _WANTED if _second(runner) else _WANTED + _WANTED_V1
    for name in wanted:
        if not hasattr(runner, name):
            return f"has no {name}"
    sample = getattr(runner.sampler, "sample", None)
    if not callable(sample) or next(iter(inspect.signature(sample).parameters), "") != "logits":
        return "has a sampler without sample(logits, ...)"
    return ""
