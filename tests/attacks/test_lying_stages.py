"""Stages that lie, from the states that they sent to the verdict and to the group that goes on without them.

A real model, real stages and a real prefill; only the text was drawn beforehand.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from msgspec import structs
from support.auditor_cases import CUTS, OWN, Case, coarse, item_of, make_case, make_deep, staged
from support.engine_cases import FP32
from support.listed_verifier import ListedVerifier
from support.prefill_core import PrefillCore
from support.protocol_cases import LEASE, NOW, PLAN, TRAINER, played_otherwise

from primerl.crypto.hashing import digest
from primerl.crypto.keys import SecretKey
from primerl.node.environments.environment import Branch, Episode, Score, Task
from primerl.node.inference.engine import GenerateRequest
from primerl.node.inference.hf import HfEngine
from primerl.node.trainer.pipeline_faults import StageFaults
from primerl.node.verification.auditor import AuditItem
from primerl.node.verification.bounds import BUILT_IN
from primerl.node.verification.duplicates import CopyDetector
from primerl.node.verification.local_audits import LocalAudits
from primerl.node.verification.verdict import ReceivedSubmission, Verified
from primerl.node.worker.rollouts import branch_record, crossed
from primerl.protocol import rollouts
from primerl.protocol.envelope import Purpose, seal
from primerl.protocol.errors import Reason
from primerl.protocol.leaders import Leaders
from primerl.protocol.leases import Lease, TaskRef, sample_seed
from primerl.protocol.manifests import RunLimits
from primerl.protocol.pipelines import Stage
from primerl.protocol.reputation import Reputation, ban_test

pytestmark = pytest.mark.asyncio(loop_scope="module")

STAGES = [SecretKey.from_seed(bytes([60 + number]) * 32) for number in range(3)]
RUN = digest(b"a run")
LEADERS = Leaders(RUN, TRAINER.node_id)
TASK = Task(3, digest(b"task"))
ROLLOUTS, LENGTH, TEMPERATURE = 6, 40, 0.8
LEASED = Lease(
    1, (TaskRef(TASK.index, TASK.digest),), ROLLOUTS, LEASE.seed, OWN, LEASE.deadline, 2**20
)
MADE_BY = structs.replace(
    PLAN,
    stages=tuple(
        Stage(key.node_id, first, end)
        for key, first, end in zip(STAGES, (0, *CUTS), (*CUTS, 4), strict=True)
    ),
    shape=structs.replace(PLAN.shape, encoding="raw"),
    spares=(),
)
SEALED = seal(TRAINER, Purpose.PIPELINE, RUN, MADE_BY, expires=NOW)
Change = Callable[[int, AuditItem], AuditItem]


class OneTask:
    """An environment whose only task any text answers."""

    name = "one task"

    async def task(self, index: int, split: Any = "train") -> Task:
        """The task."""
        return TASK

    async def score(self, task: Task, branches: Sequence[Branch]) -> Score:
        """Full marks."""
        return Score(1.0)


class AuditedModel:
    """A model, honest text, and a trainer that audits it all."""

    def __init__(self, case: Case, texts: list[AuditItem], core: PrefillCore) -> None:
        self.case = case
        self._texts = texts
        self._audits = LocalAudits(core)
        self.test = ban_test(case.run.proofs, 1e5)
        self.peers: dict[bytes, Reputation] = defaultdict(Reputation)
        self.parted: list[bytes] = []

    def items(self, liar: int = -1, bits: int = 5) -> list[AuditItem]:
        """Make rollouts as the stages report them; the liar's weights are coarse."""
        own = self.case.states[OWN]
        states = [coarse(own, bits) if rank == liar else own for rank in range(len(STAGES))]
        return [staged(self.case, text, states) for text in self._texts]

    async def judge(self, items: Sequence[AuditItem]) -> Verified:
        """Verify a submission of these rollouts."""
        episodes = [Episode([_branch(item)], Score(1.0)) for item in items]
        plan, parts = crossed([episodes])
        records = tuple(
            rollouts.RolloutRecord((branch_record(episode.branches[0]),), 1.0, "")
            for episode in episodes
        )
        group = rollouts.GroupRecord(TASK.index, TASK.digest, records)
        submission = rollouts.Submission(b"", (group,), "hf", plan, parts)
        verifier = ListedVerifier(
            LEADERS,
            self.case.run,
            [OneTask()],  # type: ignore[list-item]
            self._audits,
            {OWN: self.case.states[OWN]},
            CopyDetector(),
        )
        node = STAGES[0].node_id
        arrival = ReceivedSubmission(1, digest(b"bundle"), node, b"", bytes(32))
        verified = await verifier.verify(submission, LEASED, arrival, version=OWN, rate=1.0)
        StageFaults(
            self.peers.__getitem__, lambda group, node, why: self.parted.append(node), self.test
        ).note(node, verified)
        return verified


