"""The engines of a pipeline: what the node that supervises the ring asks of them beyond the engine seam.

Neither knows the network: frames come and go at a Port, and the node says when a chain begins anew.
"""

from typing import Protocol, runtime_checkable

from ..engine import Engine


class HeadEngine(Engine, Protocol):
    """The engine of stage 0: it schedules, and answers requests.

    While the ring is down generate() waits, and load() and update() at most until the next rejoin(); before
    the first they take effect at once. `stats().fault` stays empty meanwhile: nothing is lost.
    """

    async def rejoin(self, epoch: int) -> None:
        """The ring is whole again: reset it, bring all stages to one version, replay what is in flight.

        Raises EngineLost or EngineError if that failed: it may be tried again with a newer epoch.
        """
        ...


class StageEngine(Engine, Protocol):
    """The engine of a later stage: load() and update() only prepare, the switch comes down the ring.

    Before its first chain they take effect at once. generate() raises EngineError.
    """


class Lanes(Protocol):
    """How the work of stage 0 is cut."""

    @property
    def lanes(self) -> int:
        """Micro-batches that the sequences are cut into just now."""
        ...

    @property
    def in_flight(self) -> int:
        """Micro-batches that are under way."""
        ...

    @property
    def stall_share(self) -> float | None:
        """Share of its time that the slowest stage waits, 0 to 1; None where nobody measures it."""
        ...


@runtime_checkable
class Laned(Protocol):
    """A head that tells of its micro-batches."""

    def lanes(self) -> Lanes | None:
        """Of now; None before start()."""
        ...
