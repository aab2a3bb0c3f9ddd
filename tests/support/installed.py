"""A package as pip leaves it, in a directory of a test."""

from pathlib import Path

TASKSET = """
from pathlib import Path

Path({marker!r}).touch()
__all__ = ["Digits"]


class Digits:
    pass
"""


def install(site: Path, marker: Path, *, version: str = "0.1.0", more: str = "") -> None:
    """Put the distribution sort-digits with the modules sort_digits and its helper into `site`.

    Importing it makes the file `marker`.
    """
    package = site / "sort_digits"
    (package / "__pycache__").mkdir(parents=True)
    (package / "__init__.py").write_text(TASKSET.format(marker=str(marker)) + more)
    (package / "__pycache__" / "__init__.cpython-311.pyc").write_bytes(str(site).encode())
    (package / "words.txt").write_text("one two")
    (site / "sort_digits_helper.py").write_text("LIMIT = 9\n")
    info = site / f"sort_digits-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: sort-digits\nVersion: {version}\n"
    )
    (info / "top_level.txt").write_text("sort_digits\nsort_digits_helper\n")
    (info / "RECORD").write_text("sort_digits/__init__.py,,\nsort_digits_helper.py,,\n")
    (info / "direct_url.json").write_text(str(site))
