"""How far a run believes a validator: what of its work was measured again, and with which result. Sans I/O.

A validator is believed on its own only where it calls work clean. Whatever else it finds is measured again by
the trainer before it counts, so a validator can at most let a cheat pass, or cost time. These records say when
that ends its part in a run. Two honest machines differ by noise: one may call a rollout clean and the other
suspect, but never one clean what the other rejects for a reason that no noise explains.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from .reputation import Outcome

MAX_DIFFERING = 0.25
"""Share of differing judgements above which a validator's doubt grows; with honest noise it is a few in a
hundred."""
MIN_DIFFERING = 32
"""Rollouts in a row that a validator has to judge otherwise than the trainer until its doubt is full."""
FULL = MIN_DIFFERING * (1 - MAX_DIFFERING)
SLIPS = 2
"""Rollouts that a validator may call clean although the trainer rejects them, if noise can explain it; one in
SLIP_EVERY compared ones besides."""
SLIP_EVERY = 2500
"""Honest noise has one in 10,000 rollouts rejected (reputation.py: HONEST)."""
MAX_PASSED = 256
"""Latest workers that are remembered because a validator called their rejected work clean."""


@dataclass(frozen=True)
class Judged:
    """One party's judgement of a rollout."""

    outcome: Outcome
    certain: bool = False
    """Of a rejection: whether no noise explains it."""
    failed: bool = False
    """Whether the audit failed, through no fault of the worker; the outcome is then `suspect`."""


@dataclass(frozen=True)
class Comparison:
    """The judgements of a rollout that a validator and the trainer measured."""

    theirs: Judged
    ours: Judged

    @property
    def accuses(self) -> bool:
        """Whether the validator found a fault that the trainer does not find."""
        failed = self.theirs.failed or self.ours.failed
        return not failed and self.theirs.outcome != "clean" and self.ours.outcome == "clean"

    @property
    def passes(self) -> bool:
        """Whether the validator called clean what the trainer rejects."""
        return self.theirs.outcome == "clean" and self.ours.outcome == "rejected"

    @property
    def lie(self) -> str:
        """Statement of the validator that no noise explains; empty for none."""
        if self.passes and self.ours.certain:
            return "it called clean what the trainer finds rejected"
        if self.accuses and self.theirs.certain:
            return "it called rejected what the trainer finds clean"
        return ""


class ValidatorRecord(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Results of a validator's reports, compared with the trainer's own audits; kept in its ledger."""

    jobs: int = 0
    """Reports received from it."""
    rollouts: int = 0
    """Rollouts in them."""
    compared: int = 0
    """Those that were drawn to be measured by the trainer, too."""
    rechecked: int = 0
    """Those that the validator did not call clean, and that the trainer therefore measured."""
    overturned: int = 0
    """Those measured twice that the trainer judged otherwise."""
    missing: float = 0.0
    """Doubt about what it calls clean: a CUSUM over the drawn rollouts."""
    alarming: float = 0.0
    """Doubt about what it does not call clean: a CUSUM over all rollouts."""
    slips: int = 0
    """Drawn rollouts that it called clean and the trainer rejected, for reasons that noise may explain."""
    disqualified: str = ""
    """Reason why its reports no longer count in this run; empty while they count."""
    disqualified_until: float = 0.0
    """When they count again, in Unix seconds; 0: never."""
    passed: tuple[str, ...] = ()
    """Workers (hex) whose rejected work it called clean: the trainer measures theirs itself."""

    def note(
        self,
        worker: bytes,
        rollouts: int,
        sampled: Sequence[Comparison],
        rechecked: Sequence[Comparison],
    ) -> None:
        """Count a report of `rollouts` on work of `worker`, which the trainer measured in part.

        `sampled` were chosen by lot, `rechecked` because the validator did not call them clean; a rollout may
        be in both.
        """
        self.rollouts += rollouts
        self.compared += len(sampled)
        self.rechecked += len(rechecked)
        every = {id(pair): pair for pair in (*sampled, *rechecked)}.values()
        self.overturned += sum(pair.theirs.outcome != pair.ours.outcome for pair in every)
        for pair in every:
            if pair.passes:
                self.note_pass(worker)
                self.slips += not pair.lie
            if pair.lie:
                self.disqualify(pair.lie)
        for pair in sampled:
            missed = pair.theirs.outcome == "clean" != pair.ours.outcome
            self.missing = _doubt(self.missing, missed)
        alarms = sum(pair.accuses for pair in rechecked)
        for number in range(rollouts):
            self.alarming = _doubt(self.alarming, number < alarms)
        self._weigh()

    def note_pass(self, worker: bytes) -> None:
        """Remember that it called rejected work of a worker clean."""
        others = (name for name in self.passed if name != worker.hex())
        self.passed = (*others, worker.hex())[-MAX_PASSED:]

    def _weigh(self) -> None:
        counts = f"{self.overturned} of the {self.compared + self.rechecked} rollouts that were measured again"
        if self.slips > SLIPS + self.compared // SLIP_EVERY:
            self.disqualify(f"it called {self.slips} rollouts clean that the trainer rejects")
        elif max(self.missing, self.alarming) >= FULL:
            self.disqualify(f"{counts} were judged otherwise by the trainer")

    def disqualify(self, why: str, until: float = 0.0) -> None:
        """Let its reports count no more; `why` and `until` are as in Reputation.ban()."""
        if not self.disqualified or self.disqualified_until:
            self.disqualified, self.disqualified_until = why, until

    def end_ban(self, now: float) -> bool:
        """Let its reports count again if the time is over, and return whether it was."""
        if not self.disqualified_until or now < self.disqualified_until:
            return False
        self.disqualified, self.disqualified_until = "", 0.0
        return True

    def forget_pass(self, worker: bytes) -> None:
        """Forget that it called rejected work of a worker clean."""
        self.passed = tuple(name for name in self.passed if name != worker.hex())


def _doubt(value: float, differs: bool) -> float:
    return max(0.0, value + differs - MAX_DIFFERING)


def encode_records(records: dict[str, ValidatorRecord]) -> bytes:
    """Encode the records of validators by their ids in hex, for the ledger."""
    return msgspec.json.encode(records)


def decode_records(stored: bytes | None) -> dict[str, ValidatorRecord]:
    """Decode records of the ledger; None has none. Raises msgspec.DecodeError."""
    return msgspec.json.decode(stored or b"{}", type=dict[str, ValidatorRecord])
