import asyncio
import io
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from primerl.cli.tables import peers_table
from primerl.node.ops.control import ControlServer, EngineRow, PeerRow, Status, register
from primerl.node.ops.errors import NodeError

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


async def test_json_says_of_which_run_and_when_it_is(cli: Cli, serve: Serve) -> None:
    node = str(await serve(peers=[PEER], status=STATUS, ticket={"ticket": "T"}))
    for command, rows in (("peers", [PEER]), ("status", STATUS)):
        before = time.time()
        found = json.loads((await asyncio.to_thread(cli, command, "--json", "-d", node)).out)
        assert found.pop(command) == json.loads(msgspec.json.encode(rows))
        assert before - 1 < found.pop("time") < time.time() + 1
        assert found == {"schema": 1, "run": STATUS.run}
    ran = await asyncio.to_thread(cli, "ticket", "--json", "--data-dir", node)
    assert json.loads(ran.out) == {"ticket": "T"}


async def test_watched_json_is_an_object_a_line_and_a_watched_pipe_gets_tables_with_their_time(
    cli: Cli, short_dir: Path
) -> None:
    for more in (["--json"], []):
        answers = iter([[PEER], [PEER]])

        async def peers(left: Iterator[list[PeerRow]] = answers) -> list[PeerRow]:
            rows = next(left, None)
            if rows is None:
                raise NodeError("it ends")
            return rows

        async def status() -> Status:
            return STATUS

        server = ControlServer(short_dir / "n", {"peers": peers, "status": status})
        await server.start()
        try:
            where = ("--data-dir", str(short_dir / "n"))
            ran = await asyncio.to_thread(cli, "peers", "--watch", *more, *where)
        finally:
            await server.close()
        lines = ran.out.splitlines()
        if more:
            assert [json.loads(line)["peers"][0]["short"] for line in lines] == [PEER.short] * 2
        else:
            assert len(lines) == 6  # a time, a head and a row, twice
            assert PEER.short in lines[2]
            assert PEER.short in lines[5]
            assert lines[0][:2] == "20"


def a_screen(width: int, rows: list[PeerRow]) -> list[str]:
    screen = Console(file=io.StringIO(), width=width)
    screen.print(peers_table(rows, width=width))
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue().splitlines()


def test_a_narrow_terminal_shows_whole_ids_and_versions_and_leaves_out_what_matters_least() -> None:
    rows = [
        PEER,
        msgspec.structs.replace(PEER, short="0123456789", refused="banned: " + "because " * 20),
    ]
    for width in (60, 80, 100, 160):
        head, *lines = a_screen(width, rows)
        assert {"PEER", "ROLE", "VER", "OK/REJECTED"} <= set(head.split())
        assert max(len(line.rstrip()) for line in [head, *lines]) <= width
        fine, banned = sorted(lines, reverse=True)
        assert fine.startswith("ababababab  inference")
        assert banned.startswith("0123456789  inference")
        assert "\u2026" not in fine  # nothing but a long reason is cut off
        assert " 7 " in fine
    reason = "too much was rejected: bad_reward"
    refused = msgspec.structs.replace(PEER, refused=reason)
    assert reason[:24] in a_screen(80, [refused])[1]
    for column in ("SOFTWARE", "SENT", "RTT", "REL"):
        assert column not in a_screen(80, rows)[0]
    assert "SOFTWARE" in a_screen(200, rows)[0]


async def test_peers_are_sorted_by_a_column_and_a_wrong_one_is_refused_with_the_nearest(
    cli: Cli, serve: Serve
) -> None:
    rows = [
        msgspec.structs.replace(PEER, short="a", trust=0.9, accepted=1, rtt_ms=None),
        msgspec.structs.replace(PEER, short="b", trust=0.1, accepted=5),
        msgspec.structs.replace(PEER, short="c", trust=0.5, accepted=9, path="-", last_seen_s=9e3),
    ]
    node = str(await serve(peers=rows))
    for column, order in (
        ("trust", "bac"),
        ("OK/REJECTED", "bac"),
        ("rtt", "bac"),
        ("peer", "abc"),
    ):
        ran = await asyncio.to_thread(cli, "peers", "--sort", column, "-d", node)
        assert "".join(line[0] for line in ran.out.splitlines()[1:]) == order  # who is gone is last
    ran = await asyncio.to_thread(cli, "peers", "--sort", "tust", "-d", node)
    assert (ran.code, ran.out) == (2, "")
    assert "did you mean trust?" in ran.err


async def test_a_peer_that_is_silent_says_so(cli: Cli, serve: Serve) -> None:
    rows = [
        msgspec.structs.replace(PEER, short="a", silent_s=61.0),
        msgspec.structs.replace(PEER, short="b", silent_s=5.0, left=True),
    ]
    ran = await asyncio.to_thread(cli, "peers", "-d", str(await serve(peers=rows)))
    assert [line.rstrip().rpartition("  ")[2] for line in ran.out.splitlines()[1:]] == [
        "silent 1 min 01 s",
        "left 5 s",
    ]


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
    assert len(ran.err.splitlines()) == 1
    assert "worker" not in ran.err  # one short line, however many there are


async def test_the_environment_names_the_node(
    cli: Cli, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIMERL_DATA_DIR", str(await serve(status=STATUS)))
    assert (await asyncio.to_thread(cli, "status")).code == 0
