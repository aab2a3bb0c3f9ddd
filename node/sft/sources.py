"""Opens what a config names: training examples and validation samples.

Blocking: files are converted and indexed here, and a hub may be asked; call it off the event loop.
"""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ..environments.chat import ChatFormat
from ..environments.environment import Environment, EnvironmentFailed
from ..errors import UsageError
from ..sft_config import DataConfig, SftConfig
from ..training.backend import Sample
from .conversion import as_lines, find_files
from .corpus import Corpus, RowFile
from .examples import (
    CorpusExamples,
    Examples,
    Fit,
    Holdout,
    TaskExamples,
    Tokenizer,
    first_samples,
)
from .template import TemplateTokenizer

TEMPLATE = "template"
MIB = 1 << 20


@dataclass(frozen=True)
class Data:
    """What a run learns from, and what it is measured on."""

    training: Examples
    validation: Sequence[Sample]


def open_tasks(
    config: SftConfig, environment: Environment, first: int, loop: asyncio.AbstractEventLoop
) -> Data:
    """Demonstrations of a running environment: training tasks from `first` on, held-out ones from 0 on.

    It runs in `loop`; what is returned is read in other threads.
    """
    fit = Fit(config.training.seq_len, config.data.too_long)
    training = TaskExamples(environment, fit, first=first, split="train", loop=loop)
    held_out = TaskExamples(environment, fit, first=0, split="eval", loop=loop)
    return Data(training, first_samples(held_out, config.validation.rows))


def check_files(config: SftConfig) -> None:
    """Whether there is something to learn from, before a model is fetched. Raises UsageError."""
    if not config.data.hub and config.data.environment is None:
        _training_files(config.data)
    if config.validation.files:
        find_files(config.validation.files)


def open_files(config: SftConfig, model_dir: Path, cache: Path, stack: ExitStack) -> Data:
    """Rows of files or of a hub's data set; `stack` closes the files. Raises NodeError."""
    opener = _Opener(config, make_tokenizer(config, model_dir), cache, stack)
    corpus = opener.corpus(_training_files(config.data))
    holdout = Holdout(config.validation.fraction) if config.validation.fraction else None
    validation = opener.validation(corpus, holdout)
    return Data(opener.examples(corpus, holdout), validation)


def make_tokenizer(config: SftConfig, model_dir: Path) -> Tokenizer:
    """The configured way from rows to tokens. Raises UsageError."""
    roles = frozenset(config.data.loss_roles)
    try:
        chat = ChatFormat.load(model_dir)
    except EnvironmentFailed as error:
        raise UsageError(str(error)) from error
    if config.data.renderer != TEMPLATE:
        from .renderers import RendererTokenizer, open_renderer

        renderer = open_renderer(config.data.renderer, config.model.name, model_dir)
        if renderer is not None:
            return RendererTokenizer(renderer, chat, roles)
    return TemplateTokenizer(chat, roles)


class _Opener:
    def __init__(
        self, config: SftConfig, tokenizer: Tokenizer, cache: Path, stack: ExitStack
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._cache = cache
        self._stack = stack

    def corpus(self, files: Sequence[Path]) -> Corpus:
        """The rows of these files."""
        rows: list[RowFile] = []
        for path in files:
            file = RowFile(as_lines(path, self._cache), str(path))
            self._stack.callback(file.close)
            rows.append(file)
        return Corpus(rows, max_row_bytes=int(self._config.data.max_row_mib * MIB))

    def examples(
        self, corpus: Corpus, holdout: Holdout | None = None, *, held_out: bool = False
    ) -> Examples:
        """Samples of a corpus."""
        data = self._config.data
        return CorpusExamples(
            corpus,
            self._tokenizer,
            Fit(self._config.training.seq_len, data.too_long),
            strings=data.strings,
            holdout=holdout,
            held_out=held_out,
        )

    def validation(self, corpus: Corpus, holdout: Holdout | None) -> Sequence[Sample]:
        """The samples that are never learned from; none, if none are asked for."""
        wanted, data = self._config.validation, self._config.data
        if holdout is not None:
            found = self.examples(corpus, holdout, held_out=True)
        elif wanted.files:
            found = self.examples(self.corpus(find_files(wanted.files)))
        elif wanted.split:
            found = self.examples(self.corpus(_from_hub(data, wanted.split)))
        else:
            return ()
        samples = first_samples(found, wanted.rows)
        if not samples:
            raise UsageError(
                "validation holds no sample: raise validation.fraction, or give validation.files"
            )
        return samples


def _training_files(data: DataConfig) -> list[Path]:
    if data.hub:
        return _from_hub(data, data.split)
    if not data.files:
        raise UsageError(
            "nothing to learn from: give --data.files FILE, --data.hub ID or --data.environment.id ID"
        )
    return find_files(data.files)


def _from_hub(data: DataConfig, split: str) -> list[Path]:
    from .hub import download

    return download(data.hub, data.revision, split)
