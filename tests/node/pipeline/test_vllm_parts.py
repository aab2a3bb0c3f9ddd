"""The parts between vLLM and the ring, without vLLM: steps, row order, records."""

import base64
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support.ring_cases import SHAPE, plan

from primerl.node.config.engine import EngineConfig
from primerl.node.errors import EngineError, UsageError
from primerl.node.inference.boundary_states import pack_projected, project
from primerl.node.inference.place import (
    VARIABLE,
    StagePlace,
    check_passes,
    check_placed,
    decode_place,
    encode_place,
    environment_of,
    placed_arguments,
    read_place,
)
from primerl.node.inference.vllm import CompletionCollector
from primerl.node.inference.vllm_arguments import SAMPLING
from primerl.node.inference.vllm_sampling import SampledStep
from primerl.node.pipeline.frames import FINGERPRINT_BYTES
from primerl.node.pipeline.step_codec import ContinuedSequence, NewSequence, StepEncoder
from primerl.node.pipeline.vllm_recorders import HeadRecorder, LastStageRecorder
from primerl.node.pipeline.vllm_runner import (
    HIDDEN,
    RESIDUAL,
    IncomingStates,
    OutgoingStates,
    StateBuffers,
    gather,
    residual_stream,
    rows_of,
    sampled_rows,
)
from primerl.protocol.rollouts import FINGERPRINT_NUMBERS

MODEL = {
    "num_hidden_layers": 8,
    "hidden_size": SHAPE.hidden_size,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def asked(name: str, prompt: int, **fields: Any) -> SimpleNamespace:
    extra = {SAMPLING: [int(name), 7, 1.5, 0, 1.0]}
    given: dict[str, Any] = {
        "req_id": name,
        "prompt_token_ids": [5] * prompt,
        "sampling_params": SimpleNamespace(extra_args=extra),
        "block_ids": ([1, 2],),
        "num_computed_tokens": 0,
    }
    return SimpleNamespace(**given | fields)


def output(new: list[Any], cached: dict[str, Any], scheduled: dict[str, int], **fields: Any) -> Any:
    rows = list(cached)
    found = SimpleNamespace(
        req_ids=rows,
        resumed_req_ids={name for name in rows if cached[name].get("resumed")},
        new_block_ids=[cached[name].get("blocks") for name in rows],
        num_computed_tokens=[cached[name]["computed"] for name in rows],
        num_output_tokens=[cached[name]["drawn"] for name in rows],
    )
    given: dict[str, Any] = {"finished_req_ids": set[str]()}
    return SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=found,
        num_scheduled_tokens=scheduled,
        **given | fields,
    )


# -- steps -----------------------------------------------------------------------------------------


def test_a_step_tells_lengths_and_blocks_and_no_token() -> None:
    encoder = StepEncoder()
    step = encoder.encode(output([asked("1", 10), asked("2", 4)], {}, {"2": 4, "1": 6}))
    assert step.parts == (
        NewSequence(2, 4, 0, 4, (1, 2), 7, 1.5, 0, 1.0),
        NewSequence(1, 10, 0, 6, (1, 2), 7, 1.5, 0, 1.0),
    )
    later = {"1": {"computed": 6, "drawn": 0}, "2": {"computed": 4, "drawn": 1, "blocks": ([9],)}}
    step = encoder.encode(output([], later, {"1": 4, "2": 1}))
    assert step.parts == (ContinuedSequence(1, 10, 6, 4, ()), ContinuedSequence(2, 5, 4, 1, (9,)))


def test_what_vllm_resumes_is_new_to_the_others() -> None:
    encoder = StepEncoder()
    encoder.encode(output([asked("1", 3)], {}, {"1": 3}))
    resumed = {"1": {"computed": 0, "drawn": 4, "blocks": ([8],), "resumed": True}}
    (part,) = encoder.encode(output([], resumed, {"1": 7})).parts
    assert part == NewSequence(1, 7, 0, 7, (8,), 7, 1.5, 0, 1.0)


def test_ended_sequences_are_named_in_the_next_step_once() -> None:
    encoder = StepEncoder()
    encoder.encode(output([asked("1", 3)], {}, {"1": 3}))
    encoder.skip(output([], {}, {}, finished_req_ids={"1", "unknown"}))
    assert encoder.encode(output([asked("2", 3)], {}, {"2": 3})).ended == (1,)
    assert encoder.encode(output([asked("3", 3)], {}, {"3": 3})).ended == ()


