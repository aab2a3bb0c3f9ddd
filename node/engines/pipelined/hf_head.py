"""Stage 0 of a pipeline, computed in this process: the engine that its node sees.

It answers like the unsharded engine, to the token: whatever breaks in the ring costs time. The thread that does
the work is hf_chain.py's.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from ...engine_config import EngineConfig
from ...errors import EngineError
from ...pipeline.place import Place
from ...pipeline.port import Port
from ...weights.state import Changed, State
from ..engine import Completion, EngineStats, GenerateRequest
from ..requests import check_request
from .fingerprinted import check_fingerprint

if TYPE_CHECKING:
    from .hf_chain import HfChain, LaneStats
    from .hf_rows import Pending
    from .slices import Prepared, Slice

logger = logging.getLogger(__name__)

STALL_S = 20.0
CLOSE_S = 10.0
QUEUE_BATCHES = 16
"""Batches that may wait; whoever asks for more is told so."""
CLOSED = "the engine is closed: start another one"


class HfPipeline:
    """Implements HeadEngine. start() first; rejoin() once the ring is whole; close() last."""

    def __init__(
        self,
        config: EngineConfig,
        place: Place,
        port_factory: Callable[[], Port],
        *,
        stall_s: float = STALL_S,
    ) -> None:
        """Nothing back for `stall_s` seconds means that the chain is of no use."""
        self._config = config
        self._place = place
        self._open_port = port_factory
        self._stall = stall_s
        self._held: Slice | None = None
        self._chain: HfChain | None = None
        self._closed = False
        self._preparing = asyncio.Lock()
        self._proofs = False
        self._prepared = False
        """Whether a version was ever prepared."""
        self._waiting: set[asyncio.Future[Pending]] = set()
        self._given = 0
        self._prompts = 0

    @property
    def policy_version(self) -> int:
        """See Engine."""
        return self._chain.version if self._chain else -1

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """See Engine. Raises EngineError too for a model that only vLLM can share."""
        if self._chain is not None or self._closed:
            raise EngineError("the engine was started before: make another one")
        check_fingerprint(fingerprint, self._place)
        self._proofs = bool(fingerprint)
        if self._place.shape.kv_tokens < self._longest:
            raise EngineError(
                f"the plan has room for {self._place.shape.kv_tokens} tokens, less than one sequence of "
                f"{self._longest}: lower engine.max_model_len"
            )
        self._held, chain = await asyncio.to_thread(self._make, model_dir)
        self._chain = chain
        chain.start()

    async def load(self, version: int, state: State) -> None:
        """See HeadEngine. A state that does not fit changes nothing."""
        await self._give(lambda held: held.prepare_load(version, state))
        logger.info("policy %d loaded", version)

    async def update(self, version: int, state: State, changed: Changed) -> None:
        """See HeadEngine. Written in place, between two micro-batches; what is refused changes nothing."""
        if not self._prepared:
            return await self.load(version, state)
        await self._give(lambda held: held.prepare_update(version, state, changed))
        logger.info("policy %d updated in place", version)

    async def generate(self, request: GenerateRequest) -> Completion:
        """See HeadEngine."""
        from .hf_rows import Pending

        chain, held = self._started()
        if not held.holds:
            raise EngineError("the engine holds no weights: load a policy version first")
        check_request(request, held.vocab_size, self._longest)
        most = QUEUE_BATCHES * self._config.max_batch
        if len(self._waiting) >= most + self._config.max_batch:
            raise EngineError(
                f"{most} requests wait already: ask for fewer at once, or raise engine.max_batch"
            )
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Pending] = loop.create_future()
        pending = Pending(
            request, min(len(request.prompt) + request.max_tokens, self._longest), done.done
        )
        pending.finished = lambda: loop.call_soon_threadsafe(_settle, done, pending)
        self._waiting.add(done)
        try:
            chain.submit(pending)
            return self._complete(await done)
        finally:
            self._waiting.discard(done)

    async def rejoin(self, epoch: int) -> None:
        """See HeadEngine."""
        from .hf_chain import Rejoin

        chain, _ = self._started()
        done: Future[None] = Future()
        chain.submit(Rejoin(epoch, done, time.monotonic() + self._stall))
        await asyncio.wrap_future(done)

    async def broken(self) -> str:
        """Wait until the chain is of no use any more; why."""
        chain, _ = self._started()
        return await asyncio.shield(asyncio.wrap_future(chain.broken))

    def lanes(self) -> "LaneStats | None":
        """How the chain is doing; None before start()."""
        return self._chain.stats if self._chain else None

    def stats(self) -> EngineStats:
        """See Engine."""
        if self._chain is None:
            return EngineStats()
        lanes = self._chain.stats
        return EngineStats(
            running=lanes.running,
            waiting=max(0, len(self._waiting) - lanes.running),
            kv_use=lanes.kv_use,
            kv_tokens=self._place.shape.kv_tokens,
            prompt_tokens=self._prompts,
            generated_tokens=lanes.generated,
        )

    async def close(self) -> None:
        """See Engine. May be called twice."""
        self._closed = True
        if self._chain is not None:
            await asyncio.to_thread(self._chain.close, CLOSE_S)
        for done in self._waiting:
            if not done.done():
                done.set_exception(EngineError(CLOSED))
        self._chain = self._held = None

    @property
    def _longest(self) -> int:
        return min(self._config.max_model_len, self._place.shape.max_model_len)

    def _make(self, model_dir: Path) -> "tuple[Slice, HfChain]":
        from .hf_chain import HfChain
        from .slices import Slice

        held = Slice(self._place, self._config.device)
        held.open(model_dir)
        return held, HfChain(
            self._place,
            held,
            self._open_port,
            _finish,
            most_rows=self._config.max_batch,
            window_s=self._config.batch_window_ms / 1000,
            stall_s=self._stall,
        )

    def _started(self) -> "tuple[HfChain, Slice]":
        if self._closed:
            raise EngineError(CLOSED)
        if self._chain is None or self._held is None:
            raise EngineError("the engine is not started: call start() first")
        if not self._chain.alive:
            raise EngineError("the engine died (its log says why): start another one")
        return self._chain, self._held

    async def _give(self, prepare: "Callable[[Slice], Prepared]") -> None:
        """Prepare, then have it written by all stages; in the order in which it was asked for."""
        from .hf_chain import Write

        async with self._preparing:
            chain, held = self._started()
            prepared = await asyncio.to_thread(prepare, held)
            self._prepared = True
            done: Future[None] = Future()
            chain.submit(Write(prepared, done))
        await asyncio.shield(asyncio.wrap_future(done))

    def _complete(self, pending: "Pending") -> Completion:
        if pending.failed:
            raise EngineError(pending.failed)
        versions = pending.versions
        self._prompts += len(pending.request.prompt)
        return Completion(
            token_ids=pending.tokens,
            logprobs=pending.logprobs,
            finish="stop" if pending.stopped else "length",
            policy_first=versions[0][1],
            policy_last=versions[-1][1],
            spans=tuple(versions) if len(versions) > 1 else (),
            proof=bytes(pending.proof) if self._proofs else b"",
            boundaries=pending.crossings.boundaries if self._proofs else (),
        )


def _finish(pending: "Pending") -> None:
    pending.finished()


def _settle(done: "asyncio.Future[Pending]", pending: "Pending") -> None:
    if not done.done():
        done.set_result(pending)
