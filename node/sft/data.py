"""Read demonstrations from files, a hub or an environment, as numbered samples in batches.

- Sample n is the same whenever it is read, and a batch is a function of the cursor alone, so a resumed run
  reads the same batches as an uninterrupted one.
- Rows stay on disk, in Arrow files that `datasets` writes once and memory-maps. `datasets` is imported here
  only, lazily, and runs no code of a data set.
- Files of JSON lines are read as text and parsed row by row: a row that is invalid JSON, or of another schema,
  is skipped and does not spoil its file.
"""

import asyncio
import contextlib
import gzip
import json
import logging
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, time
from glob import escape
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...crypto.hashing import derive, digest_parts
from ..config.paths import expand_home
from ..config.run import RunConfig
from ..config.sft import DataConfig, SftConfig
from ..config.training import MixedSftConfig, RowsConfig
from ..environments.chat import DATE, ChatFormat, dated
from ..environments.environment import Demonstration, Environment, EnvironmentFailed, Split
from ..errors import NetworkError, RunFailed, StorageError, UsageError, one_line
from ..training.backend import Sample
from .rows import FIELDS, BadRow, LostPart, read_row
from .tokens import RendererTokenizer, TemplateTokenizer, Tokens, open_renderer

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

KINDS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
LINE = "line"
"""Name of the column that holds a row as JSON text."""
MAX_BAD_ROWS = 0.05
"""Share of rows that may be unusable; with more the run ends."""
MAX_ROW = 16 << 20
"""Largest row, bytes; a larger one counts as unusable."""
MAX_LIST_BYTES = 2 << 30
"""Size limit of a .json list, which is read into memory once; larger data must be JSON lines."""
TASKS_AT_ONCE = 32
"""Number of tasks requested from an environment concurrently."""
GRACE_ROWS = 1000
"""Smallest denominator of the share of bad rows, or the number of rows where that is less."""
LOGGED_BAD_ROWS = 10
PEEKED_ROWS = 100
"""First rows that are looked at before a run: for fields that are not read, and parts that a template loses."""
NAMED_COLUMNS = 10
ORDER = "order 2\n"
"""Version of epoch_order(), part of the data's identity: runs of another order are not resumed."""

TOO_LONG, UNTRAINED, HELD_OUT, BLANK = "too_long", "untrained", "held_out", "blank"
UNCOUNTED = frozenset({HELD_OUT, BLANK})


class SkippedRow(Exception):
    """A valid row without a sample: TOO_LONG, HELD_OUT, BLANK or UNTRAINED (no trained role)."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


# -- rows on disk ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Rows of one file, or of one split of a hub data set."""

    label: str
    """The path or hub id that the user knows."""
    rows: "Dataset"
    size: int
    """Bytes."""

    @property
    def columns(self) -> bool:
        """Whether rows are columns with types, not lines of JSON."""
        return self.rows.column_names != [LINE]

    def read(self, index: int) -> bytes:
        """Return row number `index` as JSON."""
        row: Mapping[str, Any] = self.rows[index]
        line = json.dumps(row, default=_as_text) if self.columns else row[LINE]
        return line.encode()

    def unread(self) -> list[str]:
        """List the columns, or the fields of the first rows, that read_row() does not read."""
        if self.columns:
            return sorted({*self.rows.column_names} - FIELDS)
        fields: set[str] = set()
        for line in self.rows[:PEEKED_ROWS][LINE]:
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                fields |= row.keys() if isinstance(row, dict) else set()
        return sorted(fields - FIELDS)


def _as_text(value: object) -> str:
    """Return a value that is none of JSON's as text; a table makes moments of days."""
    if isinstance(value, datetime) and value.time() == time():
        return value.date().isoformat()
    return str(value)


def find_files(names: Sequence[str]) -> list[Path]:
    """List the data files in `names`, files or directories; sorted within a directory.

    Raises UsageError.
    """
    files: list[Path] = []
    for name in names:
        path = expand_home(name)
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and _kind(p))
            if not inside:
                raise UsageError(
                    f"{path} holds no data files ({', '.join(KINDS)}): correct data.files"
                )
            files.extend(inside)
        elif not path.is_file():
            raise UsageError(f"no such file or directory: {path}; give a hub id as data.hub")
        elif not _kind(path):
            raise UsageError(f"{path} is not one of {', '.join(KINDS)}: convert it to .jsonl")
        else:
            files.append(path)
    return files


