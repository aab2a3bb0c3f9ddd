"""The network half of a node: its ports are those of its last start."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.memory_network import MemoryDiscovery, MemoryNetwork

from primerl.crypto.keys import SecretKey
from primerl.node.app.factories import Factories
from primerl.node.app.services import drop_other_runs, open_services, open_store
from primerl.node.config.run import JoinConfig, NetworkConfig
from primerl.node.errors import BusyError
from primerl.node.p2p.discovery import Discovery
from primerl.node.p2p.transport import AddressInUse, Transport
from primerl.node.storage.ledger import Ledger

KEY = SecretKey.from_seed(b"k" * 32)


class Machine:
    """Gives libp2p ports out, the next one where any will do; some are taken by others."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.asked: list[int] = []
        self.taken: set[int] = set()
        self.next = 40_001

    async def transport(self, network: NetworkConfig, key: SecretKey, port: int) -> Transport:
        return self.network.transport(key.node_id)

    async def discovery(
        self, network: NetworkConfig, key: SecretKey, run: bytes, bootstrap: Sequence[str]
    ) -> Discovery | None:
        self.asked.append(network.port)
        if network.port in self.taken:
            raise AddressInUse(f"TCP port {network.port} is in use")
        port = network.port or self.next
        self.next += 1
        found = self.network.discovery(key.node_id)
        await found.start(bootstrap)
        return Bound(found, port)


class Bound(MemoryDiscovery):
    """A discovery that says on which TCP port it listens."""

    def __init__(self, found: MemoryDiscovery, port: int) -> None:
        self.__dict__.update(found.__dict__)
        self._port = port

    def addresses(self) -> tuple[str, ...]:
        return (f"/ip4/192.0.2.1/tcp/{self._port}/p2p/12D3KooW",)


async def started(machine: Machine, directory: Path, port: int = 0) -> tuple[str, ...]:
    """What a node that starts and stops in `directory` tells others of its libp2p."""
    config = JoinConfig(fsync=False, network=NetworkConfig(port=port))
    ledger = Ledger(directory / "ledger.db", fsync=False)
    try:
        async with open_services(
            config,
            KEY,
            ledger,
            open_store(config, directory),
            run_id=bytes(32),
            trainer=KEY.node_id,
            role="trainer",
            factories=Factories(transport=machine.transport, discovery=machine.discovery),
        ) as services:
            return services.discovery_addresses()
    finally:
        ledger.close()


async def test_libp2p_keeps_its_port_over_restarts_so_that_peers_find_it_again(
    tmp_path: Path,
) -> None:
    machine = Machine()
    first = await started(machine, tmp_path)
    assert await started(machine, tmp_path) == first
    assert machine.asked == [0, 40_001]


async def test_a_port_that_another_program_took_is_given_up_unless_it_was_asked_for(
    tmp_path: Path,
) -> None:
    machine = Machine()
    first = await started(machine, tmp_path)
    machine.taken = {40_001, 7000}
    second = await started(machine, tmp_path)
    assert second != first
    assert await started(machine, tmp_path) == second
    with pytest.raises(BusyError, match="7000 is in use"):
        await started(machine, tmp_path, port=7000)


def test_what_was_fetched_for_other_runs_goes_when_a_node_joins_another(tmp_path: Path) -> None:
    chunk = f"chunks/ab/cd/abcd{'0' * 60}"
    gone = (chunk, "model/config.json", "model/model-00001-of-00002.safetensors")
    kept = ("ledger.db", "ledger.lock", "model/notes.txt", "chunks/mine", "key.pem")
    now, before, foreign = (tmp_path / "runs" / name for name in ("1" * 16, "2" * 16, "mine"))
    elsewhere = tmp_path / "elsewhere"
    for directory in (now, before, foreign, elsewhere):
        for name in (*gone, *kept):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text("x")
    (tmp_path / "runs" / ("3" * 16)).symlink_to(elsewhere)
    drop_other_runs(now)
    for directory in (now, foreign, elsewhere):
        assert all((directory / name).exists() for name in (*gone, *kept))
    assert not any((before / name).exists() for name in gone)
    assert all((before / name).exists() for name in kept)
    assert not (before / "chunks" / "ab").exists()
