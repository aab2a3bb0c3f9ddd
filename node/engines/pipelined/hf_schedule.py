"""Who is in which lane, and which micro-batch comes next: the books of stage 0, without torch or threads.

A request knows all that was drawn for it; everything else can be thrown away and made again from that, see
replay(). New ones are read in a lane of their own, then go on in it or are put into one that is there.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import ceil

from ....protocol.pipelines import PipelineShape
from .hf_rows import Arrival, Lane, Newcomers, Pending, Step, draws_of, fills_of
from .lane_step import NOTHING, LaneStep, Taken

COMPACT_AT = 0.75
"""Share of unfinished rows at which finished ones are dropped; copying the cache costs about a step."""


class Schedule:
    """The books. `most_rows` sequences at a time; one thread."""

    def __init__(self, shape: PipelineShape, most_rows: int) -> None:
        self._shape = shape
        self._most_rows = most_rows
        self.waiting: deque[Pending] = deque()
        self._lanes: list[Lane] = []
        self._turns: deque[Lane | Newcomers] = deque()
        """What can be sent, in turn."""
        self._reading: list[Newcomers] = []
        self._over: list[int] = []
        self._retired: list[Lane] = []
        """Lanes that are over, but for what they draw just now."""
        self._number = NOTHING

    @property
    def lanes(self) -> int:
        """How many draw, or soon will."""
        return len(self._lanes)

    @property
    def running(self) -> int:
        """Requests under way that somebody waits for."""
        return sum(one.open for one in self._under_way())

    @property
    def kv_tokens(self) -> int:
        """Tokens of cache that are spoken for."""
        lanes = sum(lane.cost() for lane in self._lanes)
        return lanes + sum(one.cost for one in self._reading)

    def add(self, sequence: Pending) -> None:
        """Another request, behind those that wait."""
        self.waiting.append(sequence)

    def fail(self, rows: Sequence[Pending], why: str) -> None:
        """None of these can be answered."""
        for one in rows:
            one.failed = one.failed or why

    def replay(self) -> int:
        """The stages have forgotten everything: all that was under way waits again, first. How many."""
        again = [one for one in self._under_way() if one.open]
        self._lanes.clear()
        self._turns.clear()
        self._reading.clear()
        self._over.clear()
        self._retired.clear()
        self.waiting.extendleft(reversed(again))
        return len(again)

    def renew(self) -> None:
        """The weights are others: all that was under way is read again by these, in new lanes.

        What is being drawn by the old ones still counts; its rows wait again when it is back.
        """
        again = [*self._idle()]
        for lane in list(self._lanes):
            self._end(lane)
            if lane.drawing:
                self._retired.append(lane)
        self._over.extend(one.number for one in self._reading if one.begun)
        self._turns.clear()
        self._reading.clear()
        self.waiting.extendleft(reversed(again))

    def drop_all(self) -> list[Pending]:
        """Forget every request; those that there were."""
        found = [*self._under_way(), *self.waiting]
        self.replay()
        self.waiting.clear()
        return found

    # -- letting in ---------------------------------------------------------------------------------

    def admit(self, lanes_for: Callable[[int], int]) -> None:
        """Begin with as many of those that wait as there is room for, in as many lanes as `lanes_for` rows."""
        while self.waiting and not self.waiting[0].open:
            self.waiting.popleft()
        if not self.waiting:
            return
        self._drop_finished()
        running = self._size()
        while self.waiting and running < self._most_rows:
            rows = min(self._most_rows, running + len(self.waiting))
            lanes = self._wanted(rows, lanes_for)
            share = ceil(rows / lanes)
            target = self._smallest() if len(self._lanes) >= lanes else None
            taken = target.size if target else 0
            count = min(len(self.waiting), self._most_rows - running, max(1, share - taken))
            let_in = self._fitting(target, count)
            if not let_in:
                return
            self._begin(let_in, target)
            running += len(let_in)

    def _wanted(self, rows: int, lanes_for: Callable[[int], int]) -> int:
        """Lanes for so many rows: no lane may have more than a micro-batch takes."""
        return max(1, lanes_for(rows), ceil(rows / self._shape.max_step_tokens))

    def _smallest(self) -> Lane:
        return min(self._lanes, key=lambda lane: lane.size)

    def _size(self) -> int:
        """Rows in lanes, or soon to be."""
        return sum(lane.size for lane in self._lanes) + sum(len(one.rows) for one in self._retired)

    def _fitting(self, target: Lane | None, count: int) -> list[Pending]:
        """Up to `count` of those that wait longest, as many as there is cache for."""
        chosen: list[Pending] = []
        free = self._shape.kv_tokens - self.kv_tokens
        while self.waiting and len(chosen) < count:
            sequence = self.waiting[0]
            if not sequence.open:
                self.waiting.popleft()
                continue
            more = [*chosen, sequence]
            cost = len(more) * max(one.end for one in more)
            if target is not None:
                width = max(len(one.known) for one in more) + 1
                cost = target.cost(more) - target.cost() + len(more) * width
            if cost > free:
                break
            chosen.append(self.waiting.popleft())
        return chosen

    def _begin(self, sequences: list[Pending], target: Lane | None) -> None:
        prompts = {
            known: row for row, known in enumerate(dict.fromkeys(s.known for s in sequences))
        }
        self._number += 1
        newcomers = Newcomers(
            self._number,
            sequences,
            [prompts[one.known] for one in sequences],
            deque(fills_of(list(prompts), self._shape.max_step_tokens)),
            max(map(len, prompts)) + 1,
            len(prompts),
            target,
        )
        if target is None:
            self._lanes.append(Lane(self._number, [], coming=list(sequences), reading=True))
        else:
            target.coming.extend(sequences)
        self._reading.append(newcomers)
        self._turns.append(newcomers)

    # -- sending ------------------------------------------------------------------------------------

    def next(self, lanes_for: Callable[[int], int]) -> Step | None:
        """The micro-batch to send now; None if everything is on its way."""
        while self._turns:
            turn = self._turns.popleft()
            if isinstance(turn, Newcomers):
                if turn.fills:
                    self._turns.append(turn)
                    return self._read(turn)
                self._arrive(turn)
                continue
            step = self._draw(turn, lanes_for)
            if step is not None:
                return step
        return None

    def drawn(self, lane: Lane) -> None:
        """What `lane` drew is back."""
        lane.drawing = False
        if lane in self._lanes:
            self._turns.append(lane)
        elif lane in self._retired:
            self._retired.remove(lane)
            self.waiting.extendleft(one for one in reversed(lane.rows) if one.open)

    def _read(self, newcomers: Newcomers) -> Step:
        fill, tokens = newcomers.fills.popleft()
        own = self._own_lane(newcomers)
        rows = newcomers.sequences if own else ()
        slots = max([newcomers.width, *(one.end for one in rows)])
        taken = () if newcomers.begun else (Taken(NOTHING, (0,) * newcomers.prompts),)
        newcomers.begun = True
        step = LaneStep(newcomers.number, slots, taken=taken, over=self._ended(), fill=fill)
        return Step(step, tokens, (), None)

    def _own_lane(self, newcomers: Newcomers) -> Lane | None:
        """The lane that they will draw in, if it is theirs."""
        return next((one for one in self._lanes if one.number == newcomers.number), None)

    def _arrive(self, newcomers: Newcomers) -> None:
        """All is read: they draw from now on."""
        self._reading.remove(newcomers)
        lane = newcomers.target or self._own_lane(newcomers)
        assert lane is not None  # a lane lives as long as somebody is to come into it
        own, arrived = newcomers.target is None, set(newcomers.sequences)
        number = newcomers.number if newcomers.begun else NOTHING
        rows = newcomers.owners if newcomers.begun else [0] * len(arrived)
        arrival = Arrival(
            number, rows, newcomers.sequences, new=True, ends=newcomers.begun and not own
        )
        lane.coming = [one for one in lane.coming if one not in arrived]
        lane.arrivals.insert(0 if own else len(lane.arrivals), arrival)
        lane.reading = lane.reading and not own
        if not lane.drawing and lane not in self._turns:
            self._turns.append(lane)

    def _draw(self, lane: Lane, lanes_for: Callable[[int], int]) -> Step | None:
        rows = [at for at, one in enumerate(lane.rows) if one.open]
        if lane.reading:
            return None
        if not rows and not lane.arrivals:
            if not lane.coming:
                self._end(lane)
            return None
        if lane.keep is None and not lane.arrivals:
            wanted = self._wanted(self._size(), lanes_for)
            if len(self._lanes) > wanted and self._give_away(lane, rows):
                return None
            if len(self._lanes) < wanted and self._may_be_cut(lane, rows):
                return self._cut(lane, rows)
        return self._send(lane, rows)

    def _send(self, lane: Lane, rows: list[int]) -> Step:
        """One token of every row, those that arrive included."""
        keep = lane.keep
        lane.keep = None
        crowded = lane.arrivals or len(rows) <= COMPACT_AT * len(lane.rows)
        if keep is None and crowded and len(rows) < len(lane.rows):
            keep = rows
            lane.rows = [lane.rows[at] for at in rows]
        draws, taken = None, list[Taken]()
        for arrival in lane.arrivals:
            how = draws_of(arrival.sequences) if arrival.new else None
            if arrival.lane == lane.number:  # read in this very lane: there is nothing else in it
                keep, draws = arrival.rows, how
            else:
                taken.append(Taken(arrival.lane, tuple(arrival.rows), how))
            if arrival.ends:
                self._over.append(arrival.lane)
            lane.rows.extend(arrival.sequences)
        lane.arrivals.clear()
        lane.drawing = True
        slots = max(one.end for one in lane.rows)
        step = LaneStep(
            lane.number,
            slots,
            None if keep is None else tuple(keep),
            draws,
            tuple(taken),
            self._ended(),
        )
        return Step(step, [one.last for one in lane.rows], tuple(lane.rows), lane)

    def _ended(self) -> tuple[int, ...]:
        over = tuple(self._over)
        self._over.clear()
        return over

    def _end(self, lane: Lane) -> None:
        self._lanes.remove(lane)
        self._over.append(lane.number)
        self._over.extend(one.lane for one in lane.arrivals if one.ends)

    # -- more lanes, fewer lanes --------------------------------------------------------------------

    def _give_away(self, lane: Lane, rows: list[int]) -> bool:
        """Put all rows of `lane` into the smallest other one, if one can take them: it is over then."""
        others = [one for one in self._lanes if one is not lane]
        if not others or lane.coming:
            return False
        other = min(others, key=lambda one: one.size)
        moved = [lane.rows[at] for at in rows]
        if other.size + len(moved) > self._shape.max_step_tokens:
            return False
        if other.cost(moved) - other.cost() > self._shape.kv_tokens - self.kv_tokens:
            return False
        other.arrivals.append(Arrival(lane.number, rows, moved, new=False, ends=True))
        self._lanes.remove(lane)
        if not other.drawing and other not in self._turns:
            self._turns.append(other)
        return True

    def _may_be_cut(self, lane: Lane, rows: list[int]) -> bool:
        """In two: if there is room for a copy, and it is none of the small ones."""
        fits = lane.cost() <= self._shape.kv_tokens - self.kv_tokens
        return fits and len(rows) > 1 and len(rows) * len(self._lanes) >= self._size()

    def _cut(self, lane: Lane, rows: list[int]) -> Step:
        """Half of the rows go on in another lane, which is sent first; then the rest."""
        half = (len(rows) + 1) // 2
        stay, leave = rows[:half], rows[half:]
        self._number += 1
        moved = [lane.rows[at] for at in leave]
        other = Lane(self._number, [])
        other.arrivals.append(Arrival(lane.number, leave, moved, new=False, ends=False))
        lane.keep, lane.rows = stay, [lane.rows[at] for at in stay]
        self._lanes.append(other)
        self._turns.appendleft(lane)
        return self._send(other, [])

    def _under_way(self) -> Iterator[Pending]:
        for lane in self._lanes:
            yield from lane.planned
        for lane in self._retired:
            yield from lane.rows

    def _idle(self) -> Iterator[Pending]:
        """Those of lanes that are not being drawn just now."""
        for lane in self._lanes:
            rows = lane.planned[len(lane.rows) :] if lane.drawing else lane.planned
            yield from (one for one in rows if one.open)

    def _drop_finished(self) -> None:
        """Lanes in which nobody is left, where nothing of them is on its way."""
        for lane in list(self._lanes):
            if not lane.drawing and not any(one.open for one in lane.planned) and not lane.coming:
                self._end(lane)
                if lane in self._turns:
                    self._turns.remove(lane)
