"""Data sets of the Hugging Face hub: their data files, never their code.

Only files of the kinds that conversion.py reads are downloaded; a data set that is made by a script has none.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from ..errors import NetworkError, UsageError
from .conversion import KINDS, kind

SPLITS = ("train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval")


def download(name: str, revision: str, split: str) -> list[Path]:
    """The local files of a data set's split. Raises NetworkError, UsageError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        found = snapshot_download(
            name,
            repo_type="dataset",
            revision=revision,
            allow_patterns=[f"*{ending}" for ending in KINDS],
        )
    except HFValidationError as error:
        raise UsageError(f"{name!r} is no hub id: correct data.hub") from error
    except OSError as error:  # every HTTP, cache and connection error of the hub client is one
        raise NetworkError(
            f"cannot download data set {name!r} ({type(error).__name__}): check name and network, "
            "or give local files with data.files"
        ) from error
    root = Path(found)
    files = sorted(p for p in root.rglob("*") if p.is_file() and kind(p))
    if not files:
        raise UsageError(
            f"data set {name!r} has no file of {', '.join(KINDS)}: convert it, use data.files"
        )
    return of_split(files, split, root=root, name=name)


def of_split(files: Sequence[Path], split: str, *, root: Path, name: str) -> list[Path]:
    """Those whose path below `root` has the word `split`; all, where no path names a split, and the wanted
    one is train. Raises UsageError."""
    words = {file: _words(file.relative_to(root)) for file in files}
    chosen = [file for file in files if split.lower() in words[file]]
    if chosen:
        return chosen
    named = sorted({word for found in words.values() for word in found if word in SPLITS})
    if split == "train" and not named:
        return list(files)
    known = ", ".join(named) or "none that are named"
    raise UsageError(f"data set {name!r} has no split {split!r} ({known}): correct data.split")


def _words(path: Path) -> set[str]:
    return {word for word in re.split(r"[^a-z0-9]+|(?<=[a-z])(?=\d)", path.as_posix().lower())}
