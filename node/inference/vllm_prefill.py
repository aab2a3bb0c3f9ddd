"""How prompts are measured inside vLLM's worker: rows of all claimed places, between the model and its sampler.

vLLM leaves the hidden states of every token of a step between execute_model() and sample_tokens(), outside of
compiled code and CUDA graphs. Of the packed batch this takes the rows that led to claimed places:

    row = first row of the request + (place - 1) - tokens of it that were computed before

A prompt that is read in parts gives the rows of each part. A prefix whose keys and values are in vLLM's cache
is not computed again, so it gives none: the caller asks for those once more, with a salt. Both model runners
are known (see vllm_sampling.py). Nothing here imports vLLM, so tests drive it with a runner of their own.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .device import Mark, download, upload_array
from .prefill import COLUMNS, PREFILL, PROJECTED, read_claims
from .sampler import weigh
from .vllm_sampling import HiddenProjection, is_second

LOGITS = 2**27
"""Logits at a time (512 MiB of fp32, half of it in bf16)."""
TILE = 128
"""Rows that a GPU multiplies at once: a few more would cost as much as a whole tile."""

Ints = NDArray[np.int64]


class StepRows(NamedTuple):
    """One request's rows in a step."""

    id: str
    """vLLM's own request id."""
    first: int
    """Its first row."""
    before: int
    """Tokens of it that were computed before."""
    rows: int
    """How many rows it has."""


@dataclass
class ClaimedText:
    """A text on its way through the engine."""

    key: int
    temperature: float
    places: Ints
    seeds: Ints
    tokens: Ints
    drawn: NDArray[np.bool_]
    rows: NDArray[np.float32] = field(init=False)
    """[N, COLUMNS]; NaN until computed."""

    def __post_init__(self) -> None:
        self.rows = np.full((len(self.places), COLUMNS), np.nan, np.float32)


class _Part(NamedTuple):
    """The claims of one text that a step computed."""

    text: ClaimedText
    claims: Ints
    """Their indices among its own."""
    rows: Ints
    """Their rows in the step."""


class _Copy(NamedTuple):
    """Measured rows on their way to the host."""

    parts: list[_Part]
    found: Tensor
    """[rows, COLUMNS] fp32, not scaled."""
    mark: Mark

    def has(self, keys: Set[int]) -> bool:
        """Whether rows of one of these texts are among them."""
        return any(part.text.key in keys for part in self.parts)


