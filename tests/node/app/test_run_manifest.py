"""The manifest of a run: what a resumed trainer may change of it, and the nodes of a run of FP8 rollouts."""

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from support.memory_store import MemoryStore
from support.protocol_cases import MANIFEST, QUANTIZED

from primerl.crypto.keys import SecretKey
from primerl.node.app.worker import WorkerNode
from primerl.node.config.run import JoinConfig, RunConfig
from primerl.node.environments.allowed import options_of
from primerl.node.environments.chat import DATE, ChatFormat
from primerl.node.errors import UsageError
from primerl.node.models import huggingface
from primerl.node.storage.ledger import Ledger
from primerl.node.trainer import run_manifest
from primerl.node.weights.state import digests, state_digest
from primerl.protocol.manifests import RunManifest


def check(run: RunManifest, directory: Path, **settings: Any) -> None:
    """Check a run as a worker of these settings does when it joins."""
    engine = {"dtype": run.proofs.dtype, **settings.pop("engine", {})}
    config = JoinConfig.model_validate({"engine": engine, **settings})
    node = WorkerNode(config, SecretKey.generate(), directory)
    node._check_numerics(run)  # pyright: ignore[reportPrivateUsage]


def test_a_worker_follows_the_manifest_and_forms_no_pipeline(tmp_path: Path) -> None:
    check(QUANTIZED, tmp_path)
    check(QUANTIZED, tmp_path, engine={"quantization": "fp8"})
    with pytest.raises(UsageError, match=r"says quantization fp8, engine\.quantization is none"):
        check(QUANTIZED, tmp_path, engine={"quantization": "none"})
    pipeline = {"engine": {"type": "vllm"}, "pp": {"mode": "on"}}
    check(MANIFEST, tmp_path, **pipeline)
    with pytest.raises(UsageError, match="which no pipeline does: remove pp"):
        check(QUANTIZED, tmp_path, **pipeline)


def test_a_worker_of_a_run_that_keeps_a_cache_is_vllm_and_no_pipeline(tmp_path: Path) -> None:
    keeping = structs.replace(MANIFEST, proofs=structs.replace(MANIFEST.proofs, kv_cache="kept"))
    check(keeping, tmp_path, engine={"type": "vllm"})
    with pytest.raises(UsageError, match=r"only vLLM keeps .*set engine\.type to vllm"):
        check(keeping, tmp_path)
    with pytest.raises(UsageError, match="which no pipeline does: remove pp"):
        check(keeping, tmp_path, engine={"type": "vllm"}, pp={"mode": "on"})


async def test_a_manifest_keeps_the_steps_that_its_run_began_with(tmp_path: Path) -> None:
    huggingface.create(tmp_path / "model", {"num_hidden_layers": 1}, 0)
    key, store = SecretKey.generate(), MemoryStore(max_bytes=1 << 26)
    ledger = Ledger(tmp_path / "ledger.db")

    async def last(steps: int) -> int:
        config = RunConfig(max_steps=steps)
        found = await run_manifest.documents(config, key, ledger, store, tmp_path / "model")
        return found.manifest.max_steps

    try:
        assert [await last(20), await last(10), await last(21)] == [20, 20, 20]
    finally:
        ledger.close()


async def test_every_worker_writes_the_date_of_the_run_s_beginning_into_its_prompts(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "model"
    huggingface.create(directory, {"num_hidden_layers": 1}, 0)
    template = directory / "chat_template.jinja"
    template.write_text("{{ strftime_now('%Y-%m-%d') }}" + template.read_text())
    key, store = SecretKey.generate(), MemoryStore(max_bytes=1 << 26)
    ledger = Ledger(tmp_path / "ledger.db")
    named = {"name": "b", "chat_template_kwargs": {DATE: "2020-02-20"}}
    evaluated = [{"id": "arithmetic"}]
    given = {"environments": [{"name": "a"}, named], "evaluation": {"environments": evaluated}}

    async def begun(today: str) -> tuple[RunConfig, RunManifest]:
        own = (RunConfig.model_validate(given), key.node_id, ledger, directory, today)
        config = run_manifest.dated_config(*own)
        found = await run_manifest.documents(config, key, ledger, store, directory)
        return config, found.manifest

    try:
        config, run = await begun("2026-01-02")
        assert config.evaluation.environments[0].chat_template_kwargs == {DATE: "2026-01-02"}
        for number, date in enumerate(["2026-01-02", "2020-02-20"]):
            options = options_of(run.environments[number])
            chat = ChatFormat.load(directory, defaults=options.chat_template_kwargs)
            assert chat.render([{"role": "user", "content": "a"}]).startswith(date)
        assert await begun("2026-01-03") == (config, run), "a trainer that goes on the next day"
        given["environments"] = [
            {"name": "a"},
            {**named, "chat_template_kwargs": {DATE: "2020-02-21"}},
        ]
        with pytest.raises(UsageError, match="began with another chat_template_kwargs of b"):
            await begun("2026-01-03")
    finally:
        ledger.close()


async def test_the_digest_of_a_run_s_model_is_that_of_its_weights_in_bf16(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    huggingface.create(directory, {"num_hidden_layers": 1}, 0)
    key, store = SecretKey.generate(), MemoryStore(max_bytes=1 << 26)
    ledger = Ledger(tmp_path / "ledger.db")
    state = huggingface.policy_state(huggingface.load_model(directory))

    async def manifest() -> RunManifest:
        found = await run_manifest.documents(RunConfig(), key, ledger, store, directory)
        return found.manifest

    try:
        begun = await manifest()
        assert begun.model.base_state == state_digest(digests(state))
        (directory / "model.safetensors").unlink()  # a run that goes on does not hash it again
        assert await manifest() == begun
    finally:
        ledger.close()


async def test_a_run_keeps_its_quantization_and_a_mixture_of_experts_has_none(
    tmp_path: Path,
) -> None:
    huggingface.create(tmp_path / "dense", {"num_hidden_layers": 1}, 0)
    experts = {"num_hidden_layers": 1, "num_experts": 2}
    huggingface.create(tmp_path / "experts", experts, 0)
    key, store = SecretKey.generate(), MemoryStore(max_bytes=1 << 26)
    ledger = Ledger(tmp_path / "ledger.db")

    async def manifest(quantization: str, model: str = "dense") -> RunManifest:
        config = RunConfig.model_validate({"engine": {"quantization": quantization}})
        found = await run_manifest.documents(config, key, ledger, store, tmp_path / model)
        return found.manifest

    try:
        with pytest.raises(UsageError, match=r"mixture of experts.*leave engine\.quantization out"):
            await manifest("fp8", "experts")
        begun = await manifest("fp8")
        assert begun.proofs.quantization == "fp8"
        assert await manifest("fp8") == begun
        with pytest.raises(
            UsageError, match=r"began with engine\.quantization = fp8, now it is none"
        ):
            await manifest("none")
        keeping = {"type": "vllm", "keep_kv_cache": True, "quantization": "fp8"}
        config = RunConfig.model_validate({"engine": keeping})
        with pytest.raises(UsageError, match=r"keep_kv_cache = false, now it is true: change it"):
            await run_manifest.documents(config, key, ledger, store, tmp_path / "dense")
    finally:
        ledger.close()
