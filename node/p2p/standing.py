"""What fetches remember of sources from one to the next: who lied, who was silent, who is reached another way.

Everything here is forgiven after a time. Time is an argument.
"""

SHUN_S = 60.0
"""For the first lie; twice as long for each further one."""
SHUN_MAX_S = 3600.0
DETOUR_S = 60.0
NO_DETOUR_S = 15.0
"""After a detour that led nowhere, or is over, the usual path is tried for so long before the next."""
REST_S = 30.0


class Standing:
    """Sources by id: node ids, and names of seeds."""

    def __init__(self) -> None:
        self._lies: dict[bytes, int] = {}
        self._shunned: dict[bytes, float] = {}
        self._detours: dict[bytes, float] = {}
        self._resting: dict[bytes, float] = {}
        self._silent: set[bytes] = set()

    def lied(self, source: bytes, now: float) -> None:
        """It gave wrong bytes, or claimed what it does not have."""
        count = self._lies[source] = self._lies.get(source, 0) + 1
        self._shunned[source] = now + min(SHUN_S * 2 ** (count - 1), SHUN_MAX_S)

    def shunned(self, source: bytes, now: float) -> bool:
        """Whether it is left out for what it did."""
        return now < self._shunned.get(source, 0.0)

    def path_failed(self, source: bytes, now: float, *, detour: bool) -> None:
        """A path to it fails, the usual one or the detour: take the other one for a while.

        Several may fail together; a usual path that was tried before the detour began says nothing of it.
        """
        if detour:
            self._detours[source] = min(now, self._detours.get(source, now))
        elif not self.detoured(source, now) and self._may_turn(source, now):
            self._detours[source] = now + DETOUR_S

    def _may_turn(self, source: bytes, now: float) -> bool:
        ended = self._detours.get(source)
        return ended is None or now >= ended + NO_DETOUR_S

    def detoured(self, source: bytes, now: float) -> bool:
        """Whether to take the other path."""
        return now < self._detours.get(source, 0.0)

    def rest(self, source: bytes, now: float) -> None:
        """It failed: leave it alone for a while."""
        self._resting[source] = now + REST_S

    def resting(self, source: bytes, now: float) -> bool:
        """Whether it is left alone."""
        return now < self._resting.get(source, 0.0)

    def silent(self, source: bytes) -> None:
        """It did not say in time what it holds: the next fetch does not wait for it."""
        self._silent.add(source)

    def spoke(self, source: bytes) -> None:
        """It said what it holds."""
        self._silent.discard(source)

    def awaited(self, source: bytes) -> bool:
        """Whether a fetch should hear it before it asks anybody else."""
        return source not in self._silent
