"""Rollouts that a run keeps: one Parquet file per step, `rollouts/step_000012.parquet`, read and written here.

A file is whole or absent. It holds the batch of its step in the order in which it was trained, then what did
not get into a batch, and in its metadata the signed head of the policy that the step made.
"""

import math
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..errors import BAD_FILE, StorageError, file_error, one_line
from ..removal import some
from .partial import whole_file
from .run_files import make_directory

FORMAT = 1
"""Format of the files; a higher number where the meaning of columns changed."""
ROWS_AT_ONCE = 16
"""Rows that are converted in one go: converting holds Python's lock, and a node has a network to serve."""
TABLES_AT_ONCE = 64
"""Rows that are written as one row group: each group costs a compressed piece for every column."""
_NAME = re.compile(r"step_(\d{6,})\.parquet")
_META = b"primerl"

Outcome = Literal["trained", "unused", "rejected"]
"""`trained`: in a batch, with an advantage; `unused`: accepted, but nothing was learned from it; `rejected`."""


@dataclass(frozen=True)
class KeptRollout:
    """One training sequence (branch) of one rollout."""

    step: int
    """Step of the batch; for a rollout in no batch, the step that came next."""
    group: int
    """Place of its group in the file: those of the batch first, in order."""
    rollout: int
    """Place in the group; of a rejected one, its index in the lease's group."""
    branch: int
    verdict: Outcome
    reason: str
    """Why it is not trained: a reason code, too_few (too few of its group left) or zero_advantage."""
    detail: str
    """The evidence for a rejection, in words."""
    reward: float
    """The trainer's own; of a rejected one, what its worker claimed."""
    advantage: float | None
    environment: str
    task: str
    """Digest, hex."""
    worker: str
    """Node id, hex."""
    lease: int
    policy_first: int
    policy_last: int
    """Oldest and newest policy version that drew any token."""
    agent: str = ""
    """The agent that it is of, where the environment has several; `reward` and `advantage` are its own."""
    trace: int = 0
    """Place of the agent's trace in the rollout."""
    prompt: str = ""
    """Text of the tokens before the first that the model drew, as the model saw it."""
    completion: str = ""
    """Text of all other turns: replies and, between them, the environment's messages."""
    cuts: list[int] = field(default_factory=list[int])
    """Characters of `completion` up to each place where a reply ends or the next one begins, in order."""
    prompt_ids: list[int] = field(default_factory=list[int])
    completion_ids: list[int] = field(default_factory=list[int])
    completion_mask: list[bool] = field(default_factory=list[bool])
    """Marks the tokens of the completion that the model drew: those are trained."""
    completion_logprobs: list[float] = field(default_factory=list[float])
    """The sampler's; 0 where the model did not draw."""
    routes: bytes = b""
    """Experts that led to each token that the model drew, as in a submission (protocol/rollouts.py); not of a
    rejected one."""
    support: bytes = b""
    """Tokens that `completion_logprobs` are over, as in a submission; not of a rejected one. Empty: all."""

    @property
    def place(self) -> str:
        """STEP/GROUP/ROLLOUT."""
        return f"{self.step}/{self.group}/{self.rollout}"

    def parts(self) -> list[tuple[str, bool]]:
        """Split prompt and completion as the model saw them into parts, each with whether the model drew it."""
        bounds = [0, *self.cuts, len(self.completion)]
        spans = [self.completion[start:end] for start, end in pairwise(bounds)]
        completed = any(self.completion_mask)
        return [
            (self.prompt, False),
            *((text, completed and not at % 2) for at, text in enumerate(spans)),
        ]


COLUMNS = tuple(one.name for one in fields(KeptRollout))
TOKENS = (
    *("prompt_ids", "completion_ids", "completion_mask", "completion_logprobs"),
    *("routes", "support"),
)
BRIEF = tuple(name for name in COLUMNS if name not in (*TOKENS, "prompt", "completion", "cuts"))
"""Columns that are small."""


