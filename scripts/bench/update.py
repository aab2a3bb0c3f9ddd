"""Measure generation pauses for new weights: in-place deltas against full reloads.

    python scripts/bench/update.py --engine hf|vllm [--shape tiny|50m|0.6b] [--share 0.01] [--quick]

A random Qwen3 generates for some requests at once. At intervals it gets a policy with `--share` of the elements
changed, first by update(), then as often by load(). The time of each token is recorded. A pause is the longest
gap between two tokens of a request that touches the call; during part of it the engine is "frozen" and runs no
step. Lost tokens are computed from the median gap. Afterwards the logprobs of the updated engine must equal, to
the last bit, those of an engine that was given the whole state.
"""

import argparse
import asyncio
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from primerl.node.config.run import EngineConfig
from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.inference.handover import HostedPolicy
from primerl.node.inference.hf import HfEngine
from primerl.node.inference.model import LanguageModel
from primerl.node.inference.vllm import VllmCore, sampling_arguments
from primerl.node.weights.state import Changed, State
from primerl.scripts.bench.models import SHAPES, moved, random_policy
from primerl.scripts.bench.report import (
    Goal,
    at_least,
    at_most,
    conclude,
    make_parser,
    show_figures,
)

PAUSE_MS, RATIO = 40.0, 8.0
"""The goals, on an H200; elsewhere only the ratio."""
SETTLE_S = 0.4
PROMPT = tuple(range(32, 96))
ON_CUDA: dict[str, Any] = {
    "gpu_memory_utilization": 0.5,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    # requests in flight are recomputed in one step
    "max_num_batched_tokens": 16384,
}

Times = list[float]
Frozens = list[tuple[float, float]]


# -- engines with recorded tokens ------------------------------------------------------------------


class Watched(LanguageModel):
    """Records when each step of a batch ends, and the time of a load or an update."""

    times: ClassVar[Times] = []
    frozen: ClassVar[Frozens] = []

    @classmethod
    def build(cls, model_dir: Path, state: State, **options: Any) -> Self:
        """See LanguageModel.build()."""
        began = time.monotonic()
        made = super().build(model_dir, state, **options)
        took = time.monotonic() - began
        cls.frozen.append((took, took))
        return made

    def update(self, state: State, changed: Changed) -> bool:
        """See LanguageModel.update()."""
        began = time.monotonic()
        written = super().update(state, changed)
        took = time.monotonic() - began
        self.frozen.append((took, took))
        return written

    def prefill(self, tokens: Any, mask: Any, **_: Any) -> Any:
        """See LanguageModel.prefill(); the session records its steps, too."""
        session, logits = super().prefill(tokens, mask)
        self.times.append(time.monotonic())
        step = session.step

        def timed(tokens: Any) -> Any:
            logits = step(tokens)
            self.times.append(time.monotonic())
            return logits

        session.step = timed
        return session, logits


class Here:
    """vLLM in this process, so that tokens are seen as they come; fed like a hosted engine."""

    def __init__(self, config: EngineConfig) -> None:
        self.core = VllmCore(config)
        self._weights = HostedPolicy()

    async def start(self, model_dir: Path) -> None:
        """See VllmCore.start()."""
        await self.core.start(model_dir)

    async def load(self, version: int, state: State) -> None:
        """See Weights.load()."""
        await self._weights.load([self.core], version, state)

    async def update(self, version: int, state: State, changed: Changed) -> None:
        """See Weights.update()."""
        await self._weights.update([self.core], version, state, changed)

    async def generate(self, request: GenerateRequest) -> Completion:
        """See VllmCore.generate()."""
        return await self.core.generate(request)

    async def close(self) -> None:
        """See VllmCore.close()."""
        await self.core.close()