def test_caches_of_several_kinds_are_refused() -> None:
    with pytest.raises(EngineError, match="several kinds"):
        StepEncoder().encode(output([asked("1", 3, block_ids=([1], [2]))], {}, {"1": 3}))
    with pytest.raises(EngineError, match="block by block"):
        StepEncoder().encode(output([asked("1", 3)], {}, {"1": 3}, kv_cache_block_copies=[(1, 2)]))


# -- rows ------------------------------------------------------------------------------------------


def test_rows_are_put_in_another_order() -> None:
    counts = {"a": 2, "b": 1, "c": 3}
    assert gather(["a", "b"], ["a", "b"], counts) is None
    index = gather(["a", "b", "c"], ["c", "a", "b"], counts)
    assert index is not None
    assert index.tolist() == [3, 4, 5, 0, 1, 2]


def test_one_stream_leaves_and_arrives_in_the_runners_order() -> None:
    hidden, residual = torch.arange(12.0).reshape(4, 3), torch.ones(4, 3)
    counts = {"a": 1, "b": 2}
    index = gather(["a", "b"], ["b", "a"], counts)
    stream = residual_stream({HIDDEN: hidden, RESIDUAL: residual}, 3, index)
    assert torch.equal(stream, (hidden + 1)[[1, 2, 0]])
    assert torch.equal(residual_stream({HIDDEN: hidden}, 3, None), hidden[:3])
    with pytest.raises(EngineError, match="pipelines do not support"):
        residual_stream({"something": hidden}, 3, None)
    runner = SimpleNamespace(
        max_num_tokens=8,
        device=torch.device("cpu"),
        input_batch=SimpleNamespace(req_ids=["a", "b", "left"], num_reqs=2),
        intermediate_tensors=SimpleNamespace(tensors={HIDDEN: 0, RESIDUAL: 0}),
    )
    buffers = StateBuffers(runner, 3, torch.float32)
    found = dict(IncomingStates(buffers, stream, ["b", "a"], counts).items())
    assert torch.equal(found[RESIDUAL][:3], (hidden + 1)[:3])
    assert found[RESIDUAL].shape == (8, 3)  # a captured graph reads more rows than came
    assert not found[HIDDEN].any()


def test_only_rows_that_lead_to_a_token_leave_fingerprints() -> None:
    parts = (
        NewSequence(1, 5, 0, 3, (1,), 0, 1.0, 0, 1.0),  # not all of its prompt
        ContinuedSequence(2, 9, 8, 1, ()),
        NewSequence(3, 2, 0, 2, (1,), 0, 1.0, 0, 1.0),
    )
    stream = torch.randn(6, 32)
    index = sampled_rows(parts)
    assert torch.equal(rows_of(stream, index), stream[[3, 5]])
    (sent,), trail = OutgoingStates(stream, index, "raw", proven=True).wait()
    assert np.array_equal(sent, stream.numpy())
    assert trail == pack_projected(project(stream[[3, 5]]))
    assert OutgoingStates(stream[:3], sampled_rows(parts[:1]), "raw", proven=True).wait()[1] == b""
    assert OutgoingStates(stream, index, "raw", proven=False).wait()[1] == b""
    coded, _ = OutgoingStates(stream, index, "fp8", proven=True).wait()
    assert coded[0].dtype == np.uint8


def test_where_every_row_leads_to_a_token_all_leave_fingerprints() -> None:
    parts = ContinuedSequence(1, 9, 8, 1, ()), NewSequence(2, 2, 1, 1, (1,), 0, 1.0, 0, 1.0)
    stream = torch.randn(2, 32)
    assert sampled_rows(parts) is None
    assert OutgoingStates(stream, sampled_rows(parts), "raw", proven=True).wait()[
        1
    ] == pack_projected(project(stream))
    assert (
        sampled_rows([ContinuedSequence(1, 9, 6, 3, ())]) is not None
    )  # of its three rows the last one


# -- what stage 0 keeps ----------------------------------------------------------------------------