def _branch(item: AuditItem) -> Branch:
    start = item.replies[0].start
    count = len(item.token_ids) - start
    return Branch(
        token_ids=list(item.token_ids),
        sampled=[False] * start + [True] * count,
        logprobs=[0.0] * start + list(item.logprobs),
        policy_first=OWN,
        policy_last=OWN,
        finish="length",
        proof=item.proof,
        boundaries=tuple(one.proof for one in item.boundaries),
        plan=SEALED if item.boundaries else b"",
    )


def blamed(verified: Verified) -> list[tuple[int, ...]]:
    """Return the stage that each rollout's verdict blames."""
    assert isinstance(verified.verdict.pipeline, rollouts.PipelineVerdict)
    assert verified.verdict.pipeline.stages == tuple(key.node_id for key in STAGES)
    return [one.stages for one in verified.verdict.pipeline.blamed]


async def _texts(case: Case) -> list[AuditItem]:
    """Sample texts from the model with the lease's seeds."""
    engine = HfEngine(FP32)
    await engine.start(case.model_dir, fingerprint="projection")
    requests = [
        GenerateRequest(
            prompt=tuple(b"tell me more about it"),
            max_tokens=LENGTH,
            temperature=TEMPERATURE,
            seed=sample_seed(RUN, LEASED, STAGES[0].node_id, TASK.digest, index, 0),
            stop_token_ids=(),
        )
        for index in range(ROLLOUTS)
    ]
    try:
        await engine.load(OWN, case.states[OWN])
        found = await asyncio.gather(*(engine.generate(request) for request in requests))
    finally:
        await engine.close()
    return [item_of(*pair, OWN) for pair in zip(requests, found, strict=True)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def opened(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AuditedModel]:
    case = await make_case(tmp_path_factory.mktemp("deep"), "float32", make_deep)
    reject, suspect = BUILT_IN["float32"]
    run = structs.replace(
        case.run,
        trainer=TRAINER.node_id,
        model=structs.replace(case.run.model, stop_token_ids=(), vocab_size=272),
        limits=RunLimits(0, 256),
        proofs=structs.replace(case.run.proofs, reject=reject, suspect=suspect),
    )
    run = played_otherwise(run, temperature=TEMPERATURE, max_tokens=LENGTH, group_size=ROLLOUTS)
    case = replace(case, run=run)
    core = PrefillCore(FP32)
    await core.start(case.model_dir, run)
    yield AuditedModel(case, await _texts(case), core)
    await core.close()


@pytest_asyncio.fixture(loop_scope="module")
async def court(opened: AuditedModel) -> AuditedModel:
    """Without memory of earlier tests."""
    opened.peers.clear()
    opened.parted.clear()
    return opened


async def test_honest_stages_are_accepted_and_nobody_is_named(court: AuditedModel) -> None:
    verified = await court.judge(court.items())
    assert (verified.verdict.accepted, verified.rejections) == (ROLLOUTS, [])
    assert blamed(verified) == []
    assert court.parted == []
    assert {peer.cheat_nats for peer in court.peers.values()} == {0.0}


@pytest.mark.parametrize("liar", [1, 2])
async def test_a_stage_with_coarse_weights_is_named_and_its_group_goes_on_without_it(
    court: AuditedModel, liar: int
) -> None:
    verified = await court.judge(court.items(liar))
    assert verified.verdict.accepted == 0
    assert {one.reason for one in verified.rejections} == {Reason.WRONG_MODEL}
    assert all(f"stage {liar} of 0..2" in one.detail for one in verified.rejections)
    assert blamed(verified) == [(liar,)] * ROLLOUTS
    assert court.parted == [STAGES[liar].node_id]
    honest = [key.node_id for rank, key in enumerate(STAGES) if rank != liar]
    assert not any(court.peers[node].banned for node in honest)


async def test_a_first_stage_with_coarse_weights_is_banned_like_any_worker(
    court: AuditedModel,
) -> None:
    verified = await court.judge(court.items(0))
    assert blamed(verified) == [(0,)] * ROLLOUTS
    assert court.peers[STAGES[0].node_id].banned
    assert court.parted == []


async def test_a_first_stage_that_says_nothing_of_its_stages_answers_for_them(
    court: AuditedModel,
) -> None:
    silent = [replace(item, boundaries=()) for item in court.items(2)]
    verified = await court.judge(silent)
    assert verified.verdict.accepted == 0
    assert verified.plan is None
    assert court.peers[STAGES[0].node_id].banned
    assert court.parted == []


async def test_a_liar_that_copies_what_was_said_before_it_is_named_all_the_same(
    court: AuditedModel,
) -> None:
    """The liar copies the previous stage's fingerprints for its own states."""
    copied = [
        replace(
            item,
            boundaries=[
                item.boundaries[0],
                replace(item.boundaries[1], proof=item.boundaries[0].proof),
            ],
        )
        for item in court.items(1)
    ]
    assert blamed(await court.judge(copied)) == [(1,)] * ROLLOUTS


async def test_a_first_stage_that_frames_another_one_is_believed_once_but_bans_nobody(
    court: AuditedModel,
) -> None:
    """What remains: its own weights are coarse, and it states an honest boundary of its own."""
    honest, lying = court.items(), court.items(0)
    framed = [
        replace(bad, boundaries=[good.boundaries[0], bad.boundaries[1]])
        for good, bad in zip(honest, lying, strict=True)
    ]
    assert blamed(await court.judge(framed)) == [(1,)] * ROLLOUTS
    assert court.parted == [STAGES[1].node_id]
    assert not court.peers[STAGES[1].node_id].banned
    assert court.peers[STAGES[0].node_id].cheat_nats > 0


async def test_scribbling_on_the_trail_of_right_rollouts_costs_no_rollout_and_names_nobody(
    court: AuditedModel,
) -> None:
    scribbled = [
        replace(
            item,
            boundaries=[
                replace(item.boundaries[0], proof=b"\xff" * len(item.boundaries[0].proof)),
                item.boundaries[1],
            ],
        )
        for item in court.items()
    ]
    verified = await court.judge(scribbled)
    assert verified.verdict.accepted == ROLLOUTS
    assert blamed(verified) == [(0, 1, 2)] * ROLLOUTS
    assert not any(peer.banned for peer in court.peers.values())


async def test_the_last_stage_that_draws_as_it_likes_shares_the_doubt_with_the_first(
    court: AuditedModel,
) -> None:
    forged = [
        replace(item, logprobs=[value - 0.5 for value in item.logprobs]) for item in court.items()
    ]
    verified = await court.judge(forged)
    assert {one.reason for one in verified.rejections} == {Reason.BAD_LOGPROBS}
    assert blamed(verified) == [(0, 2)] * ROLLOUTS
    assert not any(peer.banned for peer in court.peers.values())
