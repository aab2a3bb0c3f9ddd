"""How busy vLLM is, read off what its scheduler tells after every step.

vLLM's own statistics cost its event loop work for every request and step. Of them only the scheduler's are
asked for, one small message a step, and they are caught where they arrive: `disable_log_stats` is false for
the engine core, and true for everything behind it.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from .engine import EngineStats

_MOST_PAUSES = 64


class VllmMeter:
    """Watches one AsyncLLM; watch() comes before its first request."""

    def __init__(self) -> None:
        self._kv_tokens = 0
        self._scheduler: Any = None
        self._preemptions = 0
        self._pauses: deque[tuple[float, float]] = deque(maxlen=_MOST_PAUSES)
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._pending = 0
        self._unfinished: Callable[[], int] = lambda: self._pending
        self._moved = 0.0
        self._preempted: Any = None

    def watch(self, llm: Any, preempted: Any, *, served: bool = False) -> None:
        """Catch what the engine core of `llm` tells; `preempted` is vLLM's type of that event. With `served`
        vLLM's own statistics go on, for its /metrics."""
        cache = llm.vllm_config.cache_config
        self._kv_tokens = (cache.num_gpu_blocks or 0) * cache.block_size
        self._preempted = preempted
        if not served:
            llm.log_stats = llm.output_processor.log_stats = False
            llm.logger_manager = None
        self._unfinished = llm.output_processor.get_num_unfinished_requests
        core = llm.engine_core
        get = core.get_output_async

        async def caught() -> Any:
            outputs = await get()
            self.note(outputs)
            return outputs

        core.get_output_async = caught

    def note(self, outputs: Any) -> None:
        """What came of a step."""
        self._moved = time.monotonic()
        if outputs.scheduler_stats is not None:
            self._scheduler = outputs.scheduler_stats
        for one in outputs.outputs:
            self._generated_tokens += len(one.new_token_ids)
            for event in one.events or ():
                if event.type == self._preempted and not self._was_paused(event.timestamp):
                    self._preemptions += 1

    def begin(self, prompt: int) -> None:
        """A request with a prompt of so many tokens goes to vLLM."""
        self._prompt_tokens += prompt
        if not self._pending:
            self._moved = time.monotonic()
        self._pending += 1

    def end(self) -> None:
        """A request has left vLLM, however it ended."""
        self._pending -= 1

    def paused(self, began: float, ended: float) -> None:
        """No step ran between these times; vLLM preempts all then, and not because its cache is full."""
        self._pauses.append((began, ended))
        self._moved = max(self._moved, ended)

    def stuck_s(self) -> float:
        """How long nothing has come though there is work; a reply that waits for its reader is none."""
        working = self._pending and self._unfinished()
        return time.monotonic() - self._moved if working else 0.0

    def stats(self) -> EngineStats:
        """As far as it is known."""
        found = self._scheduler if self._pending else None  # the last step's say nothing when idle
        running = int(getattr(found, "num_running_reqs", 0))
        skipped = int(getattr(found, "num_skipped_waiting_reqs", 0))
        return EngineStats(
            running=min(running, self._pending),
            waiting=int(getattr(found, "num_waiting_reqs", 0)) + skipped,
            kv_use=float(getattr(found, "kv_cache_usage", 0.0)),
            kv_tokens=self._kv_tokens,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
        )

    def _was_paused(self, when: float) -> bool:
        return any(began <= when <= ended for began, ended in self._pauses)
