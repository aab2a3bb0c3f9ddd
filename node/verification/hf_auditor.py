"""An Auditor that prefills in a child process, killed if it hangs or runs out of memory.

A fault in the process costs at most the item that caused it: the others are still measured.
"""

import asyncio
import dataclasses
import itertools
import logging
import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Literal

from ...protocol.audits import audited_versions
from ...protocol.manifests import RunManifest
from ..config.engine import EXACT_NEEDS_VLLM, KEPT_NEEDS_VLLM, EngineConfig
from ..config.sandbox import WorkerSandboxConfig
from ..environments.confine import protect_node
from ..environments.sandbox import Sandbox
from ..errors import EngineError
from ..gpus import usable
from ..inference.handover import shared_file
from ..models.model_files import vocab_size
from ..process.child_process import REST_S, ChildProcess
from ..process.spawn import PARENT_VARIABLE, without_secrets
from ..tasks import end_tasks
from ..weights.state import State
from ..weights.state_history import WHOLE
from .audit_process import (
    MAX_FRAME,
    REPLIES,
    AuditError,
    AuditProcessReply,
    AuditProcessRequest,
    AuditSetUp,
    HoldState,
    MeasuredItems,
    MeasureItems,
    ReadingsOfItems,
    ReadItems,
)
from .auditor import (
    AuditItem,
    Measured,
    Reading,
    SameState,
    Unreadable,
    audit_terms,
    check_model_routes,
    check_versions,
)
from .local_audits import AuditFailed, Portions, prefill_costs

logger = logging.getLogger(__name__)

PROGRAM = (sys.executable, "-P", "-m", f"{__package__}.audit_process")
LIMITS = WorkerSandboxConfig(type="limits", memory_gib=2.0**20)
"""No sockets and no processes; the memory that an audit needs is planned, not limited."""
AMD = Path("/dev/kfd")
"""Device of AMD's GPUs, which torch may use."""
START_TIMEOUT_S = 120.0
"""Time for loading torch and for the first use of a device."""


class AuditChild(ChildProcess):
    """Audit process (audit_process.py): spawn(), ask(), kill().

    After AuditFailed, or if its answer is no longer waited for, kill() it: it may still be busy.
    """

    Error = EngineError
    Lost = AuditFailed
    answers = REPLIES
    max_frame = MAX_FRAME
    log_level = logging.WARNING

    def __init__(self, program: Sequence[str] = PROGRAM, *, confined: bool = True) -> None:
        """Prepare to run `program`; `confined`: without sockets, and without the node's memory and signals."""
        environment = without_secrets(os.environ) | {PARENT_VARIABLE: str(os.getpid())}
        if confined:
            start = Sandbox(LIMITS).start(program)
            program, environment = start.command, environment | start.variables
            protect_node()
        super().__init__("audit process", "the process that audits", program, environment)

    async def ask(self, request: AuditProcessRequest, timeout_s: float) -> AuditProcessReply:
        """Send a request and return the answer.

        Raises AuditFailed, also after `timeout_s`, and EngineError if it can never answer.
        """
        try:
            answer: AuditProcessReply = await self._answer(request, timeout_s)
        except ValueError as error:
            raise AuditFailed(f"too much for one audit ({error})") from error
        if isinstance(answer, AuditError):
            raise (EngineError if answer.always else AuditFailed)(answer.detail)
        return answer


