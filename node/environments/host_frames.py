"""What a node and the process of an environment say to each other; frames as in node/process/frames.py.

Many rollouts are under way at once: an answer bears the number of what it answers. A Play is answered by a Turn
as long as the policy has to speak; the Reply to that bears the same number, and is answered like the Play.
"""

import msgspec

from ..inference.engine import Completion
from .environment import Branch, Episode, Score, Split, Task

FAILED, STUCK, MISMATCH = "failed", "stuck", "mismatch"
"""Kinds of Failed: EnvironmentFailed, EnvironmentStuck, ScoreMismatch."""

MARK_VARIABLE = "PRIMERL_ENVIRONMENT_MARK"
"""Names the open file in which the process keeps the number of the request whose code it runs just now."""
MARK_BYTES = 16
"""That number, and how many steps of code were run so far; 8 bytes each, little-endian."""


class SetUp(msgspec.Struct, frozen=True, array_like=True, tag="setup"):
    """Load the taskset; the first request, answered by Done."""

    number: int
    config: bytes
    """EnvironmentConfig as JSON."""
    model_dir: str
    seed: int
    max_tokens: int
    temperature: float
    text: bool
    """Whether conversations are of characters (transcript.py), without a tokenizer."""


class Look(msgspec.Struct, frozen=True, array_like=True, tag="look"):
    """What a task is; answered by Looked."""

    number: int
    index: int
    split: Split


class Play(msgspec.Struct, frozen=True, array_like=True, tag="play"):
    """Play a task and score it; answered by Turn or Played."""

    number: int
    task: Task


class Reply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    """What the policy said in the Turn with this number; answered by Turn or Played."""

    number: int
    completion: Completion


class Rescore(msgspec.Struct, frozen=True, array_like=True, tag="rescore"):
    """Score a finished rollout; answered by Scored."""

    number: int
    task: Task
    branches: list[Branch]


class Drop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Nobody waits for this answer any more."""

    number: int


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Answered by Pong as soon as the environment's own code lets the event loop run."""

    number: int


Request = SetUp | Look | Play | Reply | Rescore | Drop | Ping


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The taskset is loaded."""

    number: int


class Looked(msgspec.Struct, frozen=True, array_like=True, tag="looked"):
    """A task, its prompt, and a right first reply where one is known."""

    number: int
    digest: bytes
    prompt: list[int]
    demonstration: list[int] | None


class Turn(msgspec.Struct, frozen=True, array_like=True, tag="turn"):
    """The policy has to speak."""

    number: int
    turn: int
    prompt: list[int]


class Played(msgspec.Struct, frozen=True, array_like=True, tag="played"):
    """A rollout has ended."""

    number: int
    episode: Episode


class Scored(msgspec.Struct, frozen=True, array_like=True, tag="scored"):
    """The score of a finished rollout."""

    number: int
    score: Score


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """It cannot be done."""

    number: int
    detail: str
    kind: str


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    """The event loop runs; `status` as Environment.status says it."""

    number: int
    status: str


Answer = Done | Looked | Turn | Played | Scored | Failed | Pong
_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def read_request(body: bytes) -> Request:
    """Raises msgspec.DecodeError (a ValueError)."""
    return _REQUESTS.decode(body)


def read_answer(body: bytes) -> Answer:
    """Raises msgspec.DecodeError (a ValueError)."""
    return _ANSWERS.decode(body)


def pack_mark(number: int, steps: int) -> bytes:
    """What the process writes down: MARK_BYTES."""
    return number.to_bytes(8, "little") + steps.to_bytes(8, "little")


def unpack_mark(mark: bytes) -> tuple[int, int]:
    """(number, steps) of pack_mark()."""
    return int.from_bytes(mark[:8], "little"), int.from_bytes(mark[8:MARK_BYTES], "little")
