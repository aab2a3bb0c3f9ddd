"""Rings: frames stay in order; failures are detected, attributed and recovered from."""

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest
from support.memory_network import MemoryNetwork
from support.ring_cases import SHAPE, Chain, chain, soon, step

from primerl.node.pipeline.frames import FINGERPRINT_BYTES, Frame, Kind, words_of


@pytest.mark.parametrize("stages", [2, 4])
async def test_a_micro_batch_goes_through_every_stage_and_back_to_the_first(stages: int) -> None:
    async with chain(stages) as made:
        epoch = await made.begin()
        for number in range(3):
            drawn = await made.trip(epoch, number)
            assert (drawn.number, drawn.body, drawn.trail) == (number, b"what to do", b"trail")
            assert np.all(drawn.tensors[0] == number + stages - 1)
        assert all(compute.resets == 1 for compute in made.computes.values())


async def test_frames_overtake_nothing_and_a_switch_is_everywhere_between_two_steps() -> None:
    async with chain(3) as made:
        epoch = await made.begin()
        for frame in (step(epoch, 1), Frame(Kind.SWITCH, epoch, 7), step(epoch, 2)):
            await made.send(frame)
        kinds = [(await made.receive()).kind for _ in range(3)]
        assert kinds == [Kind.DRAWN, Kind.SWITCH, Kind.DRAWN]
        assert [compute.switched for compute in made.computes.values()] == [[7], [7]]


async def test_more_may_be_under_way_than_any_queue_holds() -> None:
    async with chain(2) as made:
        epoch = await made.begin()
        full = SHAPE.max_step_tokens
        sending = asyncio.gather(*(made.send(step(epoch, number, full)) for number in range(60)))
        for _ in range(60):
            await made.receive(Kind.DRAWN)
        await sending
        stats = made.rings[0].stats()
        assert stats.bytes_out > 60 * full * SHAPE.hidden_size * 4
        assert made.rings[1].stats().bytes_in == stats.bytes_out


async def test_a_fault_of_an_engine_reaches_the_first_stage_with_its_rank_and_words() -> None:
    async with chain(3) as made:
        epoch = await made.begin()
        made.computes[1].fails = "out of memory"
        await made.send(step(epoch, 1))
        fault = await made.receive(Kind.FAULT)
        assert (fault.epoch, fault.number) == (epoch, 1)
        assert words_of(fault.body) == "out of memory"
        assert (await soon(made.rings[0].wait_failed())).rank == 1
        made.computes[1].fails = ""
        assert (await made.trip(await made.begin(), 2)).number == 2


async def test_an_engine_that_dies_is_named_and_another_one_takes_its_place() -> None:
    async with chain(3) as made:
        epoch = await made.begin()
        await asyncio.to_thread(made.ports[2].close)
        assert (await made.receive(Kind.FAULT)).number == 2
        fault = await soon(made.rings[0].wait_failed())
        assert fault.rank == 2
        await made.compute(2)
        again = await made.begin()
        assert again > epoch
        assert (await made.trip(again, 1)).number == 1


async def test_an_engine_that_hangs_is_named() -> None:
    async with chain(3, stall_s=1.5) as made:
        epoch = await made.begin()
        made.computes[1].takes_s = 2.7
        await made.send(step(epoch, 1))
        fault = await made.receive(Kind.FAULT)
        assert fault.number == 1
        assert "did not answer" in words_of(fault.body)
        made.computes[1].takes_s = 0.0
        assert (await made.trip(await made.begin(), 2)).number == 2


async def test_a_cut_line_is_dialled_again_and_another_chain_begins() -> None:
    network = MemoryNetwork()
    async with chain(3, network) as made:
        epoch = await made.begin()
        one, two = made.keys[1].node_id, made.keys[2].node_id
        network.partition(one, two)
        fault = await soon(made.rings[0].wait_failed())
        assert fault.rank in (1, 2)
        assert (await made.receive(Kind.FAULT)).epoch == epoch
        await made.send(Frame(Kind.RESET, made.rings[0].begin(), 0))
        assert (await made.receive(Kind.FAULT)).epoch == made.rings[0].epoch
        network.heal(one, two)
        assert (await made.trip(await made.begin(), 1)).number == 1
        assert made.rings[0].stats().breaks == 1


