"""Demonstrations as numbered training samples, in batches: of files, a hub data set, or an environment's tasks.

- Number n is the same sample whenever it is read, and a batch is a function of the cursor alone: a resumed run
  reads what an unbroken one would have read.
- Rows stay on disk, in Arrow files that `datasets` writes once and maps into memory. It is imported here alone,
  lazily; it runs no code of a data set.
- Files of JSON lines are read as text and parsed row by row: a row that is no JSON, or of another shape than
  its neighbours, costs itself and not its file.
"""

import asyncio
import gzip
import json
import logging
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from glob import escape
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...crypto.hashing import derive, digest_parts
from ..config.run import RunConfig
from ..config.sft import DataConfig, SftConfig
from ..config.training import MixedSftConfig, RowsConfig
from ..environments.chat import ChatFormat
from ..environments.environment import Environment, EnvironmentFailed, Split
from ..ops.errors import NetworkError, RunFailed, StorageError, UsageError, one_line
from ..training.backend import Sample
from .rows import BadRow, read_row
from .tokens import RendererTokenizer, TemplateTokenizer, Tokens, open_renderer

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

KINDS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
LINE = "line"
"""The column of a table that holds rows as JSON text."""
MIB = 1 << 20
MAX_LIST_BYTES = 2 << 30
"""Of a .json list, which is read whole, once; more has to be JSON lines."""
TASKS_AT_ONCE = 32
"""Tasks that an environment is asked for together."""
GRACE_ROWS = 1000
"""The share of bad rows is taken of at least this many rows, or of all where there are fewer."""
LOGGED_BAD_ROWS = 10
ORDER = "order 2\n"
"""Of epoch_order(), in the identity of data: a run that began in another order is not resumed."""

TOO_LONG, UNTRAINED, HELD_OUT, BLANK = "too_long", "untrained", "held_out", "blank"
UNCOUNTED = frozenset({HELD_OUT, BLANK})


class SkippedRow(Exception):
    """A sound row that gives no sample: TOO_LONG, HELD_OUT, BLANK, or without a learned role (UNTRAINED)."""

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

    def read(self, index: int) -> bytes:
        """Row number `index` as JSON."""
        row: Mapping[str, Any] = self.rows[index]
        line = row[LINE] if self.rows.column_names == [LINE] else json.dumps(row, default=str)
        return line.encode()


def find_files(names: Sequence[str]) -> list[Path]:
    """List the data files that `names` are or hold, sorted within a directory. Raises UsageError."""
    found: list[Path] = []
    for name in names:
        path = Path(name).expanduser()
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and _kind(p))
            if not inside:
                raise UsageError(f"{path} holds no data ({', '.join(KINDS)}): correct data.files")
            found.extend(inside)
        elif not path.is_file():
            raise UsageError(f"no such file or directory: {path}; a hub id belongs into data.hub")
        elif not _kind(path):
            raise UsageError(f"{path} is none of {', '.join(KINDS)}: convert it to .jsonl")
        else:
            found.append(path)
    return found


def read_file(path: Path, cache: Path) -> Table:
    """Open a data file, converted to Arrow in `cache` unless it is there. Raises StorageError."""
    library = _datasets()
    features = library.Features({LINE: library.Value("string")})
    where = {"cache_dir": str(cache)}
    try:
        seen = path.stat()
        if _kind(path) == ".parquet":
            rows = library.Dataset.from_parquet(escape(str(path)), **where)
        elif not seen.st_size:
            rows = library.Dataset.from_dict({LINE: []}, features=features)
        elif _is_list(path):
            source = {"path": str(path), "stamp": (seen.st_size, seen.st_mtime_ns)}
            rows = library.Dataset.from_generator(
                _list_rows, features=features, gen_kwargs=source, **where
            )
        else:
            # bytes that are no UTF-8 become escapes that are no JSON: a bad row
            rows = library.Dataset.from_text(
                escape(str(path)), features=features, encoding_errors="backslashreplace", **where
            )
    except (
        Exception
    ) as error:  # builders raise what the file's format raises: pyarrow's, zlib's, ...
        raise StorageError(
            f"cannot read {path} ({_told(error)}): mend it or fetch it again; its copy in {cache} "
            "needs disk, too"
        ) from error
    return Table(str(path), rows, seen.st_size)


