"""Limits of a home: decide when a node is paused, and count the bytes of a month.

A paused node computes nothing, and sends nothing but finished work and signs of life. What its owner paused,
and the month's bytes, are in a file: a restart changes neither. Time, readings and byte counts are arguments.
"""

import logging
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec

from ..config.limits import Hours, LimitsConfig
from ..errors import BAD_FILE, UsageError, file_error
from ..storage.partial import whole_file
from .figures import LimitsRow
from .machine import OthersUse

logger = logging.getLogger(__name__)

FILE = "limits.json"
MAX_FILE = 4096
GB = 10**9
SERVES_UNTIL = 0.9
"""Share of the month's bytes after which a node serves no chunks: its own work has the rest."""
SAVE_S, SAVE_BYTES = 60.0, 64 * 10**6
"""Seconds and bytes after which the count is written: a crash loses no more than these."""

GPU_USED, GPU_FREE = (0.3, 0.3), (0.1, 0.2)
"""Shares of a GPU's time and memory from which others use it, and below both of which they do not: a desktop
alone takes up to a fifth of the memory."""
PROCESSOR_USED, PROCESSOR_FREE = 0.25, 0.1
"""The same of all cores, on a machine without a GPU."""
USED_AFTER_S, FREE_AFTER_S = 10.0, 300.0
"""Seconds for which a reading has to hold: a short peak pauses no node, a short rest wakes none."""


class Idleness:
    """Whether other programs use the machine; readings between the bounds change nothing."""

    def __init__(self) -> None:
        self.used = False
        self._since: float | None = None
        """Time since which all readings say the opposite of `used`."""
        self._first = True

    def observe(self, use: OthersUse, now: float) -> None:
        """Take a reading at `now`, seconds of any clock. The first one counts at once."""
        if use.gpu is not None:
            pairs = tuple(zip(use.gpu, GPU_USED, GPU_FREE, strict=True))
        else:
            pairs = ((use.processor, PROCESSOR_USED, PROCESSOR_FREE),)
        contradicts = (
            all(share < free for share, _, free in pairs)
            if self.used
            else any(share >= used for share, used, _ in pairs)
        )
        if not contradicts:
            self._since = None
        elif self._since is None:
            self._since = now
        wait_s = 0.0 if self._first else FREE_AFTER_S if self.used else USED_AFTER_S
        if self._since is not None and now - self._since >= wait_s:
            self.used, self._since = not self.used, None
        self._first = False


OWNER, MONTH, HOURS = "by its owner", "the month's bytes are used", "outside its hours"
"""Why a node is paused; its trainer may read it."""
Count = Annotated[int, msgspec.Meta(ge=0)]


class KeptLimits(msgspec.Struct, forbid_unknown_fields=True):
    """What limits.json holds."""

    month: Annotated[str, msgspec.Meta(pattern=r"^\d{4}-(0[1-9]|1[0-2])$")]
    """The month that is counted, 2026-11."""
    sent: Count = 0
    received: Count = 0
    """Bytes of the month."""
    paused: bool = False
    """Whether the owner paused the node."""
    until: float | None = None
    """Unix seconds at which that ends; None: when the owner resumes it."""


