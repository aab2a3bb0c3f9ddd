"""Plans from offers: nodes, layers, order and cache size."""

import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from primerl.node.memory_plan.planner import (
    Costs,
    Offered,
    PlanLimits,
    fits,
    holds,
    make_plan,
    replace,
    ring_ms,
    share_layers,
)
from primerl.protocol.pipelines import PipelinePlan, StageOffer, check_plan

GROUP = bytes(32)
COSTS = Costs(layers=12, layer=1000, first=500, last=700, layer_token=1)
TERMS = PlanLimits("bfloat16", hidden_size=64, max_model_len=128, max_sequences=8)


def node(number: int) -> bytes:
    return bytes([number]) * 32


def offer(memory: int, **more: Any) -> StageOffer:
    return StageOffer(memory_bytes=memory, engine="vllm", software="vllm 1", **more)


def offers(*memories: int, **more: Any) -> list[Offered]:
    return [Offered(node(number), offer(memory, **more)) for number, memory in enumerate(memories)]


def plan(some: list[Offered], costs: Costs = COSTS, **more: Any) -> PipelinePlan | None:
    found = make_plan(some, costs, TERMS, group=GROUP, generation=0, **more)
    if found is not None:
        check_plan(found)
    return found


def needed(found: PipelinePlan, rank: int, costs: Costs = COSTS) -> int:
    """Compute the bytes of a stage from the plan alone."""
    stage, last = found.stages[rank], rank == len(found.stages) - 1
    tables = costs.first * (rank == 0) + costs.last * last
    tokens = found.shape.kv_tokens
    count = stage.end - stage.first
    return tables + count * (costs.layer + tokens * costs.layer_token)


def order_of(found: PipelinePlan) -> list[int]:
    return [stage.node[0] for stage in found.stages]


def test_as_few_stages_as_hold_the_model_with_room_for_sequences() -> None:
    """12 layers of 1000 and 1200 besides, and 12 x 1040 of cache for eight sequences and a block: 25,680."""
    found = plan(offers(14_000, 14_000, 14_000, 14_000))
    assert found is not None
    assert len(found.stages) == 2
    assert found.shape.kv_tokens == 1040
    assert len(found.spares) == 2
    found = plan(offers(8_700, 8_700, 8_700, 8_700))
    assert found is not None
    assert len(found.stages) == 4  # three have 26,100, but not in whole layers beside the tables


def test_with_too_little_for_eight_sequences_there_is_room_for_fewer() -> None:
    found = plan(offers(9_000, 9_000))
    assert found is not None
    assert 128 <= found.shape.kv_tokens < 1024


def test_without_room_for_one_sequence_there_is_no_plan() -> None:
    assert plan(offers(6_500, 6_500)) is None
    assert plan(offers(6_500, 6_500, 5_500)) is not None


def test_one_machine_is_no_pipeline_however_large() -> None:
    assert plan(offers(10**9)) is None
    assert plan([]) is None


def test_a_model_is_not_cut_into_more_stages_than_it_has_layers() -> None:
    two = Costs(layers=2, layer=1000, first=0, last=0, layer_token=1)
    found = plan(offers(*[2_500] * 4), two)
    assert found is not None
    assert len(found.stages) == 2
    assert plan(offers(*[1_000] * 4), two) is None


def test_layers_are_even_where_memory_allows_and_the_head_counts_as_work() -> None:
    assert share_layers([12, 12], Costs(12, 1000, 0, 0, 1)) == [6, 6]
    assert share_layers([12, 12], Costs(12, 1000, 0, 2000, 1)) == [7, 5]
    assert share_layers([12, 3], Costs(12, 1000, 0, 0, 1)) == [9, 3]
    assert share_layers([4, 4, 4], Costs(12, 1000, 0, 9000, 1)) == [4, 4, 4]
    assert share_layers([9, 9, 9], Costs(10, 1000, 0, 0, 1)) == [4, 3, 3]


def test_the_shortest_ring_is_chosen_and_a_far_node_is_a_spare() -> None:
    near = {node(0): 5.0, node(1): 5.0, node(2): 5.0}
    some = offers(14_000, 14_000, 14_000)
    far = Offered(node(9), offer(20_000, round_trips=dict.fromkeys(near, 300.0)))
    some = [Offered(one.node, offer(14_000, round_trips=near)) for one in some] + [far]
    found = plan(some)
    assert found is not None
    assert 9 not in order_of(found)
    assert node(9) in found.spares
    assert found.spares[-1] == node(9)


