"""Nodes of another wire version, and nodes whose clock is off, are told so, both ways round."""

import base64
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from support.hostile import HostileTrainer, Rogue
from support.protocol_cases import head
from support.swarm import Swarm
from support.waiting import until

from primerl import __version__
from primerl.node.app.peer_node import newer_release
from primerl.node.errors import NodeError, StorageError, TicketError, UsageError
from primerl.node.p2p.rpc import Refused, receive_reply
from primerl.node.p2p.transport import Stream
from primerl.node.storage.ledger import Ledger, LedgerView
from primerl.protocol import tickets
from primerl.protocol.envelope import Purpose, seal
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.manifests import Ticket
from primerl.protocol.messages import Hello, Welcome
from primerl.protocol.session import HEADER_BYTES
from primerl.protocol.version import ALPN_CONTROL, CLOCK_SKEW_S, WIRE_VERSION

pytestmark = pytest.mark.asyncio(loop_scope="session")


def framed(fields: Mapping[str, object]) -> bytes:
    """A message as another version may say it."""
    payload = msgspec.msgpack.encode(fields)
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


async def refused_raw(rogue: Rogue, fields: Mapping[str, object]) -> Refused:
    """What a trainer answers to a message of ours that is not one of this version."""
    stream = await (await rogue.connect(ALPN_CONTROL)).open_stream()
    await stream.write(framed(fields))
    await stream.finish()
    with pytest.raises(Refused) as caught:
        await receive_reply(stream, Welcome)
    return caught.value


@pytest.mark.parametrize(
    ("hello", "line"),
    [
        (
            {"wire_version": 1, "role": "inference", "software": "0", "ticket": b"", "record": b""},
            "your node 1: upgrade your node to it or a later one",
        ),
        (
            {"wire_version": 4, "oldest_wire_version": 3, "role": "conductor", "ticket": None},
            "your node 3 to 4: ask for the trainer to be upgraded",
        ),
        ({"wire_version": 3}, "your node 3: ask for the trainer to be upgraded"),
    ],
)
async def test_a_hello_of_another_version_is_refused_with_both_ranges_whatever_its_fields(
    siege: Swarm, hello: Mapping[str, object], line: str
) -> None:
    async with Rogue(siege, f"of version {len(hello)}") as rogue:
        refusal = await refused_raw(rogue, {"type": "Hello", **hello})
    assert refusal.reason == Reason.WRONG_VERSION
    assert f"this trainer (primerl-node {__version__}) speaks wire 2, {line}" in refusal.detail


@pytest.mark.parametrize("more", [{}, {"wire_version": 3, "oldest_wire_version": 2}])
async def test_a_hello_that_speaks_our_version_and_lacks_a_field_is_malformed(
    siege: Swarm, more: Mapping[str, object]
) -> None:
    async with Rogue(siege, f"embroiderer {len(more)}") as rogue:
        fields = {"type": "Hello", "wire_version": WIRE_VERSION, "more": 1, **more}
        assert (await refused_raw(rogue, fields)).reason == Reason.MALFORMED


async def test_a_hello_of_the_next_version_is_admitted_in_ours_whatever_fields_it_adds(
    siege: Swarm,
) -> None:
    async with Rogue(siege, "novelty") as rogue:
        fields = msgspec.to_builtins(rogue.hello_message(), builtin_types=(bytes,))
        later = {"wire_version": WIRE_VERSION + 1, "oldest_wire_version": WIRE_VERSION, "song": 1}
        stream = await (await rogue.connect(ALPN_CONTROL)).open_stream()
        await stream.write(framed({**fields, **later}))
        await stream.finish()
        assert (await receive_reply(stream, Welcome)).wire_version == WIRE_VERSION


@pytest.mark.parametrize("off", [-7200, -CLOCK_SKEW_S - 30, CLOCK_SKEW_S + 30, 86400])
async def test_a_node_whose_clock_is_off_learns_by_how_much(siege: Swarm, off: int) -> None:
    async with Rogue(siege, f"late riser {off}") as rogue:
        hello = Hello(
            WIRE_VERSION,
            "inference",
            "rogue",
            tickets.sealed_bytes(siege.ticket),
            # what it signs by its own clock has expired by ours, or not begun
            seal(rogue.key, Purpose.PEER, rogue.run, head(0), expires=int(time.time()) + off),
            unix_time=int(time.time()) + off,
        )
        with pytest.raises(Refused) as caught:
            await rogue.ask(hello, Welcome)
        assert caught.value.reason == Reason.WRONG_CLOCK
        # the trainer's operator sees it refused, until it comes with a right clock
        row = await siege.until_row_of(rogue.key.node_id, lambda row: row["refused"] != "", 20.0)
        assert row["refused"].startswith("wrong_clock: ")
        assert not row["starting"]
        await rogue.hello()
        await siege.until_row_of(rogue.key.node_id, lambda row: row["refused"] == "", 20.0)
    told = int(caught.value.detail.split(" s ")[0].removeprefix("your clock is "))
    assert abs(told - abs(off)) <= 10
    assert ("ahead of" if off > 0 else "behind") in caught.value.detail


# -- a worker at a trainer of another version -----------------------------------------------------------


