"""What a follower does: a rank of a stage that is not the first, in a process that the first one started.

It decides nothing. What it cannot do ends it, and with it all ranks of its stage.
"""

import os
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

from .vllm_followers import FAILED, end_with_first, obey
from .vllm_place import FOLLOWER_EXTENSION, read_place


def main(rank: int, turns: Connection, beside: Connection, config: Any, method: str) -> None:
    """Compute as rank `rank` of its stage with vLLM's `config`, together with who is at `method`."""
    try:
        _follow(rank, turns, beside, config, method)
    except BaseException:  # the others cannot go on without this one
        traceback.print_exc()
        os._exit(FAILED)
    os._exit(0)


def _follow(rank: int, turns: Connection, beside: Connection, config: Any, method: str) -> None:
    end_with_first()
    from .vllm_rank import FollowerExecutor

    if read_place(os.environ).first:
        config.parallel_config.worker_extension_cls = FOLLOWER_EXTENSION
    executor = FollowerExecutor(config, rank, method)

    def call(name: str, arguments: Any) -> Any:
        (found,) = executor.collective_rpc(name, args=tuple(arguments))
        return found

    def work_beside() -> None:
        executor.settle_thread()
        obey(beside, call)

    threading.Thread(target=work_beside, name="primerl-beside", daemon=True).start()
    obey(turns, call)
