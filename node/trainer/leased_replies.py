"""Have leased workers answer prompts, and verify each reply before it is used.

Invariants:
- a reply is returned only if its submission was accepted: with an audit rate of 1 every one was audited;
- a prompt whose reply is rejected, or whose lease is lost, is leased again until it is answered;
- equal prompts share one reply.
"""

import asyncio
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path

from msgspec import structs

from ...protocol.leases import Lease, prompt_digest
from ...protocol.manifests import ProofContract, RunManifest
from ...protocol.recent import RecentDict
from ...protocol.reputation import BanTest
from ...protocol.rollouts import (
    BranchRecord,
    Submission,
    pack_u32,
    unpack_f32,
    unpack_u32,
)
from ..config.run import RunConfig
from ..environments.leased_prompts import LeasedPrompts
from ..errors import EngineError, EngineLost
from ..inference.engine import Completion, EngineStats, GenerateRequest
from ..training.buffer import RolloutBuffer
from ..verification.verdict import Verified
from ..verification.verifier import Verifier
from ..weights.state import Changed, State
from .lease_book import LeaseBook, TaskQueue
from .scheduler import PREPARED_TASKS, LeaseDemand, LeaseScheduler, TaskSupply
from .state import Progress
from .submissions import VerificationQueue
from .workers import WorkerRegistry

MOST_WAITING = 4096
"""Maximum number of prompts waiting for a reply; further ones are refused for now."""
REPLIES_KEPT = 4096
"""Number of newest replies that are cached for equal prompts."""


@dataclass
class WaitingPrompt:
    """A prompt that has no reply yet."""

    index: int
    """Index of its task."""
    packed: bytes
    digest: bytes
    reply: "asyncio.Future[Completion]" = field(default_factory=asyncio.Future)


class PromptQueue:
    """The prompts that wait for a reply, and the newest replies."""

    def __init__(self, first: int = 0, most: int = MOST_WAITING) -> None:
        """Number tasks from `first` on: a start of the node reuses no number of an earlier one."""
        self._next = first
        self._most = most
        self._waiting: dict[int, WaitingPrompt] = {}
        """Waiting prompts by index."""
        self._fresh: deque[int] = deque()
        """Indices of prompts that were never leased, oldest first."""
        self._by_digest: dict[bytes, WaitingPrompt] = {}
        self._replies = RecentDict[bytes, Completion](REPLIES_KEPT)
        self.tasks = TaskQueue(draw=self._draw)
        """Source of the lease book's tasks."""
        self.arrived = asyncio.Event()
        """Set when there is a prompt to lease."""

    def __len__(self) -> int:
        return len(self._waiting)

    async def ask(self, prompt: tuple[int, ...]) -> Completion:
        """Return the reply to `prompt`, token ids, once it exists.

        Raises EngineLost if too many prompts wait.
        """
        packed = pack_u32(list(prompt))
        name = prompt_digest(packed)
        if (known := self._replies.get(name)) is not None:
            self._replies.move_to_end(name)
            return known
        waiting = self._by_digest.get(name)
        if waiting is None:
            if len(self._waiting) >= self._most:
                raise EngineLost(f"{self._most} prompts wait for workers: come back later")
            waiting = WaitingPrompt(self._next, packed, name)
            self._next += 1
            self._fresh.append(waiting.index)
            self._waiting[waiting.index] = self._by_digest[name] = waiting
            self.arrived.set()
        # a caller that gives up may ask again, so the prompt stays
        return await asyncio.shield(waiting.reply)

    def _draw(self, number: int, out: Collection[int]) -> int | None:
        """Choose the next prompt for a lease (TaskQueue.draw)."""
        return self._fresh.popleft() if self._fresh else None

    def unleased(self) -> int:
        """Count the prompts that are neither on lease nor in a submission being verified."""
        return len(self._fresh) + len(self.tasks.drawn) + len(self.tasks.requeued)

    def prompt(self, index: int) -> WaitingPrompt:
        """Return a waiting prompt."""
        return self._waiting[index]

    def judged(self, lease: Lease, replies: Mapping[int, Completion]) -> None:
        """Deliver the accepted replies of a lease, by index; requeue its other prompts."""
        for task in lease.tasks:
            reply = replies.get(task.index)
            if reply is not None:
                self._answer(task.digest, reply)
            elif task.index in self._waiting:
                self.tasks.requeue((task.index,))
                self.arrived.set()

    def _answer(self, name: bytes, reply: Completion) -> None:
        self._replies[name] = reply
        waiting = self._by_digest.pop(name, None)
        if waiting is None:
            return  # an equal prompt, leased before a restart, was answered first
        del self._waiting[waiting.index]
        for queue in (self._fresh, self.tasks.drawn, self.tasks.requeued):
            if waiting.index in queue:
                queue.remove(waiting.index)
        waiting.reply.set_result(reply)


