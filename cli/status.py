"""`primerl-node status`: how a running node is doing, on one screen."""

import json
from typing import Any

import typer

from .peers import Watch
from .target import AsJson, DataDir, find_node


def run(data_dir: DataDir = None, as_json: AsJson = False, watch: Watch = False) -> None:
    """Show how a running node is doing: phase, step, policy version, rollouts, bytes."""
    from ..node.control import ask
    from .screen import refresh, write

    node = find_node(data_dir)

    def draw() -> Any:
        import msgspec

        from ..node.control import Status
        from .tables import status_table

        return status_table(msgspec.convert(ask(node, "status"), Status))

    if as_json:
        typer.echo(json.dumps(ask(node, "status"), indent=2))
    elif watch:
        refresh(draw)
    else:
        write(draw())
