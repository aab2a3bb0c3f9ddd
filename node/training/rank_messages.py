"""Messages between the trainer's daemon and rank 0, which passes them on to the other ranks.

No torch. Frames as in node/process/frames.py. Numbers, text and bytes go across, never code; tensors travel by
files in a folder that only the daemon's user can read.
"""

import msgspec

from ..process.frames import ProcessMessage
from .backend import SampleTerms
from .operations import LearnerCall, MethodCall

MAX_FRAME = 2**31
"""Largest call in bytes: a batch of some hundred million tokens."""

ENDED = "rank {rank} ended: {reason}"
"""Line that a rank writes to its standard error before it ends by its own fault."""
EXIT_LOST = 75
"""Exit code of a rank that ends because of the others: it is not at fault."""


class RankJoin(msgspec.Struct, frozen=True, tag="join"):
    """The first call: join one world. Answered by RanksJoined."""

    config: str
    """TrainingConfig as JSON."""


class RankStart(msgspec.Struct, frozen=True, tag="start"):
    """Request to build model and optimizer, replacing existing ones."""

    model_dir: str
    max_steps: int
    seed: int
    temperature: float
    own: dict[str, SampleTerms] = {}
    """Terms of environments with their own sampling or loss, by name."""


class RankWriteStaged(msgspec.Struct, frozen=True, tag="write_staged"):
    """Request to write the staged checkpoint, answered once written; other calls go on."""

    directory: str


class RankIdle(msgspec.Struct, frozen=True, tag="idle"):
    """Heartbeat from rank 0 to the others while the daemon sends no request."""


class RankEnd(msgspec.Struct, frozen=True, tag="end"):
    """Request to shut down. The only answer is the end of the ranks."""


RankRequest = RankJoin | RankStart | LearnerCall | RankWriteStaged | RankIdle | RankEnd


def name_of(request: RankRequest) -> str:
    """Name a request in logs and errors."""
    return request.method if isinstance(request, MethodCall) else type(request).__name__


class RanksJoined(msgspec.Struct, frozen=True, tag="joined"):
    """Confirmation of one world; `pids` of its ranks in order, 0 for a rank on another machine."""

    pids: list[int]


class RankDone(msgspec.Struct, frozen=True, tag="done"):
    """Success of a call, with figures by name."""

    values: dict[str, float] = {}


class RankError(msgspec.Struct, frozen=True, tag="failed"):
    """An error that leaves the ranks as they were."""

    detail: str
    of_storage: bool
    """Whether it is a StorageError; otherwise an EngineError."""


class RanksBroken(msgspec.Struct, frozen=True, tag="broken"):
    """Notice that the ranks end; `ranks` are those that stopped answering."""

    ranks: list[int]
    detail: str


RankAnswer = RanksJoined | RankDone | RankError | RanksBroken

RankCall = ProcessMessage[RankRequest]
RankReply = ProcessMessage[RankAnswer]
CALLS: msgspec.msgpack.Decoder[RankCall] = msgspec.msgpack.Decoder(RankCall)
REPLIES: msgspec.msgpack.Decoder[RankReply] = msgspec.msgpack.Decoder(RankReply)