class HeldStates:
    """States that a process holds, by number; the most recently used one is last."""

    def __init__(self, child: AuditChild, most: int) -> None:
        """Hold up to `most` states, or as many as one audit needs.

        A state is in a file only during its handover.
        """
        self._child = child
        self._most = most
        self._held: dict[int, tuple[int, SameState]] = {}
        self._evict: list[int] = []
        self._numbers = itertools.count()

    async def provide(self, states: Mapping[int, State], timeout_s: float) -> dict[int, int]:
        """Hand over the states that the process lacks; return the number of each version.

        Raises the errors of AuditChild.ask(), and EngineError if a state cannot be handed over.
        """
        for version, state in states.items():
            entry = self._held.pop(version, None)
            if entry is not None and not entry[1].matches(state):
                self._evict.append(entry[0])
                entry = None
            self._held[version] = entry or await self._hand_over(state, states, timeout_s)
        return {version: self._held[version][0] for version in states}

    async def _hand_over(
        self, state: State, needed: Mapping[int, State], timeout_s: float
    ) -> tuple[int, SameState]:
        spare = [version for version in self._held if version not in needed]
        for version in spare[: max(0, len(self._held) - self._most + 1)]:
            self._evict.append(self._held.pop(version)[0])
        number = next(self._numbers)
        async with shared_file(state) as path:
            await self._child.ask(HoldState(number, path, self._evict), timeout_s)
        self._evict = []
        return number, SameState(state)


