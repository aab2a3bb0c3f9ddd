import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.protocol_cases import (
    NOW,
    OTHER_RUN,
    POLICY_MANIFEST,
    PROOF,
    RUN,
    STRANGER,
    TRAINER,
    WORKER,
    head,
    refuses,
    sealed_head,
)

from primerl.crypto.hashing import NO_DIGEST, digest
from primerl.protocol import trust
from primerl.protocol.envelope import Purpose, seal, unseal
from primerl.protocol.errors import Reason
from primerl.protocol.manifests import PolicyHead, encode
from primerl.protocol.version import CLOCK_SKEW_S, MAX_GOSSIP


def trusted(committed: tuple[int, int] = (0, -1)) -> trust.TrustedRun:
    return trust.TrustedRun(RUN, TRAINER.node_id, committed)


def chain(count: int, term: int = 0, first: int = 0) -> list[bytes]:
    """Sealed heads that follow each other."""
    heads: list[bytes] = []
    previous = NO_DIGEST
    for version in range(first, first + count):
        one = head(version, term=term, previous=previous)
        previous = digest(encode(one))
        heads.append(sealed_head(one))
    return heads


def admitted(run: trust.TrustedRun, sealed: bytes) -> trust.AdmittedHead:
    one, news = run.admit(sealed, now=NOW)
    assert news
    return one


def test_heads_in_order_are_news_once() -> None:
    run = trusted()
    for version, sealed in enumerate(chain(4)):
        one, news = run.admit(sealed, now=NOW)
        assert news
        assert one.order == (0, version)
        assert run.admit(sealed, now=NOW) == (one, False)
        assert run.latest() == one


def test_a_run_without_heads_has_no_latest() -> None:
    assert trusted().latest() is None


@given(st.permutations(range(6)))
def test_heads_may_arrive_in_any_order(order: list[int]) -> None:
    heads, run = chain(6), trusted()
    for version in order:
        admitted(run, heads[version])
    latest = run.latest()
    assert latest is not None
    assert latest.order == (0, 5)
    assert sorted(run.heads) == [(0, version) for version in range(6)]


def test_a_head_by_another_key_is_refused() -> None:
    for key in (STRANGER, WORKER):
        with refuses(Reason.WRONG_SIGNER):
            trusted().admit(sealed_head(head(), key), now=NOW)


def test_a_head_of_another_run_is_refused() -> None:
    with refuses(Reason.WRONG_RUN):
        trusted().admit(sealed_head(head(), run=OTHER_RUN), now=NOW)


def test_what_the_trainer_signed_for_another_purpose_is_no_head() -> None:
    lease = seal(TRAINER, Purpose.LEASE, RUN, head(), expires=NOW)
    with refuses(Reason.WRONG_PURPOSE):
        trusted().admit(lease, now=NOW)


def test_a_frozen_network_cannot_pass_an_old_head_for_news() -> None:
    sealed = sealed_head(head(), expires=NOW)
    trusted().admit(sealed, now=NOW + CLOCK_SKEW_S)
    run = trusted()
    with refuses(Reason.EXPIRED):
        run.admit(sealed, now=NOW + CLOCK_SKEW_S + 1)
    assert run.latest() is None


def test_a_damaged_head_leaves_no_trace() -> None:
    run, sealed = trusted(), sealed_head(head())
    for at in range(0, len(sealed), 7):
        with refuses(*Reason):
            run.admit(sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :], now=NOW)
    assert run.heads == {}


def test_a_head_must_follow_the_one_before_it() -> None:
    run = trusted()
    first = admitted(run, chain(1)[0])
    for wrong in (NO_DIGEST, digest(b"something else"), first.head.state):
        with refuses(Reason.WRONG_BASE):
            run.admit(sealed_head(head(1, previous=wrong)), now=NOW)
    assert admitted(run, sealed_head(head(1, previous=first.digest)))


def test_a_late_head_must_be_followed_by_the_one_after_it() -> None:
    heads, run = chain(3), trusted()
    admitted(run, heads[2])
    with refuses(Reason.WRONG_BASE):
        run.admit(sealed_head(head(1, previous=digest(b"elsewhere"))), now=NOW)
    admitted(run, heads[1])
    assert admitted(run, heads[0])


def test_two_heads_of_one_version_are_a_proof_that_anybody_can_check() -> None:
    run = trusted()
    left = admitted(run, chain(1)[0])
    right = sealed_head(head(0, state=digest(b"for others")))
    with pytest.raises(trust.Equivocation, match="two heads of version 0") as caught:
        run.admit(right, now=NOW)
    assert caught.value.reason == Reason.EQUIVOCATION
    proof = caught.value.proof
    assert (proof.first, proof.second) == (left.sealed, right)
    said = [
        unseal(sealed, Purpose.HEAD, PolicyHead, now=NOW, run=RUN, signer=TRAINER.node_id)
        for sealed in (proof.first, proof.second)
    ]
    assert said[0].body.version == said[1].body.version
    assert said[0].payload != said[1].payload
    assert run.latest() == left  # the first word stands


def test_nobody_else_can_make_the_trainer_look_false() -> None:
    run = trusted()
    admitted(run, chain(1)[0])
    with refuses(Reason.WRONG_SIGNER):
        run.admit(sealed_head(head(0, state=digest(b"forged")), STRANGER), now=NOW)


def test_one_head_sealed_twice_is_no_equivocation() -> None:
    run = trusted()
    one = admitted(run, sealed_head(head(), expires=NOW + 10))
    assert run.admit(sealed_head(head(), expires=NOW + 99), now=NOW) == (one, False)