async def test_a_node_that_dies_is_named_by_the_one_after_it() -> None:
    network = MemoryNetwork()
    async with chain(4, network) as made:
        await made.begin()
        network.drop(made.keys[2].node_id)
        assert (await soon(made.rings[0].wait_failed())).rank == 2
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await made.rings[0].wait_healthy()


async def test_a_node_that_falls_silent_is_lost() -> None:
    network = MemoryNetwork()
    async with chain(3, network, stall_s=1.5) as made:
        await made.begin()
        network.stall(made.keys[1].node_id, made.keys[2].node_id)
        assert (await soon(made.rings[0].wait_failed())).rank == 1
        network.heal(made.keys[1].node_id, made.keys[2].node_id)
        assert (await made.trip(await made.begin(), 1)).number == 1


async def test_a_ring_without_work_stays_healthy() -> None:
    async with chain(2, stall_s=2.0) as made:
        epoch = await made.begin()
        await asyncio.sleep(4.2)
        assert made.rings[0].stats().breaks == 0
        assert made.rings[0].stats().round_ms is not None
        assert (await made.trip(epoch, 1)).number == 1


def sampling_step(epoch: int, number: int) -> Frame:
    """Make a micro-batch with a row from which a token is sampled."""
    return replace(step(epoch, number), trail=b"a" * FINGERPRINT_BYTES)


async def test_what_every_stage_says_of_its_states_comes_back_without_signatures() -> None:
    async with chain(4, signs=True) as made:
        for rank in (1, 2):
            made.computes[rank].says = bytes([rank]) * FINGERPRINT_BYTES
        epoch = await made.begin()
        await made.send(sampling_step(epoch, 1))
        await made.send(replace(step(epoch, 2), trail=b""))
        drawn = await made.receive(Kind.DRAWN)
        assert (
            drawn.trail
            == b"a" * FINGERPRINT_BYTES + b"\1" * FINGERPRINT_BYTES + b"\2" * FINGERPRINT_BYTES
        )


async def test_an_engine_that_forges_what_others_said_breaks_its_own_stage() -> None:
    async with chain(3, signs=True) as made:
        made.computes[1].says = b"odd"
        epoch = await made.begin()
        await made.send(sampling_step(epoch, 1))
        await made.receive(Kind.FAULT)
        assert (await soon(made.rings[0].wait_failed())).rank in (1, None)


async def idle_while(made: Chain, lanes: int, trips: int) -> float:
    """Time round trips with `lanes` micro-batches in flight, in seconds."""
    epoch = await made.begin()
    begin = time.monotonic()
    for number in range(lanes):
        await made.send(step(epoch, number))
    for number in range(lanes, trips):
        await made.receive(Kind.DRAWN)
        await made.send(step(epoch, number))
    for _ in range(lanes):
        await made.receive(Kind.DRAWN)
    return time.monotonic() - begin


async def test_a_delay_does_not_make_frames_wait_for_each_other() -> None:
    async with chain(2, delays={0: 0.1, 1: 0.1}) as made:
        took = await idle_while(made, lanes=16, trips=32)
        assert 0.4 <= took < 6.0  # one after the other: 6.4 s
        assert made.rings[1].stats().stall_share > 0.2


async def test_a_narrow_line_takes_its_time() -> None:
    frame_bytes = SHAPE.max_step_tokens * SHAPE.hidden_size * 4
    async with chain(2, rates={0: 10 * frame_bytes}) as made:
        epoch = await made.begin()
        begin = time.monotonic()
        for number in range(8):
            await made.send(step(epoch, number, SHAPE.max_step_tokens))
        for _ in range(8):
            await made.receive(Kind.DRAWN)
        assert time.monotonic() - begin >= 0.75
