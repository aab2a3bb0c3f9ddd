"""Rows as training samples, by number: of a corpus, or of an environment's tasks.

Seam: `Examples`. Reading the same number again gives the same sample.
"""

import asyncio
from collections.abc import Sequence
from typing import Literal, Protocol

from ...crypto.hashing import derive
from ..environments.environment import Environment, EnvironmentFailed, Split
from ..errors import UsageError
from ..training.backend import Sample
from .corpus import Corpus
from .rows import (
    BadRow,
    Conversation,
    RawText,
    read_row,
)
from .template import Tokens

TOO_LONG = "too_long"
UNTRAINED = "untrained"
HELD_OUT = "held_out"
MADE_AT_ONCE = 32
"""Tasks that an environment is asked for together."""


class Tokenizer(Protocol):
    """Makes a sequence of a row: TemplateTokenizer, RendererTokenizer."""

    def tokens(self, row: Conversation | RawText) -> Tokens:
        """The row as one sequence. Raises BadRow."""
        ...


class Passed(Exception):
    """This row gives no sample, and is not to blame: it is TOO_LONG, HELD_OUT, or has nothing of the roles
    that are learned (UNTRAINED)."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Examples(Protocol):
    """Numbered samples."""

    @property
    def size(self) -> int | None:
        """How many rows an epoch has; None: they never end."""
        ...

    def sample(self, index: int) -> Sample:
        """Row number `index`. Raises BadRow, Passed."""
        ...

    def where(self, index: int) -> str:
        """What a person calls that row."""
        ...

    def identity(self) -> str:
        """Equal for equal data; a run resumes on no other."""
        ...


class Fit:
    """Tokens to samples of at most `seq_len` tokens."""

    def __init__(self, seq_len: int, too_long: Literal["drop", "truncate"]) -> None:
        self._seq_len = seq_len
        self._too_long = too_long

    def sample(self, tokens: Tokens) -> Sample:
        """A sample that cross entropy learns from. Raises Passed."""
        token_ids, mask = tokens.token_ids, tokens.mask
        if not any(mask[1:]):
            raise Passed(UNTRAINED)
        if len(token_ids) > self._seq_len:
            token_ids, mask = token_ids[: self._seq_len], mask[: self._seq_len]
            if self._too_long == "drop" or not any(mask[1:]):
                raise Passed(TOO_LONG)
        # the first token has nothing before it that could have predicted it
        trained = [False, *mask[1:]]
        return Sample(token_ids, trained, [0.0] * len(token_ids), 1.0)


class CorpusExamples:
    """Rows of files; with a `holdout` only those on one side of it."""

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        fit: Fit,
        *,
        strings: Literal["chat", "raw"],
        holdout: "Holdout | None" = None,
        held_out: bool = False,
    ) -> None:
        """`held_out`: give the rows that are held out, and pass over the others."""
        self._corpus = corpus
        self._tokenizer = tokenizer
        self._fit = fit
        self._strings: Literal["chat", "raw"] = strings
        self._holdout = holdout
        self._held_out = held_out

    @property
    def size(self) -> int | None:
        """Rows of all files."""
        return len(self._corpus)

    def sample(self, index: int) -> Sample:
        """Row number `index`. Raises BadRow, Passed."""
        data = self._corpus.read(index)
        if self._holdout is not None and self._holdout.takes(data) != self._held_out:
            raise Passed(HELD_OUT)
        return self._fit.sample(self._tokenizer.tokens(read_row(data, strings=self._strings)))

    def where(self, index: int) -> str:
        """file:line."""
        return self._corpus.where(index)

    def identity(self) -> str:
        """Names and numbers of rows of all files."""
        return self._corpus.identity()


class Holdout:
    """A share of all rows, chosen by their content: a row that occurs twice is on one side only."""

    def __init__(self, fraction: float) -> None:
        self._below = int(fraction * (1 << 64))

    def takes(self, data: bytes) -> bool:
        """Whether the row with these bytes is held out."""
        return int.from_bytes(derive("sft holdout", data.strip())[:8], "little") < self._below


_Made = tuple[list[int], list[int] | None] | EnvironmentFailed


class TaskExamples:
    """Demonstrations of a running environment's tasks."""

    def __init__(
        self,
        environment: Environment,
        fit: Fit,
        *,
        first: int,
        split: Split,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Sample i is of task `first` + i of `split`. The environment runs in `loop`; sample() is called in
        another thread."""
        self._environment = environment
        self._loop = loop
        self._block = -1
        self._made: list[_Made] = []
        self._fit = fit
        self._first = first
        self._split: Split = split

    @property
    def size(self) -> int | None:
        """Tasks are taken as endless; a taskset that is not begins again by itself."""
        return None

    def sample(self, index: int) -> Sample:
        """Prompt and right reply of a task. Raises BadRow, Passed, UsageError."""
        block, place = divmod(index, MADE_AT_ONCE)
        if block != self._block:
            making = asyncio.run_coroutine_threadsafe(self._make(block), self._loop)
            self._made, self._block = making.result(), block
        made = self._made[place]
        if isinstance(made, EnvironmentFailed):
            raise BadRow("environment", str(made)) from made
        prompt, reply = made
        if reply is None:
            raise UsageError(f"{self._environment.name} has no demonstrations: use data.files")
        mask = [False] * len(prompt) + [True] * len(reply)
        return self._fit.sample(Tokens([*prompt, *reply], mask))

    async def _make(self, block: int) -> list[_Made]:
        first = self._first + block * MADE_AT_ONCE
        return await asyncio.gather(*map(self._one, range(first, first + MADE_AT_ONCE)))

    async def _one(self, index: int) -> _Made:
        environment = self._environment
        try:
            task = await environment.task(index, self._split)
            return await environment.prompt(task), await environment.demonstration(task)
        except EnvironmentFailed as error:
            return error

    def where(self, index: int) -> str:
        """environment:task."""
        return f"{self._environment.name}:{self._first + index}"

    def identity(self) -> str:
        """The environment's id."""
        return f"environment {self._environment.name}"


def first_samples(examples: Examples, most: int) -> Sequence[Sample]:
    """The first samples in the order of the data, for validation; what is bad or passed over is left out."""
    found: list[Sample] = []
    end = most if examples.size is None else examples.size
    for index in range(end):
        if len(found) == most:
            break
        try:
            found.append(examples.sample(index))
        except (BadRow, Passed):
            continue
    return found
