"""Plan a pipeline: choose nodes, order and layers from their offers and the model's memory.

Pure arithmetic. The planner takes the fewest stages that hold the model with room for sequences, the order with
the shortest round trip, and the most even split of layers. Offers are untrusted: of two reports about one path
the worse counts, and a node that claims too much memory is replaced when its stage fails.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from msgspec import structs

from ...protocol.pipelines import (
    MAX_SPARES,
    MAX_STAGES,
    MAX_STEP,
    Encoding,
    PipelinePlan,
    PipelineShape,
    Stage,
    StageOffer,
)

ROOM = (8, 4, 2, 1)
"""Sequences of full length that the cache should hold, in order of preference."""
MAX_ORDERS = 5040
"""Most orders of stages that are compared exhaustively; beyond that a nearest-neighbour search is used."""
STARTS = 4
"""Number of first stages that the nearest-neighbour search tries."""
STEP_TOKENS = 2048
BLOCK = {"cuda": 16, "cpu": 128}
STEP_BYTES = 8
"""Bytes per element of a step's states, for the limit in protocol/pipelines.py: two float32."""
ROWS = 16
"""Rows of the step for which orders are compared."""
UNKNOWN_MS = 2000.0
"""Round trip assumed for a pair without a measurement: the two may not reach each other."""
ASSUMED_MS = 100.0
"""Round trip assumed for a whole ring without measurements, whose members operators fixed."""
SLOWEST_MS = 60_000.0
"""Upper bound of a hop's transfer time, whatever bandwidth is claimed."""
STEP_MS = 10.0
"""Shortest expected step; with the ring's round trip it bounds the micro-batches in flight."""
MOST_IN_FLIGHT, GRAPH_ROWS = 32, 512
"""Most micro-batches of a plan; most sequences of one for which vLLM captures CUDA graphs by default."""


@dataclass(frozen=True)
class Costs:
    """Memory of one model's stages, in bytes."""

    layers: int
    """Number of layers of the model."""
    layer: int
    """Weights of one layer."""
    first: int
    """Additional weights of the first stage: the embedding."""
    last: int
    """Additional weights of the last stage: norm and head."""
    layer_token: int
    """Keys and values of one token in one layer."""

    def capacity(self, memory: int, tokens: int, *, first: bool, last: bool) -> int:
        """Return the most layers that fit into `memory` with a cache of `tokens`; below 1 if none."""
        left = memory - self.first * first - self.last * last
        return left // (self.layer + tokens * self.layer_token)


@dataclass(frozen=True)
class PlanLimits:
    """Settings that a run fixes for every plan."""

    dtype: Literal["float32", "bfloat16"]
    hidden_size: int
    max_model_len: int
    max_sequences: int
    fingerprint: Literal["", "projection"] = ""


class Offered(NamedTuple):
    """A node and its offer."""

    node: bytes
    offer: StageOffer

    @property
    def kind(self) -> tuple[str, str, str]:
        """Engine, its release, and the operators' pipeline name.

        Only nodes with equal kinds share a pipeline.
        """
        return self.offer.engine, self.offer.software, self.offer.name


def make_plan(
    offers: Sequence[Offered],
    costs: Costs,
    terms: PlanLimits,
    *,
    group: bytes,
    generation: int,
    head: bytes | None = None,
) -> PipelinePlan | None:
    """Make a plan from `offers` of one kind; None if together they cannot hold the model.

    `head`, if given, must be stage 0. Nodes that are not needed become spares, nearest first.
    """
    for sequences in ROOM:
        if sequences > terms.max_sequences:
            continue
        tokens = _tokens(sequences, terms, BLOCK["cpu"])
        order = _explicit(offers, costs, tokens, head) or _free(offers, costs, terms, tokens, head)
        if order is not None:
            return _plan_of(order, offers, costs, terms, group, generation)
    return None


