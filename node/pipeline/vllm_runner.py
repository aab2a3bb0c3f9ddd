"""Adapt vLLM's model runner to lanes: a persistent batch per lane, states in and out.

- The runner keeps the sequences of its last step as rows of a batch, so a next step of the same sequences is
  cheap. With one batch for all lanes every step would remove and re-add all rows, with their tokens and blocks;
  so each lane gets its own batch. Ranks of a stage get the same steps in the same order and choose alike.
- Each stage's runner orders the sequences of a step itself; between stages states are in the step's order.
- One residual stream per token is sent: vLLM's hidden states and residuals are added in the model's dtype, as
  the next norm would do first.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...protocol.pipelines import Encoding
from ..errors import EngineError
from ..inference.boundary_states import pack_projected, project
from ..models.device import Mark, download, upload_array
from .activations import arrays, codes, rounded
from .frames import Array
from .step_codec import SequencePart, draws

BATCH_CLASS = "InputBatch"
"""Name of the batch class in the module of vLLM's runner."""


def record_batch_arguments(module: Any) -> None:
    """Make vLLM's batches record their constructor arguments, for empty_like().

    `module` is that of vLLM's runner.
    """
    base: Any = getattr(module, BATCH_CLASS)
    if hasattr(base, "primerl_arguments"):
        return

    class RecordingBatch(base):
        """vLLM's batch, with its constructor arguments."""

        primerl_arguments: tuple[Any, dict[str, Any]] = ((), {})

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.primerl_arguments = (arguments, named)

    setattr(module, BATCH_CLASS, RecordingBatch)


class LaneBatches:
    """Up to `most` batches of one runner; a sequence is in at most one of them.

    Call install() once the runner exists; it then selects a batch at each step.
    """

    def __init__(self, runner: Any, most: int) -> None:
        self._runner = runner
        self._most = most
        self._batches: list[Any] = []
        """In order of use, the most recent last."""
        self._update: Callable[[Any], Any] = runner._update_states

    def install(self) -> None:
        """Have the runner select the batch of a step's lane before it updates it."""
        self._runner._update_states = self._updated

    def _updated(self, output: Any) -> Any:
        self._select(output.num_scheduled_tokens.keys(), output.finished_req_ids)
        return self._update(output)

    def _select(self, names: Any, ended: Collection[str]) -> None:
        """Set the runner's batch for a step of `names`.

        Remove the `ended` sequences from all batches.
        """
        if not self._batches:
            self._batches.append(self._runner.input_batch)
        for batch in self._batches:
            _remove(batch, batch.req_id_to_index.keys() & ended)
        if not names:
            return
        chosen = self._best_batch(names)
        if not names <= chosen.req_id_to_index.keys():
            for batch in self._batches:
                if batch is not chosen:  # its rows would be stale when the batch is used again
                    _remove(batch, batch.req_id_to_index.keys() & names)
        self._batches.remove(chosen)
        self._batches.append(chosen)
        self._runner.input_batch = chosen

    def _best_batch(self, names: Any) -> Any:
        """Return the batch with most of `names`.

        Without any, an empty batch or the least recently used one.
        """
        shares = [len(batch.req_id_to_index.keys() & names) for batch in self._batches]
        if best := max(shares):
            return self._batches[shares.index(best)]
        free = next((batch for batch in self._batches if not batch.req_id_to_index), None)
        if free is None and len(self._batches) < self._most:
            free = empty_like(self._batches[0])
            self._batches.append(free)
        return free or self._batches[0]


def empty_like(batch: Any) -> Any:
    """Make an empty batch like `batch`, which shares its block tables on the device.

    Captured graphs read the tables at fixed addresses. On a CPU each batch has its own tables, as the device
    buffer may be the host's copy.
    """
    arguments, named = batch.primerl_arguments
    with torch.inference_mode(False):
        empty = type(batch)(*arguments, **named | {"logitsprocs": None})
    tables = zip(empty.block_table.block_tables, batch.block_table.block_tables, strict=True)
    for own, first in tables:
        for name, buffer in vars(first).items():
            if hasattr(buffer, "gpu") and buffer.gpu.device.type != "cpu":
                getattr(own, name).gpu = buffer.gpu
    return empty


def _remove(batch: Any, names: Collection[str]) -> None:
    """Remove rows from a batch; vLLM condenses it at its next use."""
    for name in names:
        batch.remove_request(name)


HIDDEN, RESIDUAL = "hidden_states", "residual"
SUPPORTED = ({HIDDEN}, {HIDDEN, RESIDUAL})
"""Supported sets of intermediate tensors between stages; other models are refused."""

