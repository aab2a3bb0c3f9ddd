"""`status`, `peers` and `stop`, and which node they ask."""

import io
import json
import time
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console
from support.figures import PEER, STATUS

from primerl.cli import tables
from primerl.cli.tables import fitted, group, peers_table, status_lines
from primerl.node.errors import NodeError
from primerl.node.ops import control, figures
from primerl.node.storage.run_files import SETTINGS

from .conftest import Ask, Cli, Serve, Terminal


def drawn(*rows: figures.PeerRow, width: int = 300) -> list[str]:
    screen = Console(file=io.StringIO(), width=width)
    screen.print(peers_table(rows, width=width))
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue().splitlines()


def lines_of(**more: Any) -> dict[str, str]:
    return dict(status_lines(replace(STATUS, **more)))


async def test_peers_shows_one_line_a_peer(ask: Ask, serve: Serve) -> None:
    ran = await ask("peers", "-d", str(await serve(peers=[PEER])))
    assert ran.code == 0
    head, row = ran.out.splitlines()
    assert head.split()[:3] == ["PEER", "ROLE", "PATH"]
    for cell in (
        *("ababababab", "inference", "direct", "1.2 ms", "1.5 MB", "999 B", " 7 ", "30/4 (stale)"),
        *("0.90", "3 s ago", "0.1.0 [bold]"),
    ):
        assert cell in row
    nobody = await ask("peers", "-d", str(await serve("alone", peers=[])))
    assert nobody.out == "no peers yet\n"


def test_a_node_that_only_asked_something_and_is_gone_is_not_listed() -> None:
    passer = replace(PEER, role="?", path="-", ticket="", accepted=0, rejected=0)
    assert drawn(passer) == ["no peers yet"]
    assert len(drawn(passer, PEER, replace(passer, refused="its key was retired"))) == 3


def test_a_peer_is_shown_by_its_name_beside_its_id() -> None:
    assert drawn(replace(PEER, name="[b]anna"))[1].startswith("ababababab [b]anna ")


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ({"audited": 321}, ""),
        ({"suspicion": 0.625}, "suspicious, 62% of the way to a ban"),
        ({"refused": "banned: " + "because " * 20}, "banned: because because because because becau..."),
        ({"role": "validator", "audits": 12}, "12 audits made"),
        ({"silent_s": 61.0}, "silent 1 min 01 s"),
        ({"silent_s": 5.0, "left": True}, "left 5 s"),
        ({"stage": "1/2, layers 14-27"}, "stage 1/2, layers 14-27"),
    ],
)  # fmt: skip
def test_a_peer_says_what_an_operator_should_notice(more: dict[str, Any], state: str) -> None:
    row = drawn(replace(PEER, **more))[1]
    assert row.rstrip().endswith(state or "0.1.0 [bold]")
    assert (" 321 " in row) == ("audited" in more)


def test_trust_is_one_figure_or_where_a_peer_works_for_several_environments_one_for_each() -> None:
    assert " 0.90 " in drawn(replace(PEER, trusts={"sums": 0.9}))[1]
    several = replace(PEER, trusts={"sums": 0.98, "words": 0.9})
    assert " sums 0.98, words 0.90 " in drawn(several)[1]
    worker = lines_of(role="inference", trust=0.9, trusts={"sums": 0.98, "words": 0.9})
    assert worker["rollouts"].endswith("trust sums 0.98, words 0.90")


def test_a_narrow_terminal_shows_whole_ids_and_versions_and_leaves_out_what_matters_least() -> None:
    rows = [PEER, replace(PEER, short="0123456789", refused="banned: " + "because " * 20)]
    for width in (60, 80, 100, 160):
        head, banned, fine = drawn(*rows, width=width)
        assert {"PEER", "ROLE", "VER", "OK/REJECTED"} <= set(head.split())
        assert max(len(line.rstrip()) for line in (head, banned, fine)) <= width
        assert fine.startswith("ababababab  inference")
        assert banned.startswith("0123456789  inference")
        assert "\u2026" not in fine  # nothing but a long reason is cut off
        assert " 7 " in fine
    reason = "too much was rejected: bad_reward"
    assert reason[:24] in drawn(replace(PEER, refused=reason), width=80)[1]
    for column in ("SOFTWARE", "SENT", "RTT", "REL"):
        assert column not in drawn(*rows, width=80)[0]
    assert "SOFTWARE" in drawn(*rows, width=200)[0]


async def test_peers_in_a_pipe_are_as_wide_as_they_are_or_as_COLUMNS_says(
    ask: Ask, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = str(await serve(peers=[PEER]))
    assert "SOFTWARE" in (await ask("peers", "-d", node)).out
    monkeypatch.setenv("COLUMNS", "80")
    narrow = (await ask("peers", "-d", node)).out
    assert "SOFTWARE" not in narrow
    assert max(map(len, narrow.splitlines())) <= 80
    assert "SOFTWARE" in (await ask("peers", "--wide", "-d", node)).out


async def test_peers_are_sorted_by_a_column_and_a_wrong_one_is_refused_with_the_nearest(
    ask: Ask, serve: Serve
) -> None:
    rows = [
        replace(PEER, short="a", trust=0.9, accepted=1, rtt_ms=None),
        replace(PEER, short="b", trust=0.1, accepted=5),
        replace(PEER, short="c", trust=0.5, accepted=9, path="-", last_seen_s=9e3),
    ]
    node = str(await serve(peers=rows))
    orders = {"trust": "bac", "OK/REJECTED": "bac", "rtt": "bac", "peer": "abc"}
    for column, order in orders.items():
        ran = await ask("peers", "--sort", column, "-d", node)
        assert "".join(line[0] for line in ran.out.splitlines()[1:]) == order  # a lost one is last
    (await ask("peers", "--sort", "tust", "-d", node)).refused(2, "did you mean trust?")


async def test_status_fits_a_screen_and_says_what_matters(ask: Ask, serve: Serve) -> None:
    ran = await ask("status", "-d", str(await serve(status=STATUS)))
    assert ran.code == 0
    assert len(ran.out.splitlines()) <= 24
    for part in (
        *("cdcdcdcdcd", "demo", "3 of 10", "0.50", "9 accepted", "1 min 15 s"),
        *("7 rejected (bad_reward 5, stale 2)", "ababababab 75 B (75%), trainer 25 B (25%)"),
    ):
        assert part in ran.out


def test_status_of_a_worker_says_how_its_engine_and_its_stage_do() -> None:
    engine = figures.EngineRow("vllm", inflight=250, cap=256, running=240, waiting=10, kv_use=0.43)
    lag = {"mean": 0.0012, "max": 0.03}
    shown = lines_of(role="inference", engine=engine, event_loop_lag=lag, leases=2)
    assert shown["engine"] == "vllm: 250 of 256 in flight, 240 running, 10 waiting, cache 43%"
    assert shown["loop lag"] == "mean 1.2 ms, max 30.0 ms"
    assert shown["leases"] == "2 held"
    broken = replace(engine, restarts=2, fault="out of memory: lower it")
    assert lines_of(role="inference", engine=broken)["engine"].endswith(
        "restarted 2 times. Down: out of memory: lower it"
    )
    stage = figures.StageRow("ab", 1, 0, 2, "0-13", "healthy", rtt_ms=20.0, lanes=4, in_flight=3)
    stage = replace(stage, round_ms=44.4, stall_share=0.25, breaks=1, bytes_out=1000)
    assert lines_of(role="inference", stage=stage)["stage"] == (
        "0 of 2, layers 0-13, healthy, 3 of 4 micro-batches under way, 20 ms to the next, 44 ms round, "
        "stalled 25%, broke 1 times, 1.0 kB out, 0 B in"
    )


MEASURED = figures.BoundsRow(
    "vllm 0.25.1 on H100, tp 1, bfloat16", 3, 640, 40960, 0, 12, 0.0047, 640, 2
)
UNMEASURED = figures.BoundsRow("hf 2.13.0 on cpu, tp 1, bfloat16", 0, 0, 0, 0, 0, 1.0, 24, 1)


def test_the_bounds_of_each_class_say_of_what_they_are_made() -> None:
    assert lines_of(bounds=[MEASURED])["bounds"] == (
        "vllm 0.25.1 on H100, tp 1, bfloat16: 640 rollouts of versions 0 to 12, at most 0.47% of honest "
        "ones rejected; 2 workers"
    )
    assert lines_of(bounds=[UNMEASURED])["bounds"] == (
        "hf 2.13.0 on cpu, tp 1, bfloat16: provisional, 24 rollouts of references are in; 1 worker"
    )


def test_a_worker_without_a_version_says_which_is_the_newest() -> None:
    assert lines_of(version=-1, newest_version=84)["policy"] == "none yet, the newest is version 84"
    assert lines_of(version=-1, newest_version=-1)["policy"] == "none yet"
    assert lines_of(version=83, newest_version=84)["policy"] == "version 83, 1 behind version 84"


def test_a_trainer_shows_its_pipelines() -> None:
    row = figures.GroupRow("ab12", 3, ["one", "two"], ["0-13", "14-27"], 1, 41.6, 8192, "planned")
    assert lines_of(pipelines=[row])["pipeline"] == (
        "ab12 planned, generation 3: one 0-13, two 14-27, 42 ms round, room for 8192 tokens, 1 spares"
    )
    assert " ms" not in group(replace(row, round_trip_ms=None))
    assert "pipeline" not in lines_of()


async def test_json_names_the_run_and_the_time(ask: Ask, serve: Serve) -> None:
    node = str(await serve(peers=[PEER], status=STATUS))
    for command, rows in (("peers", [PEER]), ("status", STATUS)):
        before = time.time()
        found = json.loads((await ask(command, "--json", "-d", node)).out)
        assert found.pop(command) == json.loads(msgspec.json.encode(rows))
        assert before - 1 < found.pop("time") < time.time() + 1
        assert found == {"schema": 1, "run": STATUS.run}


@pytest.mark.parametrize("as_json", [True, False])
async def test_watched_json_is_an_object_a_line_and_a_watched_pipe_gets_tables_with_their_time(
    ask: Ask, serve: Serve, as_json: bool
) -> None:
    answers = iter([[PEER], [PEER]])

    def peers() -> list[figures.PeerRow]:
        for rows in answers:
            return rows
        raise NodeError("it ends")

    node = str(await serve(peers=peers, status=STATUS))
    lines = (await ask("peers", "--watch", *(["--json"] * as_json), "-d", node)).out.splitlines()
    if as_json:
        assert [json.loads(line)["peers"][0]["short"] for line in lines] == [PEER.short] * 2
    else:
        assert len(lines) == 6  # a time, a head and a row, twice
        assert [line[:10] for line in lines[2::3]] == [PEER.short] * 2
        assert lines[0][:2] == "20"


async def test_a_refusal_of_the_node_is_one_line(ask: Ask, serve: Serve) -> None:
    node = str(await serve(status=NodeError("not yet:\ntry again")))
    (await ask("status", "-d", node)).refused(1, "not yet: try again")
    (await ask("ticket", "-d", node)).refused(
        1, "does not answer 'ticket', only status: ask its trainer"
    )


@pytest.mark.parametrize(
    ("width", "head"),
    [(80, ["NAME", "NOTE", "COUNT"]), (36, ["NAME", "NOTE"]), (12, ["NAME"])],
)
def test_a_narrow_terminal_shows_the_columns_that_matter_most(
    width: int, head: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Console(width=width, file=io.StringIO(), color_system=None)
    monkeypatch.setattr(tables, "console", lambda: screen)
    rows = [("sort-digits", "reads a data set [of] a hub", "12"), ("math", "", "3")]
    screen.print(fitted(("NAME", "NOTE", "COUNT"), rows, elastic=("NOTE",), drop=("COUNT",)))
    lines = cast(io.StringIO, screen.file).getvalue().splitlines()
    assert lines[0].split() == head
    assert all(len(line) <= width for line in lines)
    assert lines[1].startswith("sort-digits")
    assert ("[of] a hub" in lines[1]) == (width == 80)


async def test_a_run_s_directory_stands_for_its_trainer(
    ask: Ask, serve: Serve, short_dir: Path
) -> None:
    trainer = await serve(status=STATUS)
    (short_dir / "run").mkdir()
    (short_dir / "run" / "trainer").symlink_to(trainer)
    for directory in (short_dir / "run", trainer):
        assert "running" in (await ask("status", "-d", str(directory))).out


def test_the_status_of_a_worker_that_ended_says_how_its_work_went(cli: Cli, tmp_path: Path) -> None:
    line = ("status", "-d", str(tmp_path))
    last = tmp_path / "last_status.json"
    for text, work in (
        (
            '{"accepted": 368, "rejected": {"stale": 8}}',
            "368 rollouts accepted, 8 rejected (stale 8)",
        ),
        ("[]", "no node runs in"),
        ('{"accepted": 1, "rejected": 3}', "no node runs in"),
    ):
        last.write_text(text)
        cli(*line).refused(6, "no node runs in", work)


async def test_stop_asks_and_says_when_the_node_is_still_there(ask: Ask, serve: Serve) -> None:
    node = str(await serve(stop={}))
    ran = await ask("stop", "--wait", "0", "-d", node, "--json")
    assert json.loads(ran.out) == {"data_dir": node, "stopped": False}
    (await ask("stop", "--wait", "0.3", "-d", node)).refused(1, "still busy")


async def test_of_several_nodes_none_is_stopped_unless_one_is_named(
    ask: Ask, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[str] = []
    nodes = {
        name: await serve(f"{name} dir", stop=lambda name=name: stopped.append(name))
        for name in ("trainer", "worker")
    }
    for name, node in nodes.items():
        control.register(node, name, f"run of {name}")
    for args in (("stop",), ("stop", "--json"), ("stop", "--wait", "0")):
        ran = await ask(*args)
        ran.refused(2, "2 nodes run here", *(f"--data-dir '{node}'" for node in nodes.values()))
    assert stopped == []

    monkeypatch.setattr("sys.stdin", Terminal("\nnone\n3\n2\n"))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for _ in range(3):
        ran = await ask("stop", "--wait", "0")
        assert ran.code == 2
        assert "nothing was done" in ran.err
    (await ask("stop", "--json")).refused(2, "2 nodes run here")
    ran = await ask("stop", "--wait", "0")
    shown = [line.split()[:2] for line in ran.out.splitlines()[:2]]
    assert shown == [["1", "worker"], ["2", "trainer"]]
    assert stopped == ["trainer"]
    assert (await ask("stop", "--wait", "0", "-d", str(nodes["worker"]))).code == 0
    assert stopped == ["trainer", "worker"]


async def test_the_nodes_that_rl_started_are_stopped_by_their_trainer(
    ask: Ask, serve: Serve
) -> None:
    stopped: list[str] = []

    async def start(name: str, role: str, *, of_rl: bool) -> None:
        node = await serve(name, stop=lambda: stopped.append(name))
        if of_rl:
            (node / SETTINGS).write_text("")
        control.register(node, role, "r")

    await start("trainer", "trainer", of_rl=False)
    await start("worker_1", "inference", of_rl=True)
    assert (await ask("stop", "--wait", "0")).code == 0
    assert stopped == ["trainer"]
    await start("worker_2", "inference", of_rl=False)
    (await ask("stop", "--wait", "0")).refused(2, "2 nodes run here", "worker_2")


# -- which node is asked ---------------------------------------------------------------------------


def test_no_node_at_all(cli: Cli) -> None:
    for args in (["status"], ["status", "-d", "."]):
        cli(*args).refused(6, "start one")


async def test_the_running_node_is_found_and_of_several_the_trainer(
    ask: Ask, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await serve("worker", status=STATUS)
    control.register(worker, "inference", "r")
    ran = await ask("status")
    assert (ran.code, ran.err) == (0, "")
    trainer = await serve("trainer", ticket={"ticket": "T"})
    control.register(trainer, "trainer", "r")
    ran = await ask("ticket")
    assert ran.out == "T\n"
    assert str(trainer) in ran.err
    assert "--data-dir" in ran.err
    assert len(ran.err.splitlines()) == 1
    assert "worker" not in ran.err  # one short line, however many there are
    monkeypatch.setenv("PRIMERL_DATA_DIR", str(worker))
    assert (await ask("status")).err == ""


def test_a_judge_shows_the_prompts_that_wait() -> None:
    shown = lines_of(role="judge", leases=2, waiting_groups=5)
    assert shown["leases"] == "2 out, 5 prompts waiting"
