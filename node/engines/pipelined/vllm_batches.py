"""A persistent batch of vLLM's model runner for each lane.

The runner keeps the sequences of its last step as rows of a batch, so that the next step of the same ones costs
little. Lanes take turns: with one batch for all of them every row would be taken out and put in again at each
step, with all of its tokens and blocks. So each lane finds its own rows again here.

Rows of a step are in the order of its batch. Ranks that share a stage are told the same steps in the same
order, so they choose alike.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch

PLACE = "InputBatch"
"""Name in the module of vLLM's runner under which it finds the type of its batch."""


def remember_making(module: Any) -> None:
    """Have batches that `module`, the one of vLLM's runner, makes from now on know what they were made of."""
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

    install() once the runner is made; what it does then is decided at its next step.
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
