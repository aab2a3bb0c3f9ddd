"""Adaptive cap of the sequences in flight, from the engine's cache use and queue. Sans I/O.

The rules are those of prime-rl's adaptive concurrency. The cap grows only if it is what limits the engine, and
shrinks before the engine discards work: a preempted sequence is computed twice, one that waits here costs
nothing. Two rules are ours. An engine whose cache has no bound keeps the initial cap, since it shows no sign of
overload. Preemptions by a new policy version do not count as overload.
"""

from dataclasses import dataclass

from .engine import EngineStats

GROWTH = 1.25
GROW_BELOW = 0.6
"""Share of the cache in use below which there is room for more."""
BINDING = 0.9
"""Share of the cap in flight from which on the cap limits the engine, not a lack of work."""
SOFT = 0.8
HARD = 0.9
TARGET = 0.7
"""Share of the cache that the remaining sequences fill after a trim."""
QUEUED = 0.1
"""Waiting sequences per running one above which an engine is full, even with free cache."""
OVERLOAD = 0.5
OVERLOAD_POLLS = 6
OVERLOAD_CUT = 0.9
PREEMPTION_CUT = 0.8
REPEATED_CUT = 0.5
"""Factor of the cap if sequences are still preempted after a first cut."""
CALM_S = 15.0
"""Time without growth after a cut."""
BURST_S = 5.0
BURST_SHARE = 10
"""Divisor of max_inflight: in BURST_S at most this share of it (or one group) is added
beyond the sequences that surely fit."""
SETTLE_S = 2.0
"""Time after a new policy version in which the statistics are ignored."""


@dataclass(frozen=True)
class ConcurrencyLimits:
    """Range of the number of sequences in flight of one worker."""

    min_inflight: int = 1
    """Fewest, even if the engine's cache is full."""
    max_inflight: int = 1024
    """Most; equal to min_inflight, it fixes the number."""
    initial_inflight: int = 0
    """At the start; 0: as many as the engine's cache holds at full length, or its batch."""


@dataclass(frozen=True)
class Decision:
    """Result of one observation."""

    take_back: int = 0
    """Number of sequences in flight, youngest first, to stop and request again later."""
    why: str = ""
    """Reason for a change of the cap; empty if it did not change."""


NOTHING = Decision()


class Concurrency:
    """Cap of one worker, over all of its engines. Times are seconds of a monotonic clock."""

    def __init__(
        self, *, max_batch: int, max_model_len: int, limits: ConcurrencyLimits = ConcurrencyLimits()
    ) -> None:
        """`max_batch`: sequences that all engines together generate at once."""
        self._limits = limits
        self._max_batch = max_batch
        self._max_model_len = max_model_len
        self._burst = max(1, limits.max_inflight // BURST_SHARE)
        self.cap = self._clamp(limits.initial_inflight or max_batch)
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
        """Whether the limits fix the cap."""
        return self._limits.min_inflight == self._limits.max_inflight

    def groups_of(self, size: int) -> None:
        """Set the group size; a burst holds at least one whole group."""
        self._burst = max(self._burst, size)

    def finished(self) -> None:
        """Count a sequence that has ended."""
        self._finished += 1

    def room(self, inflight: int, now: float) -> int:
        """Return how many more sequences may begin now, beside the `inflight` ones."""
        if now >= self._window_ends:
            self._window_ends, self._window_base = now + BURST_S, inflight
        if self.fixed:
            return self.cap - inflight
        return min(self.cap, max(self._sure, self._window_base + self._burst)) - inflight

    def observe(self, stats: EngineStats, *, inflight: int, version: int, now: float) -> Decision:
        """Adapt the cap to the engine's statistics; called about once a second.

        `version` is the policy version that the engine holds.
        """
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
        """Once the cache size is known, begin with as many sequences as fit at full length."""
        if self._sized or not stats.kv_tokens:
            return
        self._sized = True
        self._sure = max(1, stats.kv_tokens // self._max_model_len)
        if not self._limits.initial_inflight:
            # A finished sequence stays in flight until its logprobs arrive; others take its place meanwhile.
            self.cap = self._clamp(min(self._sure, int((1 + QUEUED) * self._max_batch)))

    def _disturbed(self, stats: EngineStats, version: int, now: float) -> bool:
        """Return whether the statistics say nothing: the engine is idle, down, or has a new policy."""
        if version != self._version:
            self._version, self._settled_at = version, now + SETTLE_S
        if now >= self._settled_at and stats.running and not stats.fault:
            return False
        self._preemptions, self._suspected, self._overloaded = stats.preemptions, False, 0
        return True

    def _thrown_out(self, stats: EngineStats) -> bool:
        """Return whether the engine had preempted sequences by the previous poll.

        An engine stops all sequences before it takes a new version, so the cause is known one poll later.
        """
        before, self._suspected = self._suspected, stats.preemptions > self._preemptions
        self._preemptions = stats.preemptions
        return before

    def _trim(self, stats: EngineStats, inflight: int, now: float) -> Decision:
        """Cut the cap so that TARGET of the cache is used; above HARD, also stop sequences at once."""
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
        """Grow by a quarter, once as many sequences as the cap have ended since the last change."""
        full = stats.kv_use >= GROW_BELOW or stats.waiting > QUEUED * stats.running
        binding = inflight >= BINDING * self.cap
        calm = now >= self._cut_at + CALM_S
        if full or not binding or not calm or self._finished < self.cap:
            return NOTHING
        # more would only wait: an engine whose sequences all end at once shows no queue for a moment
        most = max(self.cap, int((1 + OVERLOAD) * self._max_batch))
        grown = min(most, max(int(GROWTH * self.cap), self.cap + 1))
        before, self.cap = self.cap, self._clamp(grown)
        self._finished = 0
        return Decision(why="the engine has room") if self.cap > before else NOTHING

    def _clamp(self, cap: int) -> int:
        return min(max(cap, self._limits.min_inflight), self._limits.max_inflight)
