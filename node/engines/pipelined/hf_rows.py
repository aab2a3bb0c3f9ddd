"""What the books of stage 0 are made of: requests, lanes, and those who are on their way into one."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ...pipeline.boundaries import Crossings
from ..engine import GenerateRequest
from ..requests import narrowing
from .lane_step import Draws, LaneStep


def _nobody() -> None:
    """Nobody waits."""


@dataclass(eq=False)
class Pending:
    """A request and what was drawn for it."""

    request: GenerateRequest
    end: int
    """Tokens that prompt and completion may come to together."""
    given_up: Callable[[], bool]
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    proof: bytearray = field(default_factory=bytearray)
    crossings: Crossings = field(default_factory=Crossings)
    versions: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(index of a token, version that drew from it on)."""
    stopped: bool = False
    failed: str = ""
    """Why it cannot be answered."""
    finished: Callable[[], object] = _nobody
    """Called once it is not open any more, by the thread that found out."""

    @property
    def open(self) -> bool:
        """Whether more is to be drawn."""
        whole = len(self.request.prompt) + len(self.tokens) >= self.end
        return not (self.stopped or self.failed or whole or self.given_up())

    def add(
        self, token: int, logprob: float, version: int, proof: bytes, crossed: Sequence[bytes]
    ) -> None:
        """One more token, drawn by `version`; its proof, and its fingerprint at each boundary."""
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((len(self.tokens), version))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.proof += proof
        self.crossings.add(crossed)
        self.stopped = token in self.request.stop_token_ids

    @property
    def known(self) -> tuple[int, ...]:
        """All tokens but the last one, which is read when the next one is drawn."""
        return (*self.request.prompt, *self.tokens)[:-1]

    @property
    def last(self) -> int:
        """The last token."""
        return self.tokens[-1] if self.tokens else self.request.prompt[-1]


@dataclass(eq=False)
class Arrival:
    """Rows of another lane that are to be put into this one."""

    lane: int
    rows: list[int]
    sequences: list[Pending]
    new: bool
    """Whether they have not drawn yet, in any lane."""
    ends: bool
    """Whether that lane is over then."""


@dataclass(eq=False)
class Lane:
    """Rows that go through the stages together."""

    number: int
    rows: list[Pending]
    coming: list[Pending] = field(default_factory=list[Pending])
    """Those that will be put into it once they are read."""
    arrivals: list[Arrival] = field(default_factory=list[Arrival])
    keep: list[int] | None = None
    """What is to be done to its rows before the next step, whatever else is."""
    reading: bool = False
    """Whether what it begins with is still being read, in it."""
    drawing: bool = False
    """Whether its next tokens are on their way."""

    @property
    def planned(self) -> list[Pending]:
        """All that will be in it."""
        there = (one for arrival in self.arrivals for one in arrival.sequences)
        return [*self.rows, *there, *self.coming]

    @property
    def size(self) -> int:
        """How many that is."""
        return len(self.rows) + len(self.coming) + sum(len(one.rows) for one in self.arrivals)

    def cost(self, more: Sequence[Pending] = ()) -> int:
        """Tokens of cache that it may take, with `more` in it."""
        rows = [*self.planned, *more]
        return len(rows) * max((one.end for one in rows), default=0)


@dataclass(eq=False)
class Newcomers:
    """Requests whose tokens are being read, in a lane of their own."""

    number: int
    sequences: list[Pending]
    owners: list[int]
    """Which row each of them continues; equal ones share it."""
    fills: deque[tuple[tuple[tuple[int, int], ...], list[int]]]
    """(row, count) and tokens of each step that is yet to be sent."""
    width: int
    prompts: int
    target: Lane | None
    """Where they go; None: their own lane."""
    begun: bool = False

    @property
    def cost(self) -> int:
        """Tokens of cache while they are in a lane of their own, and then in another one."""
        return self.prompts * self.width if self.target else 0


@dataclass(frozen=True)
class Step:
    """A micro-batch to send; `rows` are those that draw, in order."""

    step: LaneStep
    tokens: list[int]
    rows: tuple[Pending, ...]
    lane: Lane | None


def draws_of(sequences: Sequence[Pending]) -> Draws:
    """How these draw, for the last stage."""
    temperatures, top_ks, top_ps = zip(*(narrowing(one.request) for one in sequences), strict=True)
    return Draws(tuple(one.request.seed for one in sequences), temperatures, top_ks, top_ps)


def fills_of(
    prompts: Sequence[tuple[int, ...]], most: int
) -> Iterator[tuple[tuple[tuple[int, int], ...], list[int]]]:
    """Steps of up to `most` tokens that read these prompts, one row each."""
    fill: list[tuple[int, int]] = []
    tokens: list[int] = []
    for row, prompt in enumerate(prompts):
        at = 0
        while at < len(prompt):
            piece = prompt[at : at + most - len(tokens)]
            fill.append((row, len(piece)))
            tokens.extend(piece)
            at += len(piece)
            if len(tokens) == most:
                yield tuple(fill), tokens
                fill, tokens = [], []
    if fill:
        yield tuple(fill), tokens