class HomeLimits:
    """What its owner allows a node, and whether it is paused by that."""

    def __init__(
        self,
        config: LimitsConfig,
        data_dir: Path,
        now: float,
        *,
        fsync: bool = True,
        local: Callable[[float], datetime] = datetime.fromtimestamp,
    ) -> None:
        """`now` in Unix seconds, here and below. Call open() before anything else."""
        self._path = data_dir / FILE
        self._fsync = fsync
        self._local = local
        self._kept = KeptLimits(self._month(now))
        self._counted = (0, 0)
        """Bytes since the start that are in the count."""
        self._unsaved, self._saved_at = 0, now
        self._saving = threading.Lock()
        self._idleness = Idleness()
        self._gpu = False
        self._free = ""
        self.why = ""
        """Why it is paused, in words that its trainer may read; empty while it works."""
        self.configure(config, now)

    def open(self, now: float) -> None:
        """Read what an earlier start kept; a damaged file counts as none, with an error in the log.

        Raises StorageError if it cannot be read at all.
        """
        try:
            with self._path.open("rb") as file:
                self._kept = msgspec.json.decode(file.read(MAX_FILE), type=KeptLimits)
        except FileNotFoundError:
            pass  # the first start
        except OSError as error:
            raise file_error(error, self._path) from error
        except BAD_FILE as error:
            logger.error(
                "%s is damaged (%s): this month's bytes count from zero, and a pause of its owner is over",
                *(self._path, error),
            )
        self._decide(now)

    def configure(self, config: LimitsConfig, now: float) -> None:
        """Take other limits from now on."""
        self._config, self._hours = config, Hours(config.hours)
        if config.when == "always":
            self._idleness = Idleness()
        self._decide(now)

    def free(self, why: str) -> None:
        """Never pause it from now on, because others wait for it; `why` is what pause() says then."""
        self._free = why
        if self.why:
            logger.warning("%s", why)
        self.why = ""

    # -- what its owner does -----------------------------------------------------------------------

    def pause(self, seconds: float | None, now: float) -> None:
        """Pause it, for so long or until resume(). Raises StorageError, UsageError after free()."""
        if self._free:
            raise UsageError(self._free)
        self._kept.paused, self._kept.until = True, None if seconds is None else now + seconds
        self.save(now)
        self._decide(now)

    def resume(self, now: float) -> None:
        """End what pause() began. Raises StorageError."""
        self._kept.paused, self._kept.until = False, None
        self.save(now)
        self._decide(now)

    # -- readings ----------------------------------------------------------------------------------

    @property
    def watches_others(self) -> bool:
        """Whether look() needs a reading of other programs."""
        return self._config.when == "idle"

    def look(self, now: float, traffic: tuple[int, int], others: OthersUse | None = None) -> None:
        """Count `traffic`, the bytes (sent, received) since the start, and decide anew."""
        month = self._month(now)
        if month != self._kept.month and not _is_next(self._kept.month, month):
            self._kept.month, self._kept.sent, self._kept.received = month, 0, 0
        new = [max(0, total - before) for total, before in zip(traffic, self._counted, strict=True)]
        self._counted = traffic
        self._kept.sent += new[0]
        self._kept.received += new[1]
        self._unsaved += sum(new)
        if others is not None and self.watches_others:
            self._gpu = others.gpu is not None
            self._idleness.observe(others, now)
        self._decide(now)

    def is_due(self, now: float) -> bool:
        """Return whether enough was counted since the last save()."""
        late = now - self._saved_at >= SAVE_S and self._unsaved > 0
        return late or self._unsaved >= SAVE_BYTES

    def save(self, now: float) -> None:
        """Write the file; may be called in any thread. Raises StorageError."""
        with self._saving:
            self._unsaved, self._saved_at = 0, now
            with whole_file(self._path, fsync=self._fsync) as partial:
                partial.write_bytes(msgspec.json.encode(self._kept) + b"\n")

    # -- decisions ---------------------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        """Whether it serves chunks."""
        return not self.why and self._used < SERVES_UNTIL

    @property
    def _used(self) -> float:
        """Share of the month's bytes that is used."""
        most = self._config.monthly_gb * GB
        return (self._kept.sent + self._kept.received) / most if most else 0.0

    def _decide(self, now: float) -> None:
        before, self.why = self.why, self._reason(now)
        if self.why != before:
            logger.info("%s", f"paused: {self.text(now)}" if self.why else "works again")

    def _reason(self, now: float) -> str:
        if self._free:
            return ""
        if self._kept.paused and (self._kept.until is None or now < self._kept.until):
            return OWNER
        if self._used >= 1.0:
            return MONTH
        if not self._hours.is_open(self._local(now)):
            return HOURS
        if self._idleness.used:
            return f"other programs use the {'GPU' if self._gpu else 'processor'}"
        return ""

    def text(self, now: float) -> str:
        """Say why it is paused and until when, for its owner; empty while it works."""
        if not self.why:
            return ""
        local, until = self._local(now), None
        if self.why == OWNER and self._kept.until is not None:
            until = self._local(self._kept.until)
        elif self.why == HOURS:
            until = self._hours.next_change(local)
        elif self.why == MONTH:
            until = _next_month(local)
        if until is None:
            return self.why
        days = (until.date() - local.date()).days
        form = "%H:%M" if days == 0 else "%a %H:%M" if days < 7 else "%Y-%m-%d"
        return f"{self.why}, until {until.strftime(form)}"

    def row(self, now: float) -> LimitsRow:
        """Describe the limits and the month for views."""
        config, kept = self._config, self._kept
        return LimitsRow(
            paused=self.text(now),
            serves=self.serves,
            hours=config.hours,
            when=config.when,
            upload=config.upload,
            download=config.download,
            monthly_gb=config.monthly_gb,
            month=kept.month,
            month_sent=kept.sent,
            month_received=kept.received,
        )

    def _month(self, now: float) -> str:
        return self._local(now).strftime("%Y-%m")


def _is_next(later: str, month: str) -> bool:
    """Return whether `later` is the month after `month`, as where a clock was put back by a few days."""
    number, other = (12 * int(text[:4]) + int(text[5:]) for text in (later, month))
    return number - other == 1


def _next_month(local: datetime) -> datetime:
    begun = local.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    if begun.month == 12:
        return begun.replace(year=begun.year + 1, month=1)
    return begun.replace(month=begun.month + 1)
