"""What vLLM's worker keeps of every token that it draws: its logprob, its fingerprint, its version.

One row of numbers a token, [logprob, projected hidden state], for the whole batch at once: computed and
copied to the host in stream order, never waited for in a step, and filed under its request by numpy
once the copy has come. No Python runs for each request in a step whose batch is that of the step
before, and the device holds nothing of what was drawn. A request keeps its slot until the node has
collected it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .fingerprint import NUMBERS, signs
from .sampler import Narrowed, draw
from .transfers import upload_array
from .vllm_sampling import SampledStep

Ints = NDArray[np.int64]


@dataclass
class RequestSlots:
    """The requests that were not collected yet, each at its index of every array; all grow together."""

    size: int
    of: dict[str, int] = field(default_factory=dict[str, int])
    ids: dict[int, str] = field(default_factory=dict[int, str])

    def __post_init__(self) -> None:
        self.seeds = np.zeros(self.size, np.int64)
        self.temperatures = np.ones(self.size, np.float64)
        self.top_ks = np.zeros(self.size, np.int64)
        self.top_ps = np.ones(self.size, np.float64)
        self.prompts = np.zeros(self.size, np.int64)
        self.drawn = np.zeros(self.size, np.int64)
        """Tokens whose drawing was begun."""
        self.filed = np.zeros(self.size, np.int64)
        """Tokens whose rows have come."""
        self.versions = np.zeros(self.size, np.int64)
        self.spans: list[list[list[int]]] = [[] for _ in range(self.size)]
        self._free = list(range(self.size - 1, -1, -1))

    def take(self, request_id: str, key: int) -> int:
        """A slot with nothing drawn; call grow() first if full()."""
        slot = self._free.pop()
        self.of[request_id], self.ids[key] = slot, request_id
        self.drawn[slot] = self.filed[slot] = 0
        self.versions[slot] = np.iinfo(np.int64).min  # none: the first token begins a span
        self.spans[slot] = []
        return slot

    def leave(self, key: int) -> None:
        """Free the slot of a request, if it has one."""
        if (request_id := self.ids.pop(key, None)) is not None:
            self._free.append(self.of.pop(request_id))

    def full(self) -> bool:
        """Whether there is no slot to take."""
        return not self._free

    def grow(self) -> None:
        """Twice as many slots."""
        more = RequestSlots(self.size)
        for name, column in list(vars(self).items()):
            if isinstance(column, np.ndarray):
                setattr(self, name, np.concatenate([column, getattr(more, name)]))
        self.spans += more.spans
        self._free = list(range(2 * self.size - 1, self.size - 1, -1))
        self.size *= 2

    def stamp(self, slots: Ints, rows: Ints, version: int) -> None:
        """Begin a span for each request whose token at `rows` is the first of its under `version`."""
        for index in np.flatnonzero(self.versions[slots] != version).tolist():
            slot, row = int(slots[index]), int(rows[index])
            spans = self.spans[slot]
            while spans and spans[-1][0] >= row:
                spans.pop()  # of tokens that vLLM has thrown away, and that are drawn again now
            spans.append([row, version])
            self.versions[slot] = version


MOST_PENDING = 64
"""Copies on their way to the host; vLLM itself is never more than a few steps ahead."""


@dataclass
class StepRequests:
    """A step's requests: on the host, and as columns on the device."""

    ids: list[str]
    slots: Ints
    last: Ints
    """Positions of the latest step."""
    seeds: Tensor
    temperatures: Tensor
    positions: Tensor
    narrowed: Narrowed | None


@dataclass(frozen=True)
class PendingCopy:
    """A copy on its way to the host, and what to do with it there."""

    event: Any
    """torch.cuda.Event; None for what is there already."""
    file: Callable[[], None]


