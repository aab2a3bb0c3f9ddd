import json
import stat
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import msgspec
import pytest
from support.bare_node import serving
from support.protocol_cases import TICKET

from primerl.crypto.keys import KeyFileError, SecretKey
from primerl.node.app.daemon import load_key
from primerl.node.errors import UsageError
from primerl.node.p2p.iroh import IrohTransport
from primerl.node.p2p.rpc import receive, send
from primerl.node.p2p.transport import Stream
from primerl.node.storage.ledger import OWNER, Ledger, LedgerView
from primerl.protocol import tickets
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.messages import Accepted, RetireKey
from primerl.protocol.retirement import read_retirement, retire
from primerl.protocol.version import ALPN_CONTROL

from .conftest import Ask, Cli, Serve


def test_init_makes_a_key_that_only_its_owner_reads_and_never_replaces_it(
    cli: Cli, home: Path
) -> None:
    ran = cli("init", "--data-dir", "d")
    key = home / "d" / "key.pem"
    before = key.read_bytes()
    assert ran.code == 0
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert SecretKey.load(key).node_id.hex() in ran.out
    cli("init", "--data-dir", "d").refused(4, "exists already")
    assert key.read_bytes() == before


def test_a_passphrase_locks_the_key(cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIMERL_PASSPHRASE", "open sesame")
    assert cli("init", "--passphrase").code == 0
    assert cli("id").code == 0
    with pytest.raises(KeyFileError):
        SecretKey.load(home / ".primerl" / "key.pem")
    monkeypatch.setenv("PRIMERL_PASSPHRASE", "wrong")
    cli("id").refused(5)


def test_id_shows_one_key_in_three_spellings(cli: Cli, home: Path) -> None:
    cli("id").refused(5, "primerl-node init")
    cli("id", "--data-dir", "w").refused(5, "`primerl-node init --data-dir w` makes one")
    SecretKey.from_seed(bytes(32)).save(home / ".primerl" / "key.pem")
    shown = json.loads(cli("id", "--json").out)
    # The public key of RFC 8032's algorithm for 32 zero bytes, and its well-known libp2p peer id.
    assert shown["id"] == "3b6a27bcceb6a42d62a3a8d02a6f0d73653215771de243a63ac048a18b59da29"
    assert shown["short"] == "3b6a27bcce"
    assert shown["libp2p"] == "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    assert shown["libp2p"] in cli("id").out


@pytest.mark.parametrize("command", ["id", "init"])
def test_a_key_or_a_directory_that_cannot_be_used_is_named(
    cli: Cli, home: Path, command: str
) -> None:
    (home / "a" / "key.pem").mkdir(parents=True)
    (home / "b").mkdir()
    (home / "b" / "key.pem").symlink_to("nowhere")
    (home / "c").touch()
    for place in ("a", "b", "c"):
        ran = cli(command, "--data-dir", str(home / place))
        ran.refused(4 if command == "init" and place in "ab" else 5, str(home / place))


def test_a_retired_key_is_stated_once_and_no_node_starts_with_it_again(
    cli: Cli, home: Path
) -> None:
    cli("init", "-d", "d")
    key = SecretKey.load(home / "d" / "key.pem")
    cli("retire", "-d", "d").refused(2, "--yes")
    assert not (home / "d" / "key.retired").exists()
    ran = cli("retire", "-d", "d", "--yes")
    assert ran.code == 6
    assert "no trainer is known here" in ran.err
    assert "`primerl-node retire --statement`" in ran.err
    stated = (home / "d" / "key.retired").read_bytes()
    assert read_retirement(stated).node == key.node_id
    assert cli("retire", "-d", "d", "--yes").code == 6
    assert (home / "d" / "key.retired").read_bytes() == stated
    with pytest.raises(UsageError, match="was retired"):
        load_key(home / "d")


async def test_a_trainers_operator_hands_in_the_statement_of_an_owner_without_a_network(
    ask: Ask, serve: Serve, home: Path
) -> None:
    node = str(await serve(retire={"node": "1f0c2a" + 58 * "0"}))
    (home / "key.retired").write_bytes(retire(SecretKey.generate(), 1_800_000_000))
    ran = await ask("retire", "--statement", "key.retired", "-d", node)
    assert ran.out == "retired 1f0c2a0000\n"
    (home / "wrong").write_bytes(b"no statement")
    (await ask("retire", "--statement", "wrong", "-d", node)).refused(2, "no retirement of a key")
    (await ask("retire", "--statement", "missing", "-d", node)).refused(5, "missing")
    (await ask("retire", "--statement", ".", "-d", node)).refused(5, "directory")


# -- copies of a key, and a new one ----------------------------------------------------------------


def test_an_exported_key_is_encrypted_private_and_restores_the_node(
    cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("init", "-d", "a")
    cli("key", "export", "copy.pem", "-d", "a").refused(2, "PRIMERL_PASSPHRASE")
    assert not (home / "copy.pem").exists()
    monkeypatch.setenv("PRIMERL_PASSPHRASE", "open sesame")
    assert cli("key", "export", "copy.pem", "-d", "a").code == 0
    assert stat.S_IMODE((home / "copy.pem").stat().st_mode) == 0o600
    assert b"ENCRYPTED" in (home / "copy.pem").read_bytes()
    before = (home / "copy.pem").read_bytes()
    cli("key", "export", "copy.pem", "-d", "a").refused(4, "exists already")
    assert (home / "copy.pem").read_bytes() == before
    assert cli("key", "import", "copy.pem", "-d", "b").code == 0
    key = SecretKey.load(home / "a" / "key.pem").node_id
    assert SecretKey.load(home / "b" / "key.pem").node_id == key
    assert stat.S_IMODE((home / "b" / "key.pem").stat().st_mode) == 0o600
    assert "already" in cli("key", "import", "copy.pem", "-d", "b").out
    assert cli("key", "import", "copy.pem", "-d", "c", "--passphrase").code == 0
    assert b"ENCRYPTED" in (home / "c" / "key.pem").read_bytes()


def test_an_import_replaces_no_other_key_and_brings_no_retired_one_back(
    cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("init", "-d", "a")
    cli("init", "-d", "b")
    monkeypatch.setenv("PRIMERL_PASSPHRASE", "open sesame")
    cli("key", "export", "copy.pem", "-d", "a")
    before = (home / "b" / "key.pem").read_bytes()
    cli("key", "import", "copy.pem", "-d", "b").refused(4, "holds another key")
    assert (home / "b" / "key.pem").read_bytes() == before
    (home / "nonsense").write_text("no key")
    (home / "nonsense").chmod(0o600)
    cli("key", "import", "nonsense", "-d", "c").refused(5, "holds no key")
    cli("key", "import", "missing", "-d", "c").refused(5, "missing")
    monkeypatch.setenv("PRIMERL_PASSPHRASE", "wrong")
    cli("key", "import", "copy.pem", "-d", "c").refused(5, "copy.pem")
    assert not (home / "c").exists()
    monkeypatch.setenv("PRIMERL_PASSPHRASE", "open sesame")
    assert cli("retire", "-d", "a", "--yes").code == 6
    (home / "a" / "key.pem").unlink()
    cli("key", "import", "copy.pem", "-d", "a").refused(2, "retired")


def test_a_rotation_without_trainers_changes_the_key_and_its_ledgers(cli: Cli, home: Path) -> None:
    cli("init", "-d", "d")
    old = SecretKey.load(home / "d" / "key.pem")
    with closing(Ledger(home / "d" / "runs" / "one" / "ledger.db")) as ledger:
        ledger.claim(old.node_id)
    cli("key", "rotate", "-d", "d").refused(2, "--yes")
    ran = cli("key", "rotate", "-d", "d", "--yes", "--json")
    assert ran.code == 0, ran.err
    answer, new = json.loads(ran.out), SecretKey.load(home / "d" / "key.pem").node_id
    assert (answer["previous"], answer["id"]) == (old.node_id.hex(), new.hex())
    statement = read_retirement(Path(answer["statement"]).read_bytes())
    assert (statement.node, statement.successor) == (old.node_id, new)
    with closing(LedgerView(home / "d" / "runs" / "one" / "ledger.db")) as view:
        assert view.get(OWNER) == new
    assert cli("id", "-d", "d").err == ""
    assert load_key(home / "d").node_id == new, "a node starts with it"


async def test_a_node_that_runs_a_trainer_and_a_retired_key_are_not_rotated(
    ask: Ask, serve: Serve, home: Path
) -> None:
    node = await serve()
    SecretKey.generate().save(node / "key.pem")
    (await ask("key", "rotate", "-d", str(node), "--yes")).refused(4, "stop")
    (home / "t").mkdir()
    (home / "t" / "ledger.db").touch()
    (await ask("key", "rotate", "-d", "t", "--yes")).refused(2, "trainer's")
    await ask("init", "-d", "r")
    await ask("retire", "-d", "r", "--yes")
    (await ask("key", "rotate", "-d", "r", "--yes")).refused(2, "was retired")


@asynccontextmanager
async def trainer(refusal: Reason | None) -> AsyncGenerator[tuple[str, list[bytes]]]:
    """Yield a ticket for a trainer that takes retirements, or refuses them, and those that it was sent."""
    key, sent = SecretKey.from_seed(bytes(31) + b"T"), list[bytes]()

    async def answer(peer: bytes, stream: Stream) -> None:
        sent.append((await receive(stream, RetireKey)).retirement)
        if refusal is not None:
            raise RemoteProtocolError(refusal, "no")
        await send(stream, Accepted())
        await stream.finish()

    end = IrohTransport(key, host="127.0.0.1", port=0, alpns=[ALPN_CONTROL])
    await end.start()
    now = int(time.time())
    ticket = msgspec.structs.replace(
        TICKET, trainer=key.node_id, addresses=end.addresses(), issued=now, expires=now + 60
    )
    async with serving(end, {ALPN_CONTROL: answer}):
        yield tickets.issue(key, ticket), sent


async def test_nothing_changes_while_no_trainer_takes_the_new_key_and_the_next_try_is_the_same(
    ask: Ask, home: Path
) -> None:
    await ask("init", "-d", "d")
    before = (home / "d" / "key.pem").read_bytes()
    async with trainer(Reason.BUSY) as (ticket, first):
        ran = await ask("key", "rotate", "-d", "d", "--yes", "--ticket", ticket)
        ran.refused(6, "nothing was changed", "busy")
    assert (home / "d" / "key.pem").read_bytes() == before
    async with trainer(None) as (ticket, second):
        ran = await ask("key", "rotate", "-d", "d", "--yes", "--ticket", ticket)
    assert ran.code == 0, ran.err
    assert first == second, "one statement, with one new key"
    assert SecretKey.load(home / "d" / "key.pem").node_id == read_retirement(first[0]).successor
    assert not (home / "d" / "key.next").exists()


async def test_a_rotation_may_be_forced_and_says_who_was_not_told(ask: Ask, home: Path) -> None:
    await ask("init", "-d", "d")
    async with trainer(Reason.NOT_FOUND) as (ticket, sent):
        ran = await ask("key", "rotate", "-d", "d", "--yes", "--force", "--ticket", ticket)
    ran.refused(6, "1 trainer(s) were not told", "`primerl-node retire --statement`")
    assert SecretKey.load(home / "d" / "key.pem").node_id == read_retirement(sent[0]).successor
