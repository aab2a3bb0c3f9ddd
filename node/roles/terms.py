"""Terms: what a trainer that had to go back to an older checkpoint makes of work from before it did.

The versions after that checkpoint are void and their numbers are used again; nobody who sampled from them
lied, so such work is stale, never fraud.
"""

from collections.abc import Iterator

import msgspec

from ...protocol.leases import Lease
from ...protocol.rollouts import Submission
from ..ledger import Ledger

KEY = "term"
LEASES_PER_BOOT = 32
"""Bits of a lease id that count within one start of the trainer; those above count the starts."""


class Term(msgspec.Struct, frozen=True):
    """Where the current term began."""

    number: int = 0
    version: int = 0
    first_lease: int = 0

    def voids(self, submission: Submission, lease: Lease) -> bool:
        """Whether this was leased before the term began and made by a version that is another one now."""
        claimed = max(_claims(submission), default=0)
        return lease.lease_id < self.first_lease and claimed > self.version


def current_term(ledger: Ledger, order: tuple[int, int], boot: int) -> Term:
    """The term of `order`, the (term, version) that start number `boot` goes on from; remembered."""
    known = ledger.get(KEY)
    term = msgspec.json.decode(known, type=Term) if known else Term()
    if order[0] != term.number:
        term = Term(*order, boot << LEASES_PER_BOOT)
        ledger.set(KEY, msgspec.json.encode(term))
    return term


def _claims(submission: Submission) -> Iterator[int]:
    for group in submission.groups:
        for rollout in group.rollouts:
            for branch in rollout.branches:
                yield branch.policy_last
