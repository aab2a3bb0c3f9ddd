"""vLLM's scheduler, each call of which sees one lane: so several micro-batches are in flight.

vLLM loads this module in its engine's process; it is made there by vllm_executor.py. Blocks, prefixes,
preemption and the order of requests stay vLLM's own.
"""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler  # pyright: ignore

from .chain import Chain
from .lanes import Lanes, is_ready, rest

_Base: Any = Scheduler
_CAPS = ("max_num_running_reqs", "max_num_active_reqs")
"""Most sequences that run; the second one is not in all releases."""
_FORGET_FROM = 256


class LaneScheduler(_Base):
    """One lane a call, in turns; nothing while the pipeline is broken."""

    def __init__(self, *arguments: Any, chain: Chain, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._chain = chain
        self._lanes = Lanes(chain.lanes)
        self._flying: dict[int, int | None] = {}
        """What was scheduled and is not back: its lane, if it draws."""
        self._tried = False
        """Whether nothing could be scheduled since something came back."""
        self._picked: tuple[tuple[int, int, int], int | None] | None = None
        """(what it was picked from, the lane): vLLM asks has_requests() twice before each schedule()."""
        self._said = False
        """What has_requests() answered last."""
        self._hushed = False
        """Whether it is asked next by who would sleep."""

    def has_requests(self) -> bool:
        """Whether schedule() should be called: else vLLM waits for what is in flight, or for news.

        A step that only took a result in asks once more, to sleep a millisecond if there is work: that is
        answered by no. While something is in flight a no never makes vLLM wait for news alone.
        """
        hushed, self._hushed = self._hushed, False
        self._said = not hushed and self._has_work()
        return self._said

    def _has_work(self) -> bool:
        if not self._chain.whole:
            return False
        if not super().has_requests():
            return False
        return not self._flying or (not self._tried and self._pick() is not None)

    def schedule(self, *arguments: Any, **named: Any) -> Any:
        """A micro-batch of the lane whose turn it is; an empty one if none can do anything."""
        waiting, free = self._room()
        lane, self._picked = self._pick(), None
        mine: list[Any] = []
        most = 0
        running: list[Any] = self.running
        if lane is not None:
            mine, most = self._lanes.take(lane, running, waiting, free)
        others = rest(running, mine)
        caps = {name: getattr(self, name) for name in _CAPS if hasattr(self, name)}
        for name in caps:
            setattr(self, name, max(len(mine), min(most, free + len(mine))))
        self.running = mine
        # ranks keep each lane's sequences (vllm_batches.py): else vLLM would send all their tokens every time
        self.prev_step_scheduled_req_ids = {one.request_id for one in mine}
        try:
            output = super().schedule(*arguments, **named)
        finally:
            for name, cap in caps.items():
                setattr(self, name, cap)
            mine, self.running = self.running, others + self.running
        self._note(lane, mine, output)
        return output

    def update_from_output(self, scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
        """What was drawn has come."""
        lane = self._flying.pop(id(scheduler_output), None)
        if lane is not None:
            self._lanes.back(lane)
        self._tried, self._picked = False, None
        self._hushed = not self._said and bool(self._flying)
        if len(self._lanes) > _FORGET_FROM + 2 * len(self.requests):
            self._lanes.forget(self.requests.__contains__)
        return super().update_from_output(scheduler_output, *arguments, **named)

    def _pick(self) -> int | None:
        now = (len(self.running), *self._room())
        if self._picked is None or self._picked[0] != now:
            self._picked = now, self._lanes.pick(self.running, *now[1:])
        return self._picked[1]

    def _room(self) -> tuple[int, int]:
        """(requests that wait, how many more may run)."""
        waiting: int = self.get_request_counts()[1]
        return waiting, self.max_num_running_reqs - len(self.running)

    def _note(self, lane: int | None, mine: list[Any], output: Any) -> None:
        scheduled = output.num_scheduled_tokens
        if lane is None or not scheduled:
            self._tried = True
            return
        self._lanes.settle(lane, mine)
        draws = any(one.request_id in scheduled and not is_ready(one) for one in mine)
        self._flying[id(output)] = lane if draws else None
        if draws:
            self._lanes.sent(lane)
