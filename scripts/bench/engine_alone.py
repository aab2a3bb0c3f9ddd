"""An engine alone, kept full, for worker.py and run.py: bare vLLM, or the hf engine.

    python engine_alone.py vllm|hf MODEL_DIR ENGINE_CONFIG_JSON      (commands: children.py)

vLLM: AsyncLLM.generate with none of this project's code beside it. Its engine arguments are the worker's own,
but real weights are read from the model directory and there is no worker extension: no seeded sampler, no
proofs, and only vLLM's logprobs.
"""

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from primerl.node.config.run import EngineConfig
from primerl.node.inference.build import build_engine
from primerl.node.inference.engine import GenerateRequest
from primerl.node.inference.vllm_arguments import engine_arguments, set_environment
from primerl.node.models.model_files import read_state
from primerl.scripts.bench.children import Event, Wire, cpu_seconds

WARM_LIMIT_S = 60.0
MOST_WINDOWS = 4
"""Windows measured at most, where only ended completions count: those of a batch end together."""

Draw = Callable[[Event, int], Coroutine[Any, Any, int]]
"""Draws the completion of a command and a number; returns its token count."""


class Alone:
    """An engine that is kept full for a while."""

    def __init__(self, draw: Draw, tokens: Callable[[], int] | None = None) -> None:
        """`tokens` returns the tokens drawn so far, including those of unfinished completions.

        Without it only finished completions count.
        """
        self._draw = draw
        self._serial = itertools.count()
        self._completions = self._ended_tokens = self._wanted = 0
        self._warm = asyncio.Event()
        self._tokens = tokens or (lambda: self._ended_tokens)
        self._windows = 1 if tokens else MOST_WINDOWS

    async def measure(self, command: Event) -> Event:
        """Count tokens in a window or a few, after a warm-up, with `sequences` in flight.

        The warm-up lasts `warm_s` and until `warm_completions` have ended, but at most WARM_LIMIT_S longer:
        kernels are compiled, and sequences of different lengths no longer begin together.
        """
        lanes = [asyncio.create_task(self._lane(command)) for _ in range(command["sequences"])]
        try:
            await self._warm_up(command["warm_s"], command["warm_completions"])
            began, tokens, completions = time.perf_counter(), self._tokens(), self._completions
            cpu = cpu_seconds(os.getpid())
            for _ in range(self._windows):
                await asyncio.sleep(command["window_s"])
                if self._completions - completions >= 2 * command["sequences"]:
                    break
            tokens, completions = self._tokens() - tokens, self._completions - completions
            seconds = time.perf_counter() - began
            cpu = cpu_seconds(os.getpid()) - cpu
        finally:
            for lane in lanes:
                lane.cancel()
            ended = await asyncio.gather(*lanes, return_exceptions=True)
        for one in ended:
            if isinstance(one, Exception):
                raise one
        return {"tokens": tokens, "completions": completions, "seconds": seconds, "cpu": cpu}

    async def _warm_up(self, seconds: float, completions: int) -> None:
        self._wanted = self._completions + completions
        self._warm.clear()
        await asyncio.sleep(seconds)
        if self._completions < self._wanted:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._warm.wait(), WARM_LIMIT_S)

    async def _lane(self, command: Event) -> None:
        while True:
            tokens = await self._draw(command, next(self._serial))
            self._ended_tokens += tokens
            self._completions += 1
            if self._completions >= self._wanted:
                self._warm.set()


def prompt_of(command: Event, number: int) -> list[int]:
    """Return a prompt; each comes `group` times, as in a worker."""
    prompts = command["prompts"]
    return prompts[number // command["group"] % len(prompts)]


class BareVllm:
    """One AsyncLLM."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.tokens = 0
        get = llm.engine_core.get_output_async

        async def counted() -> Any:
            outputs = await get()
            self.tokens += sum(len(one.new_token_ids) for one in outputs.outputs)
            return outputs

        llm.engine_core.get_output_async = counted

    async def draw(self, command: Event, number: int) -> int:
        """Draw one completion; see Draw."""
        final: Any = None
        prompt = {"prompt_token_ids": prompt_of(command, number)}
        async for output in self._llm.generate(prompt, self._sampling(command), f"bare-{number}"):
            final = output
        return len(final.outputs[0].token_ids)

    def _sampling(self, command: Event) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore

        more: dict[str, Any] = {}
        if "logprobs" in command["mode"]:
            more["logprobs"] = 0  # only the sampled token's
        return SamplingParams(
            max_tokens=command["max_tokens"],
            temperature=command["temperature"],
            stop_token_ids=command["stop_token_ids"],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **more,
        )


def build_vllm(model_dir: Path, config: EngineConfig) -> Any:
    """Return a started AsyncLLM."""
    import torch

    cpu = torch.version.cuda is None and torch.version.hip is None
    set_environment(cpu=cpu)
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore

    shape = json.loads((model_dir / "config.json").read_text())
    arguments = engine_arguments(config, model_dir, shape, cpu=cpu)
    del arguments["worker_extension_cls"], arguments["load_format"]
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


async def serve_vllm(wire: Wire, model_dir: Path, config: EngineConfig) -> None:
    """Start bare vLLM, report it, and serve measurements."""
    llm = await asyncio.to_thread(build_vllm, model_dir, config)
    try:
        bare = BareVllm(llm)
        wire.tell("ready")
        await wire.serve({"measure": Alone(bare.draw, lambda: bare.tokens).measure})
    finally:
        llm.shutdown()


async def serve_hf(wire: Wire, model_dir: Path, config: EngineConfig) -> None:
    """Start the hf engine, report it, and serve measurements."""
    engine = build_engine(config)

    async def draw(command: Event, number: int) -> int:
        request = GenerateRequest(
            prompt=tuple(prompt_of(command, number)),
            max_tokens=command["max_tokens"],
            temperature=command["temperature"],
            seed=number,
            stop_token_ids=tuple(command["stop_token_ids"]),
        )
        return len((await engine.generate(request)).token_ids)

    try:
        await engine.start(model_dir)
        await engine.load(0, read_state(model_dir))
        wire.tell("ready")
        await wire.serve({"measure": Alone(draw).measure})
    finally:
        await engine.close()


async def main() -> None:
    """Serve the engine named by the first argument."""
    serve = {"vllm": serve_vllm, "hf": serve_hf}[sys.argv[1]]
    await serve(Wire(), Path(sys.argv[2]), EngineConfig.model_validate_json(sys.argv[3]))


if __name__ == "__main__":
    asyncio.run(main())