def keeper(boundaries: int = 2, requests: int = 1) -> HeadRecorder:
    return HeadRecorder(
        boundaries=boundaries,
        width=32,
        dtype=torch.float32,
        fingerprint="projection",
        requests=requests,
        length=16,
    )


def numbers(*first: float) -> np.ndarray:
    rows = np.zeros((len(first), 1 + FINGERPRINT_NUMBERS), np.float32)
    rows[:, 0] = first
    rows[:, 1] = 1
    return rows


async def test_what_came_back_is_collected_with_versions_and_boundaries() -> None:
    kept = keeper(requests=2)
    for name, key in (("a", 4), ("b", 5), ("c", 6)):  # one more than there was room for
        kept.admit(name, 3, key, 0, 1.0)
    kept.version = 1
    trail = b"A" * 8 + b"B" * 8 + b"a" * 8 + b"b" * 8
    kept.record(["a", "b"], [3, 3], numbers(-1, -2), trail)
    kept.version = 2
    kept.record(["b", "gone"], [4, 9], numbers(-3, -9), b"C" * 8 + bytes(8) + b"c" * 8 + bytes(8))

    async def ask(wanted: list[list[int]], forgotten: list[int]) -> list[list[Any]]:
        return kept.collect(wanted, forgotten)

    found = await CompletionCollector(ask, "projection").collect(5, 2)
    assert found.logprobs == [-2, -3]
    assert found.spans == ((0, 1), (1, 2))
    assert found.boundaries == (b"B" * 8 + b"C" * 8, b"b" * 8 + b"c" * 8)
    assert len(found.proof) == 2 * FINGERPRINT_BYTES


def test_the_last_stage_tells_what_each_lane_drew_in_the_order_it_is_asked_for() -> None:
    teller = LastStageRecorder(
        torch.device("cpu"),
        width=4,
        dtype=torch.float32,
        fingerprint="",
        requests=4,
        length=8,
    )
    for key, name in enumerate("abc"):
        teller.admit(name, 2, key, 7 + key, 1.0)
    logits = torch.full((3, 5), -30.0)
    logits[[0, 1, 2], [4, 2, 3]] = 30.0
    for length in (2, 3):
        told = [
            teller.sample(
                SampledStep(
                    lane,
                    np.full(len(lane), length),
                    np.ones(len(lane), bool),
                    torch.ones(len(lane), 4),
                    np.zeros(len(lane), np.int64),
                ),
                of,
            )
            for lane, of in ((["a", "b"], logits[:2]), (["c"], logits[2:]))
        ]
        tokens, numbers = told[0].wait(["b", "a"])
        assert tokens == (2, 4)
        assert numbers.shape == (2, 1)
        assert numbers == pytest.approx(0.0, abs=1e-6)
        assert told[1].wait(["c"])[0] == (3,)
        assert told[1].wait([])[0] == ()


def test_a_step_that_came_twice_counts_once() -> None:
    kept = keeper(boundaries=0)
    kept.admit("a", 3, 4, 0, 1.0)
    kept.record(["a"], [3], numbers(-1), b"")
    kept.record(["a"], [4], numbers(-2), b"")
    kept.record(["a"], [4], numbers(-2), b"")
    ((_, rows, *_, crossing),) = kept.collect([[4, 2]], [])
    assert np.frombuffer(rows, np.float32).reshape(2, -1)[:, 0].tolist() == [-1, -2]
    assert crossing == []


@pytest.mark.parametrize(
    ("lengths", "rows", "trail", "words"),
    [
        ([5], numbers(-1), bytes(16), "out of order"),
        ([2], numbers(-1), bytes(16), "out of order"),
        ([3], numbers(-1, -1), bytes(16), "wrong shape or dtype"),
        ([3], numbers(-1)[:, :3], bytes(16), "wrong shape or dtype"),
        ([3], numbers(-1).astype(np.float64), bytes(16), "wrong shape or dtype"),
        ([3], numbers(-1), bytes(8), "invalid trail"),
        ([3], numbers(float("nan")), bytes(16), "not finite"),
        ([3], numbers(0.5), bytes(16), "above 0"),
    ],
)
def test_what_the_last_stage_may_not_send_is_refused(
    lengths: list[int], rows: Any, trail: bytes, words: str
) -> None:
    kept = keeper()
    kept.admit("a", 3, 4, 0, 1.0)
    with pytest.raises(EngineError, match=words):
        kept.record(["a"], lengths, rows, trail)


