"""Stages whose text is audited: honest in every encoding, and with other weights in one of them."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from support.auditor_cases import item_of, make_run, measured
from support.pipeline_cases import LAYERS, LocalPipeline, plan_of, shape_of
from support.scripted_stages import ScriptedAuditor

from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.verification.auditor import AuditItem, BoundaryClaim, Measured, evidence
from primerl.node.verification.bounds import BUILT_IN
from primerl.node.verification.checks import CheckedRollout
from primerl.node.verification.judgement import StageAttribution, blame, judge
from primerl.node.weights.state import State, Tensor
from primerl.protocol.pipelines import Encoding, PipelinePlan

VERSION, STAGES, LENGTH, VOCABULARY = 7, 3, 48, 272
REJECT, SUSPECT = BUILT_IN["float32"]
RUN = make_run("float32")
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


def weights(bits: int = 16) -> State:
    """Make a tensor for every layer; a liar keeps only `bits` bits of each element."""
    names = ["model.embed_tokens", *(f"model.layers.{layer}" for layer in range(LAYERS))]
    keep = np.uint16(2**16 - 2 ** (16 - bits))
    return {
        f"{name}.weight": Tensor("BF16", (8,), noise & keep)
        for number, name in enumerate(names)
        for noise in [np.random.default_rng(number).integers(0, 2**16, 8, dtype="<u2")]
    }


def plan(encoding: Encoding = "raw") -> PipelinePlan:
    return plan_of(STAGES, shape_of(fingerprint="projection", encoding=encoding))


async def generated(directory: Path, made_by: PipelinePlan, liar: int = -1) -> list[AuditItem]:
    """Generate with a pipeline in which the liar has coarse weights."""
    (directory / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    engine = LocalPipeline(made_by)
    await engine.start(directory, fingerprint="projection")
    try:
        for rank, stage in enumerate((engine.head, *engine.stages)):
            await stage.load(VERSION, weights(5 if rank == liar else 16))
        await engine.rejoin()
        async with asyncio.timeout(60):
            found = await asyncio.gather(*map(engine.generate, REQUESTS))
    finally:
        await engine.close()
    return [
        replace(item_of(*pair, VERSION), boundaries=boundaries(made_by, pair[1]))
        for pair in zip(REQUESTS, found, strict=True)
    ]


def boundaries(made_by: PipelinePlan, said: Completion) -> list[BoundaryClaim]:
    """Return the boundary fingerprints as the trainer reads them."""
    below = [stage.end for stage in made_by.stages[:-1]]
    return [
        BoundaryClaim(end, made_by.shape.encoding, part)
        for end, part in zip(below, said.boundaries, strict=True)
    ]


async def audited(items: list[AuditItem]) -> list[Measured]:
    auditor = ScriptedAuditor()
    run = structs.replace(RUN, model=structs.replace(RUN.model, vocab_size=VOCABULARY))
    await auditor.start(Path(), run)
    return measured(await auditor.audit(items, {VERSION: weights()}))


def laid(one: Measured) -> StageAttribution:
    contract = structs.replace(RUN.proofs, reject=REJECT, suspect=SUSPECT)
    found = evidence(CheckedRollout(0, 0, [], 0.0), [one])
    return blame(found, judge(found, contract), one.boundaries, contract)


@pytest.mark.parametrize("encoding", ["raw", "int8"])
async def test_what_honest_stages_say_is_accepted_however_states_travel(
    tmp_path: Path, encoding: Encoding
) -> None:
    for one in await audited(await generated(tmp_path, plan(encoding))):
        assert len(one.boundaries) == STAGES - 1
        assert laid(one).outcome == "clean", one


@pytest.mark.parametrize("liar", range(STAGES))
async def test_the_stage_that_holds_other_weights_is_the_one_that_is_named(
    tmp_path: Path, liar: int
) -> None:
    blames = [laid(one) for one in await audited(await generated(tmp_path, plan(), liar))]
    assert {one.outcome for one in blames} == {"rejected"}
    assert [one.named for one in blames] == [liar] * len(REQUESTS)
