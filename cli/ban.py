"""`primerl-node ban`, `pardon` and `bans`: the operator of a trainer decides about a worker."""

from typing import Annotated

import typer

from ..node.ops.strict_json import to_json
from .command import AsJson, DataDir, find_node
from .ticket import seconds

Node = Annotated[
    str, typer.Argument(metavar="NODE", help="Its id as `peers` shows it, or the first digits.")
]


def ban(
    node: Node,
    lasts: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="TIME",
            help="End it after this time: 90m, 12h, 3d, 2w; default: never.",
        ),
    ] = None,
    reason: Annotated[str, typer.Option("--reason", "--why", help="Told to the worker.")] = "",
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Give a worker of the running trainer no more work.

    It gets no lease, and other nodes are not told to fetch weights from it. What it has on lease is still
    judged. The ban lasts for the time given, else until `pardon`, also when the trainer starts again. When it
    ends the worker is leased work with the trust that its own work earned, no more and no less. A ban without
    an end, of the trainer's own or of yours, is not shortened: `pardon` first.

    \b
    Examples:
      primerl-node ban 1f0c2a -d outputs/demo --reason "its operator shares one key"
      primerl-node ban 1f0c2a --for 3d --reason "its clock is wrong"
    """
    import msgspec

    from ..node.ops.control import ask
    from ..node.ops.figures import BanRow
    from .tables import local_time

    options = {"lasts_s": seconds(lasts)} if lasts else {}
    answer = ask(find_node(data_dir), "ban", name=node, why=reason, **options)
    if as_json:
        typer.echo(to_json({"node": answer["id"], **answer}))
        return
    row = msgspec.convert(answer, BanRow)
    until = local_time(row.until) if row.until else "it is pardoned"
    typer.echo(f"banned {row.short} until {until}: {row.why}")


def pardon(node: Node, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Forget what a trainer holds against a worker, bans included.

    It is a newcomer again: all its work is audited.
    """
    from ..node.ops.control import ask

    answer = ask(find_node(data_dir), "pardon", name=node)
    typer.echo(to_json(answer) if as_json else f"pardoned {answer['node'][:10]}")


def bans(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List who is banned in the run of this trainer: since when, until when, why, and by which ticket it came.

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
