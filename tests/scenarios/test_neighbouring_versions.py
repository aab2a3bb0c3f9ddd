"""Two nodes over real sockets, one of which also speaks the wire version after this one.

A release speaks the version before its own, so this pair is what a swarm is while it is upgraded. The later
node is today's code, told that it speaks one version more.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from support.swarm import Running, Swarm

from primerl.node.app.factories import Factories, MakeLedger, start_iroh
from primerl.node.errors import TicketError
from primerl.protocol.version import WIRE_VERSION, WireRange

pytestmark = pytest.mark.net

NOW_ALONE = WireRange(WIRE_VERSION, WIRE_VERSION)
NEXT = WireRange(WIRE_VERSION, WIRE_VERSION + 1)
NEXT_ALONE = WireRange(WIRE_VERSION + 1, WIRE_VERSION + 1)


ON_LOOPBACK = {"libp2p": False, "host": "127.0.0.1"}


class WiredSwarm(Swarm):
    """A swarm over iroh on loopback, whose nodes speak the versions that they are told."""

    trainer_speaks: WireRange
    worker_speaks: WireRange

    def _factories(self, running: Running, ledger: MakeLedger | None = None) -> Factories:
        wire = self.trainer_speaks if running is self.trainer else self.worker_speaks
        return replace(super()._factories(running, ledger), transport=start_iroh, wire=wire)


def swarm_of(directory: Path, model: Path, trainer: WireRange, worker: WireRange) -> WiredSwarm:
    """A trainer and a worker of these versions, not started."""
    swarm = WiredSwarm(directory, model)
    swarm.settings["network"] = ON_LOOPBACK
    swarm.trainer_speaks, swarm.worker_speaks = trainer, worker
    return swarm


@pytest.mark.parametrize(
    ("trainer", "worker"), [(NEXT, NOW_ALONE), (NOW_ALONE, NEXT)], ids=["trainer", "worker"]
)
async def test_a_run_goes_on_while_one_of_two_nodes_is_upgraded(
    tmp_path: Path,
    model_dir: Path,
    trainer: WireRange,
    worker: WireRange,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with swarm_of(tmp_path, model_dir, trainer, worker) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1", network=ON_LOOPBACK)
        assert (await swarm.finished())["steps"] == 3
        await swarm.workers["w1"].ended()
    assert f"wire {WIRE_VERSION})" in caplog.text


@pytest.mark.parametrize(
    ("trainer", "worker", "line"),
    [
        (NEXT_ALONE, NOW_ALONE, "speaks wire 3, your node 2: upgrade your node to it"),
        (NOW_ALONE, NEXT_ALONE, "speaks wire 2, your node 3: ask for the trainer to be upgraded"),
    ],
)
async def test_nodes_that_share_no_version_part_with_one_line_that_says_who_upgrades(
    tmp_path: Path, model_dir: Path, trainer: WireRange, worker: WireRange, line: str
) -> None:
    async with swarm_of(tmp_path, model_dir, trainer, worker) as swarm:
        await swarm.start_trainer()
        with pytest.raises(TicketError, match=line):
            await swarm.add_worker("w1", network=ON_LOOPBACK).ended(20.0)
