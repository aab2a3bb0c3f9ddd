"""A running node of any role: its control socket, its entry in the registry, its status."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ... import __version__
from ...crypto.hashing import short
from ...crypto.keys import SecretKey
from ...protocol.errors import RemoteProtocolError
from ..config.reload import ConfigSource
from ..config.run import NodeConfig
from ..errors import BusyError, NodeError, UsageError, first_cause
from ..ops.control import Command, ControlServer, register, unregister
from ..ops.dashboard import Dashboard, Query
from ..ops.figures import Curves, NodeFigures, PeerRow, PingRow, Status
from ..ops.logs import newest_lines, set_level
from ..ops.machine import Machine
from ..ops.metrics import EventLoopMonitor
from ..ops.service_manager import service_manager
from ..p2p.limits import Rates
from ..p2p.ping import ping
from ..p2p.services import NodeServices

logger = logging.getLogger(__name__)


class Node:
    """A node process: does its work while it answers the control socket."""

    def __init__(self, config: NodeConfig, key: SecretKey, data_dir: Path, role: str) -> None:
        self.config = config
        self.key = key
        self.data_dir = data_dir
        self.role = role
        self._services: NodeServices | None = None
        """Its network; None before it has any."""
        self.phase = "starting"
        self.detail = ""
        self.lag = EventLoopMonitor()
        self.rates = Rates(config.limits.upload, config.limits.download)
        self.source: ConfigSource | None = None
        """Where `config` is from, to be read again; None: nowhere."""
        self._machine = Machine(data_dir)
        self._dashboard = Dashboard(self, config.dashboard.port)
        self.queries: Mapping[str, Query] = {"log": self._log}
        """Questions that the page and the local user may ask."""
        self._started = time.monotonic()
        self._stop = asyncio.Event()

    def base_status(self) -> Status:
        """Make the status that every node has."""
        return Status(
            id=self.key.node_id.hex(),
            short=short(self.key.node_id),
            role=self.role,
            software=__version__,
            pid=os.getpid(),
            uptime_s=round(time.monotonic() - self._started, 1),
            data_dir=str(self.data_dir.resolve()),
            phase=self.phase,
            detail=self.detail,
            event_loop_lag=self.lag.read(),
            page=self._dashboard.url,
        )

    async def figures(self) -> NodeFigures:
        """Make the figures that all views show."""
        status, peers = await self._status(), await self.peers()
        status.bytes_sent = sum(row.bytes_sent for row in peers)
        status.bytes_received = sum(row.bytes_received for row in peers)
        status.peers = sum(row.path != "-" for row in peers)
        status.machine = await self._machine.look()
        return NodeFigures(round(time.time(), 3), status, peers)

    async def status(self) -> Status:
        """Make the status of this node."""
        return (await self.figures()).status

    async def peers(self) -> list[PeerRow]:
        """Make a row for each known peer."""
        return []

    def curves(self) -> Curves:
        """Return the curves of the run so far; only a trainer has some."""
        return Curves()

    async def _log(self) -> list[object]:
        return await asyncio.to_thread(newest_lines)

    async def _ping(self, peer: str, wait_s: float) -> PingRow:
        if self._services is None:
            raise BusyError("this node has no peers at present: it follows no run, or is starting")
        return await ping(self._services, peer, wait_s)

    async def _leaders(self, sealed: str = "") -> dict[str, object]:
        """Take the root's list of leaders from its owner, if one is given; return the one that is known.

        Raises UsageError for one that its root did not sign; BusyError before this node is in a run.
        """
        services = self._services
        if services is None:
            raise BusyError("this node is in no run yet: ask again in a moment")
        if sealed:
            try:
                await services.heads.admit_leaders(bytes.fromhex(sealed))
            except (ValueError, RemoteProtocolError) as error:
                raise UsageError(f"this list of leaders is not taken: {error}") from error
        return {
            "run": services.run_id.hex(),
            "trainer": services.leaders.trainer.hex(),
            "root": (services.leaders.root or services.leaders.trainer).hex(),
            "leader": services.trainer.hex(),
            "leaders": services.leaders.sealed.hex(),
        }

    async def _link(self) -> dict[str, object]:
        return {"link": self._dashboard.link}

    async def _status(self) -> Status:
        return self.base_status()

    async def _limit(self, config: NodeConfig) -> None:
        """Take the limits of `config` from now on."""
        self.rates.set(config.limits.upload, config.limits.download)

    async def reload(self) -> dict[str, Any]:
        """Read the config again and apply what can change while the node runs (the `reload` command).

        Returns the keys that were applied, and those that need a restart. Raises UsageError, and changes
        nothing, if it cannot be read.
        """
        if self.source is None:
            raise UsageError("this node was started without a config that could be read again")
        changes = await asyncio.to_thread(self.source.reread)
        await self._limit(changes.config)
        set_level(changes.config.log)
        if changes.applied:
            logger.info("the config was read again: %s", ", ".join(changes.applied))
        return {"applied": changes.applied, "restart": changes.restart}

    async def request_stop(self) -> dict[str, Any]:
        """End the node soon (the `stop` command)."""
        self._stop.set()
        return {}

    async def serve(
        self, work: Callable[[], Awaitable[None]], commands: Mapping[str, Command], run: str
    ) -> None:
        """Do `work` while answering the control socket; `stop` or cancellation ends both.

        `commands` are those of the role, beside those of every node. Raises the error that ended the work, a
        NodeError first.
        """
        own = {
            "figures": self.figures,
            "status": self.status,
            "peers": self.peers,
            "ping": self._ping,
            "dashboard": self._link,
            "leaders": self._leaders,
            "stop": self.request_stop,
            "reload": self.reload,
        }
        control = ControlServer(self.data_dir, {**self.queries, **commands, **own})
        await control.start()
        try:
            self._dashboard.open()
        except NodeError:
            await control.close()
            raise
        entry = register(self.data_dir, self.role, run)
        service_manager().tell("READY=1", f"STATUS={self.role} in {self.data_dir}")
        lag = asyncio.create_task(self.lag.run(), name="event loop lag")
        try:
            await self._until_done(work)
        except BaseExceptionGroup as group:
            raise first_cause(group) from group
        finally:
            lag.cancel()
            unregister(entry)
            await self._dashboard.close()
            await control.close()
            await asyncio.wait([lag])

    async def _until_done(self, work: Callable[[], Awaitable[None]]) -> None:
        working = asyncio.ensure_future(work())
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not working.done():
                working.cancel()
                with suppress(asyncio.CancelledError):
                    await working
        if not working.cancelled():
            working.result()
