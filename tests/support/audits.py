"""Swarms and records in which rollouts are audited."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from support.protocol_cases import LEASE, PROOFS, RUN, STRANGER, TRAINER, WORKER
from support.swarm import CONFIG, Running, Swarm, merged
from support.waiting import until
from support.witness import Fakes, WitnessAuditor

from primerl.crypto.hashing import digest
from primerl.crypto.keys import SecretKey
from primerl.node.app.validator import ValidatorNode
from primerl.node.config.run import EngineConfig, JoinConfig
from primerl.node.environments.environment import Branch
from primerl.node.errors import EngineError
from primerl.node.storage.ledger import LedgerView
from primerl.node.trainer.audits import AuditQueue
from primerl.node.verification.auditor import (
    AuditAnswer,
    AuditCall,
    AuditItem,
    Auditor,
    AuditTarget,
    Measured,
    Unreadable,
)
from primerl.node.verification.checks import CheckedRollout
from primerl.node.weights.state import State
from primerl.protocol.audits import AuditReport, UnreadableRow
from primerl.protocol.envelope import Purpose, seal, unseal
from primerl.protocol.messages import AuditDone, AuditJob, AuditRequest, AuditWait, WorkerStats
from primerl.protocol.rollouts import Evidence, Verdict
from primerl.protocol.session import HEADER_BYTES, decode, payload_size

VALIDATOR = SecretKey.from_seed(bytes([4]) * 32)
SECOND = SecretKey.from_seed(bytes([5]) * 32)
NEVER = 2**40
"""An expiry."""
CLEAN = Measured(0, 0, 64, 0.0, 0.0, 0.0, 0.0, 0.0, -10.0)
ODD = msgspec.structs.replace(CLEAN, logprob=0.04)
"""Suspect by the bounds of protocol_cases, not guilty."""
GUILTY = msgspec.structs.replace(CLEAN, fingerprint=1.4)


def branch(length: int = 4) -> Branch:
    """Make a branch with two prompt tokens, the others sampled by version 3."""
    return Branch(
        token_ids=[*range(5, 4 + length), 1],
        sampled=[False] * 2 + [True] * (length - 2),
        logprobs=[0.0] * 2 + [-0.5] * (length - 2),
        policy_first=3,
        policy_last=3,
        finish="stop",
    )


def chosen(group: int, index: int, branches: int = 1) -> AuditTarget:
    """Make a rollout to audit."""
    items = [AuditItem([5, 6, 1], [], [-0.5], [3], b"") for _ in range(branches)]
    return AuditTarget(
        CheckedRollout(group, index, [branch() for _ in range(branches)], 1.0), items
    )


def call(*places: AuditTarget, sealed: bytes = b"bundle" * 100) -> AuditCall:
    """Make an audit call for these rollouts."""
    return AuditCall(
        sealed=sealed,
        digest=digest(sealed),
        lease=LEASE,
        node=WORKER.node_id,
        challenge=digest(b"challenge"),
        chosen=places or (chosen(0, 0), chosen(1, 1)),
        states={2: {}, 3: {}},
        others={3: [2]},
        contract=PROOFS,
    )


class Own:
    """The trainer's own audits: scripted results by the rollout's group, and a record of calls."""

    def __init__(self, *found: Measured | Unreadable, dead: bool = False) -> None:
        self.found = found or (CLEAN, CLEAN)
        self.calls: list[AuditCall] = []
        self._dead = dead

    async def audit_rollouts(self, call: AuditCall) -> AuditAnswer:
        """See Audits."""
        self.calls.append(call)
        if self._dead:
            raise EngineError("dead")
        return AuditAnswer(
            [[self.found[one.rollout.group]] * len(one.items) for one in call.chosen]
        )

    @property
    def rollouts(self) -> int:
        """Count the rollouts of all calls."""
        return sum(len(one.chosen) for one in self.calls)


@dataclass
class Told:
    """A stream that records written bytes."""

    data: bytearray = field(default_factory=bytearray)
    broken: Exception | None = None

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """See Stream."""
        if self.broken is not None:
            raise self.broken
        self.data += data

    async def read_exact(self, size: int) -> bytes:
        """Return the next bytes written."""
        taken = bytes(self.data[:size])
        del self.data[:size]
        return taken

    async def finish(self) -> None:
        """See Stream."""

    async def abort(self) -> None:
        """See Stream."""


def audit_queue(*validators: SecretKey, **settings: Any) -> AuditQueue:
    """Make a queue that trusts these validators."""
    nodes = [key.node_id for key in validators or (VALIDATOR,)]
    base: dict[str, Any] = {"run_id": RUN, "trainer": TRAINER.node_id, "validators": nodes}
    more: dict[str, Any] = {"timeout_s": 5.0, **settings}
    return AuditQueue(**base, **more)


async def request(
    audit_queue: AuditQueue,
    key: SecretKey = VALIDATOR,
    versions: Sequence[int] = (2, 3),
    term: int = 0,
    stream: Told | None = None,
) -> tuple[AuditJob | AuditWait, bytes]:
    """Send one request; return the reply and the bytes after it. Raises the queue's refusal."""
    told = stream or Told()
    await audit_queue.hand_out(
        key.node_id, told, AuditRequest(term, tuple(versions), WorkerStats(3))
    )
    size = payload_size(bytes(told.data[:HEADER_BYTES]))
    end = HEADER_BYTES + size
    reply: AuditJob | AuditWait = decode(
        bytes(told.data[HEADER_BYTES:end]),
        AuditJob | AuditWait,  # type: ignore[arg-type]
    )
    return reply, bytes(told.data[end:])


