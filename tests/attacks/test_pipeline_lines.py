"""Attacks on pipeline links: peers without a role in a plan, invalid and oversized frames."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from support.bare_node import serving
from support.memory_network import MemoryNetwork
from support.ring_cases import (
    LIMITS,
    RUN,
    SHAPE,
    TRAINER,
    Chain,
    Node,
    chain,
    key_of,
    plan,
    sealed,
    soon,
    step,
)
from support.waiting import until

from primerl.crypto.hashing import digest
from primerl.crypto.keys import SecretKey
from primerl.node.p2p.connections import no_pipelines
from primerl.node.p2p.rpc import Refused, ask, receive_reply, send
from primerl.node.p2p.transport import Connection, Stream, TransportError
from primerl.node.pipeline import acceptor as acceptor_module
from primerl.node.pipeline.frames import MAX_HEAD, Frame, FrameLimits, Kind, encode
from primerl.protocol import messages
from primerl.protocol.envelope import Purpose, seal
from primerl.protocol.errors import Reason
from primerl.protocol.version import ALPN_PIPELINE

DEADLINE_S = 60.0
AHEAD_S = 60.0
LATER = 2**50
"""A line's number that is above that of every line so far."""


@pytest.fixture
async def made() -> AsyncIterator[Chain]:
    async with chain(3) as made:
        yield made


class Rogue:
    """A node that sends arbitrary messages to a stage."""

    def __init__(self, chain: Chain, node: Node) -> None:
        self.chain = chain
        self.node = node
        self._open: dict[int, Connection] = {}

    @classmethod
    async def join(cls, chain: Chain, key: SecretKey | None = None) -> "Rogue":
        """Add a stranger, or a node with a key of the plan."""
        return cls(chain, await chain.node(key or key_of(66)))

    async def connect(self, rank: int) -> Connection:
        if rank not in self._open:
            target = self.chain.nodes[rank]
            self._open[rank] = await self.node.transport.connect(
                target.key.node_id, target.transport.addresses(), ALPN_PIPELINE, deadline=DEADLINE_S
            )
        return self._open[rank]

    async def ask(
        self, rank: int, request: messages.Message, kind: type[messages.Message] = messages.Accepted
    ) -> messages.Message:
        return await ask(await self.connect(rank), request, kind, deadline=DEADLINE_S)

    async def open(self, rank: int, plan: bytes | None = None, epoch: int = LATER) -> Stream:
        """Open a link to a stage."""
        stream = await (await self.connect(rank)).open_stream()
        await send(stream, messages.OpenLine(plan or sealed(self.chain.plan), epoch))
        await soon(receive_reply(stream, messages.Accepted))
        return stream

    async def reason(self, rank: int, request: messages.Message) -> Reason:
        with pytest.raises(Refused) as caught:
            await self.ask(rank, request)
        return caught.value.reason


async def works(made: Chain) -> bool:
    """Check that the ring still computes, after a new epoch if needed."""
    epoch = await soon(made.begin())
    return (await soon(made.trip(epoch, 1))).number == 1


async def test_a_stranger_opens_no_line_and_measures_nothing(made: Chain) -> None:
    rogue = await Rogue.join(made)
    genuine = sealed(made.plan)
    group, generation = made.plan.group, made.plan.generation
    for rank in range(3):
        assert await rogue.reason(rank, messages.OpenLine(genuine, LATER)) is Reason.NOT_ADMITTED
        assert await rogue.reason(rank, messages.Probe()) is Reason.NOT_ADMITTED
        prepare = messages.PrepareVersion(group, generation, 0, 0)
        assert await rogue.reason(rank, prepare) is Reason.NOT_ADMITTED
    assert await works(made)
    assert made.rings[0].stats().breaks == 0


async def test_a_node_that_shares_no_model_says_so_to_everybody() -> None:
    network = MemoryNetwork()
    near, far = (network.transport(key_of(number).node_id) for number in (1, 2))
    async with serving(far, {ALPN_PIPELINE: no_pipelines}):
        connection = await near.connect(
            far.node_id, far.addresses(), ALPN_PIPELINE, deadline=DEADLINE_S
        )
        with pytest.raises(Refused) as caught:
            await ask(connection, messages.Probe(), messages.Probe, deadline=DEADLINE_S)
        assert caught.value.reason is Reason.NOT_ADMITTED
    await near.close()