def read_hub(data: RowsConfig, split: str) -> Table:
    """Open a split of a data set of the hub, downloaded into the user's cache. Raises NodeError."""
    from datasets.exceptions import DataFilesNotFoundError, DatasetsError

    name = data.hub
    try:
        rows: Any = _datasets().load_dataset(
            name, data.subset or None, split=split, revision=data.revision
        )
    except DataFilesNotFoundError as error:
        raise UsageError(
            f"data set {name!r} has no data files: convert it, and use data.files"
        ) from error
    except OSError as error:  # connection errors, offline mode and an id that the hub does not have
        raise NetworkError(
            f"cannot download data set {name!r} ({type(error).__name__}): check name and network, "
            "or give local files with data.files"
        ) from error
    except DatasetsError as error:
        raise StorageError(
            f"data set {name!r} makes no table ({_told(error)}): download its files and name them in "
            "data.files, which reads row by row"
        ) from error
    except (ValueError, RuntimeError) as error:  # an unknown split or subset; a loading script
        raise UsageError(
            f"data set {name!r} cannot be read ({one_line(error)}): correct data.hub, data.subset or "
            "data.split"
        ) from error
    return Table(f"{name}/{split}", rows, rows.data.nbytes)


def _datasets() -> Any:
    """Import the library; it draws no progress bars and counts no downloads."""
    import datasets
    from datasets import config

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    config.HF_UPDATE_DOWNLOAD_COUNTS = False
    return datasets


def _kind(path: Path) -> str:
    """Return the path's ending, if it is one of KINDS; else nothing."""
    name = path.name.lower()
    return next((one for one in sorted(KINDS, key=len, reverse=True) if name.endswith(one)), "")


def _open(path: Path) -> Any:
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb")


def _is_list(path: Path) -> bool:
    """Say whether a .json file is one list; many hold JSON lines."""
    if _kind(path) not in (".json", ".json.gz"):
        return False
    with _open(path) as file:
        return file.read(4096).lstrip().startswith(b"[")


def _list_rows(path: str, stamp: object) -> Iterator[dict[str, str]]:
    """Yield the rows of a JSON list as text; `stamp` makes a changed file another one in the cache."""
    with _open(Path(path)) as file:
        data = file.read(MAX_LIST_BYTES)
    if len(data) == MAX_LIST_BYTES:
        raise ValueError("it is too large for one JSON list: convert it to .jsonl")
    for row in json.loads(data):
        yield {LINE: json.dumps(row)}


def _told(error: Exception) -> str:
    """Return the cause in one line: the library's own error says only that one occurred."""
    return one_line(error.__cause__ or error)


# -- samples --------------------------------------------------------------------------------------


class Examples(Protocol):
    """Numbered samples: RowExamples, TaskExamples."""

    @property
    def size(self) -> int | None:
        """Rows of an epoch; None: they never end."""
        ...

    def sample(self, index: int) -> Sample:
        """Make the sample of row number `index`. Raises BadRow, SkippedRow."""
        ...

    def where(self, index: int) -> str:
        """Name that row for a person."""
        ...

    def identity(self) -> str:
        """Return text that is equal for equal data; a run resumes on no other."""
        ...


