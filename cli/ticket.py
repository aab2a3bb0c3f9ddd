"""`primerl-node ticket`: the running trainer's join ticket."""

import json

import typer

from .target import AsJson, DataDir, find_node


def run(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Print the join ticket of the trainer that runs here.

    \b
    Example:
      primerl-node ticket > run.ticket
      primerl-node join --ticket run.ticket --data-dir worker
    """
    from ..node.control import ask

    answer = ask(find_node(data_dir), "ticket")
    typer.echo(json.dumps(answer) if as_json else answer["ticket"])
