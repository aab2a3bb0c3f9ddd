"""From what vLLM's scheduler says of a step to what the other stages are told of it.

A sequence that vLLM goes on with after it was preempted is a new one to them: so nobody has to remember it, and
a stage that has just taken another's place knows as much as all others.
"""

from dataclasses import dataclass
from typing import Any

from ...errors import EngineError
from ..vllm_options import SAMPLING
from .step_codec import Going, New, Part, Step


@dataclass(frozen=True)
class Asked:
    """What stays the same of a request."""

    key: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    prompt: int
    """Tokens of it."""


class Encoder:
    """Sees every output of the scheduler, in order."""

    def __init__(self) -> None:
        self._asked: dict[str, Asked] = {}
        self._ended: list[int] = []

    def skip(self, output: Any) -> None:
        """A step without a token: who ended is told with the next one."""
        for name in output.finished_req_ids:
            if (asked := self._asked.pop(name, None)) is not None:
                self._ended.append(asked.key)

    def forget(self) -> None:
        """A new chain begins, whose stages know nobody."""
        self._ended.clear()

    def encode(self, output: Any) -> Step:
        """Its parts are in the order of `output.num_scheduled_tokens`. Raises EngineError."""
        self.skip(output)
        if getattr(output, "kv_cache_block_copies", None):
            raise EngineError("this model's cache is copied block by block, which no pipeline does")
        scheduled: dict[str, int] = output.num_scheduled_tokens
        parts = {new.req_id: self._new(new, scheduled) for new in output.scheduled_new_reqs}
        parts |= self._cached(output.scheduled_cached_reqs, scheduled)
        ended, self._ended = tuple(self._ended), []
        return Step(tuple(parts[name] for name in scheduled), ended)

    def _new(self, new: Any, scheduled: dict[str, int]) -> Part:
        key, seed, temperature, top_k, top_p, *_ = new.sampling_params.extra_args[SAMPLING]
        tokens = len(new.prompt_token_ids)
        asked = Asked(key, seed, temperature, top_k, top_p, tokens)
        self._asked[new.req_id] = asked
        computed, count = new.num_computed_tokens, scheduled[new.req_id]
        return _as_new(asked, tokens, computed, count, _only(new.block_ids))

    def _cached(self, cached: Any, scheduled: dict[str, int]) -> dict[str, Part]:
        parts: dict[str, Part] = {}
        for index, name in enumerate(cached.req_ids):
            asked, count = self._asked[name], scheduled[name]
            tokens = asked.prompt + cached.num_output_tokens[index]
            computed = cached.num_computed_tokens[index]
            blocks = _only(cached.new_block_ids[index])
            if name in cached.resumed_req_ids:
                parts[name] = _as_new(asked, tokens, computed, count, blocks)
            else:
                parts[name] = Going(asked.key, tokens, computed, count, blocks)
        return parts


def _as_new(
    asked: Asked, tokens: int, computed: int, scheduled: int, blocks: tuple[int, ...]
) -> New:
    return New(
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
