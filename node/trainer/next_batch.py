"""Describe to the operator what the next batch lacks, and what to do about it.

It reads what the scheduler, the workers and the queue of submissions know, and changes nothing.
"""

from collections import Counter

from ...protocol.errors import Reason
from ...protocol.version import MAX_NAME
from ..config.run import RunConfig
from ..errors import printable
from ..training.advantages import has_equal_rewards
from ..training.buffer import RolloutBuffer
from .scheduler import LeaseScheduler
from .state import Progress
from .submissions import SubmissionQueue
from .workers import WorkerRegistry, WorkerState

SILENT_S = 15.0
"""Silence after which a worker counts as silent; workers send something every five seconds (worker/loop.py,
HEARTBEAT_S)."""
REFUSED = "refused work"
SILENT = "silent"
UNMEASURED = "waiting for the bounds of noise of their class (`primerl-node status` names it)"
WRONG_CLASS = "not of the numerics class that they claim"
SAME_CLASS = (
    "run the engine, release and GPU of a reference worker, with its options, or name one of these in "
    "verification.references"
)
EXPLAIN = "`primerl-node explain` says why"
ADVICE = {
    Reason.STALE.value: (
        "set a smaller rollouts.groups_per_lease, or a higher rollouts.max_off_policy_steps"
    ),
    Reason.UNCALIBRATED.value: (
        "the noise of those workers is not measured, `primerl-node status` says what is missing"
    ),
}
"""Advice for a run in which all rejections have one reason."""


def next_batch(
    config: RunConfig, scheduler: LeaseScheduler, submissions: SubmissionQueue, now: float
) -> str:
    """Describe what the next batch lacks; `now` in Unix seconds."""
    buffer, unverified = submissions.buffer, submissions.waiting()
    wanted = config.rollouts.groups_per_batch
    on_lease = scheduler.book.leased()
    state = f"{len(buffer)} of {wanted} groups are in"
    equal = _equal_rewards(config, buffer)
    if equal:
        state += f", all of equal rewards ({equal})"
    if replaced := sum(
        curriculum.rejected_in_a_row for curriculum in submissions.curricula.values()
    ):
        state += f", {replaced} in a row were not admitted by training.curriculum"
    if on_lease:
        state += f", {on_lease.total()} on lease{_silent_holders(scheduler.registry, on_lease)}"
    if unverified:
        state += f", {unverified} submission{'s' * (unverified > 1)} in verification"
    if fault := submissions.verifier.judge_fault:
        state += f"; {fault}"
    if len(buffer) >= wanted:
        state += "; waiting for groups of other workers (rollouts.max_peer_share)"
    elif not unverified and all(scheduler.registry.refusal(node) for node in on_lease):
        state += f"; {_workers(scheduler, now)}"
    return "; ".join([*_no_progress(config, submissions.progress), state])


def _equal_rewards(config: RunConfig, buffer: RolloutBuffer) -> str:
    """Return the range of rewards if the buffer holds only groups of equal rewards.

    Empty if it holds fewer than two groups, or if any group or loss has a signal anyway.
    """
    training, own = config.training, config.training_on()
    settings = [own.get(group.environment, training) for group in buffer.groups()]
    needs_signal = training.filter_zero_advantages and all(
        training.loss.reads_advantages for training in settings
    )
    if len(buffer) < 2 or not needs_signal:
        return ""
    if not all(map(has_equal_rewards, buffer.groups(), settings)):
        return ""
    rewards = [group.rollouts[0].reward for group in buffer.groups()]
    return reward_range(min(rewards), max(rewards))


def reward_range(low: float, high: float) -> str:
    """Format rewards in two decimals, from the lowest to the highest."""
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"


def _silent_holders(registry: WorkerRegistry, on_lease: Counter[bytes]) -> str:
    silence = min(registry.silence(node) for node in on_lease)
    if silence < SILENT_S:
        return ""
    return f" to workers that have been silent for {silence:.0f} s"