@dataclass(frozen=True)
class RolloutFilter:
    """Selects rollouts; a field with its default selects all."""

    steps: tuple[int, int] | None = None
    """First and last."""
    worker: str = ""
    """First digits of its id."""
    environment: str = ""
    verdict: str = ""
    reason: str = ""
    reward: tuple[float, float] = (-math.inf, math.inf)
    """Lowest and highest."""
    group: int | None = None
    rollout: int | None = None

    def takes_step(self, step: int) -> bool:
        """Return whether any rollout of a step can be wanted."""
        return self.steps is None or self.steps[0] <= step <= self.steps[1]

    def takes(self, rollout: KeptRollout) -> bool:
        """Return whether a rollout is wanted."""
        low, high = self.reward
        return (
            self.takes_step(rollout.step)
            and rollout.worker.startswith(self.worker)
            and self.environment in ("", rollout.environment)
            and self.verdict in ("", rollout.verdict)
            and self.reason in ("", rollout.reason)
            and (low == -math.inf or low <= rollout.reward)
            and (high == math.inf or rollout.reward <= high)
            and self.group in (None, rollout.group)
            and self.rollout in (None, rollout.rollout)
        )


class StepSettings(msgspec.Struct, frozen=True):
    """The settings that a step was computed with, to compute it again."""

    training: dict[str, Any]
    """The section [training] of the config, whole."""
    max_steps: int
    temperature: float
    torch: str
    """Release of torch: sums of another one may differ in their last bits."""
    gpu: bool = False
    own: dict[str, dict[str, Any]] = {}
    """Section of each environment with an advantage or loss of its own, by name."""
    temperatures: dict[str, float] = {}
    """Temperature of each environment that differs, by name."""


class StepRecord(msgspec.Struct, frozen=True):
    """The record of a step in its file."""

    step: int
    groups: int
    """Groups of the batch; 0: no step was trained, the run ended with these rollouts."""
    kept: int
    """Groups of the batch that are in the file."""
    rejected: int = 0
    """Rollouts that did not get into a batch."""
    left_out: int = 0
    """Rejected rollouts that are not in the file, because it was full."""
    head: bytes = b""
    """The sealed head of the policy that the step made; empty if it is not known."""
    settings: StepSettings | None = None
    """None in files of older releases."""
    baselines: dict[str, dict[str, float]] = {}
    """Baselines of `advantage = "rae"`, by environment and agent, before the step."""
    format: int = FORMAT

    @property
    def whole(self) -> bool:
        """Whether the file holds all of the batch."""
        return self.kept == self.groups


_STEP_RECORD = msgspec.json.Decoder(StepRecord)


def _tables(rows: Iterator[KeptRollout], schema: Any) -> Iterator[Any]:
    import pyarrow as pa

    while some := [vars(rollout) for rollout in islice(rows, ROWS_AT_ONCE)]:
        yield pa.Table.from_pylist(some, schema)


class RolloutFiles:
    """The files of one run in `directory`."""

    def __init__(self, directory: Path, *, fsync: bool = True) -> None:
        self.directory = directory
        self._fsync = fsync

    def path(self, step: int) -> Path:
        """Return the path of a step's file."""
        return self.directory / f"step_{step:06d}.parquet"

    def steps(self) -> list[int]:
        """List the steps with kept rollouts, ascending."""
        if not self.directory.is_dir():
            return []
        matches = (_NAME.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(name[1]) for name in matches if name)

    def write(self, record: StepRecord, rows: Iterable[KeptRollout]) -> int:
        """Write the file of a step, whole or not at all; returns its bytes. Raises StorageError."""
        import pyarrow as pa
        import pyarrow.parquet as parquet

        schema = _schema().with_metadata({_META: msgspec.json.encode(record)})
        target = self.path(record.step)
        make_directory(self.directory)
        with whole_file(target, fsync=self._fsync) as partial:
            with parquet.ParquetWriter(
                partial, schema, compression="zstd", write_page_checksum=True
            ) as file:
                source = iter(rows)
                while tables := list(islice(_tables(source, schema), TABLES_AT_ONCE)):
                    file.write(pa.concat_tables(tables))
        return target.stat().st_size

    def record(self, step: int) -> StepRecord:
        """Read the record of a step from its file. Raises StorageError."""
        import pyarrow.parquet as parquet

        with _reading(self.path(step)):
            return _record(self.path(step), parquet.read_schema(self.path(step)).metadata)

    def read(self, step: int, columns: Sequence[str] = COLUMNS) -> list[KeptRollout]:
        """Read the rollouts of a step; fields beyond `columns`, which include BRIEF, are empty.

        Raises StorageError.
        """
        import pyarrow.parquet as parquet

        path = self.path(step)
        with _reading(path):
            schema = parquet.read_schema(path)
            _record(path, schema.metadata)
            # a file of before a column was added has not this one, a file of a later release may have more
            _check_columns(schema)
            names = [name for name in columns if name in schema.names]
            table = parquet.read_table(path, columns=names, page_checksum_verification=True)
            return [KeptRollout(**row) for row in table.to_pylist()]

    def select(
        self, wanted: RolloutFilter, columns: Sequence[str] = COLUMNS
    ) -> Iterator[KeptRollout]:
        """Read the rollouts that are wanted, in order. Raises StorageError."""
        for step in self.steps():
            if wanted.takes_step(step):
                yield from filter(wanted.takes, self.read(step, columns))

    def go_back(self, step: int) -> None:
        """Remove the files of later steps: the run goes on after `step`. Raises StorageError."""
        self._remove(later for later in self.steps() if later > step)

    def prune(self, steps: int, max_bytes: float) -> None:
        """Remove the oldest files beyond the newest `steps` (0: all), or beyond `max_bytes` together.

        The newest stays in any case. Raises StorageError.
        """
        there = self.steps()
        old = there[:-steps] if steps else []
        size = 0
        for step in reversed(there[len(old) :]):
            size += self.path(step).stat().st_size
            if size > max_bytes and step != there[-1]:
                old.append(step)
        self._remove(old)

    def _remove(self, steps: Iterable[int]) -> None:
        for step in steps:
            try:
                self.path(step).unlink(missing_ok=True)
            except OSError as error:
                raise file_error(error, self.path(step)) from error


