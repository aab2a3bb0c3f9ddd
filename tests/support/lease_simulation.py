"""A run in virtual time: the product's lease book, demand, buffer and batches; workers are a few rules each.

Nothing here decides about leases or batches. A worker takes what the book grants and brings it back when its
rule says so; the trainer takes a fixed time for a batch.
"""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from primerl.crypto.hashing import digest
from primerl.node.config.run import RunConfig
from primerl.node.trainer.lease_book import (
    LeaseBook,
    LeaseOutcome,
    LeasePolicy,
    LeaseShare,
    MixtureShare,
)
from primerl.node.trainer.scheduler import BatchCutter, LeaseDemand
from primerl.node.trainer.state import Progress
from primerl.node.training import buffer
from primerl.protocol.leases import Lease

NOW = 1_000_000.0
POLL_S = 0.1
VERIFY_S = 0.05
MARGIN_S = 0.5
"""Time before a deadline at which a lease that is held is answered."""
REPORT_S = 0.2


@dataclass
class SimulatedWorker:
    """A worker with an engine for one lease after another."""

    name: str
    group_s: float = 0.25
    """Seconds that its engine takes for a group."""
    rule: Callable[["SimulatedWorker", Lease, float], tuple[float, float] | None] | None = None
    """(time of the answer, share of the groups that are good) of a lease granted at a time; None never answers.
    Without a rule it works."""
    engine_lag: float = 2.0
    """Leases that it holds in seconds of its engine's work."""
    accepted: float = 0.0
    free_at: float = 0.0
    holds: int = 0
    leased: int = 0
    joins_s: float = 0.0
    """Time after which it joins."""

    @property
    def node(self) -> bytes:
        """Its id."""
        return digest(self.name.encode())

    def answer(self, lease: Lease, now: float) -> tuple[float, float] | None:
        """Decide when and how a lease is answered."""
        if self.rule is not None:
            return self.rule(self, lease, now)
        return self.work(lease, now), 1.0

    def work(self, lease: Lease, now: float) -> float:
        """Queue a lease's groups at the engine; return when they are done."""
        self.free_at = max(self.free_at, now) + self.group_s * len(lease.tasks)
        return self.free_at


