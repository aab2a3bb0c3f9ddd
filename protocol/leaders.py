"""Who may lead a run: an ordered list that the run's root key certifies, and the epochs of each. Sans I/O.

Invariants: a newer list replaces an older one, never the reverse; a place belongs to one key for ever, and an
epoch to one place: no two leaders sign heads of one epoch; a key that is not in the newest list leads nothing,
whatever it has signed.
"""

from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec

from ..crypto.keys import NodeId, SecretKey
from .envelope import Opened, Purpose, read_envelope, seal, unseal
from .errors import LocalProtocolError, Reason, RemoteProtocolError
from .retirement import NEVER

T = TypeVar("T")

MAX_LEADERS = 16
REMOVED = bytes(32)
"""In the place of a leader that was revoked: places are not given again."""
EPOCHS_OF_PLACE = 10_000
"""Epochs that a leader can begin before another one leads."""
EPOCHS_OF_TURN = 100 * EPOCHS_OF_PLACE
"""An epoch is turn * EPOCHS_OF_TURN + place * EPOCHS_OF_PLACE + count: each change of the leader is a turn."""
MIN_LEASE_S, MAX_LEASE_S = 1, 7 * 86400


class LeaderList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The nodes that may lead a run, in order of succession; the run's first trainer has place 0."""

    number: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    """A list replaces those with lower numbers."""
    leaders: Annotated[tuple[NodeId, ...], msgspec.Meta(min_length=1, max_length=MAX_LEADERS)]
    lease_s: Annotated[int, msgspec.Meta(ge=MIN_LEASE_S, le=MAX_LEASE_S)]
    """Seconds of a leader's silence after which the next one takes over."""

    def successors(self) -> list[bytes]:
        """List the leaders after the first, in order, without those that were revoked."""
        return [node for node in self.leaders[1:] if node != REMOVED]


