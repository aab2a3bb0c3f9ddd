"""What travels between stages: a head, a body, and raw tensors.

In a ring: stage 0 sends to stage 1, the last one back to stage 0. Every stage passes on what it gets, in order,
so that what stage 0 sent comes back to it as a sign that everybody has seen it. Steps are what the engine makes
of them; the rest is told here. The limits of a plan are checked on the head, before anything is allocated.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Kind(StrEnum):
    """What a frame is for."""

    RESET = "reset"
    """A chain begins: forget all sequences. Comes back once the ring is whole."""
    SWITCH = "switch"
    """Write the weights that were prepared for the version in `number`; what follows is computed by them."""
    STEP = "step"
    """A micro-batch: what to compute, and what the stage before made of it."""
    DRAWN = "drawn"
    """From the last stage: what was drawn in the micro-batch of that number."""
    FAULT = "fault"
    """A stage cannot go on; `body` says why, in words. The chain is of no use any more."""
    PING = "ping"
    """Comes back unchanged."""


@dataclass(frozen=True)
class Frame:
    """One message."""

    kind: Kind
    epoch: int
    """Of the chain; what is of an older one is dropped."""
    number: int
    """Of the micro-batch, counted by stage 0; of a SWITCH the version; of a FAULT the stage whose fault it is,
    as far as whoever tells it knows."""
    body: bytes = b""
    """What the engine wants to say, encoded by it without pickle."""
    tensors: tuple[Array, ...] = ()
    """Hidden states [tokens, width] first; bfloat16 as uint16 bits (`BITS`)."""
    trail: bytes = b""
    """Fingerprints of the boundaries so far, as boundaries.py packs them."""
    busy_us: int = 0
    """Longest time that one stage needed for this micro-batch so far, microseconds."""
    waited_us: int = 0
    """Time that it lay in the queues of stages that were busy with others."""


BITS = np.dtype(np.uint16)
"""How bfloat16 is held where numpy has none."""