def test_no_node_is_placed_nearer_to_others_than_they_measure() -> None:
    liar = Offered(node(9), offer(14_000, round_trips={node(0): 0.0, node(1): 0.0}))
    honest = [
        Offered(node(0), offer(14_000, round_trips={node(1): 20.0, node(9): 200.0})),
        Offered(node(1), offer(14_000, round_trips={node(0): 20.0, node(9): 200.0})),
    ]
    found = plan([liar, *honest])
    assert found is not None
    assert 9 not in order_of(found)
    assert ring_ms([liar, honest[0]], 0) == 200.0


def test_a_node_that_cannot_be_measured_is_taken_last() -> None:
    """Nodes 0 and 1 may not reach each other; node 2 is far, but reachable."""
    some = [
        Offered(node(0), offer(14_000, round_trips={node(2): 300.0})),
        Offered(node(1), offer(14_000)),
        Offered(node(2), offer(14_000, round_trips={node(0): 300.0})),
    ]
    found = plan(some)
    assert found is not None
    assert sorted(order_of(found)) == [0, 2]


def test_a_slow_line_is_put_where_only_tokens_travel() -> None:
    """States go from each to the next, tokens from the last to the first."""
    slow = {(0, 1), (1, 0)}
    ways = {one: {node(other): 10.0 for other in range(3) if other != one} for one in range(3)}
    some = [
        Offered(
            node(one),
            offer(
                10_000,
                world_size=3,
                round_trips=ways[one],
                bandwidths={
                    node(other): 1e3 if (one, other) in slow else 1e9
                    for other in range(3)
                    if other != one
                },
            ),
        )
        for one in range(3)
    ]
    found = plan(some)
    assert found is not None
    assert order_of(found)[1] == 2


def test_ranks_that_operators_set_are_kept_even_if_they_are_not_the_best() -> None:
    some = [
        Offered(node(0), offer(14_000, rank=1, world_size=2)),
        Offered(node(1), offer(99_000)),
        Offered(node(2), offer(99_000)),
    ]
    free = plan(some)
    assert free is not None
    assert 0 not in order_of(free)  # its stage 0 is not there yet
    found = plan([*some, Offered(node(3), offer(14_000, rank=0, world_size=2))])
    assert found is not None
    assert order_of(found) == [3, 0]


def test_a_wanted_number_of_stages_is_kept_to() -> None:
    found = plan(offers(99_000, 99_000, 99_000, world_size=3))
    assert found is not None
    assert len(found.stages) == 3
    assert plan(offers(99_000, 99_000, world_size=3)) is None


def test_ranks_that_do_not_hold_the_model_make_no_plan() -> None:
    some = [Offered(node(rank), offer(2_000, rank=rank, world_size=2)) for rank in range(2)]
    assert plan(some) is None


def test_the_stage_0_that_a_group_had_stays() -> None:
    some = offers(14_000, 14_000, 14_000)
    for number in range(3):
        found = plan(some, head=node(number))
        assert found is not None
        assert order_of(found)[0] == number
    assert plan(some, head=node(7)) is None


def test_a_spare_takes_the_place_of_a_lost_stage_and_nobody_else_moves() -> None:
    found = plan(offers(14_000, 14_000, 14_000))
    assert found is not None
    lost = found.stages[1].node
    spare = next(one for one in offers(14_000, 14_000, 14_000) if one.node == found.spares[0])
    small = Offered(node(8), offer(100))
    after = replace(found, [lost], [small, spare], COSTS)
    assert after is not None
    check_plan(after)
    assert (after.group, after.generation, after.shape) == (GROUP, 1, found.shape)
    assert after.stages[0] == found.stages[0]
    assert after.stages[1].node == spare.node
    assert after.stages[1].first == found.stages[1].first
    assert after.spares == (small.node,)


def test_what_does_not_fit_replaces_nobody() -> None:
    found = plan(offers(14_000, 14_000))
    assert found is not None
    lost = found.stages[1].node
    other = StageOffer(99_000, "vllm", "vllm 2")
    bad = [
        Offered(node(5), offer(100)),
        Offered(node(6), other),
        Offered(node(7), offer(99_000, rank=0, world_size=2)),
        Offered(node(8), offer(99_000, world_size=3)),
        Offered(found.stages[0].node, offer(99_000)),
        Offered(lost, offer(99_000)),
    ]
    assert replace(found, [lost], bad, COSTS) is None
    assert fits(found, 1, offer(99_000, rank=1, world_size=2), COSTS)


def test_states_are_shrunk_only_where_all_want_it() -> None:
    both = plan(offers(14_000, 14_000, encoding="fp8"))
    one = plan([*offers(14_000, encoding="fp8"), Offered(node(5), offer(14_000))])
    assert both is not None
    assert one is not None
    assert (both.shape.encoding, one.shape.encoding) == ("fp8", "raw")


