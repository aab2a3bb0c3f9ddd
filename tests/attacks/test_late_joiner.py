"""A late joiner has a version in twice the time that honest neighbours alone need, whatever half of them do."""

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from functools import cache

import pytest
from support import lying_holders, virtual_time
from support.access_lines import uplinks
from support.exchange_world import KIB, ExchangeNetwork, copies_sent, node_id
from support.exchange_world import references as refs
from support.memory_network import MemoryNetwork
from support.memory_store import MemoryStore

CHUNK = 64 * KIB
PAYLOADS = [[bytes([first + at]) * CHUNK for at in range(60)] for first in (1, 101)]
UPLINK = 2 * 125_000.0
"""Bytes per second of each honest node, the origin included."""
HONEST, LIARS = 20, 20
CHANCES = 8
STORE = MemoryStore(max_bytes=1 << 30)
for _chunk in itertools.chain(*PAYLOADS):
    STORE.put(_chunk)
PLOYS: dict[str, lying_holders.Ploy] = {
    "in line": lying_holders.keep_in_line,
    "silent": lying_holders.stay_silent,
    "busy": lying_holders.be_busy,
    "busy after a line": lying_holders.busy_after(0.5),
    "a trickle": lying_holders.trickle(CHUNK, 1.0),
    "in turn": lying_holders.in_turn(
        lying_holders.keep_in_line,
        lying_holders.be_busy,
        lying_holders.stay_silent,
        lying_holders.busy_after(1.0),
    ),
    "late": lying_holders.late(STORE, 1.0),
}


async def join(
    ploys: Sequence[lying_holders.Ploy], chance: int, *, uplink: float = UPLINK, fetches: int = 1
) -> tuple[list[float], float]:
    """Return a joiner's seconds for each fetch, and the copies that they cost the origin, beside liars with
    these ploys."""
    names = [f"w{number}" for number in range(HONEST)]
    rates = dict.fromkeys([node_id(name) for name in ("origin", *names)], uplink)
    payloads = PAYLOADS[:fetches]
    async with ExchangeNetwork(MemoryNetwork(lines=uplinks(rates))) as world:
        origin, joiner = world.add("origin"), world.add("joiner")
        honest = [world.add(name) for name in names]
        for holder, chunks in itertools.product((origin, *honest), payloads):
            holder.hold(chunks)
        liars = [
            world.add(f"l{number}", handler=lying_holders.claiming(ploys[number % len(ploys)]))
            for number in range(LIARS if ploys else 0)
        ]
        line = [*honest, *liars]
        random.Random(chance).shuffle(line)
        joiner.fetcher.chance.seed(chance)
        seconds: list[float] = []
        for chunks in payloads:
            began = time.monotonic()
            async with asyncio.timeout(600.0):
                await joiner.fetch(refs(chunks), line, origin)
            assert joiner.holds(refs(chunks))
            seconds.append(time.monotonic() - began)
        return seconds, sum(copies_sent(origin, refs(chunks)) for chunks in payloads)


@cache
def undisturbed(uplink: float = UPLINK, fetches: int = 1) -> tuple[float, ...]:
    """Return a joiner's seconds for each fetch without liars."""
    return tuple(virtual_time.run(join([], 0, uplink=uplink, fetches=fetches))[0])


def test_twenty_of_forty_neighbours_that_do_their_worst_do_not_double_the_time_of_a_fetch() -> None:
    """Before, they kept places of the eight that take part: twice the time mostly, up to four times."""
    (alone,) = undisturbed()
    for chance in range(CHANCES):
        [beside], copies = virtual_time.run(join(list(PLOYS.values()), chance))
        assert beside < 1.5 * alone, chance
        assert copies < 0.5, "the others are enough"


@pytest.mark.parametrize("name", PLOYS)
def test_no_ploy_is_worse_than_all_of_them(name: str) -> None:
    """Trickling was: a source that sends anything kept its place for half a second, and sixteen of them (draw
    49) all downloads that may be under way at once."""
    (alone,) = undisturbed()
    for chance in (0, 49):
        [beside], _ = virtual_time.run(join([PLOYS[name]], chance))
        assert beside < 1.5 * alone, chance


@pytest.mark.parametrize(
    "name",
    ["in line", *(pytest.param(one, marks=pytest.mark.slow) for one in ("a trickle", "in turn"))],
)
def test_a_fetch_of_a_fifth_of_a_second_is_held_up_for_less_than_another_fifth(name: str) -> None:
    """From the second one on; the first of a newcomer loses up to three tenths."""
    first, later = undisturbed(uplink=10 * UPLINK, fetches=2)
    for chance in range(3):
        beside, _ = virtual_time.run(join([PLOYS[name]], chance, uplink=10 * UPLINK, fetches=2))
        assert beside[0] < first + 0.3, chance
        assert beside[1] < 2 * later, chance