@dataclass
class Bench:
    """One engine under load."""

    engine: Any
    requests: int
    length: int
    times: list[Times] = field(default_factory=list[Times])
    """Times of the tokens of every request; of every batch's steps for the embedded engine."""
    frozen: Frozens = field(default_factory=list[tuple[float, float]])
    """Seconds without a step for each change of weights, and the part of them spent writing."""
    finished: int = 0

    async def generate_forever(self, row: int) -> None:
        """Request one completion after the other."""
        for number in count(row, self.requests):
            await self.generate(number)
            self.finished += 1

    async def generate(self, seed: int) -> None:
        """Request one completion and record the times of its tokens."""
        request = GenerateRequest(PROMPT, self.length, 1.0, seed, ())
        if not isinstance(self.engine, Here):
            await self.engine.generate(request)
            return
        from vllm import SamplingParams  # pyright: ignore
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore

        times: Times = []
        self.times.append(times)
        arguments = sampling_arguments(request, seed)
        params = SamplingParams(**arguments, output_kind=RequestOutputKind.DELTA)
        prompt = {"prompt_token_ids": list(PROMPT)}
        llm: Any = self.engine.core._llm  # pyright: ignore[reportPrivateUsage]
        stream = llm.generate(prompt, params, f"bench-{seed}")
        async for output in stream:
            times.extend([time.monotonic()] * len(output.outputs[0].token_ids))


class Frozen(logging.Handler):
    """Reads the pauses from the log of vLLM's engine."""

    def __init__(self, frozen: Frozens) -> None:
        super().__init__()
        self._frozen = frozen

    def emit(self, record: logging.LogRecord) -> None:
        """Record the seconds of "policy %d loaded, paused for %.4f s, %.4f s to write"."""
        if "paused for" in str(record.msg) and isinstance(record.args, tuple):
            self._frozen.append((float(str(record.args[1])), float(str(record.args[2]))))


def make_bench(options: argparse.Namespace) -> Bench:
    """Make the bench of the requested engine, not started."""
    cuda = torch.cuda.is_available()
    steps, frozen = Watched.times, Watched.frozen
    common: dict[str, Any] = {
        "dtype": "bfloat16" if cuda else "float32",
        "max_batch": options.requests,
        "max_model_len": 1024,
    }
    if options.engine == "hf":
        torch.set_num_threads(options.threads)
        engine: Any = HfEngine(EngineConfig(**common), model=Watched)
    else:
        engine = Here(EngineConfig(type="vllm", **common, vllm=ON_CUDA if cuda else {}))
        log = logging.getLogger("primerl.node.inference.handover")
        log.addHandler(Frozen(frozen))
        log.setLevel(logging.INFO)
    return Bench(engine, options.requests, options.length, [steps], frozen)


# -- measuring -------------------------------------------------------------------------------------


@dataclass
class Call:
    """One update or load."""

    kind: str
    began: float
    ended: float
    frozen: float
    """Seconds in which the engine ran no step."""
    writing: float


async def measure(bench: Bench, states: list[State], changed: Changed, calls: int) -> list[Call]:
    """Load the engine with requests and change its weights meanwhile."""
    engine, versions = bench.engine, count(1)
    done: list[Call] = []

    async def change(kind: str, call: Callable[[int], Awaitable[None]]) -> None:
        await asyncio.sleep(SETTLE_S)
        began = time.monotonic()
        await call(next(versions))
        done.append(Call(kind, began, time.monotonic(), *bench.frozen[-1]))
        await asyncio.sleep(SETTLE_S)

    busy = [asyncio.create_task(bench.generate_forever(row)) for row in range(bench.requests)]
    await asyncio.sleep(5 * SETTLE_S)
    for number in range(2 * calls):  # an even number, which ends with the first policy
        state = states[(number + 1) % 2]
        await change("update", lambda version, s=state: engine.update(version, s, changed))
    for number in range(2 * calls):
        state = states[(number + 1) % 2]
        await change("load", lambda version, s=state: engine.load(version, s))
    lost = [task for task in busy if task.done()]
    for task in busy:
        task.cancel()
    await asyncio.gather(*busy, return_exceptions=True)
    if lost:
        raise SystemExit(f"{len(lost)} requests were lost: {lost[0].exception()}")
    return done


def gaps_of(call: Call, times: Times) -> list[float]:
    """Return the gaps between consecutive tokens that overlap the call."""
    return [b - a for a, b in pairwise(times) if b > call.began and a < call.ended]


