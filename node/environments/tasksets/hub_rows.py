"""Rows of a data set of the hub, for the tasksets that prime-rl has, too.

They come from files of the machine's owner, ~/.primerl/datasets/OWNER/NAME/[SUBSET/]SPLIT*.jsonl or .parquet,
and else from the hub or its cache. Invariant: a run names a data set, never a path.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from pydantic import field_validator

FOLDER = Path(".primerl") / "datasets"
"""Directory of the owner's data sets, below the home directory."""
NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


class HubRowsConfig(vf.TasksetConfig):
    """Options that name a data set; names are those of prime-rl's environments."""

    dataset_name: str = ""
    dataset_subset: str = ""
    dataset_split: str = "train"
    dataset_revision: str = ""

    @field_validator("dataset_name", "dataset_subset", "dataset_split")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if value and not NAME.fullmatch(value):
            raise ValueError(f"{value[:80]!r} is no name of a data set: give OWNER/NAME")
        return value

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """Return the rows of the data set, from the owner's files or else from the hub."""
        folder = Path.home() / FOLDER / self.dataset_name
        if self.dataset_subset and (folder / self.dataset_subset).is_dir():
            folder /= self.dataset_subset
        files = [
            path
            for path in sorted(folder.glob(f"{self.dataset_split}*"))
            if path.suffix in (".jsonl", ".parquet")
        ]
        if files:
            return (row for path in files for row in _read(path))
        import datasets

        datasets.disable_progress_bars()
        rows: Any = datasets.load_dataset(
            self.dataset_name,
            self.dataset_subset or None,
            split=self.dataset_split,
            revision=self.dataset_revision or None,
        )
        return rows


def _read(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as lines:
            yield from (json.loads(line) for line in lines if line.strip())
        return
    from pyarrow import parquet

    for batch in parquet.ParquetFile(path).iter_batches():
        yield from batch.to_pylist()
