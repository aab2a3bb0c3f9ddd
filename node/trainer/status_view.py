"""Show a trainer's training, environments and workers to the operator (`status`, `peers`)."""

from collections import Counter
from collections.abc import Sequence

from ...protocol.reputation import Reputation
from ...protocol.version import MAX_NAME
from ..errors import printable
from ..ops.figures import MAX_SOURCES, EnvironmentRow, PeerRow, Status
from ..p2p.services import NodeServices
from ..p2p.status_view import in_turns, peer_rows, shown_silence
from .loop import TrainerRole
from .scheduler import LeaseScheduler
from .state import Progress
from .workers import WorkerRegistry


def show_leases(status: Status, scheduler: LeaseScheduler, progress: Progress) -> None:
    """Fill in leases, verdicts, pipelines and bounds in `status`."""
    registry = scheduler.registry
    status.version = status.newest_version = scheduler.version
    status.leases = len(scheduler.book.held)
    status.accepted, status.rejected = progress.accepted, dict(progress.rejected)
    status.pipelines = registry.pipelines.rows()
    status.bounds = registry.bounds.rows(registry.classes())
    missing = registry.bounds.warnings(registry.classes(strangers=True))
    status.warnings = [
        *registry.warnings(),
        *registry.sessions.warnings(),
        *missing,
        *registry.audits.warnings(),
    ]


def show_training(status: Status, role: TrainerRole) -> None:
    """Fill in the progress of training in `status`."""
    progress = role.progress
    show_leases(status, role.scheduler, progress)
    status.step, status.reward = progress.step, progress.reward
    status.staleness = progress.staleness
    curves = role.curves
    status.history, status.newest = curves.curve("reward/mean"), curves.newest
    status.step_s = curves.step_s
    if curves.step_s is not None:
        status.eta_s = max(0, status.max_steps - status.step) * curves.step_s
    status.waiting_groups = role.scheduler.demand.waiting_groups()
    status.environments = environment_rows(role)


def environment_rows(role: TrainerRole) -> list[EnvironmentRow]:
    """Make a row for each environment that is trained on."""
    progress, registry = role.progress, role.scheduler.registry
    ratios = [share.ratio for share in registry.book.policy.environments]
    able = registry.able(0.0)
    return [
        EnvironmentRow(
            name=contract.name,
            id=contract.id,
            share=ratio / sum(ratios),
            group_size=contract.group_size,
            reward=progress.rewards.get(contract.name),
            accepted=progress.accepted_of[contract.name],
            rejected=progress.rejected_of[contract.name],
            workers=able[number],
        )
        for number, (contract, ratio) in enumerate(zip(registry.environments, ratios, strict=True))
    ]


def trusts(known: Reputation, environments: Sequence[str]) -> dict[str, float]:
    """Map the environments that a node sent work of to the trust in it there."""
    judged = (name for name in environments if name in known.environments)
    return {name: round(known.environments[name].mean, 3) for name in judged}


def _refused(registry: WorkerRegistry, node: bytes) -> str:
    """Return why a node is leased nothing, or nothing of some environments; "" if neither."""
    if refusal := registry.reputation(node).refused or registry.refusal(node):
        return refusal
    names = [registry.environments[number].name for number in sorted(registry.quarantined(node))]
    reason = registry.reputation(node).top_reason(names)
    return f"no leases of {', '.join(names)}: too much was rejected: {reason}" if names else ""


async def worker_rows(services: NodeServices, scheduler: LeaseScheduler) -> list[PeerRow]:
    """Make the rows of `peers` for a trainer, with leases, reputations and audits."""
    registry, newest = scheduler.registry, scheduler.version
    leases = Counter(grant.node for grant in registry.book.held.values())
    validators = registry.audits.records()
    rows, tickets = await peer_rows(services), registry.ticket_labels()
    async for row in in_turns(rows):
        node = bytes.fromhex(row.id)
        worker = registry.workers.get(node)
        version = worker.stats.version if worker else -1
        row.version, row.lag = version, newest - version if version >= 0 else 0
        row.leases = leases[node]
        row.stage = registry.pipelines.place(node)
        known = registry.reputations.get(node) or Reputation()
        row.accepted, row.rejected = known.accepted, sum(known.rejected.values())
        row.top_reason, row.refused = known.top_reason(), _refused(registry, node)
        row.reasons = {reason.value: count for reason, count in known.rejected.items()}
        row.trusts = trusts(known, [environment.name for environment in registry.environments])
        row.trust, row.suspicion = min(row.trusts.values(), default=0.5), round(known.suspicion, 3)
        lows = [known.environments[name].low for name in row.trusts]
        row.trust_low = round(min(lows, default=row.trust_low), 3)
        row.audited = known.audited
        if (validator := validators.get(node)) is not None:
            row.audits = validator.jobs
            if validator.disqualified:
                row.refused = row.refused or f"disqualified: {validator.disqualified}"
        row.second = registry.sessions.second(node)
        if (turned_away := registry.turned_away.get(node)) is not None:
            row.refused = row.refused or printable(str(turned_away), MAX_NAME)
        if worker is not None:
            row.numerics = str(worker.numerics or "")
            sources = Counter(worker.stats.chunk_bytes).most_common(MAX_SOURCES)
            row.chunk_bytes = {printable(source): count for source, count in sources}
            row.ticket = tickets.get(worker.ticket, "")
            row.left, silence = worker.left, registry.silence(node)
            row.silent_s = round(silence, 1) if row.left else shown_silence(silence)
            works = row.role not in ("validator", "standby", "learner")
            joins = version < 0 and not row.left and not row.stage and works
            row.paused = "" if row.left or row.silent_s else printable(worker.paused, MAX_NAME)
            if joins and not silence and not row.paused:
                # the connection is its sign of life
                row.starting, row.last_seen_s = True, 0.0
    return rows
