"""Supports that top_p and top_k did not leave, to have other probabilities trained: an audit sees them.

Every cheat draws as it should, and states the logprobs that belong to its supports. Honest ones pass, also in
bfloat16 and over two turns.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import pytest_asyncio
from msgspec import structs
from support import protocol_cases
from support.auditor_cases import OWN, Case, generate, judged, make_case, measured
from support.engine_cases import FP32, SHAPE, make_qwen3
from support.prefill_core import PrefillCore

from primerl.node.inference.fingerprint import Projection
from primerl.node.inference.vllm_arguments import is_installed
from primerl.node.models.support import pack_support, unpack_support
from primerl.node.verification.auditor import AuditItem, Auditor, Measured
from primerl.node.verification.checks import CheckedSubmission, check_submission
from primerl.node.verification.measures import drawn_tokens
from primerl.node.verification.vllm_auditor import VllmAuditor
from primerl.protocol.errors import Reason
from primerl.protocol.manifests import RunManifest
from primerl.protocol.pipelines import PipelinePlan
from primerl.protocol.rollouts import RolloutRecord, pack_u32
from primerl.scripts.bench.calibrate_cheats import BATCH, WANTED, batches_caught

ON_ONE_LOOP = pytest.mark.asyncio(loop_scope="module")
VLLM = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not is_installed(), reason="vLLM is not installed"),
]
TOP_K, TOP_P = 100, 0.9
"""Limits of the lease."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("hf", "float32"), marks=pytest.mark.slow),
        ("hf", "bfloat16"),
        pytest.param(("vllm", "float32"), marks=VLLM),
    ],
    ids="-".join,
)
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    """What audits, and the numerics of the run. The worker's engine is the embedded one."""
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def case(kind: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Case:
    shape = SHAPE | {"head_dim": 32}  # vLLM without a GPU computes no smaller heads
    make = partial(make_qwen3, shape=shape)
    case = await make_case(tmp_path_factory.mktemp("supports"), kind[1], make)
    honest = await generate(
        case.model_dir, case.states[OWN], kind[1], top_k=TOP_K, top_p=TOP_P, supported=True
    )
    return replace(case, honest=honest)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def auditor(kind: tuple[str, str], case: Case) -> AsyncIterator[Auditor]:
    auditor = VllmAuditor(FP32, timeout_s=240.0) if kind[0] == "vllm" else PrefillCore(FP32)
    await auditor.start(case.model_dir, case.run)
    yield auditor
    await auditor.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def honest(case: Case, auditor: Auditor) -> list[Measured]:
    return measured(await auditor.audit(case.honest, case.states))


@ON_ONE_LOOP
async def test_honest_supports_are_no_fault_of_their_rollouts(
    case: Case, honest: list[Measured]
) -> None:
    sizes = [
        int((row >= 0).sum())
        for item in case.honest
        for row in unpack_support(item.support, drawn_tokens(item))
    ]
    assert min(sizes) < 10 < 60 < max(sizes) <= TOP_K
    for one in honest:
        assert judged(case, honest, one).reason is None
        assert not judged(case, honest, one).suspect


Forge = Callable[[Case, AuditItem], AuditItem]
CHEATS: dict[str, Forge] = {
    "wider": lambda case, item: case.stated(item, TOP_K, 0.95),
    "narrower": lambda case, item: case.stated(item, TOP_K, 0.85),
    "of more by rank": lambda case, item: case.stated(item, 120, TOP_P),
    "of fewer by rank": lambda case, item: case.stated(item, 80, TOP_P),
    "half as many": lambda case, item: case.stated(item, TOP_K, 0.5),
}


@ON_ONE_LOOP
@pytest.mark.parametrize("name", CHEATS)
async def test_wider_and_narrower_supports_are_caught_within_16_rollouts(
    case: Case, honest: list[Measured], auditor: Auditor, name: str
) -> None:
    answers = await auditor.audit([CHEATS[name](case, item) for item in case.honest], case.states)
    found = [one for one in answers if isinstance(one, Measured)]
    judgements = [judged(case, honest, one) for one in found]
    # one that top_k forbids is refused unmeasured, before anything is computed
    rejected = len(answers) - len(found) + sum(one.reason is not None for one in judgements)
    suspects = len(answers) - len(found) + sum(one.suspect for one in judgements)
    print(
        f"\n{case.run.proofs.dtype} {name}: {rejected} rejected of {len(answers)}, mean margins ",
        end="",
    )
    print(*(f"{sum(one.sampling for one in part) / len(part):.4f}" for part in (honest, found)))
    assert batches_caught(len(answers), rejected, suspects, BATCH) >= WANTED
    assert {one.reason for one in judgements} <= {Reason.BAD_SAMPLING, None}
    most = max(one.logprob for one in honest)
    assert max(one.logprob for one in found) <= most + 1e-5  # they are those of the supports


@ON_ONE_LOOP
async def test_a_single_token_left_out_or_added_is_measured_by_its_distance(
    case: Case, honest: list[Measured], auditor: Auditor
) -> None:
    [item] = case.honest[:1]
    drawn = drawn_tokens(item)
    rows = unpack_support(item.support, drawn)
    wide = int((rows >= 0).sum(1).argmax())
    fewer, more = rows.copy(), rows.copy()
    others = [token for token in rows[wide].tolist() if token not in (-1, drawn[wide])]
    fewer[wide][fewer[wide] == others[0]] = -1
    fewer[wide] = sorted(fewer[wide], reverse=True)
    size = int((rows[wide] >= 0).sum())
    more[wide, size % rows.shape[1]] = next(n for n in range(256) if n not in rows[wide])
    hidden = rows.copy()
    hidden[wide] = -1
    forged = [replace(item, support=pack_support(one, drawn)) for one in (fewer, more)]
    narrow, wider = measured(await auditor.audit(forged, case.states))
    assert narrow.sampling_max > honest[0].sampling_max
    assert narrow.sampling > honest[0].sampling
    assert wider.sampling >= honest[0].sampling
    refused = await auditor.audit([replace(item, support=pack_support(hidden, drawn))], case.states)
    assert not isinstance(refused[0], Measured)


@ON_ONE_LOOP
async def test_supports_that_are_said_to_be_too_large_are_caught(
    case: Case, honest: list[Measured], auditor: Auditor
) -> None:
    """Under top_p alone any number of tokens may be left: the lease says so, the logits do not."""
    forged = [
        replace(case.forged(item), support=bytes([255] * len(item.versions)), top_k=0)
        for item in case.honest
    ]
    found = measured(await auditor.audit(forged, case.states))
    assert all(judged(case, honest, one).reason is Reason.BAD_SAMPLING for one in found)


@ON_ONE_LOOP
async def test_draws_from_all_tokens_are_caught_though_each_is_added_to_its_support(
    kind: tuple[str, str], case: Case, honest: list[Measured], auditor: Auditor
) -> None:
    """The drawn token has the best score of all: only its rank tells."""
    free = await generate(case.model_dir, case.states[OWN], kind[1])
    forged = [case.stated(replace(one, top_k=0, top_p=TOP_P), 0, TOP_P) for one in free]
    found = measured(await auditor.audit(forged, case.states))
    judgements = [judged(case, honest, one) for one in found]
    print("\n", kind, *(f"{one.sampling:.3f}" for one in found))
    rejected = sum(one.reason is not None for one in judgements)
    suspects = sum(one.suspect or one.reason is not None for one in judgements)
    assert batches_caught(len(found), rejected, suspects, BATCH) >= WANTED


# -- before anything is computed ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("support", "wanted"),
    [
        (protocol_cases.SUPPORTED_BRANCH.support, True),
        (bytes([0, 0]), True),
        (b"", False),
        (protocol_cases.SUPPORTED_BRANCH.support[:-1], False),
        (bytes([2, 0]) + pack_u32([9, 4]), False),
        (bytes([2, 0]) + pack_u32([7, 9]), False),
        (bytes([2, 0]) + pack_u32([4, 2**31]), False),
        (bytes([255, 0]), False),  # at most 40 tokens are left
        (bytes([40, 0]) + pack_u32([n + 8 for n in range(40)]), False),
        (bytes([200, 200]), False),
    ],
)
def test_supports_of_another_form_cost_their_rollout(support: bytes, wanted: bool) -> None:
    found = checked(support, protocol_cases.NARROWED)
    assert [one.branches[0].support for one in found.rollouts] == [support] * 2 * wanted
    reasons = {one.reason for one in found.rejections if one.group == 0}
    assert (Reason.MALFORMED in reasons) is not wanted


def checked(
    support: bytes, run: RunManifest, plan: PipelinePlan | None = None
) -> CheckedSubmission:
    proof = Projection().make(np.arange(64, dtype=np.float32).reshape(2, 32))
    branch = structs.replace(protocol_cases.BRANCH, proof=proof, support=support)
    group = structs.replace(
        protocol_cases.SUBMISSION.groups[0], rollouts=(RolloutRecord((branch,), 1.0, ""),) * 2
    )
    submission = structs.replace(
        protocol_cases.SUBMISSION, groups=(group, *protocol_cases.SUBMISSION.groups[1:])
    )
    return check_submission(submission, protocol_cases.LEASE, run, 4, plan)


def test_only_work_under_a_plan_of_the_trainer_may_state_no_supports() -> None:
    assert not checked(b"", protocol_cases.NARROWED).rollouts
    assert len(checked(b"", protocol_cases.NARROWED, protocol_cases.PLAN).rollouts) == 2


def test_supports_where_nothing_is_truncated_cost_their_rollout() -> None:
    assert not checked(protocol_cases.SUPPORTED_BRANCH.support, protocol_cases.MANIFEST).rollouts
    assert len(checked(b"", protocol_cases.MANIFEST).rollouts) == 2