class PromptReader:
    """Wraps one model runner: install() first, outside of any step.

    All ranks that have the head compute the same logits together; those with `collecting` keep them.
    """

    def __init__(self, runner: Any, projection: HiddenProjection, vocab_size: int) -> None:
        self._runner = runner
        self._projection = projection
        self._second = is_second(runner)
        self._at_once = max(TILE, LOGITS // vocab_size // TILE * TILE)
        self._reading: dict[str, ClaimedText] = {}
        self._read: dict[int, ClaimedText] = {}
        self._copies: list[_Copy] = []
        self._execute: Any = None
        self._sample_tokens: Any = None
        self.collecting = True

    def install(self) -> None:
        """Wrap its two methods. Raises RuntimeError for a runner that does not say where its rows are."""
        runner = self._runner
        if not self._second and not hasattr(runner, "query_start_loc"):
            raise RuntimeError("this vLLM's model runner has no query_start_loc: use 0.25 to 0.33")
        self._execute, runner.execute_model = runner.execute_model, self._execute_model
        self._sample_tokens, runner.sample_tokens = runner.sample_tokens, self._wrapped_tokens

    def collect(self, keys: Sequence[int]) -> list[list[Any]]:
        """Return [key, rows as bytes] of each text that was read, and forget it."""
        wanted = set(keys)
        steps = enumerate(self._copies, start=1)
        # no later ones: the device is still busy with those
        self._settle(max((at for at, copy in steps if copy.has(wanted)), default=0))
        for name in [name for name, one in self._reading.items() if one.key in wanted]:
            del self._reading[name]  # it was given up
        found = [self._read.pop(key) for key in keys if key in self._read]
        return [[one.key, one.rows.tobytes()] for one in found] if self.collecting else []

    def _execute_model(self, scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
        for ended in scheduler_output.finished_req_ids:
            self._reading.pop(ended, None)  # it was given up
        for new in scheduler_output.scheduled_new_reqs:
            extra = getattr(new.sampling_params, "extra_args", None) or {}
            if PREFILL in extra and new.req_id not in self._reading:
                key, temperature, claims = extra[PREFILL]
                places, seeds, tokens, drawn = read_claims(claims)
                self._reading[new.req_id] = ClaimedText(
                    key, temperature, places, seeds, tokens, drawn > 0
                )
        return self._execute(scheduler_output, *arguments, **named)

    def _wrapped_tokens(self, *arguments: Any, **named: Any) -> Any:
        state = self._runner.execute_model_state
        if self._reading and state is not None and state.hidden_states is not None:
            with torch.inference_mode():
                self._measure(state)
        return self._sample_tokens(*arguments, **named)

    # -- a step ------------------------------------------------------------------------------------

    def _measure(self, state: Any) -> None:
        parts = self._parts(state)
        if not parts:
            return
        rows = np.concatenate([part.rows for part in parts])
        hidden = state.hidden_states.index_select(0, upload_array(rows, self._runner.device))
        found = torch.zeros(len(rows), COLUMNS, device=self._runner.device)
        found[:, PROJECTED:] = self._projection(hidden)[:, 1:]
        drawn = np.concatenate([part.text.drawn[part.claims] for part in parts])
        if drawn.any():
            at = upload_array(np.flatnonzero(drawn), self._runner.device)
            found[:, :PROJECTED].index_copy_(0, at, self._weighed(hidden[at], parts, drawn).T)
        self._settle(len(self._copies))
        if self.collecting:
            host = download(found)
            self._copies.append(_Copy(parts, host, Mark(self._runner.device)))

    def _parts(self, state: Any) -> list[_Part]:
        """What of the texts this step has computed; those that are complete with it are filed as read."""
        parts: list[_Part] = []
        for step in step_rows(self._runner, state):
            text = self._reading.get(step.id)
            if text is None:
                continue
            led = text.places - 1
            mine = np.flatnonzero((led >= step.before) & (led < step.before + step.rows))
            if len(mine):
                parts.append(_Part(text, mine, step.first + led[mine] - step.before))
            if step.before + step.rows > led.max():
                self._read[text.key] = self._reading.pop(step.id)
        return parts

    def _weighed(
        self,
        led: Tensor,
        parts: Sequence[_Part],
        drawn: NDArray[np.bool_],
    ) -> Tensor:
        """Margins and logprobs [2, N] of the claims `drawn` among all of `parts`, to which `led` [N, d] led."""
        columns = np.stack(
            [
                np.concatenate([getattr(part.text, name)[part.claims] for part in parts])[drawn]
                for name in ("seeds", "places", "tokens")
            ]
        )
        seeds, places, tokens = upload_array(columns, led.device)
        warm = [np.full(len(part.claims), part.text.temperature, np.float32) for part in parts]
        temperatures = upload_array(np.concatenate(warm)[drawn], led.device)

        def logits(rows: slice) -> Tensor | None:
            found = self._runner.model.compute_logits(led[rows])
            # V1's sampler sees them as fp32; V2's keep the model's type; vLLM gathers them on one rank
            return found if found is None or self._second else found.float()

        greedy = all(part.text.temperature == 0 for part in parts)  # they are all of one run
        return weigh(logits, self._at_once, temperatures, seeds, places, tokens, greedy=greedy)

    def _settle(self, steps: int) -> None:
        """File the rows of the first `steps` that are on their way. Waits for the device."""
        for copy in self._copies[:steps]:
            copy.mark.wait()
            rows = copy.found.numpy().copy()
            rows[:, PROJECTED:] *= self._projection.scale
            start = 0
            for text, claims, _ in copy.parts:
                text.rows[claims] = rows[start : start + len(claims)]
                start += len(claims)
        del self._copies[:steps]


def step_rows(runner: Any, state: Any) -> list[StepRows]:
    """The rows of each request in a batch that a runner has computed and not sampled yet."""
    if is_second(runner):
        batch = state.input_batch
        starts, before = batch.query_start_loc_np, batch.num_computed_tokens_np
        counts = batch.num_scheduled_tokens
        return [
            StepRows(one, int(starts[row]), int(before[row]), int(counts[row]))
            for row, one in enumerate(batch.req_ids[: batch.num_reqs])
        ]
    batch = runner.input_batch
    starts, before = runner.query_start_loc.np, batch.num_computed_tokens_cpu
    scheduled = state.scheduler_output.num_scheduled_tokens
    return [
        StepRows(one, int(starts[row]), int(before[row]), int(scheduled[one]))
        for row, one in enumerate(batch.req_ids[: batch.num_reqs])
    ]
