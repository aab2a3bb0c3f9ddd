"""The figures of a node in Prometheus' text format.

Labels have few values: names of the run's environments, reason codes, states. Peers are counted, not named.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from ..errors import printable
from .figures import STATES, NodeFigures, PeerRow, Status

if TYPE_CHECKING:
    from prometheus_client import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PHASES = (
    "starting joining catching_up warm_up evaluating running paused restarting finishing ended other"
).split()
NEWEST = {
    "loss/mean": ("primerl_loss", "Mean loss of the newest step."),
    "mismatch_kl/all/mean": (
        "primerl_mismatch_kl",
        "KL between the sampler's and the trainer's log-probabilities, mean of the newest step.",
    ),
    "off_policy/mean": ("primerl_staleness_versions", "Mean staleness of the newest batch."),
    "perf/throughput": (
        "primerl_training_tokens_per_second",
        "Tokens of whole sequences trained a second.",
    ),
    "time/wait_for_batch": (
        "primerl_wait_for_batch_seconds",
        "Time that the newest step waited for its batch.",
    ),
}
"""Gauges of a trainer, by their names in metrics.jsonl."""


def exposition(figures: NodeFigures) -> bytes:
    """Write the figures."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.registry import Collector

    class Node(Collector):
        def collect(self) -> "Iterable[Metric]":
            return _metrics(figures)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Node())
    return generate_latest(registry)


def _metrics(figures: NodeFigures) -> "Iterator[Metric]":
    yield from _node(figures.status)
    yield from _engine(figures.status)
    if figures.status.role in ("trainer", "judge"):
        yield from _trainer(figures.status)
        yield from _peers(figures.peers)


def _node(status: Status) -> "Iterator[Metric]":
    from prometheus_client.metrics_core import InfoMetricFamily

    names = {"role": status.role, "software": status.software, "run": status.run_name}
    about = {name: printable(value) for name, value in names.items()}
    yield InfoMetricFamily("primerl_node", "This node.", value=about)
    yield _gauge("primerl_uptime_seconds", "Time since its start.", status.uptime_s)
    phase = status.phase.replace(" ", "_").replace("-", "_")
    phase = phase if phase in PHASES else "other"
    yield _gauge(
        "primerl_phase", "1 for the present phase.", {p: p == phase for p in PHASES}, "phase"
    )
    yield _gauge("primerl_waiting", "Whether it waits for something.", bool(status.waiting_for))
    yield _gauge("primerl_policy_version", "Version of the policy here; -1: none.", status.version)
    newest = status.newest_version
    yield _gauge("primerl_newest_policy_version", "Newest version that it heard of.", newest)
    yield _gauge("primerl_leases", "Leases out, or held by a worker.", status.leases)
    yield _counter("primerl_rollouts_accepted", "Accepted rollouts.", status.accepted)
    text = "Rejected rollouts by reason."
    yield _counter("primerl_rollouts_rejected", text, status.rejected, "reason")
    yield _gauge("primerl_peers", "Connected peers.", status.peers)
    yield _counter("primerl_sent_bytes", "Bytes sent to peers.", status.bytes_sent)
    yield _counter("primerl_received_bytes", "Bytes from peers.", status.bytes_received)
    if status.trusts:
        text = "Trust of the trainer in this worker, 0 to 1."
        yield _gauge("primerl_trust", text, status.trusts, "environment")
    if lag := status.event_loop_lag:
        text = "Lag of the event loop over the last ten seconds."
        yield _gauge("primerl_event_loop_lag_seconds", text, lag, "stat")
    if (machine := status.machine) is not None:
        text = "Mean number of cores that its processes keep busy."
        yield _gauge("primerl_busy_cores", text, machine.cpu_cores)
        text = "Resident memory of its processes."
        yield _gauge("primerl_memory_bytes", text, machine.memory_bytes)
        text = "Room on the disk of its data directory."
        yield _gauge("primerl_disk_free_bytes", text, machine.disk_free_bytes)
        if machine.gpus:
            text = "Memory in use on the GPUs that it sees."
            yield _gauge("primerl_gpu_memory_bytes", text, machine.gpu_memory_bytes)
        if machine.gpu_busy is not None:
            text = "Share of its time in which such a GPU computes, mean, 0 to 1."
            yield _gauge("primerl_gpu_busy_ratio", text, machine.gpu_busy)


