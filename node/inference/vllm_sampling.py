"""Draw tokens inside vLLM's worker: replace its sampler by ours, in plain Python code.

vLLM runs a step as execute_model() (the model, compiled or as a CUDA graph) and then sample_tokens(). Both are
wrapped, and the sampler's sample() is replaced, all as attributes of one model runner, after vLLM has captured
its graphs. Hooks.install() refuses a runner that it does not know, and a step that draws without our sampler
raises. Two runners are known (vLLM 0.25.1 and 0.32): V1 (`GPUModelRunner`, and the CPU's) and V2
(`gpu.model_runner`, CUDA only).

With speculative decoding (V1 only) a request has one row of logits for each draft token and one more. Every row
is drawn with the noise of its own position; a draft is accepted if it is the token drawn there. So the
rejection sampler's forward() is replaced as well, and no draft is rejected at random. Requests of one group
still have to draw in step (see engine.py): none gets ahead of one that began before it. A drafter that is a
model draws a draft as the sampler draws the token, with the noise of its position: the closer its logits are,
the more drafts are right, at any temperature.

Nothing here imports vLLM, so tests use a runner of their own.
"""

import inspect
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...protocol.manifests import KV_BLOCK, RouteShape
from ...protocol.rollouts import FINGERPRINT_NUMBERS, join_support
from ..models.device import Mark, download, upload_array
from ..models.routers import off_route, off_routes, ranked
from ..models.routes import route_columns
from ..models.support import pack_support, split_support
from .fingerprint import signs
from .sampler import Narrowed, SampledTokens, draw
from .vllm_arguments import GREEDY_BELOW, INVARIANT, SAMPLING, SERVED

Ints = NDArray[np.int64]

_USE = "use vLLM 0.25.1 or 0.32"
_TILE = 128
"""Rows of a product in which no row's result depends on the others."""
_PROJECTED_AT_ONCE = 2**26
"""Numbers of hidden states projected at once, in fp32 (256 MiB)."""


class SampledStep(NamedTuple):
    """One batch in the order of its rows of logits: one per request and one more per draft."""

    ids: list[str]
    """vLLM's own request ids; a request with drafts has several consecutive rows."""
    positions: NDArray[np.int64]
    """Length of each sequence with drafts, which is the position of the token drawn now."""
    sampling: NDArray[np.bool_]
    """False for a part of a prompt: its row of logits is sampled, but the token is discarded."""
    hidden: Tensor
    """Inputs of the head, [n, width]."""
    drafts: NDArray[np.int64]
    """Number of drafts of its request that each row comes after: 0 in its first row."""
    places: NDArray[np.int64] | None = None
    """Index of each row among all tokens of the step; None if it is not needed."""

    @property
    def first(self) -> NDArray[np.bool_]:
        """Rows that come after no draft: one for each request."""
        return self.drafts == 0


@dataclass
class RequestSlots:
    """Slots of the requests not collected yet: one index into all arrays, which grow together."""

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
        """Tokens whose draw was begun."""
        self.filed = np.zeros(self.size, np.int64)
        """Tokens whose rows have arrived."""
        self.versions = np.zeros(self.size, np.int64)
        self.resumed = np.full(self.size, -1, np.int64)
        """Tokens whose keys and values a request had when it went on, until it draws again; -1: it did not."""
        self.lost = np.zeros(self.size, np.bool_)
        """Whether keys and values were lost that a change of version must keep."""
        self.supported = np.zeros(self.size, np.bool_)
        """Whether the supports of the tokens are recorded."""
        self.supports: list[dict[int, bytes]] = [{} for _ in range(self.size)]
        """Token -> its support, packed."""
        self.spans: list[list[list[int]]] = [[] for _ in range(self.size)]
        self.groups = [b""] * self.size
        self.keys = np.zeros(self.size, np.int64)
        self._free = list(range(self.size - 1, -1, -1))

    def take(self, request_id: str, key: int) -> int:
        """Take a slot with nothing drawn; call grow() first if full()."""
        slot = self._free.pop()
        self.of[request_id], self.ids[key], self.keys[slot] = slot, request_id, key
        self.drawn[slot] = self.filed[slot] = 0
        self.resumed[slot], self.lost[slot] = -1, False
        self.supported[slot], self.supports[slot] = False, {}
        self.versions[slot] = np.iinfo(np.int64).min  # none: the first token begins a span
        self.spans[slot] = []
        return slot

    def leave(self, key: int) -> None:
        """Free the slot of a request, if it has one."""
        if (request_id := self.ids.pop(key, None)) is not None:
            self._free.append(slot := self.of.pop(request_id))
            self.supports[slot] = {}

    def full(self) -> bool:
        """Return whether no slot is free."""
        return not self._free

    def grow(self) -> None:
        """Double the number of slots."""
        more = RequestSlots(self.size)
        for name, column in list(vars(self).items()):
            if isinstance(column, np.ndarray):
                setattr(self, name, np.concatenate([column, getattr(more, name)]))
        self.spans += more.spans
        self.supports += more.supports
        self.groups += more.groups
        self._free = list(range(2 * self.size - 1, self.size - 1, -1))
        self.size *= 2

    def groups_of(self, slots: Ints) -> list[list[int]]:
        """Return the indices of the requests `slots` that are in a group of several, by group, oldest first."""
        members_of: dict[bytes, list[int]] = {}
        for at in np.argsort(self.keys[slots]).tolist():
            if group := self.groups[int(slots[at])]:
                members_of.setdefault(group, []).append(at)
        return [members for members in members_of.values() if len(members) > 1]

    def stamp(self, slots: Ints, rows: Ints, version: int) -> None:
        """Begin a span for each request whose token at `rows` is its first under `version`."""
        for index in np.flatnonzero(self.versions[slots] != version).tolist():
            slot, row = int(slots[index]), int(rows[index])
            spans = self.spans[slot]
            while spans and spans[-1][0] >= row:
                spans.pop()  # of tokens that vLLM has discarded and that are drawn again now
            spans.append([row, version])
            self.versions[slot] = version

    def check_kept(self, slots: Ints) -> None:
        """Mark those that go on, and draw now, without the blocks that were whole when their version began.

        Call after stamp().
        """
        for slot in slots[self.resumed[slots] >= 0].tolist():
            spans = self.spans[slot]
            begun = int(self.prompts[slot]) + spans[-1][0] - 1
            if len(spans) > 1 and self.resumed[slot] < begun // KV_BLOCK * KV_BLOCK:
                self.lost[slot] = True
            self.resumed[slot] = -1


