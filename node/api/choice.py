"""One completion as it grows: asked of the engine in one piece, or in several that go on from each other.

The noise of a token depends on its seed and its place alone, so a completion in pieces is the completion in
one piece. Pieces are what streams are made of, and where stop strings, which engines do not know, are found.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from ..engines.adjustment import Adjustment
from ..engines.engine import Completion, Engine, GenerateRequest, Likeliest
from .asked import Sampling
from .replies import Telling
from .stops import find_stop, may_begin, whole
from .text import CONTEXT, Text

FIRST_PIECE = 4
"""Tokens of the first piece of a stream; each is twice as long as the one before."""
FIRST_LOOK, LAST_LOOK = 32, 256
"""The same where only stop strings are looked for."""


@dataclass(frozen=True)
class Wanted:
    """A completion to make."""

    index: int
    """Of the choice in the answer."""
    prompt: tuple[int, ...]
    most: int
    """Tokens."""
    seed: int
    sampling: Sampling
    group: bytes
    chat: bool
    """A reply begins a text of its own; a completion goes on with the prompt's."""


@dataclass
class News:
    """What came since somebody looked last."""

    token_ids: list[int]
    logprobs: list[float]
    text: str
    first: int
    """Index of the first of these tokens."""
    likeliest: Sequence[Likeliest] = ()
    """Beside each token, if that was asked for."""


@dataclass
class Choice:
    """A completion and how far it has come."""

    wanted: Wanted
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    likeliest: list[Likeliest] = field(default_factory=list[Likeliest])
    spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(index of a token, policy version from it on)."""
    text: str = ""
    finish: str = ""
    """`stop` or `length`; empty while it grows."""
    stop_reason: int | str | None = None
    """The stop string, or the stop token where that is none of the model's own end."""
    telling: Telling = field(default_factory=Telling)
    """Of what a reader found in it."""
    _told_tokens: int = 0
    _told_chars: int = 0

    @property
    def index(self) -> int:
        """Of the choice in the answer."""
        return self.wanted.index

    @property
    def spoken(self) -> list[int]:
        """The tokens without the stop token that ended them."""
        ended = self.finish == "stop" and not isinstance(self.stop_reason, str)
        return self.token_ids[:-1] if ended else self.token_ids

    def versions(self) -> tuple[int, int]:
        """The first and the last policy version that drew a token."""
        return self.spans[0][1], self.spans[-1][1]

    def pieces(self, longest: int) -> Iterator[int]:
        """How many tokens to ask for, again and again; `longest` 0 asks for all at once where it can."""
        size, most = FIRST_PIECE, longest
        if not longest:
            size = most = self.wanted.most
            if self.wanted.sampling.stops:
                size, most = FIRST_LOOK, LAST_LOOK
        while not self.finish:
            yield min(size, self.wanted.most - len(self.token_ids))
            size = min(2 * size, max(most, FIRST_PIECE))

    async def grow(self, engine: Engine, text: Text, tokens: int, ends: tuple[int, ...]) -> None:
        """Draw up to so many tokens more. `ends` are the model's own end tokens. Raises EngineError."""
        wanted, sampling = self.wanted, self.wanted.sampling
        drawn = await engine.generate(
            GenerateRequest(
                prompt=(*wanted.prompt, *self.token_ids),
                max_tokens=tokens,
                temperature=sampling.temperature,
                seed=wanted.seed,
                stop_token_ids=sampling.stop_token_ids,
                group=wanted.group,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                top=sampling.top,
                adjustment=self._adjustment(),
            )
        )
        before = len(self.token_ids)
        self._add(drawn)
        if drawn.finish == "stop":
            self.finish = "stop"
            last = self.token_ids[-1]
            self.stop_reason = None if last in ends else last
        elif len(drawn.token_ids) < tokens or len(self.token_ids) >= wanted.most:
            self.finish = "length"
        self.text = self._said(text, len(self.token_ids))
        if sampling.stops:
            self._cut(text, before)

    def news(self) -> News:
        """What came since the last time; the text that may be half a character, or the beginning of a stop
        string, comes later."""
        end = len(self.text)
        if not self.finish:
            sure = whole(self.text)
            end = len(sure) - may_begin(sure, self.wanted.sampling.stops)
        first, told = self._told_tokens, self._told_chars
        self._told_tokens, self._told_chars = len(self.token_ids), max(told, end)
        text = self.text[told : self._told_chars]
        return self._since(first, text)

    def everything(self) -> News:
        """All of it as one piece."""
        return self._since(0, self.text)

    def _since(self, first: int, text: str) -> News:
        return News(
            self.token_ids[first:], self.logprobs[first:], text, first, self.likeliest[first:]
        )

    def _adjustment(self) -> Adjustment | None:
        """For the next piece: to the engine, what was drawn is at the end of a prompt."""
        asked = self.wanted.sampling.adjustment
        return asked and msgspec.structs.replace(asked, drawn=len(self.token_ids))

    def _add(self, drawn: Completion) -> None:
        before = len(self.token_ids)
        self.token_ids += drawn.token_ids
        self.logprobs += drawn.logprobs
        self.likeliest += drawn.likeliest
        for start, version in drawn.spans or ((0, drawn.policy_first),):
            if not self.spans or self.spans[-1][1] != version:
                self.spans.append((before + start, version))

    def _said(self, text: Text, tokens: int) -> str:
        """The text of the first so many tokens, without the stop token that ends all of them."""
        sampling = self.wanted.sampling
        ended = self.finish == "stop" and tokens == len(self.token_ids)
        if ended and not sampling.include_stop:
            tokens -= 1
        after = () if self.wanted.chat else self.wanted.prompt[-CONTEXT:]
        return text.decode(self.token_ids[:tokens], special=sampling.special, after=after)

    def _cut(self, text: Text, before: int) -> None:
        """End at the first stop string, with the token that completes it; looked for in tokens from `before`
        on, which may complete what others began. Not by one that is complete in the first min_tokens."""
        stops, least = self.wanted.sampling.stops, self.wanted.sampling.least
        if len(self.token_ids) <= least:
            return
        past = len(self._said(text, least)) if least else 0
        if find_stop(self.text, stops, past) is None:
            return
        for tokens in range(max(before, least) + 1, len(self.token_ids) + 1):
            said = self._said(text, tokens)
            found = find_stop(said, stops, past)
            if found is not None:
                break
        else:
            return
        place, stop = found
        del self.token_ids[tokens:], self.logprobs[tokens:], self.likeliest[tokens:]
        self.spans = [span for span in self.spans if span[0] < tokens]
        self.finish, self.stop_reason = "stop", stop
        self.text = said[: place + len(stop)] if self.wanted.sampling.include_stop else said[:place]
