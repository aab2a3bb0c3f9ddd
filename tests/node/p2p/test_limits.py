"""What strangers may spend: buckets, the memory of contents, and the gate that is made of both."""

from primerl.node.p2p import limits
from primerl.protocol.version import MAX_GOSSIP

ANNA, BERT = b"a" * 32, b"b" * 32


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    buckets = limits.TokenBuckets(rate=2, burst=3, limit=10)
    assert [buckets.take(ANNA, 0.0) for _ in range(5)] == [True] * 3 + [False] * 2
    assert [buckets.take(ANNA, 1.0) for _ in range(3)] == [True, True, False]
    assert [buckets.take(ANNA, 100.0) for _ in range(4)] == [True] * 3 + [False]


def test_one_id_does_not_spend_what_belongs_to_another() -> None:
    buckets = limits.TokenBuckets(rate=1, burst=1, limit=10)
    assert buckets.take(ANNA, 0.0)
    assert not buckets.take(ANNA, 0.0)
    assert buckets.take(BERT, 0.0)


def test_made_up_ids_do_not_grow_the_memory_and_push_out_the_idlest() -> None:
    buckets = limits.TokenBuckets(rate=0.001, burst=1, limit=2)
    assert buckets.take(ANNA, 0.0)
    assert buckets.take(BERT, 0.0)
    assert not buckets.take(ANNA, 0.0)
    assert buckets.take(b"c", 0.0)
    assert not buckets.take(ANNA, 0.0)
    assert buckets.take(BERT, 0.0)


def test_debt_is_paid_off_at_the_rate() -> None:
    buckets = limits.TokenBuckets(rate=10, burst=100, limit=10)
    assert buckets.debt(ANNA, 0.0, 100) == 0
    assert buckets.debt(ANNA, 0.0, 50) == 5
    assert buckets.debt(ANNA, 5.0, 0) == 0


def test_the_memory_of_contents_forgets_the_oldest_even_when_it_is_asked_for() -> None:
    recent = limits.RecentSet(2)
    recent.add(b"1")
    recent.add(b"2")
    assert b"1" in recent
    recent.add(b"3")
    assert b"1" not in recent
    assert b"2" in recent


def test_a_repeat_is_not_admitted_from_any_node() -> None:
    gate = limits.GossipFilter()
    assert gate.admits(ANNA, b"fact", 0.0)
    assert gate.accepts(ANNA, b"fact", 0.0)
    assert not gate.admits(BERT, b"fact", 0.0)
    assert gate.dropped["repeated"] == 1


def test_a_content_that_was_not_accepted_may_come_again_from_an_honest_side() -> None:
    gate = limits.GossipFilter()
    assert gate.admits(ANNA, b"fact", 0.0)  # and then its signature turns out to be false
    assert gate.admits(BERT, b"fact", 0.0)


def test_our_own_fact_is_no_news() -> None:
    gate = limits.GossipFilter()
    gate.knows(b"fact")
    assert not gate.admits(ANNA, b"fact", 0.0)


def test_a_fact_of_the_largest_size_passes_and_one_byte_more_does_not() -> None:
    gate = limits.GossipFilter()
    assert gate.admits(ANNA, bytes(MAX_GOSSIP), 0.0)
    assert not gate.admits(ANNA, bytes(MAX_GOSSIP + 1), 0.0)
    assert not gate.accepts(ANNA, bytes(MAX_GOSSIP + 1), 0.0)
    assert gate.dropped["too_large"] == 2


def test_a_neighbour_may_hand_over_its_burst_and_then_its_rate() -> None:
    gate = limits.GossipFilter()
    facts = [i.to_bytes(4, "big") for i in range(500)]
    assert sum(gate.admits(ANNA, fact, 0.0) for fact in facts) == limits.NEIGHBOUR_BURST
    assert sum(gate.admits(ANNA, fact, 1.0) for fact in facts) == limits.NEIGHBOUR_RATE
    assert gate.admits(BERT, facts[0], 1.0)


def test_one_flooding_signer_does_not_use_up_the_neighbour_that_relays_it() -> None:
    gate = limits.GossipFilter()
    flood = [i.to_bytes(4, "big") for i in range(int(limits.NEIGHBOUR_BURST) - 1)]
    taken = [gate.admits(BERT, fact, 0.0) and gate.accepts(ANNA, fact, 0.0) for fact in flood]
    assert sum(taken) == limits.ORIGIN_BURST
    assert gate.admits(BERT, b"honest", 0.0)
    assert gate.accepts(BERT, b"honest", 0.0)


def test_a_flood_of_signers_never_forgets_a_fact_faster_than_the_memory_allows() -> None:
    gate = limits.GossipFilter()
    gate.knows(b"fact")
    for i in range(limits.KNOWN_FACTS - 1):
        assert gate.accepts(i.to_bytes(32, "big"), i.to_bytes(4, "big"), 0.0)
    assert not gate.admits(ANNA, b"fact", 0.0)


def test_a_neighbour_is_read_no_faster_than_its_byte_rate() -> None:
    gate = limits.GossipFilter()
    assert gate.pause(ANNA, int(limits.BYTE_BURST), 0.0) == 0
    assert gate.pause(ANNA, int(limits.BYTE_RATE), 0.0) == 1.0
    assert gate.pause(BERT, 100, 0.0) == 0