MOST_PENDING = 64
"""Most copies on their way to the host; vLLM itself is never more than a few steps ahead."""


class DraftLayout(NamedTuple):
    """Rows of a step with drafts, and its requests, on the device."""

    requests: Tensor
    """Number of each row's request [n]."""
    drafts: Tensor
    """SampledStep.drafts [n]."""
    first: Tensor
    """Each request's first row [requests]."""
    prompts: Tensor
    """Lengths of the prompts [requests]."""
    members: Tensor
    """Requests that draw and are in a group of several [members]."""
    places: Tensor
    """Their places in a table [groups, most], whose rows are in the order in which they began [members]."""
    table: tuple[int, int]

    def accepted(self, wrong: Tensor, positions: Tensor) -> Tensor:
        """Return how many rows of each request are accepted [requests] int64, without waiting.

        Those are the rows up to the first that is `wrong` [n], 1 where a row's own draft was not drawn, but no
        request gets ahead of one of its group that began before it; each has at least one row. `positions` [n]:
        those of the tokens.
        """
        before = wrong.cumsum(0) - wrong
        right = (before == before[self.first][self.requests]).long()
        more = torch.zeros_like(self.first).index_add_(0, self.requests, right)
        if len(self.members):
            had = (positions[self.first] - self.prompts)[self.members]
            ends = more.new_full((self.table[0] * self.table[1],), torch.iinfo(torch.int64).max)
            ends[self.places] = had + more[self.members]
            least = ends.view(self.table).cummin(1).values.view(-1)[self.places]
            more[self.members] = (least - had).clamp_min(1)
        return more


@dataclass
class StepRequests:
    """A step's requests: on the host, and as columns on the device."""

    ids: list[str]
    slots: Ints
    last: Ints
    """Positions in the latest step."""
    seeds: Tensor
    temperatures: Tensor
    positions: Tensor
    narrowed: Narrowed | None
    supported: Tensor | None
    """Which rows record supports [n] bool; None: none."""
    layout: DraftLayout | None = None
    """Layout of its rows if all of them draw, once it was needed."""


@dataclass(frozen=True)
class VerifiedStep:
    """A step whose drafts were verified on the device, until the host knows which were accepted."""

    batch: StepRequests
    step: SampledStep
    counts: Tensor
    """Accepted rows of each request, in the host's memory."""
    copies: "StepCopies | None"
    mark: Mark
    """Point after all copies."""


class StepCopies(NamedTuple):
    """Records of all rows of a step, in the host's memory once they have arrived."""

    buffer: Tensor
    """Columns [n, ...]."""
    supports: Tensor | None
    """Drawn tokens, then SampledTokens.support [n, 1 + W] int32; None if no row records supports."""


@dataclass(frozen=True)
class PendingCopy:
    """A copy on its way to the host, and the function that files it there."""

    mark: Mark
    """Point after the copy."""
    file: Callable[[], None]


