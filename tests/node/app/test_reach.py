"""A look at a run before it is joined: what it finds, and that it leaves nothing behind."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.bare_node import serving
from support.memory_network import MemoryNetwork
from support.protocol_cases import MANIFEST, TICKET, head
from support.swarm import Swarm

from primerl.crypto.keys import SecretKey
from primerl.node.app.outlook import Outlook, judge, sentences
from primerl.node.app.reach import (
    Outside,
    ProbeLimits,
    Reach,
    Speed,
    Way,
    look,
    nat_of,
    pace,
    tcp_port,
)
from primerl.node.config.run import EngineConfig, NetworkConfig
from primerl.node.errors import TicketError
from primerl.node.memory_plan.memory import Device
from primerl.node.ops import control
from primerl.node.p2p.connections import Handler
from primerl.node.p2p.rpc import receive, send
from primerl.node.p2p.transport import Stream, Transport
from primerl.protocol import tickets
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.messages import GetHeads, Heads, Hello
from primerl.protocol.trust import AdmittedHead
from primerl.protocol.version import ALPN_BLOBS, ALPN_CONTROL

LONG = 100_000
QUICK = ProbeLimits(speed_s=0.1)
CPU = Device("cpu", 8 * 2**30)


async def look_at(swarm: Swarm, text: str = "", **options: Any) -> Outside:
    """Look at the run of a swarm, or by another ticket of it."""

    async def transport(network: NetworkConfig, key: SecretKey, port: int) -> Transport:
        del network, port
        end = swarm.network.transport(key.node_id)
        end.public = "5.9.16.7"
        return end

    network = NetworkConfig(libp2p=False)
    return await look(text or swarm.ticket, network, transport=transport, **options)


async def ticket_of(swarm: Swarm, **options: Any) -> str:
    """Issue a ticket as the trainer's operator does."""
    return (await asyncio.to_thread(control.ask, swarm.trainer.data_dir, "ticket", **options))[
        "ticket"
    ]