def replace(
    plan: PipelinePlan, lost: Iterable[bytes], spares: Sequence[Offered], costs: Costs
) -> PipelinePlan | None:
    """Make the next generation of `plan`, each lost node replaced by a spare.

    None if a stage has no spare. Layers and shape do not change, so the remaining stages keep their weights.
    Takes the first spare that fits.
    """
    gone, stages = set(lost), list(plan.stages)
    left = [
        spare for spare in spares if spare.node not in gone and plan.rank_of(spare.node) is None
    ]
    for rank, stage in enumerate(stages):
        if stage.node not in gone:
            continue
        spare = next((spare for spare in left if fits(plan, rank, spare.offer, costs)), None)
        if spare is None:
            return None
        left.remove(spare)
        stages[rank] = Stage(spare.node, stage.first, stage.end)
    return structs.replace(
        plan,
        generation=plan.generation + 1,
        stages=tuple(stages),
        spares=tuple(spare.node for spare in left[:MAX_SPARES]),
    )


def fits(plan: PipelinePlan, rank: int, offer: StageOffer, costs: Costs) -> bool:
    """Return whether a node with this offer can be stage `rank` of `plan`."""
    shape, stage, count = plan.shape, plan.stages[rank], len(plan.stages)
    if (offer.engine, offer.software) != (shape.engine, shape.software):
        return False
    if offer.rank not in (-1, rank) or offer.world_size not in (0, count):
        return False
    most = costs.capacity(
        offer.memory_bytes, shape.kv_tokens, first=rank == 0, last=rank == count - 1
    )
    return most >= stage.end - stage.first


def ring_ms(order: Sequence[Offered], step_bytes: int) -> float:
    """Estimate the network time of a step of `step_bytes` around the ring, ms."""
    total = 0.0
    for rank, (peer, after) in enumerate(_hops(order)):
        total += _round_trip(peer, after) / 2
        bandwidth = _bandwidth(peer, after)
        if rank < len(order) - 1 and bandwidth:
            total += min(SLOWEST_MS, 1000 * step_bytes / bandwidth)
    return total


def is_measured(order: Sequence[Offered]) -> bool:
    """Return whether every hop of the ring was measured by one of its ends."""
    hops = _hops(order)
    return all(a.node in b.offer.round_trips or b.node in a.offer.round_trips for a, b in hops)


def _hops(order: Sequence[Offered]) -> list[tuple[Offered, Offered]]:
    return list(zip(order, [*order[1:], *order[:1]], strict=True))


def _round_trip(peer: Offered, other: Offered) -> float:
    """Return the longer of both ends' reports, ms, so that no node can claim to be nearer."""
    known = peer.offer.round_trips.get(other.node), other.offer.round_trips.get(peer.node)
    return max((value for value in known if value is not None), default=UNKNOWN_MS)


def _bandwidth(peer: Offered, other: Offered) -> float:
    """Return the smaller of both ends' reports, bytes/s; 0 if neither measured."""
    known = peer.offer.bandwidths.get(other.node), other.offer.bandwidths.get(peer.node)
    return min((value for value in known if value), default=0.0)


# -- order of the stages ---------------------------------------------------------------------------


def _explicit(
    offers: Sequence[Offered], costs: Costs, tokens: int, head: bytes | None
) -> list[Offered] | None:
    """Return the order of nodes whose operators set their rank, if every rank is taken."""
    for count in sorted({peer.offer.world_size for peer in offers if peer.offer.rank >= 0}):
        ranked = [
            peer for peer in offers if peer.offer.rank >= 0 and peer.offer.world_size == count
        ]
        places = [[peer for peer in ranked if peer.offer.rank == rank] for rank in range(count)]
        if head is not None and count:
            places[0] = [peer for peer in places[0] if peer.node == head]
        order = [max(some, key=_memory) for some in places if some]
        if len(order) == count >= 2 and holds(order, costs, tokens):
            return order
    return None


