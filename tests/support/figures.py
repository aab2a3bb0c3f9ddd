"""Figures of a trainer and of a worker, as its views get them."""

from msgspec.structs import replace

from primerl.node.ops.figures import EngineRow, EnvironmentRow, MachineRow, PeerRow, Status

PEER = PeerRow(
    id="ab" * 32,
    short="ababababab",
    role="inference",
    path="direct",
    rtt_ms=1.25,
    bytes_sent=1_500_000,
    bytes_received=999,
    version=7,
    lag=1,
    leases=2,
    accepted=30,
    rejected=4,
    top_reason="stale",
    trust=0.9,
    reliability=1.0,
    last_seen_s=3.2,
    software="0.1.0 [bold]",
    chunk_bytes={"trainer": 3000, "cdcdcdcdcd": 1000},
)
STATUS = Status(
    id="cd" * 32,
    short="cdcdcdcdcd",
    role="trainer",
    software="0.1.0",
    pid=1,
    uptime_s=75,
    data_dir="/d",
    run_name="demo",
    run="ef" * 32,
    phase="running",
    step=3,
    max_steps=10,
    version=3,
    newest_version=3,
    reward=0.5,
    rejected={"stale": 2, "bad_reward": 5},
    accepted=9,
    history=[(1, 0.25), (2, 0.5)],
    chunk_bytes_by_source={"trainer": 25, "ababababab": 75},
)
TRAINER = replace(
    STATUS,
    newest={
        "loss/mean": 0.1,
        "mismatch_kl/all/mean": 0.002,
        "off_policy/mean": 1.5,
        "perf/throughput": 9000.0,
        "time/wait_for_batch": 0.1,
    },
    staleness=1.5,
    step_s=2.0,
    eta_s=14.0,
    ticket_expires=2e9,
    machine=MachineRow(1.5, 400_000_000, 5_000_000_000),
    environments=[EnvironmentRow("math", "math-env", 0.5, 8, 0.25, 6, 4, 2)],
    evaluations={"math": {"version": 3.0, "avg@4": 0.5, "pass@4": 0.7}},
    event_loop_lag={"mean": 0.001, "max": 0.01},
    waiting_for="12 of 16 groups are in",
)
WORKER = replace(
    STATUS,
    role="inference",
    engine=EngineRow("hf", inflight=8, cap=8, generated_tokens=1234, tokens_per_s=120.0),
    trusts={"math": 0.9},
    trust=0.9,
    machine=MachineRow(3.5, 900_000_000, 5_000_000_000, 1, 0.75, 9_000_000_000, 24_000_000_000),
)
