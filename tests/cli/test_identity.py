import json
import stat
from pathlib import Path

import pytest

from primerl.crypto.keys import KeyFileError, SecretKey
from primerl.node.app.daemon import load_key
from primerl.node.errors import UsageError
from primerl.protocol.retirement import read_retirement, retire

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