def _free(
    offers: Sequence[Offered], costs: Costs, terms: PlanLimits, tokens: int, head: bytes | None
) -> list[Offered] | None:
    """Return the best order of the fewest unranked nodes that hold the model."""
    free = [peer for peer in offers if peer.offer.rank < 0]
    for count in range(2, min(len(free), MAX_STAGES, costs.layers) + 1):
        able = [peer for peer in free if peer.offer.world_size in (0, count)]
        able.sort(key=_memory, reverse=True)
        if len(able) < count or _too_little(able[:count], costs, tokens):
            continue
        order = _best(able, count, costs, terms, tokens, head)
        if order is not None:
            return order
    return None


def _best(
    able: list[Offered],
    count: int,
    costs: Costs,
    terms: PlanLimits,
    tokens: int,
    head: bytes | None,
) -> list[Offered] | None:
    """Return the shortest ring of `count` nodes with room for `tokens`.

    `able` is sorted by memory, descending.
    """
    if head is not None:
        able = sorted(able, key=lambda peer: peer.node != head)
        if able[0].node != head:
            return None
    size = ROWS * terms.hidden_size * (4 if terms.dtype == "float32" else 2)
    rings = _orders(able, count, head, lambda order: holds(order, costs, tokens))
    return min(rings, key=lambda order: ring_ms(order, size), default=None)


def _orders(
    able: list[Offered],
    count: int,
    head: bytes | None,
    holds: Callable[[Sequence[Offered]], bool],
) -> Iterator[list[Offered]]:
    """Yield orders of `count` nodes that hold the model: all up to MAX_ORDERS, else good ones.

    Whether an order holds the model depends on its two ends and on the set of nodes between, not on their
    order.
    """
    if math.perm(count, count) > MAX_ORDERS:
        starts = able[:STARTS] if head is None else able[:1]
        near = (
            _nearest(start, [peer for peer in able[:count] if peer is not start])
            for start in starts
        )
        yield from (order for order in near if holds(order))
        return
    most = count
    while most < len(able) and math.perm(most + 1, count) <= MAX_ORDERS:
        most += 1
    for chosen in itertools.combinations(able[:most], count):
        for first, last in itertools.permutations(chosen, 2):
            between = [peer for peer in chosen if peer is not first and peer is not last]
            if head in (None, first.node) and holds([first, *between, last]):
                for middle in itertools.permutations(between):
                    yield [first, *middle, last]


def _nearest(start: Offered, others: list[Offered]) -> list[Offered]:
    """Order nodes by nearest neighbour from `start`, then improve the ring by 2-opt."""
    order, left = [start], list(others)
    while left:
        near = min(left, key=lambda peer: _round_trip(order[-1], peer))
        left.remove(near)
        order.append(near)
    for _ in range(len(order)):
        before = ring_ms(order, 0)
        for first, last in itertools.combinations(range(1, len(order)), 2):
            turned = order[:first] + order[first : last + 1][::-1] + order[last + 1 :]
            if ring_ms(turned, 0) < ring_ms(order, 0):
                order = turned
        if ring_ms(order, 0) >= before:
            break
    return order


def _memory(peer: Offered) -> int:
    return peer.offer.memory_bytes


def _too_little(largest: Sequence[Offered], costs: Costs, tokens: int) -> bool:
    """Return whether these nodes hold too few layers even without embedding and head.

    A cheap pre-check.
    """
    most = (costs.capacity(_memory(peer), tokens, first=False, last=False) for peer in largest)
    return sum(max(0, layers) for layers in most) < costs.layers


# -- layers and cache ------------------------------------------------------------------------------


def kv_room(order: Sequence[Offered], costs: Costs, most: int) -> int:
    """Return the tokens whose keys and values fit on all stages, up to `most`.

    Returns -1 if the model does not fit.
    """
    low, high = -1, most
    while low < high:
        middle = (low + high + 1) // 2
        enough = holds(order, costs, middle)
        low, high = (middle, high) if enough else (low, middle - 1)
    return low


