import json
from pathlib import Path
from typing import Any

import pytest

from primerl.node.config.run import EngineConfig
from primerl.node.inference.build import build_engine
from primerl.node.memory_plan.memory import GIB, refuse_what_cannot_fit
from primerl.node.memory_plan.shape import read_shape
from primerl.node.ops.errors import UsageError
from primerl.node.ops.gpus import GpuMemory

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 2048,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
"""Qwen3-1.7B's."""
SHAPE = read_shape(CONFIG)
ENGINE: dict[str, Any] = {"type": "vllm", "dtype": "bfloat16", "max_model_len": 4096}


def card(gib: float) -> GpuMemory:
    return GpuMemory("0", "GPU-1", "Card", int(gib * GIB), int(gib * GIB), "1")


def engine(**more: Any) -> EngineConfig:
    return EngineConfig.model_validate({**ENGINE, **more})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_what_cannot_hold_a_sequence_is_refused_with_what_can(model: Path) -> None:
    with pytest.raises(
        UsageError, match=r"does not fit: .* short .* lower engine\.max_model_len"
    ) as refused:
        refuse_what_cannot_fit(engine(max_model_len=40960), model, [card(6)])
    assert "primerl-node doctor" in str(refused.value)


@pytest.mark.parametrize("gib", [12, 24, 80])
def test_what_fits_is_let_through(model: Path, gib: float) -> None:
    refuse_what_cannot_fit(engine(), model, [card(gib)])


def test_where_only_estimates_speak_against_it_it_is_tried(model: Path) -> None:
    """Weights and one sequence fit into the budget; with graphs, context and activations they do not."""
    budget = 2 * SHAPE.parameters + 4096 * 2 * 28 * 8 * 128 * 2 + (1 << 20)
    tight = card(budget / 0.92 / GIB)
    with pytest.raises(UsageError):
        refuse_what_cannot_fit(engine(), model, [tight])
    nearly = card(1.25 * budget / 0.92 / GIB)
    refuse_what_cannot_fit(engine(), model, [nearly])


def test_the_smallest_gpu_counts(model: Path) -> None:
    with pytest.raises(UsageError):
        refuse_what_cannot_fit(engine(tp=2), model, [card(80), card(2)])


def test_auto_is_all_gpus(model: Path) -> None:
    with pytest.raises(UsageError):
        refuse_what_cannot_fit(engine(max_model_len=40960), model, [card(6)])
    refuse_what_cannot_fit(engine(tp="auto", max_model_len=40960), model, [card(6)] * 4)


@pytest.mark.parametrize(
    ("config", "gpus"),
    [
        (engine(type="hf"), [card(1)]),
        (engine(device="cpu"), [card(1)]),
        (engine(), []),
    ],
)
def test_what_no_gpu_bounds_is_let_through(
    model: Path, config: EngineConfig, gpus: list[GpuMemory]
) -> None:
    refuse_what_cannot_fit(config, model, gpus)


def test_a_model_that_cannot_be_planned_for_is_let_through(tmp_path: Path) -> None:
    refuse_what_cannot_fit(engine(), tmp_path, [card(1)])
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"kv_lora_rank": 512}))
    refuse_what_cannot_fit(engine(), tmp_path, [card(1)])


FAKE_NVIDIA_SMI = """\
#!/bin/sh
case "$1" in
  -L) echo "GPU 0: Card (UUID: GPU-1)" ;;
  *) echo "0, GPU-1, Card, 4096, 4000, 570.1" ;;
esac
"""


async def test_an_engine_asks_the_gpus_and_refuses_before_it_starts_anything(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(FAKE_NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UsageError, match=r"on a GPU of 4\.0 GiB"):
        refuse_what_cannot_fit(engine(max_model_len=40960), model)
    hosted = build_engine(engine(max_model_len=40960))
    with pytest.raises(UsageError, match=r"on a GPU of 4\.0 GiB"):
        await hosted.start(model)
    await hosted.close()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    refuse_what_cannot_fit(engine(max_model_len=40960), model)  # nothing is known of it