def summarize(bench: Bench, calls: list[Call]) -> dict[str, float]:
    """Return medians over all calls of a kind, in ms and tokens."""
    first = min(call.began for call in calls) - SETTLE_S
    quiet = [
        b - a
        for times in bench.times
        for a, b in pairwise(times)
        if a > first and not any(b > c.began and a < c.ended for c in calls)
    ]
    usual = statistics.median(quiet)
    found = {"median gap, ms": 1e3 * usual}
    for kind in ("update", "load"):
        mine = [call for call in calls if call.kind == kind]
        pauses: list[float] = []
        lost: list[float] = []
        for call in mine:
            touched = [gaps for times in bench.times if (gaps := gaps_of(call, times))]
            pauses.append(max(max(gaps) for gaps in touched))
            lost.append(sum(sum(gaps) / usual - len(gaps) for gaps in touched))
        width = bench.requests if isinstance(bench.engine, HfEngine) else 1
        found |= {
            f"{kind}: pause, ms": 1e3 * statistics.median(pauses),
            f"{kind}: longest pause, ms": 1e3 * max(pauses),
            f"{kind}: frozen, ms": 1e3 * statistics.median(call.frozen for call in mine),
            f"{kind}: writing, ms": 1e3 * statistics.median(call.writing for call in mine),
            f"{kind}: whole call, ms": 1e3 * statistics.median(c.ended - c.began for c in mine),
            f"{kind}: tokens lost": width * statistics.median(lost),
        }
    return found


async def same_as_loaded(bench: Bench, states: list[State], changed: Changed) -> bool:
    """Return whether an update gives exactly the logprobs of a load of the same state."""
    request = GenerateRequest(PROMPT, 64, 1.0, 5, ())
    await bench.engine.load(1000, states[0])
    before = await bench.engine.generate(request)
    await bench.engine.update(1001, states[1], changed)
    updated = await bench.engine.generate(request)
    await bench.engine.load(1001, states[1])
    loaded = await bench.engine.generate(request)
    return updated == loaded and updated.logprobs != before.logprobs


async def run(options: argparse.Namespace) -> dict[str, float]:
    """Return all figures."""
    bench = make_bench(options)
    with tempfile.TemporaryDirectory() as name:
        state = random_policy(Path(name), options.shape)
        other, changed = moved(state, options.share)
        try:
            await bench.engine.start(Path(name))
            await bench.engine.load(0, state)
            await bench.generate(10**6)  # warms up
            for times in bench.times:
                times.clear()
            calls = await measure(bench, [state, other], changed, options.calls)
            same = await same_as_loaded(bench, [state, other], changed)
        finally:
            await bench.engine.close()
    elements = sum(tensor.data.size for tensor in state.values())
    written = sum(len(positions) for positions in changed.values() if positions is not None)
    return {
        "elements": elements,
        "elements changed": written,
        "requests at once": bench.requests,
        "requests finished meanwhile": bench.finished,
        "requests lost": 0,
        "logprobs equal to those of a load": float(same),
        **summarize(bench, calls),
    }


def judge(found: dict[str, float]) -> list[Goal]:
    """Return the goals with the values reached."""
    equal = "logprobs equal to those of a load"
    goals = [at_least(equal, found[equal], 1.0)]
    for column in ("pause", "frozen", "whole call"):
        found[f"load / update: {column}"] = (
            found[f"load: {column}, ms"] / found[f"update: {column}, ms"]
        )
    goals.append(at_least("load / update: frozen", found["load / update: frozen"], RATIO, "x"))
    if torch.cuda.is_available():
        goals.append(at_most("update: pause", found["update: pause, ms"], PAUSE_MS, "ms"))
    return goals


def main() -> int:
    """Measure, print, and return exit code 0 if every goal was met."""
    parser = make_parser(__doc__, "few calls, few requests")
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--share", type=float, default=0.01, help="of the elements, changed")
    parser.add_argument("--calls", type=int, default=10, help="pairs of updates, and of loads")
    parser.add_argument("--requests", type=int, default=32, help="that generate at once")
    parser.add_argument("--length", type=int, default=512, help="tokens of a completion")
    parser.add_argument("--threads", type=int, default=1, help="of torch, for the hf engine")
    options = parser.parse_args()
    if options.quick:
        options.calls, options.requests, options.length = 2, 4, 64
    found = asyncio.run(run(options))
    goals = judge(found)
    show_figures(found)
    return conclude(found, goals, options.json)


if __name__ == "__main__":
    sys.exit(main())
