"""`primerl-node train`: be the trainer of a run."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .configured import AsJson, DryRun, arguments, check_model, environment, show_config

if TYPE_CHECKING:
    from ..node.config.run import RunConfig
    from .live import OpenView


def run(ctx: typer.Context, dry_run: DryRun = False, as_json: AsJson = False) -> None:
    """Start a run and train it: prints a join ticket, then learns from whoever joins.

    \b
    Examples:
      primerl-node train @ demo
      primerl-node train @ demo @ mine.toml --training.lr 1e-5 --rollouts.group-size 16
      primerl-node train @ demo --resume       go on where it was interrupted
      primerl-node train @ demo --resume.step 40                          go back to a checkpoint
      primerl-node train @ demo --name b --resume.dir outputs/demo        a new run from another one
      primerl-node train @ demo --dry-run      show the whole config, start nothing
    """
    from ..node.config.loader import load
    from ..node.config.run import RunConfig

    config = load(RunConfig, arguments(ctx), environment())
    check_model(config)
    if dry_run:
        show_config(config, as_json=as_json)
        return
    from .live import open_view
    from .signals import run as run_to_end
    from .summary import print_summary

    with open_view(f"primerl-node train  {config.name}") as view:
        directory = run_to_end(train_and_show(config, view))
    if not print_summary(directory / "summary.json"):
        typer.echo(f"stopped; go on with --resume: {directory}")


async def train_and_show(config: "RunConfig", view: "OpenView") -> Path:
    """Train, with our own node in the view."""
    from ..node.app.daemon import train
    from ..node.ops.control import NodeState, watched

    def announce(ticket: str) -> None:
        view.say(f"join this run from anywhere:\n  primerl-node join --ticket {ticket}")

    data_dir = config.data_dir or config.run_dir / "trainer"
    nodes = {"trainer": NodeState("trainer", data_dir, note="running")}
    training = train(config, announce=announce)
    return await watched(nodes, view, training, pace_s=view.pace_s)
