"""vLLM's scheduler for runs whose engines keep keys and values when their weights change.

vLLM imports this in the process of its engine core, by name (`scheduler_cls`). When weights change vLLM
preempts all requests and empties its cache. Here the cache is not emptied: a request that goes on finds the
whole blocks that it had, and only computes the tokens after them anew. Invariants:

- A block that a request finds was computed under the weights of the request's salt (vllm.py), or by itself.
- A request whose blocks were given to others goes on under another salt, so that nobody finds what it computes
  again. Recorder notices it by the blocks that it lacks.
"""

import itertools
from typing import Any

from ...protocol.manifests import KV_BLOCK


def make_scheduler(*arguments: Any, **named: Any) -> Any:
    """Make vLLM's own scheduler, with a cache that is never emptied."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # pyright: ignore
    from vllm.v1.core.sched.scheduler import Scheduler  # pyright: ignore

    asynchronous = named["vllm_config"].scheduler_config.async_scheduling
    kind: Any = AsyncScheduler if asynchronous else Scheduler
    scheduler = kind(*arguments, **named)
    keep_cache(scheduler.kv_cache_manager)
    return scheduler


def keep_cache(manager: Any) -> None:
    """Make a KVCacheManager of vLLM keep what it has cached, and each request find its own blocks."""
    find, serial = manager.get_computed_blocks, itertools.count()

    def find_own(request: Any) -> Any:
        blocks = find(request)
        had = (request.num_tokens - 1) // KV_BLOCK * KV_BLOCK
        if request.num_preemptions and blocks[1] < had:
            request.cache_salt = f"{request.cache_salt}/lost {next(serial)}"
            request.block_hashes.clear()
            request.update_block_hashes()
            blocks = find(request)
        return blocks

    manager.get_computed_blocks = find_own
    manager.reset_prefix_cache = lambda: True
