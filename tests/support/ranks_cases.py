"""Real ranks for tests: processes that meet over gloo as under torchrun, with a deadline for everything."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from queue import Empty
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from primerl.node.config.run import TrainingConfig
from primerl.node.training.world import World

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

TIMEOUT_S = 240.0
WORLDS = 24
"""That a job may join, one after the other."""
PORTS = "STORES_OF_TESTS"
HOST = "127.0.0.1"
Job = Callable[..., Any]


def on_ranks(size: int, job: Job, *args: Any) -> list[Any]:
    """What `job(*args)` returns on each of `size` new ranks; a job joins worlds with join()."""
    stores = [TCPStore(HOST, 0, is_master=True, wait_for_workers=False) for _ in range(WORLDS)]
    ports = " ".join(str(store.port) for store in stores)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, size, ports, job, args, results))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        found = dict(_result(results) for _ in processes)
        for process in processes:
            process.join(TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [found[rank] for rank in range(size)]


def join(config: TrainingConfig) -> World:
    """The world of this rank for `config`; each world that was joined before must be closed."""
    port, _, rest = os.environ[PORTS].partition(" ")  # a store serves one world
    os.environ |= {"MASTER_PORT": port, PORTS: rest}
    return World.join(config)


def _rank(
    rank: int, size: int, ports: str, job: Job, args: tuple[Any, ...], results: "Queue[Any]"
) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": HOST,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the test holds the stores
        PORTS: ports,
    }
    try:
        results.put((rank, job(*args), ""))
    except Exception:
        results.put((rank, None, traceback.format_exc()))
        raise


def _result(results: "Queue[Any]") -> tuple[int, Any]:
    try:
        rank, found, failure = results.get(timeout=TIMEOUT_S)
    except Empty:
        raise AssertionError("a rank said nothing in time") from None
    assert not failure, f"rank {rank}: {failure}"
    return rank, found