class RowExamples:
    """Rows of several tables, numbered through in their order; with a `holdout` those on one side of it."""

    def __init__(
        self,
        config: SftConfig,
        tables: Sequence[Table],
        tokenizer: TemplateTokenizer,
        *,
        holdout: float = 0.0,
        held_out: bool = False,
    ) -> None:
        """`holdout`: the share of rows held out; `held_out`: give those rows, and skip the others.

        Raises UsageError if there is no row at all.
        """
        self._config = config
        self._tables = [table for table in tables if len(table.rows)]
        self._tokenizer = tokenizer
        self._holdout = holdout
        self._held_out = held_out
        self._firsts = [0, *accumulate(len(table.rows) for table in self._tables)]
        if not self._tables:
            names = ", ".join(table.label for table in tables) or "nothing"
            raise UsageError(f"no rows in the data ({names[:200]}): correct data.files")

    @property
    def size(self) -> int | None:
        """Rows of all tables, blank and held-out ones too."""
        return self._firsts[-1]

    def read(self, index: int) -> bytes:
        """Read row number `index`. Raises BadRow if it is longer than data.max_row_mib."""
        table, inside = self._find(index)
        data = table.read(inside)
        if len(data) > self._config.data.max_row_mib * MIB:
            raise BadRow("too_big", f"the row has {len(data)} bytes: raise data.max_row_mib")
        return data

    def sample(self, index: int) -> Sample:
        """Make the sample of row number `index`. Raises BadRow, SkippedRow."""
        data = self.read(index)
        if not data.strip():
            raise SkippedRow(BLANK)
        if self._holdout and is_held_out(data, self._holdout) != self._held_out:
            raise SkippedRow(HELD_OUT)
        row = read_row(data, strings=self._config.data.strings)
        return make_sample(self._tokenizer.tokens(row), self._config)

    def where(self, index: int) -> str:
        """Name a row: file:line, counted from 1, or the row's number in a table."""
        table, inside = self._find(index)
        return f"{table.label}:{inside + 1}"

    def identity(self) -> str:
        """Digest the names, rows and bytes of all tables: a run resumes on no others."""
        parts = [f"{Path(one.label).name} {len(one.rows)} {one.size}\n" for one in self._tables]
        return digest_parts([part.encode() for part in (ORDER, *parts)]).hex()

    def _find(self, index: int) -> tuple[Table, int]:
        if not 0 <= index < self._firsts[-1]:
            raise IndexError(index)
        place = bisect_right(self._firsts, index) - 1
        return self._tables[place], index - self._firsts[place]


_Demonstration = tuple[list[int], list[int] | None] | EnvironmentFailed


