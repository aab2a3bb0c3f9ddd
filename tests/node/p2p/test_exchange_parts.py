"""The parts of the exchange by themselves: the board of a fetch, the book of copies, the upload slots."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from random import Random

import pytest
from support.exchange_world import payload
from support.exchange_world import references as refs
from support.virtual_time import on_virtual_time
from support.waiting import until

from primerl.node.p2p import peers, serve
from primerl.node.p2p.download_state import (
    FIRST_RATE,
    IN_LINE_S,
    PLACE_S,
    SILENT_S,
    ChunkDownload,
    DownloadState,
)
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.manifests import ChunkRef

A, B, C, ORIGIN, D, E = (bytes([number]) * 32 for number in range(6))
CHUNKS = refs(payload(4, 100))
X, Y, Z, _ = (chunk.digest for chunk in CHUNKS)


def board() -> DownloadState:
    return DownloadState({chunk.digest: chunk for chunk in CHUNKS}, Random(1))


def begun(
    one: DownloadState, source: bytes, number: int, now: float, *, sending: bool = True
) -> ChunkDownload:
    pull = ChunkDownload(source, now, now, sending=sending)
    one.begin(CHUNKS[number], pull)
    return pull


# -- the board --------------------------------------------------------------------------------------


def test_the_rarest_chunk_is_fetched_first() -> None:
    one = board()
    one.claim(A, [X, Y])
    one.claim(B, [X])
    assert one.next_of(A) == CHUNKS[1]
    assert one.next_of(C) is None


def test_what_is_on_its_way_is_not_chosen_again() -> None:
    one = board()
    one.claim(A, [X])
    pull = begun(one, A, 0, 0.0)
    assert one.next_of(A) is None
    one.end(pull, 0.1)
    assert one.next_of(A) == CHUNKS[0]


def test_a_claim_is_news_once() -> None:
    one = board()
    assert one.claim(A, [X])
    assert not one.claim(A, [X])
    assert not one.claim(A, [bytes(32)])


def test_only_chunks_that_no_peer_holds_are_asked_of_the_origin() -> None:
    one = board()
    one.claim(A, [X, Y])
    begun(one, B, 2, 0.0)
    assert one.unheld(ORIGIN, 0.1) == [CHUNKS[3]]
    one.withdraw(A, 0.1)
    assert one.unheld(ORIGIN, 0.1) == [CHUNKS[0], CHUNKS[1], CHUNKS[3]]


def test_claims_of_a_source_that_fell_silent_keep_nothing_from_the_origin() -> None:
    one = board()
    one.claim(A, [X, Y])
    begun(one, A, 0, 0.0)
    assert CHUNKS[1] not in one.unheld(ORIGIN, SILENT_S - 0.1)
    late = one.unheld(ORIGIN, SILENT_S + 0.1)
    assert CHUNKS[0] in late
    assert CHUNKS[1] in late


def test_one_may_stand_in_several_lines_and_the_first_to_send_ends_the_others() -> None:
    one = board()
    one.claim(A, [X])
    one.claim(B, [X])
    first = begun(one, A, 0, 0.0, sending=False)
    assert one.late_of(B, 0.1) == CHUNKS[0]
    second = begun(one, B, 0, 0.1, sending=False)
    assert one.starts(second, 0.2)
    assert not one.starts(first, 0.3)  # its bytes come already


def test_a_source_that_gave_nothing_yet_keeps_no_chunk_from_one_that_did() -> None:
    """Before, the first to send anything ended all other lines for a chunk, and then sent a byte a second."""
    one = board()
    for source in (A, B):
        one.claim(source, [X, Y])
    one.arrived(CHUNKS[1], begun(one, A, 1, 0.0), 0.1)
    line = begun(one, A, 0, 0.1, sending=False)
    slow = begun(one, B, 0, 0.1, sending=False)
    assert one.starts(slow, 0.2)
    assert one.starts(line, 0.3)
    assert not one.starts(slow, 0.3), "the one that did has it under way"


def test_a_source_that_was_asked_in_vain_joins_no_other_until_it_gives_a_chunk() -> None:
    one = board()
    for source in (A, B):
        one.claim(source, [X, Y, Z])
    one.arrived(CHUNKS[1], begun(one, A, 1, 0.0), 0.1)
    begun(one, A, 0, 0.1, sending=False)
    assert one.late_of(B, 0.2) == CHUNKS[0]
    one.end(begun(one, B, 2, 0.2, sending=False), 0.3)
    assert one.late_of(B, 0.4) is None
    assert one.next_of(B) == CHUNKS[2], "it may still show what it has"


def test_a_source_that_is_asked_and_gives_nothing_soon_leaves_its_place_to_another() -> None:
    one = board()
    assert not one.gives(A, 0.0), "it told nothing yet"
    one.claim(A, [X])
    assert one.gives(A, 100.0), "nobody asked it"
    pull = begun(one, A, 0, 100.0, sending=False)
    assert one.gives(A, 99.9 + PLACE_S)
    assert not one.gives(A, 100.1 + PLACE_S)
    one.starts(pull, 101.0)
    pull.begun = pull.touched = 101.0
    assert one.gives(A, 101.1), "now it sends"
    assert not one.gives(A, 102.0), "but no byte since"


def test_a_chunk_that_is_late_is_asked_of_another_holder() -> None:
    one = board()
    one.claim(A, [X, Y])
    one.claim(B, [X])
    one.arrived(CHUNKS[2], begun(one, C, 2, -1.0), 0.0)
    pull = begun(one, A, 0, 0.0)
    pull.touched = 2.9
    assert one.late_of(B, 2.9) is None
    pull.touched = 3.1
    assert one.late_of(B, 3.1) == CHUNKS[0]
    assert one.late_of(A, 3.1) is None


def test_a_peer_that_waits_in_the_queue_for_long_may_ask_the_origin() -> None:
    one = board()
    one.claim(A, [X])
    begun(one, A, 0, 0.0, sending=False)
    assert CHUNKS[0] not in one.unheld(ORIGIN, IN_LINE_S - 0.1)
    assert CHUNKS[0] in one.unheld(ORIGIN, IN_LINE_S + 0.1)


def test_a_chunk_arrives_once_and_ends_all_that_fetch_it() -> None:
    one = board()
    one.claim(A, [X])
    pulls = [begun(one, A, 0, 0.0), begun(one, B, 0, 0.0)]
    assert one.arrived(CHUNKS[0], pulls[0], 1.0) == pulls
    assert one.arrived(CHUNKS[0], pulls[1], 1.0) is None
    assert one.next_of(A) is None
    assert one.typical_s == 1.0


# -- sources that let us wait -----------------------------------------------------------------------


def test_the_origin_may_be_asked_for_a_chunk_in_three_lines_while_others_claim_it_too() -> None:
    """Before, three lines at once kept out whoever had it, the origin included."""
    state = board()
    for source in (A, B, C, D, E):
        state.claim(source, [X])
    for source in (A, B, C):
        begun(state, source, 0, 0.0, sending=False)
    assert not state.wants(X, D, 0.1)
    soon, later = IN_LINE_S - 0.1, IN_LINE_S + 0.1
    assert CHUNKS[0] not in state.unheld(ORIGIN, soon)
    assert CHUNKS[0] in state.unheld(ORIGIN, later)
    assert state.wants(X, ORIGIN, later)
    assert state.wants(X, D, later), "nor do lines of doubted sources keep out another holder"


def test_a_source_that_lets_us_wait_holds_no_other_chunk_back_from_then_on() -> None:
    """Before, its other claims counted again as soon as it had ended one line and begun the next."""
    state = board()
    state.claim(A, [X, Y, Z])
    waiting = begun(state, A, 0, 0.0, sending=False)
    assert CHUNKS[1] not in state.unheld(ORIGIN, IN_LINE_S - 0.1)
    now = IN_LINE_S + 0.1
    assert CHUNKS[1] in state.unheld(ORIGIN, now)
    state.end(waiting, now, failed=True)
    begun(state, A, 2, now, sending=False)
    assert CHUNKS[1] in state.unheld(ORIGIN, now)


@pytest.mark.parametrize("line_s", [0.0, 0.4, IN_LINE_S - 0.1], ids=["at once", "soon", "late"])
def test_lines_that_end_below_the_limit_add_up(line_s: float) -> None:
    state = board()
    state.claim(A, [X, Y])
    now = 0.0
    while now < IN_LINE_S:
        assert not state.doubted(A, now)
        waiting = begun(state, A, 0, now, sending=False)
        state.end(waiting, now + line_s, failed=True)
        now += line_s + 0.25  # it was busy: we come again
    assert state.doubted(A, now + IN_LINE_S)
    assert state.unheld(ORIGIN, now + IN_LINE_S) == CHUNKS


def test_a_chunk_sent_at_the_end_of_a_line_does_not_begin_the_wait_anew() -> None:
    state = board()
    state.claim(B, [Y])
    state.arrived(CHUNKS[1], begun(state, B, 1, 0.0), 0.1)  # what is usual
    state.claim(A, [X, Z])
    late = begun(state, A, 0, 0.1, sending=False)
    late.begun = 1.9
    state.arrived(CHUNKS[0], late, 2.0)
    state.end(late, 2.0)
    begun(state, A, 2, 2.0, sending=False)
    assert state.doubted(A, 3.0)


def test_a_source_that_gives_at_the_usual_pace_is_never_doubted() -> None:
    names = refs(payload(40, 100))
    state = DownloadState({chunk.digest: chunk for chunk in names}, Random(1))
    state.claim(A, [chunk.digest for chunk in names])
    now = 0.0
    for chunk in names:  # each is in line for a second, which is what lines take here
        pull = ChunkDownload(A, now, now)
        state.begin(chunk, pull)
        pull.begun, now = now + 1.0, now + 1.1
        state.arrived(chunk, pull, now)
        state.end(pull, now)
        assert not state.doubted(A, now)


async def test_a_download_that_is_ending_already_can_be_stopped_again() -> None:
    loop, errors = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda loop, context: errors.append(context))
    download = ChunkDownload(A, 0.0, 0.0)

    async def run() -> None:
        async with asyncio.timeout(None) as download.leash:
            download.stop()
            loop.call_soon(download.stop)  # between the end of its time and that of the block
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await run()
    assert not errors


def test_bytes_that_come_fast_enough_are_waited_for_and_a_trickle_is_not() -> None:
    size = 16 << 20
    chunks = [ChunkRef(bytes([number]) * 32, size) for number in range(1, 4)]
    state = DownloadState({chunk.digest: chunk for chunk in chunks}, Random(1))
    fast, slow = (ChunkDownload(source, 0.0, 0.0, sending=True) for source in (A, B))
    for download, chunk in zip((fast, slow), chunks, strict=False):
        state.claim(download.source, [chunk.digest, chunks[2].digest])
        state.begin(chunk, download)
        download.touched = 9.9
    fast.received, slow.received = 10 * FIRST_RATE, FIRST_RATE
    assert not state.doubted(A, 10.0)
    assert state.doubted(B, 10.0)
    assert not state.wants(chunks[0].digest, ORIGIN, 10.0)
    assert state.wants(chunks[1].digest, ORIGIN, 10.0)


def test_lines_at_sources_that_gave_nothing_keep_out_no_source_that_did() -> None:
    state = board()
    for source in (A, B, C, D, E):
        state.claim(source, [X, Y])
    state.arrived(CHUNKS[1], begun(state, D, 1, 0.0), 0.1)
    for source in (A, B, C):
        begun(state, source, 0, 0.1, sending=False)
    assert state.late_of(E, 0.2) is None
    assert state.late_of(D, 0.2) == CHUNKS[0]


def test_trickling_sources_do_not_use_up_the_places_for_downloads() -> None:
    state = board()
    state.claim(A, [X])
    begun(state, A, 0, 0.0)
    assert state.sending(PLACE_S) == 1
    assert state.sending(2 * PLACE_S) == 0
    state.accounts[A].delivered = 1
    assert state.sending(2 * PLACE_S) == 1, "it gave a chunk, and may be slow for a while"
    assert state.sending(1.0 + 2 * IN_LINE_S) == 0


# -- copies -----------------------------------------------------------------------------------------


def test_what_was_given_least_is_given_next() -> None:
    copies = serve.UploadCounts(Random(2))
    held = [(0, X), (1, Y), (2, Z)]
    given: list[bytes] = []
    for now in (0.0, 0.1, 0.2):
        choice = copies.choose(held, urgent=False, now=now)
        assert choice is not None
        copies.begun(choice[1], 1000, now)
        given.append(choice[1])
    assert sorted(given) == sorted([X, Y, Z])


def test_what_spreads_is_not_given_again_unless_it_is_urgent() -> None:
    copies = serve.UploadCounts(Random(2))
    copies.begun(X, 1000, 0.0)
    assert copies.choose([(0, X)], urgent=False, now=0.5) is None
    copies.ended(X, 1000, 1.0, 1.0)
    assert copies.choose([(0, X)], urgent=False, now=1.0 + serve.RELAY_S) is None
    assert copies.choose([(0, X)], urgent=True, now=1.1) == (0, X)
    assert copies.choose([(0, X)], urgent=False, now=1.1 + serve.RELAY_S + 3.0) == (0, X)


def test_a_copy_that_did_not_get_through_does_not_count() -> None:
    copies = serve.UploadCounts(Random(2))
    copies.begun(X, 1000, 0.0)
    copies.failed(X, 0.5)
    assert copies.choose([(0, X)], urgent=False, now=0.5) == (0, X)


def test_a_peer_that_reads_slowly_on_purpose_does_not_keep_a_chunk_from_others_for_long() -> None:
    copies = serve.UploadCounts(Random(2))
    copies.begun(X, 16 << 20, 0.0)
    assert copies.choose([(0, X)], urgent=False, now=1.0) is None
    assert copies.choose([(0, X)], urgent=False, now=70.0) == (0, X)


# -- slots ------------------------------------------------------------------------------------------


async def no_beat() -> None:
    """Nobody is told."""


async def stand(slots: serve.UploadSlots, peer: bytes, served: list[bytes]) -> None:
    async with slots.turn(peer, beat_s=5.0, beat=no_beat):
        served.append(peer)


async def test_a_free_slot_goes_to_the_node_that_got_least() -> None:
    slots = serve.UploadSlots(1)
    served: list[bytes] = []
    slots.charge(A, 1000)
    slots.charge(B, 10)
    async with slots.turn(ORIGIN, beat_s=5.0, beat=no_beat):
        waiting = [asyncio.create_task(stand(slots, peer, served)) for peer in (A, B, C)]
        await asyncio.sleep(0)
        assert not served
    await asyncio.gather(*waiting)
    assert served == [C, B, A]


async def test_a_peer_that_leaves_the_queue_takes_no_slot_with_it() -> None:
    slots = serve.UploadSlots(1)
    served: list[bytes] = []
    async with slots.turn(ORIGIN, beat_s=5.0, beat=no_beat):
        waiting = [asyncio.create_task(stand(slots, peer, served)) for peer in (A, B)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.wait([waiting[0]])
    await waiting[1]
    # Cancelled at the very moment of the grant: the slot goes on.
    async with slots.turn(ORIGIN, beat_s=5.0, beat=no_beat):
        doomed = asyncio.create_task(stand(slots, A, served))
        await asyncio.sleep(0)
    doomed.cancel()
    await asyncio.wait([doomed])
    await stand(slots, C, served)
    assert served == [B, C]


async def test_one_peer_never_holds_all_slots() -> None:
    slots = serve.UploadSlots(3)
    served: list[bytes] = []
    async with AsyncExitStack() as held:
        for _ in range(2):
            await held.enter_async_context(slots.turn(A, beat_s=5.0, beat=no_beat))
        third = asyncio.create_task(stand(slots, A, served))
        await asyncio.sleep(0)
        await stand(slots, B, served)
        assert served == [B]
    await third


async def test_an_upload_that_takes_far_too_long_holds_up_nobody() -> None:
    now = 0.0
    slots = serve.UploadSlots(1, clock=lambda: now)
    served: list[bytes] = []
    async with slots.turn(A, beat_s=5.0, beat=no_beat):
        waiting = asyncio.create_task(stand(slots, B, served))
        await asyncio.sleep(0)
        assert not served
        now = serve.OVERDUE_S + 1
        await stand(slots, C, served)
        await waiting
    assert sorted(served) == [B, C]


def uploads(limit: serve.UploadLimit, seconds: Callable[[int], float], count: int = 60) -> int:
    """The limit after so many uploads that take `seconds(beside)` each."""
    for _ in range(count):
        limit.learn(128 * 1024, seconds(limit.value), limit.value)
    return limit.value


def test_on_a_line_that_is_full_few_uploads_go_at_a_time() -> None:
    assert uploads(serve.UploadLimit(), lambda beside: 0.25 * beside) <= 3


def test_on_a_long_line_as_many_uploads_go_as_fill_it() -> None:
    # 100 ms there and back, and room for ten chunks in that time.
    assert 8 <= uploads(serve.UploadLimit(), lambda beside: max(0.11, 0.01 * beside)) <= 12


def test_uploads_become_fewer_again_when_the_line_narrows() -> None:
    limit = serve.UploadLimit()
    assert uploads(limit, lambda beside: 0.1) >= serve.MOST - 2
    assert uploads(limit, lambda beside: 0.1 * beside, serve.RELEARN_AFTER) <= 3


async def test_a_full_line_says_that_it_is_busy() -> None:
    slots = serve.UploadSlots(1, queue=1)
    async with slots.turn(A, beat_s=5.0, beat=no_beat):
        waiting = asyncio.create_task(stand(slots, B, []))
        await asyncio.sleep(0)
        with pytest.raises(RemoteProtocolError) as error:
            await stand(slots, C, [])
        assert error.value.reason == Reason.BUSY
    await waiting


async def test_a_peer_that_waits_for_a_slot_gets_a_heartbeat() -> None:
    slots = serve.UploadSlots(1)
    beats: list[int] = []

    async def beat() -> None:
        beats.append(1)

    async def wait() -> None:
        async with slots.turn(B, beat_s=0.01, beat=beat):
            pass

    async with slots.turn(A, beat_s=5.0, beat=no_beat):
        waiting = asyncio.create_task(wait())
        await until(lambda: len(beats) >= 3)
    await waiting


def test_bytes_that_were_sent_long_ago_weigh_little() -> None:
    accounts = serve.UploadTotals()
    accounts.add(A, 1000, 0.0)
    assert accounts.recent(A, serve.HALF_LIFE_S) == 500
    assert accounts.recent(B, serve.HALF_LIFE_S) == 0


# -- standing and arrivals --------------------------------------------------------------------------


def test_everything_is_forgiven_after_a_time_and_lies_later_each_time() -> None:
    standing = peers.PeerScores()
    standing.lied(A, 0.0)
    assert standing.shunned(A, peers.SHUN_S - 1)
    assert not standing.shunned(A, peers.SHUN_S + 1)
    standing.lied(A, peers.SHUN_S + 1)
    assert standing.shunned(A, 2 * peers.SHUN_S + 2)
    standing.path_failed(A, 0.0, detour=False)
    standing.rest(A, 0.0)
    assert standing.detoured(A, peers.DETOUR_S - 1)
    assert not standing.detoured(A, peers.DETOUR_S + 1)
    assert standing.resting(A, peers.REST_S - 1)
    assert not standing.resting(A, peers.REST_S + 1)


def waited_for(
    scores: peers.PeerScores, now: float, seconds: float, *, delivered: bool = False
) -> None:
    scores.fetched(
        A,
        now,
        waited=seconds,
        delivered=delivered,
        doubted=seconds >= 1.0,
        idle=not delivered,
        seconds=seconds,
    )


def test_a_source_that_lets_two_fetches_wait_is_passed_over_each_time_for_longer() -> None:
    scores = peers.PeerScores()
    assert scores.patience(A) == peers.PATIENCE_S
    waited_for(scores, 0.0, 1.5)
    assert scores.stalled(A)
    assert not scores.passed_over(A, 0.1)
    waited_for(scores, 2.0, 1.5)
    assert scores.patience(A) == 0.0
    assert scores.passed_over(A, peers.STALL_S)
    assert not scores.passed_over(A, peers.STALL_S + 3.0)
    waited_for(scores, 100.0, 1.5)
    assert scores.passed_over(A, 99.0 + 2 * peers.STALL_S)


def test_a_source_that_gave_nothing_in_a_short_fetch_comes_last_in_the_next_and_is_not_passed_over() -> (
    None
):
    state = board()
    state.claim(A, [X])
    state.claim(B, [Y])
    begun(state, A, 0, 0.0, sending=False)
    given = begun(state, B, 1, 0.0)
    assert not state.idle(A, 0.01), "nothing is usual yet"
    state.arrived(CHUNKS[1], given, 0.01)
    assert not state.idle(A, 0.02)
    assert state.idle(A, 0.05)
    assert not state.idle(B, 0.05)
    scores = peers.PeerScores()
    waited_for(scores, 0.05, 0.02)
    waited_for(scores, 0.1, 0.02)
    assert scores.stalled(A)
    assert not scores.passed_over(A, 0.2)
    waited_for(scores, 0.3, 0.02, delivered=True)
    assert not scores.stalled(A)


def test_a_source_that_gives_something_now_and_then_earns_its_patience_slowly() -> None:
    scores = peers.PeerScores()
    waited_for(scores, 0.0, peers.PATIENCE_S)
    waited_for(scores, 2.0, 0.5, delivered=True)
    assert not scores.stalled(A)
    assert scores.patience(A) < 0.1 * peers.PATIENCE_S
    for now in range(10):
        scores.fetched(A, now, waited=0.0, delivered=True, doubted=False, idle=False, seconds=10.0)
    assert scores.patience(A) == peers.PATIENCE_S


def test_a_detour_that_leads_nowhere_ends_at_once_and_is_not_tried_again_for_a_while() -> None:
    standing = peers.PeerScores()
    standing.path_failed(A, 0.0, detour=False)
    standing.path_failed(A, 1.0, detour=True)
    assert not standing.detoured(A, 1.0)
    standing.path_failed(A, 2.0, detour=False)
    assert not standing.detoured(A, 2.0)
    standing.path_failed(A, 1.0 + peers.NO_DETOUR_S, detour=False)
    assert standing.detoured(A, 1.0 + peers.NO_DETOUR_S)


def test_requests_that_fail_together_on_the_usual_path_do_not_end_the_detour() -> None:
    standing = peers.PeerScores()
    for _ in range(4):
        standing.path_failed(A, 0.0, detour=False)
    assert standing.detoured(A, 1.0)


@on_virtual_time
async def test_a_watch_hears_of_its_own_chunks_only_and_of_those_that_come_together_once() -> None:
    arrivals = serve.ChunkArrivals()
    with arrivals.watching([X, Y]) as watch:
        arrivals.arrived(Z)
        await asyncio.sleep(2 * serve.NEWS_BATCH_S)
        assert not watch.news.is_set()
        arrivals.arrived(Y)
        assert not watch.news.is_set(), "another may come in a moment"
        await asyncio.sleep(2 * serve.NEWS_BATCH_S)
        assert watch.news.is_set()
        arrivals.arrived(Y)
        assert watch.held == b"\x02"
        assert not watch.complete
        arrivals.arrived(X)
        assert watch.complete
    assert arrivals.watched == 0
