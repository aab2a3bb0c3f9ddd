"""What honest and dishonest workers have in hand: a run, its policies, and engines that generate for leases.

Everything here is honest by default and made of production parts; a cheat (cheat_book.py) replaces one.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from primerl.crypto.hashing import derive
from primerl.node.config.run import EngineConfig
from primerl.node.environments.environment import Environment, Task
from primerl.node.inference.engine import Completion, Engine, GenerateRequest
from primerl.node.inference.fingerprint import Projection
from primerl.node.inference.hf import HfEngine
from primerl.node.weights.state import State
from primerl.node.worker.rollouts import rollout_record
from primerl.protocol.leases import Lease, TaskRef, sample_seed
from primerl.protocol.manifests import RunManifest, encode, run_id
from primerl.protocol.rollouts import GroupRecord, RolloutRecord

if TYPE_CHECKING:
    from primerl.node.inference.model import LanguageModel, NetworkBuilder

Sampler = Callable[[GenerateRequest], Awaitable[Completion]]
Groups = list[GroupRecord]

AN_HOUR = 3600.0


@dataclass(frozen=True)
class World:
    """One run, seen by everybody."""

    model_dir: Path
    run: RunManifest
    environment: Environment
    states: Mapping[int, State]
    """Published policies, the newest last; 0 is the base model."""
    engine: EngineConfig
    small: tuple[Path, State]
    """A smaller model of the same vocabulary."""
    leases: "count[int]" = field(default_factory=count)

    @property
    def run_id(self) -> bytes:
        """The run's id."""
        return run_id(encode(self.run))

    @property
    def version(self) -> int:
        """The newest policy, which every lease asks for."""
        return max(self.states)

    async def lease(self, groups: int, group_size: int, first_task: int | None = None) -> Lease:
        """A fresh lease of the tasks from `first_task` on; without it, of other tasks than before."""
        number = next(self.leases)
        first = number * groups if first_task is None else first_task
        tasks = [await self.environment.task(first + index) for index in range(groups)]
        return Lease(
            lease_id=number,
            tasks=tuple(TaskRef(task.index, task.digest) for task in tasks),
            group_size=group_size,
            seed=derive("cheat lease", number.to_bytes(8, "big")),
            min_version=self.version,
            deadline=AN_HOUR,
            max_bytes=2**32,
        )


@dataclass(frozen=True)
class Sent:
    """A submission that reached the trainer earlier."""

    node: bytes
    lease: Lease
    groups: Groups


class Workshop:
    """Where one worker generates: engines by what they hold, started when they are asked for first."""

    def __init__(
        self, world: World, node: bytes, main: Engine | None = None, *, remember: bool = False
    ) -> None:
        """`main` is a started engine with the run's fingerprint: it generates whatever has the run's
        architecture, one state after the other; without it every state has an engine of its own.
        With `remember` no request is answered twice by one engine."""
        self.world = world
        self.node = node
        self._remember = remember
        self._said: dict[tuple[str, GenerateRequest], Completion] = {}
        self.sent_before: list[Sent] = []
        """What a cheat presumes to have been sent."""
        self._main = main
        self._main_holds = ""
        self._engines: dict[str, HfEngine] = {}
        self._network: LanguageModel | None = None
        self.fingerprint = Projection()

    async def close(self) -> None:
        """Free the engines that were made here."""
        for engine in self._engines.values():
            await engine.close()
        self._engines.clear()

    # -- generating --------------------------------------------------------------------------------

    async def honest(self) -> Sampler:
        """Generates as the contract says."""
        return await self.engine("honest", self.world.states[self.world.version])

    async def engine(
        self,
        name: str,
        state: State,
        *,
        model_dir: Path | None = None,
        build: "NetworkBuilder | None" = None,
    ) -> Sampler:
        """Generates with `state`, and claims that it were the newest policy."""
        if self._main is not None and model_dir is None and build is None:
            if self._main_holds != name:
                await self._main.load(self.world.version, state)
                self._main_holds = name
            return self._main.generate
        if name not in self._engines:
            engine = HfEngine(self.world.engine, build=build)
            await engine.start(
                model_dir or self.world.model_dir, fingerprint=self.world.run.proofs.fingerprint
            )
            self._engines[name] = engine
            await engine.load(self.world.version, state)
        return self._remembered(name, self._engines[name].generate)

    def _remembered(self, name: str, sampler: Sampler) -> Sampler:
        async def remembered(request: GenerateRequest) -> Completion:
            found = self._said.get((name, request))
            if found is None:
                found = self._said[name, request] = await sampler(request)
            return found

        return remembered if self._remember else sampler

    async def play(self, lease: Lease, sampler: Sampler, *, node: bytes | None = None) -> Groups:
        """The rollouts of a lease, as the inference role makes them."""
        playing = (self._group(lease, task, sampler, node or self.node) for task in lease.tasks)
        return list(await asyncio.gather(*playing))

    async def _group(
        self, lease: Lease, reference: TaskRef, sampler: Sampler, node: bytes
    ) -> GroupRecord:
        task = await self.world.environment.task(reference.index)
        rollouts = await asyncio.gather(
            *(self._rollout(lease, task, index, sampler, node) for index in range(lease.group_size))
        )
        return GroupRecord(reference.index, reference.digest, tuple(rollouts))

    async def _rollout(
        self, lease: Lease, task: Task, index: int, sampler: Sampler, node: bytes
    ) -> RolloutRecord:
        async def policy(prompt: Sequence[int], turn: int) -> Completion:
            seed = sample_seed(self.world.run_id, lease, node, task.digest, index, turn)
            return await sampler(self.request(prompt, seed))

        return rollout_record(await self.world.environment.run(task, policy))

    def request(self, prompt: Sequence[int], seed: int) -> GenerateRequest:
        """A request under the run's sampling contract."""
        run = self.world.run
        return GenerateRequest(
            prompt=tuple(prompt),
            max_tokens=run.sampling.max_tokens,
            temperature=run.sampling.temperature,
            seed=seed,
            stop_token_ids=run.model.stop_token_ids,
        )

    # -- forging -----------------------------------------------------------------------------------

    def forge(self, request: GenerateRequest, token_ids: Sequence[int]) -> Completion:
        """The reply `token_ids` with the logprobs and the proof that the right model gives it: one prefill.

        What is missing is that anybody drew these tokens.
        """
        import torch

        network = self._right_network()
        reply = list(token_ids)
        tokens = torch.tensor([[*request.prompt, *reply]], device=network.device)
        with torch.inference_mode():
            hidden = network.hidden(tokens)[0, len(request.prompt) - 1 : -1]
            scaled = network.logits(hidden).float() / request.temperature
            picked = scaled.gather(1, tokens[0, len(request.prompt) :, None])[:, 0]
            logprobs = (picked - scaled.logsumexp(1)).clamp_max(0.0).tolist()
        return Completion(
            token_ids=reply,
            logprobs=logprobs,
            finish="stop" if reply[-1] in request.stop_token_ids else "length",
            policy_first=self.world.version,
            policy_last=self.world.version,
            proof=self.fingerprint.make(hidden.float().cpu().numpy()),
        )

    def _right_network(self) -> "LanguageModel":
        from primerl.node.inference.model import build_network

        if self._network is None:
            world, config = self.world, self.world.engine
            state = world.states[world.version]
            self._network = build_network(
                world.model_dir, state, dtype=config.dtype, device=config.device
            )
        return self._network