@dataclass
class Simulation:
    """A run of some workers."""

    workers: list[SimulatedWorker]
    groups_per_batch: int = 8
    groups_per_lease: int = 2
    staleness: int = 8
    timeout_s: float = 60.0
    train_s: float = 0.2
    seed: int = 0
    leases_per_worker: int = 16
    steps: int = 0
    stale: int = 0
    step_times: list[float] = field(default_factory=list[float])
    trained: Counter[str] = field(default_factory=Counter[str])
    now: float = NOW

    def __post_init__(self) -> None:
        rollouts = {
            "groups_per_batch": self.groups_per_batch,
            "groups_per_lease": self.groups_per_lease,
            "max_off_policy_steps": self.staleness,
            "lease_timeout_s": self.timeout_s,
            "leases_per_worker": self.leases_per_worker,
        }
        config = RunConfig.model_validate(
            {"environment": {"id": "reverse-text"}, "max_steps": 10**6, "rollouts": rollouts}
        )
        policy = LeasePolicy(
            (MixtureShare(4),),
            self.groups_per_batch,
            self.groups_per_lease,
            self.staleness,
            self.leases_per_worker,
            self.timeout_s,
            1000,
        )
        self.book = LeaseBook(policy)
        self.progress = Progress()
        self.buffer = buffer.RolloutBuffer(
            max_off_policy_steps=self.staleness,
            capacity=buffer.buffer_capacity(self.staleness, self.groups_per_batch),
        )
        self._unverified: dict[int, bytes] = {}
        """Nodes by the leases that they answered."""
        registry = SimpleNamespace(
            book=self.book,
            present=lambda: len(self.workers),
            proven=lambda node: True,  # pyright: ignore[reportUnknownLambdaType]
            services=SimpleNamespace(ledger=SimpleNamespace(waiting=self._waiting)),
        )
        self.demand = LeaseDemand(
            config, cast(Any, registry), self.buffer, self.progress, clock=lambda: self.now
        )
        self.batches = BatchCutter(config.rollouts, self.buffer, self.demand)
        self._chance = random.Random(self.seed)
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._waiting_since = self.now
        self._names = {worker.node: worker.name for worker in self.workers}
        for worker in self.workers:
            self._at(
                self.now + worker.joins_s + self._chance.random() * POLL_S,
                lambda w=worker: self._poll(w),
            )
        self._at(self.now + REPORT_S, self._expire)

    def run(self, seconds: float) -> int:
        """Run for some seconds of virtual time; return the steps that were trained in them."""
        end, before = self.now + seconds, self.steps
        while self._events and self._events[0][0] <= end:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = end
        return self.steps - before

    def _waiting(self, arrival: int) -> list[tuple[int, bytes, int]]:
        """See Ledger.waiting()."""
        return [(lease, node, lease) for lease, node in self._unverified.items()]

    def _at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event))

    # -- workers -----------------------------------------------------------------------------------

    def _poll(self, worker: SimulatedWorker) -> None:
        self.book.present(worker.node, self.now)
        while worker.rule is not None or worker.free_at - self.now < worker.engine_lag:
            lease = self.book.grant(
                worker.node,
                version=self.steps,
                capacity=self.demand.capacity(worker.node),
                digest_of=lambda _, index: digest(b"%d" % index),
                seed=bytes(32),
                now=self.now,
                share=LeaseShare(trust=1.0, earned=4.0 + worker.accepted),
            )
            if lease is None:
                break
            worker.leased += len(lease.tasks)
            answer = worker.answer(lease, self.now)
            if answer is not None:
                at, share = answer
                begun = self.steps
                self._at(
                    max(at, self.now + 0.01),
                    lambda w=worker, one=lease, s=share, v=begun: self._arrive(w, one, s, v),
                )
        self._at(self.now + POLL_S * (0.5 + self._chance.random()), lambda: self._poll(worker))

    def _arrive(self, worker: SimulatedWorker, lease: Lease, share: float, version: int) -> None:
        if lease.lease_id not in self.book.held:
            return  # too late
        self.book.settle(lease.lease_id, worker.node, self.now)
        self._unverified[lease.lease_id] = worker.node
        self._at(self.now + VERIFY_S, lambda: self._judge(worker, lease, share, version))

    def _judge(self, worker: SimulatedWorker, lease: Lease, share: float, version: int) -> None:
        del self._unverified[lease.lease_id]
        good = round(share * len(lease.tasks))
        kept = 0
        for task in lease.tasks[:good]:
            group = self._group(worker, task.digest, version)
            if self.buffer.add(group, self.steps) is None:
                kept += 1
        for task in lease.tasks[kept:]:
            self.book.lease_again(0, task.index)
        self.stale += good - kept
        worker.accepted += good
        outcome = LeaseOutcome(len(lease.tasks), 4 * good, float(len(lease.tasks) - good))
        self.book.judge(lease, worker.node, outcome, self.now)
        if kept:
            self.book.lead.returned(
                kept, self.groups_per_batch, self.now - lease.deadline + self.timeout_s
            )
        self._cut()

    def _group(self, worker: SimulatedWorker, task: bytes, version: int) -> buffer.RolloutGroup:
        rollout = buffer.ScoredRollout(
            [buffer.BranchTokens([1, 2], [False, True], [0.0, 0.0])], 0.0
        )
        return buffer.RolloutGroup(task, "e", [rollout] * 4, version, worker.node, b"")

    # -- the trainer ---------------------------------------------------------------------------------

    def _expire(self) -> None:
        self.book.expire(self.now)
        self._cut()
        self._at(self.now + REPORT_S, self._expire)

    def _cut(self) -> None:
        if self.progress.training or (groups := self.batches.cut(self.now)) is None:
            return
        self.trained.update(self._names[group.node] for group in groups)
        self.progress.training = True
        waited = self.now - self._waiting_since
        self._at(self.now + self.train_s, lambda: self._trained(waited))

    def _trained(self, waited: float) -> None:
        self.steps += 1
        self.step_times.append(self.now)
        self.progress.step = self.steps
        self.progress.training = False
        self.buffer.advance(self.steps)
        self.book.trained(self.train_s, waited)
        self._waiting_since = self.now
        self.batches.begin()
        self._cut()
