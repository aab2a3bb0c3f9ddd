"""A fake of vLLM's process: a prompt's first token selects how it fails.

Run as a program by HostedEngine; frames, tasks and the end are those of the real one (node/inference/host.py).
`engine.vllm` says how it starts and loads: see Fake.
"""

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from primerl.node.config.engine import EngineConfig
from primerl.node.errors import EngineError, EngineLost, UsageError
from primerl.node.inference import engine, host
from primerl.node.inference.handover import POSITIONS, VALUES, WHOLE, read_spans
from primerl.node.inference.host import Sleeper
from primerl.node.inference.host_messages import ApiOptions
from primerl.node.inference.place import StagePlace
from primerl.node.inference.prefill import (
    COLUMNS,
    LOGPROB,
    PROJECTED,
    ROUTING,
    ROUTING_MARGIN,
    PrefillRequest,
    read_claims,
)
from primerl.node.weights.checkpoint import read_checkpoint, read_metadata
from primerl.node.weights.state import State
from primerl.protocol.manifests import KV_BLOCK

WEIGHTS, PID, DIES, OOM, LOST, BLOCKS, STUCK, WAITS, FAULTY, LOOKS, ERRS = range(11)
"""Tokens. WEIGHTS: the answer is what was loaded; PID: which process answers; LOST: vLLM itself died below
it; BLOCKS: the whole process hangs; STUCK: vLLM does; WAITS: until given up; FAULTY: only this request
fails; LOOKS: how many requests wait, and how often it slept; ERRS: the program has an error."""
CACHED, LOADED, COUNTS, RECALLED = 11, 12, 13, 14
"""First tokens of a text to measure. CACHED: place FIRST is not computed, until it is asked for with a salt;
then its logprobs say how often that was so. LOADED: they say how often a whole state was loaded. COUNTS: they
say how many places were asked for with it. RECALLED: how often a copy of weights was written."""
FIRST = 2
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
BAD = 99
"""A state whose numbers begin with it does not fit."""
DEADLY = 98
"""Loading it ends the process."""
ERRONEOUS = 97
"""Loading it meets an error of the program."""


