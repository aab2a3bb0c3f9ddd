"""`primerl-node chat`: ask a run's model before and after training, or several models, the same."""

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import typer

from ..node.ops.strict_json import to_json
from .command import AsJson

if TYPE_CHECKING:
    from ..node.app.chat import ComparedReply, ModelComparison

T = TypeVar("T")
R = TypeVar("R")
MAX_PIPED = 1 << 20
"""Characters of prompts from a pipe."""


def run(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN_DIR | MODEL]...",
            help="Directory of a run, of a model, or a hub id; by default the newest run in outputs/.",
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="Ask this, and end; may be given again."),
    ] = None,
    task: Annotated[
        int | None,
        typer.Option("--task", min=0, help="Play this held-out task of the run, and end."),
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", help="Weights of this step of a run, not its newest.")
    ] = None,
    url: Annotated[
        str,
        typer.Option(
            "--url", help="Also, or only, the model of a server, such as http://127.0.0.1:8000/v1."
        ),
    ] = "",
    key_variable: Annotated[
        str, typer.Option("--key-variable", help="Environment variable with the key of --url.")
    ] = "",
    system: Annotated[str, typer.Option("--system", help="System message.")] = "",
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Each prompt goes on with the conversation, not a new one."),
    ] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of each reply.")] = 0,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, max=2, help="0 takes the likeliest token.")
    ] = 1.0,
    max_tokens: Annotated[
        int,
        typer.Option("--max-tokens", min=0, help="Longest reply; 0: as in the run, or 512."),
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Ask models the same, with the same seed, and show their replies side by side.

    Of a run these are the model that it began with and its newest weights: before and after. Without --prompt
    and --task it asks for prompts until ctrl-D; an empty line plays a held-out task of the run. The lines of
    a pipe are prompts. It computes on a GPU in bfloat16 if there is one, else on the CPU.

    \b
    Examples:
      primerl-node chat outputs/demo
      primerl-node chat outputs/demo --task 3
      primerl-node chat outputs/demo -p primerl --temperature 0
      primerl-node chat outputs/a outputs/b Qwen/Qwen3-0.6B
      primerl-node chat --url http://127.0.0.1:8000/v1 -p "What is 7 + 5?"
    """
    from ..node.app.chat import ChatSettings, find_run, open_comparison

    settings = ChatSettings(
        models=tuple(models or ([] if url else [find_run()])),
        url=url,
        key_variable=key_variable,
        step=step,
        system=system,
        keeps=keep,
        seed=seed,
        temperature=temperature,
        max_tokens=max_tokens,
    )
    prompts = prompt or []
    if not prompts and task is None and not sys.stdin.isatty():
        prompts = [line for line in sys.stdin.read(MAX_PIPED).splitlines() if line.strip()]
    once = bool(prompts) or task is not None or not sys.stdin.isatty()
    if not once:
        typer.echo("loading ..", err=True)
    with _InThread(open_comparison(settings, os.environ)) as opened:
        if task is not None:
            _play(opened, task, as_json=as_json)
        for text in prompts:
            _show(text, opened.run(opened.value.ask(text)), as_json=as_json)
        if not once:
            _talk(opened, as_json=as_json)


def _talk(opened: "_InThread[ModelComparison]", *, as_json: bool) -> None:
    """Ask for prompts until ctrl-D; ctrl-C cancels a reply."""
    import readline  # input() then has a history

    from ..node.errors import NodeError

    del readline
    tasks = ", an empty line to play a held-out task" if opened.value.has_tasks else ""
    typer.echo(f"{' | '.join(opened.value.names)}: type a prompt{tasks}; ctrl-D ends", err=True)
    played = 0
    while True:
        try:
            text = input("> ")
        except EOFError:
            typer.echo("")
            return
        try:
            if text.strip():
                _show("", opened.run(opened.value.ask(text)), as_json=as_json)
            elif opened.value.has_tasks:
                _play(opened, played, as_json=as_json)
                played += 1
        except NodeError as error:
            typer.echo(f"error: {error}", err=True)
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)


def _play(opened: "_InThread[ModelComparison]", number: int, *, as_json: bool) -> None:
    text, replies = opened.run(opened.value.play(number))
    _show(text, replies, as_json=as_json)


def _show(prompt: str, replies: "Sequence[ComparedReply]", *, as_json: bool) -> None:
    """Print the replies in columns, or below each other where they are too narrow."""
    import msgspec
    from rich.table import Table
    from rich.text import Text

    from .rollouts import COLUMN, visible
    from .tables import console

    if as_json:
        answers = [msgspec.to_builtins(reply) for reply in replies]
        typer.echo(to_json({"prompt": prompt, "replies": answers}, indent=2))
        return
    screen = console()
    if prompt:
        screen.print(Text(visible(prompt), style="dim"), "")
    at_once = max(1, screen.width // COLUMN)
    for start in range(0, len(replies), at_once):
        some = replies[start : start + at_once]
        table = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0))
        for reply in some:
            table.add_column(_title(reply), overflow="fold", width=screen.width // at_once - 2)
        table.add_row(*(Text(visible(reply.text or reply.error)) for reply in some))
        screen.print(table)


def _title(reply: "ComparedReply") -> Any:
    from rich.text import Text

    notes = [reply.model]
    if reply.reward is not None:
        notes.append(f"reward {reply.reward:.3g}")
    if reply.cut:
        notes.append("cut")
    return Text("  ".join(notes))


class _InThread(Generic[T]):
    """A block of asyncio that is open in a thread of its own, while this one waits for the user."""

    def __init__(self, block: AbstractAsyncContextManager[T]) -> None:
        self._block = block
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run `work` there to its end; ctrl-C cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def __enter__(self) -> "_InThread[T]":
        self._thread.start()
        try:
            self.value = self.run(self._block.__aenter__())
        except BaseException:  # also when interrupted: __exit__ does not run then
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.run(_left(self._block.__aexit__))
        finally:
            self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _left(leave: Callable[..., Any]) -> None:
    await leave(None, None, None)