def read_file(path: Path, cache: Path) -> Table:
    """Open a data file, converted to Arrow in `cache` unless it is there. Raises StorageError."""
    library = _datasets()
    features = library.Features({LINE: library.Value("string")})
    where = {"cache_dir": str(cache)}
    try:
        stats = path.stat()
        if _kind(path) == ".parquet":
            rows = library.Dataset.from_parquet(escape(str(path)), **where)
        elif not stats.st_size:
            rows = library.Dataset.from_dict({LINE: []}, features=features)
        elif _is_list(path):
            source = {"path": str(path), "stamp": (stats.st_size, stats.st_mtime_ns)}
            rows = library.Dataset.from_generator(
                _list_rows, features=features, gen_kwargs=source, **where
            )
        else:
            # invalid UTF-8 becomes escapes that are not valid JSON: a bad row
            rows = library.Dataset.from_text(
                escape(str(path)), features=features, encoding_errors="backslashreplace", **where
            )
    except (
        Exception
    ) as error:  # builders raise any error of the format's library: pyarrow, zlib, ...
        raise StorageError(
            f"cannot read {path} ({_cause(error)}): repair it or download it again, and check that there is "
            f"disk space for its copy in {cache}"
        ) from error
    return Table(str(path), rows, stats.st_size)


def read_hub(data: RowsConfig, split: str) -> Table:
    """Open a split of a hub data set, downloaded into the user's cache. Raises NodeError."""
    from datasets.exceptions import DataFilesNotFoundError, DatasetsError

    name = data.hub
    try:
        rows: Any = _datasets().load_dataset(
            name, data.subset or None, split=split, revision=data.revision
        )
    except DataFilesNotFoundError as error:
        raise UsageError(
            f"data set {name!r} has no data files: convert it and give data.files"
        ) from error
    except OSError as error:  # connection errors, offline mode and an id that the hub does not have
        raise NetworkError(
            f"cannot download data set {name!r} ({type(error).__name__}): check name and network, "
            "or give local files with data.files"
        ) from error
    except DatasetsError as error:
        raise StorageError(
            f"data set {name!r} cannot be read as a table ({_cause(error)}): download its files and give "
            "data.files, which reads row by row"
        ) from error
    except (ValueError, RuntimeError) as error:  # an unknown split or subset; a loading script
        raise UsageError(
            f"data set {name!r} cannot be read ({one_line(error)}): correct data.hub, data.subset or "
            "data.split"
        ) from error
    return Table(f"{name}/{split}", rows, rows.data.nbytes)


def _datasets() -> Any:
    """Import `datasets` without progress bars and download counts."""
    import datasets
    from datasets import config

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    config.HF_UPDATE_DOWNLOAD_COUNTS = False
    return datasets


def _kind(path: Path) -> str:
    """Return the path's extension if it is one of KINDS, else ""."""
    name = path.name.lower()
    return next((kind for kind in sorted(KINDS, key=len, reverse=True) if name.endswith(kind)), "")


def _open(path: Path) -> Any:
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb")


def _is_list(path: Path) -> bool:
    """Return whether a .json file is one list; many hold JSON lines instead."""
    if _kind(path) not in (".json", ".json.gz"):
        return False
    with _open(path) as file:
        return file.read(4096).lstrip().startswith(b"[")


def _list_rows(path: str, stamp: object) -> Iterator[dict[str, str]]:
    """Yield the rows of a JSON list as text; `stamp` gives a changed file another cache key."""
    with _open(Path(path)) as file:
        data = file.read(MAX_LIST_BYTES)
    if len(data) == MAX_LIST_BYTES:
        raise ValueError("the JSON list is too large: convert it to .jsonl")
    for row in json.loads(data):
        yield {LINE: json.dumps(row)}


def _cause(error: Exception) -> str:
    """Format the cause in one line: the library's own error only says that one occurred."""
    return one_line(error.__cause__ or error)


# -- samples --------------------------------------------------------------------------------------