class Fake:
    """Implements EngineCore; `place` is where it is stage 0 of a pipeline."""

    def __init__(self, config: EngineConfig, *place: StagePlace) -> None:
        self._says: dict[str, Any] = config.vllm
        self._state: State = {}
        self._staged: State = {}
        self._version = -1
        self._waiting = 0
        self._slept = 0
        self._asleep = False
        self._drawn = 0
        self._stuck_s = 0.0
        self._loads = 0
        self._salted = 0
        self._recalls = 0
        self._copies: dict[int, State] = {}
        self._cached: dict[str, int] = {}
        """salt -> tokens that are in the cache; `room` is how many fit."""

    def prepare_api(self, options: ApiOptions) -> None:
        """See ServingCore."""
        self._api = options

    async def serve_api(self, sleeper: Sleeper) -> None:
        """Answer each connection with the model's name and this process id."""

        async def tell(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(f"{self._api.served_name} {os.getpid()}".encode())
            writer.close()

        await asyncio.start_unix_server(tell, self._api.socket)

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """`fails`: a file; while it is there no start succeeds. `refuses`: the option is wrong.
        `breaks`: the start fails, and only the log says why.
        `starts_s`: how long it takes; `with_another`: a process of its own is there meanwhile."""
        if self._says.get("with_another"):
            await asyncio.create_subprocess_exec("sleep", "600")
        await asyncio.sleep(self._says.get("starts_s", 0))
        if "refuses" in self._says:
            raise UsageError("engine.vllm.refuses cannot be set: remove it")
        if words := self._says.get("breaks"):
            print(f"(EngineCore pid=1) ValueError: {words}", file=sys.stderr, flush=True)
            raise EngineError("vLLM did not start (RuntimeError See root cause above)")
        if os.path.exists(self._says.get("fails", "/nowhere")):  # noqa: ASYNC240
            print("this machine has no GPU any more", file=sys.stderr, flush=True)
            os._exit(4)

    async def check(self, path: str) -> engine.WeightsFault:
        """See BAD."""
        state = read_checkpoint(Path(path))
        return engine.WeightsFault("a number is bad" if state["w"].data[0] == BAD else "", [])

    async def load(self, version: int, path: str) -> engine.Written:
        """See DEADLY."""
        self._state, self._version = read_checkpoint(Path(path)), version
        self._loads += 1
        if self._state["w"].data[0] == DEADLY:
            os._exit(5)
        if self._state["w"].data[0] == ERRONEOUS:
            raise ZeroDivisionError("an error in the program")
        return engine.Written(0.002, 0.001)

    async def stage(self, path: str) -> engine.WeightsFault:
        """`refuses_updates`: a file; the process that takes it away refuses this update."""
        if _taken(self._says.get("refuses_updates", "/nowhere")):
            return engine.WeightsFault("its parameters have moved", [])
        self._staged = _with_changes(self._state, Path(path))
        return engine.WeightsFault("", [])

    async def write(self, version: int) -> engine.Written:
        """What was staged."""
        self._state, self._version = self._staged, version
        return engine.Written(0.002, 0.001)

    async def keep(self, key: int) -> list[int]:
        """See CopyingCore; keeps as many as `copies` says."""
        self._copies = {**self._copies, key: self._state}
        for old in list(self._copies)[: -self._says.get("copies", 0) or None]:
            del self._copies[old]
        return list(self._copies)

    async def recall(self, version: int, key: int) -> engine.Written:
        """See CopyingCore."""
        if key not in self._copies:
            raise EngineError("it is not kept")
        self._state, self._version = self._copies[key], version
        self._recalls += 1
        return engine.Written(0.0, 0.0)

    async def generate(self, request: engine.GenerateRequest) -> engine.Completion:
        """By the first token."""
        assert not self._asleep
        match request.prompt[0]:
            case 1:  # PID
                return self._found([os.getpid()])
            case 2:  # DIES
                print("I was told to die", file=sys.stderr, flush=True)
                os._exit(3)
            case 3:  # OOM
                print(OUT_OF_MEMORY, file=sys.stderr, flush=True)
                raise EngineLost("vLLM failed (EngineDeadError)")
            case 4:  # LOST
                raise EngineLost("vLLM failed (EngineDeadError)")
            case 5:  # BLOCKS
                time.sleep(600)  # noqa: ASYNC251
            case 6:  # STUCK
                self._stuck_s = 1e6
                await asyncio.sleep(600)
            case 7:  # WAITS
                await self._wait()
            case 8:  # FAULTY
                raise EngineError("this one cannot be drawn")
            case 9:  # LOOKS
                return self._found([self._waiting, self._slept])
            case 10:  # ERRS
                raise ZeroDivisionError("an error in the program")
            case _:
                pass
        return self._found([int(one) for one in self._state["w"].data])

    async def prefill(self, requests: Sequence[PrefillRequest]) -> list[bytes]:
        """By the first token of each; the states are the first number that was loaded.

        `route_bytes` of a token: a claimed route is off by 1, and by its highest expert.
        """
        return [await self._measured(one) for one in requests]

    async def _measured(self, request: PrefillRequest) -> bytes:
        kind = request.token_ids[0]
        if kind in (DIES, LOST, BLOCKS, WAITS, FAULTY, ERRS):
            await self.generate(engine.GenerateRequest((kind,), 1, 1.0, 0, ()))
        claims = read_claims(request.claims, self._says.get("route_bytes", 0), request.width)
        places = claims["places"]
        rows = np.zeros((len(places), COLUMNS), np.float32)
        if "route_bytes" in self._says:
            rows[:, ROUTING] = claims["routed"]
            rows[:, ROUTING_MARGIN] = claims["routed"] * claims["routes"].max(1)
        rows[:, PROJECTED:] = float(self._state["w"].data[0])
        if request.salt.startswith("kept"):
            rows[places - 1 < self._cached.pop(request.salt, 0)] = np.nan
            self._cached[request.salt] = len(request.token_ids) // KV_BLOCK * KV_BLOCK
            while sum(self._cached.values()) > self._says.get("room", 1 << 20):
                del self._cached[next(iter(self._cached))]
        self._salted += bool(request.salt)
        if kind == CACHED:
            rows[:, LOGPROB] = -self._salted if request.salt else 0.0
            rows[(places == FIRST) & (not request.salt)] = np.nan
        elif kind == LOADED:
            rows[:, LOGPROB] = -self._loads
        elif kind == RECALLED:
            rows[:, LOGPROB] = -self._recalls
        elif kind == COUNTS:
            rows[:, LOGPROB] = -len(places)
        return rows.tobytes()

    def stats(self) -> engine.EngineStats:
        """What it drew, and some of everything else."""
        return engine.EngineStats(
            running=self._waiting,
            waiting=2,
            kv_use=0.25,
            kv_tokens=100,
            generated_tokens=self._drawn,
        )

    def stuck_s(self) -> float:
        """See STUCK."""
        return self._stuck_s

    async def sleep(self) -> None:
        """Counted."""
        self._asleep, self._slept = True, self._slept + 1

    async def wake(self) -> None:
        """After sleep()."""
        self._asleep = False

    async def close(self) -> None:
        """Nothing to end."""

    async def _wait(self) -> None:
        self._waiting += 1
        try:
            await asyncio.sleep(600)
        finally:
            self._waiting -= 1

    def _found(self, tokens: list[int]) -> engine.Completion:
        self._drawn += len(tokens)
        logprobs = [-0.5] * len(tokens)
        return engine.Completion(
            tokens, logprobs, "stop", self._version, self._version, (), b"\x00\xff"
        )


def _taken(path: str) -> bool:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def _with_changes(state: State, path: Path) -> State:
    data = {name: tensor.data.copy() for name, tensor in state.items()}
    found = read_checkpoint(path)
    for name, tensor in found.items():
        if name.startswith(WHOLE):
            data[name.removeprefix(WHOLE)] = tensor.data
    for dtype, spans in read_metadata(path).items():
        at = 0
        for name, count in read_spans(spans):
            part = slice(at, at + count)
            where = found[POSITIONS + dtype].data[part]
            data[name][where] = found[VALUES + dtype].data[part]
            at += count
    return {
        name: type(tensor)(tensor.dtype, tensor.shape, data[name]) for name, tensor in state.items()
    }


if __name__ == "__main__":
    host.main(Fake)
