"""The page of a run for the world, in a process of its own: who looks costs the trainer nothing.

The trainer makes what everybody may see (`public` of its control socket, PublicFigures); nothing else gets
here, so that a fault here shows no more. An error of the trainer's may name a directory: viewers get another
sentence.
"""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..errors import NetworkError, NodeError, UsageError
from ..ops.control import ask
from ..ops.dashboard import Dashboard, DashboardLimits, Query
from ..ops.figures import Curves, PublicFigures
from .page_queries import EvaluationLine

LIMITS = DashboardLimits(viewers=256, connections=512)
EVALUATIONS_S = 30.0
"""Between two questions for evaluations, which are read from a file."""
AGAIN_S = 3.0
"""After a question that was not answered."""
MAX_PORT = 65535


class PublicRun:
    """A running trainer's run, as its control socket describes it to everybody."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._curves = Curves()
        self._evaluations: list[EvaluationLine] = []
        self._evaluated = self._failed = -float("inf")
        self._asking = asyncio.Lock()
        self.queries: Mapping[str, Query] = {"evaluations": self.evaluations}

    async def figures(self) -> PublicFigures:
        """Ask for the figures of now. Raises NetworkError."""
        figures = msgspec.convert(await self._ask("public"), PublicFigures)
        self._curves = figures.curves
        return figures

    def curves(self) -> Curves:
        """Return the curves of the last answer."""
        return self._curves

    async def evaluations(self) -> list[EvaluationLine]:
        """Return the evaluations of at most EVALUATIONS_S ago. Raises NetworkError."""
        async with self._asking:
            if time.monotonic() - self._evaluated > EVALUATIONS_S:
                answer = await self._ask("evaluations")
                self._evaluations = msgspec.convert(answer, list[EvaluationLine])
                self._evaluated = time.monotonic()
        return self._evaluations

    async def _ask(self, question: str) -> Any:
        try:
            if time.monotonic() - self._failed < AGAIN_S:
                raise NetworkError("it did not answer lately")
            return await asyncio.to_thread(ask, self._data_dir, question)
        except (NodeError, ValueError) as error:
            if time.monotonic() - self._failed >= AGAIN_S:
                self._failed = time.monotonic()
            raise NetworkError("the run's trainer does not answer at present") from error


def read_address(text: str) -> tuple[str, int]:
    """Read PORT or HOST:PORT ("[::]:8480"); without a host all interfaces of IPv4. Raises UsageError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "0.0.0.0"
    if not port.isdecimal() or len(port) > 5 or int(port) > MAX_PORT:
        raise UsageError(f"--public is PORT or HOST:PORT, such as 8480, not {text[:80]!r}")
    return host, int(port)


async def serve_publicly(data_dir: Path, address: tuple[str, int]) -> None:
    """Serve the run's page to everybody until cancelled; print where. Raises BusyError."""
    host, port = address
    dashboard = Dashboard(PublicRun(data_dir), port, LIMITS, host)
    dashboard.open()
    print(
        f"everybody who reaches {dashboard.url} sees this run; no addresses, prompts, log or ticket",
        flush=True,
    )
    try:
        await asyncio.Event().wait()
    finally:
        await dashboard.close()
