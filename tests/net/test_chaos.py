"""Faults on real nodes, each with the most that it may cost; docs/operating.md has what it did cost.

One trainer and two workers play all of these, one after the other; new ones do after a test that failed.
Needs root, iproute2 and /dev/net/tun.
"""

import random
import re
import signal
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from support.real_swarm import (
    DISK_MB,
    HOME,
    LOOK_S,
    NAMES,
    RECOVERY_S,
    TRAINER,
    WORKERS,
    Limit,
    RealSwarm,
    SmallMemory,
    clock_environment,
    fill_disk,
    resize_disk,
    slow_disk,
)

from primerl.scripts.bench.emulated_links import EmulatedStar, emulated_star
from primerl.scripts.bench.swarm_links import Link, Unavailable

LOW = 16
"""Numbers of files that stay open; numbers above them become free now and then."""

pytestmark = pytest.mark.timeout(1200)


class World:
    """The nodes that the tests of this file play on; made when they are needed, and again after a failure."""

    def __init__(self, directory: Path, network: EmulatedStar) -> None:
        self._directory, self._network = directory, network
        self._count = 0
        self._swarm: RealSwarm | None = None

    def swarm(self) -> RealSwarm:
        if self._swarm is None or not self._swarm.sound:
            self.close()
            self._count += 1
            place = self._directory / f"{self._count}"
            place.mkdir()
            self._swarm = RealSwarm(place, self._network)
            self._swarm.start()
        return self._swarm

    def close(self) -> None:
        if self._swarm is not None:
            self._swarm.close()
            self._network.heal()
            for index in range(len(NAMES)):
                self._network.set_link(index, HOME)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as stack:
        try:
            network = stack.enter_context(emulated_star([HOME] * len(NAMES)))
        except Unavailable as error:
            pytest.skip(f"no network of its own: {error}")
        world = World(tmp_path_factory.mktemp("n"), network)
        stack.callback(world.close)
        yield world


@pytest.fixture
def swarm(world: World) -> RealSwarm:
    return world.swarm()


# -- lines -----------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("30 % loss", replace(HOME, loss=0.3)),
        ("300 ms round trip", replace(HOME, delay_ms=75.0)),
        ("1 Mbit/s", replace(HOME, up=1.0, down=1.0)),
    ],
)
def test_a_bad_line_of_all_slows_the_run_and_does_not_stop_it(
    swarm: RealSwarm, name: str, line: Link
) -> None:
    with swarm.fault(name, Limit(0, 0, 10, 10)):
        for index in range(len(NAMES)):
            swarm.network.set_link(index, line)
        swarm.wait_work(*WORKERS)
        for index in range(len(NAMES)):
            swarm.network.set_link(index, HOME)


@pytest.mark.nightly
def test_a_partition_of_a_minute_stops_the_run_and_both_sides_say_why(swarm: RealSwarm) -> None:
    with swarm.fault("partition, 60 s", Limit(0, 60, 10, 15)):
        swarm.network.isolate(NAMES.index(TRAINER))
        time.sleep(45.0)
        for name in (TRAINER, *WORKERS):
            assert swarm.says(name), f"{name} does not say what it waits for"
        time.sleep(15.0)
        swarm.network.heal()


@pytest.mark.nightly
def test_a_worker_whose_packets_vanish_costs_the_others_nothing(swarm: RealSwarm) -> None:
    name = swarm.choose("worker")
    with swarm.fault("half-open, 20 s", Limit(0, 0, 5, 15), name):
        swarm.network.isolate(NAMES.index(name))
        time.sleep(20.0)
        swarm.network.heal()


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["to the trainer", "from the trainer"])
def test_a_worker_whose_packets_vanish_one_way_comes_back(swarm: RealSwarm, way: str) -> None:
    name = swarm.choose("worker")
    ends = (NAMES.index(name), NAMES.index(TRAINER))
    with swarm.fault(f"half-open {way}, 20 s", Limit(0, 0, 5, 15), name):
        swarm.network.cut(*(ends if way == "to the trainer" else reversed(ends)))
        time.sleep(20.0)
        swarm.network.heal()


@pytest.mark.nightly
def test_a_worker_that_changes_its_address_keeps_its_place(swarm: RealSwarm) -> None:
    name = swarm.choose("worker")
    with swarm.fault("change of address", Limit(0, 0, 5, 15), name):
        swarm.move(name)


# -- processes -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("role", ["worker", TRAINER])
def test_a_node_that_is_killed_alone_goes_on(swarm: RealSwarm, role: str) -> None:
    name = swarm.choose(role)
    limits = {TRAINER: Limit(1, 0, 15, 15), "worker": Limit(0, 0, 8, 20)}
    with swarm.fault(f"kill -9, {role}", limits[role], *hit_by(name)):
        time.sleep(random.random() * 2.0)
        swarm.kill_alone(name)


@pytest.mark.nightly
@pytest.mark.parametrize("role", ["worker", TRAINER])
def test_a_node_that_stands_still_for_a_minute_goes_on(swarm: RealSwarm, role: str) -> None:
    name = swarm.choose(role)
    limit = Limit(0, 60 * (name == TRAINER), 8, 15)
    with swarm.fault(f"SIGSTOP, 60 s, {role}", limit, *hit_by(name)):
        swarm.nodes[name].send(signal.SIGSTOP)
        time.sleep(60.0)
        swarm.nodes[name].send(signal.SIGCONT)


