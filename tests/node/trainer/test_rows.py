"""Rows of workers: those of keys that left go again, and nobody gains anything by leaving."""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.bare_node import bare_services
from support.lease_cases import policy
from support.protocol_cases import MIXED, refuses

from primerl.node.p2p.peers import PeerTable
from primerl.node.process.heap import trim_heap
from primerl.node.storage.ledger import Ledger
from primerl.node.trainer.audits import AuditQueue
from primerl.node.trainer.lease_book import LeaseBook, MixtureShare, NodeRecord
from primerl.node.trainer.workers import AWAY_S, SWEEP_S, WorkerRegistry
from primerl.protocol.errors import Reason
from primerl.protocol.manifests import Ticket

TICKET = b"t" * 16
CROWD = [number.to_bytes(32, "big") for number in range(1, 401)]
BANNED, LOSER, PROVEN, JUDGED = (bytes([number]) * 32 for number in range(1, 5))
NAMED = (BANNED, LOSER, PROVEN, JUDGED)


class Front:
    """A registry with 400 keys that never worked, and four that did something."""

    def __init__(self, directory: Path) -> None:
        self.now = 0.0
        self.trimmed = 0
        self.ledger = Ledger(directory / "ledger.db", fsync=False)
        self.ledger.add_ticket(
            TICKET, Ticket(bytes(32), bytes(32), (), (), 0, 2**40, id=TICKET, uses=1000)
        )
        for node in (*CROWD, *NAMED):
            self.ledger.admit(node, 0, TICKET)
        shares = tuple(MixtureShare(4) for _ in MIXED.environments)
        self.peers = PeerTable()
        self.registry = WorkerRegistry(
            bare_services(ledger=self.ledger, peers=self.peers),
            b"",
            LeaseBook(policy(environments=shares)),
            AuditQueue(),
            clock=lambda: self.now,
            environments=MIXED.environments,
        )
        self.registry.trim = self._count_trim
        for node in (*CROWD, *NAMED):
            self.registry.seen(node)
            self.registry.standings(node)  # as a lease request does
        name = MIXED.environments[0].name
        self.registry.reputation(BANNED).ban("by the operator")
        self.registry.reputation(PROVEN).record(name, 1000, Counter(), time.time())
        rejected = Counter({Reason.BAD_TERMINATION: 1})
        self.registry.reputation(JUDGED).record(name, 0, rejected, time.time())
        self.registry.book.nodes[LOSER] = NodeRecord(missed=2, rest_until=2.0**40, lost_groups=3)

    def _count_trim(self) -> None:
        self.trimmed += 1

    def sweep(self, after: float) -> None:
        self.now += after
        self.registry.sweep()


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    front = Front(tmp_path)
    yield front
    front.ledger.close()


def test_rows_of_400_keys_that_left_go_and_those_that_remember_something_stay(front: Front) -> None:
    front.sweep(AWAY_S - 1)
    assert len(front.registry.workers) == len(CROWD) + len(NAMED), "nobody has been away for long"
    front.registry.seen(CROWD[0])
    front.sweep(SWEEP_S)
    assert set(front.registry.workers) == {CROWD[0], *NAMED}
    assert set(front.registry.reputations) == {CROWD[0], *NAMED}
    assert {row.node for row in front.peers.rows()} == {CROWD[0], *NAMED}
    assert front.registry.reputations[BANNED].banned
    assert front.registry.book.nodes[LOSER].lost_groups == 3


def test_whoever_leaves_and_comes_back_is_where_it_was(front: Front) -> None:
    front.sweep(AWAY_S + 1)
    back = front.registry.get(CROWD[5])
    assert (back.ticket, back.proven) == (TICKET, False), "by its ticket, and it needs no hello"
    account = front.ledger.ticket(TICKET)
    front.ledger.admit(CROWD[6], 9, TICKET, b"record")
    assert account == front.ledger.ticket(TICKET), "it does not count twice"
    assert account is not None
    assert account.admitted == len(CROWD) + len(NAMED)
    with refuses(Reason.NOT_ADMITTED):
        front.registry.get(b"stranger".rjust(32))


def test_memory_goes_back_to_the_system_once_rows_have_gone(front: Front) -> None:
    """Before, the C library kept what the transport had freed."""
    front.sweep(AWAY_S - 1)
    assert not front.trimmed
    front.sweep(SWEEP_S)
    front.sweep(SWEEP_S)
    assert front.trimmed == 1
    trim_heap()


async def test_sessions_of_keys_that_left_go_with_the_next_sweep(front: Front) -> None:
    connection = Closed()
    await front.registry.gate(connection)  # type: ignore[arg-type]
    assert len(front.registry.sessions) == 1
    front.sweep(SWEEP_S)
    assert len(front.registry.sessions) == 0


class Closed:
    """A connection that its other side closed."""

    peer, closed = CROWD[0], True


def test_verdicts_that_nobody_fetched_are_not_kept_in_memory_for_ever(front: Front) -> None:
    front.registry.workers[PROVEN].verdicts.extend([b"verdict"] * 9)
    front.ledger.add_verdict(PROVEN, b"verdict")
    front.sweep(AWAY_S + 1)
    assert not front.registry.workers[PROVEN].verdicts
    assert front.ledger.verdicts_after(PROVEN, 0, count=9, size=100) == [(1, b"verdict")]