class LeasedReplies:
    """An Engine whose replies come from workers.

    Temperature and length of replies are those of the run's contract.
    """

    def __init__(self, run: RunManifest, prompts: PromptQueue) -> None:
        self._run = run
        self._sampling = run.environments[0].sampling
        self._prompts = prompts
        self._generated = 0
        self.policy_version = -1
        """0 once workers can have the weights."""

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """Do nothing: workers have the engines."""

    async def load(self, version: int, state: State) -> None:
        """Record that the weights are published."""
        self.policy_version = version

    async def update(self, version: int, state: State, changed: Changed) -> None:
        """Record an update, as load()."""
        self.policy_version = version

    async def close(self) -> None:
        """Do nothing: there is nothing to free."""

    def stats(self) -> EngineStats:
        """See Engine.stats()."""
        unleased = self._prompts.unleased()
        return EngineStats(
            running=len(self._prompts) - unleased,
            waiting=unleased,
            generated_tokens=self._generated,
        )

    async def generate(self, request: GenerateRequest) -> Completion:
        """See Engine.generate(); a reply is no longer than the contract allows.

        Raises EngineError for requests outside the contract: another temperature, other stop tokens.
        """
        contract = self._sampling
        if request.temperature != contract.temperature:
            raise EngineError(f"replies are drawn at temperature {contract.temperature:g} alone")
        if not set(self._run.model.stop_token_ids) <= set(request.stop_token_ids):
            raise EngineError("replies end at the model's own stop tokens: do not ignore these")
        reply = await self._prompts.ask(request.prompt)
        self._generated += len(reply.token_ids)
        return cut(reply, request)


def cut(reply: Completion, request: GenerateRequest) -> Completion:
    """Cut a greedy reply at the request's length, or at the first of its stop tokens."""
    ids = reply.token_ids[: request.max_tokens]
    ends = [place for place, token in enumerate(ids) if token in request.stop_token_ids]
    length = ends[0] + 1 if ends else len(ids)
    return Completion(
        token_ids=ids[:length],
        logprobs=reply.logprobs[:length],
        finish="stop" if ends else "length",
        policy_first=reply.policy_first,
        policy_last=reply.policy_last,
    )


class PromptSupply(TaskSupply):
    """Supplies leases with the prompts of a queue."""

    NONE_READY = "no request to the judge is waiting"

    def __init__(self, prompts: PromptQueue, book: LeaseBook) -> None:
        super().__init__(LeasedPrompts(), book)
        self._prompts = prompts

    async def run(self, scheduler: LeaseScheduler) -> None:
        """Lease prompts as they arrive, until cancelled."""
        while True:
            self._prompts.arrived.clear()
            if await self._prepare(PREPARED_TASKS):
                await scheduler.work_changed()
            await self._prompts.arrived.wait()

    def complete(self, lease: Lease) -> Lease:
        """See TaskSupply.complete(); adds the prompts."""
        prompts = tuple(self._prompts.prompt(task.index).packed for task in lease.tasks)
        return structs.replace(lease, prompts=prompts)

    def is_ready(self, leases: int = 1) -> bool:
        """See TaskSupply.is_ready()."""
        self._take_next(PREPARED_TASKS)
        return bool(self.digests)

    async def _prepare(self, leases: int) -> bool:
        known = self.digests.keys()
        self._take_next(leases)
        return not self.digests.keys() <= known

    def _take_next(self, leases: int) -> None:
        wanted = self._book.upcoming(0, leases)
        self.digests = {index: self._prompts.prompt(index).digest for index in wanted}


class PromptDemand(LeaseDemand):
    """Counts the prompts that may be leased: all waiting ones."""

    def __init__(
        self, config: RunConfig, registry: WorkerRegistry, prompts: PromptQueue, progress: Progress
    ) -> None:
        super().__init__(
            config, registry, RolloutBuffer(max_off_policy_steps=0, capacity=1), progress
        )
        self._prompts = prompts

    def capacity(self, node: bytes | None) -> int:
        """See LeaseDemand.capacity()."""
        free = self._prompts.unleased()
        if node is not None:
            return free
        room = self._book.newcomer_capacity(waiting_groups=0, training=False, now=time.time())
        return max(0, min(free, room))


class ReplyQueue(VerificationQueue):
    """Verifies submissions and delivers their replies to the waiting callers."""

    def __init__(
        self,
        scheduler: LeaseScheduler,
        verifier: Verifier,
        contract: ProofContract,
        test: BanTest,
        progress: Progress,
        prompts: PromptQueue,
    ) -> None:
        super().__init__(scheduler, verifier, contract, test, progress)
        self._prompts = prompts

    def take(self, node: bytes, submission: Submission, lease: Lease, verified: Verified) -> None:
        """See VerificationQueue.take()."""
        self._prompts.judged(lease, accepted_replies(submission, lease, verified))


def accepted_replies(
    submission: Submission, lease: Lease, verified: Verified
) -> dict[int, Completion]:
    """Unpack the accepted replies of a verified submission, by the index of their task."""
    rejected = {rejection.group for rejection in verified.rejections}
    return {
        task.index: reply_of(submission.groups[number].rollouts[0].branches[0])
        for number, task in enumerate(lease.tasks)
        if number not in rejected
    }


def reply_of(branch: BranchRecord) -> Completion:
    """Unpack the single reply of an accepted branch."""
    tokens = unpack_u32(branch.tokens)
    return Completion(
        token_ids=list(compress(tokens, branch.sampled)),
        logprobs=unpack_f32(branch.logprobs),
        finish=branch.finish,
        policy_first=branch.policy_first,
        policy_last=branch.policy_last,
    )
