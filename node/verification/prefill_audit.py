"""Prefill claimed branches; compare tokens, logprobs and proofs under each policy version.

Invariants:
- one forward pass per version; a GPU has its next batch before the last one is summarized;
- items come from strangers: each is checked by itself, and none can spoil the measurements of others;
- a number that is not finite counts as infinitely far off.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor

from ...protocol.pipelines import Encoding
from ..errors import EngineError
from ..inference.boundary_states import project
from ..inference.fingerprint import COLUMNS, signs
from ..inference.model import LanguageModel, pick_device
from ..inference.sampler import Limits, weigh
from ..models import huggingface
from ..models.device import Mark, download, upload
from ..models.model_files import layer_count, read_base
from ..models.routers import off_route, off_routes
from ..models.routes import unpack_routes
from ..models.support import NO_SUPPORT, unpack_supports
from ..pipeline.activations import rounded
from ..weights.adapters import merge
from ..weights.state import State
from ..weights.state_history import state_bytes
from .auditor import AuditItem, AuditTerms, Measured, SameState, Unreadable, check_versions
from .measures import check_items, compare_replies, distances, routing, split_proof, summarize

Integers = NDArray[np.int64]

BATCH_TOKENS = {"cpu": 2**11, "cuda": 2**14}
"""Tokens of a forward pass: as many as a cache holds, or keep a GPU busy."""
AHEAD = 1
"""Batches queued on a device before the previous one is summarized."""
LOGITS = 2**26
"""Logits at a time, counted as fp32 (256 MiB): a GPU reads the head's weights for many rows."""
TILE = 128
"""Rows that a GPU multiplies at once: a few more would cost as much as a whole tile."""
KEEP_BYTES = 2**30
"""Most bytes of the states of cached networks; one network always stays for the next audit."""
BOUNDARY_NUMBERS = 2**24
"""Numbers of boundary states compared at a time; several fp32 copies of them are made."""


@dataclass
class _Branch:
    """One item; `at` is the slice of its sampled tokens among those of all items."""

    number: int
    """Index among the sound items."""
    item: AuditItem
    token_ids: Integers
    at: slice
    waits: int
    """Number of versions whose pass is not done yet."""
    projected: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """version -> projected states [S, 7], on the CPU."""
    crossed: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """version -> projected states and lengths at its boundaries [S, boundaries, 8]."""
    routed: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """version -> comparison of its routes [S, 2]; see RouteChecker."""


@dataclass(frozen=True)
class _Tokens:
    """Sampled tokens of all branches, one after the other."""

    places: Integers
    """Positions in their branches."""
    tokens: Integers
    seeds: Integers
    versions: Integers
    temperatures: NDArray[np.float32]
    limits: Limits
    margins: NDArray[np.float64]
    logprobs: NDArray[np.float64]
    """Recomputed, like the margins; both are infinite until then."""


@dataclass(frozen=True)
class _Flight:
    """A batch that a device works on; its tensors may not be read before `mark`."""

    version: int
    branches: Sequence[_Branch]
    counts: Sequence[int]
    led: Tensor
    """Projected states [S, 7] of the sampled tokens of all `branches`."""
    crossed: Tensor
    """Projected states and lengths at their boundaries [S, boundaries, 8]."""
    routed: Tensor
    """Comparison of their routes [S, 2]."""
    indices: Integers
    """Indices, among all tokens, of those that claim this version [N]."""
    numbers: Tensor
    """Margins and logprobs of the tokens of `indices` [2, N] fp32."""
    mark: Mark


@dataclass(frozen=True)
class Kept:
    """A network that is kept for the next audit, and the bytes of its state."""

    network: LanguageModel
    state: SameState
    size: int


