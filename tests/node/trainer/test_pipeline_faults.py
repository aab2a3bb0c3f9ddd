"""Faults laid to stages: a liar is soon out of pipelines, and no node is banned on the word of one other."""

from collections import Counter, defaultdict
from dataclasses import replace

import msgspec
import pytest
from support.protocol_cases import LEASE, NOW, PLAN, PROOFS, SUBMITTED

from primerl.crypto.hashing import digest
from primerl.crypto.keys import SecretKey
from primerl.node.trainer.pipeline_faults import StageFaults, observed, spared
from primerl.node.verification.judgement import Judgement, StageAttribution
from primerl.node.verification.verdict import AuditResults, Verified
from primerl.protocol import reputation
from primerl.protocol.errors import Reason
from primerl.protocol.pipelines import PipelinePlan, Stage
from primerl.protocol.rollouts import Evidence, Verdict

TEST = reputation.ban_test(PROOFS, 1e5)
NODES = [SecretKey.from_seed(bytes([40 + number]) * 32).node_id for number in range(6)]
WRONG = Judgement(Reason.WRONG_MODEL, "off", True)
ODD = Judgement(None, "", True)
FINE = Judgement(None, "", False)
JUDGED: dict[reputation.Outcome, Judgement] = {"clean": FINE, "suspect": ODD, "rejected": WRONG}


def plan(*nodes: bytes, generation: int = 1) -> PipelinePlan:
    """One layer each."""
    stages = tuple(Stage(node, rank, rank + 1) for rank, node in enumerate(nodes))
    group = digest(b"".join(nodes))
    return msgspec.structs.replace(
        PLAN, stages=stages, spares=(), group=group, generation=generation
    )


def submission(
    made_by: PipelinePlan, outcome: reputation.Outcome, *stages: int, count: int = 8
) -> Verified:
    """So many audited rollouts, each laid to these stages."""
    blames = [StageAttribution(0, number, (0.1,), outcome, stages) for number in range(count)]
    evidence = [Evidence(0, number, 64, 0.2, 0, 0, 0, 0, 9.0) for number in range(count)]
    audits = AuditResults(evidence, [JUDGED[outcome]] * count, blames)
    verdict = Verdict(SUBMITTED, LEASE.lease_id, 0, (), count)
    return Verified(verdict, [], [], audits, made_by)


class Court:
    """A trainer's memory, and what it took apart."""

    def __init__(self) -> None:
        self.peers: dict[bytes, reputation.Reputation] = defaultdict(reputation.Reputation)
        self.parted: list[tuple[bytes, bytes]] = []
        self._faults = StageFaults(
            self.peers.__getitem__, lambda group, node, why: self.parted.append((group, node)), TEST
        )

    def take_in(self, verified: Verified) -> None:
        """As the submission queue does."""
        assert verified.plan is not None
        node = verified.plan.stages[0].node
        rejected = sum(one.reason is not None for one in verified.audited.judgements)
        reasons = Counter({Reason.WRONG_MODEL: rejected})
        self.peers[node].record("sums", 0, reasons, NOW, spared=spared(verified.audited))
        self._faults.note(node, verified)


def test_means_that_a_validator_states_do_not_count() -> None:
    seen = [Evidence(0, 0, 64, 0.2, 0, 0, 0, 0, 9.0, means=(0.1,) * 9)]
    own = AuditResults(seen, [JUDGED["clean"]])
    assert [one.means for one in observed(own)] == [(*[0.1] * 9, 0.2)]
    assert [one.means for one in observed(replace(own, validator=NODES[1]))] == [()]


def test_a_stage_that_is_named_is_out_at_the_first_submission_but_not_banned() -> None:
    court, made_by = Court(), plan(*NODES[:3])
    court.take_in(submission(made_by, "rejected", 1))
    assert court.parted == [(made_by.group, NODES[1])]
    liar = court.peers[NODES[1]]
    assert (liar.banned, liar.accusers) == ("", (NODES[0].hex(),))
    assert liar.cheat_nats == pytest.approx(reputation.ALONE_MOST * TEST.bar)
    assert court.peers[NODES[2]].cheat_nats == 0


def test_one_rejected_rollout_alone_takes_nothing_apart() -> None:
    court = Court()
    court.take_in(submission(plan(*NODES[:3]), "rejected", 1, count=1))
    assert court.parted == []
    assert 0 < court.peers[NODES[1]].cheat_nats < reputation.NAMED_AT * TEST.bar


def test_two_first_stages_that_name_the_same_one_have_it_banned() -> None:
    court = Court()
    for generation in range(3):
        court.take_in(submission(plan(*NODES[:2], generation=generation), "rejected", 1))
    assert court.peers[NODES[1]].banned == ""
    court.take_in(submission(plan(NODES[2], NODES[1]), "rejected", 1))
    assert court.peers[NODES[1]].banned.startswith("faults as a stage of pipelines")


@pytest.mark.parametrize("submissions", [1, 12])
def test_a_node_that_signs_for_the_fault_of_another_bears_a_small_part_of_it_however_much_was_under_way(
    submissions: int,
) -> None:
    court = Court()
    for _ in range(submissions):
        court.take_in(submission(plan(*NODES[:3]), "rejected", 2))
    first, before, liar = (court.peers[node] for node in NODES[:3])
    assert 0 < first.cheat_nats <= reputation.VOUCHED_MOST * TEST.bar
    assert 0 < before.cheat_nats <= reputation.VOUCHED_MOST * TEST.bar, "it sent what the liar got"
    assert not first.of("sums").quarantined
    assert first.recent_fault, "all that it sends next is audited"
    assert liar.cheat_nats > 5 * first.cheat_nats


