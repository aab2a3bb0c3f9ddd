"""The bounds of a run in its ledger: signed, kept over restarts, and moved by references alone."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from support.bare_node import bare_services
from support.noise_cases import H100, RTX, honest_4b
from support.protocol_cases import BOUNDS, LEASE, PLAN, PROOFS, RUN, STRANGER, TRAINER, sealed

from primerl.node.storage.ledger import Ledger
from primerl.node.trainer.bounds_book import BoundsBook
from primerl.node.verification.bounds import PROVISIONAL
from primerl.node.verification.judgement import judge
from primerl.node.verification.self_calibration import ENOUGH, RENEW, SelfCalibration
from primerl.node.verification.verdict import (
    AuditResults,
    ReceivedSubmission,
    Verified,
    make_verdict,
)
from primerl.protocol.envelope import Purpose, seal, unseal
from primerl.protocol.numerics import MAX_LABEL, ClassBounds, NumericsClass
from primerl.protocol.reputation import CANARIES, MAX_MISPLACED, Reputation
from primerl.protocol.rollouts import Submission, Verdict
from primerl.protocol.version import MAX_NAME

OWN, OTHER = b"o" * 32, b"x" * 32
CONTRACT = replace(PROOFS, bounds="measured", reject=PROVISIONAL, suspect=PROVISIONAL)


class Trainer:
    """A trainer's book over a ledger that outlives it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.references = [OWN]
        self.arrivals = 0
        self.now = 100.0
        self._numbers = np.random.default_rng(0)
        self.start()

    def start(self) -> None:
        self.ledger = Ledger(self._path / "ledger.db", fsync=False)
        self.peers: dict[bytes, Reputation] = defaultdict(Reputation)
        self.calibration = SelfCalibration(CONTRACT, self.references)
        services = bare_services(TRAINER, ledger=self.ledger)
        self.book = BoundsBook(
            services, self.calibration, self.peers.__getitem__, clock=lambda: self.now
        )

    def restart(self) -> None:
        self.ledger.close()
        self.start()

    def send(
        self,
        node: bytes,
        numerics: NumericsClass | None,
        count: int = 8,
        *,
        scale: float = 1.0,
        version: int = 0,
        keep: bool = True,
        **forged: float,
    ) -> Verdict:
        """Audit this number of rollouts of a node, judge them and keep the result."""
        submission = Submission(lease=b"", groups=(), engine="vllm", numerics=numerics)
        conditions = self.book.conditions(node, submission)
        assert conditions is not None
        found = [replace(one, **forged) for one in honest_4b(self._numbers, count, scale)]
        audited = AuditResults(
            found, [judge(one, conditions.contract) for one in found], versions=[version] * count
        )
        self.arrivals += 1
        arrival = ReceivedSubmission(
            self.arrivals, self.arrivals.to_bytes(32, "big"), node, b"", bytes(32)
        )
        verdict = make_verdict(arrival, LEASE, 0, [], audited, 1.0, None, conditions.bounds)
        measured = self.book.judged(node, Verified(verdict, [], [], audited))
        if keep:
            told = seal(TRAINER, Purpose.VERDICT, RUN, verdict, recipient=node, expires=1)
            self.ledger.add_verdict(node, told, self.arrivals, {}, measured.honest, measured.bounds)
        return verdict

    def facts(self) -> list[ClassBounds]:
        """The bounds that the trainer tells on request."""
        return [
            unseal(one, Purpose.BOUNDS, ClassBounds, now=0, run=RUN, signer=TRAINER.node_id).body
            for one in self.book.sealed()
        ]


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    made = Trainer(tmp_path)
    yield made
    made.ledger.close()


