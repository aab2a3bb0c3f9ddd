"""`primerl-node status`, `peers` and `stop`: ask a running node."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ..node.ops.strict_json import to_json
from .command import AsJson, DataDir, choose_node, find_node

Watch = Annotated[
    bool,
    typer.Option(
        "--watch", "-w", help="Refresh until ctrl-C; with --json one object a line, every second."
    ),
]
POLL_S = 0.2


def peers(
    data_dir: DataDir = None,
    as_json: AsJson = False,
    watch: Watch = False,
    wide: Annotated[
        bool, typer.Option("--wide", help="All columns, however narrow the terminal is.")
    ] = False,
    sort: Annotated[
        str,
        typer.Option(
            "--sort", metavar="COLUMN", help="Order the table by a column: trust, lag, seen .."
        ),
    ] = "",
) -> None:
    """Show the peers of a running node.

    One line a peer: how it is reached and how fast, bytes to and from it, the policy version that it
    holds and how far that lags, leases, accepted and rejected rollouts with the commonest reason, trust
    (did its work check out, for each environment) and reliability (does it answer). A narrow terminal shows
    the columns that matter most; peers that are gone come last.

    \b
    Examples:
      primerl-node peers --watch
      primerl-node peers --wide --sort trust           the least trusted first
      primerl-node peers --watch --json | jq '.peers[] | {short, lag}'
    """
    import msgspec

    from ..node.ops.figures import PeerRow
    from .tables import peers_table, show_answer

    def draw(answer: Any, width: int | None) -> Any:
        return peers_table(msgspec.convert(answer, list[PeerRow]), width=width, sort=sort)

    show_answer(find_node(data_dir), "peers", draw, as_json=as_json, watch=watch, wide=wide)


def top(data_dir: DataDir = None) -> None:
    """Show the nodes of this machine and the peers of one of them, live; with --data-dir one node alone.

    Keys: s sorts by the next column, r reverses, / filters, Enter shows a peer with the verdicts on its work,
    n goes to the next node, q quits. 80 columns are enough; a wider terminal shows more.
    """
    import sys

    from ..node.errors import UsageError
    from ..node.ops.control import NodeState, running
    from .top import TopScreen

    if not sys.stdout.isatty():
        raise UsageError("top needs a terminal: `primerl-node peers --watch` writes to a pipe")

    def nodes() -> list[NodeState]:
        entries = [(entry.role, Path(entry.data_dir)) for entry in running()]
        if data_dir is not None:
            node = find_node(data_dir)
            entries = [entry for entry in entries if entry[1] == node.resolve()] or [("", node)]
        # the trainer first
        entries.sort(key=lambda entry: (entry[0] != "trainer", entry[1]))
        return [NodeState(directory.name, directory) for _, directory in entries]

    if data_dir is None and not nodes():
        find_node(None)  # says what to do
    TopScreen(nodes).run()


def status(data_dir: DataDir = None, as_json: AsJson = False, watch: Watch = False) -> None:
    """Show how a running node is doing: phase, step, policy version, rollouts, bytes."""
    import msgspec

    from ..node.errors import NetworkError
    from ..node.ops.figures import Status
    from .tables import label_table, show_answer, status_lines

    def draw(answer: Any, width: int | None) -> Any:
        del width  # values are folded
        return label_table(status_lines(msgspec.convert(answer, Status)))

    node = find_node(data_dir)
    try:
        show_answer(node, "status", draw, as_json=as_json, watch=watch)
    except NetworkError as error:
        raise NetworkError(f"{error}{_work_of_the_last(node)}") from error


def _work_of_the_last(data_dir: Path) -> str:
    """Count the rollouts of the worker that ran last in a data directory; empty if none did."""
    from .tables import rejected

    try:
        last = json.loads((data_dir / "last_status.json").read_text(encoding="utf-8"))
        work = f"{last['accepted']} rollouts accepted, {rejected(last['rejected'])}"
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return ""
    return f"; the last one here had {work} (`primerl-node explain --list` shows the verdicts)"


def stop(
    data_dir: DataDir = None,
    wait_s: Annotated[
        float, typer.Option("--wait", help="Seconds to wait for its end; 0 only asks.")
    ] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Stop a running node in order: it finishes what must not be lost, and leaves.

    Where several run, --data-dir says which one; without it they are listed and you choose.
    """
    from ..node.errors import NodeError
    from ..node.ops.control import ask
    from ..node.storage.run_files import socket_path

    node = choose_node(data_dir, ask=not as_json)
    ask(node, "stop")
    deadline = time.monotonic() + wait_s
    while socket_path(node).exists() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    stopped = not socket_path(node).exists()
    if wait_s > 0 and not stopped:
        raise NodeError(f"the node in {node} was asked to stop and is still busy: look at its log")
    answer = {"data_dir": str(node), "stopped": stopped}
    state = "stopped" if stopped else "stopping"
    typer.echo(to_json(answer) if as_json else f"{state}: {node}")
