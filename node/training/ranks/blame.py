"""Which rank was at fault, from what rank 0, the ranks' last words and torchrun say. No I/O.

Whoever ends because of another one is never blamed: the others always fail a moment after the first.
"""

import asyncio
import logging
import re
import signal
from collections import deque
from collections.abc import Iterable

from .calls import ENDED, EXIT_LOST, Broken

logger = logging.getLogger(__name__)

TAIL_LINES = 5
ADVICE = "look at the log above, free memory or lower training.seq_len, then `train --resume`"
_ENDED = re.compile(ENDED.format(rank=r"(\d+)", reason="(.*)"))
_EXIT = re.compile(r"exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")


class Blame:
    """Collects what is said about ranks that end."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        """Process ids of the ranks in order, once they are known."""
        self.known = asyncio.Event()
        """Set when somebody said whose fault it was."""
        self._words: dict[int, str] = {}
        self._exits: dict[int, str] = {}
        self.silent: dict[int, str] = {}
        """Ranks of which rank 0 says that they do not answer."""
        self._aborts: dict[int, str] = {}
        """NCCL aborts a rank that has waited too long, so these are likely to be the others."""
        self._hushed = False
        """From then on torchrun writes its traceback and its table, which say nothing new."""
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    def note(self, line: str) -> None:
        """A line that a rank or torchrun wrote."""
        if found := _ENDED.search(line):
            self._words.setdefault(int(found[1]), found[2])
            self.known.set()
        if found := _EXIT.search(line):
            self.hush()
            pid, local_rank = int(found[3]), int(found[2])
            self.exited(self.pids.index(pid) if pid in self.pids else local_rank, int(found[1]))
        logger.log(logging.DEBUG if self._hushed else logging.WARNING, "ranks: %s", line)
        if not self._hushed:
            self._tail.append(line)

    def hush(self) -> None:
        """What comes now is not for the operator: torchrun complains of being ended."""
        self._hushed = True

    def told(self, broken: Broken) -> None:
        """Rank 0 said who does not answer, before it ended."""
        self.mute(broken.ranks, f"does not answer ({broken.detail})")

    def mute(self, ranks: Iterable[int], why: str) -> None:
        """These cannot answer."""
        for rank in ranks:
            self.silent.setdefault(rank, why)

    def exited(self, rank: int, code: int) -> None:
        """A rank has ended; negative for the signal that killed it."""
        if code == EXIT_LOST:
            return
        said = f"killed by {_signal(-code)}" if code < 0 else f"exit code {code}"
        if code == -signal.SIGABRT:
            self._aborts.setdefault(rank, said)
        else:
            self._exits.setdefault(rank, said)
        self.known.set()

    def text(self, what: str, size: int) -> str:
        """One line: who it was and why, or else `what` was noticed; and what to do."""
        for said in (self._words, self._exits, self.silent, self._aborts):
            if said:
                rank = min(said)
                return f"rank {rank} of {size} failed: {said[rank]}; {ADVICE}"
        last = " | ".join(self._tail)
        return f"{what}{f' ({last})' if last else ''}; {ADVICE}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
