"""Measures claimed branches against a prefill: one forward pass a version, then tokens, logprobs and proofs.

Items are foreign: each is checked by itself, and none of them may spoil what is measured on its neighbours.
What is not a number is never fine: it counts as infinitely far off.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...protocol.manifests import RunManifest
from .. import models
from ..engines.network import Network, build_network
from ..engines.sampling import draw, gumbel_at
from ..errors import EngineError
from ..fingerprints.build import find
from ..weights.state import State, state_bytes
from .auditor import AuditItem, Measured, Unreadable
from .portions import check_versions, other_versions, wanted_versions
from .reading import check_item, split_proof
from .sameness import SameState
from .summing import summarize

BATCH_TOKENS = {"cpu": 2**11, "cuda": 2**14}
"""Padded tokens of a forward pass: what a cache holds, and what keeps a GPU busy."""
ROOMY = 2**10
"""So many tokens keep a device busy: beyond them no short branch is padded to a long one."""
FILLED = 0.75
"""Least share of a batch's width that a branch fills."""
LOGITS = 2**26
"""fp32 logits at a time (256 MiB): rows enough that a GPU reads the head's weights for many of them."""
KEEP_BYTES = 2**30
"""Networks are kept for the next audit while their states are smaller than this together; one always is."""


@dataclass(frozen=True)
class Terms:
    """What all audits of a run have in common."""

    model_dir: Path
    fingerprint: str
    temperature: float
    dtype: str
    """The run's numerics class: the prefill rounds as the workers do, so much of the rounding cancels."""
    device: str


def terms(model_dir: Path, run: RunManifest, device: str) -> Terms:
    """The terms of `run` on `device` ("auto" is cuda where there is one)."""
    proofs = run.proofs
    return Terms(model_dir, proofs.fingerprint, run.sampling.temperature, proofs.dtype, device)


@dataclass
class _Branch:
    """One item on its way; `at` is where its sampled tokens are among those of all."""

    item: AuditItem
    others: list[int]
    at: slice
    hidden: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """version -> the hidden states [S, d] that led to the sampled tokens, on the CPU."""


@dataclass(frozen=True)
class _Tokens:
    """The sampled tokens of all branches, one after the other; on the CPU."""

    places: Tensor
    """In their branches."""
    tokens: Tensor
    seeds: Tensor
    versions: Tensor
    margins: Tensor
    logprobs: Tensor
    """Recomputed, float64 like the margins; both infinite until they are."""

    def drawn(self) -> tuple[Tensor, Tensor, Tensor]:
        """Seeds, places and token ids: what noise is made of."""
        return self.seeds, self.places, self.tokens


@dataclass(frozen=True)
class _Kept:
    network: Network
    state: SameState
    size: int


