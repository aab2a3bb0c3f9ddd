"""One suite for every discovery: memory and whatever else discovery_factories.py names.

Gossip is best effort, so a fact is published again until it arrives or the deadline passes.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from conformance.discovery_factories import FACTORIES, Factory
from support.waiting import until

from primerl.node.p2p.discovery import Discovery, GossipFact
from primerl.protocol.errors import LocalProtocolError
from primerl.protocol.version import MAX_GOSSIP

DEADLINE_S = 60.0


@pytest.fixture(params=sorted(FACTORIES))
def factory(request: pytest.FixtureRequest) -> Factory:
    return FACTORIES[request.param]


async def link(discoveries: Sequence[Discovery]) -> None:
    """Start all of them, every one bootstrapped from the first, and wait for their neighbours."""
    first, *others = discoveries
    await first.start([])
    for other in others:
        await other.start(first.addresses())
    await until_linked(discoveries)


async def until_linked(discoveries: Sequence[Discovery]) -> None:
    await until(lambda: all(discovery.neighbours() for discovery in discoveries))


async def next_fact(facts: AsyncIterator[GossipFact]) -> GossipFact:
    async with asyncio.timeout(DEADLINE_S):
        return await anext(facts)


async def spread(
    source: Discovery, sealed: bytes, targets: Sequence[Discovery]
) -> list[GossipFact]:
    """Publish until every target has yielded one fact."""
    heard = [asyncio.ensure_future(next_fact(target.facts())) for target in targets]
    async with asyncio.timeout(DEADLINE_S):
        while not all(task.done() for task in heard):
            await source.publish(sealed)
            await asyncio.wait(heard, timeout=0.5)
    return [task.result() for task in heard]


async def test_a_published_fact_reaches_every_other_node(factory: Factory) -> None:
    async with factory(4) as nodes:
        await link(nodes)
        facts = await spread(nodes[0], b"policy 7", nodes[1:])
        assert [fact.sealed for fact in facts] == [b"policy 7"] * 3


async def test_a_fact_from_a_leaf_reaches_the_other_leaves(factory: Factory) -> None:
    async with factory(3) as nodes:
        await link(nodes)
        facts = await spread(nodes[1], b"revoked", [nodes[2]])
        assert facts[0].sealed == b"revoked"


async def test_the_source_of_a_fact_is_a_neighbour_and_never_the_receiver(factory: Factory) -> None:
    async with factory(2) as nodes:
        await link(nodes)
        (fact,) = await spread(nodes[0], b"fact", nodes[1:])
        assert len(fact.source) in (0, 32)
        (reply,) = await spread(nodes[1], b"answer", nodes[:1])
        assert not fact.source or fact.source != reply.source


async def test_the_same_fact_is_heard_once_however_often_it_is_published(factory: Factory) -> None:
    async with factory(3) as nodes:
        await link(nodes)
        await spread(nodes[0], b"first", nodes[1:])
        for _ in range(5):
            await nodes[0].publish(b"first")
        facts = await spread(nodes[0], b"second", nodes[1:])
        assert [fact.sealed for fact in facts] == [b"second"] * 2


async def test_a_node_does_not_hear_its_own_fact(factory: Factory) -> None:
    async with factory(2) as nodes:
        await link(nodes)
        await spread(nodes[0], b"mine", nodes[1:])
        (fact,) = await spread(nodes[1], b"theirs", nodes[:1])
        assert fact.sealed == b"theirs"


async def test_a_fact_of_the_largest_size_arrives_whole(factory: Factory) -> None:
    sealed = bytes(i % 251 for i in range(MAX_GOSSIP))
    async with factory(2) as nodes:
        await link(nodes)
        (fact,) = await spread(nodes[0], sealed, nodes[1:])
        assert fact.sealed == sealed


async def test_a_fact_that_is_too_large_is_our_own_mistake(factory: Factory) -> None:
    async with factory(1) as nodes:
        await nodes[0].start([])
        with pytest.raises(LocalProtocolError):
            await nodes[0].publish(bytes(MAX_GOSSIP + 1))


async def test_publishing_without_neighbours_is_no_error(factory: Factory) -> None:
    async with factory(1) as nodes:
        await nodes[0].start([])
        await nodes[0].publish(b"nobody listens")
        assert nodes[0].neighbours() == 0


async def test_a_started_node_has_addresses(factory: Factory) -> None:
    async with factory(1) as nodes:
        await nodes[0].start([])
        assert all(isinstance(address, str) and address for address in nodes[0].addresses())
        assert nodes[0].addresses()


async def test_dead_and_malformed_bootstrap_entries_do_not_stop_a_start(factory: Factory) -> None:
    async with factory(3) as nodes:
        gone, first, second = nodes
        await gone.start([])
        dead = gone.addresses()
        await gone.close()
        await first.start([])
        await second.start(["no address at all", *dead, *first.addresses()])
        await until_linked([first, second])


async def test_closing_ends_the_facts_and_may_be_done_twice(factory: Factory) -> None:
    async with factory(1) as nodes:
        await nodes[0].start([])
        ended = asyncio.ensure_future(drain(nodes[0]))
        await asyncio.sleep(0.01)
        async with asyncio.timeout(DEADLINE_S):
            await nodes[0].close()
            await nodes[0].close()
            assert await ended == []


async def drain(discovery: Discovery) -> list[GossipFact]:
    return [fact async for fact in discovery.facts()]


async def test_a_node_that_left_is_no_neighbour_any_more(factory: Factory) -> None:
    async with factory(2) as nodes:
        await link(nodes)
        await nodes[1].close()
        await until(lambda: nodes[0].neighbours() == 0)
