import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from primerl.crypto.keys import NODE_ID_BYTES, SIGNATURE_BYTES, KeyFileError, SecretKey, verify

KEY = SecretKey.from_seed(bytes(range(32)))

# RFC 8032, section 7.1: seed, public key, message, signature.
RFC_8032 = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
        "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
        "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
]
ORDER = 2**252 + 27742317777372353535851937790883648493


@pytest.mark.parametrize(("seed", "public", "message", "signature"), RFC_8032)
def test_signatures_are_those_of_rfc_8032(
    seed: str, public: str, message: str, signature: str
) -> None:
    key = SecretKey.from_seed(bytes.fromhex(seed))
    assert key.node_id.hex() == public
    assert key.sign(bytes.fromhex(message)).hex() == signature
    assert verify(key.node_id, bytes.fromhex(signature), bytes.fromhex(message))


@given(st.binary(max_size=100), st.integers(0, 8 * SIGNATURE_BYTES - 1))
def test_a_signature_with_any_bit_flipped_is_refused(message: bytes, bit: int) -> None:
    signature = bytearray(KEY.sign(message))
    signature[bit // 8] ^= 1 << bit % 8
    assert not verify(KEY.node_id, bytes(signature), message)


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_a_signature_is_for_one_message(signed: bytes, said: bytes) -> None:
    assert verify(KEY.node_id, KEY.sign(signed), said) == (signed == said)


def test_a_signature_has_one_form_only() -> None:
    # S and S + L satisfy the same equation; a second valid form would be a second digest.
    signature = KEY.sign(b"message")
    other = int.from_bytes(signature[32:], "little") + ORDER
    assert not verify(KEY.node_id, signature[:32] + other.to_bytes(32, "little"), b"message")


@given(st.binary(max_size=80), st.binary(max_size=80))
def test_nonsense_for_a_key_or_a_signature_is_no_signature(node: bytes, signature: bytes) -> None:
    if len(node) == NODE_ID_BYTES and len(signature) == SIGNATURE_BYTES:
        return
    assert not verify(node, signature, b"message")


def test_no_two_generated_keys_are_alike() -> None:
    assert len({SecretKey.generate().node_id for _ in range(8)}) == 8


def test_a_key_comes_back_from_its_seed_and_from_its_file(tmp_path: Path) -> None:
    KEY.save(tmp_path / "key.pem")
    for key in (SecretKey.load(tmp_path / "key.pem"), SecretKey.from_seed(KEY.seed())):
        assert key.node_id == KEY.node_id
        assert key.seed() == KEY.seed()


def test_a_key_file_is_for_its_owner_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        KEY.save(tmp_path / "new" / "key.pem")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new" / "key.pem").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o644, 0o777])
def test_a_key_file_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key.pem"
    KEY.save(path)
    path.chmod(mode)
    with pytest.raises(KeyFileError, match="chmod 600"):
        SecretKey.load(path)


def test_a_key_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    KEY.save(path)
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        SecretKey.generate().save(path)
    assert path.read_bytes() == before


def test_a_passphrase_is_needed_and_must_be_right(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    KEY.save(path, "correct horse")
    assert SecretKey.load(path, "correct horse").node_id == KEY.node_id
    assert b"ENCRYPTED" in path.read_bytes()
    for wrong in (None, "wrong"):
        with pytest.raises(KeyFileError, match=r"key\.pem"):
            SecretKey.load(path, wrong)


def test_a_passphrase_for_an_open_key_file_is_an_error_not_a_silence(tmp_path: Path) -> None:
    KEY.save(tmp_path / "key.pem")
    with pytest.raises(KeyFileError):
        SecretKey.load(tmp_path / "key.pem", "unneeded")


def test_an_absent_key_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="primerl-node init"):
        SecretKey.load(tmp_path / "key.pem")


@pytest.mark.parametrize("content", [b"", b"nonsense", b"-----BEGIN PRIVATE KEY-----\nAAAA\n"])
def test_a_malformed_key_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key.pem"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(KeyFileError, match=r"cannot open|holds no key: put your copy"):
        SecretKey.load(path)


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    path.write_bytes(
        X25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    path.chmod(0o600)
    with pytest.raises(KeyFileError, match="no Ed25519 key"):
        SecretKey.load(path)


def test_a_secret_key_never_shows_its_secret() -> None:
    for shown in (repr(KEY), str(KEY), f"{KEY}", f"{[KEY]}"):
        assert KEY.node_id[:5].hex() in shown
        assert KEY.seed().hex() not in shown
        assert KEY.seed()[:4].hex() not in shown
        assert repr(KEY.seed()) not in shown
