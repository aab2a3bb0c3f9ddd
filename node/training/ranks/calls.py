"""Messages between the trainer's daemon and rank 0, which rank 0 passes on to the other ranks. No torch.

Frames as in node/process/frames.py. Numbers, text and bytes go across, never code; tensors travel by files in a
folder that only the daemon's user can read.
"""

from collections.abc import Sequence

import msgspec

from ...ops.errors import EngineError, NodeError, StorageError
from ...process.frames import Message
from ..backend import Sample, TrainBatch

MAX_FRAME = 2**31
"""Bytes of a call: a batch of some hundred million tokens."""

ENDED = "rank {rank} ended: {reason}"
"""What a rank writes to its standard error before it ends by its own fault."""
EXIT_LOST = 75
"""Exit code of a rank that ends because of the others: it is not the one at fault."""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """The first call: become one world. Answered by Joined."""

    config: str
    """TrainingConfig as JSON."""


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Build model and optimizer, also in place of those that are there."""

    model_dir: str
    max_steps: int
    seed: int
    temperature: float


class Step(msgspec.Struct, frozen=True, tag="step"):
    """One optimizer step. Answered by Figures."""

    batch: TrainBatch


class Evaluate(msgspec.Struct, frozen=True, tag="evaluate"):
    """Cross entropy without learning. Answered by Figures."""

    samples: list[Sample]


class Supervise(msgspec.Struct, frozen=True, tag="supervise"):
    """A step of the warm-up. Answered by Figures with `loss`."""

    examples: list[tuple[list[int], list[int]]]
    lr: float


class EndSupervised(msgspec.Struct, frozen=True, tag="end_supervised"):
    """Forget the optimizer's moments."""


class WriteState(msgspec.Struct, frozen=True, tag="state"):
    """Write the bf16 policy to a file."""

    path: str


class WriteSnapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """Write what changed since the last snapshot to a file, or all of it."""

    path: str
    whole: bool


class Save(msgspec.Struct, frozen=True, tag="save"):
    """Write a checkpoint."""

    directory: str


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """Copy what Save would write into the host's memory."""


class WriteStaged(msgspec.Struct, frozen=True, tag="write_staged"):
    """Write what was staged; answered when it is written, other calls go on meanwhile."""

    directory: str


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Become what Save wrote."""

    directory: str


class Export(msgspec.Struct, frozen=True, tag="export"):
    """Write a Hugging Face model."""

    directory: str


class Idle(msgspec.Struct, frozen=True, tag="idle"):
    """Sent to the ranks by rank 0 while the daemon asks nothing: a heartbeat."""


class End(msgspec.Struct, frozen=True, tag="end"):
    """End in peace. The only answer is the end of the ranks."""


Ask = (
    Join
    | Start
    | Step
    | Evaluate
    | Supervise
    | EndSupervised
    | WriteState
    | WriteSnapshot
    | Save
    | Stage
    | WriteStaged
    | Load
    | Export
    | Idle
    | End
)
READING = (Evaluate, WriteState, WriteSnapshot, Save, Export)
"""Calls that change nothing: one rank alone may fail in them, and all go on."""


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """The world stands; `pids` of its ranks in order, 0 for one on another machine."""

    pids: list[int]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """It is done."""


class Figures(msgspec.Struct, frozen=True, tag="figures"):
    """Numbers by name."""

    values: dict[str, float]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """An error that leaves the ranks as they were; `kind` is a key of KINDS."""

    kind: str
    detail: str


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """The ranks end: these do not answer any more."""

    ranks: list[int]
    detail: str


Answer = Joined | Done | Figures | Failed | Broken


Call = Message[Ask]
Reply = Message[Answer]
_CALLS: msgspec.msgpack.Decoder[Call] = msgspec.msgpack.Decoder(Call)
_REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def read_call(body: bytes) -> Call:
    """Decode a call. Raises ValueError."""
    return _CALLS.decode(body)


def read_reply(body: bytes) -> Reply:
    """Decode a reply. Raises ValueError."""
    return _REPLIES.decode(body)


KINDS: dict[str, type[NodeError]] = {
    "value": EngineError,
    "engine": EngineError,
    "storage": StorageError,
}
"""What an error of a learner is in the daemon."""


def failed(error: ValueError | EngineError | StorageError) -> Failed:
    """An error that a learner raised as a value."""
    kind = next((name for name, known in KINDS.items() if type(error) is known), "value")
    return Failed("engine" if isinstance(error, EngineError) else kind, str(error))


def raised(answer: Failed) -> NodeError:
    """The error to raise for it in the daemon."""
    return KINDS.get(answer.kind, EngineError)(answer.detail)


def tokens(samples: Sequence[Sample]) -> int:
    """Tokens of all samples."""
    return sum(len(sample.token_ids) for sample in samples)
