"""`primerl-node train` and `rl`: the trainer of a run, alone or with workers on this machine."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .command import (
    Dp,
    DryRun,
    DryRunJson,
    Pp,
    Tp,
    arguments,
    check_engine,
    check_found,
    check_model,
    config_source,
    parallel,
    read_config,
    run_to_end,
    show_config,
    show_environments,
    show_template,
)

if TYPE_CHECKING:
    from ..node.config.reload import ConfigSource
    from ..node.config.run import RunConfig
    from .live import OpenView

TrainerGpus = Annotated[
    str | None,
    typer.Option(
        "--trainer-gpus",
        help='GPUs of the trainer: how many, or which ("0,1", or "0," for one).',
    ),
]
InferenceGpus = Annotated[
    str | None,
    typer.Option(
        "--inference-gpus",
        help="GPUs of the workers, in the same way; by default the others.",
    ),
]


def train(ctx: typer.Context, dry_run: DryRun = False, as_json: DryRunJson = False) -> None:
    """Start a run and train it: prints a join ticket (on a terminal; elsewhere the file with it), then learns.

    \b
    Examples:
      primerl-node train @ demo
      primerl-node train @ demo @ mine.toml --training.lr 1e-5
      primerl-node train @ demo --resume           go on where it was interrupted
      primerl-node train @ demo --resume.step 40   go back to a checkpoint
      primerl-node train @ demo --name b --resume.dir outputs/demo
                                                   a new run from another one
      primerl-node train @ demo --dry-run          show the config, start nothing
    """
    from ..node.config.run import RunConfig

    config = read_config(RunConfig, ctx.args)
    notes = check_model(config)
    if dry_run:
        show_config(config, as_json=as_json, notes=notes)
        show_environments(config, as_json=as_json)
        show_template(config, as_json=as_json)
        return
    check_found(config)
    from .live import open_view, print_summary

    with open_view(f"primerl-node train {config.name}") as view:
        source = config_source(RunConfig, ctx.args, config)
        directory = run_to_end(_train(config, source, view), config.run_dir)
    print_summary(directory)


async def _train(config: "RunConfig", source: "ConfigSource", view: "OpenView") -> Path:
    """Train, with our own node in the view."""
    from ..node.app.daemon import train
    from ..node.ops.control import NodeState, watched

    def announce(ticket: str) -> None:
        # it is a secret: what is no terminal may be a log that others read
        shown = ticket if sys.stdout.isatty() else str(config.run_dir / "ticket.txt")
        view.say(f"join this run from anywhere:\n  primerl-node join --ticket {shown}")
        _say_page(config, view)

    data_dir = config.data_dir or config.run_dir / "trainer"
    nodes = {"trainer": NodeState("trainer", data_dir, note="running")}
    training = train(config, announce=announce, source=source)
    return await watched(nodes, view, training, pace_s=view.pace_s)


def _say_page(config: "RunConfig", view: "OpenView") -> None:
    if config.dashboard.port != "off":
        view.say("see it in a browser:\n  primerl-node dashboard")


def rl(
    ctx: typer.Context,
    trainer_gpus: TrainerGpus = None,
    inference_gpus: InferenceGpus = None,
    tp: Tp = None,
    pp: Pp = None,
    dp: Dp = None,
    dry_run: DryRun = False,
    as_json: DryRunJson = False,
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
    from ..node.config.run import RunConfig
    from ..node.gpus import usable
    from ..node.launch.placement import place

    chosen = {"launch.trainer-gpus": trainer_gpus, "launch.inference-gpus": inference_gpus}
    args = arguments(ctx, {**chosen, **parallel(tp, pp, dp)})
    config = read_config(RunConfig, args)
    check_engine(config)
    notes = check_model(config)
    placement = place(config, usable())
    if dry_run:
        show_config(placement.applied(config), as_json=as_json, notes=[*notes, *placement.lines()])
        show_environments(config, as_json=as_json)
        show_template(config, as_json=as_json)
        return
    from ..node.app.daemon import check_present
    from ..node.launch.launcher import launch

    if placement.workers:
        check_present(config.worker_engine)
    check_found(config)
    from .live import open_view, print_summary

    with open_view(f"primerl-node rl {config.name}") as view:
        _say_page(config, view)
        directory = run_to_end(launch(config, args, view=view, placement=placement), config.run_dir)
    print_summary(directory)
