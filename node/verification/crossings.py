"""What crossed from stage to stage of a pipeline, computed again by whoever has the whole model.

Where stages rounded what they sent, so does the prefill, so that what comes after the boundary can be compared.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...protocol.pipelines import Encoding
from ..inference.boundary_states import project
from ..inference.fingerprint import COLUMNS, token_distances
from ..pipeline.activations import rounded
from .auditor import AuditItem
from .summing import root_mean

Key = tuple[tuple[int, Encoding], ...]
"""Of each boundary, ascending: layers below it, and how it was crossed."""
Integers = NDArray[np.int64]
PIECE = 2**24
"""Numbers that are looked at at a time: some copies of them are made, in fp32."""


def key_of(item: AuditItem) -> Key:
    """Items of one key can share a pass."""
    return tuple((one.layers, one.encoding) for one in item.boundaries)


class BoundaryChecker:
    """Taps of one pass: of the tokens that are asked about, what a fingerprint of each boundary compares."""

    def __init__(self, key: Key, places: Integers, rows: Tensor) -> None:
        """`places` [S], ascending, are tokens of the pass, and `rows` the same on the network's device."""
        self._encodings = dict(key)
        self._places = places
        self._rows = rows
        self._passed = dict.fromkeys(self._encodings, 0)
        self._found: dict[int, list[Tensor]] = {layer: [] for layer in self._encodings}

    @property
    def layers(self) -> frozenset[int]:
        """See Taps."""
        return frozenset(self._encodings)

    def take(self, layer: int, x: Tensor) -> Tensor:
        """See Taps."""
        encoding = self._encodings[layer]
        seen = x if encoding == "raw" else rounded(x, encoding)
        start = self._passed[layer]
        self._passed[layer] = end = start + len(x)
        first, last = np.searchsorted(self._places, [start, end]).tolist()
        rows = self._rows[first:last] - start
        for part in rows.split(max(1, PIECE // x.shape[1])):
            states = seen[part]
            length = states.float().square().mean(1, keepdim=True).sqrt()
            self._found[layer].append(torch.cat([project(states), length], 1))
        return seen

    def led(self) -> Tensor:
        """Of the tokens, in order, the projected states and their lengths [S, boundaries, 8]."""
        if not self._found:
            return torch.empty(len(self._places), 0, COLUMNS)
        return torch.stack([torch.cat(parts) for parts in self._found.values()], 1)


def distances(item: AuditItem, own: NDArray[np.float32]) -> tuple[float, ...]:
    """Of each boundary, how far what was stated is from `own` [S, boundaries, 8]: root mean square over tokens.

    Where the own states are not finite nobody can say: infinitely far, as everything else then is.
    """
    if not np.isfinite(own).all():
        return (float("inf"),) * len(item.boundaries)
    return tuple(
        root_mean(token_distances(boundary.proof, own[:, number]))
        for number, boundary in enumerate(item.boundaries)
    )
