"""Measure prompts inside vLLM's worker, between the model and its sampler.

vLLM leaves the hidden states of every token of a step between execute_model() and sample_tokens(), outside of
compiled code and CUDA graphs. PromptReader takes from this packed batch the rows that led to claimed places:

    row = first row of the request + (place - 1) - tokens of it that were computed before

A prompt that is read in parts gives the rows of each part. A prefix whose keys and values are in vLLM's cache
is not computed again, so it gives none: the caller asks for those once more, with a salt. Both model runners
are supported (see vllm_sampling.py). Nothing here imports vLLM, so tests use a runner of their own.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...protocol.manifests import RouteShape
from ..models.device import Mark, download, upload_array
from ..models.routes import unpack_routes
from .prefill import COLUMNS, PREFILL, PROJECTED, ROUTING, Claims, join_claims, read_claims
from .sampler import Limits, weigh
from .vllm_sampling import HiddenProjection, RouteBuffer, is_second

LOGITS = 2**27
"""Logits computed at once (512 MiB of fp32, half of it in bf16)."""
TILE = 128
"""Rows that a GPU multiplies at once: a few more would cost as much as a whole tile."""

Ints = NDArray[np.int64]


class StepRows(NamedTuple):
    """Rows of one request in a step."""

    id: str
    """vLLM's own request id."""
    first: int
    """Its first row."""
    before: int
    """Tokens of the request that were computed before."""
    rows: int
    """Number of its rows."""


@dataclass
class ClaimedText:
    """A text in progress in the engine, with its measurements."""

    key: int
    temperature: float
    top_k: int
    top_p: float
    claims: Claims
    """Claims [N]."""
    rows: NDArray[np.float32] = field(init=False)
    """Measurements [N, COLUMNS]; NaN until computed."""

    def __post_init__(self) -> None:
        self.rows = np.full((len(self.claims), COLUMNS), np.nan, np.float32)


class _Part(NamedTuple):
    """The claims of one text that a step computed."""

    text: ClaimedText
    claims: Ints
    """Indices of these claims among the text's claims."""
    rows: Ints
    """Their rows in the step."""


class _Copy(NamedTuple):
    """Measured rows on their way to the host."""

    parts: list[_Part]
    found: Tensor
    """Rows [rows, COLUMNS] fp32, not scaled yet."""
    mark: Mark

    def has(self, keys: Set[int]) -> bool:
        """Return whether rows of one of these texts are included."""
        return any(part.text.key in keys for part in self.parts)