class PrefillAudit:
    """Measurement of items by prefill, with a cache of the networks used last; for one thread."""

    def __init__(
        self,
        terms: AuditTerms,
        *,
        batch_tokens: int = 0,
        logits: int = LOGITS,
        keep_bytes: int = KEEP_BYTES,
    ) -> None:
        """Take the terms; `batch_tokens` of a forward pass, 0 for the default of the device."""
        self._terms = terms
        self._model_dir = Path(terms.model_dir)
        self._batch_tokens = batch_tokens
        self._logits = logits
        self._keep_bytes = keep_bytes
        self._kept: dict[int, Kept] = {}  # the most recently used one is last
        self._base: State | None = None

    def prepare(self, *, threads: int = 0) -> None:
        """Check that audits are possible; `threads` of torch, 0 leaves its choice.

        Raises EngineError if the architecture, or a base, cannot be read, or the device is missing.
        """
        if threads:
            torch.set_num_threads(threads)
        huggingface.import_model(self._model_dir)
        if self._terms.adapters is not None:
            self._base = read_base(self._model_dir, self._terms.base_state)
        device = self._terms.device
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise EngineError(f"there is no {device}: set engine.device to auto or cpu")

    def measure(
        self,
        items: Sequence[AuditItem],
        states: Mapping[int, State],
    ) -> list[Measured | Unreadable]:
        """See Auditor.audit(). Memory grows with the items.

        Raises EngineError for a state that is missing or does not fit the model, RuntimeError for errors of
        torch.
        """
        faults = self._faults(items, states)
        sound = [item for item, fault in zip(items, faults, strict=True) if fault is None]
        branches, tokens = _flatten(sound)
        done: dict[int, Measured] = {}
        running: deque[_Flight] = deque()
        with torch.inference_mode():
            for flight in self._flights(branches, tokens, states):
                running.append(flight)
                if len(running) > AHEAD:
                    done |= self._land(running.popleft(), tokens)
            while running:
                done |= self._land(running.popleft(), tokens)
        measured = (done[branch.number] for branch in branches)
        return [fault or next(measured) for fault in faults]

    def _faults(
        self, items: Sequence[AuditItem], states: Mapping[int, State]
    ) -> list[Unreadable | None]:
        """Explain why items cannot be measured; None for each that can. Raises EngineError."""
        check_versions(items, states)
        vocabulary = huggingface.vocab_size(self._model_dir)
        layers = layer_count(self._model_dir)
        return check_items(items, vocabulary, layers, self._terms.routes)

    @staticmethod
    def free_spare_memory() -> None:
        """Release torch's cached GPU memory, for a trainer on the same GPU."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # -- prefill -----------------------------------------------------------------------------------

    def _flights(
        self,
        branches: Sequence[_Branch],
        tokens: _Tokens,
        states: Mapping[int, State],
    ) -> Iterator[_Flight]:
        items = [branch.item for branch in branches]
        wanting: dict[int, list[int]] = defaultdict(list)
        for number, item in enumerate(items):
            for version in item.wanted:
                wanting[version].append(number)
        # cached networks first: building another one may evict one of them
        for version in sorted(wanting, key=lambda wanted: (wanted not in self._kept, wanted)):
            network = self._network(version, states[version])
            limit = self._batch_tokens or BATCH_TOKENS.get(network.device.type, BATCH_TOKENS["cpu"])
            for batch in batches(wanting[version], items, limit):
                chosen = [branches[number] for number in batch]
                yield self._launch(network, version, chosen, tokens)

    def _launch(
        self, network: LanguageModel, version: int, batch: Sequence[_Branch], tokens: _Tokens
    ) -> _Flight:
        """Start measuring `batch` under `version` on the device, without waiting for it."""
        lengths = [len(branch.item.token_ids) for branch in batch]
        counts = [branch.at.stop - branch.at.start for branch in batch]
        chosen = np.concatenate([np.arange(branch.at.start, branch.at.stop) for branch in batch])
        own = np.flatnonzero(tokens.versions[chosen] == version)
        indices = chosen[own]
        pieces = [branch.token_ids for branch in batch]
        leading = leading_rows(lengths, counts, tokens.places[chosen])
        pieces += [leading, own]
        pieces += [tokens.seeds[indices], tokens.places[indices], tokens.tokens[indices]]
        there = upload(torch.from_numpy(np.concatenate(pieces)), network.device)
        warm = upload(torch.from_numpy(tokens.temperatures[indices]), network.device)
        greedy = not tokens.temperatures.any()  # all environments of a run are greedy, or none
        limits = Limits(tokens.limits.top_k[indices], tokens.limits.top_p[indices])
        # unpacked for a batch alone: a text with one wide support makes all rows as wide
        parts = [(branch.item.support, tokens.tokens[branch.at]) for branch in batch]
        stated = unpack_supports(parts, NO_SUPPORT)
        support = None
        if stated is not None:
            support = upload(torch.from_numpy(stated[own]), network.device)
        sizes = [sum(lengths), len(chosen), *[len(own)] * 4]
        ids, led, rows, *claims = there.split(sizes)
        checker = BoundaryChecker(boundary_key(batch[0].item), leading, led)
        routes = self._route_checker(batch, leading, led)
        hidden = network.packed(ids, lengths, checker if checker.layers else None, routes)[led]
        return _Flight(
            version=version,
            branches=batch,
            counts=counts,
            led=download(self._projected(hidden)),
            crossed=download(checker.led()),
            routed=download(routes.led() if routes else torch.zeros(len(chosen), 2)),
            indices=indices,
            numbers=download(
                self._draw(
                    network,
                    hidden[rows],
                    warm,
                    *claims,
                    limits=limits,
                    support=support,
                    greedy=greedy,
                )
            ),
            mark=Mark(network.device),
        )

    def _route_checker(
        self, batch: Sequence[_Branch], leading: Integers, led: Tensor
    ) -> "RouteChecker | None":
        """Make the hooks that compare the routes of `batch`; None if it has no routes.

        `led` is `leading` on the network's device.
        """
        shape = self._terms.routes
        if shape is None or not any(branch.item.routes for branch in batch):
            return None
        claimed = np.full((len(leading), shape.layers, shape.top_k), -1, np.int16)
        start = 0
        for branch in batch:
            end = start + branch.at.stop - branch.at.start
            if branch.item.routes:
                claimed[start:end] = unpack_routes(branch.item.routes, shape)
            start = end
        return RouteChecker(upload(torch.from_numpy(claimed), led.device), leading, led)

    def _projected(self, hidden: Tensor) -> Tensor:
        """Project states [S, d] to [S, 7], which the fingerprint compares."""
        width = hidden.shape[1]
        matrix = upload(torch.from_numpy(signs(width)), hidden.device)
        parts = hidden.split(max(1, self._logits // width))
        return torch.cat([part.float() @ matrix for part in parts])

    def _draw(
        self,
        network: LanguageModel,
        hidden: Tensor,
        temperatures: Tensor,
        seeds: Tensor,
        places: Tensor,
        claimed: Tensor,
        *,
        limits: Limits,
        support: Tensor | None,
        greedy: bool,
    ) -> Tensor:
        """Compute margins and logprobs [2, N] fp32 of the tokens `claimed` [N].

        `hidden` [N, d] are the states before them; `temperatures` [N] fp32 are all 0 if `greedy`.
        """
        step = self._rows(network, hidden)
        return weigh(
            lambda rows: network.logits(hidden[rows]),
            step,
            temperatures,
            seeds,
            places,
            claimed,
            greedy=greedy,
            limits=limits,
            support=support,
        )

    def _rows(self, network: LanguageModel, hidden: Tensor) -> int:
        """Return the rows of logits to compute at a time, in the type of `hidden`."""
        most = self._logits * 4 // (hidden.element_size() * network.vocab_size)
        return max(1, most if most < TILE else most - most % TILE)

    def _network(self, version: int, state: State) -> LanguageModel:
        cached = self._kept.pop(version, None)
        if cached is None or not cached.state.matches(state):
            cached = self._build(state)
        self._kept[version] = cached
        return cached.network

    def _build(self, state: State) -> Kept:
        whole = self._merged(state)
        size = state_bytes(whole)
        if (spare := self._refilled(whole, full=self._is_full(size))) is not None:
            return Kept(spare, SameState(state), size)
        # evicts before the new one is built: memory is short beside a trainer
        while self._kept and self._is_full(size):
            del self._kept[next(iter(self._kept))]
        terms = self._terms
        network = LanguageModel.build(
            self._model_dir,
            whole,
            dtype=terms.dtype,
            device=terms.device,
            quantization=terms.quantization,
        )
        return Kept(network, SameState(state), size)

    def _is_full(self, size: int) -> bool:
        """Return whether a network of `size` bytes has no room beside those that are kept."""
        return size + sum(kept.size for kept in self._kept.values()) > self._keep_bytes

    def _refilled(self, state: State, *, full: bool) -> LanguageModel | None:
        """Write `state` into a kept network whose state is gone, or if `full` into the one used longest ago.

        Returns None if there is none. To build a network takes longer than to audit with it.
        """
        device = pick_device(self._terms.device)
        for version, kept in self._kept.items():
            if (full or kept.state.gone) and kept.network.device.type == device.type:
                del self._kept[version]
                return kept.network if kept.network.update(state, dict.fromkeys(state)) else None
        return None

    def _merged(self, state: State) -> State:
        """Return the weights to compute with: `state`, or the base with these adapters."""
        adapters = self._terms.adapters
        if adapters is None:
            return state
        if self._base is None:
            raise EngineError("the base model was not read: call prepare() first")
        return merge(self._base, state, adapters, threads=torch.get_num_threads())

    # -- measurements ----------------------------------------------------------------------------

    def _land(self, flight: _Flight, tokens: _Tokens) -> dict[int, Measured]:
        """Wait for `flight`; return the measures of the branches that it completes, by number."""
        flight.mark.wait()
        margins, logprobs = flight.numbers.numpy()
        tokens.margins[flight.indices] = margins
        tokens.logprobs[flight.indices] = logprobs
        done: list[_Branch] = []
        numbers = (flight.led, flight.crossed, flight.routed)
        parts = (column.split(flight.counts) for column in numbers)
        for branch, part, crossed, routed in zip(flight.branches, *parts, strict=True):
            branch.projected[flight.version] = part
            branch.crossed[flight.version] = crossed
            branch.routed[flight.version] = routed
            branch.waits -= 1
            if not branch.waits:
                done.append(branch)
        return self._summarize(done, tokens)

    def _summarize(self, branches: Sequence[_Branch], tokens: _Tokens) -> dict[int, Measured]:
        versions = [tokens.versions[branch.at] for branch in branches]
        compared = compare_replies(
            [split_proof(branch.item) for branch in branches],
            [
                _own_states(branch.projected, claimed).float().numpy()
                for branch, claimed in zip(branches, versions, strict=True)
            ],
            [
                [branch.projected[other].float().numpy() for other in branch.item.others]
                for branch in branches
            ],
        )
        measured = summarize(
            [tokens.margins[branch.at] for branch in branches],
            [branch.item.logprobs for branch in branches],
            [tokens.logprobs[branch.at] for branch in branches],
            compared,
        )
        done: dict[int, Measured] = {}
        for branch, claimed, each in zip(branches, versions, measured, strict=True):
            crossed = _own_states(branch.crossed, claimed).numpy()
            share, margin = routing(_own_states(branch.routed, claimed).numpy())
            done[branch.number] = structs.replace(
                each,
                routing=share,
                routing_max=margin,
                boundaries=distances(branch.item, crossed),
            )
            branch.projected.clear()
            branch.crossed.clear()
            branch.routed.clear()
        return done


def _flatten(items: Sequence[AuditItem]) -> tuple[list[_Branch], _Tokens]:
    branches: list[_Branch] = []
    tokens: list[Integers] = [np.empty(0, np.int64)]  # there may be no item
    versions = [np.empty(0, np.int64)]
    sampled = SampledPositions.of(items)
    start = 0
    for number, (item, count) in enumerate(zip(items, sampled.counts, strict=True)):
        ids = np.array(item.token_ids, np.int64)
        at = slice(start, start := start + count)
        tokens.append(np.array(item.drawn, np.int64) if item.drawn else ids[sampled.places[at]])
        versions.append(np.array(item.versions, np.int64))
        branches.append(_Branch(number, item, ids, at, waits=len(item.wanted)))
    return branches, _Tokens(
        sampled.places,
        np.concatenate(tokens),
        sampled.seeds,
        np.concatenate(versions),
        temperatures=sampled.temperatures,
        limits=sampled.limits,
        margins=np.full(start, np.inf),
        logprobs=np.full(start, np.inf),
    )


def _own_states(rows: Mapping[int, Tensor], versions: Integers) -> Tensor:
    """Select each token's row under the version that it claims, `versions` [S]; returns [S, ...]."""
    first, *later = sorted(set(versions.tolist()))
    own = rows[first]
    for version in later:
        claims = torch.from_numpy(versions == version)
        own = torch.where(claims.view(-1, *[1] * (own.ndim - 1)), rows[version], own)
    return own


