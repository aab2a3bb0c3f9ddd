"""A node inside another program, for those who use primerl as a library: start it, ask it, stop it in order.

These names stay as they are from release to release (docs/library.md). The node runs in the caller's event
loop, and configures the program's logging as a node's.
"""

import asyncio
import os
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec

from ..config.loader import load
from ..config.paths import home_directory
from ..config.run import JoinConfig, RunConfig
from ..config.serving import ServeConfig
from ..errors import NetworkError, NodeError
from ..ops.control import ask
from ..ops.figures import NodeFigures, PeerRow, Status
from . import daemon

POLL_S = 0.1


class EmbeddedNode:
    """One node, which runs while its `async with` block does.

    The command is `train`, `join` or `inference`; arguments are those of the command line that set config keys,
    as ["@", "run.toml", "--max-steps", "20"] or ["--ticket", "primerl2-..", "--data-dir", "worker"].
    """

    def __init__(
        self,
        command: Literal["train", "join", "inference"],
        args: Sequence[str] = (),
        *,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Read the config. Raises UsageError."""
        self._announced: asyncio.Queue[str] = asyncio.Queue()
        self._first = ""
        if command == "train":
            run = load(RunConfig, args, environ)
            self.data_dir: Path = run.data_dir or run.run_dir / "trainer"
            self._work: Coroutine[Any, Any, object] = daemon.train(
                run, announce=self._announced.put_nowait
            )
        elif command == "join":
            joining = load(JoinConfig, args, environ)
            self.data_dir = joining.data_dir or home_directory() / ".primerl"
            self._work = daemon.join(joining)
        else:
            serving = load(ServeConfig, args, environ)
            self.data_dir = serving.directory
            self._work = daemon.serve(
                serving, announce=lambda url, _: self._announced.put_nowait(url)
            )
        self._task: asyncio.Task[object] | None = None

    async def __aenter__(self) -> "EmbeddedNode":
        """Start it; returns once it answers. Raises NodeError, KeyFileError."""
        self._task = asyncio.create_task(self._run(), name="node")
        while not self._task.done():
            with suppress(NetworkError):
                await self._ask("status")
                break
            await asyncio.wait([self._task], timeout=POLL_S)
        else:
            self._task.result()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop it in order: a worker hands its leases back, a trainer writes a checkpoint.

        Raises the node's own error if it failed before, and the block did not.
        """
        assert self._task is not None
        ended = self._task.done()
        self._task.cancel()
        await asyncio.wait([self._task])
        if ended and kind is None:
            self._task.result()

    async def status(self) -> Status:
        """Ask for its status, as `primerl-node status --json` has it (docs/summary.md). Raises NetworkError."""
        return (await self._figures()).status

    async def peers(self) -> list[PeerRow]:
        """Ask for its peers. Raises NetworkError."""
        return (await self._figures()).peers

    async def address(self) -> str:
        """Wait for what others need: the ticket of a trainer, the base URL of a server.

        Raises the node's error if it ends before.
        """
        assert self._task is not None
        if not self._first:
            waiting = asyncio.ensure_future(self._announced.get())
            await asyncio.wait([waiting, self._task], return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                waiting.cancel()
                self._task.result()
                raise NodeError("this node has no address to give")
            self._first = waiting.result()
        return self._first

    async def finished(self) -> None:
        """Wait until its run ends. Raises the error that ended it."""
        assert self._task is not None
        await asyncio.shield(self._task)

    async def _run(self) -> object:
        return await self._work

    async def _ask(self, command: str) -> Any:
        return await asyncio.to_thread(ask, self.data_dir, command)

    async def _figures(self) -> NodeFigures:
        return msgspec.convert(await self._ask("figures"), NodeFigures)
