"""A follower rank without vLLM; as a program, a first rank that starts one and waits."""

import os
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from primerl.node.errors import EngineError
from primerl.node.pipeline.vllm_followers import Followers, end_with_first, serve_calls


class Worker:
    """Records its calls and adds up numbers."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.seen: list[Any] = []

    def call(self, method: str, arguments: Sequence[Any]) -> Any:
        match method:
            case "pid":
                return os.getpid()
            case "note":
                self.seen += arguments
                return [self.rank, *self.seen]
            case "refuse":
                raise EngineError(f"rank {self.rank} does not want to")
            case _:
                raise ValueError(f"nobody knows {method}")


def follow(rank: int, ordered: Connection, concurrent: Connection, name: str) -> None:
    """A follower's process."""
    end_with_first()
    worker = Worker(rank)
    worker.seen.append(name)
    threading.Thread(target=serve_calls, args=(concurrent, worker.call), daemon=True).start()
    serve_calls(ordered, worker.call)


if __name__ == "__main__":
    followers = Followers(1)
    followers.start(follow, "x")
    print(followers.ordered.call("pid")[0], flush=True)
    time.sleep(600)