def batches(numbers: Sequence[int], items: Sequence[AuditItem], limit: int) -> list[list[int]]:
    """Group the `numbers` of some `items`: of similar length and equal boundaries, longest first.

    A batch has up to `limit` tokens, or a single longer item.
    """
    grouped: list[list[int]] = []
    room, key = 0, None
    for number in sorted(
        numbers, key=lambda number: (boundary_key(items[number]), -len(items[number].token_ids))
    ):
        length = len(items[number].token_ids)
        if length > room or boundary_key(items[number]) != key:
            grouped.append([])
            room, key = max(limit, length), boundary_key(items[number])
        grouped[-1].append(number)
        room -= length
    return grouped


@dataclass(frozen=True)
class SampledPositions:
    """The sampled positions of some items, one after the other [S]."""

    counts: list[int]
    """Number of each item's."""
    places: Integers
    """Positions in their items."""
    seeds: Integers
    temperatures: NDArray[np.float32]
    limits: Limits

    @classmethod
    def of(cls, items: Sequence[AuditItem]) -> Self:
        """List the positions of `items`."""
        replies = [reply for item in items for reply in item.replies]
        lengths = [reply.end - reply.start for reply in replies]
        counts = [sum(reply.end - reply.start for reply in item.replies) for item in items]
        nothing = np.empty(0, np.int64)  # there may be no item
        return cls(
            counts,
            np.concatenate([nothing, *(np.arange(reply.start, reply.end) for reply in replies)]),
            np.repeat(np.array([reply.seed for reply in replies], np.int64), lengths),
            np.repeat(np.array([item.temperature for item in items], np.float32), counts),
            Limits(
                np.repeat(np.array([item.top_k for item in items], np.int64), counts),
                np.repeat(np.array([item.top_p for item in items], np.float32), counts),
            ),
        )


