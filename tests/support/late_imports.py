"""Import heavy libraries where they are tested: every worker of pytest-xdist imports every test module."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest


def imported_late(namespace: dict[str, Any], **modules: str) -> Callable[[], None]:
    """Make a fixture of a test module: it imports `modules` into its `namespace` before the first test."""

    @pytest.fixture(scope="module", autouse=True)
    def late_imports() -> None:
        namespace.update({name: import_module(module) for name, module in modules.items()})

    return late_imports
