"""Ledgers with verdicts in them, as workers and trainers keep them."""

from pathlib import Path
from typing import Any

import msgspec
from support.protocol_cases import LEASE, NOW, RUN, STRANGER, SUBMITTED, TRAINER, WORKER, sealed

from primerl.crypto.hashing import digest
from primerl.crypto.keys import SecretKey
from primerl.node.storage.ledger import MANIFEST, Ledger
from primerl.protocol.audits import draw
from primerl.protocol.envelope import Purpose, seal
from primerl.protocol.errors import Reason
from primerl.protocol.rollouts import Evidence, Rejection, Verdict

CHALLENGE = digest(b"challenge")
RATE = 0.715
GUILTY, HONEST, ODD = (0, 0), (0, 1), (1, 1)
VERDICT = Verdict(
    submission=SUBMITTED,
    lease_id=LEASE.lease_id,
    accepted=2,
    rejections=(
        Rejection(*GUILTY, Reason.WRONG_MODEL, "fingerprint is 1.2 over 64 tokens"),
        Rejection(1, 0, Reason.MISSING_INDEX, ""),
    ),
    audited=3,
    rejected=2,
    challenge=CHALLENGE,
    rate=RATE,
    evidence=(
        Evidence(*GUILTY, 64, 1.2, 0.01, 0.2, 0.01, 0.2, -3.0),
        Evidence(*HONEST, 61, 0.01, 0.001, 0.01, 0.001, 0.01, -9.0),
        Evidence(*ODD, 60, 0.01, 0.001, 0.01, 0.04, 0.01, -9.0),
    ),
    validator=STRANGER.node_id,
)
"""By the bounds of protocol_cases: one guilty, one clean, one suspect."""
CLEAN = Verdict(
    submission=digest(b"clean"),
    lease_id=LEASE.lease_id + 1,
    accepted=4,
    rejections=(),
    audited=0,
    challenge=CHALLENGE,
    rate=0.0,
)


def is_challenged(group: int, rollout: int) -> bool:
    """Return whether the challenge selects a rollout, by the public rule."""
    return draw(CHALLENGE, group, rollout) < RATE


def signed(verdict: Verdict, key: SecretKey = TRAINER, **where: Any) -> bytes:
    """A verdict as a trainer signs it, to the worker."""
    options: dict[str, Any] = {"recipient": WORKER.node_id, "expires": NOW, **where}
    return seal(key, Purpose.VERDICT, RUN, verdict, **options)


def tampered(verdict: Verdict, **changes: Any) -> bytes:
    """A signed verdict whose payload somebody changed afterwards."""
    envelope = msgspec.msgpack.decode(signed(verdict))
    envelope[7] = msgspec.msgpack.encode(msgspec.structs.replace(verdict, **changes))
    return msgspec.msgpack.encode(envelope)


def fill(path: Path, *verdicts: bytes, manifest: bool = True) -> Ledger:
    """A ledger of the run with these verdicts on the worker's submissions, still open."""
    ledger = Ledger(path, fsync=False)
    if manifest:
        ledger.set(MANIFEST, sealed(Purpose.RUN))
    for one in verdicts:
        ledger.add_verdict(WORKER.node_id, one)
    return ledger
