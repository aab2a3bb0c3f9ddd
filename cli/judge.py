"""`primerl-node judge`: a frozen model that rewards ask, whose replies workers generate and prove."""

from typing import TYPE_CHECKING

import typer

from ..node.config.paths import expand_home
from .command import (
    DryRun,
    DryRunJson,
    check_engine,
    check_free,
    config_source,
    read_config,
    run_to_end,
    show_config,
)

if TYPE_CHECKING:
    from ..node.app.judge import JudgeAddress
    from ..node.config.judge import JudgeRunConfig


def run(ctx: typer.Context, dry_run: DryRun = False, as_json: DryRunJson = False) -> None:
    """Serve a frozen model over HTTP, with workers that generate its replies and prove each.

    It prints a join ticket for workers, and what to put into [environment.judge] of the run whose rewards ask
    it. A reply is given once it is verified; it takes the likeliest token at every place, so that anybody can
    compute it again. The node itself generates nothing, it audits.

    \b
    Examples:
      primerl-node judge --model.name Qwen/Qwen3-4B --engine.dtype bfloat16
      primerl-node judge @ judge.toml --api.port 8100
      primerl-node join --ticket outputs/judge/ticket.txt --data-dir judge-worker
    """
    from ..node.config.judge import JudgeRunConfig

    config = read_config(JudgeRunConfig, ctx.args)
    check_engine(config)
    if dry_run:
        show_config(config, as_json=as_json)
        _show_memory(config, as_json=as_json)
        return
    from ..node.app.daemon import check_auditor, judge
    from ..node.app.judge import as_run

    check_auditor(as_run(config))
    check_free(config, config.api)
    run_to_end(
        judge(config, announce=_announce, source=config_source(JudgeRunConfig, ctx.args, config))
    )


def _show_memory(config: "JudgeRunConfig", *, as_json: bool) -> None:
    """Say after a dry run, as a comment, what audits need here, where the model's config.json is here."""
    from ..node.app.judge import as_run
    from ..node.errors import EngineError
    from ..node.memory_plan.memory import gib, plan_auditor
    from ..node.memory_plan.shape import read_shape
    from ..node.models.architectures import read_config

    directory = expand_home(config.model.name)
    if config.model.create is None and not (directory / "config.json").is_file():
        return
    try:
        shape = read_shape(read_config(config.model))
    except EngineError as error:
        typer.echo(f"# memory: not known: {error}", err=as_json)
        return
    items = plan_auditor(as_run(config), shape, 1)
    parts = ", ".join(f"{item.name} {gib(item.nbytes)}" for item in items)
    host = (
        f"and {gib(2 * shape.parameters)} of the host's memory for the weights that workers fetch"
    )
    typer.echo(f"# memory of this node: {parts}; {host}", err=as_json)


def _announce(address: "JudgeAddress") -> None:
    typer.echo(f"workers:\n  primerl-node join --ticket {address.ticket}")
    typer.echo(
        f'the run whose rewards ask it:\n  [environment.judge]\n  url = "{address.url}/v1"\n'
        f'  model = "{address.model}"\n  timeout_s = 600'
    )
