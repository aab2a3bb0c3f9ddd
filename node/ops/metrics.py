"""Metrics of a run: `metrics.jsonl` with its curves, seconds by phase, and the lag of the event loop."""

import asyncio
import itertools
import json
import logging
import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..errors import file_error
from .figures import MAX_POINTS, Curves
from .strict_json import to_json

if TYPE_CHECKING:  # a process that measures phases alone starts in half the time without the config
    from .monitors import WandbMonitor


CURVES = (
    *("loss/mean", "mismatch_kl/all/mean", "off_policy/mean", "perf/throughput"),
    *("time/wait_for_batch", "time/step"),
)
"""Names that have a curve, besides every reward/NAME."""
PACE_STEPS = 21


class StepCurves:
    """Keep the curves that views plot: a point for every step, later for every 2, 4, 8 .. steps."""

    def __init__(self) -> None:
        self.newest: dict[str, float] = {}
        """Figures of the newest step."""
        self._points: list[_Point] = []
        self._stride = 1
        """Steps of a point; the last one may have fewer."""
        self._times: deque[float] = deque(maxlen=PACE_STEPS)

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Add the figures of a step; lines without any, as those of evaluations, are left out."""
        figures = {
            name: float(value)
            for name, value in values.items()
            if (name in CURVES or name.startswith("reward/"))
            and isinstance(value, int | float)
            and math.isfinite(value)
        }
        if not figures:
            return
        self.newest = figures
        if isinstance(at := values.get("time"), int | float):
            self._times.append(at)
        self._points.append(_Point(step, 1, figures))
        if len(self._points) > 1 and self._points[-2].count < self._stride:
            self._points[-2:] = [_joined(*self._points[-2:])]
        elif len(self._points) > MAX_POINTS:
            self._stride *= 2
            last = self._points.pop()
            halves = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [_joined(*pair) for pair in halves]
            self._points.append(last)

    @property
    def step_s(self) -> float | None:
        """Median seconds from step to step lately; None before the second."""
        times = list(self._times)
        return median(b - a for a, b in itertools.pairwise(times)) if times[1:] else None

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of one figure."""
        return [(at.step, at.figures[name]) for at in self._points if name in at.figures]

    def curves(self) -> Curves:
        """Return all figures."""
        names = sorted({name for at in self._points for name in at.figures})
        return Curves(
            [at.step for at in self._points],
            {name: [at.figures.get(name) for at in self._points] for name in names},
        )


@dataclass(frozen=True)
class _Point:
    """The means of the figures of some steps."""

    step: int
    """The last of them."""
    count: int
    figures: dict[str, float]


def _joined(first: _Point, second: _Point) -> _Point:
    count = first.count + second.count
    means = {
        name: (first.figures[name] * first.count + second.figures[name] * second.count) / count
        for name in first.figures.keys() & second.figures.keys()
    }
    return _Point(second.step, count, first.figures | second.figures | means)


class MetricsLog:
    """Append one line per step; a line is whole or absent, and JSON: numbers that are not finite are null."""

    def __init__(self, path: Path, monitor: "WandbMonitor | None" = None) -> None:
        """`monitor` gets every line, too; close() closes it. Raises StorageError."""
        self._monitor = monitor
        self.curves = StepCurves()
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise file_error(error, path) from error

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write a line: step, Unix time (if `values` have none), and the values. Raises StorageError."""
        line = {"step": step, "time": round(time.time(), 3), **values}
        try:
            self._file.write(to_json(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise file_error(error, self._path) from error
        self.curves.add(step, line)
        if self._monitor is not None:
            self._monitor.log(step, values)

    def go_back(self, step: int, values: Mapping[str, Any]) -> None:
        """Drop the lines after `step`, from where the run goes on.

        `values` are the metrics of `step` in its checkpoint, written if the process died before it
        wrote that line.
        """
        try:
            text = self._path.read_bytes()
        except OSError as error:
            raise file_error(error, self._path) from error
        # An invalid byte damages only its own line.
        lines = text.decode("utf-8", "replace").splitlines()
        earlier: list[str] = []
        unread, written = 0, False
        self.curves = StepCurves()
        for at, line in enumerate(lines, start=1):
            figures = _read_line(line)
            if figures and figures["step"] <= step:
                earlier.append(line)
                self.curves.add(figures["step"], figures)
                written |= figures["step"] == step and values.keys() <= figures.keys()
            unread += not figures and at < len(lines)  # the last may be torn
        if unread:
            logger.warning("%s: %d damaged lines are left out", self._path, unread)
        if len(earlier) < len(lines):
            self._replace(earlier)
        if values and not written:
            self.write(step, values)

    def _replace(self, lines: list[str]) -> None:
        from ..storage.run_files import write  # loads much that few processes need

        write(self._path, "".join(line + "\n" for line in lines))
        self._file.close()
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Close the file and the monitor, which takes some seconds at most."""
        if self._monitor is not None:
            self._monitor.close()
        with suppress(OSError):  # a failed write was reported then
            self._file.close()


