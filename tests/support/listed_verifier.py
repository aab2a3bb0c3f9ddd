"""A verifier that finds a check which refuses for a reason that its row in Verifier.checks() does not name."""

from dataclasses import replace

from primerl.node.verification.verdict import PendingVerdict
from primerl.node.verification.verifier import SubmissionCheck, Verifier
from primerl.protocol.errors import RemoteProtocolError


class ListedVerifier(Verifier):
    """Verifier whose list of checks is held true."""

    def checks(self) -> tuple[SubmissionCheck, ...]:
        """See Verifier."""
        return tuple(map(_listed, super().checks()))


def _listed(check: SubmissionCheck) -> SubmissionCheck:
    async def run(work: PendingVerdict) -> None:
        before = len(work.rejections)
        try:
            await check.run(work)
        except RemoteProtocolError as error:
            if error.reason not in check.reasons:
                raise AssertionError(f"{error} is not listed") from error
            raise
        reasons = {rejection.reason for rejection in work.rejections[before:]}
        assert reasons <= {*check.reasons}, reasons

    return replace(check, run=run)
