"""The lines of simulated nodes: what they carry in which time. Figures of docs/scale.md rest on them."""

import asyncio
import time

import pytest
from support.access_lines import MBIT_S, AccessLines, Line
from support.exchange_world import node_id
from support.memory_network import MemoryConnection, MemoryNetwork
from support.virtual_time import on_virtual_time

from primerl.protocol.version import ALPN_BLOBS

HERE, THERE, ELSEWHERE = (node_id(name) for name in ("here", "there", "elsewhere"))
SIZE = 2_500_000
"""A second of a line of 20 Mbit/s."""


def network() -> MemoryNetwork:
    """Homes with a round trip of 80 ms."""
    lines = AccessLines(lambda node: Line(20 * MBIT_S, 100 * MBIT_S, 0.020))
    network = MemoryNetwork(lines=lines)
    network.window = 1 << 20
    return network


async def connected(
    network: MemoryNetwork, target: bytes
) -> tuple[MemoryConnection, MemoryConnection]:
    far = network.transport(target)
    near = network.transport(HERE)
    connection = await near.connect(target, far.addresses(), ALPN_BLOBS, deadline=5.0)
    return connection, await far.accept()


async def carry(ends: tuple[MemoryConnection, MemoryConnection], size: int) -> float:
    """Return the seconds until the far end has read that many bytes."""
    near, far = ends
    began = time.monotonic()
    stream = await near.open_stream()
    writing = asyncio.create_task(stream.write(bytes(size)))
    await (await far.accept_stream()).read_exact(size)
    await writing
    return time.monotonic() - began


@on_virtual_time
async def test_a_long_line_is_filled_and_its_latency_is_paid_once() -> None:
    ends = await connected(network(), THERE)
    assert await carry(ends, SIZE) == pytest.approx(1.0 + 0.040, abs=0.005)


@on_virtual_time
async def test_two_streams_share_a_line_and_a_small_message_waits_for_one_packet_of_each() -> None:
    world = network()
    first, second = await connected(world, THERE), await connected(world, ELSEWHERE)
    both = asyncio.gather(carry(first, SIZE // 2), carry(second, SIZE // 2))
    await asyncio.sleep(0.1)
    assert await carry(first, 100) < 0.040 + 0.025
    assert await both == pytest.approx([1.04, 1.04], abs=0.02)


@on_virtual_time
async def test_what_comes_over_a_stalled_link_arrives_after_it_is_healed() -> None:
    world = network()
    ends = await connected(world, THERE)
    world.stall(HERE, THERE)
    asyncio.get_running_loop().call_later(3.0, world.heal, HERE, THERE)
    assert await carry(ends, 100) == pytest.approx(3.0, abs=0.01)
