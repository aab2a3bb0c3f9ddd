"""Measures claimed branches against a prefill: one forward pass a version, then tokens, logprobs and proofs.

A GPU is never waited for before it has its next batch: what a batch gave is summed up meanwhile.
Items are foreign: each is checked by itself, and none of them may spoil what is measured on its neighbours.
What is not a number is never fine: it counts as infinitely far off.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..inference.device import Mark, download, upload
from ..inference.fingerprint import Projection, signs
from ..inference.model import LanguageModel, build_network
from ..inference.sampler import draw, gumbel_at
from ..models import huggingface
from ..models.model_files import layer_count, read_base
from ..ops.errors import EngineError
from ..weights.adapters import merge
from ..weights.state import State, state_bytes
from .auditor import AuditItem, Measured, Unreadable
from .crossings import BoundaryChecker, distances, key_of
from .portions import check_versions, other_versions, wanted_versions
from .reading import check_item, split_proof
from .sameness import SameState
from .summing import summarize
from .terms import AuditTerms

BATCH_TOKENS = {"cpu": 2**11, "cuda": 2**14}
"""Tokens of a forward pass: what a cache holds, and what keeps a GPU busy."""
AHEAD = 1
"""Batches that a device is given before the one before them is summed up."""
LOGITS = 2**26
"""Logits at a time, as if all were fp32 (256 MiB): rows enough that a GPU reads the head's weights for many."""
TILE = 128
"""Rows that a GPU multiplies at once: a few more would cost as much as so many."""
KEEP_BYTES = 2**30
"""Networks are kept for the next audit while their states are smaller than this together; one always is."""


Integers = NDArray[np.int64]


@dataclass
class _Branch:
    """One item on its way; `at` is where its sampled tokens are among those of all."""

    number: int
    """Among the sound items."""
    item: AuditItem
    token_ids: Integers
    others: list[int]
    at: slice
    waits: int
    """Versions whose pass is still to come."""
    found: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """version -> projected states [S, 7], on the CPU."""
    crossed: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """The same of its boundaries [S, boundaries, 8]."""


@dataclass(frozen=True)
class _Tokens:
    """The sampled tokens of all branches, one after the other."""

    places: Integers
    """In their branches."""
    tokens: Integers
    seeds: Integers
    versions: Integers
    margins: NDArray[np.float64]
    logprobs: NDArray[np.float64]
    """Recomputed; both infinite until they are."""


@dataclass(frozen=True)
class _Flight:
    """A batch that a device works on; nothing of it may be read before `mark`."""

    version: int
    branches: Sequence[_Branch]
    counts: Sequence[int]
    led: Tensor
    """Projected states [S, 7] of the sampled tokens of all `branches`."""
    crossed: Tensor
    """And at their boundaries [S, boundaries, 8]."""
    drawn: Integers
    """Which tokens of all claim this version [N]."""
    numbers: Tensor
    """Their margins and logprobs [2, N] fp32."""
    mark: Mark


@dataclass(frozen=True)
class _Kept:
    network: LanguageModel
    state: SameState
    size: int