def report(job: AuditJob, /, *found: Measured | Unreadable, **changes: Any) -> AuditReport:
    """Make an honest report of a job, with `changes`."""
    measured: list[Evidence] = []
    unreadable: list[UnreadableRow] = []
    for place, one in zip(job.chosen, found or (CLEAN, CLEAN), strict=True):
        if isinstance(one, Unreadable):
            unreadable.append(UnreadableRow(place.group, place.rollout, one.proof, one.detail))
        else:
            values = (one.fingerprint, one.sampling, one.sampling_max, one.logprob)
            more = (one.logprob_max, one.other_policy)
            measured.append(Evidence(place.group, place.rollout, one.tokens, *values, *more))
    made = AuditReport(job.job, job.submission, job.challenge, tuple(measured), tuple(unreadable))
    return msgspec.structs.replace(made, **changes)


def sealed(report: AuditReport, key: SecretKey = VALIDATOR, **changes: Any) -> AuditDone:
    """Sign a report as a validator."""
    where: dict[str, Any] = {"recipient": TRAINER.node_id, "expires": NEVER, "run": RUN, **changes}
    purpose, run = where.pop("purpose", Purpose.AUDIT), where.pop("run")
    return AuditDone(seal(key, purpose, run, report, **where))


async def serve(audit_queue: AuditQueue, key: SecretKey, *found: Measured | Unreadable) -> None:
    """Run a validator that reports the same for every job, until it is cancelled or refused."""
    while True:
        reply, _ = await request(audit_queue, key)
        if isinstance(reply, AuditJob):
            await audit_queue.take_in(key.node_id, sealed(report(reply, *found), key))


async def present(audit_queue: AuditQueue, key: SecretKey = VALIDATOR) -> "asyncio.Task[Any]":
    """Send the request of a validator that waits for a job; return once the queue has it."""
    waiting = asyncio.create_task(request(audit_queue, key))
    await until(lambda: audit_queue.validators[key.node_id].waiting > 0)
    return waiting


__all__ = ["STRANGER", "TRAINER", "WORKER"]


Found = list[Measured | Unreadable]


class BentAuditor(WitnessAuditor):
    """Measures correctly, but reports scripted results; counts its calls."""

    def __init__(
        self, fakes: Fakes, bend: Callable[[Found], Found] | None = None, dies: bool = False
    ) -> None:
        super().__init__(fakes)
        self._bend = bend
        self._dies = dies
        self.items = 0
        self.started = asyncio.Event()
        self.hold: asyncio.Event | None = None

    async def audit(
        self,
        items: Sequence[AuditItem],
        states: Mapping[int, State],
    ) -> Found:
        """See Auditor."""
        self.items += len(items)
        self.started.set()
        if self._dies:
            raise EngineError("the audit process died: look at its log")
        if self.hold is not None:
            await self.hold.wait()
        found = await super().audit(items, states)
        return found if self._bend is None else self._bend(found)


class AuditedSwarm(Swarm):
    """A swarm whose trainer trusts one validator, and counts its own audits."""

    def __init__(
        self, directory: Path, model: Path, *, validators: Sequence[bytes] = (), **settings: Any
    ) -> None:
        listed = [node.hex() for node in validators or (VALIDATOR.node_id,)]
        base = {"validators": listed, "audit_timeout_s": 20.0}
        verification = merged(base, settings.pop("verification", {}))
        super().__init__(directory, model, verification=verification, **settings)
        self.own: list[BentAuditor] = []
        """The trainer's auditors, one for every start."""
        self.validator: ValidatorNode | None = None

    def _factories(self, running: Running, ledger: Any = None) -> Any:
        factories = super()._factories(running, ledger)
        if running is not self.trainer:
            return factories

        def own(config: EngineConfig, timeout_s: float) -> Auditor:
            self.own.append(BentAuditor(self.fakes))
            return self.own[-1]

        return replace(factories, auditor=own)

    def add_validator(
        self, auditor: Auditor, name: str = "v", key: SecretKey = VALIDATOR
    ) -> Running:
        """Start a validator with this auditor."""
        running = Running(key, self.directory / name)
        base = {"ticket": self.ticket, "network": CONFIG["network"], "fsync": False}
        config = JoinConfig.model_validate({**base, "role": "validator"})

        def make(config: EngineConfig, timeout_s: float) -> Auditor:
            return auditor

        factories = replace(super()._factories(running), auditor=make)
        node = self.validator = ValidatorNode(config, key, running.data_dir, factories)
        running.stop = node.request_stop
        running.task = asyncio.create_task(node.run())
        self.workers[name] = running
        return running

    async def seated(self, version: int = 0, key: SecretKey = VALIDATOR) -> None:
        """Wait until the validator has requested audits for a version that it holds."""
        async with asyncio.timeout(100.0):
            while True:
                rows = {row["id"]: row["version"] for row in await self.trainer.peers()}
                if rows.get(key.node_id.hex(), -1) >= version:
                    return
                await asyncio.sleep(0.02)

    def verdicts(self) -> list[Verdict]:
        """All verdicts of the trainer, oldest first; it may be running."""
        view = LedgerView(self.trainer.data_dir / "ledger.db")
        try:
            sealed = [one.sealed for one in view.verdicts()]
        finally:
            view.close()
        opened = [
            unseal(one, Purpose.VERDICT, Verdict, now=0, signer=self.trainer.node_id).body
            for one in sealed
        ]
        return opened[::-1]
