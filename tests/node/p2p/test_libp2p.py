"""libp2p discovery between real sockets on loopback. Attacks: test_libp2p_attacks.py."""

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from support.libp2p_cases import DEADLINE_S, RUN, heard, key, multiaddr, port_of
from support.waiting import until

from primerl.node.app.factories import start_libp2p
from primerl.node.config.run import NetworkConfig
from primerl.node.p2p.discovery import GossipFact, node_id_of, peer_id_of
from primerl.node.p2p.libp2p import Libp2pDiscovery
from primerl.node.p2p.transport import AddressInUse, TransportError
from primerl.protocol.errors import LocalProtocolError
from primerl.protocol.version import MAX_GOSSIP

Make = Callable[..., Libp2pDiscovery]


@pytest_asyncio.fixture
async def make() -> AsyncIterator[Make]:
    """Builds discoveries, which are closed in the end; number i has the key of seed i."""
    made: list[Libp2pDiscovery] = []

    def build(
        i: int, *, run: bytes = RUN, host: str = "127.0.0.1", port: int = 0
    ) -> Libp2pDiscovery:
        made.append(Libp2pDiscovery(key(i), run_id=run, host=host, port=port))
        return made[-1]

    yield build
    await asyncio.gather(*(discovery.close() for discovery in made))


async def pair(make: Make) -> tuple[Libp2pDiscovery, Libp2pDiscovery]:
    first, second = make(1), make(2)
    await first.start([])
    await second.start(first.addresses())
    await until(lambda: first.neighbours() and second.neighbours())
    return first, second


async def test_where_the_library_is_missing_a_node_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "libp2p", None)  # as if it were not installed
    assert await start_libp2p(NetworkConfig(), key(1), RUN, []) is None
    assert "pip install --no-deps libp2p" in caplog.text


WITHOUT_OPTIONAL = """
import asyncio, sys
from importlib.machinery import PathFinder
from primerl.crypto.keys import SecretKey
from primerl.node.p2p.libp2p import OPTIONAL, Libp2pDiscovery, MissingModule

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in OPTIONAL
        return None if hidden else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding

async def main():
    discovery = Libp2pDiscovery(SecretKey.generate(), run_id=bytes(32), host="127.0.0.1", port=0)
    await discovery.start([])
    assert discovery.addresses()
    await discovery.close()

asyncio.run(main())
assert all(isinstance(sys.modules[name], MissingModule) for name in OPTIONAL), OPTIONAL
"""


def test_discovery_starts_without_the_libraries_for_other_kinds_of_keys() -> None:
    command = [sys.executable, "-c", WITHOUT_OPTIONAL]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr


def test_a_node_and_its_libp2p_peer_have_one_id() -> None:
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.peer.id import ID

    peer = ID.from_pubkey(create_new_key_pair(key(1).seed()).public_key).to_bytes()
    assert peer_id_of(key(1).node_id) == peer
    assert node_id_of(peer) == key(1).node_id


@pytest.mark.parametrize("foreign", [b"", bytes(32), bytes(38), peer_id_of(bytes(32)) + b"x"])
def test_an_id_of_another_kind_of_key_is_no_node_id(foreign: bytes) -> None:
    with pytest.raises(ValueError, match="Ed25519"):
        node_id_of(foreign)


async def test_two_nodes_tell_each_other_facts_and_know_the_sender(make: Make) -> None:
    first, second = await pair(make)
    await first.publish(b"ping")
    assert await heard(second) == GossipFact(b"ping", key(1).node_id)
    await second.publish(b"pong")
    assert await heard(first) == GossipFact(b"pong", key(2).node_id)


async def test_leaves_of_one_hub_find_each_other_and_outlive_it(make: Make) -> None:
    hub, left, right = make(1), make(2), make(3)
    await hub.start([])
    await left.start(hub.addresses())
    await right.start(hub.addresses())
    await until(lambda: left.neighbours() == right.neighbours() == 2)
    await hub.close()
    await left.publish(b"still here")
    assert (await heard(right)).sealed == b"still here"


async def test_a_bootstrap_peer_that_comes_up_late_is_found(make: Make) -> None:
    port = free_port()
    early, late = make(1), make(2, port=port)
    await early.start([multiaddr(port, 2)])
    await late.start([])
    await until(lambda: early.neighbours() and late.neighbours())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_a_lost_neighbour_is_dialled_again_when_it_is_back(make: Make) -> None:
    first, second = await pair(make)
    await first.close()
    await until(lambda: not second.neighbours())
    again = make(1, port=port_of(first))
    await again.start([])
    await until(lambda: again.neighbours() and second.neighbours())
    await again.publish(b"back")
    assert (await heard(second)).sealed == b"back"


async def test_nodes_of_different_runs_are_no_neighbours(make: Make) -> None:
    first, second = await pair(make)
    other = make(3, run=b"o" * 32)
    await other.start(first.addresses())
    await asyncio.sleep(0.5)
    await other.publish(b"from another run")
    await first.publish(b"from ours")
    assert (await heard(second)).sealed == b"from ours"
    assert other.neighbours() == 0


async def test_closing_leaves_no_thread_behind(make: Make) -> None:
    before = set(threading.enumerate())
    first, second = await pair(make)
    assert set(threading.enumerate()) > before
    await first.close()
    await second.close()
    assert set(threading.enumerate()) <= before


async def test_closing_a_node_that_was_never_started_is_fine(make: Make) -> None:
    node = make(1)
    await node.close()
    await node.publish(b"nobody is there")
    assert [fact async for fact in node.facts()] == []


async def test_a_busy_port_is_named_even_if_its_owner_would_share_it(make: Make) -> None:
    owner = make(1)
    await owner.start([])
    taken = port_of(owner)
    with pytest.raises(AddressInUse, match=f"TCP 127.0.0.1:{taken} is taken by another program"):
        await make(2, port=taken).start([])


@pytest.mark.parametrize("host", ["192.0.2.77", "localhost"])
async def test_an_address_that_is_not_ours_is_refused(make: Make, host: str) -> None:
    with pytest.raises(TransportError, match=r"address of this machine|no IP address"):
        await make(1, host=host).start([])


async def test_an_oversized_fact_is_not_sent(make: Make) -> None:
    first, _ = await pair(make)
    with pytest.raises(LocalProtocolError, match=str(MAX_GOSSIP)):
        await first.publish(bytes(MAX_GOSSIP + 1))