class Replay:
    """Measures; keeps the networks that it used last. For one thread."""

    def __init__(
        self,
        terms: AuditTerms,
        *,
        batch_tokens: int = 0,
        logits: int = LOGITS,
        keep_bytes: int = KEEP_BYTES,
    ) -> None:
        """`batch_tokens` of a forward pass, 0 for what suits the device."""
        self._terms = terms
        self._batch_tokens = batch_tokens
        self._logits = logits
        self._keep_bytes = keep_bytes
        self._fingerprint = Projection()
        self._kept: dict[int, _Kept] = {}  # the last one used is the last one
        self._base: State | None = None

    def prepare(self, *, threads: int = 0) -> None:
        """Have torch use so many threads, 0 leaves its choice; look whether this can be done at all.

        Raises EngineError if the architecture, or a base, cannot be read, or the device is not there.
        """
        if threads:
            torch.set_num_threads(threads)
        huggingface.load_config(self._terms.model_dir)
        if self._terms.adapters is not None:
            self._base = read_base(self._terms.model_dir, self._terms.base_state)
        device = self._terms.device
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise EngineError(f"there is no {device}: set engine.device to auto or cpu")

    def measure(
        self,
        items: Sequence[AuditItem],
        states: Mapping[int, State],
        others: Mapping[int, Sequence[int]],
    ) -> list[Measured | Unreadable]:
        """See Auditor.audit(). Memory grows with the items: see portions().

        Raises EngineError for a state that is missing or does not fit the model, RuntimeError for torch's
        own troubles.
        """
        check_versions(items, states, others)
        vocabulary = huggingface.vocab_size(self._terms.model_dir)
        layers = layer_count(self._terms.model_dir)
        faults = [check_item(item, vocabulary, layers, self._fingerprint) for item in items]
        sound = [item for item, fault in zip(items, faults, strict=True) if fault is None]
        branches, tokens = _flatten(sound, others)
        done: dict[int, Measured] = {}
        running: deque[_Flight] = deque()
        with torch.inference_mode():
            for flight in self._flights(branches, tokens, states, others):
                running.append(flight)
                if len(running) > AHEAD:
                    done |= self._land(running.popleft(), tokens)
            while running:
                done |= self._land(running.popleft(), tokens)
        found = (done[branch.number] for branch in branches)
        return [fault or next(found) for fault in faults]

    @staticmethod
    def free_spare_memory() -> None:
        """Give back what torch keeps for itself on a GPU: a trainer may want it."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # -- prefill -----------------------------------------------------------------------------------

    def _flights(
        self,
        branches: Sequence[_Branch],
        tokens: _Tokens,
        states: Mapping[int, State],
        others: Mapping[int, Sequence[int]],
    ) -> Iterator[_Flight]:
        wanting: dict[int, list[_Branch]] = defaultdict(list)
        for branch in branches:
            for version in wanted_versions(branch.item, others):
                wanting[version].append(branch)
        # those at hand first: fetching another one may cost one of them its place
        for version in sorted(wanting, key=lambda one: (one not in self._kept, one)):
            network = self._network(version, states[version])
            limit = self._batch_tokens or BATCH_TOKENS.get(network.device.type, BATCH_TOKENS["cpu"])
            for batch in _batches(wanting[version], limit):
                yield self._launch(network, version, batch, tokens)

    def _launch(
        self, network: LanguageModel, version: int, batch: Sequence[_Branch], tokens: _Tokens
    ) -> _Flight:
        """Have the device measure `batch` under `version`, without waiting for it."""
        lengths = [len(branch.item.token_ids) for branch in batch]
        counts = [branch.at.stop - branch.at.start for branch in batch]
        chosen = np.concatenate([np.arange(one.at.start, one.at.stop) for one in batch])
        before = np.repeat(np.cumsum([0, *lengths[:-1]]), counts)
        own = np.flatnonzero(tokens.versions[chosen] == version)
        drawn = chosen[own]
        pieces = [branch.token_ids for branch in batch]
        leading = before + tokens.places[chosen] - 1
        pieces += [leading, own]
        pieces += [tokens.seeds[drawn], tokens.places[drawn], tokens.tokens[drawn]]
        there = upload(torch.from_numpy(np.concatenate(pieces)), network.device)
        sizes = [sum(lengths), len(chosen), *[len(own)] * 4]
        ids, led, rows, *claims = there.split(sizes)
        lookout = BoundaryChecker(key_of(batch[0].item), leading, led)
        hidden = network.packed(ids, lengths, lookout if lookout.layers else None)[led]
        return _Flight(
            version=version,
            branches=batch,
            counts=counts,
            led=download(self._projected(hidden)),
            crossed=download(lookout.led()),
            drawn=drawn,
            numbers=download(self._draw(network, hidden[rows], *claims)),
            mark=Mark(network.device),
        )

    def _projected(self, hidden: Tensor) -> Tensor:
        """Project states [S, d] to [S, 7], which the fingerprint compares."""
        width = hidden.shape[1]
        matrix = upload(torch.from_numpy(signs(width)), hidden.device)
        parts = hidden.split(max(1, self._logits // width))
        return torch.cat([part.float() @ matrix for part in parts])

    def _draw(
        self, network: LanguageModel, hidden: Tensor, seeds: Tensor, places: Tensor, claimed: Tensor
    ) -> Tensor:
        """Margins and logprobs [2, N] fp32 of tokens `claimed` [N], to which `hidden` [N, d] led.

        A margin is by how much the best score beats that of the claimed token; both are infinite or
        NaN where some logit is no number.
        """
        divisor = torch.full(claimed.shape, self._terms.temperature, device=claimed.device)
        scores, sums, own = torch.empty(3, len(claimed), device=claimed.device)
        step = self._rows(network, hidden)
        for start in range(0, len(claimed), step):
            rows = slice(start, start + step)
            logits = network.logits(hidden[rows])
            best = draw(logits, divisor[rows], seeds[rows], places[rows])
            scores[rows], sums[rows] = best.scores, best.logsumexp
            own[rows] = logits.gather(1, claimed[rows, None])[:, 0]
        # the very operations of draw(): the token that it draws has a margin of exactly 0
        scaled = own * divisor.reciprocal()
        margins = scores - (gumbel_at(seeds, places, claimed) + scaled)
        logprobs = scaled - sums
        return torch.stack([margins.clamp_min(0).where(logprobs.isfinite(), torch.inf), logprobs])

    def _rows(self, network: LanguageModel, hidden: Tensor) -> int:
        """Rows of logits at a time, which are of the type of `hidden`."""
        most = self._logits * 4 // (hidden.element_size() * network.vocab_size)
        return max(1, most if most < TILE else most - most % TILE)

    def _network(self, version: int, state: State) -> LanguageModel:
        kept = self._kept.pop(version, None)
        if kept is None or not kept.state.matches(state):
            kept = self._build(state)
        self._kept[version] = kept
        return kept.network

    def _build(self, state: State) -> _Kept:
        whole = self._merged(state)
        size = state_bytes(whole)
        # before the new one is made: memory is short beside a trainer
        while self._kept and size + sum(one.size for one in self._kept.values()) > self._keep_bytes:
            del self._kept[next(iter(self._kept))]
        terms = self._terms
        network = build_network(terms.model_dir, whole, dtype=terms.dtype, device=terms.device)
        return _Kept(network, SameState(state), size)

    def _merged(self, state: State) -> State:
        """The weights to compute with: `state`, or what it makes of the base."""
        adapters = self._terms.adapters
        if adapters is None:
            return state
        if self._base is None:
            raise EngineError("the base model was not read: call prepare() first")
        return merge(self._base, state, adapters, threads=torch.get_num_threads())

    # -- what was found ----------------------------------------------------------------------------

    def _land(self, flight: _Flight, tokens: _Tokens) -> dict[int, Measured]:
        """Wait for `flight`: the branches that wait for no other one now."""
        flight.mark.wait()
        margins, logprobs = flight.numbers.numpy()
        tokens.margins[flight.drawn] = margins
        tokens.logprobs[flight.drawn] = logprobs
        done: dict[int, Measured] = {}
        parts = (found.split(flight.counts) for found in (flight.led, flight.crossed))
        for branch, part, crossed in zip(flight.branches, *parts, strict=True):
            branch.found[flight.version] = part
            branch.crossed[flight.version] = crossed
            branch.waits -= 1
            if not branch.waits:
                done[branch.number] = self._summarize(branch, tokens)
                branch.found.clear()
                branch.crossed.clear()
        return done

    def _summarize(self, branch: _Branch, tokens: _Tokens) -> Measured:
        versions = tokens.versions[branch.at]
        found = summarize(
            margins=tokens.margins[branch.at],
            apart=tokens.logprobs[branch.at] - np.array(branch.item.logprobs),
            fingerprint=self._fingerprint,
            proofs=split_proof(branch.item, self._fingerprint),
            projected=_own_states(branch.found, versions).float().numpy(),
            others=[branch.found[version].float().numpy() for version in branch.others],
        )
        crossed = _own_states(branch.crossed, versions).numpy()
        return replace(found, boundaries=distances(branch.item, crossed))


def _flatten(
    items: Sequence[AuditItem], others: Mapping[int, Sequence[int]]
) -> tuple[list[_Branch], _Tokens]:
    branches: list[_Branch] = []
    columns: list[tuple[Integers, ...]] = []
    start = 0
    for number, item in enumerate(items):
        ids = np.array(item.token_ids, np.int64)
        counts = [reply.end - reply.start for reply in item.replies]
        places = np.concatenate([np.arange(reply.start, reply.end) for reply in item.replies])
        seeds = np.repeat(np.array([reply.seed for reply in item.replies], np.int64), counts)
        columns.append((places, ids[places], seeds, np.array(item.versions, np.int64)))
        at = slice(start, start := start + len(places))
        waits = len(wanted_versions(item, others))
        branches.append(_Branch(number, item, ids, other_versions(item, others), at, waits))
    none = (np.empty(0, np.int64),) * 4  # there may be no item
    return branches, _Tokens(
        *map(np.concatenate, zip(none, *columns, strict=True)),
        margins=np.full(start, np.inf),
        logprobs=np.full(start, np.inf),
    )


def _own_states(found: Mapping[int, Tensor], versions: Integers) -> Tensor:
    """[S, ...]: what was found under the version that each token claims, `versions` [S]."""
    first, *later = sorted(set(versions.tolist()))
    own = found[first]
    for version in later:
        claims = torch.from_numpy(versions == version)
        own = torch.where(claims.view(-1, *[1] * (own.ndim - 1)), found[version], own)
    return own


def _batches(branches: Sequence[_Branch], limit: int) -> list[list[_Branch]]:
    """Branches of like length together, the longest first, each batch within `limit` tokens.

    All of a batch crossed the same boundaries.
    """
    batches: list[list[_Branch]] = []
    room, key = 0, None
    for branch in sorted(branches, key=lambda one: (key_of(one.item), -len(one.item.token_ids))):
        length = len(branch.item.token_ids)
        if length > room or key_of(branch.item) != key:
            batches.append([])
            room, key = max(limit, length), key_of(branch.item)
        batches[-1].append(branch)
        room -= length
    return batches
