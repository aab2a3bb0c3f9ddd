"""`primerl-node rl`: a whole run on this machine, from nothing to a better model."""

from typing import TYPE_CHECKING, Annotated

import typer

from .configured import (
    AsJson,
    Dp,
    DryRun,
    Pp,
    Tp,
    arguments,
    check_engine,
    check_model,
    environment,
    options,
    parallel,
    show_config,
)

if TYPE_CHECKING:
    from ..node.launch.placement import GpuPlacement

TrainerGpus = Annotated[
    str | None,
    typer.Option(
        "--trainer-gpus",
        help='GPUs of the trainer: how many, or which ("0,1", as torch counts the visible ones; "0," is one).',
    ),
]
InferenceGpus = Annotated[
    str | None,
    typer.Option(
        "--inference-gpus",
        help="GPUs of the workers, said in the same way; by default all that are left.",
    ),
]


def run(
    ctx: typer.Context,
    trainer_gpus: TrainerGpus = None,
    inference_gpus: InferenceGpus = None,
    tp: Tp = None,
    pp: Pp = None,
    dp: Dp = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Run everything on this machine: a trainer and its workers, as separate processes.

    Each has its own key and data directory below outputs/<name>, logs are in outputs/<name>/logs. It ends
    by itself with the reward curve, a summary, and weights that transformers loads. --dry-run also shows
    which process would get which GPUs.

    \b
    Examples:
      primerl-node rl @ demo
      primerl-node rl @ demo --clean --seed 1              again, from the start
      primerl-node rl @ demo --launch.workers 4 --max-steps 50
      primerl-node rl @ run.toml --trainer-gpus 2 --inference-gpus 6 --dry-run
    """
    from ..node.config.loader import load
    from ..node.config.run import RunConfig
    from ..node.launch.placement import place, planned_share
    from ..node.ops.gpus import usable

    chosen = {"launch.trainer_gpus": trainer_gpus, "launch.inference_gpus": inference_gpus}
    args = arguments(ctx, options(**chosen) + parallel(tp=tp, pp=pp, dp=dp))
    config = load(RunConfig, args, environment())
    check_engine(config)
    check_model(config)
    placement = place(config, usable(environment()), planned_share)
    if dry_run:
        show_config(placement.applied(config), as_json=as_json)
        show_placement(placement, as_json=as_json)
        return
    from ..node.launch.launcher import launch
    from .live import open_view
    from .signals import run as run_to_end
    from .summary import print_summary

    with open_view(f"primerl-node rl  {config.name}") as view:
        directory = run_to_end(launch(config, args, view=view, placement=placement))
    if not print_summary(directory / "summary.json"):
        typer.echo(f"stopped; go on with --resume: {directory}")


def show_placement(placement: "GpuPlacement", *, as_json: bool) -> None:
    """Below a config, as comments; beside it, where that is JSON."""
    for line in placement.lines():
        typer.echo(line if as_json else f"# {line}", err=as_json)
