"""Plans of engines: their arithmetic by hand, and against what this package really allocates on a CPU."""

from typing import Any

import pytest

from primerl.node.config.run import EngineConfig, ModelCreateConfig
from primerl.node.memory_plan.memory import (
    GIB,
    Device,
    MemoryBreakdown,
    MemoryItem,
    gib,
    plan_engine,
    sequence_bytes,
    token_bytes,
)
from primerl.node.memory_plan.shape import read_shape
from primerl.node.ops.errors import UsageError

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
        "max_position_embeddings": 40960,
    }
)
TINY = read_shape({"model_type": "qwen3", **ModelCreateConfig().model_dump()})
CARD = Device("cuda", 24 * GIB)


def vllm(**more: Any) -> EngineConfig:
    fields: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 8192, **more}
    return EngineConfig(type="vllm", **fields)


def test_a_token_takes_two_vectors_of_each_key_head_in_each_layer() -> None:
    assert token_bytes(vllm(), Q8B) == 2 * 36 * 8 * 128 * 2
    assert token_bytes(vllm(dtype="float32"), Q8B) == 2 * 36 * 8 * 128 * 4
    assert token_bytes(vllm(tp=4), Q8B) == 2 * 36 * 2 * 128 * 2
    assert token_bytes(vllm(tp=16), Q8B) == 2 * 36 * 1 * 128 * 2  # a head is not cut
    assert token_bytes(vllm(pp=2), Q8B) == 2 * 18 * 8 * 128 * 2
    assert token_bytes(vllm(vllm={"kv_cache_dtype": "fp8"}), Q8B) == 2 * 36 * 8 * 128


def test_a_sequence_takes_whole_blocks() -> None:
    one = token_bytes(vllm(), Q8B)
    assert sequence_bytes(vllm(), Q8B, 1, "cuda") == 16 * one
    assert sequence_bytes(vllm(), Q8B, 17, "cuda") == 32 * one
    assert sequence_bytes(vllm(), Q8B, 1, "cpu") == 128 * one
    assert sequence_bytes(vllm(vllm={"block_size": 32}), Q8B, 33, "cuda") == 64 * one


