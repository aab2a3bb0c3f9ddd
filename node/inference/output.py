"""What a network says after a token: a file of its own, because every network makes one."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Output:
    """What a network says after the last token of B sequences."""

    hidden: Tensor | None
    """[B, d], the state that led to `logits`; None where Network.hidden() raises EngineError."""
    logits: Tensor
    """[B, V], of the next token."""