def as_json(rollout: KeptRollout) -> bytes:
    """Encode a rollout as one line of JSON; numbers that are not finite become null."""
    return msgspec.json.encode(asdict(rollout))


@contextmanager
def _reading(path: Path) -> Generator[None]:
    """Turn the errors of a missing or damaged file into StorageError."""
    import pyarrow as pa

    try:
        yield
    except FileNotFoundError as error:
        steps = RolloutFiles(path.parent).steps()
        there = f" (kept are steps {steps[0]} to {steps[-1]})" if steps else ""
        raise StorageError(
            f"{path} is not there: rollouts of that step were not kept, or made room for newer ones"
            f"{there}"
        ) from error
    except (*BAD_FILE, pa.ArrowException, TypeError) as error:
        raise StorageError(f"{path} is damaged ({one_line(error)}): remove it") from error


def _record(path: Path, metadata: "dict[bytes, bytes] | None") -> StepRecord:
    try:
        record = _STEP_RECORD.decode((metadata or {})[_META])
    except (KeyError, *BAD_FILE) as error:
        raise StorageError(f"{path} is no file of rollouts of ours: move it away") from error
    if record.format > FORMAT:
        raise StorageError(
            f"{path} is of a newer release (format {record.format}): read it by that"
        )
    return record


def _check_columns(schema: Any) -> None:
    """Raise ValueError where a damaged name or type makes a column look like another one."""
    ours = _schema()
    there = frozenset[str](schema.names)
    if len(there) < len(schema.names) or (there - {*COLUMNS} and {*COLUMNS} - there):
        raise ValueError(f"unknown columns {some(sorted(there - {*COLUMNS}))}")
    for name in there & {*COLUMNS}:
        if schema.field(name).type != ours.field(name).type:
            raise ValueError(f"column {name} has type {schema.field(name).type}")


def _schema() -> Any:
    import pyarrow as pa

    kinds: dict[str, Any] = {
        **dict.fromkeys(("step", "policy_first", "policy_last", "lease"), pa.int64()),
        **dict.fromkeys(("group", "rollout", "branch", "trace"), pa.int32()),
        **dict.fromkeys(("reward", "advantage"), pa.float64()),
        "cuts": pa.list_(pa.int32()),
        "prompt_ids": pa.list_(pa.uint32()),
        "completion_ids": pa.list_(pa.uint32()),
        "completion_mask": pa.list_(pa.bool_()),
        "completion_logprobs": pa.list_(pa.float32()),
        "routes": pa.binary(),
        "support": pa.binary(),
    }
    return pa.schema([(name, kinds.get(name, pa.string())) for name in COLUMNS])
