"""A stage of a pipeline behind stage 0, computed in this process: an engine that prepares, and serves its port.

load() and update() only prepare: the weights change when a SWITCH comes down the ring, between two
micro-batches. Before the first chain there is nobody to wait for, and they take effect at once.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...engine_config import EngineConfig
from ...errors import EngineError
from ...pipeline.frame import Frame
from ...pipeline.place import Place
from ...pipeline.port import Port, PortClosed
from ...pipeline.stage_loop import LoopStats, serve
from ...weights.state import Changed, State
from ..engine import Completion, EngineStats, GenerateRequest
from .fingerprinted import check_fingerprint

if TYPE_CHECKING:
    from .hf_compute import HfCompute
    from .slices import Prepared, Slice

logger = logging.getLogger(__name__)

MOST_READY = 3
"""Versions that wait for their SWITCH; of more the oldest can only be passed through."""
AGAIN_S = 0.3
"""Before the port is opened again."""
CLOSE_S = 10.0
CLOSED = "the stage is closed: start another one"


@dataclass
class Ready:
    """A version that waits, and what to write for it, in order."""

    version: int
    parts: "list[Prepared]"


class Versions:
    """What is in effect and what is ready; for two threads. No version is written while a step runs."""

    def __init__(self, held: "Slice") -> None:
        self._held = held
        self._lock = threading.Lock()
        self._ready: list[Ready] = []
        self._begun = False
        self.current = -1
        self.prepared = -1

    def begin(self) -> None:
        """A chain begins: from now on SWITCH says when."""
        with self._lock:
            self._begun = True

    def add(self, prepared: "Prepared") -> None:
        """`prepared` follows what was prepared last."""
        with self._lock:
            self.prepared = prepared.version
            if not self._begun or self.current < 0:
                self._held.write(prepared)
                self.current = prepared.version
                return
            self._ready.append(Ready(prepared.version, [prepared]))
            if len(self._ready) > MOST_READY:
                oldest, next_one = self._ready[:2]
                if next_one.parts[0].network is None:
                    next_one.parts = oldest.parts + next_one.parts
                del self._ready[0]

    def switch(self, version: int) -> None:
        """Write everything up to `version`. Raises EngineError if it is not ready."""
        with self._lock:
            found = [at for at, one in enumerate(self._ready) if one.version == version]
            if not found and version == self.current:
                return
            if not found:
                ready = ", ".join(str(one.version) for one in self._ready) or "none"
                raise EngineError(
                    f"this stage computes by version {self.current} and has ready {ready}, "
                    f"not {version}: prepare it"
                )
            for one in self._ready[: found[0] + 1]:
                for part in one.parts:
                    self._held.write(part)
            del self._ready[: found[0] + 1]
            self.current = version
        logger.info("policy %d in effect", version)


class _Serving:
    """StageCompute of a stage."""

    def __init__(self, compute: "HfCompute", versions: Versions) -> None:
        self._compute = compute
        self._versions = versions

    def reset(self) -> None:
        self._versions.begin()
        self._compute.reset()

    def switch(self, version: int) -> None:
        self._versions.switch(version)

    def step(self, frame: Frame) -> Frame:
        return self._compute.step(frame)


class HfStage:
    """Implements StageEngine. start() begins to serve, close() ends it."""

    def __init__(
        self, config: EngineConfig, place: Place, port_factory: Callable[[], Port]
    ) -> None:
        self._config = config
        self._place = place
        self._open_port = port_factory
        self._versions: Versions | None = None
        self._held: Slice | None = None
        self._thread: threading.Thread | None = None
        self._port: Port | None = None
        self._closing = threading.Event()
        self._preparing = asyncio.Lock()
        self.loop_stats = LoopStats()

    @property
    def policy_version(self) -> int:
        """The version in effect; see StageEngine."""
        return self._versions.current if self._versions else -1

    @property
    def prepared(self) -> int:
        """See StageEngine."""
        return self._versions.prepared if self._versions else -1

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """See Engine."""
        if self._thread is not None:
            raise EngineError("the stage was started before: make another one")
        check_fingerprint(fingerprint, self._place)
        self._thread = thread = threading.Thread(
            target=self._serve, name=f"hf stage {self._place.rank}", daemon=True
        )
        await asyncio.to_thread(self._open, model_dir)
        thread.start()

    async def load(self, version: int, state: State) -> None:
        """Prepare; see StageEngine."""
        async with self._preparing:
            versions, held = self._started()
            versions.add(await asyncio.to_thread(held.prepare_load, version, state))
        logger.info("policy %d ready", version)

    async def update(self, version: int, state: State, changed: Changed) -> None:
        """Prepare; see StageEngine."""
        async with self._preparing:
            versions, held = self._started()
            if versions.prepared < 0:
                prepared = await asyncio.to_thread(held.prepare_load, version, state)
            else:
                prepared = await asyncio.to_thread(held.prepare_update, version, state, changed)
            versions.add(prepared)
        logger.info("policy %d ready", version)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Raises EngineError: stage 0 answers requests."""
        raise EngineError("this is not the first stage of its pipeline: ask that one")

    def stats(self) -> EngineStats:
        """See Engine; what it is busy with is stage 0's business."""
        return EngineStats()

    async def close(self) -> None:
        """See Engine. May be called twice."""
        self._closing.set()
        if self._port is not None:
            self._port.close()
        thread = self._thread
        if thread is not None and thread.is_alive():
            await asyncio.to_thread(thread.join, CLOSE_S)
        self._versions = self._held = None

    def _open(self, model_dir: Path) -> None:
        from .slices import Slice

        held = Slice(self._place, self._config.device)
        held.open(model_dir)
        self._held, self._versions = held, Versions(held)

    def _started(self) -> "tuple[Versions, Slice]":
        if self._closing.is_set():
            raise EngineError(CLOSED)
        if self._versions is None or self._held is None or self._thread is None:
            raise EngineError("the stage is not started: call start() first")
        if not self._thread.is_alive():
            raise EngineError("the stage died (its log says why): start another one")
        return self._versions, self._held

    def _serve(self) -> None:
        """In a thread of its own: one port after the other, until close()."""
        from .hf_compute import HfCompute

        assert self._held is not None  # start() makes both before it starts this
        assert self._versions is not None
        serving = _Serving(HfCompute(self._place, self._held), self._versions)
        while not self._closing.is_set():
            try:
                self._port = port = self._open_port()
            except PortClosed as error:
                logger.debug("no port yet: %s", error)
                self._closing.wait(AGAIN_S)
                continue
            if self._closing.is_set():
                port.close()
            serve(port, serving, rank=self._place.rank, stats=self.loop_stats)
            self._closing.wait(AGAIN_S)
