"""`primerl-node peers`: who the node knows, and how they do."""

from typing import Annotated, Any

import typer

from .target import AsJson, DataDir, find_node

Watch = Annotated[
    bool,
    typer.Option(
        "--watch", "-w", help="Refresh until ctrl-C; with --json one object a line, every second."
    ),
]


def run(
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
    (did its work check out) and reliability (does it answer). A narrow terminal shows the columns that
    matter most; peers that are gone come last.

    \b
    Examples:
      primerl-node peers --watch
      primerl-node peers --wide --sort trust           the least trusted first
      primerl-node peers --watch --json | jq '.peers[] | {short, lag}'
    """
    import msgspec

    from ..node.ops.control import PeerRow
    from .screen import listing
    from .tables import PEER_COLUMNS, named, peers_table

    column = named(PEER_COLUMNS, sort) if sort else None

    def draw(answer: Any, width: int | None) -> Any:
        return peers_table(msgspec.convert(answer, list[PeerRow]), width=width, sort=column)

    listing(find_node(data_dir), "peers", draw, as_json=as_json, watch=watch, wide=wide)