class Replay:
    """Measures; keeps the networks that it used last. For one thread."""

    def __init__(
        self,
        terms: Terms,
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
        self._fingerprint = find(terms.fingerprint)
        self._kept: dict[int, _Kept] = {}  # the last one used is the last one

    def prepare(self, *, threads: int = 0) -> None:
        """Have torch use so many threads, 0 leaves its choice; look whether this can be done at all.

        Raises EngineError if the architecture cannot be read, or the device is not there.
        """
        if threads:
            torch.set_num_threads(threads)
        models.load_config(self._terms.model_dir)
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
        vocabulary = models.vocab_size(self._terms.model_dir)
        faults = [check_item(item, vocabulary, self._fingerprint) for item in items]
        sound = [item for item, fault in zip(items, faults, strict=True) if fault is None]
        branches, tokens = _flatten(sound, others)
        with torch.inference_mode():
            self._prefill(branches, tokens, states, others)
        found = (self._summarize(branch, tokens) for branch in branches)
        return [fault or next(found) for fault in faults]

    @staticmethod
    def free_spare_memory() -> None:
        """Give back what torch keeps for itself on a GPU: a trainer may want it."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # -- prefill -----------------------------------------------------------------------------------

    def _prefill(
        self,
        branches: Sequence[_Branch],
        tokens: _Tokens,
        states: Mapping[int, State],
        others: Mapping[int, Sequence[int]],
    ) -> None:
        wanting: dict[int, list[_Branch]] = defaultdict(list)
        for branch in branches:
            for version in wanted_versions(branch.item, others):
                wanting[version].append(branch)
        # those at hand first: fetching another one may cost one of them its place
        for version in sorted(wanting, key=lambda one: (one not in self._kept, one)):
            network = self._network(version, states[version])
            limit = self._batch_tokens or BATCH_TOKENS.get(network.device.type, BATCH_TOKENS["cpu"])
            for batch in _batches(wanting[version], limit):
                self._run(network, version, batch, tokens)

    def _run(
        self, network: Network, version: int, batch: Sequence[_Branch], tokens: _Tokens
    ) -> None:
        width = max(len(branch.item.token_ids) for branch in batch)
        padded = torch.zeros(len(batch), width, dtype=torch.int64)
        for row, branch in enumerate(batch):
            padded[row, : len(branch.item.token_ids)] = torch.tensor(branch.item.token_ids)
        # causal attention: nothing sees the padding on its right
        hidden = network.hidden(padded.to(network.device))
        counts = [branch.at.stop - branch.at.start for branch in batch]
        rows = torch.arange(len(batch)).repeat_interleave(torch.tensor(counts))
        chosen = torch.cat([torch.arange(branch.at.start, branch.at.stop) for branch in batch])
        columns = tokens.places[chosen] - 1
        led = hidden[rows.to(hidden.device), columns.to(hidden.device)]
        for branch, part in zip(batch, led.cpu().split(counts), strict=True):
            branch.hidden[version] = part
        own = (tokens.versions[chosen] == version).nonzero()[:, 0]
        if len(own):
            self._draw(network, chosen[own], led[own.to(led.device)], tokens)

    def _draw(self, network: Network, chosen: Tensor, hidden: Tensor, tokens: _Tokens) -> None:
        """Fill in margins and logprobs of the tokens `chosen` [N], to which `hidden` [N, d] led."""
        step = max(1, self._logits // network.vocab_size)
        drawn = (values[chosen].to(hidden.device) for values in tokens.drawn())
        parts = [
            _margins(network.logits(led), self._terms.temperature, *rows)
            for led, *rows in zip(*(one.split(step) for one in (hidden, *drawn)), strict=True)
        ]
        # only now is the device waited for
        margins, logprobs = (torch.cat(one).cpu().double() for one in zip(*parts, strict=True))
        tokens.margins[chosen] = margins
        tokens.logprobs[chosen] = logprobs

    def _network(self, version: int, state: State) -> Network:
        kept = self._kept.pop(version, None)
        if kept is None or not kept.state.matches(state):
            kept = self._build(state)
        self._kept[version] = kept
        return kept.network

    def _build(self, state: State) -> _Kept:
        size = state_bytes(state)
        # before the new one is made: memory is short beside a trainer
        while self._kept and size + sum(one.size for one in self._kept.values()) > self._keep_bytes:
            del self._kept[next(iter(self._kept))]
        terms = self._terms
        network = build_network(terms.model_dir, state, dtype=terms.dtype, device=terms.device)
        return _Kept(network, SameState(state), size)

    # -- what was found ----------------------------------------------------------------------------

    def _summarize(self, branch: _Branch, tokens: _Tokens) -> Measured:
        return summarize(
            margins=tokens.margins[branch.at].numpy(),
            apart=tokens.logprobs[branch.at].numpy() - np.array(branch.item.logprobs),
            fingerprint=self._fingerprint,
            proofs=split_proof(branch.item, self._fingerprint),
            hidden=_own_hidden(branch, tokens.versions[branch.at]).float().numpy(),
            others=[branch.hidden[version].float().numpy() for version in branch.others],
        )


def _flatten(
    items: Sequence[AuditItem], others: Mapping[int, Sequence[int]]
) -> tuple[list[_Branch], _Tokens]:
    branches: list[_Branch] = []
    places: list[int] = []
    tokens: list[int] = []
    seeds: list[int] = []
    for item in items:
        start = len(places)
        for reply in item.replies:
            places += range(reply.start, reply.end)
            tokens += item.token_ids[reply.start : reply.end]
            seeds += [reply.seed] * (reply.end - reply.start)
        branches.append(_Branch(item, other_versions(item, others), slice(start, len(places))))
    integers = (places, tokens, seeds, [version for item in items for version in item.versions])
    return branches, _Tokens(
        *(torch.tensor(one, dtype=torch.int64) for one in integers),
        margins=torch.full((len(places),), torch.inf, dtype=torch.float64),
        logprobs=torch.full((len(places),), torch.inf, dtype=torch.float64),
    )


def _margins(
    logits: Tensor, temperature: float, seeds: Tensor, places: Tensor, claimed: Tensor
) -> tuple[Tensor, Tensor]:
    """By how much the best score of each row of `logits` [N, V] beats that of the token `claimed` [N],
    and the logprob of that token; both infinite or NaN where some logit is no number."""
    divisor = torch.full((len(logits),), temperature, dtype=torch.float32, device=logits.device)
    best = draw(logits, divisor, seeds, places)
    # the very operations of draw(): the token that it draws has a margin of exactly 0
    scaled = logits.gather(1, claimed[:, None])[:, 0].float() * divisor.reciprocal()
    margins = best.scores - (gumbel_at(seeds, places, claimed) + scaled)
    logprobs = scaled - best.logsumexp
    return margins.clamp_min(0).where(logprobs.isfinite(), torch.inf), logprobs


def _own_hidden(branch: _Branch, versions: Tensor) -> Tensor:
    """[S, d]: the hidden states under the version that each token claims, `versions` [S]."""
    first, *later = versions.unique().tolist()
    own = branch.hidden[first]
    for version in later:
        own = torch.where((versions == version)[:, None], branch.hidden[version], own)
    return own


def _batches(branches: Sequence[_Branch], limit: int) -> list[list[_Branch]]:
    """Branches of like length together, each batch within `limit` tokens once padded."""
    batches: list[list[_Branch]] = []
    width = 0
    for branch in sorted(branches, key=lambda one: -len(one.item.token_ids)):
        length = len(branch.item.token_ids)
        padded = width * len(batches[-1]) if batches else 0
        fits = bool(batches) and padded + width <= limit
        if fits and (padded < ROOMY or length >= FILLED * width):
            batches[-1].append(branch)
        else:
            batches.append([branch])
            width = length
    return batches
