"""The states that cross a boundary, out of and into vLLM's model runner.

Each stage's runner has an order of its own for the sequences of a step; on the way they are in the step's.
What travels is one residual stream a token: vLLM's hidden states and residuals are added, as its next norm
would do first, in the model's own type.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....protocol.pipelines import Encoding
from ...errors import EngineError
from ...pipeline.frame import Array
from ..boundary_states import pack_projected, project
from ..transfers import Mark, download, upload_array
from .activations import arrays, codes, rounded
from .step_codec import Part, draws

HIDDEN, RESIDUAL = "hidden_states", "residual"
KNOWN = ({HIDDEN}, {HIDDEN, RESIDUAL})
"""What models hand from one stage to the next; others are refused."""

Ints = NDArray[np.int64]


def order_of(runner: Any) -> list[str]:
    """The sequences of the runner's step, as their rows are."""
    batch = runner.input_batch
    return list(batch.req_ids[: batch.num_reqs])


def gather(found: Sequence[str], wanted: Sequence[str], counts: Mapping[str, int]) -> Ints | None:
    """Which rows of those in the order `found` are in the order `wanted`; None if they are as they are.

    `counts` are the rows of each sequence.
    """
    if list(found) == list(wanted):
        return None
    starts: dict[str, int] = {}
    at = 0
    for name in found:
        starts[name] = at
        at += counts[name]
    return np.concatenate([np.arange(starts[one], starts[one] + counts[one]) for one in wanted])


def leaving(tensors: Mapping[str, Tensor], rows: int, index: Ints | None) -> Tensor:
    """The stream [rows, width] that a stage hands on. Raises EngineError."""
    if set(tensors) not in KNOWN:
        raise EngineError(f"this model hands on {sorted(tensors)}, which no pipeline here carries")
    stream = tensors[HIDDEN][:rows]
    if RESIDUAL in tensors:
        stream = stream + tensors[RESIDUAL][:rows]
    return rows_of(stream, index)


def drawing(parts: Sequence[Part]) -> Ints | None:
    """Which rows of a stream in the order of `parts` lead to a token; None if all do, as mostly."""
    if all(map(_only_draws, parts)):
        return None
    ends = np.cumsum([part.scheduled for part in parts]) - 1
    chosen = np.fromiter(map(draws, parts), np.bool_, len(parts))
    return ends[chosen].astype(np.int64)


def _only_draws(part: Part) -> bool:
    return part.scheduled == 1 and draws(part)


def rows_of(stream: Tensor, index: Ints | None) -> Tensor:
    """Those rows; all of them for None."""
    return stream if index is None else stream.index_select(0, upload_array(index, stream.device))


class Departure:
    """States on their way to the host, which nobody has waited for yet."""

    def __init__(
        self, stream: Tensor, index: Ints | None, encoding: Encoding, *, proven: bool
    ) -> None:
        """`proven`: with fingerprints of the rows `index`, as whoever receives them sees them."""
        self._states = [download(one) for one in codes(stream, encoding)]
        self._projected: Tensor | None = None
        if proven:
            self._projected = download(project(rounded(rows_of(stream, index), encoding)))
        self._mark = Mark(stream.device)

    def wait(self) -> tuple[tuple[Array, ...], bytes]:
        """The tensors of a frame, and what is added to its trail. Raises EngineError."""
        self._mark.wait()
        own = b"" if self._projected is None else pack_projected(self._projected)
        return arrays(self._states), own


class Arrivals:
    """Buffers for what comes, as large as the largest step: a captured graph reads more rows than there are."""

    def __init__(self, runner: Any, width: int, dtype: torch.dtype) -> None:
        self._runner = runner
        names = set(runner.intermediate_tensors.tensors)
        if names not in KNOWN:
            raise EngineError(f"this model wants {sorted(names)}, which no pipeline here carries")
        size = (runner.max_num_tokens, width)
        self._stream = torch.zeros(size, dtype=dtype, device=runner.device)
        self._tensors = {HIDDEN: self._stream}
        if RESIDUAL in names:
            self._tensors = {HIDDEN: torch.zeros_like(self._stream), RESIDUAL: self._stream}

    def lay(self, stream: Tensor, wanted: Sequence[str], counts: Mapping[str, int]) -> "Arrival":
        """What the runner is given for a step whose `stream` is in the order `wanted`."""
        return Arrival(self, stream, wanted, counts)

    def fill(self, stream: Tensor, wanted: Sequence[str], counts: Mapping[str, int]) -> Any:
        """Lay `stream` in the runner's order, which it knows by now."""
        stream = rows_of(stream, gather(wanted, order_of(self._runner), counts))
        self._stream[: len(stream)].copy_(stream)
        return self._tensors


class Arrival:
    """Stands where the runner wants IntermediateTensors: read when its batch is in order."""

    def __init__(
        self, arrivals: Arrivals, stream: Tensor, wanted: Sequence[str], counts: Mapping[str, int]
    ) -> None:
        self._arrivals = arrivals
        self._stream, self._wanted, self._counts = stream, wanted, counts

    def items(self) -> Any:
        """Name and tensor."""
        return self._arrivals.fill(self._stream, self._wanted, self._counts).items()
