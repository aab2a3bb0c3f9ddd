"""Signed trails: later stages cannot change a stage's fingerprints."""

from collections.abc import Callable
from functools import partial

import msgspec
import pytest
from support import ring_cases
from support.protocol_cases import RUN

from primerl.crypto.hashing import digest
from primerl.crypto.keys import SecretKey
from primerl.node.pipeline.frames import (
    FINGERPRINT_BYTES,
    Frame,
    FrameLimits,
    Kind,
    Packet,
    decode,
    packet,
)
from primerl.node.pipeline.trails import BadTrail, SignedTrails, append, check, latest
from primerl.protocol.pipelines import PipelinePlan, Stage

KEYS = [SecretKey.from_seed(bytes([number + 1]) * 32) for number in range(4)]
SHAPE = msgspec.structs.replace(ring_cases.SHAPE, fingerprint="projection")
LIMITS = FrameLimits.of(SHAPE)
ROWS = 3
Change = Callable[[int, Packet], Packet]


def plan(stages: int, generation: int = 1) -> PipelinePlan:
    """Make a plan with one layer per stage."""
    made = tuple(Stage(KEYS[rank].node_id, rank, rank + 1) for rank in range(stages))
    return PipelinePlan(digest(b"group"), generation, made, (), SHAPE)


def row(rank: int, rows: int = ROWS) -> bytes:
    """Make a stage's fingerprints."""
    return bytes([rank + 1]) * (8 * rows)


def trail_of(one: Packet) -> bytes:
    """Return a packet's trail."""
    return one.contents[one.head.body : one.head.body + one.head.trail]


def with_trail(one: Packet, trail: bytes, kind: Kind | None = None) -> Packet:
    """Replace a packet's trail, as an engine or a lying node does."""
    frame = decode(one.head, one.contents)
    changed = Frame(kind or frame.kind, frame.epoch, frame.number, frame.body, trail=trail)
    return packet(changed, LIMITS)


def round_trip(
    stages: int,
    change: Change = lambda rank, one: one,
    *,
    number: int = 7,
    rows: int = ROWS,
    plans: Callable[[int], PipelinePlan] | None = None,
) -> bytes:
    """Return the trail that stage 0's engine receives; `change` alters packets between nodes."""
    ends = [
        SignedTrails(KEYS[rank], RUN, plans(rank) if plans else plan(stages), rank)
        for rank in range(stages)
    ]
    step = packet(Frame(Kind.STEP, 5, number, b"body", trail=row(0, rows)), LIMITS)
    step = change(0, ends[0].outward(step))
    for rank in range(1, stages):
        seen = ends[rank].inward(step)
        assert trail_of(seen) == b"".join(row(one, rows) for one in range(rank))
        last = rank == stages - 1
        said = trail_of(seen) if last else append(trail_of(seen), row(rank, rows))
        mine = with_trail(seen, said, Kind.DRAWN if last else Kind.STEP)
        step = change(rank, ends[rank].outward(mine))
    drawn = ends[0].inward(step)
    assert decode(drawn.head, drawn.contents).body == b"body"
    return trail_of(drawn)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("rows", [1, 8])
def test_engines_see_plain_trails_and_stage_0_gets_what_all_said(stages: int, rows: int) -> None:
    found = round_trip(stages, rows=rows)
    assert found == b"".join(row(rank, rows) for rank in range(stages - 1))


def test_no_byte_can_be_changed_by_a_later_stage() -> None:
    def change(rank: int, packet: Packet, at: int) -> Packet:
        if rank != 3:
            return packet
        trail = bytearray(trail_of(packet))
        trail[at] ^= 1
        return with_trail(packet, bytes(trail))

    for at in range(0, 3 * (8 * ROWS + 64), 7):
        with pytest.raises(BadTrail, match="changed by a later stage"):
            round_trip(4, partial(change, at=at))


def test_what_was_signed_for_another_step_epoch_plan_or_place_does_not_count() -> None:
    stolen: list[bytes] = []
    round_trip(3, lambda rank, one: stolen.append(trail_of(one)) or one, number=6)

    def replayed(rank: int, one: Packet) -> Packet:
        return with_trail(one, stolen[rank]) if rank == 1 else one

    with pytest.raises(BadTrail):
        round_trip(3, replayed)
    with pytest.raises(BadTrail):
        round_trip(3, plans=lambda rank: plan(3, generation=1 + (rank == 1)))

    def swapped(rank: int, one: Packet) -> Packet:
        trail = trail_of(one)
        half = len(trail) // 2
        return with_trail(one, trail[half:] + trail[:half]) if rank == 2 else one

    with pytest.raises(BadTrail):
        round_trip(3, swapped)


