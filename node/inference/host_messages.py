"""Messages between a node and its engine process, framed as in node/process/frames.py.

Many requests may be under way; an answer carries the number of its request. Weights travel by the path of a
file that both processes can read (handover.py), never in a message.
"""

import msgspec

from ..process.frames import ProcessMessage
from .engine import Completion, EngineStats, GenerateRequest, WeightsFault, Written
from .prefill import PrefillRequest

MAX_FRAME = 2**28
"""Largest message, bytes: far above the longest text with routes, or one part of an audit."""
USAGE, LOST, FAULT = "usage", "lost", "fault"
"""Kinds of EngineFailed: wrong config; engine unusable from now on; this request failed."""


class ApiOptions(msgspec.Struct, frozen=True):
    """Options of vLLM's own OpenAI server over an engine; see vllm_api.py."""

    served_name: str
    """Model id in requests."""
    tool_call_parser: str = ""
    """vLLM's name of the parser of tool calls; empty for none."""
    reasoning_parser: str = ""
    """vLLM's name of the parser of reasoning; empty for none."""
    socket: str = ""
    """Path of the Unix socket to listen on; HostedEngine gives each engine its own."""


class EngineImport(msgspec.Struct, frozen=True, array_like=True, tag="import"):
    """Request to import the engine's libraries before the setup is known; has no answer."""


class EngineSetUp(msgspec.Struct, frozen=True, array_like=True, tag="setup"):
    """Request to start the engine, before any that is answered; answered by EngineDone."""

    config: bytes
    """EngineConfig as JSON."""
    model_dir: str
    fingerprint: str
    place: bytes = b""
    """Place of a pipeline stage (inference/place.py); empty for a whole engine."""
    api: ApiOptions | None = None
    """Options of vLLM's OpenAI server; None: it is not started."""


class EngineCheck(msgspec.Struct, frozen=True, array_like=True, tag="check"):
    """Request to check whether the state in a file fits; answered by WeightsFault."""

    path: str


class EngineLoad(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Request to load a file that passed EngineCheck; answered by Written."""

    version: int
    path: str


class EngineStage(msgspec.Struct, frozen=True, array_like=True, tag="stage"):
    """Request to prepare an update beside generation; answered by WeightsFault."""

    path: str


class EngineWrite(msgspec.Struct, frozen=True, array_like=True, tag="write"):
    """Request to write the prepared update; answered by Written."""

    version: int


class EngineKeep(msgspec.Struct, frozen=True, array_like=True, tag="keep"):
    """Request to copy the weights as they are; answered by EngineKept."""

    key: int


class EngineRecall(msgspec.Struct, frozen=True, array_like=True, tag="recall"):
    """Request to write a copy of weights again; answered by Written."""

    version: int
    key: int


class EngineDraw(msgspec.Struct, frozen=True, array_like=True, tag="draw"):
    """Request to sample a completion; answered by EngineDrawn."""

    request: GenerateRequest


class EnginePrefill(msgspec.Struct, frozen=True, array_like=True, tag="prefill"):
    """Request to read texts and measure their claims; answered by EnginePrefilled."""

    requests: list[PrefillRequest]


class EngineDrop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Cancellation of the request with this message's number; has no answer."""


class EngineRejoin(msgspec.Struct, frozen=True, array_like=True, tag="rejoin"):
    """Request to begin a chain of this epoch, as stage 0; answered by EngineDone."""

    epoch: int


class EnginePing(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Heartbeat; answered by EnginePong at once."""


class EngineDone(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """Success of a request that has no other answer."""


class EngineKept(msgspec.Struct, frozen=True, array_like=True, tag="kept"):
    """Keys of all copies of weights that the engine has."""

    keys: list[int]


class EngineDrawn(msgspec.Struct, frozen=True, array_like=True, tag="drawn"):
    """The completion of an EngineDraw."""

    completion: Completion


class EnginePrefilled(msgspec.Struct, frozen=True, array_like=True, tag="prefilled"):
    """Measurements of each text of an EnginePrefill; see prefill.read_rows()."""

    rows: list[bytes]


class EnginePong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    """Answer to a heartbeat: seconds without a token despite work; 0 without work."""

    stuck_s: float


class EngineFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Failure of a request."""

    detail: str
    kind: str


EngineRequest = (
    EngineImport
    | EngineSetUp
    | EngineCheck
    | EngineLoad
    | EngineStage
    | EngineWrite
    | EngineKeep
    | EngineRecall
    | EngineDraw
    | EngineDrop
    | EnginePing
    | EngineRejoin
    | EnginePrefill
)
EngineAnswer = (
    EngineDone
    | WeightsFault
    | Written
    | EngineKept
    | EngineDrawn
    | EnginePrefilled
    | EnginePong
    | EngineFailed
    | EngineStats
)
REQUESTS: msgspec.msgpack.Decoder[ProcessMessage[EngineRequest]] = msgspec.msgpack.Decoder(
    ProcessMessage[EngineRequest]
)
ANSWERS: msgspec.msgpack.Decoder[ProcessMessage[EngineAnswer]] = msgspec.msgpack.Decoder(
    ProcessMessage[EngineAnswer]
)