async def test_a_plan_that_the_trainer_did_not_sign_is_worth_nothing(made: Chain) -> None:
    rogue = await Rogue.join(made)
    own = plan([rogue.node.key.node_id, made.keys[1].node_id], group="mine")
    forged = sealed(own, key=rogue.node.key)
    assert await rogue.reason(1, messages.OpenLine(forged, LATER)) is Reason.WRONG_SIGNER
    elsewhere = sealed(own, run=digest(b"another run"))
    assert await rogue.reason(1, messages.OpenLine(elsewhere, LATER)) is Reason.WRONG_RUN
    over = sealed(own, lasts_s=-3600)
    assert await rogue.reason(1, messages.OpenLine(over, LATER)) is Reason.EXPIRED
    lease = seal(TRAINER, Purpose.LEASE, RUN, own, expires=int(time.time()) + 600)
    assert await rogue.reason(1, messages.OpenLine(lease, LATER)) is Reason.WRONG_PURPOSE
    assert await rogue.reason(1, messages.OpenLine(b"\xc1", LATER)) is Reason.MALFORMED


async def test_a_plan_of_nonsense_is_refused_under_any_signature(made: Chain) -> None:
    rogue = await Rogue.join(made)
    me, victim = rogue.node.key.node_id, made.keys[1].node_id
    assert (
        await rogue.reason(1, messages.OpenLine(sealed(plan([me, victim, me])), 1))
        is Reason.MALFORMED
    )


async def test_a_stage_opens_a_line_only_to_the_one_after_it(made: Chain) -> None:
    for rank, target in ((0, 2), (1, 0), (2, 1)):
        rogue = await Rogue.join(made, made.keys[rank])
        asked = messages.OpenLine(sealed(made.plan), LATER)
        assert await rogue.reason(target, asked) is Reason.NOT_ADMITTED


async def test_an_older_generation_counts_no_more(made: Chain) -> None:
    rogue = await Rogue.join(made, made.keys[0])
    nodes = [key.node_id for key in made.keys]
    made.nodes[1].acceptor.admit(sealed(plan(nodes, generation=1)))
    assert await rogue.reason(1, messages.OpenLine(sealed(made.plan), LATER)) is Reason.ROLLBACK


async def test_a_link_of_a_newer_plan_is_refused_for_now_and_the_plan_passed_on_once(
    made: Chain,
) -> None:
    rogue = await Rogue.join(made, made.keys[0])
    told: list[bytes] = []
    made.nodes[1].acceptor.newer = told.append
    newer = sealed(plan([key.node_id for key in made.keys], generation=1))
    for _ in range(2):
        assert await rogue.reason(1, messages.OpenLine(newer, LATER)) is Reason.NOT_YET
    assert told == [newer]


async def test_two_plans_of_one_generation_are_refused(made: Chain) -> None:
    rogue = await Rogue.join(made, made.keys[0])
    nodes = [key.node_id for key in made.keys]
    other = sealed(plan([nodes[0], nodes[1]]))
    assert await rogue.reason(1, messages.OpenLine(other, LATER)) is Reason.EQUIVOCATION


async def test_only_the_first_stage_has_others_prepare(made: Chain) -> None:
    asked: list[messages.PrepareVersion] = []

    async def prepare(request: messages.PrepareVersion) -> None:
        asked.append(request)

    made.nodes[2].acceptor.attach(made.rings[2], prepare)
    request = messages.PrepareVersion(made.plan.group, 0, 1, 7)
    follower = await Rogue.join(made, made.keys[1])
    assert await follower.reason(2, request) is Reason.NOT_ADMITTED
    leader = await Rogue.join(made, made.keys[0])
    assert await leader.ask(2, request, messages.Prepared) == messages.Prepared(7)
    assert asked == [request]
    later = messages.PrepareVersion(made.plan.group, 1, 1, 7)
    assert await leader.reason(2, later) is Reason.NOT_YET


async def test_a_line_that_was_replaced_is_not_opened_again(made: Chain) -> None:
    rogue = await Rogue.join(made, made.keys[0])
    line = await rogue.open(1)
    assert await rogue.reason(1, messages.OpenLine(sealed(made.plan), LATER)) is Reason.REPLAYED
    assert await rogue.reason(1, messages.OpenLine(sealed(made.plan), 5)) is Reason.REPLAYED
    await line.abort()
    assert await works(made)


HUGE = FrameLimits(1 << 31, 1 << 31, 1 << 31)
FRAMES: dict[str, tuple[bytes, Reason]] = {
    "a head longer than any": ((MAX_HEAD + 1).to_bytes(4, "big"), Reason.TOO_LARGE),
    "4 GiB": (b"\xff" * 4, Reason.TOO_LARGE),
    "noise": (b"\x00\x00\x00\x08" + b"\xc1" * 8, Reason.MALFORMED),
    "more tokens than a micro-batch has": (
        bytes(encode(step(1, 1, tokens=20 * SHAPE.max_step_tokens), HUGE)[0]),
        Reason.TOO_LARGE,
    ),
    "a body without end": (
        bytes(encode(Frame(Kind.STEP, 1, 1, bytes(LIMITS.body + 1)), HUGE)[0]),
        Reason.TOO_LARGE,
    ),
}


