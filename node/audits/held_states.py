"""Which states the process that audits holds, by number, and how it gets those that it lacks.

A state is in a file only while it is handed over; a process that was killed takes with it what it held.
"""

from collections.abc import Mapping

from ..engines.handover import shared_file
from ..weights.state import State
from .child import AuditChild
from .frames import Hold
from .sameness import SameState


class HeldStates:
    """The states of one child, the one used last at the end."""

    def __init__(self, child: AuditChild, most: int) -> None:
        """`most` states are held, or as many as one audit needs."""
        self._child = child
        self._most = most
        self._held: dict[int, tuple[int, SameState]] = {}
        self._evict: list[int] = []
        self._next = 0

    async def provide(self, states: Mapping[int, State], timeout_s: float) -> dict[int, int]:
        """Hand over what is lacking; version -> number of every one of `states`.

        Raises what AuditChild.ask() raises, and EngineError if a state cannot be handed over.
        """
        for version, state in states.items():
            held = self._held.pop(version, None)
            if held is not None and not held[1].matches(state):
                self._evict.append(held[0])
                held = None
            self._held[version] = held or await self._hand_over(state, states, timeout_s)
        return {version: self._held[version][0] for version in states}

    async def _hand_over(
        self, state: State, needed: Mapping[int, State], timeout_s: float
    ) -> tuple[int, SameState]:
        spare = [version for version in self._held if version not in needed]
        for version in spare[: max(0, len(self._held) - self._most + 1)]:
            self._evict.append(self._held.pop(version)[0])
        number, self._next = self._next, self._next + 1
        async with shared_file(state) as path:
            await self._child.ask(Hold(number, path, self._evict), timeout_s)
        self._evict = []
        return number, SameState(state)
