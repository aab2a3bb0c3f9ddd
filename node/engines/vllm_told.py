"""The likeliest tokens beside each drawn one, inside vLLM's worker, for the requests that ask for them.

Found on the device for these rows alone, copied to the host and filed there like the rest of what the recorder
keeps (vllm_recorder.py). Without such a request nothing here is computed.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .sampling import likeliest
from .transfers import download, upload_array

Ints = NDArray[np.int64]
Later = Callable[[Callable[[], None]], None]
"""Calls its argument once everything enqueued on the device until now is done."""


class Told:
    """What is told of the requests of every slot."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts: dict[int, int] = {}
        self._rows: dict[int, dict[int, bytes]] = {}

    def start(self, slot: int, count: int) -> None:
        """A new request has this slot, and wants so many tokens told beside each; 0 is none."""
        self._rows.pop(slot, None)
        self._counts.pop(slot, None)
        if count:
            self._counts[slot], self._rows[slot] = count, {}

    def wanted(self, slots: Ints) -> Ints:
        """At which places of `slots` are requests that want it."""
        if not self._counts:
            return np.empty(0, np.int64)
        return np.flatnonzero([slot in self._counts for slot in slots.tolist()])

    def add(
        self,
        logits: Tensor,
        temperatures: Tensor,
        logsumexp: Tensor,
        places: Ints,
        slots: Ints,
        rows: Ints,
        later: Later,
    ) -> None:
        """Take a step [n, ...], of which those at `places` draw the tokens number `rows` of `slots`."""
        where = upload_array(places, self._device)
        counts = [self._counts[slot] for slot in slots.tolist()]
        ids, logprobs = likeliest(
            logits.index_select(0, where), temperatures[where], logsumexp[where], max(counts)
        )
        pairs = download(torch.stack([ids.to(torch.int32), logprobs.view(torch.int32)], 1))

        def file() -> None:
            found = zip(slots.tolist(), rows.tolist(), counts, pairs.numpy(), strict=True)
            for slot, row, count, pair in found:
                if slot in self._rows:
                    self._rows[slot][row] = pair[:, :count].tobytes()

        later(file)

    def collected(self, slot: int, count: int) -> bytes:
        """Of each of `count` tokens the ids int32 and the logprobs fp32 of those beside it; b"" if none."""
        rows = self._rows.get(slot)
        return b"".join(rows[row] for row in range(count)) if rows else b""
