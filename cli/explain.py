"""`primerl-node explain`: why the trainer accepted or rejected a submission, with the evidence."""

from pathlib import Path
from typing import Annotated

import typer

from .target import AsJson, DataDir, default_data_dir


def run(
    verdict: Annotated[
        str,
        typer.Argument(
            metavar="[VERDICT]",
            help="A lease id, or the first digits of a submission's digest; else the latest rejected one.",
        ),
    ] = "",
    data_dir: DataDir = None,
    everything: Annotated[
        bool, typer.Option("--list", "-l", help="One line for each of the newest verdicts.")
    ] = False,
    last: Annotated[int, typer.Option("--last", min=1, help="How many --list shows.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Explain a verdict: which check failed, what was measured, what that proves, and where to look.

    Without an argument the latest with rejections, or, where nothing was rejected, the latest.
    Reads the ledger of a worker or of a trainer; needs no network, and the node may run or be gone. The
    trainer's signature is checked first.

    \b
    Examples:
      primerl-node explain --data-dir worker            the latest that was rejected
      primerl-node explain 4294967298 -d worker         by lease
      primerl-node explain 1f0c -d outputs/demo         by digest, at the trainer
      primerl-node explain --list
    """
    import msgspec

    from ..node.ops import explain
    from .screen import write
    from .verdict_tables import explanation, verdict_list

    directory = find_directory(data_dir)
    if everything:
        lines = explain.listed(directory, last)
        if as_json:
            typer.echo(msgspec.json.format(msgspec.json.encode(lines)).decode())
        else:
            write(verdict_list(lines))
        return
    found = explain.explain(directory, verdict.strip())
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        if not verdict.strip() and not found.rejected:
            write("nothing was rejected; the latest accepted submission:\n")
        write(explanation(found))


def find_directory(data_dir: Path | None) -> Path:
    """Whose ledger to read: the named one, else the running node's, else the default. Raises UsageError."""
    from ..node.ops.errors import NetworkError, UsageError
    from .target import find_node

    if data_dir is not None:
        return data_dir.expanduser()
    try:
        return find_node(None)
    except NetworkError as error:
        if default_data_dir().exists():
            return default_data_dir()
        raise UsageError(
            "no node of yours runs on this machine: give --data-dir of the node to explain"
        ) from error