async def test_a_look_finds_what_the_trainer_says_and_measures_the_way(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        await swarm.wait_step(3)
        outside = await look_at(swarm)
        reach, outlook = outside.reach, judge(outside, EngineConfig(), CPU, 1)
        assert (reach.ticket, reach.may_join, reach.run_name) == ("valid", True, "r")
        assert reach.udp.answers
        assert reach.udp.rtt_ms is not None
        assert reach.clock_ahead_s == pytest.approx(0, abs=2)
        assert reach.download is not None
        assert reach.upload is not None
        assert reach.version is not None
        assert reach.version >= 3
        assert reach.version_bytes is not None
        assert reach.first_bytes is not None
        assert outside.model is not None
        assert outside.model["model_type"] == "qwen3"
        assert "memory" in {check.name for check in outlook.checks}
        assert reach.workers == 1
        assert reach.rollout_tokens
        assert outlook.rollouts_per_hour == reach.worker_rollouts_per_hour
        assert outlook.up_bytes_per_day
        assert (await swarm.trainer.status())["warnings"] == []


async def test_a_look_takes_no_seat_of_a_ticket_and_admits_nobody(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm:
        await swarm.start_trainer()
        assert (await look_at(swarm)).reach.workers == 0, "nobody works yet, and that is said"
        one = await ticket_of(swarm, uses=1, label="one")
        for _ in range(3):
            assert (await look_at(swarm, one)).reach.may_join
        rows = await asyncio.to_thread(control.ask, swarm.trainer.data_dir, "tickets")
        assert [row["admitted"] for row in rows] == [0, 0]
        assert [row for row in await swarm.trainer.peers() if row["refused"]] == []
        swarm.ticket = one
        await swarm.until_row(swarm.add_worker("w1"), lambda row: row["accepted"], 30.0)
        spent = await look_at(swarm, one)
        assert (spent.reach.may_join, spent.manifest) == (False, None)
        assert "has admitted the 1 node(s)" in spent.reach.ticket
        assert spent.reach.udp.answers, "the way is known all the same"
        assert judge(spent, EngineConfig(), CPU, 1).exit_code == TicketError.exit_code


async def test_a_revoked_an_expired_and_a_damaged_ticket_are_told_apart(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm:
        await swarm.start_trainer()
        old = await ticket_of(swarm, label="old")
        await asyncio.to_thread(control.ask, swarm.trainer.data_dir, "revoke", name="old")
        assert "revoked" in (await look_at(swarm, old)).reach.ticket
        with pytest.raises(TicketError, match="damaged"):
            await look_at(swarm, old[:-4])
        await swarm.stop_trainer()
        late = await look_at(swarm, clock=lambda: time.time() + 1e9)
        assert (late.reach.ticket, late.reach.udp.answers) == ("expired by our clock", False)
        assert judge(late, EngineConfig(), CPU, 1).exit_code == 6


async def test_a_clock_that_is_off_is_measured_though_a_join_would_be_refused(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm:
        await swarm.start_trainer()
        outside = await look_at(swarm, clock=lambda: time.time() - 300)
        assert outside.reach.clock_ahead_s == pytest.approx(-300, abs=2)
        outlook = judge(outside, EngineConfig(), CPU, 1)
        (clock,) = [check for check in outlook.checks if check.name == "clock"]
        assert (clock.state, outlook.exit_code) == ("problem", 1)
        assert clock.found.endswith("behind the trainer's, 60 s are allowed")


async def test_what_is_fetched_to_measure_has_a_bound(tmp_path: Path, model_dir: Path) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm:
        await swarm.start_trainer()
        await swarm.wait_step(0)
        outside = await look_at(swarm, limits=replace(ProbeLimits(), download=16, lanes=1))
        assert outside.reach.download is not None
        assert outside.reach.download.nbytes < 64 * 1024


async def test_a_relay_that_the_ticket_needs_and_this_node_does_not_use_is_named(
    tmp_path: Path, model_dir: Path
) -> None:
    relay = "https://relay.example.org/"
    advertised = {"libp2p": False, "advertise": [relay]}
    async with Swarm(tmp_path, model_dir, max_steps=LONG, network=None) as swarm:
        swarm.settings["network"] = advertised
        await swarm.start_trainer()
        await swarm.stop_trainer()
        reach = (await look_at(swarm)).reach
    assert reach.udp.why.startswith(f"the ticket has no address but the relay {relay}")


async def older(peer: bytes, stream: Stream) -> None:
    """Answer as a trainer does that knows no trial hellos."""
    request = await receive(stream, Hello | GetHeads)  # type: ignore[arg-type]
    if isinstance(request, Hello):
        raise RemoteProtocolError(Reason.MALFORMED, "Object contains unknown field `trial`")
    await send(stream, Heads(()))
    await stream.finish()


async def silent(peer: bytes, stream: Stream) -> None:
    """Take every request and answer none."""
    await asyncio.sleep(60.0)


async def look_by(answer: Handler, *, port: int = 0, limits: ProbeLimits = QUICK) -> Outside:
    """Look at a run whose trainer answers so; its ticket names a TCP port of this machine."""
    network, key = MemoryNetwork(), SecretKey.from_seed(bytes(31) + b"T")
    server, now = network.transport(key.node_id), int(time.time())

    async def transport(config: NetworkConfig, own: SecretKey, port: int) -> Transport:
        return network.transport(own.node_id)

    ticket = msgspec.structs.replace(
        TICKET,
        trainer=key.node_id,
        addresses=server.addresses(),
        discovery=(f"/ip4/127.0.0.1/tcp/{port}",),
        issued=now,
        expires=now + 60,
    )
    async with serving(server, {ALPN_CONTROL: answer, ALPN_BLOBS: silent}):
        text, config = tickets.issue(key, ticket), NetworkConfig(libp2p=False)
        return await look(text, config, transport=transport, limits=limits)


async def test_a_trainer_of_an_older_release_is_reached_though_it_says_nothing_of_the_ticket() -> (
    None
):
    reach = (await look_by(older)).reach
    assert reach.udp.answers
    assert reach.may_join is None
    assert reach.ticket.endswith("(a trainer of an older release)")


async def test_a_trainer_that_answers_nothing_costs_no_more_than_the_time_set() -> None:
    limits = replace(ProbeLimits(), whole_s=0.1)
    reach = (await look_by(silent, limits=limits)).reach
    assert not reach.udp.answers
    assert reach.udp.why == "not all was answered in 0 s"


async def test_a_tcp_port_is_timed_and_a_closed_one_named() -> None:
    def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        way = (await look_by(older, port=port)).reach.tcp
        assert way.rtt_ms is not None
        assert not way.answers, "a port proves no key"
        assert "libp2p is off or not installed here" in way.why
    closed = (await look_by(older, port=port)).reach.tcp
    assert (closed.answers, closed.rtt_ms) == (False, None)
    assert closed.why.startswith(f"127.0.0.1:{port}: ")


@pytest.mark.parametrize("model", [{}, {"num_hidden_layers": "x"}, {"hidden_size": 0}, {"a": [{}]}])
def test_a_model_that_makes_no_sense_is_not_planned(model: dict[str, Any]) -> None:
    run = Outside(Reach("t", "r", may_join=True, udp=Way(True, 1.0)), MANIFEST, model)
    (check,) = [each for each in judge(run, EngineConfig(), CPU, 1).checks if each.name == "memory"]
    assert (check.state, check.found[:11]) == ("warning", "not planned")


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        ("", "not known"),
        ("127.0.0.1:5", "none: the trainer is on this machine"),
        ("10.0.0.7:4000", "none on the way to the trainer, in a network that they share"),
        ("5.9.16.7:4000", "none on the way to the trainer"),
        ("9.9.9.9:4000", "one that keeps the port; "),
        ("9.9.9.9:61000", "one that changes the port; "),
        ("[2001:db8::1]:4000", "one that keeps the port; "),
    ],
)
def test_address_translation_is_told_as_far_as_one_observer_sees_it(seen: str, says: str) -> None:
    own = ["10.0.0.7:4000", "5.9.16.7:4000", "https://relay.example.org"]
    assert nat_of(seen, own).startswith(says)


@pytest.mark.parametrize(
    ("address", "port"),
    [
        ("/ip4/10.0.0.1/tcp/4001/p2p/12D3", ("10.0.0.1", 4001)),
        ("/ip6/::1/tcp/1", ("::1", 1)),
        ("/dns4/example.org/tcp/80", ("example.org", 80)),
        ("/ip4/10.0.0.1/udp/4001/quic", None),
        ("/ip4/10.0.0.1/tcp/70000", None),
        ("/ip4/10.0.0.1/tcp/x", None),
        ("nonsense", None),
    ],
)
def test_a_tcp_address_is_read_from_a_multiaddr(address: str, port: tuple[str, int] | None) -> None:
    assert tcp_port(address) == port


def heads(*created: int) -> Sequence[AdmittedHead]:
    return [
        AdmittedHead(replace_created(number, when), b"", b"") for number, when in enumerate(created)
    ]


def replace_created(number: int, created: int) -> Any:
    return msgspec.structs.replace(head(number), created=created)


@pytest.mark.parametrize(
    ("created", "expected"), [((), None), ((5,), None), ((5, 5), None), ((0, 30, 60), 120.0)]
)
def test_versions_an_hour_are_those_between_the_first_and_the_last(
    created: tuple[int, ...], expected: float | None
) -> None:
    assert pace(heads(*created)) == expected


def seen(**changes: Any) -> Outlook:
    """Judge a run that was reached, but for `changes`."""
    known: dict[str, Any] = {
        "ticket": "valid",
        "may_join": True,
        "udp": Way(True, 12.0),
        "clock_ahead_s": 1,
        "versions_per_hour": 10.0,
        "version_bytes": 1e6,
        "first_bytes": 10_000_000,
        "download": Speed(2_000_000, 1.0),
    }
    return judge(Outside(Reach("t", "r", **{**known, **changes})), EngineConfig(), CPU, 1)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, 0),
        ({"may_join": False, "ticket": "revoked"}, 3),
        ({"udp": Way(why="no answer")}, 6),
        ({"busy": True, "may_join": None}, 6),
        ({"may_join": None}, 0),
        ({"clock_ahead_s": 61}, 1),
        ({"clock_ahead_s": -60}, 0),
        ({"tcp": Way(why="closed")}, 0),
    ],
)
def test_the_exit_code_says_whether_one_can_work(changes: dict[str, Any], code: int) -> None:
    assert seen(**changes).exit_code == code


