"""Messages between a node and the process that holds an engine for it; framed as in node/process/frames.py.

Many requests are under way at once, each with a number that its answer bears. Weights travel by the path of a
file that both processes can read (handover.py), never in a message.
"""

import msgspec

from ..process.frames import ProcessMessage
from .engine import Completion, GenerateRequest, WeightsFault, Written
from .prefill import PrefillRequest

MAX_FRAME = 2**28
"""Far above the longest text with its routes, and above a part of what an audit reads at once."""
USAGE, LOST, FAULT = "usage", "lost", "fault"
"""Kinds of EngineFailed: the config is wrong; the engine is of no use any more; only this request failed."""


class ApiOptions(msgspec.Struct, frozen=True):
    """How vLLM's own OpenAI server is started over an engine; see vllm_api.py."""

    served_name: str
    """Id of the model in requests."""
    tool_call_parser: str = ""
    """vLLM's name of the parser of tool calls; empty for none."""
    reasoning_parser: str = ""
    """vLLM's name of the parser of reasoning; empty for none."""
    socket: str = ""
    """Path of the Unix socket to listen on; HostedEngine gives each engine its own."""


class EngineSetUp(msgspec.Struct, frozen=True, array_like=True, tag="setup"):
    """Start the engine; the first request, answered by EngineDone."""

    config: bytes
    """EngineConfig as JSON."""
    model_dir: str
    fingerprint: str
    place: bytes = b""
    """Place of a pipeline stage (pipeline/place.py); empty for a whole engine."""
    api: ApiOptions | None = None
    """Serve vLLM's OpenAI routes; None: do not."""


class EngineCheck(msgspec.Struct, frozen=True, array_like=True, tag="check"):
    """Tell whether the state in a file fits; answered by WeightsFault."""

    path: str


class EngineLoad(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Load a file that was found right; answered by Written."""

    version: int
    path: str


class EngineStage(msgspec.Struct, frozen=True, array_like=True, tag="stage"):
    """Prepare an update beside generation; answered by WeightsFault."""

    path: str


class EngineWrite(msgspec.Struct, frozen=True, array_like=True, tag="write"):
    """Write the prepared update; answered by Written."""

    version: int


class EngineDraw(msgspec.Struct, frozen=True, array_like=True, tag="draw"):
    """Sample a completion; answered by EngineDrawn."""

    request: GenerateRequest


class EnginePrefill(msgspec.Struct, frozen=True, array_like=True, tag="prefill"):
    """Read texts and measure their claims, under one policy; answered by EnginePrefilled."""

    requests: list[PrefillRequest]


class EngineDrop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Cancel the request with this message's number; answered by nothing."""


class EngineRejoin(msgspec.Struct, frozen=True, array_like=True, tag="rejoin"):
    """Begin a chain of this epoch, as stage 0 of a pipeline; answered by EngineDone."""

    epoch: int


class EnginePing(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Ask for a sign of life; answered by EnginePong at once."""


class EngineDone(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The request was carried out."""


class EngineDrawn(msgspec.Struct, frozen=True, array_like=True, tag="drawn"):
    """The completion of an EngineDraw."""

    completion: Completion


class EnginePrefilled(msgspec.Struct, frozen=True, array_like=True, tag="prefilled"):
    """What was measured of each text of an EnginePrefill (prefill.read_rows())."""

    rows: list[bytes]


class EnginePong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    """Seconds for which the engine has drawn no token though it has work; 0 without work."""

    stuck_s: float


class EngineFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The request failed."""

    detail: str
    kind: str


class EngineBusy(msgspec.Struct, frozen=True, array_like=True, tag="busy"):
    """How busy the engine is, sent when it changes; fields as in EngineStats."""

    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0
    kv_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    lanes: int = 0
    """Stage 0 of a pipeline: micro-batches that its sequences are cut into."""
    in_flight: int = 0
    """Micro-batches that are under way."""
    stall_share: float = 0.0
    """Share of its time that the slowest stage waits."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0


EngineRequest = (
    EngineSetUp
    | EngineCheck
    | EngineLoad
    | EngineStage
    | EngineWrite
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
    | EngineDrawn
    | EnginePrefilled
    | EnginePong
    | EngineFailed
    | EngineBusy
)
_REQUESTS: msgspec.msgpack.Decoder[ProcessMessage[EngineRequest]] = msgspec.msgpack.Decoder(
    ProcessMessage[EngineRequest]
)
_ANSWERS: msgspec.msgpack.Decoder[ProcessMessage[EngineAnswer]] = msgspec.msgpack.Decoder(
    ProcessMessage[EngineAnswer]
)


def read_engine_request(body: bytes) -> ProcessMessage[EngineRequest]:
    """Decode a request. Raises msgspec.DecodeError (a ValueError)."""
    return _REQUESTS.decode(body)


def read_engine_answer(body: bytes) -> ProcessMessage[EngineAnswer]:
    """Decode an answer. Raises msgspec.DecodeError (a ValueError)."""
    return _ANSWERS.decode(body)
