"""Terms: what a trainer that had to go back to an older checkpoint makes of work from before it did.

The versions after that checkpoint are void and their numbers are used again; nobody who sampled from them
lied, so such work is stale, never fraud.
"""

from collections.abc import Iterator

import msgspec

from ...protocol.leases import Lease
from ...protocol.rollouts import Submission
from ..storage.ledger import Ledger

KEY = "term"
LEASES_PER_BOOT = 32
"""Bits of a lease id that count within one start of the trainer; those above count the starts."""
TERMS = 16
"""That are remembered: leases of earlier ones ran out long ago."""


class Term(msgspec.Struct, frozen=True):
    """Where the current term began."""

    number: int = 0
    version: int = 0
    first_lease: int = 0
    before: tuple[tuple[int, int], ...] = ()
    """(version, first lease) of the terms before it, as far as they are remembered."""

    def voids(self, submission: Submission, lease: Lease) -> bool:
        """Whether this was leased before a term began and made by a version that is another one since."""
        claimed = max(_claims(submission), default=0)
        starts = (*self.before, (self.version, self.first_lease))
        return any(lease.lease_id < first and claimed > version for version, first in starts)


def current_term(ledger: Ledger, order: tuple[int, int], boot: int) -> Term:
    """The term of `order`, the (term, version) that start number `boot` goes on from; remembered."""
    known = ledger.get(KEY)
    term = msgspec.json.decode(known, type=Term) if known else Term()
    if order[0] != term.number:
        before = (*term.before, (term.version, term.first_lease))[-TERMS:]
        term = Term(*order, boot << LEASES_PER_BOOT, before)
        ledger.set(KEY, msgspec.json.encode(term))
    return term


def _claims(submission: Submission) -> Iterator[int]:
    for group in submission.groups:
        for rollout in group.rollouts:
            for branch in rollout.branches:
                yield branch.policy_last
