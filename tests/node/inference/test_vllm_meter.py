"""What vLLM's scheduler tells becomes statistics; a scheduler is made up here."""

import time
from types import SimpleNamespace
from typing import Any

from primerl.node.inference.engine import EngineStats
from primerl.node.inference.vllm import VllmMeter

PREEMPTED = 3


class Core:
    """Gives one output after the other."""

    def __init__(self, outputs: list[Any]) -> None:
        self._outputs = outputs

    async def get_output_async(self) -> Any:
        """The next one."""
        return self._outputs.pop(0)


def step(stats: Any, *events: tuple[int, float]) -> Any:
    found = [SimpleNamespace(type=kind, timestamp=when) for kind, when in events]
    return SimpleNamespace(
        scheduler_stats=stats,
        outputs=[
            SimpleNamespace(events=found, new_token_ids=[1]),
            SimpleNamespace(events=None, new_token_ids=[2, 3]),
        ],
    )


async def test_statistics_are_caught_and_vllm_makes_none_of_its_own() -> None:
    meter, now = VllmMeter(), time.monotonic()
    left = [1, 2]
    told = SimpleNamespace(
        num_running_reqs=2, num_waiting_reqs=3, num_skipped_waiting_reqs=1, kv_cache_usage=0.5
    )
    told.spec_decoding_stats = SimpleNamespace(num_draft_tokens=6, num_accepted_tokens=4)
    older = SimpleNamespace(num_running_reqs=9, num_waiting_reqs=1, kv_cache_usage=0.25)
    outputs = [
        step(told, (PREEMPTED, now - 9), (PREEMPTED, now - 5), (1, now)),
        step(None, (PREEMPTED, now)),
        step(older),
    ]
    llm: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=10, block_size=16)),
        engine_core=Core(list(outputs)),
        output_processor=SimpleNamespace(
            log_stats=True, get_num_unfinished_requests=lambda: len(left)
        ),
        log_stats=True,
        logger_manager=object(),
    )
    meter.watch(llm, PREEMPTED)
    assert (llm.log_stats, llm.output_processor.log_stats, llm.logger_manager) == (
        False,
        False,
        None,
    )
    for _ in range(2):
        meter.begin(4)
    meter.paused(now - 6, now - 4)  # vLLM preempts all then, and that says nothing of its cache
    assert await llm.engine_core.get_output_async() is outputs[0]
    assert await llm.engine_core.get_output_async() is outputs[1]
    assert meter.stats() == EngineStats(2, 4, 0.5, 160, 2, 8, 6, 6, 4)
    await llm.engine_core.get_output_async()
    assert (meter.stats().running, meter.stats().waiting) == (2, 1)  # no more than were sent
    assert 0 < meter.stuck_s() < 60
    left.clear()
    assert meter.stuck_s() == 0  # vLLM has done it, and a client reads slowly
    for _ in range(2):
        meter.end()
    assert meter.stats() == EngineStats(0, 0, 0.0, 160, 2, 8, 9, 6, 4)
    assert meter.stuck_s() == 0