class HiddenProjection:
    """Projection of hidden states on their device, as in fingerprints.

    Worker and auditor use the same operations.
    """

    def __init__(self, device: torch.device, width: int, dtype: torch.dtype) -> None:
        """`width` and `dtype` are those of a hidden state."""
        self._tiled = device.type == "cuda" and os.environ.get(INVARIANT) == "1"
        """Whether rows are multiplied in tiles of one size, as cuBLAS sums fp32 in another order for
        16 rows and fewer."""
        # one pass on a GPU: the products with +-1 are exact in any type, their sums are fp32
        self._at_once = device.type == "cuda" and dtype == torch.bfloat16 and not self._tiled
        kind = dtype if self._at_once else torch.float32
        self._signs = _padded_signs(width).to(device, kind)
        self.scale = np.float32(1 / np.sqrt(width))
        """Factor still to be applied to the numbers."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Project states [n, width] to [n, 1 + FINGERPRINT_NUMBERS] fp32; the first column is free."""
        if self._at_once:
            return torch.mm(hidden, self._signs, out_dtype=torch.float32)
        if self._tiled:
            missing = -len(hidden) % _TILE
            tiles = torch.nn.functional.pad(hidden, (0, 0, 0, missing)).split(_TILE)
            return torch.cat([tile.float() @ self._signs for tile in tiles])[: len(hidden)]
        parts = hidden.split(max(1, _PROJECTED_AT_ONCE // hidden.shape[1]))
        return torch.cat([part.float() @ self._signs for part in parts])


class RouteBuffer:
    """Device buffer of the experts that read each token of the latest step.

    vLLM's routers write it through hook(), also inside vLLM's graphs, so it has its full size before they are
    captured. Routers of a drafter come after those of the model, and are not read.
    """

    def __init__(self, *, keeps_logits: bool = False) -> None:
        """`keeps_logits`: also keep the logits of all experts, for an auditor."""
        self._keeps_logits = keeps_logits
        self._routers: list[Any] = []
        self._chosen: Tensor | None = None
        self._logits: Tensor | None = None

    @property
    def layers(self) -> int:
        """Number of routers with a hook."""
        return len(self._routers)

    def hook(self, router: Any) -> Callable[[Tensor, Tensor], None]:
        """Return a hook that takes the next router's logits [tokens, E] and choice [tokens, k]."""
        layer = self.layers
        self._routers.append(router)

        def take(logits: Tensor, chosen: Tensor) -> None:
            self._chosen = self._put(self._chosen, layer, chosen, torch.int16)
            if self._keeps_logits:
                self._logits = self._put(self._logits, layer, logits, logits.dtype)

        return take

    def _put(self, buffer: Tensor | None, layer: int, rows: Tensor, dtype: torch.dtype) -> Tensor:
        if buffer is None or buffer.shape[1] < len(rows):
            buffer = rows.new_zeros((self.layers, *rows.shape), dtype=dtype)
        buffer[layer, : len(rows)] = rows
        return buffer

    def read(self, places: Tensor, shape: RouteShape) -> Tensor:
        """Return the routes of the tokens at `places` [n] as they travel.

        The result holds their bits as fp32 numbers [n, route_columns()]. Raises RuntimeError if the routers of
        the model have another shape.
        """
        chosen = self._told(shape).index_select(1, places).transpose(0, 1).flatten(1)
        chosen = chosen.to(torch.uint8) if shape.dtype == "<u1" else chosen.contiguous()
        raw = chosen.view(torch.uint8)
        missing = 4 * route_columns(shape) - raw.shape[1]
        return torch.nn.functional.pad(raw, (0, missing)).contiguous().view(torch.float32)

    def compare(self, places: Tensor, claimed: Tensor, shape: RouteShape) -> Tensor:
        """Return off_routes() [n, 2] of routes `claimed` [n, layers, k] of tokens at `places` [n].

        Raises RuntimeError as read(), and if no logits are kept.
        """
        chosen, logits = self._told(shape), self._logits
        if logits is None or logits.shape[2] != shape.experts:
            raise RuntimeError(f"vLLM's routers do not tell their logits: {_USE}")
        off = [
            off_route(
                ranked(logits[layer, places], router),
                chosen[layer, places].long(),
                claimed[:, layer].long(),
            )
            for layer, router in enumerate(self._routers[: shape.layers])
        ]
        return off_routes(*zip(*off, strict=True), top_k=shape.top_k)

    def _told(self, shape: RouteShape) -> Tensor:
        chosen = self._chosen
        if chosen is None or len(chosen) < shape.layers or chosen.shape[2] != shape.top_k:
            raise RuntimeError(f"vLLM's routers do not report their choices: {_USE}")
        return chosen[: shape.layers]


class Recorder:
    """Rows of numbers of every drawn token: [logprob, projected hidden state, route's bits].

    The rows of a whole batch are computed and copied to the host in stream order, without waiting in a step,
    and numpy files them under their requests once the copy has arrived. No Python code runs per request in a
    step whose batch is that of the step before, unless supports are recorded. A request keeps its slot until
    the node has collected it.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        width: int,
        dtype: torch.dtype,
        fingerprint: str,
        requests: int,
        length: int,
        drafts: int = 0,
    ) -> None:
        """`width` and `dtype` are those of a hidden state.

        `requests`: most requests at once; `length`: most tokens of one; `drafts`: most draft tokens of one in a
        step.
        """
        self._device, self._requests, self._length = device, requests, length
        self._step_rows = requests * (1 + drafts)
        self._slots = RequestSlots(requests)
        self._projection = HiddenProjection(device, width, dtype) if fingerprint else None
        self._numbers = 1 if self._projection is None else 1 + FINGERPRINT_NUMBERS
        self._columns = self._numbers
        # np.empty: pages that are never written take no memory
        self._rows = np.empty((requests, length, self._columns), np.float32)
        self._buffers: list[Tensor] = []
        self._pending: deque[PendingCopy] = deque()
        self._batch: StepRequests | None = None
        self._step: SampledStep | None = None
        self._ended: tuple[SampledStep, Tensor | int] | None = None
        """The latest step and the number of tokens that each request drew in it."""
        self._verified: VerifiedStep | None = None
        self._drafting: StepRequests | None = None
        self.version = -1
        """Policy version that draws."""
        self.collecting = True
        """Whether the node collects records from this rank."""
        self._routes: tuple[RouteBuffer, RouteShape] | None = None

    @property
    def wants_places(self) -> bool:
        """Whether begin() needs SampledStep.places."""
        return self._routes is not None

    def record_routes(self, buffer: RouteBuffer, shape: RouteShape) -> None:
        """Also keep the routes that led to each token; call before the first step."""
        self._routes = buffer, shape
        self._columns = self._numbers + route_columns(shape)
        self._rows = np.empty((*self._rows.shape[:2], self._columns), np.float32)

    def warm_up(self, logits: Tensor, hidden: Tensor) -> None:
        """Run a step's computations once, so that compilation happens now."""
        with torch.inference_mode():
            numbers = torch.zeros(len(logits), dtype=torch.int64, device=self._device)
            sampled = draw(logits, numbers.float() + 1, numbers, numbers)
            self._project(hidden, sampled.logprobs)

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
        group: bytes = b"",
        supported: bool = False,
    ) -> None:
        """Add a request of `prompt` tokens that starts or goes on; `temperature` > 0.

        Requests of one `group` begin in the order of their keys. `supported`: its supports are recorded.
        """
        slots = self._slots
        if request_id in slots.of:
            return  # it was preempted; see resume()
        if slots.full():
            self._grow()
        slot = slots.take(request_id, key)
        slots.seeds[slot], slots.temperatures[slot] = seed, temperature
        slots.top_ks[slot], slots.top_ps[slot] = top_k, top_p
        slots.prompts[slot], slots.groups[slot] = prompt, group
        slots.supported[slot] = supported
        self._batch = None  # a new request may have the id of an old one

    def resume(self, request_id: str, computed: int) -> None:
        """Note that a request starts or goes on with `computed` tokens in the cache."""
        if (slot := self._slots.of.get(request_id)) is not None:
            before = self._slots.resumed[slot]
            self._slots.resumed[slot] = computed if before < 0 else min(before, computed)

    def begin(self, step: SampledStep) -> None:
        """Prepare the draw for a batch that the model has computed."""
        self.settle()
        batch = self._batch
        if batch is None or batch.ids != step.ids:
            batch = self._batch = self._new_batch(step.ids, step.positions)
        elif bool((step.positions == batch.last + 1).all()):
            batch.positions.add_(1)
        else:
            batch.positions = upload_array(step.positions, self._device)
        batch.last = step.positions
        self._step = step
        self._ended = self._drafting = None

    def draw(self, logits: Tensor) -> Tensor:
        """Draw the tokens [n] int64 of the batch from `logits` [n, vocabulary], without waiting."""
        batch, step, sampled = self._drawn(logits)
        if not step.first.all():
            raise RuntimeError(f"vLLM sampled drafts as if there were none: {_USE}")
        self._ended = step, 1
        with torch.inference_mode():
            self._keep(batch, step, sampled)
        return sampled.tokens

    def verify(self, logits: Tensor, rows: Tensor, drafts: Tensor) -> Tensor:
        """Draw for every row of `logits` [n, vocabulary], and accept the drafts that were drawn.

        Does not wait for the device, so that vLLM launches the drafter meanwhile. `rows` [drafts]: the row in
        which each of the draft tokens `drafts` should be drawn; the row after it assumes that it was. Returns
        tokens [requests, 1 + most drafts of one] int32: those of each request up to the first that differs from
        its draft, or up to the limit of its group, then -1. Only these are recorded, by end().
        """
        batch, step, sampled = self._drawn(logits)
        with torch.inference_mode():
            layout = self._layout(batch, step)
            wrong = torch.zeros_like(sampled.tokens)
            wrong[rows] = (sampled.tokens[rows] != drafts).long()
            counts = layout.accepted(wrong, batch.positions)
            accepted_tokens = torch.full(
                (len(counts), 1 + int(step.drafts.max())),
                -1,
                dtype=torch.int32,
                device=self._device,
            )
            is_accepted = layout.drafts < counts[layout.requests]
            accepted_tokens[layout.requests, layout.drafts] = sampled.tokens.where(
                is_accepted, -1
            ).int()
            self._ended = step, counts
            there, copies = download(counts), self._copied(batch, step, sampled)
            self._verified = VerifiedStep(batch, step, there, copies, Mark(self._device))
        return accepted_tokens

    def draft(self, logits: Tensor) -> Tensor:
        """Draw a draft [requests] int64 for each request from a drafter's `logits`, without waiting.

        The first call after a step drafts the tokens that come after those drawn in it, the second call the
        tokens after these, and so on.
        """
        drafting, ended = self._drafting, self._ended
        if drafting is not None:
            drafting.positions.add_(1)
        elif ended is not None:
            step, counts = ended
            first = np.flatnonzero(step.first)
            ids = [step.ids[row] for row in first.tolist()]
            drafting = self._drafting = self._new_batch(ids, step.positions[first])
            drafting.positions.add_(counts)
        if drafting is None or len(logits) != len(drafting.ids):
            raise RuntimeError(f"vLLM drafts for other requests than it computed: {_USE}")
        with torch.inference_mode():
            return draw(
                logits,
                drafting.temperatures,
                drafting.seeds,
                drafting.positions,
                drafting.narrowed,
            ).tokens

    def _layout(self, batch: StepRequests, step: SampledStep) -> DraftLayout:
        """Return the layout of a step's rows; the same for the steps of a batch in which all of them draw."""
        if batch.layout is not None and step.sampling.all():
            return batch.layout
        first = np.flatnonzero(step.first)
        drawing = first[step.sampling[first]]  # the others draw nothing yet, and limit no request
        request = np.cumsum(step.first) - 1
        groups = self._slots.groups_of(batch.slots[drawing])
        most = max(map(len, groups), default=0)
        members = [request[drawing[member]] for group in groups for member in group]
        places = [most * row + at for row, group in enumerate(groups) for at in range(len(group))]
        prompts = self._slots.prompts[batch.slots[first]]
        columns = [request, step.drafts, first, prompts, members, places]
        sizes = [len(column) for column in columns]
        parts = upload_array(np.concatenate(columns).astype(np.int64), self._device).split(sizes)
        layout = DraftLayout(*parts, table=(len(groups), most))
        batch.layout = layout if step.sampling.all() else None
        return layout

    def _drawn(self, logits: Tensor) -> tuple[StepRequests, SampledStep, SampledTokens]:
        batch, step = self._batch, self._step
        if batch is None or step is None or len(logits) != len(step.ids):
            raise RuntimeError(f"vLLM sampled other rows than it computed: {_USE}")
        self._step = None
        with torch.inference_mode():
            sampled = draw(logits, batch.temperatures, batch.seeds, batch.positions, batch.narrowed)
        return batch, step, sampled

    def end(self) -> None:
        """End the batch; waits for what verify() has accepted.

        Raises RuntimeError if it was sampled without draw() and verify().
        """
        if self._step is not None:
            raise RuntimeError(f"vLLM sampled past this node's sampler: {_USE}")
        verified, self._verified = self._verified, None
        if verified is None:
            return
        verified.mark.wait()  # vLLM has waited for its tokens, too
        step = verified.step
        accepted = step.drafts < verified.counts.numpy()[np.cumsum(step.first) - 1]
        accepted_step = step._replace(sampling=step.sampling & accepted)
        self._record(verified.batch, accepted_step, verified.copies, verified.mark)

    def _new_batch(self, ids: list[str], lengths: Ints) -> StepRequests:
        slots = self._slots
        if not slots.of.keys() >= set(ids):
            raise RuntimeError(
                "vLLM computes a request that is not this node's: restart the engine"
            )
        where = np.fromiter((slots.of[request_id] for request_id in ids), np.int64, len(ids))
        columns = np.stack([slots.seeds[where], lengths, slots.temperatures[where].view(np.int64)])
        seeds, positions, temperatures = upload_array(columns, self._device)
        return StepRequests(
            ids=ids,
            slots=where,
            last=lengths,
            seeds=seeds,
            temperatures=temperatures.view(torch.float64).float(),
            positions=positions,
            narrowed=self._narrowed(where),
            supported=self._supported(where),
        )

    def _narrowed(self, where: Ints) -> Narrowed | None:
        """Return the rows whose requests limit top_k or top_p; None if there are none."""
        top_ks, top_ps = self._slots.top_ks[where], self._slots.top_ps[where]
        rows = np.flatnonzero((top_ks > 0) | (top_ps < 1))
        if not len(rows):
            return None
        columns = np.stack([rows, top_ks[rows], top_ps[rows].view(np.int64)])
        places, ks, ps = upload_array(columns, self._device)
        return Narrowed(places, ks, ps.view(torch.float64).float())

    def _supported(self, where: Ints) -> Tensor | None:
        """Return which rows record supports; None if none does."""
        supported = self._slots.supported[where]
        return upload_array(supported, self._device) if supported.any() else None

    def _keep(self, batch: StepRequests, step: SampledStep, sampled: SampledTokens) -> None:
        """Keep the records of a step without drafts."""
        self._record(batch, step, self._copied(batch, step, sampled), Mark(self._device))

    def _copied(
        self, batch: StepRequests, step: SampledStep, sampled: SampledTokens
    ) -> StepCopies | None:
        """Begin to copy the records of a step's rows to the host; None if nothing is collected here."""
        if not self.collecting or not step.sampling.any():
            return None
        logprobs, supports = sampled.logprobs, None
        if batch.supported is not None:
            assert sampled.support is not None  # only limited rows record supports
            assert sampled.support_logprobs is not None
            logprobs = sampled.support_logprobs.where(batch.supported, logprobs)
            supports = download(torch.cat([sampled.tokens[:, None].int(), sampled.support], 1))
        columns = self._with_routes(self._project(step.hidden, logprobs), step)
        buffer = self._buffer(len(columns))
        buffer[: len(columns)].copy_(columns, non_blocking=True)
        return StepCopies(buffer, supports)

    def _record(
        self, batch: StepRequests, step: SampledStep, copies: StepCopies | None, mark: Mark
    ) -> None:
        """Note what a step has drawn; its records are filed from `copies` once `mark` is reached."""
        slots = self._slots
        chosen = slice(None) if step.sampling.all() else np.flatnonzero(step.sampling)
        where, drafts = batch.slots[chosen], step.drafts[chosen]
        rows = step.positions[chosen] - slots.prompts[where]
        if (rows - drafts > slots.drawn[where]).any() or (rows < drafts).any():
            raise RuntimeError(f"vLLM drew a token out of turn: {_USE}")
        slots.drawn[where] = rows + 1  # the last row of a request counts
        first = drafts == 0
        slots.stamp(where[first], rows[first], self.version)
        slots.check_kept(where[first])
        if copies is not None:
            count = len(step.ids)
            file = partial(self._file, copies, count, chosen, where, rows)
            self._pending.append(PendingCopy(mark, file))

    def _project(self, hidden: Tensor, logprobs: Tensor) -> Tensor:
        """Return [n, columns]: the logprob, then the projected state of each token if it is proved."""
        if self._projection is None:
            return logprobs[:, None]
        columns = self._projection(hidden)
        columns[:, 0] = logprobs
        return columns

    def _with_routes(self, columns: Tensor, step: SampledStep) -> Tensor:
        if self._routes is None:
            return columns
        if step.places is None:
            raise RuntimeError(f"vLLM does not say where the rows of a step are: {_USE}")
        buffer, shape = self._routes
        routes = buffer.read(upload_array(step.places, self._device), shape)
        return torch.cat([columns, routes], 1)

    # -- finished copies ---------------------------------------------------------------------------

    def settle(self, *, all_of_it: bool = False) -> None:
        """File the copies that have arrived; `all_of_it` waits for the others."""
        while self._pending:
            mark = self._pending[0].mark
            if not mark.is_reached:
                if not all_of_it and len(self._pending) <= MOST_PENDING:
                    return
                mark.wait()
            self._pending.popleft().file()

    def _buffer(self, rows: int) -> Tensor:
        """Return a host buffer for the rows of a step; it is used again once they are filed."""
        while self._buffers:
            if len(buffer := self._buffers.pop()) >= rows:
                return buffer
        size, pinned = (max(rows, self._step_rows), self._columns), self._device.type == "cuda"
        return torch.empty(size, dtype=torch.float32, pin_memory=pinned)

    def _file(self, copies: StepCopies, count: int, chosen: Any, where: Ints, rows: Ints) -> None:
        self._rows[where, rows] = copies.buffer[:count].numpy()[chosen]
        self._slots.filed[where] = rows + 1
        self._buffers.append(copies.buffer)
        if copies.supports is not None:
            self._file_supports(copies.supports.numpy()[chosen], where, rows)

    def _file_supports(self, supports: NDArray[np.int32], where: Ints, rows: Ints) -> None:
        """File StepCopies.supports packed: most supports are a few tokens of MAX_SUPPORT."""
        limited = np.flatnonzero(self._slots.supported[where])
        packed = pack_support(supports[limited, 1:], supports[limited, 0].tolist())
        parts = split_support(packed, len(limited))
        for slot, row, part in zip(
            where[limited].tolist(), rows[limited].tolist(), parts, strict=True
        ):
            self._slots.supports[slot][row] = part

    def _grow(self) -> None:
        self.settle(all_of_it=True)
        old, slots = self._rows, self._slots
        slots.grow()
        self._rows = np.empty((slots.size, self._length, self._columns), np.float32)
        for slot in slots.of.values():
            self._rows[slot, : slots.filed[slot]] = old[slot, : slots.filed[slot]]

    # -- collecting --------------------------------------------------------------------------------

    def versions(self, keys: Sequence[int]) -> list[list[int]]:
        """Return the policy versions that have drawn tokens for each of the requests `keys`."""
        slots = self._slots
        slots_of = [slots.of[slots.ids[key]] for key in keys if key in slots.ids]
        return [[version for _, version in slots.spans[slot]] for slot in slots_of]

    def undrawn(self, keys: Sequence[int]) -> list[int]:
        """Return those of the requests `keys` for which no token was drawn yet."""
        slots = self._slots
        slots_of = ((key, slots.of.get(slots.ids.get(key, ""))) for key in keys)
        return [key for key, slot in slots_of if slot is None or not slots.drawn[slot]]

    def collect(self, wanted: Sequence[Sequence[int]], forget: Sequence[int]) -> list[list[Any]]:
        """Return the records of the requests `wanted` [[key, tokens], ...] that have arrived.

        Each is [key, rows as bytes, [[token, version], ...], lost, supports]; `lost`: keys and values were lost
        that a change of version must keep; supports are packed, empty if they are not recorded. It is kept
        until its key is in `forget`, so that a lost answer can be asked for again. Never waits.
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
        lost = bool(self._slots.lost[slot])
        rows = self._rows[slot, :count].copy()
        if self._projection is not None:
            rows[:, 1 : self._numbers] *= self._projection.scale
        supports = self._slots.supports[slot]
        support = join_support([(supports.get(row, b""), 1) for row in range(count)])
        return [key, rows.tobytes(), spans, lost, support]


def _padded_signs(width: int) -> Tensor:
    """Return signs(width) as +-1, exact in any type, after a column of zeros for the logprob."""
    return torch.from_numpy(np.pad(np.sign(signs(width)), ((0, 0), (1, 0))))


_WANTED = ("execute_model", "sample_tokens", "execute_model_state", "sampler")
_WANTED_V1 = ("input_batch", "discard_request_mask")


class VerifiedTokens(NamedTuple):
    """Fields that vLLM reads from the output of its rejection sampler."""

    sampled_token_ids: Tensor
    """Tokens [requests, 1 + most drafts of one] int32; -1 after the last token of each."""
    logprobs_tensors: Any


class RankPlace(NamedTuple):
    """Place of a rank; ranks are numbered stage by stage (vLLM 0.25.1 and 0.32)."""

    first: bool
    """Whether the rank is in the stage that reads tokens."""
    last: bool
    """Whether the rank is in the stage that draws tokens."""
    collecting: bool
    """Whether vLLM takes its outputs from this rank, one of the last stage."""

    @classmethod
    def of(cls, rank: int, parallel: Any) -> "RankPlace":
        """Return the place of `rank`, by vLLM's parallel_config."""
        stage = int(parallel.tensor_parallel_size)
        last = stage * (int(parallel.pipeline_parallel_size) - 1)
        return cls(rank < stage, rank >= last, rank == last)


class Hooks:
    """Hooks into one model runner that draw its tokens with a Recorder."""

    def __init__(self, runner: Any, recording: Recorder) -> None:
        self._runner = runner
        self._recording = recording
        self._inside = False
        self._served: set[str] = set()
        self._serves = False
        self._execute: Any = None
        self._sample_tokens: Any = None
        self._sample: Any = None
        self._verify: Any = None
        self._draft: Any = None

    @property
    def second(self) -> bool:
        """Whether this is the V2 runner, whose logits keep the model's dtype; V1's are float32."""
        return is_second(self._runner)

    def install(self) -> None:
        """Replace the methods. Raises RuntimeError for an unknown runner."""
        if fault := _unknown(self._runner):
            raise RuntimeError(
                f"this vLLM's model runner {fault}: seeded sampling needs vLLM 0.25.1 or 0.32"
            )
        runner = self._runner
        self._execute, runner.execute_model = runner.execute_model, self._execute_model
        self._sample_tokens, runner.sample_tokens = runner.sample_tokens, self._wrapped_tokens
        self._sample, runner.sampler.sample = runner.sampler.sample, self._drawn
        if drafts_of(runner):
            judge = runner.rejection_sampler
            self._verify, judge.forward = judge.forward, self._verified
            if drafts_by_model(runner):
                self._draft = runner.drafter._sample_draft_tokens
                runner.drafter._sample_draft_tokens = self._drafted
            elif runner.device.type == "cuda":
                runner.drafter.propose = equal_drafts(runner.drafter.propose, drafts_of(runner))

    def _execute_model(self, scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
        if self._served:
            self._served.difference_update(scheduler_output.finished_req_ids)
        for new in scheduler_output.scheduled_new_reqs:
            extra = getattr(new.sampling_params, "extra_args", None) or {}
            if SAMPLING not in extra:
                continue  # a dummy run of vLLM; begin() notices a real one
            self._recording.admit(new.req_id, len(new.prompt_token_ids), *extra[SAMPLING])
            # V2's runner gets a request that goes on as a new one
            self._recording.resume(new.req_id, new.num_computed_tokens)
            if SERVED in extra:
                self._served.add(new.req_id)
        cached = scheduler_output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            for request_id, computed in zip(
                cached.req_ids, cached.num_computed_tokens, strict=True
            ):
                if request_id in cached.resumed_req_ids:
                    self._recording.resume(request_id, computed)
        return self._execute(scheduler_output, *arguments, **named)

    def _wrapped_tokens(self, *arguments: Any, **named: Any) -> Any:
        state = self._runner.execute_model_state
        if state is None or state.hidden_states is None:
            return self._sample_tokens(*arguments, **named)
        with torch.inference_mode():
            step = read_step(self._runner, state)
            if self._recording.wants_places:
                step = step._replace(places=sampled_places(self._runner, state, step))
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
        second = is_second(self._runner)
        if not self._serves:
            # vLLM reads logprobs from the second value, and the node's requests ask for none
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
            wants_logprobs = metadata.max_num_logprobs is not None
            return tokens, torch.log_softmax(logits, -1) if wants_logprobs else None

    def _verified(self, drafts: Any, probabilities: Any, logits: Tensor, metadata: Any) -> Any:
        """Replace vLLM's RejectionSampler.forward(); `drafts` is its SpecDecodeMetadata."""
        if not self._inside:  # one of vLLM's dummy runs
            return self._verify(drafts, probabilities, logits, metadata)
        rows, last = drafts.target_logits_indices, drafts.bonus_logits_indices
        if not self._serves:
            return VerifiedTokens(
                self._recording.verify(logits, rows, drafts.draft_token_ids), None
            )
        with torch.inference_mode():
            judge, sampler = self._runner.rejection_sampler, self._runner.sampler
            processed = torch.empty_like(logits, dtype=torch.float32)
            processed[rows] = judge.apply_logits_processors(logits[rows].float(), metadata, drafts)
            processed[last] = sampler.apply_logits_processors(
                logits[last].float(), metadata, predict_bonus_token=True
            )
            if metadata.temperature is not None:
                counts = upload_array(np.array(drafts.num_draft_tokens) + 1, logits.device)
                each = metadata.temperature.repeat_interleave(counts, output_size=len(logits))
                processed *= _factor(each)
            tokens = self._recording.verify(processed, rows, drafts.draft_token_ids)
            if metadata.max_num_logprobs is None:
                return VerifiedTokens(tokens, None)
            logprobs = judge._get_logprobs_tensors(
                metadata.max_num_logprobs,
                drafts,
                processed,
                processed[rows],
                processed[last],
                tokens,
            )
            return VerifiedTokens(tokens, logprobs)

    def _drafted(self, hidden: Tensor, metadata: Any) -> tuple[Tensor, None]:
        """Replace the choice of a draft of each request by a drafter that is a model.

        `hidden` [requests, width] are the drafter's own states.
        """
        if not self._inside:  # one of vLLM's dummy runs
            return self._draft(hidden, metadata)
        with torch.inference_mode():
            logits = self._runner.drafter.model.compute_logits(hidden)
            if self._serves:
                logits = _scaled(logits, metadata)
            return self._recording.draft(logits), None


def read_step(runner: Any, state: Any) -> SampledStep:
    """Return the batch that a runner has computed and not sampled yet."""
    if is_second(runner):
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
            np.zeros(count, np.int64),
        )
    batch = runner.input_batch
    count = batch.num_reqs
    ids = list(batch.req_ids[:count])
    scheduled = state.scheduler_output.num_scheduled_tokens
    positions = np.fromiter((scheduled[request_id] for request_id in ids), np.int64, count)
    positions += batch.num_computed_tokens_cpu[:count]
    sampling = ~runner.discard_request_mask.np[:count]
    drafts = np.zeros(count, np.int64)
    if drafted := drafts_of(runner) and state.scheduler_output.scheduled_spec_decode_tokens:
        last = np.fromiter(
            (len(drafted.get(request_id, ())) for request_id in ids), np.int64, count
        )
        rows = np.repeat(np.arange(count), last + 1)
        drafts = np.arange(len(rows)) - np.repeat(np.cumsum(last + 1) - last - 1, last + 1)
        ids = [ids[row] for row in rows.tolist()]
        positions, sampling = (positions - last)[rows] + drafts, sampling[rows]
    return SampledStep(ids, positions, sampling, state.sample_hidden_states, drafts)


def sampled_places(runner: Any, state: Any, step: SampledStep) -> Ints:
    """Return the index of each row of `step` among all tokens that a runner has computed."""
    if is_second(runner):
        return state.input_batch.query_start_loc_np[1 : len(step.ids) + 1].astype(np.int64) - 1
    batch, first = runner.input_batch, step.first
    scheduled = state.scheduler_output.num_scheduled_tokens
    ends = np.cumsum([scheduled[request_id] for request_id in batch.req_ids[: batch.num_reqs]])
    request = np.cumsum(first) - 1
    last = np.maximum.reduceat(step.drafts, np.flatnonzero(first))
    return ends[request] - 1 - last[request] + step.drafts


def drafts_of(runner: Any) -> int:
    """Return the most draft tokens of a request in a step of this runner."""
    return int(getattr(runner, "num_spec_tokens", 0))


def drafts_by_model(runner: Any) -> bool:
    """Return whether this runner's drafts come of a model, such as an MTP head."""
    drafter = getattr(runner, "drafter", None)
    return drafts_of(runner) > 0 and hasattr(drafter, "_sample_draft_tokens")


def equal_drafts(propose: Callable[..., list[list[int]]], count: int) -> Callable[..., Any]:
    """Wrap an n-gram proposer: every request gets `count` drafts, token 0 where it found none.

    vLLM replays a whole step as one CUDA graph only if all requests have as many rows as the most drafts give.
    The rows of wrong drafts cost less than launching each layer by itself. vLLM drops drafts that a request has
    no room for, and those of unfinished prompts.
    """

    def padded(*arguments: Any, **named: Any) -> list[list[int]]:
        return [drafts + [0] * (count - len(drafts)) for drafts in propose(*arguments, **named)]

    return padded


def _scaled(logits: Tensor, metadata: Any) -> Tensor:
    """Scale logits as vLLM's own sample() of V1 does before top_k and top_p.

    That is logits / temperature, then min_p. Temperature 0 is left as it is: those rows take the likeliest
    token, or are the node's own.
    """
    scaled = logits.float()
    if metadata.temperature is not None:
        scaled = scaled * _factor(metadata.temperature)
    for processor in metadata.logitsprocs.argmax_invariant:
        scaled = processor.apply(scaled)
    return scaled


def _factor(temperature: Tensor) -> Tensor:
    """Return the factors [n, 1] of temperatures [n]; 1 for those below GREEDY_BELOW."""
    return temperature.masked_fill(temperature < GREEDY_BELOW, 1.0).reciprocal()[:, None]


def is_second(runner: Any) -> bool:
    """Return whether this is the V2 runner."""
    return hasattr(runner, "req_states")


def _unknown(runner: Any) -> str:
    """Return what this runner lacks, or has otherwise; "" if nothing."""
    wanted = _WANTED if is_second(runner) else _WANTED + _WANTED_V1
    for name in wanted:
        if not hasattr(runner, name):
            return f"has no {name}"
    unlike = drafts_of(runner) and not hasattr(runner, "rejection_sampler")
    if unlike or getattr(runner, "num_speculative_steps", 0):  # V2's name of the draft count
        return "verifies drafts in a way of its own"
    sample = getattr(runner.sampler, "sample", None)
    if not callable(sample) or next(iter(inspect.signature(sample).parameters), "") != "logits":
        return "has a sampler without sample(logits, ...)"
    return ""
