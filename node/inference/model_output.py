"""What a network says after a token: a file of its own, because every network makes one."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class LayerHooks(Protocol):
    """Sees the residual stream on its way up."""

    @property
    def layers(self) -> frozenset[int]:
        """Layer counts after which take() is called: at least 1, fewer than the model has."""
        ...

    def take(self, layer: int, x: Tensor) -> Tensor:
        """Read the residual stream `x` [T, d] after `layer` layers; return `x` or its replacement.

        `x` is overwritten afterwards. A network may call several times for one pass, each time for the
        tokens after the last ones, and may not be able to go on with something else: see Network.packed().
        """
        ...


class RouterHooks(Protocol):
    """Sees what the routers of a mixture of experts choose."""

    def take(self, layer: int, scores: Tensor, own: Tensor) -> None:
        """Read the scores [T, E] by which layer number `layer` of those with experts ranks them, and its choice
        `own` [T, k].

        A network may call several times for one pass, each time for the tokens after the last ones.
        """
        ...


@dataclass(frozen=True)
class ModelOutput:
    """What a network says after the last token of B sequences."""

    hidden: Tensor | None
    """[B, d], the state that led to `logits`; None where Network.hidden() raises EngineError."""
    logits: Tensor
    """[B, V], of the next token."""
    routes: Tensor | None = None
    """[B, layers with experts, k], the experts that read that token; None where they were not asked for."""
