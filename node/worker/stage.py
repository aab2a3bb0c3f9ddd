"""A later stage of a pipeline: its weights follow what stage 0 asks for; it takes no leases.

What a version is, the trainer says: stage 0 only names one, and what is loaded is proved as everywhere.
"""

import asyncio

from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import RunManifest
from ...protocol.messages import PrepareVersion
from ..p2p.heads import HeadBook
from ..pipeline.hosted_stage import StageEngine
from .weight_sync import CatchUp

ANSWER_S = 10.0
"""For a head, and for what it names: then stage 0 is told to ask again. Silence would mean that we are gone."""
LOOK_S = 1.0


class StageRole:
    """One later stage's loops."""

    def __init__(
        self,
        *,
        run: RunManifest,
        book: HeadBook,
        catchup: CatchUp,
        engine: StageEngine,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._answer_s = answer_s
        self._run = run
        self._book = book
        self._catchup = catchup
        self._engine = engine

    async def run(self) -> None:
        """Hold the stage until the run ends. Raises EngineError when the engine is beyond help."""
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(self._catchup.run())
            while not self._book.ended:
                if self._engine.policy_version >= self._run.max_steps:
                    await self._book.end("the run has reached its last step")
                self._engine.stats()
                await self._book.wait_news(self._book.order(), LOOK_S)
            following.cancel()

    async def prepare(self, asked: PrepareVersion) -> None:
        """Get that version ready.

        Raises:
            RemoteProtocolError: NOT_YET, ask again; ROLLBACK, this stage is further and does not go back.
        """
        order = (asked.term, asked.version)
        # only what the trainer signed: else a stage 0 that lies would send us after what never comes
        if not await self._book.wait(lambda: self._book.order() >= order, self._answer_s):
            raise RemoteProtocolError(Reason.NOT_YET, "no such version is known here yet")
        if await self._catchup.reach(order, self._answer_s):
            return
        held = self._catchup.order
        if held <= order:
            raise RemoteProtocolError(Reason.NOT_YET, "the weights are still on their way")
        if held[0] > asked.term or self._engine.policy_version != asked.version:
            raise RemoteProtocolError(Reason.ROLLBACK, f"this stage is at version {held[1]}")
