"""`primerl-node ticket`: the running trainer's join tickets."""

import re
import time
from typing import Annotated, Any

import typer

from ..node.ops.strict_json import to_json
from .command import AsJson, DataDir, find_node

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    help="""Print the join ticket of the trainer that runs here, or issue a new one.

Without options it is the trainer's own, which is renewed long before it expires. A ticket is a secret: with it
anybody may join under keys of their own, up to its uses. Nodes once admitted need it no more.

\b
Examples:
  primerl-node ticket > run.ticket
  primerl-node ticket --label anna --uses 2 --expires 30d
  primerl-node ticket list
  primerl-node ticket revoke anna
""",
)


@app.callback(invoke_without_command=True)
def show(
    ctx: typer.Context,
    expires: Annotated[
        str | None,
        typer.Option("--expires", help="A new ticket, valid for this time: 90m, 12h, 30d, 2w."),
    ] = None,
    uses: Annotated[
        int | None,
        typer.Option(
            "--uses", help="A new ticket that admits this many nodes; 0: any number.", min=0
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            "--label", help="A new ticket with this name, shown to its holder and used by `revoke`."
        ),
    ] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Print a ticket."""
    if ctx.invoked_subcommand is not None:
        return
    from ..node.ops.control import ask

    options = {"expires_s": seconds(expires) if expires else None, "uses": uses, "label": label}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    answer = ask(find_node(data_dir), "ticket", **given)
    typer.echo(to_json(answer) if as_json else answer["ticket"])


@app.command("list", short_help="The tickets that the trainer issued.")
def show_list(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the tickets that the trainer of this run issued, and how many nodes each admitted."""
    from ..node.ops.control import ask

    rows = ask(find_node(data_dir), "tickets")
    if as_json:
        typer.echo(to_json({"tickets": rows}))
        return
    now = time.time()
    typer.echo(f"{'ID':<10} {'LABEL':<20} {'ADMITTED':>10}  {'EXPIRES':<16} STATE")
    for row in rows:
        admitted = f"{row['admitted']}/{row['uses']}" if row["uses"] else str(row["admitted"])
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["expires"]))
        label = row["label"] or "-"
        typer.echo(f"{row['id'][:10]:<10} {label:<20} {admitted:>10}  {until} {state(row, now)}")


@app.command("revoke", short_help="Stop a ticket from admitting nodes.")
def revoke(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Its label, or the beginning of its id.")
    ],
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Stop a ticket, or all of a label, from admitting nodes. Nodes that it admitted stay."""
    from ..node.ops.control import ask

    rows = ask(find_node(data_dir), "revoke", name=name)
    if as_json:
        typer.echo(to_json({"revoked": rows}))
        return
    for row in rows:
        typer.echo(
            f"revoked {row['id'][:10]} ({row['label'] or 'no label'}): the {row['admitted']} node(s) "
            "that it admitted stay"
        )


def state(row: dict[str, object], now: float) -> str:
    """Return whether a ticket still admits nodes."""
    if row["revoked"]:
        return "revoked"
    if float(str(row["expires"])) < now:
        return "expired"
    return "used up" if row["uses"] and row["admitted"] == row["uses"] else "valid"


def seconds(text: str) -> int:
    """Read a duration like 30d, in seconds. Raises UsageError."""
    from ..node.errors import UsageError

    match = re.fullmatch(r"(\d{1,9})([smhdw])", text.strip())
    if match is None:
        raise UsageError(f"{text[:20]!r} is no duration: say 90m, 12h, 30d or 2w")
    return int(match[1]) * UNITS[match[2]]
