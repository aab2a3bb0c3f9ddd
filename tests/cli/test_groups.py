"""Pipelines in `status` and `peers`."""

from typing import Any

from msgspec import structs

from primerl.cli.tables import group, peers_table, status_lines
from primerl.node.ops.control import GroupRow, PeerRow, Status

ROW = GroupRow(
    group="ab12",
    generation=3,
    stages=["one", "two"],
    layers=["0-13", "14-27"],
    spares=1,
    round_trip_ms=41.6,
    kv_tokens=8192,
    state="planned",
)


def status(**more: Any) -> Status:
    fields: dict[str, Any] = {"id": "0", "short": "0", "software": "1", "pid": 1, "uptime_s": 1.0}
    return Status(role="trainer", data_dir="d", **fields, **more)


def test_a_trainer_shows_who_holds_which_layers() -> None:
    said = dict(status_lines(status(pipelines=[ROW])))["pipeline"]
    assert said == (
        "ab12 planned, generation 3: one 0-13, two 14-27, 42 ms round, room for 8192 tokens, 1 spares"
    )
    assert "pipeline" not in dict(status_lines(status()))


def test_a_round_that_nobody_measured_is_not_shown() -> None:
    assert " ms" not in group(structs.replace(ROW, round_trip_ms=None))


def test_peers_say_which_stage_they_are() -> None:
    from rich.console import Console

    row = PeerRow(
        *("00", "0", "inference", "direct", 1.0, 0, 0, 1, 0, 0, 0, 0, "", 1.0, 1.0, None, "1"),
        stage="1/2, layers 14-27",
    )
    console = Console(width=300)
    with console.capture() as shown:
        console.print(peers_table([row]))
    assert "stage 1/2, layers 14-27" in shown.get()
