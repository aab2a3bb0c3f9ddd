"""Recognises a state that was seen before by its tensors themselves, without keeping any of them alive.

Equal bits in other objects count as another state: that costs time, never a wrong answer.
"""

import weakref

from ..weights.state import State


class SameState:
    """Remembers which tensor objects a state held."""

    def __init__(self, state: State) -> None:
        self._tensors = {name: weakref.ref(tensor) for name, tensor in state.items()}

    def matches(self, state: State) -> bool:
        """Whether `state` holds exactly these objects, all still alive."""
        seen = self._tensors
        return seen.keys() == state.keys() and all(seen[name]() is state[name] for name in state)