class TrainerFromElsewhere(HostileTrainer):
    """Answers each hello with these bytes."""

    answer: Mapping[str, object]

    async def __aenter__(self) -> "TrainerFromElsewhere":
        await super().__aenter__()
        return self

    async def _answer(self, peer: bytes, stream: Stream) -> None:
        await stream.read_exact(HEADER_BYTES)
        await stream.write(framed(self.answer))
        await stream.finish()


NEW_WELCOME = {
    "type": "Welcome",
    "manifest": b"",
    "software": "9.0.0",
    "wire_version": 9,
    "banquet": [1, 2],
}
NEW_REFUSAL = {"type": "Refusal", "reason": "wrong_hat", "detail": "hats are worn", "colour": "red"}
OLD_WELCOME = {"type": "Welcome", "manifest": b"", "software": "0.0.1"}
LATE_WELCOME = {**OLD_WELCOME, "wire_version": WIRE_VERSION, "unix_time": 1_700_000_000}


@pytest.mark.parametrize(
    ("welcome", "error", "words"),
    [
        (
            NEW_WELCOME,
            TicketError,
            "node 9.0.0. speaks wire 9, this node 2: upgrade this node to it",
        ),
        (OLD_WELCOME, TicketError, "node 0.0.1. speaks wire 1, this node 2: ask for the trainer"),
        (NEW_REFUSAL, TicketError, "wrong_hat: hats are worn"),
        (
            LATE_WELCOME,
            NodeError,
            "the clock of this machine .* is [0-9]+ s ahead of the trainer's",
        ),
    ],
)
async def test_a_worker_at_a_trainer_of_another_version_leaves_and_says_why(
    tmp_path: Path,
    model_dir: Path,
    welcome: Mapping[str, object],
    error: type[NodeError],
    words: str,
) -> None:
    async with Swarm(tmp_path, model_dir) as swarm, TrainerFromElsewhere(swarm) as trainer:
        trainer.answer = welcome
        with pytest.raises(error, match=words):
            await swarm.add_worker("w1").ended(20.0)


async def test_a_ticket_of_another_version_says_which_release_to_install(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir) as swarm:
        later = msgspec.msgpack.encode([WIRE_VERSION + 1, "ticket", {}])
        swarm.ticket = tickets.WHOLE + base64.urlsafe_b64encode(later).rstrip(b"=").decode()
        with pytest.raises(TicketError, match="this ticket is of wire version 3, this node"):
            await swarm.add_worker("w1").ended(20.0)


# -- releases -------------------------------------------------------------------------------------------


async def test_a_worker_says_once_that_its_trainer_runs_a_newer_release_and_goes_on(
    tmp_path: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with Swarm(tmp_path, model_dir) as swarm, HostileTrainer(swarm) as trainer:
        trainer.software = "999.1"
        worker = swarm.add_worker("w1")
        line = f"the trainer runs primerl-node 999.1, this node {__version__}: upgrade it when it suits"
        await until(lambda: "joined run" in caplog.text)
        (warning,) = (await worker.status())["warnings"]
        assert warning.startswith(line)
        assert sum(line in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("software", "newer"),
    [
        ("0.2.0", True),
        ("0.1.1", True),
        ("0.10.0", True),
        ("0.1.0", False),
        ("0.1.0rc1", False),
        ("0.0.9", False),
        ("hostile", False),
        ("", False),
        ("1.0\x1b[2J", False),
        ("9" * 256, True),
        ("1." * 127, False),
    ],
)
async def test_only_a_higher_release_is_newer(software: str, newer: bool) -> None:
    assert bool(newer_release(software, "0.1.0")) == newer


# -- what is kept on a disk -----------------------------------------------------------------------------


async def test_a_ledger_of_another_wire_version_is_no_forgery_but_says_which_wrote_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger.db"
    ledger = Ledger(path, fsync=False)
    ledger.set("format", (1).to_bytes(2, "big"))
    ledger.close()
    for open_it in (Ledger, LedgerView):
        with pytest.raises(StorageError, match=r"written by another version .*format 1, this one"):
            open_it(path)


# -- clocks ---------------------------------------------------------------------------------------------


def ticket_of(run: bytes, trainer: bytes, issued: int) -> Ticket:
    """A ticket for a day."""
    return Ticket(run, trainer, ("127.0.0.1:1",), (), issued, issued + 86400)


async def test_a_ticket_from_the_future_names_the_clock(siege: Swarm) -> None:
    now = 1_800_000_000
    text = tickets.issue(siege.trainer.key, ticket_of(b"r" * 32, siege.trainer.node_id, now))
    assert tickets.read(text, now=now - CLOCK_SKEW_S)
    with pytest.raises(RemoteProtocolError) as caught:
        tickets.read(text, now=now - 3600)
    assert caught.value.reason == Reason.WRONG_CLOCK
    assert "3600 s in the future by our clock (2027-01-15T07:00:00Z)" in caught.value.detail


async def test_a_trainer_whose_clock_lies_before_its_newest_version_does_not_resume(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=50) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        await swarm.wait_step(1)
        await swarm.stop_trainer()
        await swarm.stop_worker("w1")
        made = max(head.created for head in swarm.heads().values())
        real = time.time
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: real() - 3600)
            with pytest.raises(UsageError, match="set the clock, then start again"):
                await swarm.start_trainer(resume=True)
        assert real() - made < 600  # nothing was signed with the wrong clock
        await swarm.start_trainer(resume=True)
