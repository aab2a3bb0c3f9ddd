"""Workers of a simulated swarm that cheat in all that they generate, and what the trainer took of them.

Protocol, leases, audits, reputations and bans are the product's; a cheat is an engine. Each stands for a kind
of those that scripts/bench/cheat_book.py measures with a real model; here many of them meet a run.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from support.simulated_swarm import SimulatedEngine, SimulatedSwarm
from support.swarm import Running
from support.witness import Fakes

from primerl.crypto.hashing import digest
from primerl.node.errors import NodeError
from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.training.buffer import Refusal, RolloutBuffer, RolloutGroup
from primerl.node.weights.state import State

LIKELIER_NATS = 0.5
LOOK_S = 1.0
AGAIN_S = 5.0
"""Time from the end of a cheat to its next key."""


class Cheat(SimulatedEngine):
    """An engine that does not do as it was told."""

    def __init__(self, fakes: Fakes, name: str, had: Callable[[int], None]) -> None:
        super().__init__(fakes, name, had)
        self.honest: Counter[tuple[int, ...]] = Counter()
        """Replies to each prompt that were as an honest one."""


class SeedPicker(Cheat):
    """Draws until the reply is right, with its own honest proof: more seeds than the lease's."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """See Engine."""
        self.honest[tuple(request.prompt)] += request.seed & 1
        return await super().generate(replace(request, seed=request.seed | 1))


class LogprobForger(Cheat):
    """Says that its tokens were likelier than they were, so that the importance ratio is another."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """See Engine."""
        drawn = await super().generate(request)
        return replace(drawn, logprobs=[each + LIKELIER_NATS for each in drawn.logprobs])


class CheapModel(Cheat):
    """Generates with a model that costs less, with its own proofs and logprobs."""

    async def load(self, version: int, state: State) -> None:
        """See Engine."""
        await super().load(version, state)
        self._state = digest(self._state)


KINDS = (SeedPicker, LogprobForger, CheapModel)


@dataclass
class Taken:
    """Tokens and rollouts of some workers that came to the trainer's buffer, after all checks."""

    tokens: int = 0
    """Of rollouts that were taken; of cheats, without replies that were as an honest one."""
    rollouts: int = 0
    stale: int = 0
    """Rollouts that came too late, or became too old while they waited."""


@dataclass
class CheatedSwarm:
    """A swarm in which some workers cheat, and come back with a new key once they are banned."""

    swarm: SimulatedSwarm
    honest: Taken = field(default_factory=Taken)
    cheats: Taken = field(default_factory=Taken)
    keys: int = 0
    """Keys that cheats have used."""
    _cheating: dict[bytes, Cheat] = field(default_factory=dict[bytes, Cheat])

    @property
    def poisoned(self) -> float:
        """Share of cheats' tokens in all that were taken."""
        return self.cheats.tokens / max(self.cheats.tokens + self.honest.tokens, 1)

    async def cheat(self, number: int, *, again: bool) -> None:
        """Work as the cheat of that number; with a new key after each ban, if `again`."""
        kind = KINDS[number % len(KINDS)]
        while True:
            name = f"cheat{number}.{self.keys}"
            self.keys += 1
            worker = self.swarm.join(name, make_engine=kind)
            assert isinstance(worker.engine, Cheat)
            self._cheating[worker.node_id] = worker.engine
            self.swarm.may_end.add(name)
            await self._until_banned(name, worker)
            if not again:
                return
            await asyncio.sleep(AGAIN_S)

    async def _until_banned(self, name: str, worker: Running) -> None:
        task = worker.task
        assert task is not None
        with suppress(NodeError):
            while not self.banned(worker) and not (await asyncio.wait([task], timeout=LOOK_S))[0]:
                pass
            if task.done():
                task.result()
        await self.swarm.crash_worker(name)

    def banned(self, worker: Running) -> bool:
        """Return whether the trainer has banned it."""
        known = self.swarm.registry.reputations.get(worker.node_id)
        return known is not None and bool(known.banned)

    def honest_banned(self) -> int:
        """Count the honest workers that are banned."""
        workers = self.swarm.workers.values()
        return sum(self.banned(one) for one in workers if one.node_id not in self._cheating)

    def watch(self) -> AbstractContextManager[Any]:
        """Return a context in which all that comes to the buffer is counted."""
        add, advance = RolloutBuffer.add, RolloutBuffer.advance

        def counted_add(
            buffer: RolloutBuffer, group: RolloutGroup, trained_version: int
        ) -> Refusal | None:
            refusal = add(buffer, group, trained_version)
            taken = self._of(group)
            if refusal is None:
                taken.tokens += self._tokens(group)
                taken.rollouts += len(group.rollouts)
            elif refusal == "stale":
                taken.stale += len(group.rollouts)
            return refusal

        def counted_advance(buffer: RolloutBuffer, version: int) -> list[RolloutGroup]:
            swept = advance(buffer, version)
            for group in swept:
                self._of(group).stale += len(group.rollouts)
            return swept

        return patch.multiple(RolloutBuffer, add=counted_add, advance=counted_advance)

    def _of(self, group: RolloutGroup) -> Taken:
        return self.cheats if group.node in self._cheating else self.honest

    def _tokens(self, group: RolloutGroup) -> int:
        """Count the tokens of a group; of a cheat, those of rollouts that were not as an honest one."""
        tokens = [
            sum(sum(branch.mask) for branch in rollout.branches) for rollout in group.rollouts
        ]
        cheat = self._cheating.get(group.node)
        if cheat is None:
            return sum(tokens)
        branch = group.rollouts[0].branches[0]
        prompt = tuple(branch.token_ids[: branch.mask.index(True)])
        honest = min(cheat.honest[prompt], len(tokens))
        cheat.honest[prompt] -= honest
        return sum(tokens[honest:])