class Recorder:
    """Implements Recording (vllm_sampling.py); the node calls collect()."""

    def __init__(
        self,
        device: torch.device,
        *,
        width: int,
        dtype: torch.dtype,
        fingerprint: str,
        requests: int,
        length: int,
    ) -> None:
        """`width` and `dtype` of a hidden state; most `requests` at once, most tokens of one."""
        self._device, self._requests, self._length = device, requests, length
        self._slots = RequestSlots(requests)
        # in one pass on a GPU: the products with +-1 are exact in any type, their sums are fp32
        self._exact = device.type == "cuda" and dtype == torch.bfloat16
        projects, kind = bool(fingerprint), dtype if self._exact else torch.float32
        self._signs = _padded_signs(width).to(device, kind) if projects else None
        self._scale = np.float32(1 / np.sqrt(width))
        self._columns = 1 if self._signs is None else 1 + NUMBERS
        # never written before it is used: what is not used takes no memory
        self._rows = np.empty((requests, length, self._columns), np.float32)
        self._buffers: list[Tensor] = []
        self._pending: deque[PendingCopy] = deque()
        self._batch: StepRequests | None = None
        self._step: SampledStep | None = None
        self.version = -1
        """The policy version that draws."""
        self.collecting = True
        """False on the ranks that the node collects nothing from."""

    def warm_up(self, logits: Tensor, hidden: Tensor) -> None:
        """Compute once what a step computes, for two of each: what is compiled is compiled now."""
        with torch.inference_mode():
            numbers = torch.zeros(len(logits), dtype=torch.int64, device=self._device)
            drawn = draw(logits, numbers.float() + 1, numbers, numbers)
            self._project(hidden, drawn.logprobs)

    # -- a step ------------------------------------------------------------------------------------

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
        """See Recording."""
        slots = self._slots
        if request_id in slots.of:
            return  # it was preempted
        if slots.full():
            self._grow()
        slot = slots.take(request_id, key)
        slots.seeds[slot], slots.temperatures[slot] = seed, temperature
        slots.top_ks[slot], slots.top_ps[slot] = top_k, top_p
        slots.prompts[slot] = prompt
        self._batch = None  # a new request may bear an old one's id

    def begin(self, step: SampledStep) -> None:
        """See Recording."""
        self.settle()
        batch = self._batch
        if batch is None or batch.ids != step.ids:
            batch = self._batch = self._new_batch(step)
        elif bool((step.positions == batch.last + 1).all()):
            batch.positions.add_(1)
        else:
            batch.positions = upload_array(step.positions, self._device)
        batch.last = step.positions
        self._step = step

    def draw(self, logits: Tensor) -> Tensor:
        """See Recording. No synchronisation."""
        batch, step = self._batch, self._step
        if batch is None or step is None or len(logits) != len(step.ids):
            raise RuntimeError("vLLM sampled other rows than it computed: use vLLM 0.25 to 0.33")
        self._step = None
        with torch.inference_mode():
            drawn = draw(logits, batch.temperatures, batch.seeds, batch.positions, batch.narrowed)
            self._record(batch, step, drawn.logprobs)
        return drawn.tokens

    def end(self) -> None:
        """See Recording."""
        if self._step is not None:
            raise RuntimeError("vLLM sampled past this node's sampler: use vLLM 0.25 to 0.33")

    def _new_batch(self, step: SampledStep) -> StepRequests:
        slots = self._slots
        if not slots.of.keys() >= set(step.ids):
            raise RuntimeError(
                "vLLM computes a request that is not this node's: restart the engine"
            )
        where = np.fromiter((slots.of[one] for one in step.ids), np.int64, len(step.ids))
        columns = np.stack(
            [slots.seeds[where], step.positions, slots.temperatures[where].view(np.int64)]
        )
        seeds, positions, temperatures = upload_array(columns, self._device)
        return StepRequests(
            ids=step.ids,
            slots=where,
            last=step.positions,
            seeds=seeds,
            temperatures=temperatures.view(torch.float64).float(),
            positions=positions,
            narrowed=self._narrowed(where),
        )

    def _narrowed(self, where: Ints) -> Narrowed | None:
        """The rows whose requests may not draw any token; no lease has such."""
        top_ks, top_ps = self._slots.top_ks[where], self._slots.top_ps[where]
        rows = np.flatnonzero((top_ks > 0) | (top_ps < 1))
        if not len(rows):
            return None
        columns = np.stack([rows, top_ks[rows], top_ps[rows].view(np.int64)])
        places, ks, ps = upload_array(columns, self._device)
        return Narrowed(places, ks, ps.view(torch.float64).float())

    def _record(self, batch: StepRequests, step: SampledStep, logprobs: Tensor) -> None:
        slots = self._slots
        chosen = slice(None) if step.sampling.all() else np.flatnonzero(step.sampling)
        where = batch.slots[chosen]
        rows = step.positions[chosen] - slots.prompts[where]
        if (rows > slots.drawn[where]).any() or (rows < 0).any():
            raise RuntimeError("vLLM drew a token out of turn: use vLLM 0.25 to 0.33")
        slots.drawn[where] = rows + 1
        slots.stamp(where, rows, self.version)
        if not self.collecting or not len(where):
            return
        columns = self._project(step.hidden, logprobs)
        buffer = self._buffer(len(columns))
        buffer[: len(columns)].copy_(columns, non_blocking=True)
        self._later(lambda: self._file(buffer, len(columns), chosen, where, rows))

    def _project(self, hidden: Tensor, logprobs: Tensor) -> Tensor:
        """[n, columns]: the logprob, then what the fingerprint keeps of each token."""
        if self._signs is None:
            return logprobs[:, None]
        if self._exact:
            columns = torch.mm(hidden, self._signs, out_dtype=torch.float32)
        else:
            columns = hidden.float() @ self._signs
        columns[:, 0] = logprobs
        return columns

    # -- what has come -----------------------------------------------------------------------------

    def settle(self, *, all_of_it: bool = False) -> None:
        """File the copies that have come; `all_of_it` waits for the others."""
        while self._pending:
            event = self._pending[0].event
            if event is not None and not event.query():
                if not all_of_it and len(self._pending) <= MOST_PENDING:
                    return
                event.synchronize()
            self._pending.popleft().file()

    def _later(self, file: Callable[[], None]) -> None:
        """Call `file` once everything enqueued until now is done."""
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        self._pending.append(PendingCopy(event, file))

    def _buffer(self, rows: int) -> Tensor:
        """Where the device puts the rows of a step; used again once they are filed."""
        while self._buffers:
            if len(buffer := self._buffers.pop()) >= rows:
                return buffer
        size, pinned = (max(rows, self._requests), self._columns), self._device.type == "cuda"
        return torch.empty(size, dtype=torch.float32, pin_memory=pinned)

    def _file(self, buffer: Tensor, count: int, chosen: Any, where: Ints, rows: Ints) -> None:
        self._rows[where, rows] = buffer[:count].numpy()[chosen]
        self._slots.filed[where] = rows + 1
        self._buffers.append(buffer)

    def _grow(self) -> None:
        self.settle(all_of_it=True)
        old, slots = self._rows, self._slots
        slots.grow()
        self._rows = np.empty((slots.size, self._length, self._columns), np.float32)
        for slot in slots.of.values():
            self._rows[slot, : slots.filed[slot]] = old[slot, : slots.filed[slot]]

    # -- collecting --------------------------------------------------------------------------------

    def versions(self, keys: Sequence[int]) -> list[list[int]]:
        """The policy versions that have drawn tokens for each of the requests `keys`, in turn."""
        slots = self._slots
        found = [slots.of[slots.ids[key]] for key in keys if key in slots.ids]
        return [[version for _, version in slots.spans[slot]] for slot in found]

    def collect(self, wanted: Sequence[Sequence[int]], forget: Sequence[int]) -> list[list[Any]]:
        """What was drawn for the requests of `wanted` [[key, tokens], ...], as far as it has come.

        Each is [key, rows as bytes, [[token, version], ...]]; it is kept until it is in `forget`, so that an
        answer that was lost can be asked for again. Never waits.
        """
        slots = self._slots
        for key in forget:
            slots.leave(key)
        self.settle()
        known = [
            (key, slots.of[slots.ids[key]], count) for key, count in wanted if key in slots.ids
        ]
        return [
            self._collected(key, slot, count)
            for key, slot, count in known
            if slots.filed[slot] >= count
        ]

    def _collected(self, key: int, slot: int, count: int) -> list[Any]:
        spans = [span for span in self._slots.spans[slot] if span[0] < count]
        rows = self._rows[slot, :count].copy()
        rows[:, 1:] *= self._scale
        return [key, rows.tobytes(), spans]


def _padded_signs(width: int) -> Tensor:
    """signs(width) as +-1, exact in any type, behind a column of zeros that the logprob replaces."""
    return torch.from_numpy(np.pad(np.sign(signs(width)), ((0, 0), (1, 0))))