def holds(order: Sequence[Offered], costs: Costs, tokens: int) -> bool:
    """Return whether these stages hold the model with a cache of `tokens`."""
    caps = _capacities(order, costs, tokens)
    return len(order) <= costs.layers and min(caps) >= 1 and sum(caps) >= costs.layers


def _tokens(sequences: int, terms: PlanLimits, block: int) -> int:
    """Return the cache tokens for `sequences` of full length, in blocks, one of them reserved."""
    return (-(-sequences * terms.max_model_len // block) + 1) * block


def _capacities(order: Sequence[Offered], costs: Costs, tokens: int) -> list[int]:
    return [
        costs.capacity(_memory(peer), tokens, first=rank == 0, last=rank == len(order) - 1)
        for rank, peer in enumerate(order)
    ]


def share_layers(capacities: Sequence[int], costs: Costs) -> list[int]:
    """Split the layers over the stages as evenly as memory allows.

    A stage's work is the bytes of its weights, which decoding reads every step; the last stage also reads its
    head.
    """
    counts = [1] * len(capacities)
    work = [float(costs.layer)] * len(capacities)
    work[-1] += costs.last
    for _ in range(costs.layers - len(counts)):
        free = [rank for rank, most in enumerate(capacities) if counts[rank] < most]
        least = min(free, key=lambda rank: (work[rank], rank))
        counts[least] += 1
        work[least] += costs.layer
    return counts


def _plan_of(
    order: Sequence[Offered],
    offers: Sequence[Offered],
    costs: Costs,
    terms: PlanLimits,
    group: bytes,
    generation: int,
) -> PipelinePlan:
    shape = _shape(order, costs, terms)
    counts = share_layers(_capacities(order, costs, shape.kv_tokens), costs)
    ends = list(itertools.accumulate(counts))
    stages = tuple(
        Stage(peer.node, end - count, end)
        for peer, count, end in zip(order, counts, ends, strict=True)
    )
    members = {peer.node for peer in order}
    spares = sorted(
        (
            spare
            for spare in offers
            if spare.node not in members and spare.offer.world_size in (0, len(order))
        ),
        key=lambda spare: sum(_round_trip(spare, other) for other in order),
    )
    return PipelinePlan(
        group, generation, stages, tuple(spare.node for spare in spares[:MAX_SPARES]), shape
    )


def _shape(order: Sequence[Offered], costs: Costs, terms: PlanLimits) -> PipelineShape:
    offer = order[0].offer
    block = BLOCK["cpu" if offer.software.endswith("+cpu") else "cuda"]
    step = max(STEP_TOKENS, terms.max_sequences)
    step = min(step, MAX_STEP // (STEP_BYTES * terms.hidden_size))
    sequences = min(terms.max_sequences, step)
    room = kv_room(order, costs, _tokens(sequences, terms, block))
    element = 4 if terms.dtype == "float32" else 2
    size = ROWS * terms.hidden_size * element
    around = ring_ms(order, size) if is_measured(order) else ASSUMED_MS
    encodings: set[Encoding] = {peer.offer.encoding for peer in order}
    lanes = max(len(order) + math.ceil(around / STEP_MS), math.ceil(sequences / GRAPH_ROWS))
    return PipelineShape(
        engine=offer.engine,
        software=offer.software,
        dtype=terms.dtype,
        hidden_size=terms.hidden_size,
        max_model_len=terms.max_model_len,
        max_sequences=sequences,
        max_step_tokens=step,
        block_size=block,
        kv_tokens=max(block, room // block * block),
        micro_batches=min(lanes, MOST_IN_FLIGHT, sequences),
        encoding=encodings.pop() if len(encodings) == 1 else "raw",
        fingerprint=terms.fingerprint,
    )
