"""What training waits for, in words, for the trainer's `status` and its live view.

Computed when somebody asks, from what the trainer's loops know; changes nothing.
"""

from collections import Counter

from ...protocol.errors import Reason
from ..config.run import RunConfig
from ..training.advantages import has_equal_rewards
from ..training.buffer import RolloutBuffer
from .progress import Progress
from .scheduler import LeaseDesk, Worker

SILENT_S = 15.0
"""Workers say something every five seconds (loop.py, HEARTBEAT_S)."""
REFUSED = "refused work"
SILENT = "silent"
EXPLAIN = "`primerl-node explain` says why"
STALE = "set a smaller rollouts.groups_per_lease, or a higher rollouts.max_off_policy_steps"


def next_batch(
    config: RunConfig,
    progress: Progress,
    buffer: RolloutBuffer,
    unjudged: int,
    desk: LeaseDesk,
    now: float,
) -> str:
    """What the next batch waits for; `unjudged` submissions are in verification, `now` is in Unix seconds."""
    wanted = config.rollouts.groups_per_batch
    on_lease = desk.book.leased()
    said = f"{len(buffer)} of {wanted} groups are in"
    equal = _equal_rewards(config, buffer)
    if equal:
        said += f", all of equal rewards ({equal})"
    if on_lease:
        said += f", {on_lease.total()} on lease{_silent_holders(desk, on_lease)}"
    if unjudged:
        said += f", {unjudged} submissions in verification"
    if len(buffer) >= wanted:
        said += "; other workers' groups are waited for"
    elif not on_lease and not unjudged:
        said += f"; {_workers(desk, now)}"
    return "; ".join([*_no_progress(config, progress), said])


def _equal_rewards(config: RunConfig, buffer: RolloutBuffer) -> str:
    """The rewards in the buffer, if several groups are there and none of them teaches anything."""
    training = config.training
    if not (training.filter_zero_advantages and training.loss.reads_advantages) or len(buffer) < 2:
        return ""
    if not all(has_equal_rewards(group, training) for group in buffer.groups()):
        return ""
    rewards = [group.rollouts[0].reward for group in buffer.groups()]
    return reward_range(min(rewards), max(rewards))


def reward_range(low: float, high: float) -> str:
    """Rewards in two decimals, from the lowest to the highest."""
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"


def _silent_holders(desk: LeaseDesk, on_lease: Counter[bytes]) -> str:
    silence = min(desk.silence(node) for node in on_lease)
    if silence < SILENT_S:
        return ""
    return f" to workers that have been silent for {silence:.0f} s"


def _no_progress(config: RunConfig, progress: Progress) -> list[str]:
    """Batches that taught nothing, and a batch of which everything is rejected."""
    rollouts, said = config.rollouts, list[str]()
    limit = f"the run stops after {rollouts.max_empty_batches} without signal"
    if progress.zero_advantage:
        count = progress.zero_advantage
        which = "batch" if count == 1 else f"{count} batches"
        rewards = reward_range(*progress.equal_rewards)
        said.append(f"every group of the last {which} had equal rewards ({rewards}): {limit}")
    if progress.late:
        tried = f"{progress.late} x {rollouts.batch_timeout_s:.0f} s"
        said.append(f"no batch was full within {tried}: {limit}")
    lost = progress.all_rejected()
    if lost:
        ordered = ", ".join(f"{name} {count}" for name, count in lost.most_common(3))
        advice = STALE if set(lost) == {Reason.STALE.value} else EXPLAIN
        said.append(f"everything since step {progress.step} was rejected ({ordered}): {advice}")
    return said


def _workers(desk: LeaseDesk, now: float) -> str:
    """Why nobody is at work on a lease, and what to do."""
    workers = {n: one for n, one in desk.workers.items() if n not in desk.audits.seats}
    if not workers:
        return (
            f"no worker has joined: start `primerl-node join` with the ticket{_turned_away(desk)}"
        )
    newest = max(desk.version, 0)
    states = {node: _state(desk, node, one, newest, now) for node, one in workers.items()}
    refused = [_why_refused(desk, node) for node, state in states.items() if state == REFUSED]
    if len(refused) == len(workers):
        return (
            f"every worker is refused work ({_commonest(refused)}): mend or replace them, {EXPLAIN}"
        )
    silent = [desk.silence(node) for node, state in states.items() if state == SILENT]
    if len(silent) == len(workers):
        return f"none of {len(workers)} workers is here, the last was heard {min(silent):.0f} s ago"
    counted = Counter(states.values())
    if REFUSED in counted:
        counted[f"{REFUSED} ({_commonest(refused)})"] = counted.pop(REFUSED)
    return f"workers: {', '.join(f'{count} {state}' for state, count in counted.most_common())}"


def _state(desk: LeaseDesk, node: bytes, worker: Worker, newest: int, now: float) -> str:
    if desk.refusal(node):
        return REFUSED
    if worker.left:
        return f"failed ({worker.failure})" if worker.failure else "left"
    if desk.silence(node) >= SILENT_S:
        return SILENT
    if worker.stats.version < 0:
        return f"loading a first policy, version {newest}"
    rest = desk.book.record(node).rest_until - now
    if rest > 0:
        return f"resting {rest:.0f} s as leases did not come back"
    if worker.stats.version < newest:
        return f"fetching version {newest}"
    return "asking for work"


def _why_refused(desk: LeaseDesk, node: bytes) -> str:
    known = desk.reputations.get(node)
    if known is None:
        return "not known"
    return f"{'banned' if known.banned else 'too much was rejected'}: {known.top_reason()}"


def _commonest(sentences: list[str]) -> str:
    return Counter(sentences).most_common(1)[0][0]


def _turned_away(desk: LeaseDesk) -> str:
    if not desk.turned_away:
        return ""
    reason, count = Counter(desk.turned_away).most_common(1)[0]
    return f" ({count} that tried were refused: {reason})"
