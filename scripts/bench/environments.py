"""Measure the cost of environments in a separate process: tasks, rollouts and scores.

    .venv/bin/python scripts/bench/environments.py [--rollouts 2000] [--at-once 64] [--tokens 8 128] [--quick]
        [--json FILE]

Runs reverse-text with a policy that answers at once, so that only the environment and its transport are
measured.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil  # pyright: ignore[reportMissingModuleSource]

from primerl.node.config.run import EnvironmentConfig
from primerl.node.environments.environment import Branch, Environment
from primerl.node.environments.hosted import HostedEnvironment
from primerl.node.environments.verifiers import VerifiersEnvironment
from primerl.node.inference.engine import Completion
from primerl.node.models import huggingface
from primerl.scripts.bench.report import conclude, make_parser

ROUNDS = 5


def main() -> int:
    """Measure both and print a table; medians of ROUNDS rounds, in turns."""
    parser = make_parser(__doc__, "few rollouts")
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--tokens", type=int, nargs="*", default=[8, 128])
    options = parser.parse_args()
    if options.quick:
        options.rollouts, options.tokens = 64, [8]
    return conclude(asyncio.run(run(options)), [], options.json)


async def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each environment, number of tokens, and operation."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        huggingface.create(Path(directory), {}, 0)
        environments: dict[str, Environment] = {}
        for name, make in (("in process", VerifiersEnvironment), ("hosted", HostedEnvironment)):
            environments[name] = make(
                EnvironmentConfig(id="reverse-text"),
                model_dir=Path(directory),
                seed=0,
                max_tokens=max(options.tokens),
                temperature=1.0,
            )
            began = time.monotonic()
            await environments[name].start()
            print(f"{name}: started in {time.monotonic() - began:.1f} s")
        for tokens in options.tokens:
            rows += await compare(environments, options.rollouts, options.at_once, tokens)
        (process,) = psutil.Process().children()
        print(f"\nmemory of the process: {process.memory_info().rss / 2**20:.0f} MiB")
        for environment in environments.values():
            await environment.close()
    return rows


async def compare(
    environments: dict[str, Environment], rollouts: int, at_once: int, tokens: int
) -> list[dict[str, Any]]:
    """Measure ROUNDS rounds of both environments, in turns."""
    found: dict[tuple[str, str], list[float]] = {}
    for number in range(ROUNDS):
        for name, environment in environments.items():
            measured = await measure(environment, rollouts, at_once, tokens, number)
            for what, seconds in measured.items():
                found.setdefault((name, what), []).append(seconds)
    print(f"\n{tokens} tokens a reply, {at_once} at once; microseconds each")
    rows: list[dict[str, Any]] = []
    for (name, what), seconds in found.items():
        each = 1e6 * sorted(seconds)[ROUNDS // 2] / rollouts
        print(f"  {name:>10} {what:<18} {each:8.0f}")
        rows.append({"environment": name, "tokens": tokens, "what": what, "us": each})
    return rows


async def measure(
    environment: Environment, rollouts: int, at_once: int, tokens: int, number: int
) -> dict[str, float]:
    """Return seconds of `rollouts` tasks, rollouts and scores.

    Also returns this process's own CPU seconds of the rollouts.
    """
    reply = [65 + place % 20 for place in range(tokens)]

    async def policy(prompt: Sequence[int], turn: int) -> Completion:
        return Completion(reply, [-0.5] * tokens, "length", 0, 0, proof=bytes(8 * tokens))

    first = number * rollouts
    branches: list[list[Branch]] = [[]] * rollouts

    async def look(index: int) -> None:
        await environment.task(first + index)

    async def play(index: int) -> None:
        episode = await environment.run(await environment.task(first + index // 8), policy)
        assert not episode.error, episode.error
        branches[index] = episode.branches

    async def score(index: int) -> None:
        await environment.score(await environment.task(first + index // 8), branches[index])

    tasks = await timed(look, rollouts, at_once)
    began = time.process_time()
    played = await timed(play, rollouts, at_once)
    spent = time.process_time() - began
    return {
        "task": tasks,
        "rollout": played,
        "rollout, CPU here": spent,
        "score": await timed(score, rollouts, at_once),
    }


async def timed(work: Callable[[int], Awaitable[None]], count: int, at_once: int) -> float:
    """Return the seconds of `count` calls of `work`, `at_once` at a time."""
    numbers = iter(range(count))

    async def go() -> None:
        for number in numbers:
            await work(number)

    began = time.monotonic()
    await asyncio.gather(*(go() for _ in range(at_once)))
    return time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