@pytest.mark.parametrize("name", FRAMES)
async def test_what_is_no_frame_ends_the_line_and_the_neighbours_go_on(
    made: Chain, name: str
) -> None:
    raw, reason = FRAMES[name]
    rogue = await Rogue.join(made, made.keys[0])
    await made.begin()
    # Ahead of the clock: only then is its line not replaced by the one that it took the place of.
    stream = await rogue.open(1, epoch=int((time.time() + AHEAD_S) * 1000))
    await stream.write(raw)
    with pytest.raises(Refused) as caught:
        await soon(receive_reply(stream, messages.Accepted))
    assert caught.value.reason is reason
    assert await works(made)


async def test_a_frame_that_trickles_in_is_not_waited_for() -> None:
    async with chain(2, stall_s=1.5) as made:
        rogue = await Rogue.join(made, made.keys[0])
        stream = await rogue.open(1)
        frame = b"".join(encode(step(1, 1), LIMITS))
        sent = 0
        with pytest.raises(TransportError):  # noqa: PT012
            for byte in frame:
                await stream.write(bytes([byte]))
                sent += 1
                await asyncio.sleep(0.3)
        assert sent < 10
        assert await works(made)


async def test_a_request_that_never_comes_is_not_waited_for(
    made: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor_module, "REQUEST_S", 0.2)
    rogue = await Rogue.join(made)
    stream = await (await rogue.connect(1)).open_stream()
    await stream.write(b"\x00")
    with pytest.raises(TransportError):
        await soon(stream.read_exact(1))


async def test_a_stranger_has_no_large_request_read(made: Chain) -> None:
    rogue = await Rogue.join(made)
    stream = await (await rogue.connect(1)).open_stream()
    await stream.write(messages.MAX_PROBE.to_bytes(4, "big"))
    with pytest.raises(Refused) as caught:
        await soon(receive_reply(stream, messages.Accepted))
    assert caught.value.reason is Reason.TOO_LARGE


async def test_what_belongs_on_another_alpn_is_refused(made: Chain) -> None:
    rogue = await Rogue.join(made, made.keys[0])
    assert await rogue.reason(1, messages.GetHeads(-1)) is Reason.MALFORMED


async def test_probes_are_answered_to_those_who_may_share_a_model_and_not_for_ever(
    made: Chain,
) -> None:
    rogue = await Rogue.join(made)
    made.nodes[1].acceptor.allow([rogue.node.key.node_id])
    full = messages.Probe(bytes(1000), messages.MAX_PROBE)
    answer = await rogue.ask(1, full, messages.Probe)
    assert isinstance(answer, messages.Probe)
    assert len(answer.payload) == messages.MAX_PROBE
    reasons = set[Reason]()
    for _ in range(40):
        try:
            await rogue.ask(1, full, messages.Probe)
        except Refused as error:
            reasons.add(error.reason)
    assert reasons == {Reason.RATE_LIMITED}


async def test_epochs_of_another_generation_begin_nothing(made: Chain) -> None:
    rogue = await Rogue.join(made, made.keys[0])
    stream = await rogue.open(1, epoch=int((time.time() + AHEAD_S) * 1000))
    for epoch in (2**53, 1 << 30):
        await stream.write(b"".join(encode(Frame(Kind.RESET, epoch, 0), LIMITS)))
    assert await works(made)
    assert made.computes[1].resets == 1


async def test_faults_without_end_fill_no_memory(made: Chain) -> None:
    rogue = await Rogue.join(made, made.keys[0])
    stream = await rogue.open(1)
    await made.nodes[2].transport.close()
    fault = b"".join(encode(Frame(Kind.FAULT, 1, 99, bytes(1000)), LIMITS))
    for _ in range(1000):
        await stream.write(fault)
    await until(lambda: made.rings[1].stats().bytes_in >= 500 * len(fault))
    assert made.rings[1].stats().waiting < 10


async def test_a_lying_neighbour_speaks_for_nobody_else(made: Chain) -> None:
    """Frames of the wrong kind are dropped: here stage 0 gets steps and wrong epochs."""
    epoch = await made.begin()
    rogue = await Rogue.join(made, made.keys[2])
    stream = await rogue.open(0)
    epoch = made.rings[0].begin()
    for frame in (
        step(epoch, 1),
        Frame(Kind.DRAWN, epoch - 1, 2),
        Frame(Kind.PING, epoch, 10**6),
        Frame(Kind.DRAWN, epoch, 3),
    ):
        await stream.write(b"".join(encode(frame, LIMITS)))
    assert (await made.receive(Kind.DRAWN)).number == 3
