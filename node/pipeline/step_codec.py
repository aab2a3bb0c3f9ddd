"""Encode the schedule of a step for the later stages: sequences, tokens, cache blocks.

- No token ids are sent and nothing is pickled.
- The schedule is untrusted: KnownSequences checks every number against the plan and the earlier steps, as an
  invalid block number would be written to.
- A step has hundreds of parts, which hold numbers only: they are excluded from garbage collection.
- A sequence that vLLM resumes after a preemption is sent as a new one, so later stages keep no preempted state,
  and a stage that replaces another one needs none.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from ...protocol.pipelines import PipelineShape
from ..errors import BAD_FILE, EngineError
from ..inference.vllm_arguments import SAMPLING

Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Key = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Blocks = tuple[Annotated[int, msgspec.Meta(ge=0, le=2**40)], ...]
REMEMBERED = 8
"""Limit of known sequences, as a multiple of max_sequences: preempted ones stay known until they end."""


class NewSequence(msgspec.Struct, frozen=True, array_like=True, tag=0, gc=False):
    """A sequence that is new to the later stages, or has to be recomputed."""

    key: Key
    """Stage 0's number of the request."""
    tokens: Count
    """Current length in tokens."""
    computed: Count
    """Tokens already in the cache, by prefix sharing."""
    scheduled: Count
    blocks: Blocks
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    temperature: Annotated[float, msgspec.Meta(gt=0)]
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31)]
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)]


