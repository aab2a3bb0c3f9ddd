"""Messages between an auditor and its process; frames as in node/process/frames.py.

Numbers and bytes go across, never code.
"""

import msgspec

from ...protocol.manifests import AdapterContract
from ..process.frames import Message
from .auditor import AuditItem, Measured, Unreadable

MAX_FRAME = 128 * 2**20
"""Far above a portion of items, and above the longest branch that can be submitted."""


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """The first request: what is the same for all audits."""

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
    """Measure `items`; `states` maps each version to the number that its state is held under."""

    items: list[AuditItem]
    states: dict[int, int]
    others: dict[int, list[int]]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Setup or Hold is done."""


class Results(msgspec.Struct, frozen=True, tag="results"):
    """Either what was measured or why nothing was, for each item in order."""

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
    """Pack the answers to some items."""
    return Results(
        [one if isinstance(one, Measured) else None for one in found],
        [one if isinstance(one, Unreadable) else None for one in found],
    )


_REQUESTS: msgspec.msgpack.Decoder[Message[Request]] = msgspec.msgpack.Decoder(Message[Request])
_ANSWERS: msgspec.msgpack.Decoder[Message[Answer]] = msgspec.msgpack.Decoder(Message[Answer])


def read_request(body: bytes) -> Message[Request]:
    """Decode a request. Raises ValueError."""
    return _REQUESTS.decode(body)


def read_answer(body: bytes) -> Message[Answer]:
    """Decode an answer. Raises ValueError."""
    return _ANSWERS.decode(body)
