"""What stage 0 of a pipeline of `hf` tells the others about a micro-batch, and what the last one answers.

A lane is a set of sequences that go through the stages together. Every stage keeps the keys and values of every
lane for its own layers, and does the same to them in the same order; so what a step says is all that it needs
beside the hidden states.
"""

from typing import Annotated

import msgspec

from ....protocol.errors import RemoteProtocolError
from ....protocol.session import decode
from ...errors import EngineError

MAX_ROWS = 2**16
NOTHING = 0
"""The lane that has one row, empty: where new ones come from."""

Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Row = Annotated[int, msgspec.Meta(ge=0, lt=MAX_ROWS)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Rows = Annotated[tuple[Row, ...], msgspec.Meta(max_length=MAX_ROWS)]


class Draws(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How each of some rows draws its tokens; see GenerateRequest."""

    seeds: tuple[Seed, ...]
    temperatures: tuple[Annotated[float, msgspec.Meta(gt=0)], ...]
    top_ks: tuple[Annotated[int, msgspec.Meta(ge=0, lt=2**31)], ...]
    top_ps: tuple[Annotated[float, msgspec.Meta(gt=0, le=1)], ...]


class Taken(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Rows of another lane, copied; one may be taken repeatedly."""

    lane: Number
    rows: Rows
    draws: Draws | None = None
    """None: they draw as they did there, or do not draw yet."""


class LaneStep(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A micro-batch. First the lane's rows are put in order, then their new tokens are read."""

    lane: Number
    slots: Count
    """Tokens that its longest sequence may come to."""
    keep: Rows | None = None
    """Which of its rows to keep, in that order, possibly repeated; None: all."""
    draws: Draws | None = None
    """Of the rows kept; None: as before."""
    taken: Annotated[tuple[Taken, ...], msgspec.Meta(max_length=MAX_ROWS)] = ()
    """Rows that are put behind these."""
    over: Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_ROWS)] = ()
    """Lanes to forget, after that."""
    fill: Annotated[tuple[tuple[Row, Count], ...], msgspec.Meta(max_length=MAX_ROWS)] = ()
    """(row, so many tokens) to read without drawing; empty: every row reads one, and draws the next."""


class Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the last stage drew for each row of a step; nothing if it only read."""

    tokens: bytes = b""
    """int32, little-endian."""
    logprobs: bytes = b""
    """float32, little-endian."""
    proofs: bytes = b""
    """8 bytes a row, if the plan wants fingerprints."""


def pack_step(step: LaneStep) -> bytes:
    """`step` as the body of a frame."""
    return msgspec.msgpack.encode(step)


def read_step(body: bytes) -> LaneStep:
    """The step in a frame's body. Raises EngineError."""
    try:
        return decode(body, LaneStep)
    except RemoteProtocolError as error:
        raise EngineError(f"stage 0 sent a step that is none: {error.detail}") from error


def pack_answer(answer: Answer) -> bytes:
    """`answer` as the body of a frame."""
    return msgspec.msgpack.encode(answer)


def read_answer(body: bytes) -> Answer:
    """The answer in a frame's body. Raises EngineError."""
    try:
        return decode(body, Answer)
    except RemoteProtocolError as error:
        raise EngineError(f"the last stage sent an answer that is none: {error.detail}") from error