@dataclass
class Leaders:
    """What one node knows of the leaders of a run."""

    run: bytes
    trainer: bytes
    """The first leader, which the run's manifest names."""
    root: bytes = b""
    """The key that certifies leaders; empty: the first leader's own."""
    listed: LeaderList | None = None
    sealed: bytes = b""
    """The sealed form of `listed`, to be passed on; empty without one."""

    def admit(self, sealed: bytes) -> bool:
        """Take the root's list if it is newer; return whether it was.

        Raises RemoteProtocolError, also for a list that gives a place to another key.
        """
        if sealed == self.sealed:
            return False
        listed = unseal(
            sealed,
            Purpose.LEADERS,
            LeaderList,
            now=0,
            run=self.run,
            signer=self.root or self.trainer,
        ).body
        if self.listed is not None and listed.number <= self.listed.number:
            return False
        self._check_places(listed)
        self.listed, self.sealed = listed, sealed
        return True

    def places(self) -> tuple[bytes, ...]:
        """Return the leaders by place; REMOVED where one was revoked."""
        return (self.trainer,) if self.listed is None else self.listed.leaders

    def others(self, node: bytes) -> list[bytes]:
        """List the nodes beside `node` that may lead now, in the order in which they succeed it."""
        places = self.places()
        at = places.index(node) + 1 if node in places else 0
        return [other for other in (*places[at:], *places[:at]) if other not in (node, REMOVED)]

    def __contains__(self, node: object) -> bool:
        """Return whether `node` may lead now."""
        return node != REMOVED and node in self.places()

    def check(self, node: bytes) -> None:
        """Raise RemoteProtocolError(WRONG_SIGNER) unless `node` may lead now."""
        if node not in self:
            raise RemoteProtocolError(
                Reason.WRONG_SIGNER, "signed by a key that does not lead this run"
            )

    def check_epoch(self, node: bytes, epoch: int) -> None:
        """Raise RemoteProtocolError(WRONG_SIGNER) unless `node` may lead, and `epoch` is one of its own."""
        self.check(node)
        if self.places().index(node) != place_of(epoch):
            raise RemoteProtocolError(
                Reason.WRONG_SIGNER, f"epoch {epoch} is another leader's than the signer's"
            )

    def unseal(
        self,
        sealed: bytes,
        purpose: Purpose,
        kind: type[T],
        *,
        now: int = 0,
        recipient: bytes | None = None,
    ) -> Opened[T]:
        """Open what a leader of the run has signed; see envelope.unseal(). Raises RemoteProtocolError."""
        envelope = read_envelope(sealed, purpose)
        self.check(envelope.signer)
        return unseal(envelope, purpose, kind, now=now, run=self.run, recipient=recipient)

    def open_for_leader(
        self, sealed: bytes, purpose: Purpose, kind: type[T], *, now: int, signer: bytes
    ) -> Opened[T]:
        """Open what `signer` meant for a leader, perhaps for the one before. Raises RemoteProtocolError."""
        envelope = read_envelope(sealed, purpose)
        opened = unseal(envelope, purpose, kind, now=now, run=self.run, signer=signer)
        if envelope.recipient not in self:
            raise RemoteProtocolError(Reason.WRONG_RECIPIENT, "meant for another node")
        return opened

    def next_epoch(self, node: bytes, after: int) -> int:
        """Return the first epoch of leader `node` after `after`. Raises RemoteProtocolError(WRONG_SIGNER)."""
        self.check(node)
        place = self.places().index(node)
        if place_of(after) == place and place_of(after + 1) == place:
            return after + 1
        return (after // EPOCHS_OF_TURN + 1) * EPOCHS_OF_TURN + place * EPOCHS_OF_PLACE

    def _check_places(self, listed: LeaderList) -> None:
        """Raise RemoteProtocolError(MALFORMED) where a place changes hands."""
        own = list(self.places())
        own[0] = self.trainer
        named = [node for node in listed.leaders if node != REMOVED]
        moved = any(
            new not in (old, REMOVED) for old, new in zip(own, listed.leaders, strict=False)
        )
        if moved or len(listed.leaders) < len(own) or len(set(named)) < len(named):
            raise RemoteProtocolError(
                Reason.MALFORMED, f"leader list {listed.number} gives a place to another key"
            )


def place_of(epoch: int) -> int:
    """Return the place of the leader that an epoch belongs to."""
    return epoch % EPOCHS_OF_TURN // EPOCHS_OF_PLACE


def certify(root: SecretKey, run: bytes, listed: LeaderList) -> bytes:
    """Sign a list of leaders with the run's root key."""
    return seal(root, Purpose.LEADERS, run, listed, expires=NEVER)


def extended(current: LeaderList, new: list[bytes], lease_s: int | None = None) -> LeaderList:
    """Return the list after `current` with `new` successors at its end, those that it has already left out.

    Raises LocalProtocolError if there are more than MAX_LEADERS places.
    """
    added = [node for node in dict.fromkeys(new) if node not in current.leaders]
    leaders = (*current.leaders, *added)
    if len(leaders) > MAX_LEADERS:
        raise LocalProtocolError(f"a run has at most {MAX_LEADERS} leaders, those revoked included")
    return LeaderList(current.number + 1, leaders, lease_s or current.lease_s)


def without(current: LeaderList, revoked: list[bytes]) -> LeaderList:
    """Return the list after `current` in which some leaders are revoked.

    Raises LocalProtocolError for one that is not in it, or if nobody would be left.
    """
    strangers = [node for node in revoked if node not in current.leaders]
    if strangers:
        raise LocalProtocolError(f"{strangers[0].hex()} is no leader of this run")
    leaders = tuple(REMOVED if node in revoked else node for node in current.leaders)
    if all(node == REMOVED for node in leaders):
        raise LocalProtocolError("nobody would be left to lead the run")
    return LeaderList(current.number + 1, leaders, current.lease_s)
