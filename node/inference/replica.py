"""One engine of several that share the weights: what can be asked of it, wherever it runs."""

from typing import NamedTuple, Protocol

from .engine import Completion, GenerateRequest


class Finding(NamedTuple):
    """What is wrong with a file of weights; an empty `fault` if nothing."""

    fault: str
    placeless: list[str]
    """Tensors of which no single element can be written; told with a whole state."""


class Written(NamedTuple):
    """How long no step ran, and how much of that writing took; seconds."""

    paused_s: float
    writing_s: float


class Replica(Protocol):
    """Takes files of weights (handover.py). Every method raises EngineLost once it is of no use any more."""

    async def check(self, path: str) -> Finding:
        """Whether a whole state fits; changes nothing."""
        ...

    async def load(self, version: int, path: str) -> Written:
        """Replace all weights by a state that check() found right."""
        ...

    async def stage(self, path: str) -> Finding:
        """Get an update ready beside generation."""
        ...

    async def write(self, version: int) -> Written:
        """Write the update that is ready."""
        ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion."""
        ...
