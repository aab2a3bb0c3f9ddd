"""Collect the trainer's verdicts on this node's work, and the bounds that judge it.

Invariants: a verdict counts once, and only if the trainer signed it for this node. Those that were missed are
fetched: a lost verdict costs time only.
"""

import logging
import time
from collections import Counter

from ...crypto.hashing import short
from ...protocol.envelope import Purpose
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.messages import GetBounds, GetVerdicts, MeasuredBounds, Verdicts
from ...protocol.numerics import ClassBounds, NumericsClass
from ...protocol.recent import RecentDict
from ...protocol.reputation import WRONG_CLASS, Trust
from ...protocol.rollouts import Verdict
from ..errors import StorageError
from ..p2p.rpc import Refused
from ..p2p.services import NodeServices
from ..p2p.transport import TransportError

logger = logging.getLogger(__name__)

VERDICT_TIMEOUT_S = 10.0
MAX_ROUNDS = 256
"""Most replies of one fetch: more verdicts than a trainer keeps."""
CURSOR = "verdicts"
"""Ledger key of the number of the last verdict that was fetched; of a later leader, its id follows."""
BAN_PAUSE_S = 60.0
MAX_BAN_PAUSE_S = 900.0
MAX_LEASES_KNOWN = 4096
"""Most leases whose verdict is waited for: far more than a node holds."""


CLASS_ADVICE = (
    "An honest node reads this where it computes in another way than the references of its class: with other "
    "options of engine.vllm (enforce_eager, the attention backend, compilation, chunked prefill), "
    "engine.batch_invariant, or another driver. Start its engine as a reference is started, or ask the run's "
    "operator to name a worker that is started like this one (verification.references)"
)
"""What to do about a refusal that begins with WRONG_CLASS."""


class VerdictLog:
    """Collector of the trainer's verdicts on this node's work."""

    def __init__(self, services: NodeServices, explain: str = "primerl-node explain") -> None:
        """`explain` is the command that shows these verdicts to the operator."""
        self._services = services
        self._explain = explain
        self._refusals = 0
        self._leases = RecentDict[int, str](MAX_LEASES_KNOWN)
        """Environment of each lease that is not judged yet, by name."""
        self._trusts: dict[str, Trust] = {}
        self.accepted = 0
        self.rejected: Counter[str] = Counter()
        self.bounds: ClassBounds | None = None
        """Noise bounds that judge this node, in a run that measures them; None until known."""

    def leased(self, lease: int, environment: str) -> None:
        """Note of which environment a lease is: a verdict names only the lease."""
        self._leases[lease] = environment

    def trusts(self) -> dict[str, float]:
        """Return the trust that the trainer derives from verdicts on noted leases, by environment."""
        for trust in self._trusts.values():
            trust.age(time.time())
        return {name: trust.mean for name, trust in sorted(self._trusts.items())}

    async def take(self, sealed: bytes) -> None:
        """Record a verdict; a repeated one is ignored.

        Raises:
            RemoteProtocolError: it is not the trainer's verdict on our work.
        """
        # An old verdict still counts: its expiry does not matter here.
        ledger, node = self._services.ledger, self._services.key.node_id
        opened = self._services.unseal(sealed, Purpose.VERDICT, Verdict, now=0, recipient=node)
        verdict = opened.body
        try:
            news = await ledger.beside(ledger.add_verdict, node, sealed)
        except StorageError as error:
            logger.warning("a verdict is not kept for `explain`: %s", error)
            news = True
        if isinstance(verdict.bounds, ClassBounds):
            self.bounds = verdict.bounds
        if news:
            self._count(verdict)

    async def fetch_bounds(self, numerics: NumericsClass | None) -> None:
        """Ask the trainer for the bounds of our class, to show them before the first verdict.

        A failure is only logged.
        """
        if numerics is None:
            return
        services = self._services
        try:
            reply = await services.ask_trainer(
                GetBounds(), MeasuredBounds, deadline=VERDICT_TIMEOUT_S
            )
            for sealed in reply.bounds:
                bounds = services.unseal(sealed, Purpose.BOUNDS, ClassBounds).body
                if bounds.numerics == numerics and self.bounds is None:
                    self.bounds = bounds
        except (TransportError, Refused, RemoteProtocolError) as error:
            logger.info("no bounds from %s: %s", short(services.trainer), error)

    async def fetch(self) -> None:
        """Fetch the verdicts that we missed; after a failure the next call fetches the rest."""
        services = self._services
        first = services.trainer == services.leaders.trainer
        cursor = CURSOR if first else f"{CURSOR}:{services.trainer.hex()}"
        after = int.from_bytes(services.ledger.get(cursor) or b"", "big")
        try:
            for _ in range(MAX_ROUNDS):
                reply = await services.ask_trainer(
                    GetVerdicts(after), Verdicts, deadline=VERDICT_TIMEOUT_S
                )
                for sealed in reply.verdicts:
                    await self.take(sealed)
                if reply.next <= after:
                    return
                after = reply.next
                services.ledger.set(cursor, after.to_bytes(8, "big"))
        except (TransportError, Refused, RemoteProtocolError, StorageError) as error:
            logger.info("no verdicts from %s: %s", short(services.trainer), error)

    async def refused(self, why: str) -> float:
        """Fetch and report why the trainer gives no work; return the seconds to wait."""
        await self.fetch()
        pause = min(BAN_PAUSE_S * 2**self._refusals, MAX_BAN_PAUSE_S)
        self._refusals = min(self._refusals + 1, 8)
        logger.error(
            "the trainer gives this node no work (%s)%s. For the evidence run `%s`. Asking again in %.0f s",
            why,
            f". {CLASS_ADVICE}" if why.startswith(WRONG_CLASS) else "",
            self._explain,
            pause,
        )
        return pause

    def count_refusal(self, reason: Reason) -> None:
        """Count a submission that was refused for good, without a verdict."""
        self.rejected[reason.value] += 1

    def welcome(self) -> None:
        """Reset the pause after refusals: the trainer gives work again."""
        self._refusals = 0

    def _count(self, verdict: Verdict) -> None:
        reasons = Counter(rejection.reason for rejection in verdict.rejections)
        if reasons:
            unlisted = verdict.rejected - len(verdict.rejections)
            reasons[verdict.rejections[-1].reason] += max(0, unlisted)
        self.accepted += verdict.accepted
        self.rejected.update({reason.value: count for reason, count in reasons.items()})
        environment = self._leases.pop(verdict.lease_id, None)
        if environment is not None:
            trust = self._trusts.setdefault(environment, Trust())
            trust.record(verdict.accepted, reasons, time.time())
        if not verdict.rejections:
            return
        first = verdict.rejections[0]
        logger.info(
            "lease %d: %d accepted, %d rejected, first %s (%s)",
            verdict.lease_id,
            verdict.accepted,
            verdict.rejected,
            first.reason.value,
            first.detail,
        )
