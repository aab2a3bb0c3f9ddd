import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from primerl.node.control import EngineRow, PeerRow, Status
from primerl.node.errors import NodeError
from primerl.node.registry import register

from .conftest import Ran

Serve = Callable[..., Awaitable[Path]]
Cli = Callable[..., Ran]

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


async def test_peers_shows_one_line_a_peer(cli: Cli, serve: Serve) -> None:
    node = await serve(peers=[PEER])
    ran = await asyncio.to_thread(cli, "peers", "--data-dir", str(node))
    assert ran.code == 0
    head, row = ran.out.splitlines()
    assert head.split()[:3] == ["PEER", "ROLE", "PATH"]
    for cell in (
        *("ababababab", "inference", "direct", "1.2 ms", "1.5 MB", "999 B", " 7 ", "30/4 (stale)"),
        *("0.90", "3 s ago", "0.1.0 [bold]"),
    ):
        assert cell in row


async def test_peers_say_who_is_refused_suspicious_or_a_validator(cli: Cli, serve: Serve) -> None:
    rows = [
        msgspec.structs.replace(PEER, audited=321),
        msgspec.structs.replace(PEER, short="b", suspicion=0.625),
        msgspec.structs.replace(PEER, short="c", refused="banned: " + "because " * 20),
        msgspec.structs.replace(PEER, short="d", role="validator", audits=12),
    ]
    ran = await asyncio.to_thread(cli, "peers", "--data-dir", str(await serve(peers=rows)))
    _, fine, suspect, banned, validator = ran.out.splitlines()
    assert " 321 " in fine
    assert "suspicious, 62% of the way to a ban" in suspect
    assert "banned: because" in banned
    assert banned.rstrip().endswith("...")
    assert "12 audits made" in validator


async def test_peers_before_the_first_peer(cli: Cli, serve: Serve) -> None:
    ran = await asyncio.to_thread(cli, "peers", "--data-dir", str(await serve(peers=[])))
    assert ran.out == "no peers yet\n"


async def test_status_fits_a_screen_and_says_what_matters(cli: Cli, serve: Serve) -> None:
    ran = await asyncio.to_thread(cli, "status", "--data-dir", str(await serve(status=STATUS)))
    assert ran.code == 0
    assert len(ran.out.splitlines()) <= 24
    for part in (
        *("cdcdcdcdcd", "demo", "3 of 10", "0.50", "9 accepted", "1 min 15 s"),
        *("7 rejected (bad_reward 5, stale 2)", "ababababab 75 B (75%), trainer 25 B (25%)"),
    ):
        assert part in ran.out


async def test_status_of_a_worker_says_how_its_engine_does(cli: Cli, serve: Serve) -> None:
    engine = EngineRow("vllm", inflight=250, cap=256, running=240, waiting=10, kv_use=0.43)
    worker = msgspec.structs.replace(STATUS, role="inference", engine=engine)
    worker.event_loop_lag = {"mean": 0.0012, "max": 0.03}
    node = await serve(status=worker)
    shown = (await asyncio.to_thread(cli, "status", "--data-dir", str(node))).out
    assert "vllm: 250 of 256 in flight, 240 running, 10 waiting, cache 43%" in shown
    assert "mean 1.2 ms, max 30.0 ms" in shown
    assert "Down" not in shown
    worker.engine = msgspec.structs.replace(engine, restarts=2, fault="out of memory: lower it")
    shown = (await asyncio.to_thread(cli, "status", "--data-dir", str(node))).out
    assert "restarted 2 times. Down: out of memory: lower it" in " ".join(shown.split())


async def test_json_is_exactly_the_data(cli: Cli, serve: Serve) -> None:
    node = str(await serve(peers=[PEER], status=STATUS, ticket={"ticket": "T"}))
    for command, rows in (("peers", [PEER]), ("status", STATUS), ("ticket", {"ticket": "T"})):
        ran = await asyncio.to_thread(cli, command, "--json", "--data-dir", node)
        assert json.loads(ran.out) == json.loads(msgspec.json.encode(rows))


async def test_ticket_prints_the_ticket_alone(cli: Cli, serve: Serve) -> None:
    node = await serve(ticket={"ticket": "primerl1-abc"})
    ran = await asyncio.to_thread(cli, "ticket", "--data-dir", str(node))
    assert ran.out == "primerl1-abc\n"


async def test_a_node_without_that_command_says_which_it_has(cli: Cli, serve: Serve) -> None:
    node = await serve(status=STATUS)
    ran = await asyncio.to_thread(cli, "ticket", "--data-dir", str(node))
    assert ran.code == 1
    assert "commands are: status" in ran.err


async def test_a_refusal_of_the_node_is_one_line(cli: Cli, serve: Serve) -> None:
    node = await serve(status=NodeError("not yet:\ntry again"))
    ran = await asyncio.to_thread(cli, "status", "--data-dir", str(node))
    assert (ran.code, ran.err) == (1, "primerl-node: error: not yet: try again\n")


async def test_stop_asks_and_says_when_the_node_is_still_there(cli: Cli, serve: Serve) -> None:
    node = str(await serve(stop={}))
    ran = await asyncio.to_thread(cli, "stop", "--wait", "0", "--data-dir", node, "--json")
    assert json.loads(ran.out) == {"data_dir": node, "stopped": False}
    ran = await asyncio.to_thread(cli, "stop", "--wait", "0.3", "--data-dir", node)
    assert ran.code == 1
    assert "still busy" in ran.err


def test_no_node_at_all(cli: Cli, home: Path) -> None:
    for args in (["status"], ["status", "--data-dir", str(home)]):
        ran = cli(*args)
        assert ran.code == 6
        assert "start one" in ran.err


async def test_the_running_node_is_found(cli: Cli, serve: Serve) -> None:
    register(await serve(status=STATUS), "inference", "r")
    ran = await asyncio.to_thread(cli, "status")
    assert (ran.code, ran.err) == (0, "")


async def test_of_several_nodes_the_trainer_is_asked_and_named(cli: Cli, serve: Serve) -> None:
    trainer = await serve("trainer", ticket={"ticket": "T"})
    register(trainer, "trainer", "r")
    register(await serve("worker", status=STATUS), "inference", "r")
    ran = await asyncio.to_thread(cli, "ticket")
    assert ran.out == "T\n"
    assert str(trainer) in ran.err
    assert "--data-dir" in ran.err


async def test_the_environment_names_the_node(
    cli: Cli, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIMERL_DATA_DIR", str(await serve(status=STATUS)))
    assert (await asyncio.to_thread(cli, "status")).code == 0