def test_a_proof_fits_a_gossip_message() -> None:
    sealed = seal(WORKER, Purpose.EQUIVOCATION, RUN, PROOF, expires=NOW)
    assert len(sealed) <= MAX_GOSSIP
    opened = unseal(sealed, Purpose.EQUIVOCATION, trust.EquivocationProof, now=NOW)
    assert opened.body == PROOF


def test_a_new_term_begins_anywhere_and_ends_the_one_before() -> None:
    run = trusted()
    heads = chain(6)
    for sealed in heads[:4]:
        admitted(run, sealed)
    again = chain(2, term=1, first=2)  # the trainer lost versions 2 and 3, and says so
    assert admitted(run, again[0]).order == (1, 2)
    latest = run.latest()
    assert latest is not None
    assert latest.order == (1, 2)
    for late in heads[4:]:
        with refuses(Reason.ROLLBACK):
            run.admit(late, now=NOW)
    assert run.admit(heads[3], now=NOW)[1] is False  # known, and no news
    assert admitted(run, again[1]).order == (1, 3)


def test_the_same_version_of_another_term_is_no_equivocation() -> None:
    run = trusted()
    admitted(run, sealed_head(head(3)))
    assert admitted(run, sealed_head(head(3, term=1, state=digest(b"other")))).order == (1, 3)


def test_what_is_loaded_is_never_rolled_back() -> None:
    run = trusted()
    heads = [admitted(run, sealed) for sealed in chain(4)]
    run.commit(heads[2])
    assert run.committed == (0, 2)
    for older in heads[:2]:
        with refuses(Reason.ROLLBACK):
            run.commit(older)
    assert run.committed == (0, 2)
    run.commit(heads[2])  # loading it again is not going back
    run.commit(heads[3])
    assert run.committed == (0, 3)


def test_a_lower_version_of_a_higher_term_may_be_loaded() -> None:
    run = trusted()
    run.commit(admitted(run, sealed_head(head(5))))
    run.commit(admitted(run, sealed_head(head(2, term=1))))
    assert run.committed == (1, 2)


def test_a_restart_does_not_forget_what_was_loaded() -> None:
    run = trusted(committed=(1, 5))
    with refuses(Reason.ROLLBACK):
        run.admit(sealed_head(head(9)), now=NOW)  # an epoch that was left
    old = admitted(run, sealed_head(head(4, term=1)))  # a base for others; never loaded
    with refuses(Reason.ROLLBACK):
        run.commit(old)


def test_memory_of_heads_is_bounded_and_keeps_the_newest() -> None:
    run = trusted()
    filler = admitted(run, sealed_head(head(10)))
    for version in range(11, trust.REMEMBERED_HEADS + 10):
        run.heads[0, version] = filler
    admitted(run, sealed_head(head(10**6)))
    assert len(run.heads) == trust.REMEMBERED_HEADS
    assert (0, 10) not in run.heads
    assert (0, 10**6) in run.heads


MANIFEST_HEAD = head(
    POLICY_MANIFEST.version,
    state=POLICY_MANIFEST.state,
    manifest=digest(encode(POLICY_MANIFEST)),
)


def test_a_manifest_is_believed_because_a_head_names_it() -> None:
    run = trusted()
    one = admitted(run, sealed_head(MANIFEST_HEAD))
    assert run.check_manifest(one, encode(POLICY_MANIFEST)) == POLICY_MANIFEST
    for wrong in (b"", encode(POLICY_MANIFEST) + b"\0", encode(POLICY_MANIFEST)[:-1]):
        with refuses(Reason.WRONG_DIGEST):
            run.check_manifest(one, wrong)


@pytest.mark.parametrize(
    "changes", [{"run": OTHER_RUN}, {"version": 1}, {"state": digest(b"another state")}]
)
def test_a_manifest_that_says_otherwise_than_its_head_is_refused(
    changes: dict[str, object],
) -> None:
    document = encode(msgspec.structs.replace(POLICY_MANIFEST, **changes))
    run = trusted()
    named = msgspec.structs.replace(MANIFEST_HEAD, manifest=digest(document))
    with refuses(Reason.WRONG_RUN):
        run.check_manifest(admitted(run, sealed_head(named)), document)


def test_a_named_document_that_is_no_manifest_is_malformed() -> None:
    run = trusted()
    named = msgspec.structs.replace(MANIFEST_HEAD, manifest=digest(b"nonsense"))
    with refuses(Reason.MALFORMED):
        run.check_manifest(admitted(run, sealed_head(named)), b"nonsense")


def test_a_proof_of_equivocation_convinces_a_node_that_saw_neither_head() -> None:
    with pytest.raises(trust.Equivocation, match="two heads of version 1"):
        trust.TrustedRun(RUN, TRAINER.node_id).check_proof(PROOF)


def test_two_heads_that_agree_are_no_proof() -> None:
    same = trust.EquivocationProof(PROOF.first, PROOF.first)
    with refuses(Reason.MALFORMED):
        trust.TrustedRun(RUN, TRAINER.node_id).check_proof(same)


def test_a_proof_against_another_key_is_refused() -> None:
    with refuses(Reason.WRONG_SIGNER):
        trust.TrustedRun(RUN, WORKER.node_id).check_proof(PROOF)


def test_a_head_older_than_all_that_is_remembered_is_no_news() -> None:
    run = trusted()
    filler = admitted(run, sealed_head(head(10)))
    for version in range(11, trust.REMEMBERED_HEADS + 10):
        run.heads[0, version] = filler
    with refuses(Reason.ROLLBACK):
        run.admit(sealed_head(head(9)), now=NOW)