Ints = NDArray[np.int64]


def order_of(runner: Any) -> list[str]:
    """Return the sequences of the runner's current step, in row order."""
    batch = runner.input_batch
    return list(batch.req_ids[: batch.num_reqs])


def gather(order: Sequence[str], wanted: Sequence[str], counts: Mapping[str, int]) -> Ints | None:
    """Compute the row index that reorders sequences from `order` to `wanted`.

    None if the order is the same. `counts` are the rows of each sequence.
    """
    if list(order) == list(wanted):
        return None
    starts: dict[str, int] = {}
    at = 0
    for name in order:
        starts[name] = at
        at += counts[name]
    return np.concatenate([np.arange(starts[name], starts[name] + counts[name]) for name in wanted])


def residual_stream(tensors: Mapping[str, Tensor], rows: int, index: Ints | None) -> Tensor:
    """Add hidden states and residuals to the stream [rows, width] that a stage sends.

    Raises EngineError.
    """
    if set(tensors) not in SUPPORTED:
        raise EngineError(
            f"this model passes {sorted(tensors)} between stages, which pipelines do not support: choose "
            "another model"
        )
    stream = tensors[HIDDEN][:rows]
    if RESIDUAL in tensors:
        stream = stream + tensors[RESIDUAL][:rows]
    return rows_of(stream, index)


def sampled_rows(parts: Sequence[SequencePart]) -> Ints | None:
    """Return the rows of a stream in the order of `parts` from which tokens are sampled.

    None for all rows.
    """
    if all(map(_is_decode, parts)):
        return None
    ends = np.cumsum([part.scheduled for part in parts]) - 1
    chosen = np.fromiter(map(draws, parts), np.bool_, len(parts))
    return ends[chosen].astype(np.int64)


def _is_decode(part: SequencePart) -> bool:
    return part.scheduled == 1 and draws(part)


def rows_of(stream: Tensor, index: Ints | None) -> Tensor:
    """Select the rows `index` of `stream`; None for all."""
    return stream if index is None else stream.index_select(0, upload_array(index, stream.device))


class OutgoingStates:
    """Encoded states being copied to the host."""

    def __init__(
        self, stream: Tensor, index: Ints | None, encoding: Encoding, *, proven: bool
    ) -> None:
        """`proven`: also fingerprint the rows `index`, as the receiver decodes them."""
        self._states = [download(part) for part in codes(stream, encoding)]
        self._projected: Tensor | None = None
        if proven:
            self._projected = download(project(rounded(rows_of(stream, index), encoding)))
        self._mark = Mark(stream.device)

    def wait(self) -> tuple[tuple[Array, ...], bytes]:
        """Wait for the copy; return the frame's tensors and this stage's fingerprints.

        Raises EngineError.
        """
        self._mark.wait()
        own = b"" if self._projected is None else pack_projected(self._projected)
        return arrays(self._states), own


class StateBuffers:
    """Buffers for received states, sized for the largest step: CUDA graphs read padded rows."""

    def __init__(self, runner: Any, width: int, dtype: torch.dtype) -> None:
        self._runner = runner
        names = set(runner.intermediate_tensors.tensors)
        if names not in SUPPORTED:
            raise EngineError(
                f"this model expects {sorted(names)} between stages, which pipelines do not support: choose "
                "another model"
            )
        size = (runner.max_num_tokens, width)
        self._stream = torch.zeros(size, dtype=dtype, device=runner.device)
        self._tensors = {HIDDEN: self._stream}
        if RESIDUAL in names:
            self._tensors = {HIDDEN: torch.zeros_like(self._stream), RESIDUAL: self._stream}

    def fill(self, stream: Tensor, order: Sequence[str], counts: Mapping[str, int]) -> Any:
        """Copy `stream`, whose sequences are in this order, into the buffers in the runner's order."""
        stream = rows_of(stream, gather(order, order_of(self._runner), counts))
        self._stream[: len(stream)].copy_(stream)
        return self._tensors


class IncomingStates:
    """Replaces vLLM's IntermediateTensors: copies states once the runner's batch is updated."""

    def __init__(
        self,
        buffers: StateBuffers,
        stream: Tensor,
        order: Sequence[str],
        counts: Mapping[str, int],
    ) -> None:
        """`stream` [tokens, width] holds `counts` rows of each sequence, in `order`."""
        self._buffers = buffers
        self._stream, self._order, self._counts = stream, order, counts

    def items(self) -> Any:
        """Fill the buffers; return their names and tensors."""
        return self._buffers.fill(self._stream, self._order, self._counts).items()
