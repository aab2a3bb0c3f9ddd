"""What a new run takes over from a checkpoint of another: the model's history and its place in the data.

Leases, submissions and rollouts that wait stay with the other run: they were made under its manifest.
"""

import msgspec

from ..ops.errors import StorageError
from ..training.buffer import BufferSnapshot
from .state import Cursor


def fork(step: int, parts: dict[str, bytes]) -> dict[str, bytes]:
    """The parts with which a new run goes on after `step`. Raises StorageError if they are of no RL run.

    Tasks that were on lease come first, as after a crash; those of rollouts that waited are passed over.
    Reputations are kept: who was caught once is still who it is.
    """
    try:
        theirs = msgspec.json.decode(parts["cursor"], type=Cursor)
        msgspec.msgpack.decode(parts["buffer"], type=BufferSnapshot)
    except (KeyError, msgspec.DecodeError) as error:
        raise StorageError(
            "this is no checkpoint of `primerl-node train`: begin from its weights instead, --model.name "
            "DIRECTORY/weights/step_N"
        ) from error
    ours = Cursor(
        next_task=theirs.next_task,
        requeued=theirs.requeued,
        verified_up_to=0,
        history=theirs.history,
        accepted=0,
        rejected={},
        received=0,
        delta_bytes=0,
        full_bytes=0,
        staleness_history=theirs.staleness_history,
        staleness_max=theirs.staleness_max,
        reputations=theirs.reputations,
    )
    return {
        "cursor": msgspec.json.encode(ours),
        "buffer": msgspec.msgpack.encode(BufferSnapshot(step, [])),
    }