# -- the place -------------------------------------------------------------------------------------


def place(rank: int = 0, **fields: Any) -> StagePlace:
    found = plan([bytes([one]) * 32 for one in range(2)])
    shape = msgspec.structs.replace(found.shape, **fields)
    return StagePlace(msgspec.structs.replace(found, shape=shape), rank, "/nowhere")


def test_a_place_travels_in_the_environment() -> None:
    one = place(1)
    assert decode_place(encode_place(one)) == one
    environment = environment_of(one)
    assert read_place(environment) == one
    layers = [stage.end - stage.first for stage in one.plan.stages]
    assert environment["VLLM_PP_LAYER_PARTITION"] == ",".join(map(str, layers))
    with pytest.raises(EngineError, match="cannot be read"):
        read_place({VARIABLE: base64.b64encode(b"no place").decode()})


def test_every_stage_is_started_alike_but_for_its_layers() -> None:
    model = MODEL | {"num_hidden_layers": place().plan.layers}
    first, last = (placed_arguments(place(rank), model, 1) for rank in range(2))
    differs = {name for name in first if first[name] != last[name]}
    assert differs <= {"worker_extension_cls", "kv_cache_memory_bytes"}
    assert first["num_gpu_blocks_override"] == SHAPE.kv_tokens // SHAPE.block_size + 1
    assert first["async_scheduling"] is False


def test_ranks_share_keys_and_values_as_far_as_there_are_heads() -> None:
    """Of the model's two heads four ranks hold two copies; what the plan says stays the plan's."""
    model = MODEL | {"num_hidden_layers": place().plan.layers}
    alone, two, four = (placed_arguments(place(), model, tp) for tp in (1, 2, 4))
    assert alone["kv_cache_memory_bytes"] == 2 * two["kv_cache_memory_bytes"]
    assert four["kv_cache_memory_bytes"] == two["kv_cache_memory_bytes"]
    differs = {name for name in alone if alone[name] != two[name]}
    assert differs == {"tensor_parallel_size", "kv_cache_memory_bytes"}
    fit = place(kv_tokens=4 * SHAPE.max_model_len, dtype="float32")
    check_placed(EngineConfig(type="vllm", tp=2), fit, model)


def test_passes_that_leave_a_rank_a_part_of_the_states_are_refused() -> None:
    check_passes(None)
    check_passes({"pass_config": {"enable_sp": False, "fuse_norm_quant": True}})
    check_passes(SimpleNamespace(pass_config=SimpleNamespace(fuse_norm_quant=True)))
    with pytest.raises(UsageError, match=r"pass_config\.enable_sp"):
        check_passes({"pass_config": {"enable_sp": True}})
    with pytest.raises(UsageError, match="fuse_gemm_comms"):
        check_passes(SimpleNamespace(pass_config=SimpleNamespace(fuse_gemm_comms=True)))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"vllm": {"compilation_config": {"pass_config": {"enable_sp": True}}}}, "enable_sp"),
        ({"dp": 2}, "engine.dp is 2"),
        ({"pp": 2}, "engine.pp is 2"),
        ({"sleep_after_s": 3.0}, "does not sleep"),
        ({"vllm": {"block_size": 16}}, "set by the plan"),
        (
            {"vllm": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}},
            "speculative decoding",
        ),
        ({"dtype": "bfloat16"}, "set engine.dtype"),
    ],
)
def test_a_config_that_cannot_be_a_stage_is_refused(fields: dict[str, Any], words: str) -> None:
    model = MODEL | {"num_hidden_layers": place().plan.layers}
    fit = place(kv_tokens=4 * SHAPE.max_model_len, dtype="float32")
    check_placed(EngineConfig(type="vllm"), fit, model)
    with pytest.raises(UsageError, match=words):
        check_placed(EngineConfig(type="vllm", **fields), fit, model)


def test_a_plan_of_another_model_is_refused() -> None:
    with pytest.raises(EngineError, match="another model"):
        check_placed(EngineConfig(type="vllm"), place(), MODEL | {"num_hidden_layers": 99})
