"""A run to cheat in: tasks, policies, engines of honest workers, and the trainer that judges.

All is honest by default and made of production parts; a cheat (cheat_book.py) replaces one of them.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.counting_environment import CountingEnvironment, even_share
from support.listed_verifier import ListedVerifier

from primerl.crypto.hashing import derive
from primerl.node.config.run import EngineConfig, RunConfig
from primerl.node.environments.environment import (
    Environment,
    Score,
    Task,
)
from primerl.node.inference.engine import Completion, Engine, GenerateRequest
from primerl.node.inference.fingerprint import Projection
from primerl.node.inference.hf import HfEngine
from primerl.node.models import huggingface
from primerl.node.training.backend import Sample
from primerl.node.verification.auditor import Auditor
from primerl.node.verification.duplicates import CopyDetector
from primerl.node.verification.local_audits import LocalAudits
from primerl.node.verification.verdict import ReceivedSubmission, Verified, refuse_all
from primerl.node.weights.state import State
from primerl.node.worker.rollouts import rollout_record
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.leaders import Leaders
from primerl.protocol.leases import Lease, TaskRef, sample_seed
from primerl.protocol.manifests import RunManifest, encode, run_id
from primerl.protocol.rollouts import (
    Evidence,
    GroupRecord,
    RolloutRecord,
    Submission,
    unpack_f32,
    unpack_u32,
)
from primerl.scripts.bench.calibrate import trial_run
from primerl.scripts.bench.trained_model import Corpus, Trained, policy_updates, stop_token

if TYPE_CHECKING:
    from primerl.node.inference.model import LanguageModel


SHORTEST, LONGEST = 16, 48
"""Tokens of a prompt."""


class CorpusEnvironment(CountingEnvironment):
    """Prompts are beginnings of texts; the reward is the share of even tokens, and no reply is right."""

    def __init__(self, corpus: Corpus, *, max_tokens: int, stops: tuple[int, ...]) -> None:
        super().__init__(max_tokens=max_tokens, name="corpus", stops=stops)
        self._corpus = corpus

    async def prompt(self, task: Task) -> list[int]:
        """The beginning of a text."""
        self._check(task)
        tokens = SHORTEST + task.digest[0] % (LONGEST - SHORTEST)
        text = self._corpus.text([1, *task.digest[:8]], tokens)
        return [token for token in text if token not in self._stops]

    async def demonstration(self, task: Task) -> None:
        """Nothing is right here."""

    def _worth(self, task: Task, reply: Sequence[int]) -> Score:
        return Score(reward=even_share(reply))


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
        model: "type[LanguageModel] | None" = None,
    ) -> Sampler:
        """Generates with `state`, and claims that it were the newest policy."""
        if self._main is not None and model_dir is None and model is None:
            if self._main_holds != name:
                await self._main.load(self.world.version, state)
                self._main_holds = name
            return self._main.generate
        if name not in self._engines:
            engine = HfEngine(self.world.engine, model=model)
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
            max_tokens=run.environments[0].sampling.max_tokens,
            temperature=run.environments[0].sampling.temperature,
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
        from primerl.node.inference.model import LanguageModel

        if self._network is None:
            world, config = self.world, self.world.engine
            state = world.states[world.version]
            self._network = LanguageModel.build(
                world.model_dir, state, dtype=config.dtype, device=config.device
            )
        return self._network


GROUP_SIZE = 8
ROOM = 64
"""For the longest prompt."""


def new_world(trained: Trained, small: Trained, engine: EngineConfig, *, max_tokens: int) -> World:
    """The run before its first step, with the bounds built in for engine.dtype."""
    stops = (stop_token(trained.directory),)
    environment = CorpusEnvironment(trained.corpus, max_tokens=max_tokens, stops=stops)
    return World(
        model_dir=trained.directory,
        run=manifest(trained.directory, engine, max_tokens),
        environment=environment,
        states={0: trained.state},
        engine=engine,
        small=(small.directory, small.state),
    )


def manifest(model_dir: Path, engine: EngineConfig, max_tokens: int) -> RunManifest:
    """As a trainer would sign it."""
    config = RunConfig.model_validate(
        {
            "name": "cheats",
            "engine": engine.model_dump(),
            "sampling": {"max_tokens": max_tokens},
            "rollouts": {"group_size": GROUP_SIZE},
            "training": {"seq_len": max_tokens + ROOM},
            "verification": {"bounds": "built-in"},
        }
    )
    return trial_run(
        config,
        config_file=(model_dir / "config.json").read_bytes(),
        vocab_size=huggingface.vocab_size(model_dir),
        stop_token_ids=(stop_token(model_dir),),
    )


async def learning_material(world: World, groups: int) -> list[Sample]:
    """What a trainer learns from: honest groups of the base model."""
    shop = Workshop(world, bytes(32))
    try:
        lease = await world.lease(groups, GROUP_SIZE, first_task=1 << 24)
        return samples(await shop.play(lease, await shop.honest()))
    finally:
        await shop.close()


def with_updates(world: World, material: Sequence[Sample], *, lr: float, updates: int) -> World:
    """The run after `updates` steps over equal shares of `material`."""
    device = world.engine.device
    states = policy_updates(world.model_dir, material, lr=lr, updates=updates, device=device)
    return replace(world, states=dict(enumerate(states)))


def samples(groups: Sequence[GroupRecord]) -> list[Sample]:
    """What a trainer would learn from these groups, with advantages as GRPO has them."""
    found: list[Sample] = []
    for group in groups:
        mean = sum(one.reward for one in group.rollouts) / len(group.rollouts)
        for one in group.rollouts:
            (branch,) = one.branches
            logprobs = iter(unpack_f32(branch.logprobs))
            found.append(
                Sample(
                    token_ids=unpack_u32(branch.tokens),
                    mask=[flag == 1 for flag in branch.sampled],
                    logprobs=[next(logprobs) if flag else 0.0 for flag in branch.sampled],
                    advantage=one.reward - mean,
                )
            )
    return found


@dataclass(frozen=True)
class Outcome:
    """One rollout; `evidence` is None where it was not audited."""

    reason: Reason | None
    suspect: bool
    evidence: Evidence | None

    @property
    def caught(self) -> bool:
        """Whether it was rejected, by an audit or before."""
        return self.reason is not None


class Court:
    """A verifier that has seen nothing yet, with every rollout audited."""

    def __init__(self, world: World, auditor: Auditor) -> None:
        """`auditor` is started."""
        self._world = world
        self._verifier = ListedVerifier(
            Leaders(world.run_id, world.run.trainer),
            world.run,
            [world.environment],
            LocalAudits(auditor),
            world.states,
            CopyDetector(),
        )
        self._arrivals = 0

    async def judge(self, shop: Workshop, lease: Lease, groups: Groups) -> list[Outcome]:
        """The outcome of every rollout of a lease, after what was sent before it."""
        for sent in shop.sent_before:
            await self.verify(sent)
        verified = await self.verify(Sent(shop.node, lease, groups))
        return outcomes(verified, len(lease.tasks), lease.group_size)

    async def verify(self, sent: Sent) -> Verified:
        """The verdict on a submission."""
        self._arrivals += 1
        name = derive("cheat submission", self._arrivals.to_bytes(8, "big"))
        arrival = ReceivedSubmission(self._arrivals, name, sent.node, b"", name)
        submission = Submission(b"", tuple(sent.groups), "hf")
        try:
            return await self._verifier.verify(
                submission, sent.lease, arrival, version=self._world.version, rate=1.0
            )
        except RemoteProtocolError as error:
            return refuse_all(arrival, sent.lease, error)


def outcomes(verified: Verified, groups: int, group_size: int) -> list[Outcome]:
    """Rollout by rollout, in order."""
    reasons = {(one.group, one.rollout): one.reason for one in verified.rejections}
    seen = {(one.group, one.rollout): one for one in verified.audited.evidence}
    suspects = {
        (one.group, one.rollout)
        for one, judged in zip(verified.audited.evidence, verified.audited.judgements, strict=True)
        if judged.suspect
    }
    places = [(group, index) for group in range(groups) for index in range(group_size)]
    return [Outcome(reasons.get(p), p in suspects, seen.get(p)) for p in places]


def reasons_of(found: Sequence[Outcome]) -> set[Reason]:
    """Why rollouts were rejected."""
    return {one.reason for one in found if one.reason is not None}
