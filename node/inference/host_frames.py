"""What a node and the process that holds vLLM for it say to each other; frames as in node/process/frames.py.

Many requests are under way at once: an answer bears the number of what it answers, and comes when it is
ready. Weights never travel here, only paths of files that both can read (handover.py).
"""

import msgspec

from .engine import Completion, GenerateRequest

USAGE, LOST, FAULT = "usage", "lost", "fault"
"""Kinds of Failed: the config is wrong; vLLM is of no use any more; only this request failed."""


class ApiOptions(msgspec.Struct, frozen=True):
    """How vLLM's own OpenAI server is started over an engine; see vllm_api.py."""

    served_name: str
    """Id of the model in requests."""
    tool_call_parser: str = ""
    """vLLM's name of the parser of tool calls; empty for none."""
    reasoning_parser: str = ""
    """The same for reasoning."""
    socket: str = ""
    """Path of the Unix socket to listen on; HostedEngine gives each engine its own."""


class SetUp(msgspec.Struct, frozen=True, array_like=True, tag="setup"):
    """Start vLLM; the first request, answered by Done."""

    number: int
    config: bytes
    """EngineConfig as JSON."""
    model_dir: str
    fingerprint: str
    place: bytes = b""
    """Of a stage of a pipeline (pipelined/vllm_place.py); empty for a whole engine."""
    api: ApiOptions | None = None
    """Serve vLLM's OpenAI routes; None: do not."""


class Check(msgspec.Struct, frozen=True, array_like=True, tag="check"):
    """Whether the state in a file fits; answered by Checked."""

    number: int
    path: str


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Load a file that was found right; answered by Wrote."""

    number: int
    version: int
    path: str


class Stage(msgspec.Struct, frozen=True, array_like=True, tag="stage"):
    """Get an update ready beside generation; answered by Checked."""

    number: int
    path: str


class Write(msgspec.Struct, frozen=True, array_like=True, tag="write"):
    """Write the update that is ready; answered by Wrote."""

    number: int
    version: int


class Draw(msgspec.Struct, frozen=True, array_like=True, tag="draw"):
    """A GenerateRequest; answered by Drawn."""

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    stop_token_ids: tuple[int, ...]
    top_k: int
    top_p: float


class Drop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Nobody wants the answer any more; answered by nothing."""

    number: int


class Rejoin(msgspec.Struct, frozen=True, array_like=True, tag="rejoin"):
    """Begin a chain of that epoch; for stage 0 of a pipeline. Answered by Done."""

    number: int
    epoch: int


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Answered by Pong at once."""

    number: int


Request = SetUp | Check | Load | Stage | Write | Draw | Drop | Ping | Rejoin


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """It is done."""

    number: int


class Checked(msgspec.Struct, frozen=True, array_like=True, tag="checked"):
    """What is wrong with a file; "" if nothing."""

    number: int
    fault: str
    placeless: list[str] = []
    """Tensors of which no single element can be written."""


class Wrote(msgspec.Struct, frozen=True, array_like=True, tag="wrote"):
    """Seconds without a step, and those of them that writing took."""

    number: int
    paused_s: float
    writing_s: float


class Drawn(msgspec.Struct, frozen=True, array_like=True, tag="drawn"):
    """A Completion."""

    number: int
    token_ids: list[int]
    logprobs: list[float]
    stopped: bool
    spans: list[tuple[int, int]]
    """(index of a token, version that drew from it on); the first is (0, ...)."""
    proof: bytes
    boundaries: tuple[bytes, ...] = ()


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    """How long vLLM has given nothing though there is work; 0 without work."""

    number: int
    stuck_s: float


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """It cannot be done."""

    number: int
    detail: str
    kind: str


class Busy(msgspec.Struct, frozen=True, array_like=True, tag="busy"):
    """How busy vLLM is, told when it changes; fields as in EngineStats."""

    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0
    kv_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    lanes: int = 0
    """Of stage 0 of a pipeline: into how many micro-batches its sequences are cut, how many of them are under
    way, and which share of its time the slowest stage waits."""
    in_flight: int = 0
    stall_share: float = 0.0


Answer = Done | Checked | Wrote | Drawn | Pong | Failed
_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_ANSWERS: msgspec.msgpack.Decoder[Answer | Busy] = msgspec.msgpack.Decoder(Answer | Busy)


def read_request(body: bytes) -> Request:
    """Raises msgspec.DecodeError (a ValueError)."""
    return _REQUESTS.decode(body)


def read_answer(body: bytes) -> Answer | Busy:
    """Raises msgspec.DecodeError (a ValueError)."""
    return _ANSWERS.decode(body)


def as_draw(number: int, request: GenerateRequest) -> Draw:
    """A request on its way; its group stays behind."""
    return Draw(
        number,
        request.prompt,
        request.max_tokens,
        request.temperature,
        request.seed,
        request.stop_token_ids,
        request.top_k,
        request.top_p,
    )


def as_request(draw: Draw) -> GenerateRequest:
    """A request that has come."""
    return GenerateRequest(
        draw.prompt,
        draw.max_tokens,
        draw.temperature,
        draw.seed,
        draw.stop_token_ids,
        top_k=draw.top_k,
        top_p=draw.top_p,
    )


def as_drawn(number: int, found: Completion) -> Drawn:
    """A completion on its way back."""
    spans = list(found.spans) or [(0, found.policy_first)]
    stopped = found.finish == "stop"
    return Drawn(
        number,
        found.token_ids,
        found.logprobs,
        stopped,
        spans,
        found.proof,
        found.boundaries,
    )


def as_completion(drawn: Drawn) -> Completion:
    """A completion that has come."""
    return Completion(
        token_ids=drawn.token_ids,
        logprobs=drawn.logprobs,
        finish="stop" if drawn.stopped else "length",
        policy_first=drawn.spans[0][1],
        policy_last=drawn.spans[-1][1],
        spans=tuple(drawn.spans) if len(drawn.spans) > 1 else (),
        proof=drawn.proof,
        boundaries=drawn.boundaries,
    )
