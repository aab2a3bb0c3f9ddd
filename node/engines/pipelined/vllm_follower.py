"""What a follower does: a rank of a stage, in a process that another one started to command it.

It decides nothing. What it cannot do ends it, and with it all ranks of its stage.
"""

import os
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

from .vllm_followers import FAILED, end_with_first, obey


def main(
    rank: int,
    turns: Connection,
    beside: Connection,
    config: Any,
    method: str,
    handles: Connection | None = None,
) -> None:
    """Compute as rank `rank` of its stage with vLLM's `config`, together with who is at `method`.

    Through `handles` the first rank of stage 0 is given the socket that it writes to.
    """
    try:
        _follow(rank, turns, beside, config, method, handles)
    except BaseException:  # the others cannot go on without this one
        traceback.print_exc()
        os._exit(FAILED)
    os._exit(0)


def _follow(
    rank: int,
    turns: Connection,
    beside: Connection,
    config: Any,
    method: str,
    handles: Connection | None,
) -> None:
    end_with_first()
    from .vllm_rank import FollowerExecutor

    executor = FollowerExecutor(config, rank, method)
    if rank == 0:
        executor.worker.primerl_handles(handles)

    def call(name: str, arguments: Any) -> Any:
        (found,) = executor.collective_rpc(name, args=tuple(arguments))
        return found

    def work_beside() -> None:
        executor.settle_thread()
        obey(beside, call)

    threading.Thread(target=work_beside, name="primerl-beside", daemon=True).start()
    obey(turns, call)