def test_rollouts_an_hour_are_of_this_machine_or_of_the_run_s_workers_or_not_known() -> None:
    def text(tokens_per_s: float | None = None, **known: Any) -> str:
        reach = Reach("t", "r", may_join=True, udp=Way(True, 12.0), **known)
        outlook = judge(Outside(reach), EngineConfig(), CPU, 1, tokens_per_s)
        return "\n".join(sentences(outlook))

    workers: dict[str, Any] = {
        "workers": 3,
        "worker_rollouts_per_hour": 360.0,
        "rollout_tokens": 50.0,
    }
    theirs = text(**workers)
    assert (
        "about 360 an hour, of 50 tokens each, if this machine is as fast as the 3 workers"
        in theirs
    )
    assert "Up: at most 27.6 MB a day" in theirs  # 360 * 24 * 50 tokens of 64 bytes
    own = text(100.0, **workers)
    assert "about 7,200 an hour at the 100 tokens/s of the last work here, of 50 tokens each" in own
    nobody = text(workers=0)
    assert "not known, as nobody works for the run now" in nobody


def test_what_is_not_known_is_said_to_be_unknown_and_what_is_known_is_multiplied() -> None:
    text = "\n".join(sentences(seen()))
    assert "Rollouts an hour: not known, as the trainer does not say" in text
    assert "240.0 MB a day, for 10.0 versions an hour of 1.0 MB each" in text
    assert "To begin: 10.0 MB to fetch, 5 s at this speed." in text
    fewer = "\n".join(sentences(seen(versions_per_hour=None)))
    assert "Down, a day: not known, as the run has published too few versions." in fewer
