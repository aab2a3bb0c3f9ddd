"""`primerl-node rl`: a whole run on this machine, from nothing to a better model."""

import typer

from .configured import (
    AsJson,
    DryRun,
    arguments,
    environment,
    show_config,
)


def run(ctx: typer.Context, dry_run: DryRun = False, as_json: AsJson = False) -> None:
    """Run everything on this machine: a trainer and its workers, as separate processes.

    Each has its own key and data directory below outputs/<name>, logs are in outputs/<name>/logs. It ends
    by itself with the reward curve, a summary, and weights that transformers loads.

    \b
    Examples:
      primerl-node rl @ demo
      primerl-node rl @ demo --clean --seed 1              again, from the start
      primerl-node rl @ demo --launch.workers 4 --max-steps 50
    """
    from ..node.config import RunConfig
    from ..node.load import load

    args = arguments(ctx)
    config = load(RunConfig, args, environment())
    if dry_run:
        show_config(config, as_json=as_json)
        return
    from ..node.launcher import launch
    from .live import open_view
    from .signals import run as run_to_end
    from .summary import print_summary

    with open_view(f"primerl-node rl  {config.name}") as view:
        directory = run_to_end(launch(config, args, view=view))
    if not print_summary(directory / "summary.json"):
        typer.echo(f"stopped; go on with --resume: {directory}")
