"""Who may lead a run: the root's lists, places and epochs."""

import msgspec
import pytest
from support.protocol_cases import (
    MANIFEST,
    NOW,
    RUN,
    STRANGER,
    TRAINER,
    WORKER,
    refuses,
)
from support.protocol_cases import head as head_of

from primerl.crypto.keys import SecretKey
from primerl.protocol import leaders, trust
from primerl.protocol.envelope import Purpose, seal
from primerl.protocol.errors import LocalProtocolError, Reason, RemoteProtocolError
from primerl.protocol.leaders import (
    EPOCHS_OF_PLACE,
    EPOCHS_OF_TURN,
    MAX_LEADERS,
    REMOVED,
    LeaderList,
    Leaders,
    certify,
)
from primerl.protocol.manifests import PolicyHead

ROOT = SecretKey.from_seed(bytes(31) + b"R")
NEXT, LAST = WORKER, STRANGER
FIRST_LIST = LeaderList(1, (TRAINER.node_id, NEXT.node_id, LAST.node_id), 60)
STATE = head_of(0).state
FIRST = EPOCHS_OF_TURN + EPOCHS_OF_PLACE
"""First epoch of the first successor."""


def listed(*, number: int = 1, nodes: tuple[bytes, ...] = FIRST_LIST.leaders) -> bytes:
    return certify(ROOT, RUN, LeaderList(number, nodes, 60))


def known() -> Leaders:
    book = Leaders(RUN, TRAINER.node_id, ROOT.node_id)
    book.admit(listed())
    return book


def chain() -> trust.TrustedRun:
    run = trust.TrustedRun(RUN, TRAINER.node_id)
    manifest = msgspec.structs.replace(MANIFEST, root=ROOT.node_id)
    run.trust(trust.RunDocuments(RUN, b"", manifest), listed())
    return run


def head(key: SecretKey, epoch: int, version: int = 0, state: bytes = STATE) -> bytes:
    made: PolicyHead = msgspec.structs.replace(head_of(0), term=epoch, version=version, state=state)
    return seal(key, Purpose.HEAD, RUN, made, expires=NOW + 60)


def test_without_a_list_the_trainer_of_the_manifest_leads_alone() -> None:
    book = Leaders(RUN, TRAINER.node_id, ROOT.node_id)
    assert TRAINER.node_id in book
    assert NEXT.node_id not in book
    assert REMOVED not in book
    assert book.others(TRAINER.node_id) == []


def test_the_root_lets_others_lead_in_an_order_that_goes_round() -> None:
    book = known()
    assert book.others(TRAINER.node_id) == [NEXT.node_id, LAST.node_id]
    assert book.others(NEXT.node_id) == [LAST.node_id, TRAINER.node_id]
    assert book.others(LAST.node_id) == [TRAINER.node_id, NEXT.node_id]


@pytest.mark.parametrize("key", [TRAINER, NEXT, LAST], ids=["the trainer", "a leader", "another"])
def test_a_list_that_the_root_did_not_sign_is_refused(key: SecretKey) -> None:
    book = known()
    with refuses(Reason.WRONG_SIGNER):
        book.admit(certify(key, RUN, LeaderList(2, FIRST_LIST.leaders, 60)))


def test_a_run_without_a_root_believes_its_trainer() -> None:
    book = Leaders(RUN, TRAINER.node_id)
    assert book.admit(certify(TRAINER, RUN, FIRST_LIST))
    with refuses(Reason.WRONG_SIGNER):
        book.admit(certify(ROOT, RUN, LeaderList(2, FIRST_LIST.leaders, 60)))


def test_a_list_of_another_run_is_refused() -> None:
    with refuses(Reason.WRONG_RUN):
        known().admit(certify(ROOT, bytes(32), FIRST_LIST))


def test_an_older_list_changes_nothing_and_a_newer_one_revokes() -> None:
    book = known()
    assert book.admit(listed(number=5, nodes=(TRAINER.node_id, REMOVED, LAST.node_id)))
    assert NEXT.node_id not in book
    assert not book.admit(listed(number=4))
    assert NEXT.node_id not in book
    assert book.others(TRAINER.node_id) == [LAST.node_id]


@pytest.mark.parametrize(
    "nodes",
    [
        (NEXT.node_id, TRAINER.node_id, LAST.node_id),
        (TRAINER.node_id, LAST.node_id, NEXT.node_id),
        (TRAINER.node_id, NEXT.node_id),
        (TRAINER.node_id, NEXT.node_id, LAST.node_id, NEXT.node_id),
        (TRAINER.node_id, ROOT.node_id, LAST.node_id),
    ],
    ids=["another first", "changed order", "shorter", "twice", "a place given on"],
)
def test_no_list_gives_a_place_to_another_key(nodes: tuple[bytes, ...]) -> None:
    with refuses(Reason.MALFORMED):
        known().admit(listed(number=2, nodes=nodes))


