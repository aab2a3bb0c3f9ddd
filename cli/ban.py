"""`primerl-node ban`, `pardon` and `bans`: the operator of a trainer decides about a worker."""

from typing import Annotated

import typer

from ..node.ops.strict_json import to_json
from .command import AsJson, DataDir, find_node

Node = Annotated[
    str, typer.Argument(metavar="NODE", help="Its id as `peers` shows it, or the first digits.")
]


def ban(
    node: Node,
    why: Annotated[str, typer.Option("--why", help="Told to the worker.")] = "",
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Give a worker of the running trainer no more work.

    It gets no lease, and other nodes are not told to fetch weights from it. What it has on lease is still
    judged. The ban lasts until `pardon`, also when the trainer starts again.

    \b
    Examples:
      primerl-node ban 1f0c2a -d outputs/demo --why "its operator shares one key"
    """
    _tell("ban", "banned", data_dir, as_json, name=node, why=why)


def pardon(node: Node, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Forget what a trainer holds against a worker, bans included.

    It is a newcomer again: all its work is audited.
    """
    _tell("pardon", "pardoned", data_dir, as_json, name=node)


def bans(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List who is banned in the run of this trainer: since when, why, and the ticket that admitted it.

    Those that the trainer banned are there, those that you banned, and validators that it believes no more.
    """
    import msgspec

    from ..node.ops.control import ask
    from ..node.ops.figures import BanRow
    from .tables import bans_table, write

    rows = ask(find_node(data_dir), "bans")
    if as_json:
        typer.echo(to_json({"bans": rows}))
        return
    write(bans_table(msgspec.convert(rows, list[BanRow])))


def _tell(command: str, done: str, data_dir: DataDir, as_json: AsJson, **named: str) -> None:
    from ..node.ops.control import ask

    answer = ask(find_node(data_dir), command, **named)
    typer.echo(to_json(answer) if as_json else f"{done} {answer['node'][:10]}")