def leading_rows(lengths: Sequence[int], counts: Sequence[int], places: Integers) -> Integers:
    """Return the rows of a packed batch that lead to `places` [S], `counts` of each text of these `lengths`."""
    return np.repeat(np.cumsum([0, *lengths[:-1]]), counts) + places - 1


# -- routes ----------------------------------------------------------------------------------------


class RouteChecker:
    """Hooks of one forward pass that compare tokens' claimed routes with the routers' choices."""

    def __init__(self, claimed: Tensor, places: Integers, rows: Tensor) -> None:
        """Take the `claimed` routes [S, layers, k]; negative: no claim.

        `places` and `rows` are those of BoundaryChecker.
        """
        self._claimed = claimed
        self._places = places
        self._rows = rows
        layers = claimed.shape[1]
        self._passed = [0] * layers
        self._outside: list[list[Tensor]] = [[] for _ in range(layers)]
        self._margins: list[list[Tensor]] = [[] for _ in range(layers)]

    def take(self, layer: int, scores: Tensor, own: Tensor) -> None:
        """See RouterHooks."""
        start = self._passed[layer]
        self._passed[layer] = end = start + len(scores)
        first, last = np.searchsorted(self._places, [start, end]).tolist()
        rows = self._rows[first:last] - start
        claimed = self._claimed[first:last, layer].long()
        outside, margins = off_route(scores[rows], own[rows], claimed)
        self._outside[layer].append(outside)
        self._margins[layer].append(margins)

    def led(self) -> Tensor:
        """Return off_routes() of the tokens, in order [S, 2]."""
        outside, margins = (list(map(torch.cat, each)) for each in (self._outside, self._margins))
        return off_routes(outside, margins, self._claimed.shape[2])


