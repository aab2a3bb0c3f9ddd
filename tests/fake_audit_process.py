"""A process that audits nothing and does what the first token of an item says: to hang, to die, to lie.

Run as a program; without torch it is up at once.
"""

import os
import sys
import time

from primerl.node.audits.auditor import AuditItem, Measured
from primerl.node.audits.frames import (
    MAX_FRAME,
    Answer,
    Done,
    Failed,
    Hold,
    Measure,
    Results,
    read_request,
    results,
)
from primerl.node.frames import frame

FINE, HANGS, DIES, TIRED, BABBLES, MISCOUNTS, HUGE, BROKEN, COUNTS = range(9)
"""Tokens. FINE is measured: its second token comes back as the fingerprint.
COUNTS says how many states came."""


def measure(item: AuditItem, states: int) -> Measured:
    """What came, and which process measured it."""
    kind, mark = item.token_ids
    return Measured(os.getpid(), states if kind == COUNTS else mark, 0.0, 0.0, 0.0, 0.0, 0.0)


def answer(request: Measure, states: int) -> bytes:
    """The bytes to answer with."""
    kinds = {item.token_ids[0] for item in request.items}
    if HANGS in kinds:
        time.sleep(600)
    if DIES in kinds:
        print("I was told to die", file=sys.stderr, flush=True)
        os._exit(3)
    if BABBLES in kinds:
        return (5).to_bytes(4, "little") + b"hello"
    if HUGE in kinds:
        return b"\xff\xff\xff\xff"
    found: Answer = results([measure(item, states) for item in request.items])
    if TIRED in kinds:
        found = Failed("out of memory", always=False)
    if BROKEN in kinds:
        found = Failed("this state does not fit", always=True)
    if MISCOUNTS in kinds:
        found = Results([], [])
    return frame(found, MAX_FRAME)


def main() -> None:
    """Answer until the input ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    states = 0
    while (request := read_request(source)) is not None:
        states += isinstance(request, Hold)
        sink.write(
            answer(request, states) if isinstance(request, Measure) else frame(Done(), MAX_FRAME)
        )
        sink.flush()


if __name__ == "__main__":
    main()
