import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from primerl.cli.identity import base58
from primerl.crypto.keys import KeyFileError, SecretKey

from .conftest import Ran


def test_init_makes_a_key_that_only_its_owner_reads(cli: Callable[..., Ran], home: Path) -> None:
    ran = cli("init", "--data-dir", "d")
    key = home / "d" / "key.pem"
    assert ran.code == 0
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert SecretKey.load(key).node_id.hex() in ran.out


def test_init_never_replaces_a_key(cli: Callable[..., Ran], home: Path) -> None:
    cli("init")
    before = (home / ".primerl" / "key.pem").read_bytes()
    ran = cli("init")
    assert ran.code == 4
    assert ran.err.startswith("primerl-node: error: ")
    assert (home / ".primerl" / "key.pem").read_bytes() == before


def test_init_where_nothing_can_be_written_says_so(cli: Callable[..., Ran], home: Path) -> None:
    (home / "file").write_text("")
    ran = cli("init", "--data-dir", "file/below")
    assert ran.code == 5
    assert "cannot write" in ran.err


def test_a_passphrase_locks_the_key(
    cli: Callable[..., Ran], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIMERL_PASSPHRASE", "open sesame")
    assert cli("init", "--passphrase").code == 0
    assert cli("id").code == 0
    with pytest.raises(KeyFileError):
        SecretKey.load(home / ".primerl" / "key.pem")
    monkeypatch.setenv("PRIMERL_PASSPHRASE", "wrong")
    ran = cli("id")
    assert ran.code == 5
    assert ran.err.count("\n") == 1


def test_id_shows_one_key_in_three_spellings(cli: Callable[..., Ran], home: Path) -> None:
    SecretKey.from_seed(bytes(32)).save(home / ".primerl" / "key.pem")
    shown = json.loads(cli("id", "--json").out)
    # The public key of RFC 8032's algorithm for 32 zero bytes, and its well-known libp2p peer id.
    assert shown["id"] == "3b6a27bcceb6a42d62a3a8d02a6f0d73653215771de243a63ac048a18b59da29"
    assert shown["short"] == "3b6a27bcce"
    assert shown["libp2p"] == "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    assert shown["libp2p"] in cli("id").out


def test_id_without_a_key_says_what_to_do(cli: Callable[..., Ran]) -> None:
    ran = cli("id")
    assert ran.code == 5
    assert "primerl-node init" in ran.err


def test_base58_keeps_leading_zero_bytes() -> None:
    assert base58(b"\0\0\x01") == "112"
    assert base58(b"hello world") == "StV1DL6CwTryKyV"
