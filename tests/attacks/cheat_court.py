"""What a trainer makes of a lease's work: every check of production, rollout by rollout."""

from collections.abc import Sequence
from dataclasses import dataclass

from primerl.crypto.hashing import derive
from primerl.node.verification.auditor import Auditor, LocalAudits
from primerl.node.verification.duplicates import CopyDetector
from primerl.node.verification.verifier import ReceivedSubmission, Verified, Verifier, refuse_all
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.leases import Lease
from primerl.protocol.rollouts import Evidence, Submission

from .cheat_world import Groups, Sent, Workshop, World


@dataclass(frozen=True)
class Outcome:
    """One rollout; `evidence` is None where it was not audited."""

    reason: Reason | None
    suspect: bool
    evidence: Evidence | None

    @property
    def caught(self) -> bool:
        """Whether it was rejected, by an audit or before."""
        return self.reason is not None


class Court:
    """A verifier that has seen nothing yet, with every rollout audited."""

    def __init__(self, world: World, auditor: Auditor) -> None:
        """`auditor` is started."""
        self._world = world
        self._verifier = Verifier(
            world.run_id,
            world.run,
            world.environment,
            LocalAudits(auditor),
            world.states,
            CopyDetector(),
        )
        self._arrivals = 0

    async def judge(self, shop: Workshop, lease: Lease, groups: Groups) -> list[Outcome]:
        """The outcome of every rollout of a lease, after what was sent before it."""
        for sent in shop.sent_before:
            await self.verify(sent)
        verified = await self.verify(Sent(shop.node, lease, groups))
        return outcomes(verified, len(lease.tasks), lease.group_size)

    async def verify(self, sent: Sent) -> Verified:
        """The verdict on a submission."""
        self._arrivals += 1
        name = derive("cheat submission", self._arrivals.to_bytes(8, "big"))
        arrival = ReceivedSubmission(self._arrivals, name, sent.node, b"", name)
        submission = Submission(b"", tuple(sent.groups), "hf")
        try:
            return await self._verifier.verify(
                submission, sent.lease, arrival, version=self._world.version, rate=1.0
            )
        except RemoteProtocolError as error:
            return refuse_all(arrival, sent.lease, error)


def outcomes(verified: Verified, groups: int, group_size: int) -> list[Outcome]:
    """Rollout by rollout, in order."""
    reasons = {(one.group, one.rollout): one.reason for one in verified.rejections}
    seen = {(one.group, one.rollout): one for one in verified.audited.evidence}
    suspects = {
        (one.group, one.rollout)
        for one, judged in zip(verified.audited.evidence, verified.audited.judgements, strict=True)
        if judged.suspect
    }
    places = [(group, index) for group in range(groups) for index in range(group_size)]
    return [Outcome(reasons.get(p), p in suspects, seen.get(p)) for p in places]


def reasons_of(found: Sequence[Outcome]) -> set[Reason]:
    """Why rollouts were rejected."""
    return {one.reason for one in found if one.reason is not None}
