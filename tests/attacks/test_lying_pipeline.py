"""A real pipeline whose text is audited: honest in every encoding, and with other weights in one stage."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from auditor_cases import item_of, make_run, measured
from crossing_cases import coarse
from engine_cases import FP32, make_qwen3
from msgspec import structs
from pipeline_cases import DEEP, LocalPipeline, plan_of, shape_of

from primerl.node.audits.auditor import AuditItem, Boundary, Measured
from primerl.node.audits.replay import Replay
from primerl.node.audits.terms import terms
from primerl.node.engines.engine import Completion, GenerateRequest
from primerl.node.proofs.blame import Blame, blame
from primerl.node.proofs.checks import CheckedRollout
from primerl.node.proofs.items import evidence
from primerl.node.proofs.judgement import judge
from primerl.node.proofs.thresholds import BUILT_IN
from primerl.node.weights.state import State
from primerl.protocol.pipelines import Encoding, PipelinePlan

VERSION, STAGES, LENGTH = 7, 3, 48
REJECT, SUSPECT = BUILT_IN["float32"]
REQUESTS = [
    GenerateRequest(
        prompt=tuple(b"tell me more about %d" % number),
        max_tokens=LENGTH,
        temperature=0.8,
        seed=500 + number,
        stop_token_ids=(),
    )
    for number in range(6)
]

Model = tuple[Path, State]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("model")
    return directory, make_qwen3(directory, 1, DEEP)


def plan(encoding: Encoding = "raw") -> PipelinePlan:
    return plan_of(STAGES, shape_of(fingerprint="projection", encoding=encoding))


async def generated(model: Model, made_by: PipelinePlan, liar: int = -1) -> list[AuditItem]:
    """What the pipeline says; the liar was given coarse weights."""
    directory, state = model
    engine = LocalPipeline(FP32, made_by)
    await engine.start(directory, fingerprint="projection")
    try:
        for rank, stage in enumerate((engine.head, *engine.stages)):
            await stage.load(VERSION, coarse(state, 5) if rank == liar else state)
        await engine.rejoin()
        async with asyncio.timeout(60):
            found = await asyncio.gather(*map(engine.generate, REQUESTS))
    finally:
        await engine.close()
    return [
        replace(item_of(*pair, VERSION), boundaries=boundaries(made_by, pair[1]))
        for pair in zip(REQUESTS, found, strict=True)
    ]


def boundaries(made_by: PipelinePlan, said: Completion) -> list[Boundary]:
    """As the trainer reads them."""
    below = [stage.end for stage in made_by.stages[:-1]]
    return [
        Boundary(end, made_by.shape.encoding, part)
        for end, part in zip(below, said.boundaries, strict=True)
    ]


def audited(model: Model, items: list[AuditItem]) -> list[Measured]:
    directory, state = model
    replay = Replay(terms(directory, make_run("float32"), "cpu"))
    return measured(replay.measure(items, {VERSION: state}, {}))


def laid(one: Measured) -> Blame:
    proofs = make_run("float32").proofs
    contract = structs.replace(proofs, reject=REJECT, suspect=SUSPECT)
    found = evidence(CheckedRollout(0, 0, [], 0.0), [one])
    return blame(found, judge(found, contract), one.boundaries, contract)


@pytest.mark.parametrize("encoding", ["raw", "fp8", "int8"])
async def test_what_honest_stages_say_is_accepted_however_states_travel(
    model: Model, encoding: Encoding
) -> None:
    for one in audited(model, await generated(model, plan(encoding))):
        assert len(one.boundaries) == STAGES - 1
        assert laid(one).outcome == "clean", one


@pytest.mark.parametrize("liar", range(STAGES))
async def test_the_stage_that_holds_other_weights_is_the_one_that_is_named(
    model: Model, liar: int
) -> None:
    blames = [laid(one) for one in audited(model, await generated(model, plan(), liar))]
    assert {one.outcome for one in blames} == {"rejected"}
    assert [one.named for one in blames] == [liar] * len(REQUESTS)
