"""Messages between the trainer's daemon and rank 0, which passes them on to the other ranks. No torch.

Frames as in node/process/frames.py. Numbers, text and bytes go across, never code; tensors travel by files in a
folder that only the daemon's user can read.
"""

import msgspec

from ..process.frames import ProcessMessage
from .backend import Sample, SampleTerms, TrainBatch

MAX_FRAME = 2**31
"""Bytes of a call: a batch of some hundred million tokens."""

ENDED = "rank {rank} ended: {reason}"
"""The line that a rank writes to its standard error before it ends by its own fault."""
EXIT_LOST = 75
"""Exit code of a rank that ends because of the others: it is not the one at fault."""


class RankJoin(msgspec.Struct, frozen=True, tag="join"):
    """The first call: become one world. Answered by RanksJoined."""

    config: str
    """TrainingConfig as JSON."""


class RankStart(msgspec.Struct, frozen=True, tag="start"):
    """Build model and optimizer, also in place of those that are there."""

    model_dir: str
    max_steps: int
    seed: int
    temperature: float
    own: dict[str, SampleTerms] = {}
    """Of environments whose samples are drawn or learned otherwise, by name."""


class RankStep(msgspec.Struct, frozen=True, tag="step"):
    """Make one optimizer step."""

    batch: TrainBatch


class RankEvaluate(msgspec.Struct, frozen=True, tag="evaluate"):
    """Measure cross entropy without learning."""

    samples: list[Sample]


class RankSupervise(msgspec.Struct, frozen=True, tag="supervise"):
    """Make a step of the warm-up; its figure is `loss`."""

    examples: list[tuple[list[int], list[int]]]
    lr: float


class RankEndSupervised(msgspec.Struct, frozen=True, tag="end_supervised"):
    """Forget the optimizer's moments."""


class RankWriteState(msgspec.Struct, frozen=True, tag="state"):
    """Write the bf16 policy to a file."""

    path: str


class RankWriteSnapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """Write the changes since the last snapshot to a file, or all of the policy."""

    path: str
    whole: bool


class RankSave(msgspec.Struct, frozen=True, tag="save"):
    """Write a checkpoint."""

    directory: str


class RankStage(msgspec.Struct, frozen=True, tag="stage"):
    """Copy the content of a checkpoint into the host's memory."""


class RankWriteStaged(msgspec.Struct, frozen=True, tag="write_staged"):
    """Write the staged checkpoint; answered when it is written, other calls go on meanwhile."""

    directory: str


class RankLoad(msgspec.Struct, frozen=True, tag="load"):
    """Continue from a checkpoint."""

    directory: str


class RankExport(msgspec.Struct, frozen=True, tag="export"):
    """Write a Hugging Face model."""

    directory: str


class RankIdle(msgspec.Struct, frozen=True, tag="idle"):
    """A heartbeat from rank 0 to the others while the daemon asks nothing."""


class RankEnd(msgspec.Struct, frozen=True, tag="end"):
    """End in peace. The only answer is the end of the ranks."""


RankRequest = (
    RankJoin
    | RankStart
    | RankStep
    | RankEvaluate
    | RankSupervise
    | RankEndSupervised
    | RankWriteState
    | RankWriteSnapshot
    | RankSave
    | RankStage
    | RankWriteStaged
    | RankLoad
    | RankExport
    | RankIdle
    | RankEnd
)
READING = (RankEvaluate, RankWriteState, RankWriteSnapshot, RankSave, RankExport)
"""Calls that change nothing: where one rank alone fails in them, all go on."""


class RanksJoined(msgspec.Struct, frozen=True, tag="joined"):
    """The world stands; `pids` of its ranks in order, 0 for one on another machine."""

    pids: list[int]


class RankDone(msgspec.Struct, frozen=True, tag="done"):
    """A call has succeeded, with figures by name."""

    values: dict[str, float] = {}


class RankError(msgspec.Struct, frozen=True, tag="failed"):
    """An error that leaves the ranks as they were."""

    detail: str
    of_storage: bool
    """StorageError; else EngineError."""


class RanksBroken(msgspec.Struct, frozen=True, tag="broken"):
    """The ranks end: these do not answer any more."""

    ranks: list[int]
    detail: str


RankAnswer = RanksJoined | RankDone | RankError | RanksBroken

RankCall = ProcessMessage[RankRequest]
RankReply = ProcessMessage[RankAnswer]
CALLS: msgspec.msgpack.Decoder[RankCall] = msgspec.msgpack.Decoder(RankCall)
REPLIES: msgspec.msgpack.Decoder[RankReply] = msgspec.msgpack.Decoder(RankReply)