def _engine(status: Status) -> "Iterator[Metric]":
    if (engine := status.engine) is None:
        return
    yield _gauge("primerl_engine_up", "Whether the engine works.", not engine.fault)
    yield _counter("primerl_engine_restarts", "Starts after a fault.", engine.restarts)
    yield _gauge("primerl_engine_inflight", "Sequences in flight.", engine.inflight)
    text = "Share of its cache that is in use, 0 to 1."
    yield _gauge("primerl_engine_cache_use_ratio", text, engine.kv_use)
    yield _counter("primerl_generated_tokens", "Tokens generated.", engine.generated_tokens)


def _trainer(status: Status) -> "Iterator[Metric]":
    yield _gauge("primerl_step", "Step of the run.", status.step)
    yield _gauge("primerl_max_steps", "Last step of the run.", status.max_steps)
    yield _gauge("primerl_waiting_groups", "Groups that wait to be trained.", status.waiting_groups)
    if status.step_s is not None:
        yield _gauge("primerl_step_seconds", "Median time from step to step.", status.step_s)
    if status.eta_s is not None:
        yield _gauge(
            "primerl_remaining_seconds", "Time to the last step at that pace.", status.eta_s
        )
    if status.reward is not None:
        yield _gauge("primerl_reward", "Mean reward of the newest batch.", status.reward)
    rows = status.environments
    rewards = {row.name: row.reward for row in rows if row.reward is not None}
    text = "Mean reward of its rollouts in the newest batch with some."
    yield _gauge("primerl_environment_reward", text, rewards, "environment")
    for what in ("accepted", "rejected"):
        counts = {row.name: getattr(row, what) for row in rows}
        text = f"{what.capitalize()} rollouts by environment."
        yield _counter(f"primerl_environment_rollouts_{what}", text, counts, "environment")
    for name, (metric, text) in NEWEST.items():
        if name in status.newest:
            yield _gauge(metric, text, status.newest[name])
    for kind in ("avg", "pass"):
        scores = {
            name: value
            for name, figures in status.evaluations.items()
            for figure, value in figures.items()
            if figure.startswith(f"{kind}@")
        }
        if scores:
            text = f"Newest {kind}@k of an evaluation, of its largest k."
            yield _gauge(f"primerl_evaluation_{kind}", text, scores, "environment")
    if status.ticket_expires is not None:
        text = "Unix time at which the trainer's own ticket expires."
        yield _gauge("primerl_ticket_expires_timestamp_seconds", text, status.ticket_expires)


def _peers(rows: Iterable[PeerRow]) -> "Iterator[Metric]":
    workers = [row for row in rows if row.role == "inference"]
    states = Counter(row.state for row in workers)
    counts = {state: states[state] for state in STATES}
    yield _gauge("primerl_workers", "Workers by state.", counts, "state")
    lags = [row.lag for row in workers if row.state == "working"]
    text = "Versions that the last of the working ones is behind."
    yield _gauge("primerl_worker_lag_versions", text, max(lags, default=0))
    text = "Rollouts that were audited."
    yield _counter("primerl_rollouts_audited", text, sum(row.audited for row in workers))


def _gauge(name: str, text: str, value: float | Mapping[str, float], label: str = "") -> "Metric":
    from prometheus_client.metrics_core import GaugeMetricFamily

    return _filled(GaugeMetricFamily(name, text, labels=[label] if label else None), value)


def _counter(name: str, text: str, value: float | Mapping[str, float], label: str = "") -> "Metric":
    """Make a counter, whose name gets `_total` at its end."""
    from prometheus_client.metrics_core import CounterMetricFamily

    return _filled(CounterMetricFamily(name, text, labels=[label] if label else None), value)


def _filled(family: "Metric", value: float | Mapping[str, float]) -> "Metric":
    rows = value if isinstance(value, Mapping) else None
    if rows is None:
        family.add_metric([], value)  # type: ignore[attr-defined]
    else:
        for name, figure in {printable(name): row for name, row in rows.items()}.items():
            family.add_metric([name], figure)  # type: ignore[attr-defined]
    return family
