"""Fixtures that tests with a Swarm share; a conftest.py imports them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.swarm import make_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model directory for all runs."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session", autouse=True)
def quiet_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nodes of tests do not show among the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield
