"""What other workers learn of one that does not share its address: no connection, and no word of it.

docs/privacy.md has a row for each message that carries an address.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.memory_network import MemoryNetwork
from support.swarm import Running, Swarm, merged

from primerl.node.config.run import JoinConfig
from primerl.node.ops import control

HOME, ADVERTISED = "203.0.113.77", "198.51.100.77:4477"
"""The address that the others would see of its packets, and the one that its record states."""


async def learned_by(swarm: Swarm, node: Running) -> str:
    """Return all that came to a node, that it tells its owner, and that is in its files."""
    heard = (swarm.network.heard or {}).get(node.node_id, b"")
    told = [await asyncio.to_thread(control.ask, node.data_dir, ask) for ask in ("status", "peers")]
    files = [it.read_bytes() for it in node.data_dir.rglob("*") if it.is_file()]
    return (bytes(heard) + b"".join(files)).decode("latin-1") + json.dumps(told)


async def run_beside(swarm: Swarm, shares: bool) -> tuple[Running, list[Running]]:
    """Let a worker at HOME take part in some steps between two others; return it, and these."""
    section: dict[str, Any] = {"share_address": shares, "advertise": [ADVERTISED]}
    await swarm.start_trainer()
    first = swarm.add_worker("first")
    await swarm.wait_step(1)
    home = swarm.add_worker("home", public=HOME, network=merged(section, {"libp2p": True}))
    await swarm.until_row(home, lambda row: row["accepted"] > 0, 60.0)
    last = swarm.add_worker("last")
    await swarm.until_row(last, lambda row: row["accepted"] > 0, 60.0)
    await swarm.wait_step((await swarm.trainer.status())["version"] + 2)
    return home, [first, last]


@pytest.mark.parametrize("shares", [False, True])
async def test_a_worker_that_does_not_share_its_address_is_seen_by_its_trainer_alone(
    tmp_path: Path, model_dir: Path, shares: bool
) -> None:
    """With an address that is shared all of this is there, so the test would see it."""
    network = MemoryNetwork()
    network.heard = {}
    async with Swarm(tmp_path, model_dir, network=network, gossip=True, max_steps=1000) as swarm:
        home, others = await run_beside(swarm, shares)
        ids = {it.node_id for it in others}
        touched = {
            other
            for one, two in network.connected
            for this, other in ((one, two), (two, one))
            if this == home.node_id
        }
        assert bool(touched & ids) == shares
        assert swarm.trainer.node_id in touched
        assert ADVERTISED in await learned_by(swarm, swarm.trainer)
        for other in others:
            learned = await learned_by(swarm, other)
            assert (ADVERTISED in learned) == shares, other.data_dir.name
            assert HOME not in learned  # nobody passes on what packets come from
        assert home.engine is not None
        assert home.engine.policy_version > 0


def test_what_would_show_an_address_is_refused_beside_the_wish_to_hide_it() -> None:
    hidden = {"share_address": False}
    relayed = {"network": hidden | {"relay_urls": ["https://relay.example.org"]}}
    with pytest.raises(ValidationError, match="exclude each other"):
        JoinConfig.model_validate(relayed)
    staged = {"network": hidden, "pp": {"mode": "on"}, "engine": {"type": "vllm"}}
    with pytest.raises(ValidationError, match="stages connect to each other"):
        JoinConfig.model_validate(staged)
