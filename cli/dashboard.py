"""`primerl-node dashboard`: the link of a running node's page, and the page for the world."""

from html import escape
from pathlib import Path
from typing import Annotated

import typer

from ..node.ops.strict_json import to_json
from .command import AsJson, DataDir, find_node, run_to_end


def run(
    data_dir: DataDir = None,
    open_browser: Annotated[
        bool, typer.Option("--open", help="Open the page in a browser, too.")
    ] = False,
    public: Annotated[
        str,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Serve a page of the run to everybody who reaches this address, until Ctrl-C.",
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Print the link of a running node's page in the browser.

    The page shows the run, its peers with their verdicts, evaluations, rollouts, the log and the ticket; it
    changes nothing. A trainer serves it on 127.0.0.1, other nodes with --dashboard.port. The link holds a
    secret that is new with each start of the node. /metrics of the same port is for Prometheus, and needs none.

    --public is for the world: curves, environments, evaluations and contributors of a run, without a secret, in
    a process of its own. It has no addresses, prompts, rollouts, log or ticket, and nothing that peers say of
    themselves.

    \b
    Examples:
      primerl-node dashboard
      primerl-node dashboard --open
      primerl-node dashboard --public 8480
      primerl-node dashboard --public 127.0.0.1:8480    behind a web server with a certificate
      ssh -L 8470:127.0.0.1:PORT HOST        then the link with port 8470
    """
    import webbrowser

    from ..node.ops.control import ask

    if public:
        from ..node.app.public_page import read_address, serve_publicly

        address, node = read_address(public), find_node(data_dir)
        ask(node, "public")  # a worker has no run to show
        run_to_end(serve_publicly(node, address))
        return
    link = str(ask(find_node(data_dir), "dashboard")["link"])
    typer.echo(to_json({"link": link}) if as_json else link)
    if open_browser and not webbrowser.open(_redirect(link).as_uri()):
        typer.echo("no browser was found: open the link yourself", err=True)


def _redirect(link: str) -> Path:
    """Write a page of the user's own that leads to the link: other users can read a browser's arguments."""
    from ..node.ops.control import registry_directory
    from ..node.storage.run_files import write

    path = registry_directory() / "dashboard.html"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    page = f'<meta http-equiv="refresh" content="0;url={escape(link)}">\n'
    write(path, page, mode=0o600)
    return path