@pytest.mark.parametrize("size", [1, 63, 64, 71, 8 * ROWS, 2 * (8 * ROWS + 64) + 8])
def test_bytes_that_are_no_trail_are_refused_wherever_they_come_in(size: int) -> None:
    for victim in (1, 2):
        with pytest.raises(BadTrail):
            round_trip(
                4, lambda rank, one, v=victim: with_trail(one, bytes(size)) if rank == v else one
            )


def test_an_engine_of_ours_that_touches_what_others_said_is_found_at_home() -> None:
    end = SignedTrails(KEYS[1], RUN, plan(3), 1)
    first = SignedTrails(KEYS[0], RUN, plan(3), 0)
    step = first.outward(packet(Frame(Kind.STEP, 5, 7, b"", trail=row(0)), LIMITS))
    seen = end.inward(step)
    with pytest.raises(BadTrail, match="our engine changed"):
        end.outward(with_trail(seen, row(2) + row(1)))
    with pytest.raises(BadTrail, match="that had none"):
        end.outward(with_trail(seen, row(0) + row(1)))


def test_what_has_no_trail_passes_as_it_is() -> None:
    end = SignedTrails(KEYS[1], RUN, plan(3), 1)
    for kind in (Kind.RESET, Kind.SWITCH, Kind.STEP, Kind.PING, Kind.FAULT):
        one = packet(Frame(kind, 5, 7, b"words"), LIMITS)
        assert end.inward(one) is one
        assert end.outward(one) is one


def test_steps_of_a_chain_that_broke_are_forgotten() -> None:
    first, end = (SignedTrails(KEYS[rank], RUN, plan(3), rank) for rank in (0, 1))
    old = packet(Frame(Kind.STEP, 5, 7, b"", trail=row(0)), LIMITS)
    seen = end.inward(first.outward(old))
    end.inward(first.outward(packet(Frame(Kind.STEP, 6, 0, b"", trail=row(0)), LIMITS)))
    with pytest.raises(BadTrail):
        end.outward(with_trail(seen, row(0) + row(1)))


def test_a_packet_with_another_trail_says_so_in_its_head() -> None:
    first = SignedTrails(KEYS[0], RUN, plan(2), 0)
    one = first.outward(packet(Frame(Kind.STEP, 5, 7, b"ab", trail=row(0)), LIMITS))
    again = msgspec.msgpack.decode(one.start[4:], type=type(one.head))
    assert (again, one.head.size) == (one.head, len(one.contents))


def own(stage: int, rows: int) -> bytes:
    """Make a stage's fingerprints."""
    return b"".join(bytes([stage, row]) * (FINGERPRINT_BYTES // 2) for row in range(rows))


def trail(stages: int, rows: int) -> bytes:
    """Make the trail after `stages` stages."""
    found = b""
    for stage in range(stages):
        found = append(found, own(stage, rows))
    return found


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("count", [1, 2, 15])
def test_fingerprints_lie_in_the_order_of_the_stages(rows: int, count: int) -> None:
    found = trail(count, rows)
    check(found, rows, count)
    assert found == b"".join(own(stage, rows) for stage in range(count))


def test_a_step_that_draws_nothing_leaves_no_trail() -> None:
    assert append(b"", b"") == b""
    check(b"", 0, 3)
    assert latest(b"", 0, 3) == b""


def test_a_stage_sees_what_the_one_before_it_said() -> None:
    assert latest(trail(2, 5), 5, 2) == own(1, 5)


@pytest.mark.parametrize("change", [1, -1, FINGERPRINT_BYTES, -FINGERPRINT_BYTES])
def test_a_trail_of_another_size_is_refused(change: int) -> None:
    whole = trail(2, 3)
    wrong = whole[:change] if change < 0 else whole + bytes(change)
    with pytest.raises(BadTrail):
        check(wrong, 3, 2)
    with pytest.raises(BadTrail):
        latest(wrong, 3, 2)
    with pytest.raises(BadTrail):
        check(bytes(8), 0, 1)


def test_a_stage_that_adds_half_a_row_is_stopped_at_home() -> None:
    with pytest.raises(ValueError, match="bug"):
        append(b"", bytes(FINGERPRINT_BYTES + 1))
