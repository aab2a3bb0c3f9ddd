"""`primerl-node bundle`: write what helps somebody else to find a fault."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from .command import DataDir, find_node, given_node


def bundle(
    data_dir: DataDir = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")] = Path(
        "primerl-bundle.zip"
    ),
    show: Annotated[bool, typer.Option("--print", help="Print all of it, write nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Write it without a question.")] = False,
) -> None:
    """Collect versions, checks of this machine, status, peers, config and newest logs of a node in one file.

    Secrets, addresses, and names of users and of this machine are replaced; node ids stay. What is in it is
    listed before it is written; nothing is sent anywhere. A node that does not run has its config and logs.

    \b
    Examples:
      primerl-node bundle --print | less
      primerl-node bundle -d outputs/demo -o demo.zip
    """
    from ..node.config.run import JoinConfig
    from ..node.errors import UsageError
    from ..node.ops.control import ask
    from ..node.reports.bundle import Scrubber, collect
    from ..node.reports.doctor import examine
    from ..node.storage.partial import whole_file

    node = find_node(None) if data_dir is None else given_node(data_dir)
    if not node.is_dir():
        raise UsageError(f"{node} is no node's directory: name the --data-dir of one")
    scrubber = Scrubber()
    checks = examine(JoinConfig(data_dir=node), os.environ)
    files = collect(node, partial(ask, node), checks, scrubber)
    if show:
        for name, text in files.items():
            typer.echo(f"--- {name}\n{text}")
        return
    for name, text in files.items():
        typer.echo(f"{len(text.encode()):>9,} B  {name}")
    counts = ", ".join(f"{count} of kind {kind}" for kind, count in scrubber.replaced.most_common())
    typer.echo(f"replaced: {counts or 'nothing'}. Look at it: primerl-node bundle --print")
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("nobody can be asked whether to write it: add --yes")
        if not typer.confirm(f"write {out}?"):
            return
    import zipfile

    with whole_file(out) as path, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    typer.echo(f"wrote {out} ({out.stat().st_size:,} B)")
