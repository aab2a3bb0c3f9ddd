"""From what a user names to files of JSON lines: finds files, unpacks .gz, turns .json lists and .parquet.

What has to be turned is turned once, into `cache`, and found there again; one row of a table is one line.
"""

import gzip
import json
import logging
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from ...crypto.hashing import digest
from ..errors import StorageError, UsageError

logger = logging.getLogger(__name__)

KINDS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
MAX_LIST_BYTES = 2 << 30
"""A .json list is read whole; who has more writes .jsonl."""
PARQUET_ROWS = 1024
PIECE = 1 << 20


def find_files(names: Sequence[str]) -> list[Path]:
    """The data files that `names` are or hold, sorted within a directory. Raises UsageError."""
    found: list[Path] = []
    for name in names:
        path = Path(name).expanduser()
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and kind(p))
            if not inside:
                raise UsageError(f"{path} holds no data ({', '.join(KINDS)}): correct data.files")
            found.extend(inside)
        elif not path.is_file():
            raise UsageError(f"no such file or directory: {path}; a hub id belongs into data.hub")
        elif not kind(path):
            raise UsageError(f"{path} is none of {', '.join(KINDS)}: convert it to .jsonl")
        else:
            found.append(path)
    return found


def kind(path: Path) -> str:
    """Its ending, if it is one of KINDS; else nothing."""
    name = path.name.lower()
    return next((one for one in sorted(KINDS, key=len, reverse=True) if name.endswith(one)), "")


def as_lines(path: Path, cache: Path) -> Path:
    """A file of JSON lines with the rows of `path`: itself, or one in `cache`. Raises StorageError."""
    ending = kind(path)
    if ending == ".jsonl":
        return path
    if ending == ".json" and not _is_list(path):
        return path  # many call JSON lines so
    seen = path.stat()
    name = digest(f"{path.resolve()} {seen.st_size} {seen.st_mtime_ns}".encode()).hex()[:24]
    target = cache / f"{name}.jsonl"
    if not target.is_file():
        logger.info("converting %s", path)
        _write(target, lambda out: _convert(path, ending, out))
    return target


def _write(target: Path, fill: Callable[[IO[bytes]], None]) -> None:
    """Make `target`, whole or not at all."""
    partial = target.with_suffix(".partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as out:
            fill(out)
        partial.replace(target)
    except OSError as error:
        raise StorageError(f"cannot convert to {target}: {error}; free some disk") from error
    finally:
        partial.unlink(missing_ok=True)


def _convert(path: Path, ending: str, out: IO[bytes]) -> None:
    if ending == ".parquet":
        _lines_of(_parquet(path), out)
    elif ending == ".json":
        _lines_of(_list(path.read_bytes(), path), out)
    else:
        _unpack(path, out)


def _unpack(path: Path, out: IO[bytes]) -> None:
    try:
        with gzip.open(path, "rb") as packed:
            first = packed.read(PIECE)
            if kind(path) == ".json.gz" and first.lstrip().startswith(b"["):
                _lines_of(_list(first + packed.read(MAX_LIST_BYTES), path), out)
                return
            out.write(first)
            shutil.copyfileobj(packed, out, PIECE)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise StorageError(f"{path} is no whole .gz ({error}): fetch it again") from error


def _is_list(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(PIECE).lstrip().startswith(b"[")


def _list(data: bytes, path: Path) -> list[Any]:
    if len(data) >= MAX_LIST_BYTES:
        raise StorageError(f"{path} is too large for one JSON list: convert it to .jsonl")
    try:
        rows: Any = json.loads(data)
    except ValueError as error:
        raise StorageError(f"{path} is not valid JSON ({error}): mend it") from error
    return rows


def _lines_of(rows: Iterator[Any] | list[Any], out: IO[bytes]) -> None:
    for row in rows:
        out.write(json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n")


def _parquet(path: Path) -> Iterator[Any]:
    """Rows of a parquet file, some at a time."""
    try:
        from pyarrow import ArrowException  # pyright: ignore[reportMissingImports]
        from pyarrow.parquet import ParquetFile  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UsageError(
            f"{path} needs pyarrow: `pip install pyarrow`, or convert it to .jsonl"
        ) from error
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=PARQUET_ROWS):
                yield from batch.to_pylist()
    except ArrowException as error:
        raise StorageError(f"{path} cannot be read ({error}): fetch it again") from error