@pytest.mark.nightly
@pytest.mark.parametrize("role", ["worker", TRAINER])
def test_a_node_that_may_open_no_further_file_says_so_and_goes_on(
    swarm: RealSwarm, role: str
) -> None:
    name = swarm.choose(role)
    began = time.time()
    with swarm.fault(f"no more files, 20 s, {role}", Limit(1, 20, 15, 15), *hit_by(name)):
        with no_further_file(swarm.process(name)):
            time.sleep(20.0)
        swarm.wait_running(name)
    assert any("Too many open files" in line for line in swarm.words(name, began))


@contextmanager
def no_further_file(process: psutil.Process) -> Generator[None]:
    """Give a process no further file while the block lasts: its lowest free number is above the limit."""
    soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
    used = {int(path.name) for path in Path(f"/proc/{process.pid}/fd").iterdir()}
    lowest = min(set(range(len(used) + 1)) - used)
    process.rlimit(psutil.RLIMIT_NOFILE, (min(lowest, LOW), hard))
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):  # it may have ended for it
            process.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.nightly
@pytest.mark.parametrize("role", ["worker", TRAINER])
def test_a_node_that_gets_no_memory_says_so_and_goes_on(swarm: RealSwarm, role: str) -> None:
    name = swarm.choose(role)
    memory = SmallMemory(swarm.directory / name)
    swarm.restart(name, **memory.environment)
    swarm.wait_work(*hit_by(name))
    with swarm.fault(f"no memory, 20 s, {role}", Limit(1, 20, 15, 15), *hit_by(name)):
        with memory.limited(swarm.process(name)):
            swarm.wait(lambda: memory.refused > 0, RECOVERY_S, f"refusal of memory to {name}")
            time.sleep(20.0)
        print(memory.refused, "pieces of memory refused")
        swarm.wait_running(name)
    log = (swarm.directory / f"{name}.log").read_text()[swarm.begun[name] :]
    assert re.search("MemoryError|memory allocation of", log)


# -- disks and clocks ------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("role", ["worker", TRAINER])
def test_a_full_disk_costs_what_does_not_fit_and_is_named(swarm: RealSwarm, role: str) -> None:
    name = swarm.choose(role)
    place, began = swarm.directory / name, time.time()
    with swarm.fault(f"full disk, 30 s, {role}", Limit(1, 30, 15, 20), *hit_by(name)):
        end = time.monotonic() + 30.0
        while time.monotonic() < end:  # what its node removes makes no room
            fill_disk(place)
            time.sleep(LOOK_S)
        assert resize_disk(place, DISK_MB[name] * 1024)
        swarm.wait_running(name)
    log = (swarm.directory / f"{name}.log").read_text()
    assert "No space left" in log or any("space" in line for line in swarm.words(name, began))


@pytest.mark.nightly
@pytest.mark.parametrize("role", ["worker", TRAINER])
def test_a_slow_disk_slows_the_run_and_does_not_stop_it(swarm: RealSwarm, role: str) -> None:
    name = swarm.choose(role)
    with swarm.fault(f"slow disk, {role}", Limit(1, 0, 25, 25), *hit_by(name)):
        swarm.restart(name, **slow_disk(swarm.directory / name))
        swarm.wait_work(*WORKERS)
        swarm.restart(name)


@pytest.mark.nightly
@pytest.mark.parametrize("offset", ["+10m", "-1d"])
def test_a_worker_with_a_wrong_clock_says_so_and_the_others_go_on(
    swarm: RealSwarm, offset: str
) -> None:
    name = swarm.choose("worker")
    file = swarm.directory / name / "clock"
    file.write_text(offset)
    with swarm.fault(f"clock {offset}, worker", Limit(0, 0, 8, 25, False), name):
        swarm.restart(name, **clock_environment(file))
        swarm.wait_log(name, "clock")
        swarm.restart(name)


@pytest.mark.nightly
@pytest.mark.parametrize("offset", ["+10m", "+1d"])
def test_a_workers_clock_that_jumps_and_comes_back_costs_no_place(
    swarm: RealSwarm, offset: str
) -> None:
    name = swarm.choose("worker")
    file = swarm.directory / name / "clock"
    file.write_text("+0")
    with swarm.fault(f"clock jumps by {offset}, 20 s", Limit(0, 0, 8, 25), name):
        swarm.restart(name, **clock_environment(file))
        swarm.wait_work(name)
        file.write_text(offset)
        time.sleep(20.0)
        file.write_text("+0")
        swarm.wait_running(name)


@pytest.mark.nightly
@pytest.mark.parametrize("offset", ["-10m", "-1d"])
def test_a_trainer_with_a_clock_behind_what_it_signed_says_so(
    swarm: RealSwarm, offset: str
) -> None:
    file = swarm.directory / TRAINER / "clock"
    file.write_text(offset)
    with swarm.fault(f"clock {offset}, trainer", Limit(1, 0, 25, 15)):
        swarm.restart(TRAINER, **clock_environment(file))
        swarm.wait_log(TRAINER, "clock")
        swarm.restart(TRAINER)


# -- peers -----------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize(("attack", "keys"), [("drip", 2), ("idle", 48), ("requests", 8)])
def test_a_hostile_peer_does_not_stop_the_run(swarm: RealSwarm, attack: str, keys: int) -> None:
    with swarm.fault(f"{attack}, {keys} keys, 20 s", Limit(0, 0, 10, 10, False)):
        with swarm.attack(attack, keys) as attacker:
            try:
                time.sleep(20.0)
                swarm.wait_work(*WORKERS)
                assert attacker.poll() is None, "the attacker ended by itself"
            finally:
                attacker.kill()


def hit_by(name: str) -> tuple[str, ...]:
    """The workers that have to have work again after a fault of a node."""
    return WORKERS if name == TRAINER else (name,)