def _read_line(line: str) -> dict[str, Any]:
    """Decode a line; empty for a torn one, which has no step."""
    try:
        figures = json.loads(line)
        return {**figures, "step": int(figures["step"])}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return {}


class PhaseClock:
    """Count seconds by phase, which may nest and repeat; note how long a program took to start."""

    def __init__(self, began: float | None = None) -> None:
        """`began`: when the program was started, in seconds of time.monotonic(); None: now."""
        self.seconds: dict[str, float] = {}
        self._began = time.monotonic() if began is None else began
        self.moments: dict[str, float] = {}
        """Seconds from the start of the program until it reached a moment of its own for the first time."""

    def reach(self, moment: str) -> None:
        """Note a moment, unless it was reached before."""
        self.moments.setdefault(moment, time.monotonic() - self._began)

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Add the time inside to `name`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - start)

    def add(self, name: str, seconds: float) -> None:
        """Count seconds measured elsewhere."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


logger = logging.getLogger(__name__)

EVERY_S = 0.25
WINDOW = 40
LOOK_S = 0.5
STILL_S = 2.0
"""Lag at which the loop is logged as blocked."""
FRAMES, OTHERS = 4, 8
"""Innermost calls of the loop's stack that are logged; other threads whose innermost call is logged."""


class EventLoopMonitor:
    """Measure event-loop lag over the last WINDOW beats; a thread logs stacks when the loop is blocked."""

    def __init__(self) -> None:
        self._late: deque[float] = deque(maxlen=WINDOW)
        self._beat = 0.0

    async def run(self) -> None:
        """Measure until cancelled."""
        self._beat = time.monotonic()
        over = threading.Event()
        # a daemon thread: a blocked loop may also block its end
        watcher = threading.Thread(
            target=self._look_on, args=(threading.get_ident(), over), daemon=True, name="watcher"
        )
        watcher.start()
        try:
            while True:
                due = time.monotonic() + EVERY_S
                await asyncio.sleep(EVERY_S)
                self._beat = time.monotonic()
                self._late.append(max(0.0, self._beat - due))
        finally:
            over.set()

    def read(self) -> dict[str, float]:
        """Return mean, p90 and max in seconds; empty before the first beat."""
        late = sorted(self._late)
        if not late:
            return {}
        return {
            "mean": round(sum(late) / len(late), 5),
            "p90": round(late[int(0.9 * (len(late) - 1))], 5),
            "max": round(late[-1], 5),
        }

    def _look_on(self, loop_thread: int, over: threading.Event) -> None:
        still = StallDetector(time.monotonic())
        while not over.wait(LOOK_S):
            if words := still.look(time.monotonic(), self._beat):
                frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
                logger.warning("%s: %s", words, scene(frames, loop_thread))


class StallDetector:
    """Report each stall of the loop once, and its length at its end. Time is an argument."""

    def __init__(self, now: float) -> None:
        self._looked = now
        self._since = 0.0
        """Beat of the loop before the reported stall; 0 for none."""

    def look(self, now: float, beat: float) -> str:
        """Return the report at `now` about a loop that moved last at `beat`; "" for none."""
        slept, self._looked = now - self._looked, now
        if self._since and beat > self._since:
            stood, self._since = beat - self._since, 0.0
            return f"the event loop goes on, it stood still for {stood:.1f} s"
        if slept > LOOK_S + STILL_S:
            return f"no thread of Python ran for {slept - LOOK_S:.1f} s, nor did the event loop"
        if not self._since and now - beat > STILL_S:
            self._since = beat
            return f"the event loop stands still for {now - beat:.1f} s"
        return ""


def scene(frames: Mapping[int, FrameType], loop_thread: int) -> str:
    """Describe the stack of the loop's thread, and the other threads except the calling one."""
    others = [
        where(frame, 1)
        for thread, frame in frames.items()
        if thread not in (loop_thread, threading.get_ident())
    ]
    beside = f"; beside it {', '.join(others[:OTHERS])}" if others else ""
    return f"{where(frames.get(loop_thread), FRAMES)}{beside}"


def where(frame: FrameType | None, calls: int) -> str:
    """Format the innermost calls of a thread in one line."""
    if frame is None:
        return "its thread has ended"
    stack = traceback.extract_stack(frame)[-calls:]
    return " > ".join(
        f"{call.filename.rpartition('/')[2]}:{call.lineno} {call.name}" for call in stack
    )
