"""Routes of a mixture of experts that were never taken, to have other experts trained: an audit sees them.

Honest ones pass, also in bfloat16 and over two turns.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import pytest_asyncio
import torch
from msgspec import structs
from numpy.typing import NDArray
from support.auditor_cases import OWN, Case, judged, make_case, measured
from support.engine_cases import FP32, SHAPE, make_qwen3
from support.prefill_core import PrefillCore
from support.protocol_cases import ADAPTED, BRANCH, LEASE, MANIFEST, ROUTED_BRANCH, SUBMISSION
from torch import Tensor

from primerl.node.inference.fingerprint import Projection
from primerl.node.inference.model import LanguageModel
from primerl.node.inference.vllm_arguments import is_installed
from primerl.node.models.routes import pack_routes, unpack_routes
from primerl.node.verification.auditor import AuditItem, Auditor, Measured
from primerl.node.verification.bounds import BUILT_IN
from primerl.node.verification.checks import check_submission
from primerl.node.verification.vllm_auditor import VllmAuditor
from primerl.protocol.errors import Reason
from primerl.protocol.rollouts import RolloutRecord

MIXTURE = SHAPE | {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 32,  # vLLM without a GPU computes no smaller heads
}
ON_ONE_LOOP = pytest.mark.asyncio(loop_scope="module")
Routes = NDArray[np.int16]
Forge = Callable[[Routes, Tensor], Routes]
"""Of honest routes [S, layers, k], and the scores [S, layers, E] of the right model."""


Audit = Callable[..., Awaitable[list[Measured]]]
VLLM = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not is_installed(), reason="vLLM is not installed"),
]


@pytest.fixture(
    scope="module",
    params=[
        ("hf", "float32"),
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
    make = partial(make_qwen3, shape=MIXTURE)
    return await make_case(tmp_path_factory.mktemp("routes"), kind[1], make)


@asynccontextmanager
async def auditing(case: Case, auditor: Auditor) -> AsyncGenerator[Audit]:
    await auditor.start(case.model_dir, case.run)

    async def run(*items: AuditItem) -> list[Measured]:
        return measured(await auditor.audit(items, case.states))

    yield run
    await auditor.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def audit(kind: tuple[str, str], case: Case) -> AsyncIterator[Audit]:
    auditor = VllmAuditor(FP32, timeout_s=240.0) if kind[0] == "vllm" else PrefillCore(FP32)
    async with auditing(case, auditor) as audit:
        yield audit


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def honest(case: Case, audit: Audit) -> list[Measured]:
    return await audit(*case.honest)


class Scores:
    """RouterHooks that keep what routers rank by."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def take(self, layer: int, scores: Tensor, own: Tensor) -> None:
        self.found.append(scores)


def forged(case: Case, item: AuditItem, forge: Forge) -> AuditItem:
    shape = case.run.routes
    assert shape is not None
    network = LanguageModel.build(
        case.model_dir, case.states[OWN], dtype=case.run.proofs.dtype, device="cpu"
    )
    scores = Scores()
    with torch.inference_mode():
        network.packed(torch.tensor(item.token_ids), [len(item.token_ids)], None, scores)
    places = [place - 1 for reply in item.replies for place in range(reply.start, reply.end)]
    led = torch.stack(scores.found, 1)[torch.tensor(places)]
    routes = forge(unpack_routes(item.routes, shape).copy(), led)
    return replace(item, routes=pack_routes(routes, shape))


@ON_ONE_LOOP
async def test_honest_routes_are_the_choice_of_the_auditor_but_for_near_ties(
    case: Case, honest: list[Measured]
) -> None:
    shape = case.run.routes
    assert shape is not None
    assert all(len(one.routes) == len(one.logprobs) * shape.token_bytes for one in case.honest)
    bounds = BUILT_IN[case.run.proofs.dtype][0]
    for one in honest:
        assert judged(case, honest, one).reason is None
        assert one.routing <= bounds.routing
        assert one.routing_max <= bounds.routing_max


def rng(routes: Routes) -> np.random.Generator:
    return np.random.default_rng(len(routes))


def random_route(routes: Routes, _: Tensor) -> Routes:
    shape = (*routes.shape[:2], MIXTURE["num_experts"])
    return rng(routes).random(shape).argsort(axis=2)[..., : routes.shape[2]].astype(np.int16)