class ContinuedSequence(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """A sequence that continues from an earlier step."""

    key: Key
    tokens: Count
    computed: Count
    scheduled: Count
    blocks: Blocks
    """Blocks appended in this step."""


SequencePart = NewSequence | ContinuedSequence


class StageStep(msgspec.Struct, frozen=True, array_like=True):
    """The schedule of a micro-batch; rows of its states are in the order of `parts`."""

    parts: tuple[SequencePart, ...]
    ended: tuple[Key, ...] = ()
    """Sequences that have ended."""


class DrawnTokens(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that the last stage sampled: one for every part with draws(), in order."""

    tokens: tuple[Annotated[int, msgspec.Meta(ge=0, le=2**31)], ...]


_STEPS = msgspec.msgpack.Decoder(StageStep)
_DRAWN = msgspec.msgpack.Decoder(DrawnTokens)


def draws(part: SequencePart) -> bool:
    """Return whether the step computes the part's last token, so that the next token is sampled."""
    return part.computed + part.scheduled == part.tokens


def encode(message: StageStep | DrawnTokens) -> bytes:
    """Encode the body of a frame."""
    return msgspec.msgpack.encode(message)


def decode_step(body: bytes) -> StageStep:
    """Decode a schedule. Raises EngineError."""
    try:
        return _STEPS.decode(body)
    except BAD_FILE as error:
        raise EngineError(f"stage 0 sent an invalid step ({error})") from error


def decode_drawn(body: bytes) -> DrawnTokens:
    """Decode sampled tokens. Raises EngineError."""
    try:
        return _DRAWN.decode(body)
    except BAD_FILE as error:
        raise EngineError(f"the last stage sent invalid tokens ({error})") from error


@dataclass
class KnownSequence:
    """A later stage's state of a sequence."""

    name: str
    """Request id for vLLM; a new one each time the sequence is recomputed."""
    length: int
    """Tokens computed so far."""
    tokens: int
    blocks: int


class KnownSequences:
    """The sequences of a ring epoch, as a later stage tracks them."""

    def __init__(self, shape: PipelineShape) -> None:
        self._shape = shape
        self._most_blocks = shape.kv_tokens // shape.block_size
        self._known: dict[int, KnownSequence] = {}
        self._serial = 0

    def names(self) -> list[str]:
        """Return the names of all known sequences."""
        return [sequence.name for sequence in self._known.values()]

    def reset(self) -> None:
        """Drop all sequences, for a new ring epoch."""
        self._known.clear()

    def apply(self, step: StageStep) -> tuple[list[str], list[str]]:
        """Apply a schedule; return the names of its parts and of the sequences that ended.

        Raises EngineError. The state is then partly updated, so the ring epoch must end.
        """
        self._check_size(step)
        ended = [self._known.pop(key).name for key in step.ended if key in self._known]
        names: list[str] = []
        for part in step.parts:
            if isinstance(part, NewSequence):
                if (old := self._known.pop(part.key, None)) is not None:
                    ended.append(old.name)
                names.append(self._begin(part))
            else:
                names.append(self._continue(part))
        if len(self._known) > REMEMBERED * self._shape.max_sequences:
            raise EngineError("stage 0 does not end its sequences")
        return names, ended

    def _check_size(self, step: StageStep) -> None:
        if not 0 < len(step.parts) <= self._shape.max_sequences:
            raise EngineError(
                f"a step has {len(step.parts)} sequences, the plan allows 1 to {self._shape.max_sequences}"
            )
        if len({part.key for part in step.parts}) != len(step.parts):
            raise EngineError("a step contains a sequence twice")
        if sum(part.scheduled for part in step.parts) > self._shape.max_step_tokens:
            raise EngineError("a step has more tokens than the plan allows")

    def _begin(self, part: NewSequence) -> str:
        self._serial += 1
        sequence = KnownSequence(f"{part.key}-{self._serial}", part.computed, part.tokens, 0)
        self._grow(sequence, part)
        self._known[part.key] = sequence
        return sequence.name

    def _continue(self, part: ContinuedSequence) -> str:
        sequence = self._known.get(part.key)
        if (
            sequence is None
            or part.computed != sequence.length
            or not sequence.tokens <= part.tokens
        ):
            raise EngineError(f"sequence {part.key} does not continue where it stopped")
        if part.tokens > sequence.tokens + 1:
            raise EngineError(f"sequence {part.key} grew by more than one sampled token")
        self._grow(sequence, part)
        return sequence.name

    def _grow(self, sequence: KnownSequence, part: SequencePart) -> None:
        end = part.computed + part.scheduled
        if not (0 < part.scheduled and end <= part.tokens <= self._shape.max_model_len):
            raise EngineError(f"sequence {part.key} has invalid token counts")
        # vLLM reserves block 0 for writes that are never read
        if part.blocks and not 0 < min(part.blocks) <= max(part.blocks) <= self._most_blocks:
            raise EngineError(f"sequence {part.key} has a block that does not exist")
        sequence.blocks += len(part.blocks)
        if sequence.blocks * self._shape.block_size < end or sequence.blocks > self._most_blocks:
            raise EngineError(f"sequence {part.key} has the wrong number of blocks")
        sequence.length, sequence.tokens = end, part.tokens


def check_drawn(answer: DrawnTokens, count: int, vocab_size: int) -> None:
    """Check that there are `count` tokens, all in the vocabulary. Raises EngineError."""
    if len(answer.tokens) != count:
        raise EngineError(f"the last stage sampled {len(answer.tokens)} tokens, not {count}")
    if answer.tokens and max(answer.tokens) >= vocab_size:
        raise EngineError("the last stage sampled a token outside the vocabulary")


@dataclass(frozen=True)
class SequenceSampling:
    """The constant fields of a request."""

    key: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    prompt: int
    """Length of the prompt in tokens."""


class StepEncoder:
    """Converts the outputs of vLLM's scheduler to StageSteps; must see every output, in order."""

    def __init__(self) -> None:
        self._requests: dict[str, SequenceSampling] = {}
        self._ended: list[int] = []

    def skip(self, output: Any) -> None:
        """Record an output without tokens: its ended sequences go into the next step."""
        for name in output.finished_req_ids:
            if (request := self._requests.pop(name, None)) is not None:
                self._ended.append(request.key)

    def encode(self, output: Any) -> StageStep:
        """Encode an output; parts are in the order of `output.num_scheduled_tokens`.

        Raises EngineError.
        """
        self.skip(output)
        if getattr(output, "kv_cache_block_copies", None):
            raise EngineError(
                "this model copies cache block by block, which pipelines do not support: choose another model"
            )
        scheduled: dict[str, int] = output.num_scheduled_tokens
        parts = {new.req_id: self._new(new, scheduled) for new in output.scheduled_new_reqs}
        parts |= self._cached(output.scheduled_cached_reqs, scheduled)
        ended, self._ended = tuple(self._ended), []
        return StageStep(tuple(parts[name] for name in scheduled), ended)

    def _new(self, new: Any, scheduled: dict[str, int]) -> SequencePart:
        key, seed, temperature, top_k, top_p, *_ = new.sampling_params.extra_args[SAMPLING]
        tokens = len(new.prompt_token_ids)
        request = SequenceSampling(key, seed, temperature, top_k, top_p, tokens)
        self._requests[new.req_id] = request
        computed, count = new.num_computed_tokens, scheduled[new.req_id]
        return _as_new(request, tokens, computed, count, _single_group(new.block_ids))

    def _cached(self, cached: Any, scheduled: dict[str, int]) -> dict[str, SequencePart]:
        parts: dict[str, SequencePart] = {}
        for index, name in enumerate(cached.req_ids):
            request, count = self._requests[name], scheduled[name]
            tokens = request.prompt + cached.num_output_tokens[index]
            computed = cached.num_computed_tokens[index]
            blocks = _single_group(cached.new_block_ids[index])
            if name in cached.resumed_req_ids:
                parts[name] = _as_new(request, tokens, computed, count, blocks)
            else:
                parts[name] = ContinuedSequence(request.key, tokens, computed, count, blocks)
        return parts


def _as_new(
    request: SequenceSampling, tokens: int, computed: int, scheduled: int, blocks: tuple[int, ...]
) -> NewSequence:
    return NewSequence(
        request.key,
        tokens,
        computed,
        scheduled,
        blocks,
        request.seed,
        request.temperature,
        request.top_k,
        request.top_p,
    )


def _single_group(groups: Any) -> tuple[int, ...]:
    """Return the blocks of the only KV cache group; vLLM's None means no new ones.

    Raises EngineError.
    """
    if groups is None:
        return ()
    if len(groups) != 1:
        raise EngineError(
            "this model has several kinds of caches, which pipelines do not support: choose another model"
        )
    return tuple(groups[0])
