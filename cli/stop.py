"""`primerl-node stop`: end a running node."""

import json
import time
from typing import Annotated

import typer

from .target import AsJson, DataDir, find_node

POLL_S = 0.2


def run(
    data_dir: DataDir = None,
    wait_s: Annotated[
        float, typer.Option("--wait", help="Seconds to wait for its end; 0 only asks.")
    ] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Stop a running node in order: it finishes what must not be lost, and leaves."""
    from ..node.ops.control import ask, socket_path
    from ..node.ops.errors import NodeError

    node = find_node(data_dir)
    ask(node, "stop")
    deadline = time.monotonic() + wait_s
    while socket_path(node).exists() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    stopped = not socket_path(node).exists()
    if wait_s > 0 and not stopped:
        raise NodeError(f"the node in {node} was asked to stop and is still busy: look at its log")
    answer = {"data_dir": str(node), "stopped": stopped}
    state = "stopped" if stopped else "stopping"
    typer.echo(json.dumps(answer) if as_json else f"{state}: {node}")