def always_the_same(routes: Routes, _: Tensor) -> Routes:
    return np.broadcast_to(np.arange(routes.shape[2], dtype=np.int16), routes.shape)


def next_best_everywhere(routes: Routes, scores: Tensor) -> Routes:
    """The most that can be steered while each step is as small as it can be."""
    routes[..., -1] = scores.topk(routes.shape[2] + 1).indices[..., -1].numpy()
    return routes


def one_expert_starved(routes: Routes, scores: Tensor) -> Routes:
    """Whatever chose the busiest expert gets the next best in its place."""
    after = scores.topk(routes.shape[2] + 1).indices[..., -1:].numpy()
    return np.where(routes == np.bincount(routes.ravel()).argmax(), after, routes).astype(np.int16)


def worst_for_one_token(routes: Routes, scores: Tensor) -> Routes:
    routes[len(routes) // 2, 0, -1] = int(scores[len(routes) // 2, 0].argmin())
    return routes


def of_the_token_before(routes: Routes, _: Tensor) -> Routes:
    return np.roll(routes, 1, axis=0)


FORGERIES: dict[str, Forge] = {
    "random": random_route,
    "always the same": always_the_same,
    "next best everywhere": next_best_everywhere,
    "one expert starved": one_expert_starved,
    "worst for one token": worst_for_one_token,
    "of the token before": of_the_token_before,
}


@ON_ONE_LOOP
@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES.keys())
async def test_routes_that_were_not_taken_are_rejected(
    case: Case, honest: list[Measured], audit: Audit, forge: Forge
) -> None:
    item = forged(case, case.item, forge)
    [found] = await audit(item)
    async with auditing(case, PrefillCore(FP32)) as embedded:
        [wanted] = await embedded(item)
    assert found.routing == pytest.approx(wanted.routing, abs=1e-3)
    assert found.routing_max == pytest.approx(wanted.routing_max, abs=1e-3)
    assert judged(case, honest, found).reason is Reason.BAD_ROUTES
    assert found.sampling_max == pytest.approx(
        honest[0].sampling_max, abs=0.05
    )  # it was drawn as claimed


@ON_ONE_LOOP
async def test_an_item_without_routes_is_measured_as_before(
    case: Case, honest: list[Measured], audit: Audit
) -> None:
    [bare] = await audit(replace(case.item, routes=b""))
    assert (bare.routing, bare.routing_max) == (0.0, 0.0)
    assert bare.fingerprint == pytest.approx(honest[0].fingerprint, abs=0.02)


# -- before anything is computed ---------------------------------------------------------------------


PROVED = structs.replace(
    BRANCH, proof=Projection().make(np.arange(64, dtype=np.float32).reshape(2, 32))
)
TAKEN = ROUTED_BRANCH.routes


@pytest.mark.parametrize(
    ("routes", "wanted"),
    [
        (b"", True),
        (TAKEN, True),
        (TAKEN[:-1], False),
        (TAKEN + b"\0\0", False),
        (bytes([44, 1, 43, 1, 0, 0, 1, 0]), False),  # expert 300 of 300
        (bytes([7, 0, 7, 0, 0, 0, 1, 0]), False),  # the same expert twice
    ],
    ids=["none", "two routes", "cut short", "too long", "of no expert", "of one expert twice"],
)
def test_routes_of_another_form_cost_their_rollout(routes: bytes, wanted: bool) -> None:
    branch = structs.replace(PROVED, routes=routes)
    group = structs.replace(SUBMISSION.groups[0], rollouts=(RolloutRecord((branch,), 1.0, ""),) * 2)
    submission = structs.replace(SUBMISSION, groups=(group, *SUBMISSION.groups[1:]))
    run = structs.replace(MANIFEST, routes=ADAPTED.routes)
    found = check_submission(submission, LEASE, run, 4)
    assert [one.branches[0].routes for one in found.rollouts] == [routes] * 2 * wanted
    reasons = {one.reason for one in found.rejections if one.group == 0}
    assert (Reason.BAD_ROUTES in reasons) is not wanted
    unasked = check_submission(submission, LEASE, MANIFEST, 4)
    assert bool(unasked.rollouts) is (routes == b"")
