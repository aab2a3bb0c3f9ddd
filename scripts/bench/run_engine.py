"""The hf engine alone for run.py: completions of given prompts, as many at a time as are asked for.

python run_engine.py MODEL_DIR ENGINE_CONFIG_JSON      (commands: children.py, as of worker_bare.py)
"""

import asyncio
import itertools
import sys
import time
from pathlib import Path

from children import Event, Wire

from primerl.node.config.run import EngineConfig
from primerl.node.inference.build import build_engine
from primerl.node.inference.engine import Engine, GenerateRequest
from primerl.node.models.model_files import read_state


class Alone:
    """One engine that is kept full for a while."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._serial = itertools.count()
        self._ended: list[tuple[float, int]] = []
        """Time and tokens of each completion."""

    async def measure(self, command: Event) -> Event:
        """Tokens of completions per second of a window, after a warm-up, with `sequences` under way."""
        lanes = [asyncio.create_task(self._draw(command)) for _ in range(command["sequences"])]
        try:
            await asyncio.sleep(command["warm_s"])
            began = time.perf_counter()
            await asyncio.sleep(command["window_s"])
            ended = time.perf_counter()
        finally:
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)
        tokens = [count for at, count in self._ended if began <= at <= ended]
        return {"tokens": sum(tokens), "completions": len(tokens), "seconds": ended - began}

    async def _draw(self, command: Event) -> None:
        """One request after the other; a prompt comes `group` times."""
        prompts = command["prompts"]
        while True:
            number = next(self._serial)
            completion = await self._engine.generate(
                GenerateRequest(
                    prompt=tuple(prompts[number // command["group"] % len(prompts)]),
                    max_tokens=command["max_tokens"],
                    temperature=command["temperature"],
                    seed=number,
                    stop_token_ids=tuple(command["stop_token_ids"]),
                )
            )
            self._ended.append((time.perf_counter(), len(completion.token_ids)))


async def main() -> None:
    """Start, say so, and measure what is asked."""
    wire = Wire()
    model_dir = Path(sys.argv[1])
    engine = build_engine(EngineConfig.model_validate_json(sys.argv[2]))
    try:
        await engine.start(model_dir)
        await engine.load(0, read_state(model_dir))
        wire.tell("ready")
        await wire.serve({"measure": Alone(engine).measure})
    finally:
        await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