def _no_progress(config: RunConfig, progress: Progress) -> list[str]:
    """Describe batches without signal, and a batch whose rollouts were all rejected."""
    rollouts = config.rollouts
    sentences = [progress.skipping] if progress.skipping else []
    limit = f"the run stops after {rollouts.max_empty_batches} without signal"
    if progress.zero_advantage:
        count = progress.zero_advantage
        which = "batch" if count == 1 else f"{count} batches"
        rewards = reward_range(*progress.equal_rewards)
        sentences.append(f"every group of the last {which} had equal rewards ({rewards}): {limit}")
    if progress.late:
        tried = f"{progress.late} x {rollouts.batch_timeout_s:.0f} s"
        sentences.append(f"no batch was full within {tried}: {limit}")
    lost = progress.all_rejected()
    if lost:
        ordered = ", ".join(f"{name} {count}" for name, count in lost.most_common(3))
        advice = ADVICE.get(min(lost), EXPLAIN) if len(lost) == 1 else EXPLAIN
        sentences.append(
            f"everything since step {progress.step} was rejected ({ordered}): {advice}"
        )
    return sentences


def _workers(scheduler: LeaseScheduler, now: float) -> str:
    """Return why no worker holds a lease, with advice."""
    registry = scheduler.registry
    workers = {
        node: worker for node, worker in registry.workers.items() if registry.takes_leases(node)
    }
    if not workers:
        return f"no worker has joined: start `primerl-node join` with the ticket{_turned_away(registry)}"
    newest = max(scheduler.version, 0)
    states = {node: _state(registry, node, worker, newest, now) for node, worker in workers.items()}
    refused = [_why_refused(registry, node) for node, state in states.items() if state == REFUSED]
    gone = sum(
        state == SILENT or workers[node].left for node, state in states.items() if state != REFUSED
    )
    if refused and len(refused) + gone == len(workers):
        left = f"{gone} of {len(workers)} workers are gone and the others are" if gone else ""
        why = _commonest(refused)
        remedy = SAME_CLASS if why == WRONG_CLASS else "repair or replace them"
        return f"{left or 'every worker is'} refused work ({why}): {remedy}, {EXPLAIN}"
    silent = [registry.silence(node) for node, state in states.items() if state == SILENT]
    if len(silent) == len(workers):
        return f"none of {len(workers)} workers is here, the last was heard {min(silent):.0f} s ago"
    counted = Counter(states.values())
    if REFUSED in counted:
        counted[f"{REFUSED} ({_commonest(refused)})"] = counted.pop(REFUSED)
    return f"workers: {', '.join(f'{count} {state}' for state, count in counted.most_common())}"


def _state(
    registry: WorkerRegistry, node: bytes, worker: WorkerState, newest: int, now: float
) -> str:
    if registry.refusal(node):
        return REFUSED
    if node in registry.turned_away:
        return f"turned away ({registry.turned_away[node].reason.value})"
    if worker.left:
        return f"failed ({worker.failure})" if worker.failure else "left"
    if registry.silence(node) >= SILENT_S:
        return SILENT
    if worker.paused:
        return f"paused ({printable(worker.paused, MAX_NAME)})"
    if worker.stats.version < 0:
        return f"loading a first policy, version {newest}"
    if registry.waits_for_bounds(node):
        return UNMEASURED
    rest = registry.book.record(node).rest_until - now
    if rest > 0:
        return f"resting {rest:.0f} s as leases did not come back or brought nothing"
    if worker.stats.version < newest:
        return f"fetching version {newest}"
    return "asking for work"


def _why_refused(registry: WorkerRegistry, node: bytes) -> str:
    known = registry.reputations.get(node)
    if known is None:
        return "not known"
    if known.placement.refused and not known.banned:
        return WRONG_CLASS
    return f"{'banned' if known.banned else 'too much was rejected'}: {known.top_reason()}"


def _commonest(sentences: list[str]) -> str:
    return Counter(sentences).most_common(1)[0][0]


def _turned_away(registry: WorkerRegistry) -> str:
    if not registry.turned_away:
        return ""
    reasons = Counter(error.reason.value for error in registry.turned_away.values())
    reason, count = reasons.most_common(1)[0]
    return f" ({count} that tried were refused: {reason})"
