"""The directory of a run that the release before wrote, with its trainer and a worker.

`bash scripts/neighbours.sh COMMIT FILE` makes the file of a release, by the run of tests/older/run.toml. There
is no release yet: it is by a commit of 2026-11-29, which wrote format 3 of the ledger.
"""

import tarfile
from pathlib import Path

from support.repository import ROOT

OLDER = ROOT / "tests" / "older"
CONFIG = OLDER / "run.toml"
STEPS = 3


def unpack(directory: Path) -> Path:
    """Unpack it below `directory`, which is then the run's output directory; return the run's own."""
    (file,) = OLDER.glob("written_by_*.tar.xz")
    with tarfile.open(file) as archive:
        archive.extractall(directory, filter="data")
    return directory / "before"
