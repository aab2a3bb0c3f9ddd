"""What every node process does before its role begins."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from primerl.node.app import daemon
from primerl.node.config.run import JoinConfig
from primerl.node.errors import NodeError

PYTHONS = 0.005
"""What Python begins with; another test's node may have set this process otherwise."""


@pytest.fixture
def patience() -> Iterator[float]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(PYTHONS)
    yield PYTHONS
    sys.setswitchinterval(before)


def test_threads_of_a_node_take_turns_quickly(patience: float, tmp_path: Path) -> None:
    config = JoinConfig(ticket="no ticket at all", data_dir=tmp_path)
    with pytest.raises(NodeError, match="ticket"):
        asyncio.run(daemon.join(config))
    assert sys.getswitchinterval() < patience / 5
