"""`primerl-node top`: what its screen shows, by keys, in the terminal of textual's own tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from rich.console import Console
from support.figures import PEER, TRAINER, WORKER
from textual.widgets import DataTable, Static

from primerl.cli.top import MAX_ROWS, TopScreen
from primerl.node.ops.control import NodeState
from primerl.node.ops.figures import NodeFigures, PeerRow

from .conftest import Cli, Serve

SECOND = replace(PEER, id="01" * 32, short="0101010101", trust=0.4, silent_s=61.0, accepted=99)
NEVER_S = 3600.0


def verdicts() -> list[dict[str, Any]]:
    line = {"lease": 3, "accepted": 1, "rejected": 2, "audited": 1, "fault": ""}
    return [{**line, "reason": "bad_reward"}]


async def screen(
    serve: Serve, *peers: PeerRow, names: Sequence[str] = ("trainer",)
) -> tuple[TopScreen, list[NodeState]]:
    """A screen of nodes, the first a trainer with these peers."""
    nodes: list[NodeState] = []
    for name in names:
        status = TRAINER if name == "trainer" else WORKER
        figures = NodeFigures(0.0, status, list(peers))
        directory = await serve(name, figures=figures, verdicts=verdicts)
        nodes.append(NodeState(name, directory))
    return TopScreen(lambda: nodes, NEVER_S), nodes


def head(app: TopScreen) -> str:
    return drawn(app.query_one("#head", Static).content)


def drawn(renderable: Any) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def column(app: TopScreen, name: str) -> list[str]:
    table = app.query_one("#peers", DataTable)
    labels = [str(one.label).split(" ")[0] for one in table.ordered_columns]
    at = labels.index(name)
    return [str(table.get_row_at(row)[at]) for row in range(table.row_count)]


async def test_nodes_and_peers_fit_80_columns(serve: Serve) -> None:
    app, _ = await screen(serve, PEER, SECOND, names=("trainer", "worker_1"))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        shown = head(app)
        for words in (
            "> ",
            "trainer",
            "3/10",
            "1.50",
            "400.0 MB",
            "3.50",
            "75%",
            "12 of 16 groups are in",
        ):
            assert words in shown
        assert "2 of 2 peers" in shown
        table = app.query_one("#peers", DataTable)
        assert {"PEER", "ROLE", "VER", "OK/REJECTED"} <= {
            str(c.label) for c in table.ordered_columns
        }
        assert table.virtual_size.width <= 80


async def test_keys_sort_filter_and_open_a_peer_with_its_verdicts(serve: Serve) -> None:
    app, _ = await screen(serve, PEER, SECOND)
    async with app.run_test(size=(160, 40)) as pilot:
        await pilot.pause()
        assert column(app, "PEER") == ["0101010101", "ababababab"]
        while "TRUST v" not in [
            str(c.label) for c in app.query_one("#peers", DataTable).ordered_columns
        ]:
            await pilot.press("s")
        assert column(app, "TRUST") == ["0.40", "0.90"]
        await pilot.press("r")
        assert column(app, "TRUST") == ["0.90", "0.40"]
        await pilot.press("slash", *"silent")
        await pilot.press("enter")
        assert column(app, "PEER") == ["0101010101"]
        assert "1 of 2 peers with 'silent'" in head(app)
        await pilot.press("enter")
        await app.workers.wait_for_complete()
        await pilot.pause()
        texts = "".join(drawn(part.content) for part in app.screen.query(Static))
        assert SECOND.id in texts
        assert "bad_reward" in texts
        await pilot.press("escape")
        await pilot.press("escape")
        assert len(column(app, "PEER")) == 2


async def test_the_next_node_s_peers_are_a_key_away_and_a_node_that_is_not_up_says_so(
    serve: Serve, short_dir: Path
) -> None:
    app, nodes = await screen(serve, PEER, names=("trainer", "worker_1"))
    nodes.append(NodeState("worker_2", short_dir / "none"))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert app.node is nodes[0]
        await pilot.press("n")
        assert app.node is nodes[1]
        assert "worker_2" in head(app)
        assert "starting" in head(app)
        await pilot.press("n", "n")
        assert app.node is nodes[0]
        nodes.clear()
        await app.look()
        assert "no node runs" in head(app)


async def test_strangers_text_is_text_and_a_crowd_is_cut(serve: Serve) -> None:
    odd = replace(PEER, short="[red]x[/]", refused="\x1b[2Jgone\u202e [blink]", role="a\nb")
    crowd = [replace(PEER, id=f"{at:064x}", short=f"n{at}") for at in range(MAX_ROWS + 50)]
    app, _ = await screen(serve, odd, *crowd)
    async with app.run_test(size=(200, 40)) as pilot:
        await pilot.pause()
        assert app.query_one("#peers", DataTable).row_count == MAX_ROWS
        assert f"{MAX_ROWS + 51} of {MAX_ROWS + 51} peers" in head(app)
        await pilot.press("slash", *"blink", "enter")
        assert column(app, "PEER") == ["[red]x[/]"]
        assert column(app, "STATE") == ["?[2Jgone? [blink]"]


def test_in_a_pipe_it_is_refused(cli: Cli) -> None:
    cli("top").refused(2, "peers --watch")
