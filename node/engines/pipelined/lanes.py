"""Which sequences are computed together: lanes, each a micro-batch, in turns while the others are under way.

Pure bookkeeping over requests as vLLM's scheduler keeps them; it alone says what is scheduled.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar


class Request(Protocol):
    """What is read of a request."""

    request_id: str
    num_computed_tokens: int

    @property
    def num_tokens(self) -> int:
        """Of its prompt, and drawn."""
        ...


R = TypeVar("R", bound=Request)


def is_ready(request: Request) -> bool:
    """Whether something of it can be computed now, and it does not wait for a token."""
    return request.num_tokens > request.num_computed_tokens


class Lanes:
    """Who is in which lane; told by the scheduler what it does."""

    def __init__(self, count: Callable[[int], int]) -> None:
        """`count` says how many lanes so many sequences should have."""
        self._count = count
        self._lane: dict[str, int] = {}
        self._under_way: dict[int, int] = {}
        """Lane -> its micro-batches in flight that draw; None waits for those of parts of prompts."""
        self._next = 0

    def target(self, sequences: int) -> tuple[int, int]:
        """(how many lanes there should be, most sequences of each)."""
        lanes = max(1, self._count(max(1, sequences)))
        return lanes, -(-max(1, sequences) // lanes)

    def pick(self, running: Sequence[Request], waiting: int, free: int) -> int | None:
        """The lane whose turn it is; None if none has anything to do. Changes nothing.

        `waiting` requests could be taken in, `free` at most.
        """
        lanes, most = self.target(len(running) + min(waiting, free))
        members = self._members(running, lanes)
        for step in range(lanes):
            lane = (self._next + step) % lanes
            if self._is_under_way(lane, lanes):
                continue
            room = waiting > 0 and free > 0 and len(members[lane]) < most
            if room or any(map(is_ready, members[lane])):
                return lane
        return None

    def take(self, lane: int, running: Sequence[R], waiting: int, free: int) -> tuple[list[R], int]:
        """(its sequences, most that it may have); the next turn is another's.

        What it has too many of goes to the smallest lanes.
        """
        lanes, most = self.target(len(running) + min(waiting, free))
        members = self._members(running, lanes)
        lane %= lanes  # their number may have changed since it was picked
        for number, found in enumerate(members):
            self.settle(number, found)
        self._even(lane, members, most)
        self._next = (lane + 1) % lanes
        return members[lane], most

    def settle(self, lane: int, requests: Iterable[Request]) -> None:
        """These are in that lane now."""
        for one in requests:
            self._lane[one.request_id] = lane

    def sent(self, lane: int) -> None:
        """A micro-batch of it that draws is under way."""
        self._under_way[lane] = self._under_way.get(lane, 0) + 1

    def back(self, lane: int) -> None:
        """It is back, or will never be."""
        self._under_way[lane] -= 1

    def forget(self, known: Callable[[str], bool]) -> None:
        """Forget the sequences that are over."""
        self._lane = {name: lane for name, lane in self._lane.items() if known(name)}

    def __len__(self) -> int:
        """Sequences that are remembered."""
        return len(self._lane)

    def _is_under_way(self, lane: int, lanes: int) -> bool:
        return any(count for one, count in self._under_way.items() if one % lanes == lane)

    def _members(self, running: Sequence[R], lanes: int) -> list[list[R]]:
        found: list[list[R]] = [[] for _ in range(lanes)]
        for one in running:
            found[self._lane.get(one.request_id, 0) % lanes].append(one)
        return found

    def _even(self, lane: int, members: list[list[R]], most: int) -> None:
        """Move what is too much for a lane that is not under way to the smallest ones."""
        found = members[lane]
        while len(found) > most:
            smallest = min(range(len(members)), key=lambda one: len(members[one]))
            if len(members[smallest]) >= most:
                return
            moved = found.pop()
            members[smallest].append(moved)
            self._lane[moved.request_id] = smallest
