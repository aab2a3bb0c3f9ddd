"""Memory of stages, memory that a machine offers, models too large for a machine."""

import dataclasses
from typing import Any, Literal

import pytest
from msgspec import structs
from support.memory_store import MemoryStore
from support.protocol_cases import MANIFEST

from primerl.crypto.hashing import digest
from primerl.node.config.engine import EngineConfig, PipelineConfig
from primerl.node.config.run import ModelCreateConfig
from primerl.node.errors import EngineError
from primerl.node.gpus import GpuMemory
from primerl.node.memory_plan.memory import GIB
from primerl.node.memory_plan.planner import Offered, PlanLimits, make_plan
from primerl.node.memory_plan.shape import read_shape
from primerl.node.memory_plan.stages import (
    CutModel,
    cannot_hold,
    cut_model,
    memory_to_offer,
    stage_costs,
)
from primerl.protocol.manifests import ChunkRef, FileRef
from primerl.protocol.pipelines import StageOffer

OFF = PipelineConfig()
Q8B = read_shape(
    {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    }
)
TINY = read_shape({"model_type": "qwen3", **ModelCreateConfig().model_dump()})


def card(gib: float, free: float | None = None) -> GpuMemory:
    total = int(gib * GIB)
    return GpuMemory("0", "GPU-0", "card", total, int((free or gib) * GIB), "1")


def config(kind: Literal["hf", "vllm"] = "vllm", **more: Any) -> EngineConfig:
    fields: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": 8192,
        "max_batch": 64,
        "device": "cuda",
        **more,
    }
    return EngineConfig(type=kind, **fields)


def test_stages_together_take_what_the_model_has() -> None:
    """Its two tables are the first's and the last's; of one that ties them each has its own."""
    costs = stage_costs(Q8B, "bfloat16")
    assert costs.layers * costs.layer + costs.first + costs.last == 2 * Q8B.parameters
    tied = dataclasses.replace(Q8B, tied=True)
    costs = stage_costs(tied, "bfloat16")
    whole = costs.layers * costs.layer + costs.first + costs.last
    assert whole == 2 * (tied.parameters + tied.embedding)
    assert costs.layer_token == 2 * 2 * 8 * 128


def test_what_is_said_is_offered() -> None:
    said = PipelineConfig(memory_gib=1.5)
    assert memory_to_offer(config(), said, Q8B, there=[card(24)]) == int(1.5 * GIB)


def test_a_gpu_offers_what_its_engine_leaves_for_weights_and_cache() -> None:
    whole = memory_to_offer(config(), OFF, Q8B, there=[card(24)])
    shared = memory_to_offer(config(), OFF, Q8B, there=[card(24, free=12)])
    capped = config(vllm={"gpu_memory_utilization": 0.5})
    half = memory_to_offer(capped, OFF, Q8B, there=[card(24)])
    assert 18 * GIB < whole < 22 * GIB
    assert shared < 12 * GIB
    assert whole - half == pytest.approx(0.42 * 24 * GIB, rel=0.01)
    two = memory_to_offer(config(tp=2), OFF, Q8B, there=[card(24), card(24)])
    assert 1.7 * whole < two < 2.1 * whole
    assert memory_to_offer(config(tp="auto"), OFF, Q8B, there=[card(24), card(24)]) == two
    assert memory_to_offer(config(), OFF, Q8B, there=[card(1)]) == 0


def test_gpus_that_share_a_stage_offer_as_much_as_the_smallest_of_them_has() -> None:
    even = memory_to_offer(config(tp=2), OFF, Q8B, there=[card(12), card(12), card(24)])
    assert memory_to_offer(config(tp=2), OFF, Q8B, there=[card(24), card(12)]) == even


def test_copies_of_keys_and_values_are_no_room() -> None:
    """Two heads of them on four GPUs: each pair has the same."""
    few = dataclasses.replace(Q8B, kv_heads=2)
    cards = [card(24)] * 4
    two, four = (memory_to_offer(config(tp=tp), OFF, few, there=cards) for tp in (2, 4))
    assert four == pytest.approx(two, rel=0.02)


def test_a_machine_without_gpus_offers_a_part_of_its_memory() -> None:
    some = memory_to_offer(config(), OFF, TINY, there=[], free=16 * GIB)
    assert 10 * GIB < some < 13 * GIB
    whole = memory_to_offer(config(), OFF, Q8B, there=[], free=64 * GIB)
    assert whole > 30 * GIB
    shared = memory_to_offer(config(tp=2), OFF, Q8B, there=[], free=64 * GIB)
    assert whole - 4 * GIB < shared < whole  # each rank is a process


def test_a_node_that_can_hold_the_model_is_recognized() -> None:
    assert cannot_hold(config(), Q8B, there=[card(24)]) == ""
    assert "short of" in cannot_hold(config(), Q8B, there=[card(16)])
    assert cannot_hold(config("hf"), TINY, there=[], free=16 * GIB) == ""
    assert "a machine" in cannot_hold(config("hf"), Q8B, there=[], free=16 * GIB)


def test_two_small_gpus_hold_what_neither_holds() -> None:
    """An 8B model in bfloat16 on two cards of 12 GiB; the plan leaves room for sequences."""
    assert cannot_hold(config(), Q8B, there=[card(12)])
    memory = memory_to_offer(config(), OFF, Q8B, there=[card(12)])
    terms = PlanLimits("bfloat16", Q8B.hidden, 8192, 64)
    offers = [
        Offered(bytes([number]) * 32, StageOffer(memory, "vllm", "vllm 0.25.1"))
        for number in range(2)
    ]
    plan = make_plan(offers, stage_costs(Q8B, "bfloat16"), terms, group=bytes(32), generation=0)
    assert plan is not None
    assert abs(plan.stages[0].end - 18) <= 2
    assert plan.shape.kv_tokens >= 8192


def test_only_vllm_has_stages_and_a_model_of_one_layer_has_none() -> None:
    terms = PlanLimits("float32", 64, 256, 8)
    with pytest.raises(EngineError, match=r"set engine\.type to vllm"):
        CutModel(TINY, terms).costs("hf")
    assert CutModel(TINY, terms).costs("vllm").layers == TINY.layers
    with pytest.raises(EngineError, match="one layer"):
        CutModel(dataclasses.replace(TINY, layers=1), terms).costs("vllm")


def test_the_runs_own_files_say_what_its_model_is() -> None:
    store = MemoryStore(max_bytes=1 << 20)

    def made(text: bytes) -> CutModel | None:
        file = FileRef("config.json", ChunkRef(store.put(text), len(text)))
        model = structs.replace(MANIFEST.model, files=(file,))
        return cut_model(structs.replace(MANIFEST, model=model), store, 64)

    good = made(
        b'{"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 99,'
        b' "num_attention_heads": 4, "intermediate_size": 128}'
    )
    assert good is not None
    assert (good.shape.layers, good.terms.hidden_size, good.terms.max_sequences) == (4, 64, 64)
    assert good.terms.dtype == MANIFEST.proofs.dtype
    assert good.terms.max_model_len == MANIFEST.limits.max_model_len
    short = made(
        b'{"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 99,'
        b' "num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 32}'
    )
    assert short is not None
    assert short.terms.max_model_len == 32 < MANIFEST.limits.max_model_len  # positions bound it
    assert made(b'{"model_type": "qwen3"}') is None
    assert made(b"no json") is None
    lost = FileRef("config.json", ChunkRef(digest(b"lost"), 4))
    model = structs.replace(MANIFEST.model, files=(lost,))
    assert cut_model(structs.replace(MANIFEST, model=model), store, 64) is None
