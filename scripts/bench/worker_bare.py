"""Bare vLLM for worker.py: AsyncLLM.generate on given prompts, so many at a time, nothing of ours beside it.

    python worker_bare.py MODEL_DIR ENGINE_CONFIG_JSON      (commands: children.py)

Its engine arguments are the worker's own, but real weights are read from the model directory and no worker
extension is there: no sampler of ours, no proofs, no logprobs but vLLM's.
"""

import asyncio
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from children import Event, Wire, cpu_seconds

from primerl.node.config.run import EngineConfig
from primerl.node.inference.vllm_arguments import engine_arguments, set_environment


class Bare:
    """One AsyncLLM that is kept full for a while."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._serial = itertools.count()
        self._tokens = self._completions = 0

    async def measure(self, command: Event) -> Event:
        """Tokens of completions per second of a window, after a warm-up, with `sequences` under way."""
        workers = [
            asyncio.create_task(self._draw(command, lane)) for lane in range(command["sequences"])
        ]
        try:
            await asyncio.sleep(command["warm_s"])
            began, tokens, completions = time.perf_counter(), self._tokens, self._completions
            cpu = cpu_seconds(os.getpid())
            await asyncio.sleep(command["window_s"])
            seconds = time.perf_counter() - began
            cpu = cpu_seconds(os.getpid()) - cpu
        finally:
            for worker in workers:
                worker.cancel()
            ended = await asyncio.gather(*workers, return_exceptions=True)
        for one in ended:
            if isinstance(one, Exception):
                raise one
        return {
            "tokens": self._tokens - tokens,
            "completions": self._completions - completions,
            "seconds": seconds,
            "cpu": cpu,
        }

    async def _draw(self, command: Event, lane: int) -> None:
        """One request after the other; a prompt comes `group` times, as a worker's do."""
        prompts, group = command["prompts"], command["group"]
        while True:
            number = next(self._serial)
            final: Any = None
            prompt = {"prompt_token_ids": prompts[number // group % len(prompts)]}
            async for output in self._llm.generate(
                prompt, self._sampling(command, number), f"bare-{number}"
            ):
                final = output
            self._tokens += len(final.outputs[0].token_ids)
            self._completions += 1

    def _sampling(self, command: Event, number: int) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore

        more: dict[str, Any] = {}
        if "logprobs" in command["mode"]:
            more["logprobs"] = 0  # of the sampled token alone
        if "seeds" in command["mode"]:
            more["seed"] = number
        return SamplingParams(
            max_tokens=command["max_tokens"],
            temperature=command["temperature"],
            stop_token_ids=command["stop_token_ids"],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **more,
        )


def build(model_dir: Path, config: EngineConfig) -> Any:
    """A started AsyncLLM."""
    import torch

    cpu = torch.version.cuda is None and torch.version.hip is None
    set_environment(cpu=cpu)
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore

    shape = json.loads((model_dir / "config.json").read_text())
    arguments = engine_arguments(config, model_dir, shape, cpu=cpu)
    del arguments["worker_extension_cls"], arguments["load_format"]
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


async def main() -> None:
    """Start, say so, and measure what is asked."""
    wire = Wire()
    config = EngineConfig.model_validate_json(sys.argv[2])
    llm = await asyncio.to_thread(build, Path(sys.argv[1]), config)
    try:
        wire.tell("ready")
        await wire.serve({"measure": Bare(llm).measure})
    finally:
        llm.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
