"""A worker that its owner pauses: it takes nothing, keeps its place, and goes on where the run is."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.swarm import Running, Swarm
from support.waiting import until
from support.witness import Fakes, WitnessEngine

from primerl.crypto.keys import SecretKey
from primerl.node.config.reload import ConfigSource
from primerl.node.config.run import JoinConfig
from primerl.node.errors import NodeError
from primerl.node.ops import control
from primerl.node.p2p.rpc import Refused, receive_reply, send
from primerl.protocol.errors import Reason
from primerl.protocol.messages import ChunkFollows, GetChunk
from primerl.protocol.version import ALPN_BLOBS

ROLLOUTS: dict[str, Any] = {"max_empty_batches": 1000, "batch_timeout_s": 60.0}
CLOSED = {"hours": "00:00-00:01"}
"""Hours in which no test runs, but for a minute a day."""


class HeldEngine(WitnessEngine):
    """A WitnessEngine that draws while it is let, and knows whether it was started."""

    def __init__(self, fakes: Fakes, name: str) -> None:
        self.go = asyncio.Event()
        self.started = False
        super().__init__(fakes, name, self._wait)

    async def _wait(self) -> None:
        await self.go.wait()

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """Note it."""
        self.started = True
        await super().start(model_dir, fingerprint=fingerprint)


async def tell(worker: Running, command: str, **arguments: Any) -> dict[str, Any]:
    """Do as `primerl-node` COMMAND."""
    return await asyncio.to_thread(control.ask, worker.data_dir, command, **arguments)


async def asks(swarm: Swarm, worker: Running) -> Reason | None:
    """Ask a worker for any chunk, as a stranger; return the reason of its refusal."""
    transport = swarm.network.transport(SecretKey.generate().node_id)
    assert worker.transport is not None
    connection = await transport.connect(
        worker.node_id, worker.transport.addresses(), ALPN_BLOBS, deadline=5.0
    )
    stream = await connection.open_stream()
    await send(stream, GetChunk(bytes(32)))
    try:
        await receive_reply(stream, ChunkFollows)
    except Refused as refusal:
        return refusal.reason
    finally:
        await transport.close()
    return None


async def test_a_paused_worker_finishes_what_it_holds_keeps_its_place_and_goes_on_when_it_is_resumed(
    tmp_path: Path, model_dir: Path
) -> None:
    fakes = Fakes(last_step=3)
    async with Swarm(tmp_path, model_dir, fakes=fakes, rollouts=ROLLOUTS, max_steps=9) as swarm:
        await swarm.start_trainer()
        engine = HeldEngine(fakes, "w")
        worker = swarm.add_worker("w", engine=engine)
        await until(lambda: engine.waiting > 0)
        answer = await tell(worker, "pause")
        assert (answer["paused"], answer["held"]) == ("by its owner", 1)
        row = await swarm.until_row(worker, lambda row: row["paused"] == "by its owner", 10.0)
        assert row["leases"] == 1, "it keeps the lease that it works on"
        engine.go.set()
        row = await swarm.until_row(worker, lambda row: row["leases"] == 0, 10.0)
        assert not row["left"]
        status = await worker.status()
        assert status["phase"] == "paused"
        assert status["waiting_for"].startswith("paused: by its owner")
        assert status["limits"]["paused"] == "by its owner"
        loads = len(fakes.loads("w"))

        # another one goes on meanwhile: what it makes is not fetched here, and nobody is served from here
        swarm.add_worker("other")
        await swarm.wait_step(3)
        assert len(fakes.loads("w")) == loads
        assert await asks(swarm, worker) == Reason.BUSY
        await swarm.stop_worker("other")

        assert (await tell(worker, "resume")) == {"paused": ""}
        assert await asks(swarm, worker) == Reason.NOT_FOUND
        fakes.go.set()
        await swarm.finished()
        assert fakes.newest("w") >= 4


async def test_a_pause_outlives_a_restart_and_leaves_the_engine_unstarted(
    tmp_path: Path, model_dir: Path
) -> None:
    fakes = Fakes()
    async with Swarm(tmp_path, model_dir, fakes=fakes, rollouts=ROLLOUTS) as swarm:
        await swarm.start_trainer()
        holding = HeldEngine(fakes, "w")
        worker = swarm.add_worker("w", engine=holding)
        await until(lambda: holding.waiting > 0)
        await tell(worker, "pause", seconds=3600.0)
        await swarm.stop_worker("w")
        engine = HeldEngine(fakes, "w")
        engine.go.set()
        worker = swarm.add_worker("w", engine=engine)
        await swarm.until_row(worker, lambda row: row["paused"] == "by its owner", 10.0)
        assert not engine.started
        assert (await worker.status())["phase"] == "paused"
        said = (await swarm.trainer.status())["waiting_for"]
        assert "1 paused (by its owner)" in said
        await tell(worker, "resume")
        await swarm.finished()
        assert engine.started


async def test_work_that_is_handed_back_goes_to_others_at_once(
    tmp_path: Path, model_dir: Path
) -> None:
    fakes = Fakes()
    rollouts = ROLLOUTS | {"lease_timeout_s": 600.0}
    async with Swarm(tmp_path, model_dir, fakes=fakes, rollouts=rollouts) as swarm:
        await swarm.start_trainer()
        engine = HeldEngine(fakes, "w")
        worker = swarm.add_worker("w", engine=engine)
        await until(lambda: engine.waiting > 0)
        answer = await tell(worker, "pause", now=True)
        assert answer["held"] >= 1
        await swarm.until_row(worker, lambda row: row["paused"] and not row["leases"], 10.0)
        swarm.add_worker("other")
        await swarm.finished()


async def test_hours_pause_a_worker_and_other_hours_are_read_without_a_restart(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, rollouts=ROLLOUTS) as swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("w", limits=CLOSED)
        row = await swarm.until_row(worker, lambda row: row["paused"], 10.0)
        assert row["paused"] == "outside its hours"
        assert "outside its hours, until" in (await tell(worker, "resume"))["paused"]
        with pytest.raises(NodeError, match="could be read again"):
            await tell(worker, "reload")

        node = worker.node
        assert node is not None
        before = node.config
        assert isinstance(before, JoinConfig)
        after = before.model_copy(
            update={
                "limits": before.limits.model_copy(update={"hours": "", "upload": 8.0}),
                "network": before.network.model_copy(update={"max_peers": 7}),
            }
        )
        node.source = ConfigSource(lambda: after, before)
        assert await tell(worker, "reload") == {
            "applied": ['limits.hours = ""', "limits.upload = 8.0"],
            "restart": ["network.max_peers"],
        }
        assert node.rates.up.rate == 1_000_000
        await swarm.finished()


async def test_a_month_s_bytes_are_counted_where_the_node_keeps_its_key(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, rollouts=ROLLOUTS) as swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("w")
        await swarm.finished()
        await worker.ended()
        kept = json.loads((worker.data_dir / "limits.json").read_text())
        assert kept["sent"] > 100
        assert kept["received"] > 100
