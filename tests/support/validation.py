"""A swarm with a validator, and what tests say about who audited what."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.swarm import CONFIG, Running, Swarm, merged
from support.witness import Fakes, WitnessAuditor

from primerl.crypto.keys import SecretKey
from primerl.node.app.validator import ValidatorNode
from primerl.node.config.run import EngineConfig, JoinConfig
from primerl.node.ops.errors import EngineError
from primerl.node.storage.ledger import LedgerView
from primerl.node.verification.auditor import AuditItem, Auditor, Measured, Unreadable
from primerl.node.weights.state import State
from primerl.protocol.envelope import Purpose, unseal
from primerl.protocol.rollouts import Verdict

VALIDATOR = SecretKey.from_seed(bytes(31) + b"v")
Found = list[Measured | Unreadable]


class BentAuditor(WitnessAuditor):
    """Measures as it should, and then says what it is told to; counts what it was asked."""

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
        others: Mapping[int, Sequence[int]],
    ) -> Found:
        """See Auditor."""
        self.items += len(items)
        self.started.set()
        if self._dies:
            raise EngineError("the audit process died: look at its log")
        if self.hold is not None:
            await self.hold.wait()
        found = await super().audit(items, states, others)
        return found if self._bend is None else self._bend(found)


class AuditedSwarm(Swarm):
    """A swarm whose trainer believes one validator, and whose trainer's own auditor counts."""

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

    async def __aenter__(self) -> "AuditedSwarm":
        return self

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
        """Wait until the validator has asked for audits with a version that it holds."""
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
