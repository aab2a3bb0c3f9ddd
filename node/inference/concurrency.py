"""How many sequences are kept in flight: a cap that follows the engine's cache and its queue. Sans I/O.

The rules are those of prime-rl's adaptive concurrency. The cap grows only where it is what holds the engine
back, and shrinks before the engine throws work away: a preempted sequence is computed twice, one that waits
with us costs nothing. Two rules are ours: an engine whose cache has no bound keeps the number that it begins
with, for it shows no sign of too much; and what a new policy version throws out of the cache is no overload.
"""

from dataclasses import dataclass

from ..config.engine import ConcurrencyConfig
from .engine import EngineStats

GROWTH = 1.25
GROW_BELOW = 0.6
"""Share of the cache in use below which there is room for more."""
BINDING = 0.9
"""Share of the cap in flight from which on the cap holds the engine back, not a lack of work."""
SOFT = 0.8
HARD = 0.9
TARGET = 0.7
"""A trim leaves as many sequences in flight as fill this share of the cache."""
QUEUED = 0.1
"""Waiting in the engine, for each that runs: with more it is full, however empty its cache."""
OVERLOAD = 0.5
OVERLOAD_POLLS = 6
OVERLOAD_CUT = 0.9
PREEMPTION_CUT = 0.8
REPEATED_CUT = 0.5
"""When sequences are still thrown out after a first cut."""
CALM_S = 15.0
"""No growth for so long after a cut."""
BURST_S = 5.0
BURST_SHARE = 10
"""In BURST_S a tenth of max_inflight (or one group) is added at most, beyond what surely fits."""
SETTLE_S = 2.0
"""For so long after a new policy version the figures say nothing."""


@dataclass(frozen=True)
class Decision:
    """What to do now."""

    take_back: int = 0
    """Number of sequences in flight, youngest first, to stop and request again later."""
    why: str = ""
    """Why the cap was changed, in words; empty if it was not."""


NOTHING = Decision()


class Concurrency:
    """The cap of one worker, over all of its engines. Times are seconds of a clock that never goes back."""

    def __init__(self, config: ConcurrencyConfig, *, max_batch: int, max_model_len: int) -> None:
        """`max_batch`: sequences that all engines together generate at once."""
        self._config = config
        self._max_batch = max_batch
        self._max_model_len = max_model_len
        self._burst = max(1, config.max_inflight // BURST_SHARE)
        self.cap = self._clamp(config.initial_inflight or max_batch)
        self._sure = self.cap
        """Sequences that fit at full length."""
        self._sized = False
        self._finished = 0
        self._overloaded = 0
        self._preemptions = 0
        self._suspected = False
        self._cut_at = float("-inf")
        self._version = -1
        self._settled_at = float("-inf")
        self._window_ends = float("-inf")
        self._window_base = 0

    @property
    def fixed(self) -> bool:
        """Whether the configuration leaves nothing to adapt."""
        return self._config.min_inflight == self._config.max_inflight

    def groups_of(self, size: int) -> None:
        """Set the group size; a burst holds at least one whole group."""
        self._burst = max(self._burst, size)

    def finished(self) -> None:
        """One sequence has ended."""
        self._finished += 1

    def room(self, inflight: int, now: float) -> int:
        """How many more may begin now, beside the `inflight` that are."""
        if now >= self._window_ends:
            self._window_ends, self._window_base = now + BURST_S, inflight
        if self.fixed:
            return self.cap - inflight
        return min(self.cap, max(self._sure, self._window_base + self._burst)) - inflight

    def observe(self, stats: EngineStats, *, inflight: int, version: int, now: float) -> Decision:
        """Look at the engine, about once a second; `version` is the policy that it holds."""
        self._size(stats)
        if self._disturbed(stats, version, now) or self.fixed or not stats.kv_tokens:
            return NOTHING
        thrown_out = self._thrown_out(stats)
        self._overloaded = self._overloaded + 1 if stats.waiting > OVERLOAD * stats.running else 0
        if stats.kv_use > SOFT:
            return self._trim(stats, inflight, now)
        if inflight > self.cap:  # the last cut has not taken effect: these statistics caused it
            return NOTHING
        if thrown_out:
            repeated = now < self._cut_at + CALM_S
            share = REPEATED_CUT if repeated else PREEMPTION_CUT
            return self._cut(int(share * min(self.cap, inflight)), now, "sequences were preempted")
        if self._overloaded >= OVERLOAD_POLLS:
            return self._cut(int(OVERLOAD_CUT * self.cap), now, "the engine's queue stays long")
        return self._grow(stats, inflight, now)

    def _size(self, stats: EngineStats) -> None:
        """Once it is known what the cache holds, begin with as many as fit at full length."""
        if self._sized or not stats.kv_tokens:
            return
        self._sized = True
        self._sure = max(1, stats.kv_tokens // self._max_model_len)
        if not self._config.initial_inflight:
            # A finished sequence stays in flight until its logprobs arrive; others take its place meanwhile.
            self.cap = self._clamp(min(self._sure, int((1 + QUEUED) * self._max_batch)))

    def _disturbed(self, stats: EngineStats, version: int, now: float) -> bool:
        """Whether the engine rests, is down, or has just got another policy: then its figures say nothing."""
        if version != self._version:
            self._version, self._settled_at = version, now + SETTLE_S
        if now >= self._settled_at and stats.running and not stats.fault:
            return False
        self._preemptions, self._suspected, self._overloaded = stats.preemptions, False, 0
        return True

    def _thrown_out(self, stats: EngineStats) -> bool:
        """Whether the engine preempted sequences by the look before this one.

        An engine stops all that it does before it takes a new version, so a look later it is known why.
        """
        before, self._suspected = self._suspected, stats.preemptions > self._preemptions
        self._preemptions = stats.preemptions
        return before

    def _trim(self, stats: EngineStats, inflight: int, now: float) -> Decision:
        """The cache is nearly full: fewer, as many as fill TARGET of it; when it is very full, at once."""
        fit = self._clamp(int(stats.running * TARGET / stats.kv_use))
        decision = self._cut(fit, now, f"{stats.kv_use:.0%} of the cache is in use")
        if stats.kv_use <= HARD:
            return decision
        return Decision(max(0, inflight - self.cap), decision.why)

    def _cut(self, cap: int, now: float, why: str) -> Decision:
        before, self.cap = self.cap, min(self.cap, self._clamp(cap))
        self._cut_at, self._finished, self._overloaded = now, 0, 0
        return Decision(why=why) if self.cap < before else NOTHING

    def _grow(self, stats: EngineStats, inflight: int, now: float) -> Decision:
        """A quarter more, when all that was in flight since the last change has come and gone."""
        full = stats.kv_use >= GROW_BELOW or stats.waiting > QUEUED * stats.running
        binding = inflight >= BINDING * self.cap
        calm = now >= self._cut_at + CALM_S
        if full or not binding or not calm or self._finished < self.cap:
            return NOTHING
        # beyond that they only wait: an engine whose sequences end all at once shows no queue for a moment
        most = max(self.cap, int((1 + OVERLOAD) * self._max_batch))
        grown = min(most, max(int(GROWTH * self.cap), self.cap + 1))
        before, self.cap = self.cap, self._clamp(grown)
        self._finished = 0
        return Decision(why="the engine has room") if self.cap > before else NOTHING

    def _clamp(self, cap: int) -> int:
        return min(max(cap, self._config.min_inflight), self._config.max_inflight)