class HfAuditor:
    """An Auditor with the embedded engine's networks, in a child process started when needed."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        timeout_s: float,
        threads: int = 0,
        program: Sequence[str] = PROGRAM,
        dtype: Literal["", "float32"] = "",
        ahead: bool = False,
    ) -> None:
        """Take the config; `timeout_s` is for a portion of an audit.

        `threads` of torch, 0 leaves its choice. `dtype` to compute in; empty: the run's. `ahead`: start()
        begins to start the process, which the first audit needs.
        """
        self._dtype = dtype
        self._ahead = ahead
        self._warming: asyncio.Task[None] | None = None
        self._config = config
        self._timeout_s = timeout_s
        self._threads = threads
        self._program = program
        self._setup: AuditSetUp | None = None
        self._most_states = 0
        self._running: tuple[AuditChild, HeldStates] | None = None
        self._busy = asyncio.Lock()
        self._resting: asyncio.Task[None] | None = None
        self._portions = Portions(timeout_s)
        self._closed = False
        self.loading_s = 0.0
        """See Auditor: the process holds several."""

    @property
    def pid(self) -> int | None:
        """Id of the audit process; None while there is none."""
        return self._running[0].pid if self._running else None

    async def start(self, model_dir: Path, run: RunManifest) -> None:
        """See Auditor. The process starts with the first audit, or in the background."""
        if self._setup is not None:
            raise EngineError("the auditor was started before: make another one")
        if run.proofs.numerics == "exact":
            # decoding and prefill of this engine differ in their last bits
            raise EngineError(EXACT_NEEDS_VLLM)
        if run.proofs.kv_cache == "kept" and not self._dtype:  # a reading is of one version
            raise EngineError(KEPT_NEEDS_VLLM)
        if not self._dtype:
            await check_model_routes(model_dir, run)
        await asyncio.to_thread(vocab_size, model_dir)
        terms = audit_terms(model_dir, run, self._config.device)
        if self._dtype:
            terms = dataclasses.replace(terms, dtype=self._dtype)
        self._setup = AuditSetUp(terms, self._threads)
        # up to the number that the trainer holds whole: older ones are handed over again when they are needed
        self._most_states = min(audited_versions(run.limits.max_off_policy_steps), WHOLE + 1)
        if self._ahead:
            self.begin()

    def begin(self) -> None:
        """Begin to start the process in the background, after start(), unless it runs or starts."""
        if self._running is None and (self._warming is None or self._warming.done()):
            self._warming = asyncio.create_task(self._warm_up(), name="auditor start")

    async def audit(
        self,
        items: Sequence[AuditItem],
        states: Mapping[int, State],
    ) -> list[Measured | Unreadable]:
        """See Auditor. One audit runs at a time, the others wait."""
        check_versions(items, states)
        async with self._turn():
            return await self._portions.measure(
                items, prefill_costs(items), lambda part: self._attempt(part, states)
            )

    async def read(
        self, items: Sequence[AuditItem], states: Mapping[int, State]
    ) -> list[Reading | Unreadable]:
        """Read items as a worker of this dtype would claim them; see reader.py.

        Raises EngineError, also if the process fails at it twice; `timeout_s` is for all items.
        """
        check_versions(items, states)
        async with self._turn():
            for _ in range(2):
                with suppress(AuditFailed):
                    reply = await self._ask(items, states, ReadItems)
                    if isinstance(reply, ReadingsOfItems) and len(reply.answers) == len(items):
                        return reply.answers
                await self._drop()
        raise EngineError(f"the process that audits does not read {len(items)} items")

    async def rest(self) -> None:
        """End the process, and free its memory, until it is needed again."""
        async with self._busy:
            await self._drop()

    async def close(self) -> None:
        """See Auditor. A running audit ends with an EngineError."""
        self._closed = True
        await end_tasks(self._warming, self._resting)
        if self._running is not None:
            await self._running[0].kill()
        async with self._busy:
            await self._drop()

    @asynccontextmanager
    async def _turn(self) -> AsyncGenerator[None]:
        """Wait for the process's other work; let it rest when there was none for some time after this."""
        async with self._busy:
            if self._resting is not None:
                self._resting.cancel()
            try:
                yield
            finally:
                if not self._closed:
                    self._resting = asyncio.create_task(self._rest_later(), name="auditor rests")

    async def _rest_later(self) -> None:
        await asyncio.sleep(REST_S)
        await self.rest()

    # -- one portion -------------------------------------------------------------------------------

    async def _attempt(
        self, items: Sequence[AuditItem], states: Mapping[int, State]
    ) -> list[Measured | Unreadable]:
        """Measure items in the process; kill it if it fails or the caller is cancelled."""
        reply = await self._ask(items, states, MeasureItems)
        if not isinstance(reply, MeasuredItems) or len(reply.answers) != len(items):
            await self._drop()
            raise AuditFailed(f"the process that audits does not answer {len(items)} items")
        return reply.answers

    async def _ask(
        self,
        items: Sequence[AuditItem],
        states: Mapping[int, State],
        request: type[MeasureItems | ReadItems],
    ) -> AuditProcessReply:
        """Ask the process about items; kill it if it fails or the caller is cancelled."""
        needed = sorted({version for item in items for version in item.wanted})
        child, process_states = await self._process()
        try:
            numbers = await process_states.provide({v: states[v] for v in needed}, self._timeout_s)
            return await child.ask(request(list(items), numbers), self._timeout_s)
        except EngineError:
            raise  # the process works, and reports that this can never be done
        except BaseException:  # also when cancelled: the process would go on
            await self._drop()
            raise

    async def _warm_up(self) -> None:
        """Start the process ahead of the first audit, which tries again if that fails."""
        try:
            async with self._turn():  # it rests, too, if nothing is ever audited
                await self._process()
        except EngineError as error:
            logger.warning("the process that audits does not start: %s", error)

    async def _process(self) -> tuple[AuditChild, HeldStates]:
        """Return a process that is set up. Raises EngineError if there can be none."""
        setup = self._setup
        if setup is None or self._closed:
            raise EngineError("the auditor is not running: start() it, and do not close it before")
        if self._running is not None and self._running[0].lost.is_set():
            logger.warning("the process that audits has ended, another one is started")
            await self._drop()
        if self._running is None:
            # a driver of GPUs may need sockets (MPS) and calls that the filter refuses
            child = AuditChild(self._program, confined=_needs_no_driver(setup.terms.device))
            self._running = child, HeldStates(child, self._most_states)
            try:
                await self._set_up(child, setup)
            except BaseException:  # also when cancelled: a process that is half set up is of no use
                await self._drop()
                raise
        return self._running

    async def _set_up(self, child: AuditChild, setup: AuditSetUp) -> None:
        await child.spawn()
        if self._closed:
            raise EngineError("the auditor was closed while it started")
        try:
            await child.ask(setup, START_TIMEOUT_S)
        except AuditFailed as error:
            raise EngineError(f"no audit is possible: {error}") from error

    async def _drop(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            await running[0].kill()


def _needs_no_driver(device: str) -> bool:
    return device == "cpu" or (device == "auto" and not usable(os.environ) and not AMD.exists())
