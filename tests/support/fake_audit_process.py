"""A fake audit process: an item's first token makes it hang, die or lie.

Run as a program; only the measurer differs from the real one (verification/audit_process.py).
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence

from primerl.node.errors import EngineError
from primerl.node.verification.audit_process import AuditSetUp, main
from primerl.node.verification.auditor import AuditItem, Measured, Reading, Unreadable
from primerl.node.weights.state import State

FINE, HANGS, DIES, TIRED, BUGGY, MISCOUNTS, BROKEN, COUNTS = range(8)
"""Tokens. FINE is measured: its second token comes back as the fingerprint; TIRED: no memory is left; BUGGY: an
error that nobody expects; BROKEN: this state can never be measured; COUNTS says how many states came."""


class Fake:
    """Implements Measurer."""

    def __init__(self, setup: AuditSetUp) -> None:
        self._states: list[State] = []

    def measure(
        self,
        items: Sequence[AuditItem],
        states: Mapping[int, State],
    ) -> list[Measured | Unreadable]:
        """By the first token of each item."""
        self._states += [
            state for state in states.values() if not any(state is one for one in self._states)
        ]
        kinds = {item.token_ids[0] for item in items}
        if HANGS in kinds:
            time.sleep(600)
        if DIES in kinds:
            print("I was told to die", file=sys.stderr, flush=True)
            os._exit(3)
        if TIRED in kinds:
            raise RuntimeError("out of memory")
        if BUGGY in kinds:
            raise KeyError("a bug")
        if BROKEN in kinds:
            raise EngineError("this state does not fit")
        return [] if MISCOUNTS in kinds else [self._one(item) for item in items]

    def read(
        self, items: Sequence[AuditItem], states: Mapping[int, State]
    ) -> list[Reading | Unreadable]:
        """Nothing can be read."""
        return [Unreadable("a fake reads nothing", proof=False) for _ in items]

    def free_spare_memory(self) -> None:
        """There is none."""

    def _one(self, item: AuditItem) -> Measured:
        """Return a result that shows the item and this process."""
        kind, mark = item.token_ids
        found = len(self._states) if kind == COUNTS else mark
        return Measured(0, 0, os.getpid(), found, 0.0, 0.0, 0.0, 0.0, 0.0)


if __name__ == "__main__":
    main(Fake)