# -- boundaries of a pipeline ----------------------------------------------------------------------


def boundary_key(item: AuditItem) -> tuple[tuple[int, Encoding], ...]:
    """List (layers below, encoding) of each boundary, ascending; items of one key share a pass."""
    return tuple((boundary.layers, boundary.encoding) for boundary in item.boundaries)


class BoundaryChecker:
    """Hooks of one forward pass that project the states of some tokens at each boundary.

    If stages rounded the states that they sent, the prefill rounds them, too, so that later states are
    comparable.
    """

    def __init__(
        self, key: tuple[tuple[int, Encoding], ...], places: Integers, rows: Tensor
    ) -> None:
        """Take ascending positions `places` [S] in the pass; `rows`: the same on the network's device."""
        self._encodings = dict(key)
        self._places = places
        self._rows = rows
        self._passed = dict.fromkeys(self._encodings, 0)
        self._found: dict[int, list[Tensor]] = {layer: [] for layer in self._encodings}

    @property
    def layers(self) -> frozenset[int]:
        """See LayerHooks."""
        return frozenset(self._encodings)

    def take(self, layer: int, x: Tensor) -> Tensor:
        """See LayerHooks."""
        encoding = self._encodings[layer]
        received = x if encoding == "raw" else rounded(x, encoding)
        start = self._passed[layer]
        self._passed[layer] = end = start + len(x)
        first, last = np.searchsorted(self._places, [start, end]).tolist()
        rows = self._rows[first:last] - start
        for part in rows.split(max(1, BOUNDARY_NUMBERS // x.shape[1])):
            states = received[part]
            length = states.float().square().mean(1, keepdim=True).sqrt()
            self._found[layer].append(torch.cat([project(states), length], 1))
        return received

    def led(self) -> Tensor:
        """Return the projected states and lengths of the tokens, in order [S, boundaries, 8]."""
        if not self._found:
            return torch.empty(len(self._places), 0, COLUMNS)
        return torch.stack([torch.cat(parts) for parts in self._found.values()], 1)