class Examples(Protocol):
    """Numbered samples. Implementations: RowExamples, TaskExamples."""

    @property
    def size(self) -> int | None:
        """Rows of an epoch; None if endless."""
        ...

    def sample(self, index: int) -> Sample:
        """Make the sample of row number `index`. Raises BadRow, SkippedRow."""
        ...

    def where(self, index: int) -> str:
        """Format the row's location for messages."""
        ...

    def identity(self) -> str:
        """Return a text that identifies the data; a run resumes on equal data only."""
        ...


class RowExamples:
    """Rows of several tables, numbered consecutively; with a `holdout`, those on one side of it."""

    def __init__(
        self,
        config: SftConfig,
        tables: Sequence[Table],
        tokenizer: TemplateTokenizer,
        *,
        holdout: float = 0.0,
        held_out: bool = False,
        max_row: int = MAX_ROW,
    ) -> None:
        """`holdout`: share of rows held out; `held_out`: give those rows and skip the others.

        Raises UsageError if there are no rows.
        """
        self._config = config
        self._tables = [table for table in tables if len(table.rows)]
        self._tokenizer = tokenizer
        self._holdout = holdout
        self._held_out = held_out
        self._max_row = max_row
        self._firsts = [0, *accumulate(len(table.rows) for table in self._tables)]
        if not self._tables:
            names = ", ".join(table.label for table in tables) or "nothing"
            raise UsageError(f"no rows in the data ({names[:200]}): correct data.files")

    @property
    def size(self) -> int | None:
        """Rows of all tables, including blank and held-out ones."""
        return self._firsts[-1]

    def read(self, index: int) -> bytes:
        """Read row number `index`. Raises BadRow if it is longer than `max_row`."""
        table, inside = self._find(index)
        data = table.read(inside)
        if len(data) > self._max_row:
            raise BadRow("too_big", f"the row has {len(data)} bytes, more than {self._max_row}")
        return data

    def sample(self, index: int) -> Sample:
        """Make the sample of row number `index`. Raises BadRow, SkippedRow."""
        table, _ = self._find(index)
        data = self.read(index)
        if not data.strip():
            raise SkippedRow(BLANK)
        if self._holdout and is_held_out(data, self._holdout) != self._held_out:
            raise SkippedRow(HELD_OUT)
        row = read_row(data, strings=self._config.data.strings, columns=table.columns)
        return make_sample(self._tokenizer.tokens(row), self._config)

    def where(self, index: int) -> str:
        """Format a row's location: file:line, or table:row, counted from 1."""
        table, inside = self._find(index)
        return f"{table.label}:{inside + 1}"

    def identity(self) -> str:
        """Digest the names, row counts and sizes of all tables."""
        parts = [
            f"{Path(table.label).name} {len(table.rows)} {table.size}\n" for table in self._tables
        ]
        return digest_parts([part.encode() for part in (ORDER, *parts)]).hex()

    def check_template(self) -> None:
        """Raise UsageError if the chat template would lose a part of one of the first rows of each table.

        A later row like that is a bad row.
        """
        count = max(1, PEEKED_ROWS // len(self._tables))
        for first, end in list(pairwise(self._firsts))[:PEEKED_ROWS]:
            for index in range(first, min(end, first + count)):
                try:
                    self.sample(index)
                except LostPart as error:
                    raise UsageError(f"{self.where(index)}: {error}") from error
                except (BadRow, SkippedRow):
                    continue

    def _find(self, index: int) -> tuple[Table, int]:
        if not 0 <= index < self._firsts[-1]:
            raise IndexError(index)
        place = bisect_right(self._firsts, index) - 1
        return self._tables[place], index - self._firsts[place]


_Result = Demonstration | EnvironmentFailed | None


class TaskExamples:
    """Demonstrations of the tasks of a running environment."""

    def __init__(
        self,
        config: SftConfig,
        environment: Environment,
        *,
        first: int,
        split: Split,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Sample i comes from task `first` + i of `split`.

        The environment runs in `loop`; sample() must be called in another thread.
        """
        self._config = config
        self._environment = environment
        self._first = first
        self._split: Split = split
        self._loop = loop
        self._block = -1
        self._demonstrations: list[_Result] = []

    @property
    def size(self) -> int | None:
        """None: tasks count as endless; a finite taskset starts over by itself."""
        return None

    def sample(self, index: int) -> Sample:
        """Make the sample of a task's demonstration. Raises BadRow, SkippedRow, UsageError."""
        block, place = divmod(index, TASKS_AT_ONCE)
        if block != self._block:
            loading = asyncio.run_coroutine_threadsafe(self._load(block), self._loop)
            self._demonstrations, self._block = loading.result(), block
        result = self._demonstrations[place]
        if isinstance(result, EnvironmentFailed):
            raise BadRow("environment", str(result)) from result
        if result is None:
            raise UsageError(f"{self._environment.name} has no demonstrations: give data.files")
        return make_sample(Tokens(result.token_ids, result.sampled), self._config)

    async def _load(self, block: int) -> list[_Result]:
        first = self._first + block * TASKS_AT_ONCE
        return await asyncio.gather(*map(self._load_one, range(first, first + TASKS_AT_ONCE)))

    async def _load_one(self, index: int) -> _Result:
        environment = self._environment
        try:
            return await environment.demonstration(await environment.task(index, self._split))
        except EnvironmentFailed as error:
            return error

    def where(self, index: int) -> str:
        """Format a row's location: environment:task."""
        return f"{self._environment.name}:{self._first + index}"

    def identity(self) -> str:
        """Return the environment's id."""
        return f"environment {self._environment.name}"


def is_held_out(data: bytes, share: float) -> bool:
    """Return whether a row is held out, by a hash of its bytes (equal for all copies)."""
    return int.from_bytes(derive("sft holdout", data.strip())[:8], "little") < int(share * 2**64)


def make_sample(tokens: Tokens, config: SftConfig) -> Sample:
    """Make a sample for cross entropy, of at most training.seq_len tokens. Raises SkippedRow."""
    token_ids, mask = tokens.token_ids, tokens.mask
    if not any(mask[1:]):
        raise SkippedRow(UNTRAINED)
    if len(token_ids) > (limit := config.training.seq_len):
        token_ids, mask = token_ids[:limit], mask[:limit]
        if config.data.too_long == "drop" or not any(mask[1:]):
            raise SkippedRow(TOO_LONG)
    # no token precedes the first one to predict it
    return Sample(token_ids, [False, *mask[1:]], [0.0] * len(token_ids), 1.0)


# -- opening what a config names ------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """Training examples and validation samples."""

    training: Examples
    validation: Sequence[Sample]


def check_files(config: SftConfig) -> None:
    """Check that the config names data that exists, before a model is downloaded.

    Raises UsageError.
    """
    data = config.data
    if data.files:
        find_files(data.files)
    elif not data.hub and data.environment is None:
        raise UsageError(
            "no training data: give --data.files FILE, --data.hub ID or --data.environment.id ID"
        )
    find_files(config.validation.files)


def open_tasks(
    config: SftConfig, environment: Environment, first: int, loop: asyncio.AbstractEventLoop
) -> Data:
    """Open a running environment's demonstrations: training tasks `first`.., held-out tasks 0..

    The environment runs in `loop`; call this, and read the data, in another thread.
    """
    training = TaskExamples(config, environment, first=first, split="train", loop=loop)
    held_out = TaskExamples(config, environment, first=0, split="eval", loop=loop)
    return Data(training, first_samples(held_out, config.validation.rows))


def open_rows(config: SftConfig, model_dir: Path, cache: Path, date: str = "") -> Data:
    """Open files or a hub data set. Blocks: files are converted into `cache`. Raises NodeError.

    `date`: what the chat template writes for today, as 2026-11-29.
    """
    data, wanted = config.data, config.validation
    tokenizer = open_tokenizer(config, model_dir, date)

    def read(files: Sequence[str], split: str) -> list[Table]:
        if files:
            return [read_file(path, cache) for path in find_files(files)]
        return [read_hub(data, split)]

    tables, share = read(data.files, data.split), wanted.fraction
    tell_unread(tables)
    training = RowExamples(config, tables, tokenizer, holdout=share)
    training.check_template()
    if not (share or wanted.files or wanted.split):
        return Data(training, ())
    if not share:
        tables = read(wanted.files, wanted.split)
    held_out = RowExamples(config, tables, tokenizer, holdout=share, held_out=True)
    samples = first_samples(held_out, wanted.rows)
    if not samples:
        raise UsageError(
            "the validation data has no samples: raise validation.fraction, or give validation.files"
        )
    return Data(training, samples)


def tell_unread(tables: Sequence[Table]) -> None:
    """Log the columns that are not read, once for all tables."""
    names = sorted({name for table in tables for name in table.unread()})
    if names:
        more = ", ..." if len(names) > NAMED_COLUMNS else ""
        known = one_line(", ".join(names[:NAMED_COLUMNS]) + more)
        logger.warning("columns of the data that are not read: %d (%s)", len(names), known)


def open_tokenizer(config: SftConfig, model_dir: Path, date: str) -> TemplateTokenizer:
    """Open the configured renderer or chat template. Raises UsageError."""
    roles = frozenset(config.data.loss_roles)
    try:
        chat = ChatFormat.load(model_dir, defaults=dated({}, model_dir, date))
    except EnvironmentFailed as error:
        raise UsageError(str(error)) from error
    if config.data.renderer != "template":
        renderer = open_renderer(config.data.renderer, config.model.name, model_dir)
        if renderer is not None:
            return RendererTokenizer(renderer, chat, roles)
    return TemplateTokenizer(chat, roles)


def check_mixed(config: MixedSftConfig) -> None:
    """Check that the files of training.sft exist. Raises UsageError."""
    try:
        find_files(config.files)
    except UsageError as error:
        raise UsageError(f"training.sft: {error}") from error


def open_mixed(config: RunConfig, model_dir: Path, cache: Path) -> "MixedReader | None":
    """Open the demonstrations of training.sft, if configured. Blocks, as open_rows().

    Raises NodeError.
    """
    mixed = config.training.sft
    if mixed is None:
        return None
    rows = mixed.model_dump(include=set(RowsConfig.model_fields))
    alone = SftConfig(seed=config.seed, model=config.model, data=DataConfig(**rows))
    alone.training.seq_len = config.training.seq_len
    try:
        date = str(config.mixture[0].chat_template_kwargs.get(DATE, ""))
        examples = open_rows(alone, model_dir, cache, date).training
    except UsageError as error:
        raise UsageError(f"training.sft: {error}") from error
    return MixedReader(examples, alone, mixed.share)


def first_samples(examples: Examples, most: int) -> Sequence[Sample]:
    """Read the first samples in data order, for validation, without bad and skipped rows."""
    samples: list[Sample] = []
    end = most if examples.size is None else examples.size
    for index in range(end):
        if len(samples) == most:
            break
        try:
            samples.append(examples.sample(index))
        except (BadRow, SkippedRow):
            continue
    return samples


# -- batches --------------------------------------------------------------------------------------


class DataCursor(msgspec.Struct, frozen=True):
    """A position in the data: the next row is number `index` in the order of `epoch`."""

    epoch: int = 0
    index: int = 0
    rows: int = 0
    """Rows read, over all epochs, without held-out and blank ones."""
    samples: int = 0
    tokens: int = 0
    """Tokens of all samples, trained and context."""
    skipped: dict[str, int] = {}
    """Reason -> rows that gave no sample."""
    bad: int = 0
    """Number of bad rows, which are included in `skipped`."""

    def counted(self, reason: str, *, bad: bool) -> "DataCursor":
        """Return a cursor that counts one more skipped row."""
        skipped = {**self.skipped, reason: self.skipped.get(reason, 0) + 1}
        return msgspec.structs.replace(
            self, rows=self.rows + 1, skipped=skipped, bad=self.bad + bad
        )

    def reasons(self) -> str:
        """Format the counts of skipped rows by reason."""
        return ", ".join(f"{count} {reason}" for reason, count in self.skipped.items())


@dataclass(frozen=True)
class DataBatch:
    """The samples of one step, and the cursor after them; no samples at the end of the data."""

    samples: list[Sample]
    cursor: DataCursor


def epoch_order(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Permute the rows of one epoch: int64 [size].

    RandomState's stream never changes (NEP 19), so that a run resumes in the same order after an update.
    """
    words = np.frombuffer(derive("sft order", str(seed).encode(), str(epoch).encode()), "<u4")
    return np.random.RandomState(words).permutation(size)


class BatchReader:
    """Reads batches; the same cursor always gives the same batch."""

    def __init__(self, examples: Examples, config: SftConfig) -> None:
        self._examples = examples
        self._seed = config.seed
        self._shuffle = config.data.shuffle
        self._max_epochs = config.max_epochs
        """0: no limit."""
        self._order: Sequence[int] | NDArray[np.int64] = ()
        self._order_of = -1

    def batch(self, cursor: DataCursor, *, size: int, tokens: int = 0) -> DataBatch:
        """Read the next `size` samples, or, with `tokens`, as many as fit into that; at least one.

        Raises RunFailed for too many bad rows, UsageError if a whole epoch gives no sample.
        """
        samples: list[Sample] = []
        total, skipped = 0, 0
        while not 0 < self._max_epochs <= cursor.epoch and (tokens or len(samples) < size):
            sample, after = self._next(cursor)
            if sample is None:
                skipped += 1
                self._check_skipped(skipped, after)
            else:
                total += len(sample.token_ids)
                if samples and tokens and total > tokens:
                    break  # the row is read again for the next batch
                samples.append(sample)
                skipped = 0
            cursor = after
        return DataBatch(samples, cursor)

    def _next(self, cursor: DataCursor) -> tuple[Sample | None, DataCursor]:
        """Read the sample at the cursor, None if the row is skipped; return it and the next cursor."""
        row = self._row(cursor)
        sample = None
        try:
            sample = self._examples.sample(row)
        except SkippedRow as skipped:
            if skipped.reason not in UNCOUNTED:
                cursor = cursor.counted(skipped.reason, bad=False)
        except BadRow as error:
            cursor = cursor.counted(error.reason, bad=True)
            self._check_bad(cursor, row, error)
        else:
            cursor = msgspec.structs.replace(
                cursor,
                rows=cursor.rows + 1,
                samples=cursor.samples + 1,
                tokens=cursor.tokens + len(sample.token_ids),
            )
        index, epoch = cursor.index + 1, cursor.epoch
        if index == self._examples.size:
            index, epoch = 0, epoch + 1
        return sample, msgspec.structs.replace(cursor, index=index, epoch=epoch)

    def _row(self, cursor: DataCursor) -> int:
        size = self._examples.size
        if size is None or not self._shuffle:
            return cursor.index
        if self._order_of != cursor.epoch:
            self._order, self._order_of = epoch_order(size, self._seed, cursor.epoch), cursor.epoch
        return int(self._order[cursor.index])

    def _check_bad(self, cursor: DataCursor, row: int, error: BadRow) -> None:
        where = self._examples.where(row)
        if cursor.bad <= LOGGED_BAD_ROWS:
            logger.warning("bad row %s: %s", where, error)
        known = min(self._examples.size or GRACE_ROWS, GRACE_ROWS)
        if cursor.bad > MAX_BAD_ROWS * max(cursor.rows, known):
            raise RunFailed(
                f"{cursor.bad} of {cursor.rows} rows are bad ({cursor.reasons()}), the last at {where}: "
                f"{error}; repair the data"
            )

    def _check_skipped(self, skipped: int, cursor: DataCursor) -> None:
        if skipped < (self._examples.size or GRACE_ROWS):
            return
        raise UsageError(
            f"none of {skipped} rows gives a sample ({cursor.reasons() or HELD_OUT}): check "
            "training.seq_len, data.too_long and data.loss_roles"
        )


class MixedReader:
    """Reads the demonstrations that training.sft mixes into each step.

    The caller keeps the cursor.
    """

    def __init__(self, examples: Examples, config: SftConfig, share: float) -> None:
        """`share`: fraction of a step's tokens that are demonstrations, above 0 and below 1."""
        self._reader = BatchReader(examples, config)
        self._factor = share / (1 - share)
        self.identity = examples.identity()
        """Identity of the data that cursors refer to."""

    def batch(self, cursor: DataCursor, tokens: int) -> DataBatch:
        """Read the demonstrations of a step whose rollouts have `tokens` tokens.

        As many whole rows as fit into their share, at least one. Raises RunFailed, UsageError, as
        BatchReader.batch().
        """
        room = max(1, round(self._factor * tokens))
        batch = self._reader.batch(cursor, size=1, tokens=room)
        return DataBatch([replace(sample, given=True) for sample in batch.samples], batch.cursor)
