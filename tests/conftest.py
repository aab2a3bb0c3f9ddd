"""How the suite runs: what is compiled is kept, the files that take longest begin first."""

import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
"""Tests start many processes: what they import is compiled once."""

LONGEST = (
    "scenarios/test_stage_swarm.py",
    "attacks/test_floods.py",
    "cli/test_train.py",
    "attacks/test_unaudited.py",
)
"""Files that wait, the longest first."""


def pytest_configure(config: pytest.Config) -> None:
    """Have xdist keep the order below, and not begin with the files of most tests."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Do not look for garbage among modules and tests, which all stay: that took half of the collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first: one that begins last is waited for alone."""
    here = Path(__file__).parent
    place = {here / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))
