"""`primerl-node peers`: who the node knows, and how they do."""

import json
from typing import Annotated, Any

import typer

from .target import AsJson, DataDir, find_node

Watch = Annotated[bool, typer.Option("--watch", "-w", help="Refresh until ctrl-C.")]


def run(data_dir: DataDir = None, as_json: AsJson = False, watch: Watch = False) -> None:
    """Show the peers of a running node.

    One line a peer: how it is reached and how fast, bytes to and from it, the policy version that it
    holds and how far that lags, leases, accepted and rejected rollouts with the commonest reason, trust
    (did its work check out) and reliability (does it answer).
    """
    from ..node.control import ask
    from .screen import refresh, write

    node = find_node(data_dir)

    def draw() -> Any:
        import msgspec

        from ..node.control import PeerRow
        from .tables import peers_table

        return peers_table(msgspec.convert(ask(node, "peers"), list[PeerRow]))

    if as_json:
        typer.echo(json.dumps(ask(node, "peers"), indent=2))
    elif watch:
        refresh(draw)
    else:
        write(draw())
