"""What an auditor and its process say to each other: msgpack frames behind their length.

Neither end trusts the other one's sizes; numbers and bytes go across, never code.
"""

from io import BufferedIOBase
from typing import BinaryIO

import msgspec

from ...protocol.manifests import AdapterContract
from ..frames import HEAD_BYTES, body_length
from .auditor import AuditItem, Measured, Unreadable

MAX_FRAME = 128 * 2**20
"""Far above a portion of items, and above the longest branch that can be submitted."""


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """First: what is the same for all audits."""

    model_dir: str
    temperature: float
    dtype: str
    device: str
    threads: int
    """Of torch; 0 leaves its choice."""
    adapters: AdapterContract | None = None
    base_state: bytes = b""
    """These two as in replay.Terms."""


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """Read the state in the safetensors file `path`, drop those in `evict`."""

    number: int
    path: str
    evict: list[int]


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """Measure `items`; `states` says under which number the state of each version is held."""

    items: list[AuditItem]
    states: dict[int, int]
    others: dict[int, list[int]]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Setup or Hold is done."""


class Results(msgspec.Struct, frozen=True, tag="results"):
    """Of each item, in order, either what was measured or why nothing was."""

    measured: list[Measured | None]
    unreadable: list[Unreadable | None]

    def joined(self, count: int) -> list[Measured | Unreadable]:
        """One answer an item. Raises ValueError if that is not what came."""
        found = [one or other for one, other in zip(self.measured, self.unreadable, strict=True)]
        answers = [one for one in found if one is not None]
        if not count == len(answers) == len(found):
            raise ValueError(f"{len(answers)} answers to {count} items")
        return answers


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """It cannot be done; `always`: with other items neither."""

    detail: str
    always: bool


Request = Setup | Hold | Measure
Answer = Done | Results | Failed


def results(found: list[Measured | Unreadable]) -> Results:
    """The frame of some answers."""
    return Results(
        [one if isinstance(one, Measured) else None for one in found],
        [one if isinstance(one, Unreadable) else None for one in found],
    )


def read_request(source: BufferedIOBase | BinaryIO) -> Request | None:
    """The next request; None where the input ends. Raises ValueError for what is none."""
    head = source.read(HEAD_BYTES)
    if len(head) < HEAD_BYTES:
        return None
    return msgspec.msgpack.decode(source.read(body_length(head, MAX_FRAME)), type=Request)


def read_answer(body: bytes) -> Answer:
    """The answer in a frame. Raises ValueError for what is none."""
    return msgspec.msgpack.decode(body, type=Answer)