def test_bounds_are_a_signed_fact_that_survives_a_restart(trainer: Trainer) -> None:
    for _ in range(ENOUGH // 8):
        trainer.send(OWN, H100, version=3)
    (fact,) = trainer.facts()
    assert (fact.numerics, fact.rollouts, fact.number) == (H100, ENOUGH, 1)
    trainer.restart()
    assert trainer.facts() == [fact]
    assert trainer.calibration.bounds_of(H100) == fact
    assert trainer.send(OTHER, H100).bounds == fact, "the verdict names what judged"
    for _ in range(RENEW // 8):
        trainer.send(OWN, H100, version=5)
    (renewed,) = trainer.facts()
    assert (renewed.number, renewed.rollouts) == (2, ENOUGH + RENEW)
    assert (renewed.first_version, renewed.last_version) == (3, 5)


def test_a_class_on_its_way_to_bounds_keeps_what_was_measured_too(trainer: Trainer) -> None:
    trainer.send(OWN, H100, ENOUGH - 8)
    trainer.restart()
    trainer.send(OWN, H100, 8)
    assert [one.rollouts for one in trainer.facts()] == [ENOUGH]


def test_what_was_not_written_with_its_verdict_never_was(trainer: Trainer) -> None:
    trainer.send(OWN, H100, ENOUGH, keep=False)
    trainer.restart()
    assert trainer.facts() == []
    assert trainer.calibration.bounds_of(H100) is None


def test_a_rollback_takes_bounds_back_with_the_versions_that_made_them(trainer: Trainer) -> None:
    trainer.send(OWN, H100, ENOUGH, version=4)
    trainer.send(OWN, H100, RENEW, version=9, scale=3.0)
    (wide,) = trainer.facts()
    trainer.restart()
    trainer.book.go_back(1, 6)
    (narrow,) = trainer.facts()
    assert (narrow.number, narrow.term, narrow.last_version) == (wide.number + 1, 1, 4)
    assert narrow.reject.fingerprint < wide.reject.fingerprint
    trainer.restart()
    trainer.book.go_back(1, 6)
    assert trainer.facts() == [narrow], "once is enough"
    trainer.book.go_back(2, 3)
    trainer.restart()
    (gone,) = trainer.facts()
    assert gone.provisional
    bounds = trainer.send(OTHER, H100).bounds
    assert isinstance(bounds, ClassBounds)
    assert bounds.provisional


def test_strangers_leave_no_trace_in_the_evidence(trainer: Trainer) -> None:
    trainer.send(OWN, H100, ENOUGH)
    facts = trainer.facts()
    for _ in range(20):
        trainer.send(OTHER, H100, scale=1.2)
        trainer.send(OTHER, RTX)
        trainer.send(OTHER, None)
    assert trainer.facts() == facts
    assert len(trainer.ledger.honest()) == ENOUGH


def test_rejected_rollouts_of_a_reference_make_no_bounds(trainer: Trainer) -> None:
    trainer.send(OWN, H100, ENOUGH, fingerprint=1.4)
    assert trainer.facts() == []
    assert trainer.ledger.honest() == []


def test_a_banned_reference_is_struck_from_the_evidence(trainer: Trainer) -> None:
    trainer.send(OWN, H100, ENOUGH)
    trainer.peers[OWN].banned = "bad_proof: no honest software makes this"
    trainer.send(OWN, H100)
    assert trainer.ledger.honest() == []
    assert [one.provisional for one in trainer.facts()] == [True]
    trainer.restart()
    assert trainer.calibration.bounds_of(H100) is None


def test_bounds_that_another_key_signed_are_not_taken_from_a_ledger(trainer: Trainer) -> None:
    forged = seal(STRANGER, Purpose.BOUNDS, RUN, BOUNDS, expires=2**40)
    other_run = seal(TRAINER, Purpose.BOUNDS, bytes(32), BOUNDS, expires=2**40)
    verdict = sealed(Purpose.BOUNDS)
    for bad in (forged, other_run, verdict[:-1], b""):
        trainer.ledger.drop_honest({b"class": bad})
        trainer.restart()
        assert trainer.calibration.bounds_of(BOUNDS.numerics) is None


def test_a_plan_that_cannot_be_opened_is_no_nodes_own_work(trainer: Trainer) -> None:
    submission = Submission(lease=b"", groups=(), engine="vllm", plan=b"junk", numerics=H100)
    conditions = trainer.book.conditions(OWN, submission)
    assert conditions is not None
    assert conditions.unlearned
    assert not conditions.by_trainer
    foreign = seal(STRANGER, Purpose.PIPELINE, RUN, PLAN, expires=2**40)
    assert trainer.book.conditions(OWN, replace(submission, plan=foreign)) == conditions


# -- waiting for bounds ------------------------------------------------------------------------------


def test_a_stranger_waits_for_the_bounds_of_its_class_and_is_told_about_when(
    trainer: Trainer,
) -> None:
    said = trainer.book.waits_for([OTHER], H100)
    assert "nothing would be learned from vllm 0.25.1 on H100, tp 1, bfloat16" in said
    assert "no reference of that class has sent work: the run's operator has to name one" in said
    assert trainer.book.waits_for([OWN], H100) == "", "its work makes the bounds"
    trainer.send(OWN, H100, 8)
    assert trainer.book.waits_for([OTHER], H100).endswith("64 rollouts of references, 8 are in")
    trainer.now += 10.0
    trainer.send(OWN, H100, 16)
    said = trainer.book.waits_for([OTHER], H100)
    assert said.endswith("64 rollouts of references, 24 are in, the rest in about 25 s")
    trainer.send(OWN, H100, 40)
    assert trainer.book.waits_for([OTHER], H100) == ""
    assert trainer.book.waits_for([OTHER], RTX), "of another class nothing is known"
    assert trainer.book.waits_for([OTHER], None), "nor of one that names none"


def test_a_reference_with_a_strangers_stage_waits_like_a_stranger(trainer: Trainer) -> None:
    assert trainer.book.waits_for([OWN, OTHER], H100)
    assert trainer.book.waits_for([OWN], H100) == ""


def test_a_stranger_waits_again_when_the_only_reference_is_banned(trainer: Trainer) -> None:
    trainer.send(OWN, H100, ENOUGH)
    assert trainer.book.waits_for([OTHER], H100) == ""
    trainer.peers[OWN].banned = "bad_proof: no honest software makes this"
    trainer.send(OWN, H100)
    assert "all workers of verification.references are banned" in trainer.book.waits_for(
        [OTHER], H100
    )


def test_in_a_run_without_references_nobody_waits(trainer: Trainer) -> None:
    trainer.references = []
    trainer.restart()
    assert trainer.book.waits_for([OTHER], H100) == ""


def test_a_class_with_the_longest_names_fits_into_a_reply(trainer: Trainer) -> None:
    longest = NumericsClass("e" * MAX_LABEL, "r" * MAX_LABEL, "d" * MAX_LABEL, 8, "t" * MAX_LABEL)
    assert 0 < len(trainer.book.waits_for([OTHER], longest)) <= MAX_NAME


def test_only_bounds_that_were_withdrawn_excuse_work_that_is_not_learned_from(
    trainer: Trainer,
) -> None:
    assert not trainer.book.excused(OTHER, RTX), "attack: leased as one class, sent as another"
    trainer.send(OWN, H100, ENOUGH)
    trainer.book.go_back(1, -1)
    assert trainer.book.waits_for([OTHER], H100)
    assert trainer.book.excused(OTHER, H100)
    assert trainer.book.excused(OWN, RTX), "a reference, whose pipeline may have got a new stage"


# -- claims ------------------------------------------------------------------------------------------


def test_an_honest_worker_is_put_into_its_class_and_then_audited_by_sample(
    trainer: Trainer,
) -> None:
    trainer.send(OWN, H100, 2 * ENOUGH)
    submission = Submission(lease=b"", groups=(), engine="vllm", numerics=H100)
    for _ in range(CANARIES // 8):
        conditions = trainer.book.conditions(OTHER, submission)
        assert conditions is not None
        assert conditions.all_audited
        trainer.send(OTHER, H100)
    conditions = trainer.book.conditions(OTHER, submission)
    assert conditions is not None
    assert not conditions.all_audited
    assert trainer.peers[OTHER].placement.placed


def test_a_worker_with_more_noise_than_its_class_is_refused_by_both_names(
    trainer: Trainer,
) -> None:
    trainer.send(OWN, H100, 2 * ENOUGH)
    trainer.send(OWN, RTX, 2 * ENOUGH, scale=2.0)
    trainer.send(OTHER, H100, CANARIES, scale=1.9)
    why = trainer.peers[OTHER].refused
    assert why.startswith("wrong numerics class: it claims vllm 0.25.1 on H100")
    assert "they look like vllm 0.25.1 on RTX 4090" in why
    assert not trainer.peers[OTHER].banned, "a wrong claim is no fraud"
    trainer.book.claim(OTHER, RTX)
    assert trainer.peers[OTHER].refused == "", "under its right name it may start anew"
    trainer.send(OTHER, RTX, CANARIES, scale=1.9)
    assert trainer.peers[OTHER].placement.placed
    trainer.book.claim(OTHER, H100)
    assert "as it was found before" in trainer.peers[OTHER].refused


def test_a_claim_of_a_wide_class_gains_that_classs_noise_and_no_more(trainer: Trainer) -> None:
    trainer.send(OWN, H100, 2 * ENOUGH)
    trainer.send(OWN, RTX, 2 * ENOUGH, scale=2.0)
    wide = trainer.calibration.bounds_of(RTX)
    assert wide is not None
    verdict = trainer.send(OTHER, RTX, CANARIES, scale=7.0)
    assert verdict.bounds == wide
    assert trainer.peers[OTHER].refused


def test_a_worker_that_changes_its_class_in_mid_run_starts_anew(trainer: Trainer) -> None:
    trainer.send(OWN, H100, 2 * ENOUGH)
    trainer.send(OWN, RTX, 2 * ENOUGH, scale=2.0)
    trainer.send(OTHER, H100, CANARIES)
    assert trainer.peers[OTHER].placement.placed
    submission = Submission(lease=b"", groups=(), engine="vllm", numerics=RTX)
    conditions = trainer.book.conditions(OTHER, submission)
    assert conditions is not None
    assert conditions.all_audited
    trainer.send(OTHER, RTX, 8)
    assert trainer.peers[OTHER].placement.canaries == 8


def test_a_worker_that_tries_one_class_after_the_other_is_refused_for_good(
    trainer: Trainer,
) -> None:
    classes = [replace(H100, release=f"0.{number}") for number in range(MAX_MISPLACED + 2)]
    for numerics in classes:
        trainer.send(OWN, numerics, ENOUGH)
    for numerics in classes[:MAX_MISPLACED]:
        trainer.send(OTHER, numerics, CANARIES, scale=3.0)
        assert trainer.peers[OTHER].refused
    for numerics in classes[MAX_MISPLACED:]:
        trainer.book.claim(OTHER, numerics)
        assert "claimed 4 numerics classes that it is not of" in trainer.peers[OTHER].refused


def test_a_refused_worker_that_its_operator_names_makes_the_bounds_of_its_class(
    trainer: Trainer,
) -> None:
    trainer.send(OWN, H100, 2 * ENOUGH)
    trainer.send(OTHER, H100, CANARIES, scale=1.9)
    before = trainer.peers[OTHER].snapshot()
    assert trainer.peers[OTHER].refused
    trainer.references.append(OTHER)
    trainer.restart()
    trainer.peers[OTHER] = Reputation.restore(before, ())
    trainer.book.claim(OTHER, H100)
    assert trainer.peers[OTHER].refused == ""
    trainer.send(OTHER, H100, 2 * ENOUGH, scale=1.9)
    (wider,) = trainer.facts()
    assert wider.rollouts == 4 * ENOUGH
    trainer.send(b"z" * 32, H100, CANARIES, scale=1.9)
    assert trainer.peers[b"z" * 32].placement.placed, "others like it are of the class now"


def test_a_run_with_fixed_bounds_has_none_of_this(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db", fsync=False)
    peers = defaultdict[bytes, Reputation](Reputation)
    book = BoundsBook(bare_services(TRAINER, ledger=ledger), None, peers.__getitem__)
    submission = Submission(lease=b"", groups=(), engine="vllm", numerics=H100)
    assert book.conditions(OTHER, submission) is None
    book.go_back(1, 1)
    book.claim(OTHER, H100)
    assert book.sealed() == ()
    ledger.close()
