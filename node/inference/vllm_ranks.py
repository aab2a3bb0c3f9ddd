"""vLLM on several ranks: which of them draws, and whether what each found adds up to a model that fits.

With tensor parallelism every rank holds a part of each tensor, in a pipeline all of some. So no rank alone
can say that a tensor is nobody's: judge() hears them all.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

Shapes = dict[str, tuple[int, ...]]


class RankPlace(NamedTuple):
    """Where a rank is: ranks are numbered stage by stage (vLLM 0.25 to 0.33)."""

    first: bool
    """In the stage that reads tokens."""
    last: bool
    """In the stage that draws them."""
    collecting: bool
    """The one of these that vLLM takes its outputs from."""

    @classmethod
    def of(cls, rank: int, parallel: Any) -> "RankPlace":
        """The place of `rank`, by vLLM's parallel_config."""
        stage = int(parallel.tensor_parallel_size)
        last = stage * (int(parallel.pipeline_parallel_size) - 1)
        return cls(rank < stage, rank >= last, rank == last)


class StateCheck(NamedTuple):
    """What all ranks together say of a state."""

    fault: str
    """Why it does not fit; "" if it does."""
    placeless: frozenset[str]
    """The tensors that an update has to bring whole."""


def judge(answers: Sequence[Sequence[Any]]) -> StateCheck:
    """Of what primerl_check() answered on every rank: [fault, tensors it holds nothing of, placeless]."""
    fault = next((answer[0] for answer in answers if answer[0]), "")
    if not fault:
        nobody = set[str].intersection(*(set(answer[1]) for answer in answers))
        fault = f"tensor {min(nobody)!r} is not the model's" if nobody else ""
    return StateCheck(fault, frozenset(name for answer in answers for name in answer[2]))


def difference(known: Shapes, shapes: Shapes) -> str:
    """What is wrong with a state of these shapes where one of `known` shapes fitted; "" if nothing."""
    if missing := known.keys() - shapes.keys():
        return f"tensor {min(missing)!r} is missing"
    if extra := shapes.keys() - known.keys():
        return f"tensor {min(extra)!r} is not the model's"
    for name, shape in shapes.items():
        if shape != known[name]:
            return f"tensor {name!r} has shape {list(shape)}, the model wants {list(known[name])}"
    return ""
