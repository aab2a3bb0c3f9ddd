"""Read branches as a worker would that computes in another dtype: its draws, logprobs and proofs.

Invariants:
- the text is given: at each sampled position the reader draws from what its own network says after the tokens
  before it, with the seed of the branch, so that what it draws once changes nothing later;
- only branches of one policy version and of one node are read.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from ..inference.fingerprint import pack
from ..inference.model import LanguageModel, pick_device
from ..inference.sampler import draw
from ..models.device import upload, upload_array
from ..models.support import Ids, pack_support
from ..weights.state import State
from .auditor import AuditItem, Reading, Unreadable
from .prefill_audit import BATCH_TOKENS, Kept, PrefillAudit, SampledPositions, batches, leading_rows

WORK_BYTES = 2 * 2**30
"""Memory of a GPU beside the weights: the states, scores and logits of a batch."""
LEFT_FREE = 0.05
"""Share of a GPU's memory that a reading leaves free: a trainer on it may need more at any moment."""
NOT_READ = "a branch of several policy versions or nodes is not read: cut it first"


class TextReader(PrefillAudit):
    """Reading of items, with a cache of the networks used last; for one thread."""

    def read(
        self, items: Sequence[AuditItem], states: Mapping[int, State]
    ) -> list[Reading | Unreadable]:
        """Read every item under the version that it claims, in order.

        Raises EngineError for a state that is missing or does not fit the model, RuntimeError for errors of
        torch.
        """
        answers: dict[int, Reading | Unreadable] = {}
        by_version: dict[int, list[int]] = defaultdict(list)
        for number, fault in enumerate(self._faults(items, states)):
            item = items[number]
            if fault is not None:
                answers[number] = fault
            elif len(item.claimed) > 1 or item.boundaries:
                answers[number] = Unreadable(NOT_READ, proof=False)
            else:
                by_version[item.versions[0]].append(number)
        with torch.inference_mode():
            for version, numbers in by_version.items():
                network = self._network(version, states[version])
                most = self._batch_tokens or BATCH_TOKENS.get(network.device.type, 2**11)
                for batch in batches(numbers, items, most):
                    readings = self._read(network, [items[number] for number in batch])
                    answers |= zip(batch, readings, strict=True)
        return [answers[number] for number in range(len(items))]

    def _build(self, state: State) -> Kept:
        """Build on the CPU where the GPU has no room for the model in this dtype beside its other users."""
        terms = self._terms
        device = pick_device(terms.device)
        if device.type == "cuda":
            numbers = sum(math.prod(tensor.shape) for tensor in (self._base or state).values())
            free, total = torch.cuda.mem_get_info(device)
            if not has_room(numbers, free, total):
                self._terms = dataclasses.replace(terms, device="cpu")
        try:
            return super()._build(state)
        finally:
            self._terms = terms

    def _read(self, network: LanguageModel, items: Sequence[AuditItem]) -> list[Reading]:
        lengths = [len(item.token_ids) for item in items]
        ids = np.concatenate([np.array(item.token_ids, np.int64) for item in items])
        sampled = SampledPositions.of(items)
        rows = leading_rows(lengths, sampled.counts, sampled.places)
        device = network.device
        hidden = network.packed(upload_array(ids, device), lengths, None, None)
        hidden = hidden[upload_array(rows, device)]
        projected = self._projected(hidden).cpu().numpy()
        tokens, logprobs, support = self._drawn(network, hidden, items, sampled)
        ends = np.cumsum(sampled.counts)[:-1]
        return [
            Reading(
                sampled_tokens.tolist(),
                stated.tolist(),
                _proof(states, item),
                pack_support(left, sampled_tokens.tolist()) if item.support else b"",
            )
            for sampled_tokens, stated, left, states, item in zip(
                np.split(tokens, ends),
                np.split(logprobs, ends),
                np.split(support, ends),
                np.split(projected, ends),
                items,
                strict=True,
            )
        ]

    def _drawn(
        self,
        network: LanguageModel,
        hidden: Tensor,
        items: Sequence[AuditItem],
        sampled: SampledPositions,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], Ids]:
        """Return the tokens that the network draws after `hidden` [S, d], their logprobs and supports."""
        device = network.device
        warm = sampled.temperatures
        greedy = not warm.any()
        temperatures = upload(torch.from_numpy(np.ones_like(warm) if greedy else warm), device)
        drawn_with, at = upload_array(sampled.seeds, device), upload_array(sampled.places, device)
        tokens: list[Tensor] = []
        logprobs: list[Tensor] = []
        supports: list[Tensor] = []
        supported = np.repeat([bool(item.support) for item in items], sampled.counts)
        stated = upload(torch.from_numpy(supported), device)
        step = self._rows(network, hidden)
        for start in range(0, len(hidden), step):
            part = slice(start, start + step)
            logits = network.logits(hidden[part])
            if greedy:
                likely, best = torch.log_softmax(logits.float(), -1).max(-1)
                tokens.append(best)
                logprobs.append(likely)
                continue
            narrowed = sampled.limits.narrowed(part, device)
            draws = draw(logits, temperatures[part], drawn_with[part], at[part], narrowed)
            tokens.append(draws.tokens)
            over = draws.support_logprobs
            logprobs.append(
                draws.logprobs if over is None else over.where(stated[part], draws.logprobs)
            )
            none = torch.empty(len(logits), 0, dtype=torch.int32, device=device)
            supports.append(none if draws.support is None else draws.support)
        widest = max((support.shape[1] for support in supports), default=0)
        left = [
            pad(support, (0, widest - support.shape[1]), value=-1).cpu() for support in supports
        ]
        return (
            torch.cat(tokens).cpu().numpy(),
            torch.cat(logprobs).double().cpu().numpy(),
            torch.cat(left or [torch.empty(len(hidden), 0)]).numpy().astype(np.int32),
        )


def has_room(numbers: int, free: int, total: int) -> bool:
    """Return whether a GPU with `free` of `total` bytes can hold a float32 model of that many parameters."""
    return free - 4 * numbers - WORK_BYTES >= LEFT_FREE * total


def _proof(projected: NDArray[np.float32], item: AuditItem) -> bytes:
    """Pack projected states [S, 7], each reply by itself."""
    ends = np.cumsum([reply.end - reply.start for reply in item.replies])[:-1]
    return b"".join(pack(part) for part in np.split(projected, ends))