def test_more_micro_batches_are_allowed_where_the_way_is_long() -> None:
    def far(ms: float) -> int:
        ways = {node(0): ms, node(1): ms}
        some = [Offered(node(one), offer(14_000, round_trips=ways)) for one in range(2)]
        terms = PlanLimits("bfloat16", 64, 128, max_sequences=256)
        found = make_plan(some, COSTS, terms, group=GROUP, generation=0)
        assert found is not None
        return found.shape.micro_batches

    assert [far(0.0), far(20.0), far(100.0), far(9_000.0)] == [2, 4, 12, 32]


def test_micro_batches_are_limited_so_that_every_step_may_have_a_recorded_graph() -> None:
    ways = {node(0): 0.0, node(1): 0.0}
    some = [Offered(node(one), offer(2_000_000, round_trips=ways)) for one in range(2)]
    terms = PlanLimits("bfloat16", 64, 128, max_sequences=2_000)
    found = make_plan(some, COSTS, terms, group=GROUP, generation=0)
    assert found is not None
    assert found.shape.max_sequences == 2_000
    assert found.shape.micro_batches == 4


def test_claims_without_measure_break_nothing() -> None:
    wild = {node(0): 1e-320, node(1): 1e300}
    some = [Offered(node(one), offer(2**50, bandwidths=wild)) for one in range(2)]
    found = plan(some)
    assert found is not None
    assert found.shape.kv_tokens == 8 * 128 + 16


def test_many_machines_are_planned_by_their_distances() -> None:
    """Twelve around a lake: neighbours have 10 ms, everybody else more. The ring follows the shore."""
    count = 12

    def apart(one: int, other: int) -> float:
        steps = abs(one - other)
        return 10.0 * min(steps, count - steps)

    some = [
        Offered(
            node(one),
            offer(2_700, round_trips={node(k): apart(one, k) for k in range(count) if k != one}),
        )
        for one in range(count)
    ]
    some = some[::2] + some[1::2]
    costs = Costs(layers=12, layer=2000, first=0, last=0, layer_token=1)
    found = plan(some, costs)
    assert found is not None
    assert len(found.stages) == count
    order = order_of(found)
    steps = [apart(a, b) for a, b in zip(order, [*order[1:], order[0]], strict=True)]
    assert sum(steps) == 10.0 * count


memories = st.lists(st.integers(0, 30_000), min_size=0, max_size=5)


@settings(max_examples=40, deadline=None)
@given(memories, st.integers(1, 12), st.integers(0, 5_000), st.integers(0, 5_000), st.data())
def test_a_plan_fits_and_is_made_whenever_there_is_one(
    sizes: list[int], layers: int, first: int, last: int, data: st.DataObject
) -> None:
    """Compare with an exhaustive search over all orders and splits."""
    costs = Costs(layers=layers, layer=900, first=first, last=last, layer_token=2)
    ways = [
        {node(k): data.draw(st.integers(0, 300)) * 1.0 for k in range(len(sizes)) if k != one}
        for one in range(len(sizes))
    ]
    some = [
        Offered(node(one), offer(size, round_trips=ways[one])) for one, size in enumerate(sizes)
    ]
    found = plan(some, costs)
    possible = [
        order
        for count in range(2, len(some) + 1)
        for order in itertools.permutations(some, count)
        if any_cut(order, costs, 128 + 128)
    ]
    assert (found is not None) == bool(possible)
    if found is None:
        return
    for rank, stage in enumerate(found.stages):
        assert needed(found, rank, costs) <= sizes[stage.node[0]]
    assert found.layers == layers
    assert found.shape.kv_tokens % found.shape.block_size == 0
    assert found.shape.kv_tokens >= TERMS.max_model_len + found.shape.block_size
    for sequences in (8, 4, 2, 1):
        roomy = [order for order in possible if holds(order, costs, 128 * sequences + 128)]
        if roomy:
            fewest = min(map(len, roomy))
            assert len(found.stages) == fewest
            chosen = [some[number] for number in order_of(found)]
            best = min(ring_ms(order, 0) for order in roomy if len(order) == fewest)
            assert ring_ms(chosen, 0) == best
            return


def any_cut(order: tuple[Offered, ...], costs: Costs, tokens: int) -> bool:
    """Return whether any split of the layers fits, by exhaustive search."""
    for cuts in itertools.combinations(range(1, costs.layers), len(order) - 1):
        ends = [*cuts, costs.layers]
        counts = [end - start for start, end in zip([0, *cuts], ends, strict=True)]
        sizes = [
            costs.first * (rank == 0)
            + costs.last * (rank == len(order) - 1)
            + count * (costs.layer + tokens * costs.layer_token)
            for rank, count in enumerate(counts)
        ]
        if all(size <= one.offer.memory_bytes for size, one in zip(sizes, order, strict=True)):
            return True
    return False
