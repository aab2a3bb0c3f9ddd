"""Use vLLM's model runner for lanes: a persistent batch for each, and states out of and into it.

The runner keeps the sequences of its last step as rows of a batch, so that the next step of the same ones
costs little. Lanes take turns: with one batch for all of them every row would be taken out and put in
again at each step, with all of its tokens and blocks. So each lane finds its own rows again here. Ranks
that share a stage are told the same steps in the same order, so they choose alike.

Each stage's runner has an order of its own for the sequences of a step; on the way states are in the
step's order. What travels is one residual stream a token: vLLM's hidden states and residuals are added, as
its next norm would do first, in the model's own type.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...protocol.pipelines import Encoding
from ..inference.boundary_states import pack_projected, project
from ..inference.device import Mark, download, upload_array
from ..ops.errors import EngineError
from .activations import arrays, codes, rounded
from .frames import Array
from .step_codec import SequencePart, draws

PLACE = "InputBatch"
"""Name in the module of vLLM's runner under which it finds the type of its batch."""


def remember_making(module: Any) -> None:
    """Have the batches that vLLM's runner `module` makes from now on remember their arguments."""
    made: Any = getattr(module, PLACE)
    if hasattr(made, "primerl_made"):
        return

    class Remembering(made):
        """Knows how to make another one."""

        primerl_made: tuple[Any, dict[str, Any]] = ((), {})

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.primerl_made = (arguments, named)

    setattr(module, PLACE, Remembering)


class LaneBatches:
    """The batches of one runner, `most` of them at most; a sequence is in no more than one.

    install() once the runner is made; it chooses a batch at each step.
    """

    def __init__(self, runner: Any, most: int) -> None:
        self._runner = runner
        self._most = most
        self._batches: list[Any] = []
        """The one that was used last is the last."""
        self._update: Callable[[Any], Any] = runner._update_states

    def install(self) -> None:
        """Have the runner take the batch of a step's lane before it brings it up to date."""
        self._runner._update_states = self._updated

    def _updated(self, output: Any) -> Any:
        self._turn(output.num_scheduled_tokens.keys(), output.finished_req_ids)
        return self._update(output)

    def _turn(self, names: Any, over: Collection[str]) -> None:
        """The runner's next step is of `names`; nothing more comes of `over`."""
        if not self._batches:
            self._batches.append(self._runner.input_batch)
        for batch in self._batches:
            _leave(batch, batch.req_id_to_index.keys() & over)
        if not names:
            return
        chosen = self._chosen(names)
        if not names <= chosen.req_id_to_index.keys():
            for batch in self._batches:
                if batch is not chosen:  # there it would be out of date when it comes back
                    _leave(batch, batch.req_id_to_index.keys() & names)
        self._batches.remove(chosen)
        self._batches.append(chosen)
        self._runner.input_batch = chosen

    def _chosen(self, names: Any) -> Any:
        """The batch with most of these; of none an empty one, or the one that was used longest ago."""
        shares = [len(batch.req_id_to_index.keys() & names) for batch in self._batches]
        if best := max(shares):
            return self._batches[shares.index(best)]
        free = next((one for one in self._batches if not one.req_id_to_index), None)
        if free is None and len(self._batches) < self._most:
            free = another(self._batches[0])
            self._batches.append(free)
        return free or self._batches[0]


def another(batch: Any) -> Any:
    """An empty one like `batch`, that puts its blocks in the same place on the device.

    Captured graphs read them there. On a CPU, where that place may be the host's own copy, each has its own.
    """
    arguments, named = batch.primerl_made
    with torch.inference_mode(False):
        made = type(batch)(*arguments, **named | {"logitsprocs": None})
    tables = zip(made.block_table.block_tables, batch.block_table.block_tables, strict=True)
    for own, first in tables:
        for name, buffer in vars(first).items():
            if hasattr(buffer, "gpu") and buffer.gpu.device.type != "cpu":
                getattr(own, name).gpu = buffer.gpu
    return made


def _leave(batch: Any, names: Collection[str]) -> None:
    """Take rows out of a batch; vLLM closes the gaps, in order, when it uses the batch next."""
    for name in names:
        batch.remove_request(name)


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


def drawing(parts: Sequence[SequencePart]) -> Ints | None:
    """Which rows of a stream in the order of `parts` lead to a token; None if all do, as mostly."""
    if all(map(_only_draws, parts)):
        return None
    ends = np.cumsum([part.scheduled for part in parts]) - 1
    chosen = np.fromiter(map(draws, parts), np.bool_, len(parts))
    return ends[chosen].astype(np.int64)


def _only_draws(part: SequencePart) -> bool:
    return part.scheduled == 1 and draws(part)


def rows_of(stream: Tensor, index: Ints | None) -> Tensor:
    """Those rows; all of them for None."""
    return stream if index is None else stream.index_select(0, upload_array(index, stream.device))


class OutgoingStates:
    """States on their way to the host, not waited for yet."""

    def __init__(
        self, stream: Tensor, index: Ints | None, encoding: Encoding, *, proven: bool
    ) -> None:
        """`proven`: with fingerprints of the rows `index`, as the receiver sees them."""
        self._states = [download(one) for one in codes(stream, encoding)]
        self._projected: Tensor | None = None
        if proven:
            self._projected = download(project(rounded(rows_of(stream, index), encoding)))
        self._mark = Mark(stream.device)

    def wait(self) -> tuple[tuple[Array, ...], bytes]:
        """The tensors of a frame, and the fingerprints that its trail gets. Raises EngineError."""
        self._mark.wait()
        own = b"" if self._projected is None else pack_projected(self._projected)
        return arrays(self._states), own


class StateBuffers:
    """Buffers for arriving states, as large as the largest step: captured graphs read more rows than came."""

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

    def lay(
        self, stream: Tensor, wanted: Sequence[str], counts: Mapping[str, int]
    ) -> "IncomingStates":
        """What the runner is given for a step whose `stream` is in the order `wanted`."""
        return IncomingStates(self, stream, wanted, counts)

    def fill(self, stream: Tensor, wanted: Sequence[str], counts: Mapping[str, int]) -> Any:
        """Lay `stream` in the runner's order, which it knows by now."""
        stream = rows_of(stream, gather(wanted, order_of(self._runner), counts))
        self._stream[: len(stream)].copy_(stream)
        return self._tensors


class IncomingStates:
    """Stands where the runner wants IntermediateTensors: read when its batch is in order."""

    def __init__(
        self,
        arrivals: StateBuffers,
        stream: Tensor,
        wanted: Sequence[str],
        counts: Mapping[str, int],
    ) -> None:
        self._arrivals = arrivals
        self._stream, self._wanted, self._counts = stream, wanted, counts

    def items(self) -> Any:
        """Name and tensor."""
        return self._arrivals.fill(self._stream, self._wanted, self._counts).items()
