"""Which sequences are computed together: lanes, each a micro-batch, in turns while the others are under way.

Pure bookkeeping over requests as vLLM's scheduler keeps them; it alone says what is scheduled. There may be
thousands, and each micro-batch waits for it: the members of each lane are kept, and all are walked over only
when one has left.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar


class Request(Protocol):
    """The fields of a request that are read."""

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


def rest(running: list[R], mine: Sequence[R]) -> list[R]:
    """`running` but for `mine`, in its order."""
    if running[: len(mine)] == mine:  # mostly: the lane whose turn it is was scheduled longest ago
        return running[len(mine) :]
    names = {one.request_id for one in mine}
    return [one for one in running if one.request_id not in names]


class Lanes:
    """Keep which sequence is in which lane; the scheduler reports what it does.

    From one call to the next requests may leave what runs, but they join it only by settle().
    """

    def __init__(self, count: Callable[[int], int]) -> None:
        """`count`: sequences -> number of lanes that they should have."""
        self._count = count
        self._lane: dict[str, int] = {}
        self._below = 1
        """All lanes of these are below."""
        self._members: list[list[Any]] = []
        """Of each lane, in the order in which they run; some may have left. Empty if it is not known."""
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
        members = self._look(running, lanes)
        under_way = {lane % lanes for lane, count in self._under_way.items() if count}
        for step in range(lanes):
            lane = (self._next + step) % lanes
            if lane in under_way:
                continue
            room = waiting > 0 and free > 0 and len(members[lane]) < most
            if room or any(map(is_ready, members[lane])):
                return lane
        return None

    def take(self, lane: int, running: Sequence[R], waiting: int, free: int) -> tuple[list[R], int]:
        """(its sequences, most that it may have); the next turn is another's.

        Its surplus sequences go to the smallest lanes.
        """
        lanes, most = self.target(len(running) + min(waiting, free))
        members = self._look(running, lanes)
        lane %= lanes  # their number may have changed since it was picked
        if lanes < self._below:
            self._renumber()
        self._below = lanes
        mine = members[lane]
        if len(mine) > most:
            self._even(lane, members, most)
            self._members = []  # moved sequences keep their place among those that run
        self._next = (lane + 1) % lanes
        return list(mine), most

    def settle(self, lane: int, requests: Iterable[Request]) -> None:
        """Set the members of that lane."""
        found, known = list(requests), lane < len(self._members)
        if known and found == self._members[lane]:
            return
        for one in found:
            self._lane[one.request_id] = lane
        self._below = max(self._below, lane + 1)
        if known:
            self._members[lane] = found
        else:
            self._members = []

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

    def _look(self, running: Sequence[R], lanes: int) -> list[list[R]]:
        """The members of each lane."""
        if len(self._members) != lanes or sum(map(len, self._members)) != len(running):
            found: list[list[R]] = [[] for _ in range(lanes)]
            find = self._lane.get
            for one in running:
                found[find(one.request_id, 0) % lanes].append(one)
            self._members = found
        return self._members

    def _renumber(self) -> None:
        """There are fewer lanes: all are in the one that they were counted to."""
        for lane, found in enumerate(self._members):
            for one in found:
                self._lane[one.request_id] = lane

    def _even(self, lane: int, members: list[list[R]], most: int) -> None:
        """Move the surplus of a lane that is not under way to the smallest lanes."""
        found = members[lane]
        while len(found) > most:
            smallest = min(range(len(members)), key=lambda one: len(members[one]))
            if len(members[smallest]) >= most:
                return
            moved = found.pop()
            members[smallest].append(moved)
            self._lane[moved.request_id] = smallest