def test_a_place_that_was_revoked_is_not_given_again() -> None:
    book = known()
    book.admit(listed(number=2, nodes=(TRAINER.node_id, REMOVED, LAST.node_id)))
    with refuses(Reason.MALFORMED):
        book.admit(listed(number=3, nodes=(TRAINER.node_id, NEXT.node_id, LAST.node_id)))
    again = leaders.extended(
        LeaderList(2, (TRAINER.node_id, REMOVED, LAST.node_id), 60), [NEXT.node_id]
    )
    assert book.admit(certify(ROOT, RUN, again))
    assert book.others(TRAINER.node_id) == [LAST.node_id, NEXT.node_id]


def test_lists_follow_each_other() -> None:
    alone = LeaderList(1, (TRAINER.node_id,), 60)
    assert leaders.extended(alone, [NEXT.node_id, NEXT.node_id]).leaders == (
        TRAINER.node_id,
        NEXT.node_id,
    )
    assert leaders.extended(FIRST_LIST, [], 90) == LeaderList(2, FIRST_LIST.leaders, 90)
    assert leaders.without(FIRST_LIST, [NEXT.node_id]).leaders[1] == REMOVED
    with pytest.raises(LocalProtocolError, match="no leader"):
        leaders.without(FIRST_LIST, [ROOT.node_id])
    with pytest.raises(LocalProtocolError, match="nobody"):
        leaders.without(alone, [TRAINER.node_id])
    with pytest.raises(LocalProtocolError, match="at most"):
        leaders.extended(alone, [bytes(31) + bytes([n]) for n in range(1, MAX_LEADERS + 1)])


def test_epochs_of_two_leaders_are_never_the_same() -> None:
    book, seen = known(), {0}
    epoch = 0
    for node in [TRAINER, TRAINER, NEXT, NEXT, LAST, TRAINER, NEXT, TRAINER] * 3:
        after = book.next_epoch(node.node_id, epoch)
        assert after > epoch
        assert after not in seen
        book.check_epoch(node.node_id, after)
        for other in {TRAINER, NEXT, LAST} - {node}:
            with refuses(Reason.WRONG_SIGNER):
                book.check_epoch(other.node_id, after)
        seen.add(after)
        epoch = after


def test_a_leader_that_has_used_all_epochs_of_its_turn_begins_another_one() -> None:
    book = known()
    last = EPOCHS_OF_TURN + 2 * EPOCHS_OF_PLACE - 1
    book.check_epoch(NEXT.node_id, last)
    assert book.next_epoch(NEXT.node_id, last) == 2 * EPOCHS_OF_TURN + EPOCHS_OF_PLACE


def test_a_head_of_a_certified_leader_is_believed_and_ends_the_epochs_before() -> None:
    run = chain()
    run.admit(head(TRAINER, 0), now=NOW)
    assert run.leader == TRAINER.node_id
    run.admit(head(NEXT, FIRST), now=NOW)
    assert run.leader == NEXT.node_id
    with refuses(Reason.ROLLBACK):
        run.admit(head(TRAINER, 0, version=1), now=NOW)
    with refuses(Reason.ROLLBACK):
        run.admit(head(TRAINER, 1, version=1), now=NOW)


@pytest.mark.parametrize(
    ("key", "epoch"),
    [(NEXT, 0), (NEXT, 1), (TRAINER, FIRST), (LAST, FIRST), (ROOT, FIRST)],
    ids=["the first epoch", "the trainer's", "of its successor", "of another", "the root's own"],
)
def test_a_head_in_an_epoch_of_somebody_else_is_refused(key: SecretKey, epoch: int) -> None:
    with refuses(Reason.WRONG_SIGNER):
        chain().admit(head(key, epoch), now=NOW)


def test_heads_of_a_leader_that_was_revoked_are_dropped_and_no_more_are_taken() -> None:
    run = chain()
    run.admit(head(TRAINER, 0), now=NOW)
    run.admit(head(NEXT, FIRST), now=NOW)
    assert run.admit_leaders(certify(ROOT, RUN, leaders.without(FIRST_LIST, [NEXT.node_id])))
    assert run.leader == TRAINER.node_id
    with refuses(Reason.WRONG_SIGNER):
        run.admit(head(NEXT, FIRST, version=1), now=NOW)
    run.admit(head(LAST, 2 * EPOCHS_OF_TURN + 2 * EPOCHS_OF_PLACE), now=NOW)
    assert run.leader == LAST.node_id


def test_two_heads_of_one_leader_are_a_proof_and_those_of_two_leaders_are_none() -> None:
    run = chain()
    first, second = head(NEXT, FIRST), head(NEXT, FIRST, state=bytes(32))
    run.admit(first, now=NOW)
    with pytest.raises(trust.Equivocation) as caught:
        run.admit(second, now=NOW)
    with pytest.raises(trust.Equivocation):
        chain().check_proof(caught.value.proof)
    with refuses(Reason.MALFORMED):
        chain().check_proof(
            trust.EquivocationProof(head(TRAINER, 0), head(NEXT, 0, state=bytes(32)))
        )


def test_damaged_lists_are_refused() -> None:
    whole = listed()
    for at in range(len(whole)):
        damaged = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        book = Leaders(RUN, TRAINER.node_id, ROOT.node_id)
        with pytest.raises(RemoteProtocolError):
            book.admit(damaged)
        assert book.listed is None
