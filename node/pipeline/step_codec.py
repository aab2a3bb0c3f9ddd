"""Encode what stage 0 tells the others of a step: which sequences, how many tokens of each, in which blocks.

No token travels, and nothing is pickled. A stage that reads it trusts nothing: `Sequences` checks every
number against the plan and against the steps before, for a block that does not exist would be written to.

Parts come by the hundred a step and hold numbers only, so the garbage collector does not look at them. A
sequence that vLLM resumes after a preemption is a new one to the other stages: so no stage has to remember
it, and one that has just taken another's place knows as much as all others.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from ...protocol.pipelines import PipelineShape
from ..inference.vllm_arguments import SAMPLING
from ..ops.errors import EngineError

Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Key = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Blocks = tuple[Annotated[int, msgspec.Meta(ge=0, le=2**40)], ...]
REMEMBERED = 8
"""A stage remembers this many times max_sequences: preempted ones are not told of before they end."""


class NewSequence(msgspec.Struct, frozen=True, array_like=True, tag=0, gc=False):
    """A sequence that the stages behind do not know, or have to compute anew."""

    key: Key
    """Stage 0's number of the request."""
    tokens: Count
    """How long it is now."""
    computed: Count
    """Tokens of it that lie in its blocks already: another sequence's, which begins with the same ones."""
    scheduled: Count
    blocks: Blocks
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    temperature: Annotated[float, msgspec.Meta(gt=0)]
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31)]
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)]