class PromptReader:
    """Wrapper of one model runner that measures prompts; call install() first, between steps.

    All ranks that have the head compute the same logits together; those with `collecting` keep the results.
    """

    def __init__(
        self,
        runner: Any,
        projection: HiddenProjection,
        vocab_size: int,
        routes: tuple[RouteBuffer, RouteShape] | None = None,
    ) -> None:
        """`routes`: buffer of the routers' choices, and the shape of the claimed routes."""
        self._runner = runner
        self._routes = routes
        self._route_bytes = 0 if routes is None else routes[1].token_bytes
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
        """Wrap two methods of the runner. Raises RuntimeError for one without row offsets."""
        runner = self._runner
        if not self._second and not hasattr(runner, "query_start_loc"):
            raise RuntimeError(
                "this vLLM's model runner has no query_start_loc: use 0.25.1 or 0.32"
            )
        self._execute, runner.execute_model = runner.execute_model, self._execute_model
        self._sample_tokens, runner.sample_tokens = runner.sample_tokens, self._wrapped_tokens

    def collect(self, keys: Sequence[int]) -> list[list[Any]]:
        """Return [key, rows as bytes] of each text that was read, and forget it."""
        wanted = set(keys)
        steps = enumerate(self._copies, start=1)
        # later steps are left out: the device is still busy with them
        self._settle(max((at for at, copy in steps if copy.has(wanted)), default=0))
        for name in [name for name, reading in self._reading.items() if reading.key in wanted]:
            del self._reading[name]  # it was abandoned
        texts = [self._read.pop(key) for key in keys if key in self._read]
        return [[text.key, text.rows.tobytes()] for text in texts] if self.collecting else []

    def _execute_model(self, scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
        for ended in scheduler_output.finished_req_ids:
            self._reading.pop(ended, None)  # it was abandoned
        for new in scheduler_output.scheduled_new_reqs:
            extra = getattr(new.sampling_params, "extra_args", None) or {}
            if PREFILL in extra and new.req_id not in self._reading:
                key, temperature, top_k, top_p, claims, width = extra[PREFILL]
                read = read_claims(claims, self._route_bytes, width)
                self._reading[new.req_id] = ClaimedText(key, temperature, top_k, top_p, read)
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
        measures = torch.zeros(len(rows), COLUMNS, device=self._runner.device)
        measures[:, PROJECTED:] = self._projection(hidden)[:, 1:]
        claims = join_claims([part.text.claims[part.claims] for part in parts])
        sampled = np.flatnonzero(claims["drawn"])
        if len(sampled):
            at = upload_array(sampled, self._runner.device)
            counts = [len(part.claims) for part in parts]
            texts = [part.text for part in parts]
            warm = np.repeat(np.array([text.temperature for text in texts], np.float32), counts)
            limits = Limits(
                np.repeat(np.array([text.top_k for text in texts], np.int64), counts)[sampled],
                np.repeat(np.array([text.top_p for text in texts], np.float32), counts)[sampled],
            )
            weighed = self._weighed(hidden[at], claims[sampled], warm[sampled], limits)
            measures[:, :ROUTING].index_copy_(0, at, weighed.T)
        routed = np.flatnonzero(claims["routed"])
        if len(routed) and self.collecting:
            at = upload_array(routed, self._runner.device)
            compared = self._compared(rows[routed], claims[routed])
            measures[:, ROUTING:PROJECTED].index_copy_(0, at, compared)
        self._settle(len(self._copies))
        if self.collecting:
            host = download(measures)
            self._copies.append(_Copy(parts, host, Mark(self._runner.device)))

    def _parts(self, state: Any) -> list[_Part]:
        """Find the claims that this step has computed; texts that are complete are filed as read."""
        parts: list[_Part] = []
        for step in step_rows(self._runner, state):
            text = self._reading.get(step.id)
            if text is None:
                continue
            led = text.claims["places"] - 1
            mine = np.flatnonzero((led >= step.before) & (led < step.before + step.rows))
            if len(mine):
                parts.append(_Part(text, mine, step.first + led[mine] - step.before))
            if step.before + step.rows > led.max():
                self._read[text.key] = self._reading.pop(step.id)
        return parts

    def _weighed(
        self, led: Tensor, claims: Claims, temperatures: NDArray[np.float32], limits: Limits
    ) -> Tensor:
        """Return margins and logprobs [2, N] of `claims` [N], to which the states `led` [N, d] led."""
        columns = np.stack([claims[name] for name in ("seeds", "places", "tokens")])
        seeds, places, tokens = upload_array(columns, led.device)
        heat = upload_array(temperatures, led.device)
        support = np.ascontiguousarray(claims["support"])

        def logits(rows: slice) -> Tensor | None:
            values = self._runner.model.compute_logits(led[rows])
            # V1's sampler gets fp32, V2's the model's dtype; vLLM gathers the logits on one rank
            return values if values is None or self._second else values.float()

        greedy = not temperatures.any()  # all texts are of one run
        return weigh(
            logits,
            self._at_once,
            heat,
            seeds,
            places,
            tokens,
            greedy=greedy,
            limits=limits,
            support=upload_array(support, led.device) if support.shape[1] else None,
        )

    def _compared(self, rows: Ints, claims: Claims) -> Tensor:
        """Return off_routes() [N, 2] of the routes of `claims` [N]; `rows` are their step rows."""
        if self._routes is None:
            raise RuntimeError("a route is claimed where none are measured")
        buffer, shape = self._routes
        claimed = unpack_routes(claims["routes"].tobytes(), shape)
        at, routes = (upload_array(array, self._runner.device) for array in (rows, claimed))
        return buffer.compare(at, routes, shape)

    def _settle(self, steps: int) -> None:
        """File the rows of the first `steps` pending copies. Waits for the device."""
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
    """Return the rows of each request in a batch that is computed and not sampled yet."""
    if is_second(runner):
        batch = state.input_batch
        starts, before = batch.query_start_loc_np, batch.num_computed_tokens_np
        counts = batch.num_scheduled_tokens
        return [
            StepRows(request_id, int(starts[row]), int(before[row]), int(counts[row]))
            for row, request_id in enumerate(batch.req_ids[: batch.num_reqs])
        ]
    batch = runner.input_batch
    starts, before = runner.query_start_loc.np, batch.num_computed_tokens_cpu
    scheduled = state.scheduler_output.num_scheduled_tokens
    return [
        StepRows(request_id, int(starts[row]), int(before[row]), int(scheduled[request_id]))
        for row, request_id in enumerate(batch.req_ids[: batch.num_reqs])
    ]
