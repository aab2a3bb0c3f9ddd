"""Playing tasks k times with whoever is evaluated, many at once.

A rollout that fails is data: it counts as not solved, with the reason. What ends everything (an engine that
is given up, an API that is down, a wrong key) is raised.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ...crypto.hashing import derive
from ..engines.engine import Completion
from ..environments.environment import Environment, Episode, Split, Task
from ..errors import first_cause

MAX_TEXT = 20_000
"""Characters of a reply that are kept."""


@dataclass(frozen=True)
class Asked:
    """One turn that somebody has to take."""

    prompt: tuple[int, ...]
    seed: int
    """0 <= seed < 2**63; the same for the same evaluation seed, task, sample and turn."""
    group: bytes
    """The task: turns of it share a prompt."""


@dataclass(frozen=True)
class Said:
    """A turn that was taken, and what it cost."""

    completion: Completion
    prompt_tokens: int
    completion_tokens: int


class Player(Protocol):
    """Who is evaluated: an engine with weights, or an API."""

    async def reply(self, asked: Asked) -> Said:
        """Take a turn. Raises PlayFailed if this rollout cannot go on, NodeError if nothing can."""
        ...

    def text(self, ids: Sequence[int]) -> str:
        """What sampled tokens say."""
        ...


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of an evaluation, as it is written down."""

    task: int
    """Index in the held-out split."""
    digest: str
    """Of the task's content (hex)."""
    sample: int
    reward: float
    """0 where it failed."""
    error: str = ""
    """Why it failed; empty where it did not."""
    metrics: dict[str, float] = {}
    truncated: bool = False
    """The last reply was cut off by a limit of tokens."""
    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    reply: str = ""
    """What was said last, the newest turn's text."""


async def held_out(environment: Environment, count: int, split: Split = "eval") -> list[Task]:
    """The first `count` tasks of a split; fewer where it has no more that differ.

    Raises EnvironmentFailed.
    """
    found: dict[bytes, Task] = {}
    for index in range(count):
        task = await environment.task(index, split)
        found.setdefault(task.digest, task)
    return list(found.values())


async def play(
    environment: Environment,
    tasks: Sequence[Task],
    player: Player,
    *,
    samples: int,
    seed: int,
    concurrency: int,
    done: Callable[[Rollout], None] = lambda _: None,
) -> list[Rollout]:
    """Every task `samples` times, in the order of tasks and samples; at most `concurrency` at once.

    `done` is told of each as it ends. Raises what `player` raises and is no PlayFailed.
    """
    todo = [(task, sample) for task in tasks for sample in range(samples)]
    found: dict[int, Rollout] = {}
    queue: Iterator[tuple[int, tuple[Task, int]]] = iter(enumerate(todo))

    async def work() -> None:
        for number, (task, sample) in queue:
            found[number] = await _rollout(environment, task, sample, player, seed)
            done(found[number])

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(concurrency, len(todo))):
                workers.create_task(work())
    except BaseExceptionGroup as group:
        raise first_cause(group) from group
    return [found[number] for number in range(len(todo))]


async def _rollout(
    environment: Environment, task: Task, sample: int, player: Player, seed: int
) -> Rollout:
    said: list[Said] = []
    began = time.monotonic()

    async def policy(prompt: Sequence[int], turn: int) -> Completion:
        asked = Asked(tuple(prompt), turn_seed(seed, task, sample, turn), task.digest)
        said.append(await player.reply(asked))
        return said[-1].completion

    episode = await environment.run(task, policy)
    last = said[-1].completion.token_ids if said else []
    return Rollout(
        task=task.index,
        digest=task.digest.hex(),
        sample=sample,
        reward=0.0 if episode.error else episode.score.reward,
        error=episode.error,
        metrics=episode.score.metrics,
        truncated=_truncated(episode, said),
        turns=len(said),
        prompt_tokens=sum(one.prompt_tokens for one in said),
        completion_tokens=sum(one.completion_tokens for one in said),
        seconds=round(time.monotonic() - began, 4),
        reply=player.text(last)[:MAX_TEXT] if last else "",
    )


def _truncated(episode: Episode, said: Sequence[Said]) -> bool:
    return not episode.error and bool(said) and said[-1].completion.finish == "length"


def turn_seed(seed: int, task: Task, sample: int, turn: int) -> int:
    """What fixes the noise of a turn. The first sample is the one that an evaluation with one sample has."""
    parts = [seed.to_bytes(8, "big", signed=True), task.digest, bytes([turn])]
    name = derive("eval seed", *parts, *([sample.to_bytes(4, "big")] if sample else []))
    return int.from_bytes(name[:8], "big") >> 1