def test_a_node_that_frames_one_neighbour_after_the_other_is_banned_itself() -> None:
    """Stage 0 states what it likes of the others: the names differ, its own is always there."""
    court = Court()
    number = 0
    while not court.peers[NODES[0]].banned:
        victim = SecretKey.from_seed(bytes([80 + number]) * 32).node_id
        court.take_in(submission(plan(NODES[0], victim), "rejected", 1, count=16))
        assert court.peers[victim].banned == ""
        number += 1
    assert 1 / reputation.VOUCHED_MOST - 1 <= number <= 1 / reputation.VOUCHED_MOST + 1


def test_clean_work_makes_up_for_a_bad_neighbour() -> None:
    court = Court()
    court.take_in(submission(plan(*NODES[:2]), "rejected", 1))
    court.take_in(submission(plan(NODES[0], NODES[2]), "clean"))
    assert court.peers[NODES[0]].cheat_nats == 0
    assert court.peers[NODES[2]].cheat_nats == 0


def test_a_fault_that_can_be_of_two_bans_neither_but_parts_them() -> None:
    court = Court()
    made_by = plan(*NODES[:2])
    for _ in range(12):  # much of it was under way when they were parted
        court.take_in(submission(made_by, "rejected", 0, 1))
    assert set(court.parted) == {(made_by.group, NODES[1])}
    assert [court.peers[node].banned for node in NODES[:2]] == ["", ""]
    assert not court.peers[NODES[0]].of("sums").quarantined
    # The one of the two that it was goes on with others.
    for partner in NODES[2:4]:
        court.take_in(submission(plan(NODES[0], partner), "rejected", 0, 1))
    assert court.peers[NODES[0]].banned
    assert [court.peers[node].banned for node in NODES[1:4]] == ["", "", ""]


def test_a_first_stage_that_is_named_alone_is_treated_as_any_worker() -> None:
    court = Court()
    court.take_in(submission(plan(*NODES[:2]), "rejected", 0))
    assert court.peers[NODES[0]].banned
    assert court.peers[NODES[0]].of("sums").quarantined
    assert court.parted == []


def test_suspect_rollouts_add_up_against_the_stage_that_they_are_laid_to() -> None:
    court, made_by = Court(), plan(*NODES[:3])
    court.take_in(submission(made_by, "suspect", 2))
    assert court.parted == [(made_by.group, NODES[2])]
    assert court.peers[NODES[2]].accusers == (), "nothing was rejected"
    assert court.peers[NODES[2]].banned == ""


def test_a_group_that_stays_on_another_policy_is_parted_and_its_first_stage_banned() -> None:
    """No rollout is wrong, all are a little likelier under another version; it can be anybody's doing."""
    court = Court()
    for partner in NODES[1:]:
        for _ in range(40):
            verified = submission(plan(NODES[0], partner), "clean")
            blames = [replace(one, other_policy=1.5) for one in verified.audited.blames]
            court.take_in(replace(verified, audited=replace(verified.audited, blames=blames)))
            if court.parted and court.parted[-1][1] == partner:
                break
    assert court.parted[0][1] == NODES[1]
    assert court.peers[NODES[0]].banned.startswith("another policy version")
    assert not any(court.peers[node].banned for node in NODES[1:])


def test_what_one_node_made_alone_is_its_own() -> None:
    verified = submission(plan(*NODES[:2]), "rejected", 1)
    plain = AuditResults(verified.audited.evidence, verified.audited.judgements)
    assert observed(plain) == [reputation.Audited("rejected", 9.0)] * 8
    assert spared(plain) == 0


def test_rollouts_without_boundaries_are_forgiven_as_many_as_can_have_been_under_way() -> None:
    """They were begun with a stage that is gone; for going on like that the first stage is to blame."""
    court, made_by = Court(), plan(*NODES[:2])
    verified = submission(made_by, "rejected", count=PLAN.shape.max_sequences)
    audited = verified.audited
    blames = [replace(one, distances=()) for one in audited.blames]
    verified = replace(verified, audited=replace(audited, blames=blames))
    court.take_in(verified)
    assert court.parted == []
    assert court.peers[NODES[1]].cheat_nats == 0
    assert 0 < court.peers[NODES[0]].cheat_nats <= reputation.VOUCHED_MOST * TEST.bar
    court.take_in(verified)
    assert court.peers[NODES[0]].banned
    assert court.peers[NODES[1]].cheat_nats == 0


def test_what_is_remembered_of_accusers_is_stored() -> None:
    court = Court()
    court.take_in(submission(plan(*NODES[:2]), "rejected", 1))
    liar = court.peers[NODES[1]]
    assert reputation.Reputation.restore(liar.snapshot(), ()).accusers == liar.accusers
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(reputation.Reputation().snapshot()))
    assert "accusers" not in fields
    again = msgspec.convert(fields, type(liar.snapshot()))
    assert reputation.Reputation.restore(again, ()).accusers == ()


@pytest.mark.parametrize(("outcome", "told"), [("suspect", 0), ("rejected", 8), ("clean", 8)])
def test_the_first_rollouts_of_a_numerics_class_ban_no_worker_for_suspicions_alone(
    outcome: reputation.Outcome, told: int
) -> None:
    """It may be of another class than it claims: then it is refused that one, and may state its own."""
    audited = submission(plan(*NODES[:3]), outcome, 0).audited
    assert len(observed(audited, placing=True)) == told
    assert len(observed(audited)) == 8
