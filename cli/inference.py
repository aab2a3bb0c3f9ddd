"""`primerl-node inference`: serve a policy to OpenAI clients."""

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
    check_free,
    config_source,
    parallel,
    read_config,
    run_to_end,
    show_config,
)
from .join import checked_ticket, ticket_text

if TYPE_CHECKING:
    from ..node.config.serving import ServeConfig


def run(
    ctx: typer.Context,
    ticket: Annotated[
        str | None,
        typer.Option(
            "--ticket",
            "-t",
            help="Follow the run of this join ticket (or of a file that holds it, or - for standard input).",
        ),
    ] = None,
    tp: Tp = None,
    pp: Pp = None,
    dp: Dp = None,
    dry_run: DryRun = False,
    as_json: DryRunJson = False,
) -> None:
    """Serve a policy over HTTP, as OpenAI's API: with vLLM its own routes, else chats and completions.

    Weights come from a directory (a model, weights/step_N of a run, LoRA adapters) or the hub, or, with a
    ticket, from a run: then it is always the newest version. It listens on 127.0.0.1 only; for other machines
    set api.host and a key.

    \b
    Examples:
      primerl-node inference --model.name outputs/demo/weights/step_160
      primerl-node inference --ticket run.ticket --engine.type vllm --tp auto
      primerl-node inference --model.name Qwen/Qwen3-0.6B \\
        --api.host 0.0.0.0 --api.key-variable API_KEY
      curl http://127.0.0.1:8000/v1/models
    """
    from ..node.config.serving import ServeConfig

    args = arguments(ctx, {"ticket": ticket, **parallel(tp, pp, dp)})
    config = read_config(ServeConfig, args)
    source = config_source(ServeConfig, args, config)
    check_engine(config, proven=False)
    if dry_run:
        if config.ticket not in ("", "-"):
            ticket_text(config.ticket)
        show_config(config, as_json=as_json)
        return
    from ..node.app.daemon import check_present, serve

    config = _checked(config)
    check_present(config.engine)
    check_free(config, config.api)

    def announce(url: str, name: str) -> None:
        typer.echo(f"serving {name} on {url}/v1")

    run_to_end(serve(config, announce=announce, source=source))


def _checked(config: "ServeConfig") -> "ServeConfig":
    """Replace the ticket by its text. Raises UsageError, TicketError; needs no network."""
    from ..node.api.server import read_key
    from ..node.errors import UsageError

    read_key(config.api)
    if config.ticket:
        return config.model_copy(update={"ticket": checked_ticket(config.ticket, config.directory)})
    if not config.model.name:
        raise UsageError(
            "nothing to serve: give --model.name with a directory or a hub id, or --ticket with a run's"
        )
    return config