def test_a_layer_with_a_window_holds_the_window_only() -> None:
    shape = read_shape(
        {
            "model_type": "gemma3_text",
            "hidden_size": 64,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 96,
            "vocab_size": 128,
            "sliding_window": 512,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        }
    )
    layer = 2 * 2 * 16 * 2
    held = 512 - 1 + 2048  # the window, and a step's tokens
    blocks = -(-held // 16) + 1
    assert sequence_bytes(vllm(), shape, 65536, "cuda") == layer * (65536 + 5 * 16 * blocks)
    assert sequence_bytes(vllm(), shape, 128, "cuda") == layer * (128 + 5 * (128 + 16))


def test_what_is_left_of_the_budget_is_the_cache() -> None:
    plan = plan_engine(vllm(), Q8B, CARD)
    assert plan.budget == int(0.92 * 24 * GIB)
    assert plan.cache == plan.budget - plan.engine.total
    assert plan.engine.items[0] == MemoryItem("weights", 2 * Q8B.parameters, "8,191 M x 2 bytes")
    assert plan.at_once == plan.cache // (8192 * token_bytes(vllm(), Q8B)) == 5
    assert plan.fits
    assert not plan.holds_all


def test_a_share_that_is_set_is_the_budget() -> None:
    plan = plan_engine(vllm(vllm={"gpu_memory_utilization": 0.5}), Q8B, CARD)
    assert plan.budget == 12 * GIB
    assert not plan.fits
    assert plan.missing == plan.sequence - plan.cache > 0


def test_a_cache_that_is_set_is_taken_as_it_is() -> None:
    plan = plan_engine(vllm(vllm={"kv_cache_memory_bytes": 3 * GIB}), Q8B, CARD)
    assert plan.cache == 3 * GIB
    assert plan.fits
    assert not plan_engine(vllm(vllm={"kv_cache_memory_bytes": 9 * GIB}), Q8B, CARD).fits


def test_beside_others_vllm_gets_what_they_leave() -> None:
    taken = Device("cuda", 24 * GIB, taken=4 * GIB)
    plan = plan_engine(vllm(), TINY, taken)
    assert plan.utilization is not None
    assert 0.77 < plan.utilization < 20 / 24
    assert plan.fits
    few = plan_engine(vllm(), TINY, Device("cuda", 24 * GIB, taken=GIB))
    assert few.utilization == 0.92  # vLLM's own, as long as so much is free
    more = plan_engine(vllm(), TINY, Device("cuda", 24 * GIB, taken=3 * GIB // 2))
    assert more.utilization is not None
    assert more.utilization < 0.92
    greedy = plan_engine(vllm(vllm={"gpu_memory_utilization": 0.9}), TINY, taken)
    assert not greedy.fits  # vLLM refuses to start where less is free than it may take
    assert greedy.missing == greedy.overdrawn > 0
    assert plan_engine(vllm(), TINY, Device("cuda", 24 * GIB, 24 * GIB)).utilization == 0


def test_a_small_gpu_leaves_room_for_what_vllm_does_not_count() -> None:
    """Its context and graphs: 0.97 GiB of 12, of which vLLM's own share would leave 0.96."""
    plan = plan_engine(vllm(pp=2, max_model_len=1024), Q8B, Device("cuda", 12 * GIB))
    assert plan.utilization == 0.89
    assert plan.fits
    assert plan.tight


def test_proofs_are_planned_where_the_run_has_some() -> None:
    proofs = [item.name for item in plan_engine(vllm(), Q8B, CARD).beside]
    none = [item.name for item in plan_engine(vllm(), Q8B, CARD, fingerprint="").beside]
    assert set(proofs) - set(none) == {"proofs"}


def test_a_large_update_finds_no_room_beside_a_full_gpu() -> None:
    assert plan_engine(vllm(), Q8B, CARD).tight
    assert not plan_engine(vllm(), Q8B, CARD, changed=0.001).tight


def test_auto_has_to_be_a_number_first() -> None:
    with pytest.raises(UsageError, match="auto"):
        plan_engine(vllm(tp="auto"), Q8B, CARD)


def test_a_plan_says_by_how_much_it_fits() -> None:
    assert plan_engine(vllm(max_batch=5), Q8B, CARD).verdict == (
        "fits: 5 sequences of 8192 tokens at once"
    )
    assert "only 5 of 256 sequences" in plan_engine(vllm(), Q8B, CARD).verdict
    assert "short of one" in plan_engine(vllm(), Q8B, Device("cuda", 16 * GIB)).verdict


# -- the embedded engine ---------------------------------------------------------------------------


def test_the_embedded_engine_needs_room_for_two_networks() -> None:
    plan = plan_engine(EngineConfig(), Q8B, Device("cpu", 96 * GIB))
    items = {item.name: item.nbytes for item in plan.engine}
    assert items["weights"] == items["the next weights"] == 4 * Q8B.parameters
    assert plan.fits
    assert not plan_engine(EngineConfig(), Q8B, Device("cpu", 60 * GIB)).fits


def test_the_embedded_engines_cache_is_what_a_session_holds() -> None:
    """At most twice keys and values, while it grows; and hidden states: held, joined, and in fp32."""
    import torch

    from primerl.node.inference.qwen3 import Qwen3Session

    torch.set_num_threads(1)

    class Sizes:
        """What a session asks a network for."""

        layers, kv_heads, head_dim = 2, 2, 32

        def empty_cache(self, rows: int, slots: int) -> torch.Tensor:
            return torch.empty(self.layers, rows, self.kv_heads, slots, self.head_dim)

    session: Any = Qwen3Session(Sizes(), torch.ones(3, 100, dtype=torch.bool))  # pyright: ignore[reportArgumentType]
    used = 100
    while used < 1024:  # as step() does it
        if used == session._keys.shape[3]:
            before = session._keys.nbytes + session._values.nbytes
            session._grow(max(64, used // 2))
            peak = before // 2 + session._keys.nbytes + session._values.nbytes
            plan = plan_engine(EngineConfig(max_model_len=used + 1), TINY, Device("cpu", GIB))
            assert peak <= 3 * plan.sequence * 1.02
        used += 1


# -- breakdowns -----------------------------------------------------------------------------------------


def test_a_breakdown_adds_up_and_leaves_out_what_is_nothing() -> None:
    items = MemoryBreakdown.of([MemoryItem("a", 3), MemoryItem("b", 0), MemoryItem("c", 4)])
    assert [item.name for item in items] == ["a", "c"]
    assert (items + items).total == 14


def test_sizes_are_said_in_people_s_units() -> None:
    assert (gib(1.5 * GIB), gib(3 << 20)) == ("1.5 GiB", "3 MiB")