class ContinuedSequence(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """A sequence that goes on."""

    key: Key
    tokens: Count
    computed: Count
    scheduled: Count
    blocks: Blocks
    """New ones, behind those that it has."""


SequencePart = NewSequence | ContinuedSequence


class StageStep(msgspec.Struct, frozen=True, array_like=True):
    """One micro-batch; rows of states are in the order of `parts`."""

    parts: tuple[SequencePart, ...]
    ended: tuple[Key, ...] = ()
    """Sequences that are over."""


class DrawnTokens(msgspec.Struct, frozen=True, array_like=True):
    """What the last stage drew: a token for every part that draws, in their order."""

    tokens: tuple[Annotated[int, msgspec.Meta(ge=0, le=2**31)], ...]


_STEPS = msgspec.msgpack.Decoder(StageStep)
_DRAWN = msgspec.msgpack.Decoder(DrawnTokens)


def draws(part: SequencePart) -> bool:
    """Whether its last token is computed now, and so the next one drawn."""
    return part.computed + part.scheduled == part.tokens


def encode(message: StageStep | DrawnTokens) -> bytes:
    """The body of a frame."""
    return msgspec.msgpack.encode(message)


def decode_step(body: bytes) -> StageStep:
    """Raises EngineError."""
    try:
        return _STEPS.decode(body)
    except msgspec.DecodeError as error:
        raise EngineError(f"stage 0 sent no step ({error})") from error


def decode_drawn(body: bytes) -> DrawnTokens:
    """Raises EngineError."""
    try:
        return _DRAWN.decode(body)
    except msgspec.DecodeError as error:
        raise EngineError(f"the last stage sent no tokens ({error})") from error


@dataclass
class KnownSequence:
    """What a stage knows of a sequence."""

    name: str
    """For vLLM: another one each time that it is computed anew."""
    length: int
    """Tokens computed so far."""
    tokens: int
    blocks: int


class KnownSequences:
    """The sequences of a chain, as a stage behind stage 0 sees them."""

    def __init__(self, shape: PipelineShape) -> None:
        self._shape = shape
        self._most_blocks = shape.kv_tokens // shape.block_size
        self._known: dict[int, KnownSequence] = {}
        self._serial = 0

    def names(self) -> list[str]:
        """Of all that are known."""
        return [one.name for one in self._known.values()]

    def forget(self) -> None:
        """A new chain begins."""
        self._known.clear()

    def take(self, step: StageStep) -> tuple[list[str], list[str]]:
        """The names of the parts, and those of the sequences that are over. Raises EngineError.

        After an error the chain is of no use: parts taken before it stay taken.
        """
        self._check_size(step)
        over = [self._known.pop(key).name for key in step.ended if key in self._known]
        names: list[str] = []
        for part in step.parts:
            if isinstance(part, NewSequence):
                if (old := self._known.pop(part.key, None)) is not None:
                    over.append(old.name)
                names.append(self._begin(part))
            else:
                names.append(self._go_on(part))
        if len(self._known) > REMEMBERED * self._shape.max_sequences:
            raise EngineError("stage 0 never ends its sequences")
        return names, over

    def _check_size(self, step: StageStep) -> None:
        if not 0 < len(step.parts) <= self._shape.max_sequences:
            raise EngineError(f"a step of {len(step.parts)} sequences is not in the plan")
        if len({part.key for part in step.parts}) != len(step.parts):
            raise EngineError("a step names a sequence twice")
        if sum(part.scheduled for part in step.parts) > self._shape.max_step_tokens:
            raise EngineError("a step has more tokens than the plan allows")

    def _begin(self, part: NewSequence) -> str:
        self._serial += 1
        one = KnownSequence(f"{part.key}-{self._serial}", part.computed, part.tokens, 0)
        self._grow(one, part)
        self._known[part.key] = one
        return one.name

    def _go_on(self, part: ContinuedSequence) -> str:
        one = self._known.get(part.key)
        if one is None or part.computed != one.length or not one.tokens <= part.tokens:
            raise EngineError(f"sequence {part.key} goes on where it did not stop")
        if part.tokens > one.tokens + 1:
            raise EngineError(f"sequence {part.key} grew by more than the token that was drawn")
        self._grow(one, part)
        return one.name

    def _grow(self, one: KnownSequence, part: SequencePart) -> None:
        end = part.computed + part.scheduled
        if not (0 < part.scheduled and end <= part.tokens <= self._shape.max_model_len):
            raise EngineError(f"sequence {part.key} is cut wrongly")
        # block 0 is vLLM's own: values that are never read are written there
        if part.blocks and not 0 < min(part.blocks) <= max(part.blocks) <= self._most_blocks:
            raise EngineError(f"sequence {part.key} has a block that there is not")
        one.blocks += len(part.blocks)
        if one.blocks * self._shape.block_size < end or one.blocks > self._most_blocks:
            raise EngineError(f"sequence {part.key} has the wrong number of blocks")
        one.length, one.tokens = end, part.tokens


def check_drawn(drawn: DrawnTokens, count: int, vocab_size: int) -> None:
    """Raise EngineError for tokens that are not `count` of the vocabulary."""
    if len(drawn.tokens) != count:
        raise EngineError("the last stage drew for other sequences than it was asked for")
    if drawn.tokens and max(drawn.tokens) >= vocab_size:
        raise EngineError("the last stage drew a token that there is not")


@dataclass(frozen=True)
class SequenceSampling:
    """What stays the same of a request."""

    key: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    prompt: int
    """Tokens of it."""


class StepEncoder:
    """Sees every output of the scheduler, in order."""

    def __init__(self) -> None:
        self._asked: dict[str, SequenceSampling] = {}
        self._ended: list[int] = []

    def skip(self, output: Any) -> None:
        """Note a step without a token: its ended sequences are named in the next step."""
        for name in output.finished_req_ids:
            if (asked := self._asked.pop(name, None)) is not None:
                self._ended.append(asked.key)

    def forget(self) -> None:
        """Begin a new chain, whose stages know no sequence."""
        self._ended.clear()

    def encode(self, output: Any) -> StageStep:
        """Its parts are in the order of `output.num_scheduled_tokens`. Raises EngineError."""
        self.skip(output)
        if getattr(output, "kv_cache_block_copies", None):
            raise EngineError("this model's cache is copied block by block, which no pipeline does")
        scheduled: dict[str, int] = output.num_scheduled_tokens
        parts = {new.req_id: self._new(new, scheduled) for new in output.scheduled_new_reqs}
        parts |= self._cached(output.scheduled_cached_reqs, scheduled)
        ended, self._ended = tuple(self._ended), []
        return StageStep(tuple(parts[name] for name in scheduled), ended)

    def _new(self, new: Any, scheduled: dict[str, int]) -> SequencePart:
        key, seed, temperature, top_k, top_p, *_ = new.sampling_params.extra_args[SAMPLING]
        tokens = len(new.prompt_token_ids)
        asked = SequenceSampling(key, seed, temperature, top_k, top_p, tokens)
        self._asked[new.req_id] = asked
        computed, count = new.num_computed_tokens, scheduled[new.req_id]
        return _as_new(asked, tokens, computed, count, _only(new.block_ids))

    def _cached(self, cached: Any, scheduled: dict[str, int]) -> dict[str, SequencePart]:
        parts: dict[str, SequencePart] = {}
        for index, name in enumerate(cached.req_ids):
            asked, count = self._asked[name], scheduled[name]
            tokens = asked.prompt + cached.num_output_tokens[index]
            computed = cached.num_computed_tokens[index]
            blocks = _only(cached.new_block_ids[index])
            if name in cached.resumed_req_ids:
                parts[name] = _as_new(asked, tokens, computed, count, blocks)
            else:
                parts[name] = ContinuedSequence(asked.key, tokens, computed, count, blocks)
        return parts


def _as_new(
    asked: SequenceSampling, tokens: int, computed: int, scheduled: int, blocks: tuple[int, ...]
) -> NewSequence:
    return NewSequence(
        asked.key,
        tokens,
        computed,
        scheduled,
        blocks,
        asked.seed,
        asked.temperature,
        asked.top_k,
        asked.top_p,
    )


def _only(groups: Any) -> tuple[int, ...]:
    """The blocks of the one group of layers that there is; None: no new ones."""
    if groups is None:
        return ()
    if len(groups) != 1:
        raise EngineError("this model has several kinds of caches, which no pipeline here has")
    return tuple(groups[0])