class TaskExamples:
    """Demonstrations of a running environment's tasks."""

    def __init__(
        self,
        config: SftConfig,
        environment: Environment,
        *,
        first: int,
        split: Split,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Sample i is of task `first` + i of `split`. The environment runs in `loop`; sample() is called in
        another thread."""
        self._config = config
        self._environment = environment
        self._first = first
        self._split: Split = split
        self._loop = loop
        self._block = -1
        self._demonstrations: list[_Demonstration] = []

    @property
    def size(self) -> int | None:
        """Tasks are taken as endless; a taskset that is not begins again by itself."""
        return None

    def sample(self, index: int) -> Sample:
        """Make the sample of a task's prompt and right reply. Raises BadRow, SkippedRow, UsageError."""
        block, place = divmod(index, TASKS_AT_ONCE)
        if block != self._block:
            asked = asyncio.run_coroutine_threadsafe(self._ask(block), self._loop)
            self._demonstrations, self._block = asked.result(), block
        found = self._demonstrations[place]
        if isinstance(found, EnvironmentFailed):
            raise BadRow("environment", str(found)) from found
        prompt, reply = found
        if reply is None:
            raise UsageError(f"{self._environment.name} has no demonstrations: use data.files")
        mask = [False] * len(prompt) + [True] * len(reply)
        return make_sample(Tokens([*prompt, *reply], mask), self._config)

    async def _ask(self, block: int) -> list[_Demonstration]:
        first = self._first + block * TASKS_AT_ONCE
        return await asyncio.gather(*map(self._one, range(first, first + TASKS_AT_ONCE)))

    async def _one(self, index: int) -> _Demonstration:
        environment = self._environment
        try:
            task = await environment.task(index, self._split)
            return await environment.prompt(task), await environment.demonstration(task)
        except EnvironmentFailed as error:
            return error

    def where(self, index: int) -> str:
        """Name a row: environment:task."""
        return f"{self._environment.name}:{self._first + index}"

    def identity(self) -> str:
        """Return the environment's id."""
        return f"environment {self._environment.name}"


def is_held_out(data: bytes, share: float) -> bool:
    """Say whether the row with these bytes is one of the held-out `share`: a row that occurs twice is on one
    side only."""
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
    # the first token has nothing before it that could have predicted it
    return Sample(token_ids, [False, *mask[1:]], [0.0] * len(token_ids), 1.0)


# -- opening what a config names ------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """Examples to learn from, and samples to measure with."""

    training: Examples
    validation: Sequence[Sample]


def check_files(config: SftConfig) -> None:
    """Check that there is something to learn from, before a model is fetched. Raises UsageError."""
    data = config.data
    if data.files:
        find_files(data.files)
    elif not data.hub and data.environment is None:
        raise UsageError(
            "nothing to learn from: give --data.files FILE, --data.hub ID or --data.environment.id ID"
        )
    find_files(config.validation.files)


def open_tasks(
    config: SftConfig, environment: Environment, first: int, loop: asyncio.AbstractEventLoop
) -> Data:
    """Open a running environment's demonstrations: training tasks from `first` on, held-out ones from 0 on.

    The environment runs in `loop`; call this, and read the data, in another thread.
    """
    training = TaskExamples(config, environment, first=first, split="train", loop=loop)
    held_out = TaskExamples(config, environment, first=0, split="eval", loop=loop)
    return Data(training, first_samples(held_out, config.validation.rows))


def open_rows(config: SftConfig, model_dir: Path, cache: Path) -> Data:
    """Open files or a hub data set. Blocks: files are converted into `cache`. Raises NodeError."""
    data, wanted = config.data, config.validation
    tokenizer = open_tokenizer(config, model_dir)

    def read(files: Sequence[str], split: str) -> list[Table]:
        if files:
            return [read_file(path, cache) for path in find_files(files)]
        return [read_hub(data, split)]

    tables, share = read(data.files, data.split), wanted.fraction
    training = RowExamples(config, tables, tokenizer, holdout=share)
    if not (share or wanted.files or wanted.split):
        return Data(training, ())
    if not share:
        tables = read(wanted.files, wanted.split)
    held_out = RowExamples(config, tables, tokenizer, holdout=share, held_out=True)
    samples = first_samples(held_out, wanted.rows)
    if not samples:
        raise UsageError(
            "validation holds no sample: raise validation.fraction, or give validation.files"
        )
    return Data(training, samples)


def open_tokenizer(config: SftConfig, model_dir: Path) -> TemplateTokenizer:
    """Open the configured renderer or chat template. Raises UsageError."""
    roles = frozenset(config.data.loss_roles)
    try:
        chat = ChatFormat.load(model_dir)
    except EnvironmentFailed as error:
        raise UsageError(str(error)) from error
    if config.data.renderer != "template":
        renderer = open_renderer(config.data.renderer, config.model.name, model_dir)
        if renderer is not None:
            return RendererTokenizer(renderer, chat, roles)
    return TemplateTokenizer(chat, roles)


def check_mixed(config: MixedSftConfig) -> None:
    """Check that the files of training.sft are there. Raises UsageError."""
    try:
        find_files(config.files)
    except UsageError as error:
        raise UsageError(f"training.sft: {error}") from error


def open_mixed(config: RunConfig, model_dir: Path, cache: Path) -> "MixedReader | None":
    """Open the demonstrations of training.sft, if there are. Blocks, as open_rows(). Raises NodeError."""
    mixed = config.training.sft
    if mixed is None:
        return None
    rows = mixed.model_dump(include=set(RowsConfig.model_fields))
    alone = SftConfig(seed=config.seed, model=config.model, data=DataConfig(**rows))
    alone.training.seq_len = config.training.seq_len
    try:
        examples = open_rows(alone, model_dir, cache).training
    except UsageError as error:
        raise UsageError(f"training.sft: {error}") from error
    return MixedReader(examples, alone, mixed.share)


def first_samples(examples: Examples, most: int) -> Sequence[Sample]:
    """Read the first samples in the order of the data, for validation; leave out bad and skipped rows."""
    found: list[Sample] = []
    end = most if examples.size is None else examples.size
    for index in range(end):
        if len(found) == most:
            break
        try:
            found.append(examples.sample(index))
        except (BadRow, SkippedRow):
            continue
    return found


# -- batches --------------------------------------------------------------------------------------


class DataCursor(msgspec.Struct, frozen=True):
    """A place in the data: the next row is number `index` in the order of `epoch`."""

    epoch: int = 0
    index: int = 0
    rows: int = 0
    """Rows read, over all epochs; held-out and blank ones not counted."""
    samples: int = 0
    tokens: int = 0
    """Tokens of all samples, trained or context."""
    skipped: dict[str, int] = {}
    """Rows that gave no sample, by reason."""
    bad: int = 0
    """Those of them that are bad."""

    def counted(self, reason: str, *, bad: bool) -> "DataCursor":
        """Count one more row that gave no sample."""
        skipped = {**self.skipped, reason: self.skipped.get(reason, 0) + 1}
        return msgspec.structs.replace(
            self, rows=self.rows + 1, skipped=skipped, bad=self.bad + bad
        )

    def reasons(self) -> str:
        """Say why how many rows gave no sample."""
        return ", ".join(f"{count} {reason}" for reason, count in self.skipped.items())


@dataclass(frozen=True)
class DataBatch:
    """The samples of one step, and the cursor after them; no samples: the data have ended."""

    samples: list[Sample]
    cursor: DataCursor


def epoch_order(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Permute the rows of one epoch: int64 [size].

    RandomState's stream never changes (NEP 19), so that a run resumes in the same order after an update.
    """
    words = np.frombuffer(derive("sft order", str(seed).encode(), str(epoch).encode()), "<u4")
    return np.random.RandomState(words).permutation(size)


class BatchReader:
    """Reads batches; calls for the same cursor give the same batch."""

    def __init__(self, examples: Examples, config: SftConfig) -> None:
        self._examples = examples
        self._seed = config.seed
        self._shuffle = config.data.shuffle
        self._max_bad_rows = config.data.max_bad_rows
        self._max_epochs = config.max_epochs
        """0 is no bound."""
        self._order: Sequence[int] | NDArray[np.int64] = ()
        self._order_of = -1

    def batch(self, cursor: DataCursor, *, size: int, tokens: int = 0) -> DataBatch:
        """Read the next `size` samples, or as many as make up `tokens` tokens, at least one.

        Raises RunFailed for too many bad rows, UsageError if a whole epoch holds no sample.
        """
        samples: list[Sample] = []
        held, barren = 0, 0
        while not 0 < self._max_epochs <= cursor.epoch and (tokens or len(samples) < size):
            sample, after = self._next(cursor)
            if sample is None:
                barren += 1
                self._check_barren(barren, after)
            else:
                held += len(sample.token_ids)
                if samples and tokens and held > tokens:
                    break  # the row is read again for the next batch
                samples.append(sample)
                barren = 0
            cursor = after
        return DataBatch(samples, cursor)

    def _next(self, cursor: DataCursor) -> tuple[Sample | None, DataCursor]:
        """Read the sample at the cursor, if it gives one, and move the cursor on."""
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

    def _check_bad(self, seen: DataCursor, row: int, error: BadRow) -> None:
        where = self._examples.where(row)
        if seen.bad <= LOGGED_BAD_ROWS:
            logger.warning("bad row %s: %s", where, error)
        known = min(self._examples.size or GRACE_ROWS, GRACE_ROWS)
        if seen.bad > self._max_bad_rows * max(seen.rows, known):
            raise RunFailed(
                f"{seen.bad} of {seen.rows} rows are bad ({seen.reasons()}), the last at {where}: "
                f"{error}; mend the data, or raise data.max_bad_rows"
            )

    def _check_barren(self, barren: int, seen: DataCursor) -> None:
        if barren < (self._examples.size or GRACE_ROWS):
            return
        raise UsageError(
            f"none of {barren} rows gives a sample ({seen.reasons() or HELD_OUT}): see "
            "training.seq_len, data.too_long and data.loss_roles"
        )


class MixedReader:
    """Reads the demonstrations of training.sft, a share of what a step reads; the caller keeps the cursor."""

    def __init__(self, examples: Examples, config: SftConfig, share: float) -> None:
        """`share` is that of demonstrations in a step's tokens, above 0 and below 1."""
        self._reader = BatchReader(examples, config)
        self._factor = share / (1 - share)
        self.identity = examples.identity()
        """Of the data that a cursor is a place in."""

    def batch(self, cursor: DataCursor, tokens: int) -> DataBatch:
        """Read the demonstrations of a step whose rollouts have `tokens` tokens: as many whole rows as their
        share has room for, at least one. Raises RunFailed, UsageError, as BatchReader.batch()."""
        room = max(1, round(self._factor * tokens))
        found = self._reader.batch(cursor, size=1, tokens=room)
        return DataBatch([replace(one, given=True) for one in found.samples], found.cursor)
