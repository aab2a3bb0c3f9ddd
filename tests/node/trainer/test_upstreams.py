"""Whom the trainer names to a worker as sources of chunks: those before it in the line, and those after it."""

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from support.hostile import Rogue
from support.swarm import Swarm

from primerl.node.ops.control import ask
from primerl.node.p2p.rpc import Refused
from primerl.protocol.envelope import Purpose, unseal
from primerl.protocol.manifests import PeerRecord
from primerl.protocol.messages import SyncRecords


def nodes(records: tuple[bytes, ...]) -> list[bytes]:
    return [unseal(one, Purpose.PEER, PeerRecord, now=0).body.node for one in records]


async def test_a_worker_hears_of_the_nearest_before_it_first_and_of_some_after_it(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir) as swarm, AsyncExitStack() as stack:
        await swarm.start_trainer()
        line = [
            await stack.enter_async_context(Rogue(swarm, f"worker {number}"))
            for number in range(20)
        ]
        for one in line:
            await one.hello()
            await one.poll(0, version=0)
        ids = [one.key.node_id for one in line]
        reply = await line[12].poll(0, version=0)
        before, after = nodes(reply.upstreams), nodes(reply.downstreams)
        assert before[:4] == [ids[11], ids[10], ids[9], ids[8]]
        assert after[:4] == [ids[13], ids[14], ids[15], ids[16]]
        assert set(before) < set(ids[:12])
        assert set(after) == set(ids[13:])
        assert len(before) == 9
        again = await line[12].poll(0, version=0)
        assert nodes(again.upstreams) == before
        first = await line[0].poll(0, version=0)
        assert first.upstreams == ()
        assert len(first.downstreams) == 16
        last = await line[19].poll(0, version=0)
        assert nodes(last.upstreams)[:4] == [ids[18], ids[17], ids[16], ids[15]]
        assert len(last.upstreams) == 16, "a late joiner chooses among as many as others do"
        everybody = await line[12].ask(SyncRecords(()), SyncRecords)
        assert nodes(everybody.records) == before + after


async def test_a_node_that_holds_nothing_yet_is_no_source(tmp_path: Path, model_dir: Path) -> None:
    async with Swarm(tmp_path, model_dir) as swarm, AsyncExitStack() as stack:
        await swarm.start_trainer()
        line = [await stack.enter_async_context(Rogue(swarm, name)) for name in ("a", "b", "c")]
        for one, version in zip(line, (-1, 0, -1), strict=True):
            await one.hello()
            await one.poll(0, version=version)
        reply = await line[0].poll(0, version=-1)
        assert nodes(reply.downstreams) == [line[1].key.node_id]


async def test_a_banned_worker_is_no_source_and_asks_in_vain(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir) as swarm, AsyncExitStack() as stack:
        await swarm.start_trainer()
        line = [await stack.enter_async_context(Rogue(swarm, name)) for name in ("a", "b", "c")]
        for one in line:
            await one.hello()
            await one.poll(0, version=0)
        liar, data_dir = line[1].key.node_id, swarm.trainer.data_dir
        told = await asyncio.to_thread(ask, data_dir, "ban", name=liar.hex(), why="it lies")
        assert (told["id"], told["until"]) == (liar.hex(), 0.0)
        (ban,) = await asyncio.to_thread(ask, data_dir, "bans")
        assert (ban["id"], ban["why"]) == (liar.hex(), "by the operator (it lies)")
        assert abs(ban["since"] - time.time()) < 3600
        row = await swarm.until_row_of(liar, lambda row: row["refused"] != "", 20.0)
        assert ban["ticket"] == row["ticket"] == f"default {swarm.read_ticket().id.hex()[:8]}"
        reply = await line[0].poll(0, version=0)
        assert nodes(reply.downstreams) == [line[2].key.node_id]
        with pytest.raises(Refused, match=r"banned: by the operator \(it lies\)"):
            await line[1].poll(1, version=0)
        await asyncio.to_thread(ask, data_dir, "pardon", name=liar.hex())
        assert await asyncio.to_thread(ask, data_dir, "bans") == []
        await line[1].poll(0, version=0)
        reply = await line[0].poll(0, version=0)
        assert set(nodes(reply.downstreams)) == {liar, line[2].key.node_id}


async def test_a_proven_worker_is_named_no_newcomers_as_sources_where_these_are_many(
    tmp_path: Path, model_dir: Path
) -> None:
    """Attack: fresh keys say that they hold weights, and serve none."""
    rollouts = {"groups_per_batch": 64, "groups_per_lease": 1}
    async with Swarm(tmp_path, model_dir, rollouts=rollouts) as swarm, AsyncExitStack() as stack:
        await swarm.start_trainer()
        one, two, *sybils = [
            await stack.enter_async_context(Rogue(swarm, f"key {number}")) for number in range(6)
        ]
        for rogue in (one, two, *sybils):
            await rogue.hello()
        for rogue in (one, two):
            await rogue.verdict((await rogue.work()).lease_id)
        for rogue in (two, *sybils, one):
            await rogue.poll(0, version=0)
        reply = await one.ask(SyncRecords(()), SyncRecords)
        assert nodes(reply.records) == [two.key.node_id]
        reply = await sybils[0].ask(SyncRecords(()), SyncRecords)
        assert {one.key.node_id, two.key.node_id} < set(nodes(reply.records))
