"""Rollouts that were sent before: the book of copies, asked in the words of the verifier."""

from itertools import compress

from ...crypto.hashing import short
from ...protocol.errors import Reason
from ..environments.environment import Branch
from .checks import CheckedRollout, Rejected
from .duplicates import CopyBook, Owner, Text

_PLACES = 4096
"""Most rollouts in a group (protocol/rollouts.py)."""


class Copies:
    """Says which rollouts are copies of what was received earlier."""

    def __init__(self) -> None:
        self._book = CopyBook()

    def check(self, arrival: int, node: bytes, rollout: CheckedRollout) -> None:
        """Raise Rejected(DUPLICATE) if most of the rollout was received before."""
        place = rollout.group * _PLACES + rollout.index
        found = self._book.add(
            Owner(arrival, place, node), [_text(one) for one in rollout.branches]
        )
        if found.copy_of is not None:
            source = found.copy_of
            owner = short(source.node)
            detail = (
                f"{found.share:.0%} of its tokens came with arrival {source.arrival} of {owner}"
            )
            raise Rejected(Reason.DUPLICATE, detail)


def _text(branch: Branch) -> Text:
    return Text(
        list(compress(branch.token_ids, branch.sampled)),
        list(compress(branch.logprobs, branch.sampled)),
    )
