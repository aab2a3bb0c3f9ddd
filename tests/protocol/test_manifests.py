from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import protocol_cases

from primerl.crypto.hashing import digest
from primerl.protocol.errors import LocalProtocolError, Reason, RemoteProtocolError
from primerl.protocol.manifests import (
    FileRef,
    PeerRecord,
    PolicyHead,
    PolicyManifest,
    RunManifest,
    check_sizes,
    encode,
    run_id,
)
from primerl.protocol.session import decode
from primerl.protocol.version import MAX_CHUNK, MAX_GOSSIP, MAX_MANIFEST


def replaced(document: msgspec.Struct, path: str, value: object) -> bytes:
    """The bytes of `document` with the field at a dotted path exchanged."""
    first, _, rest = path.partition(".")
    if rest.startswith("0."):  # of a tuple's first
        one, *others = getattr(document, first)
        inner = (msgspec.Raw(replaced(one, rest[2:], value)), *others)
        return msgspec.msgpack.encode(msgspec.structs.replace(document, **{first: inner}))
    inner = msgspec.Raw(replaced(getattr(document, first), rest, value)) if rest else value
    return msgspec.msgpack.encode(msgspec.structs.replace(document, **{first: inner}))


def test_the_run_id_is_the_digest_of_the_manifests_bytes() -> None:
    assert (
        run_id(encode(protocol_cases.MANIFEST))
        == digest(encode(protocol_cases.MANIFEST))
        == protocol_cases.RUN
    )
    assert decode(encode(protocol_cases.MANIFEST), RunManifest) == protocol_cases.MANIFEST


ANOTHER: list[tuple[str, object]] = [
    ("name", "demo2"),
    ("created", 1),
    ("software", "0.1.1"),
    ("trainer", protocol_cases.STRANGER.node_id),
    ("model.name", "other"),
    ("model.files", ()),
    ("model.base_state", digest(b"other")),
    ("model.vocab_size", 513),
    ("model.stop_token_ids", (1,)),
    ("environments.0.name", "other"),
    ("environments.0.id", "other"),
    ("environments.0.config", b"{}"),
    ("environments.0.seed", 8),
    ("environments.0.version", "verifiers 0.4.1"),
    ("environments.0.sampling.temperature", 0.9),
    ("environments.0.sampling.max_tokens", 63),
    ("limits.max_off_policy_steps", 3),
    ("environments.0.group_size", 7),
    ("environments.0.max_turns", 2),
    ("limits.max_model_len", 255),
    ("proofs.dtype", "float32"),
    ("proofs.reject.fingerprint", 0.2),
    ("proofs.reject.sampling", 0.2),
    ("proofs.reject.sampling_max", 0.2),
    ("proofs.reject.logprob", 0.2),
    ("proofs.reject.logprob_max", 0.2),
    ("proofs.reject.other_policy", 0.2),
    ("proofs.suspect.fingerprint", 0.2),
    ("proofs.suspect.sampling", 0.2),
    ("proofs.suspect.sampling_max", 0.2),
    ("proofs.suspect.logprob", 0.2),
    ("proofs.suspect.logprob_max", 0.2),
    ("proofs.suspect.other_policy", 0.2),
    ("proofs.other_scale", 0.25),
    ("proofs.audit_rate", 0.5),
    ("proofs.false_bans", 0.5),
    ("proofs.honest_rollouts", 1),
    ("proofs.honest_tokens", 1),
    ("proofs.source", "other"),
    ("max_steps", 41),
    ("nonce", digest(b"other")),
    ("adapters.rank", 8),
    ("adapters.alpha", 16.0),
    ("adapters.target_modules", ("q_proj",)),
    ("adapters.base.digest", digest(b"other")),
    ("adapters.base.size", 6),
    ("routes.layers", 2),
    ("routes.experts", 8),
    ("routes.top_k", 1),
]
"""Fields of a run manifest, and another value of each."""


def test_another_manifest_is_another_run() -> None:
    run = run_id(encode(protocol_cases.ADAPTED))
    for path, value in ANOTHER:
        changed = replaced(protocol_cases.ADAPTED, path, value)
        decode(changed, RunManifest)
        assert run_id(changed) != run, path


def paths(fields: dict[str, Any]) -> Iterator[str]:
    """The dotted names of all leaves."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in paths(value))
        elif name == "environments":
            yield from (f"{name}.0.{inner}" for inner in paths(value[0]))
        else:
            yield name


def test_every_field_of_the_run_manifest_was_changed_above() -> None:
    changed = {path for path, _ in ANOTHER}
    fields = msgspec.to_builtins(protocol_cases.ADAPTED, builtin_types=(bytes,))
    assert changed == set(paths(fields)) - {"proofs.fingerprint"}  # which has one value


def test_a_run_with_a_fingerprint_that_is_not_known_is_malformed() -> None:
    with protocol_cases.refuses(Reason.MALFORMED):
        decode(replaced(protocol_cases.ADAPTED, "proofs.fingerprint", "other"), RunManifest)


TRAVERSAL = ["../x", "..", ".", "", "a/b", "/etc/passwd", "a\\b", "C:x", ".hidden", "-rf", "_x"]
ODD = [
    "a\0b",
    "a b",
    "a\n",
    "\na",
    "a\r\n",
    "a\u2215b",
    "\u00e9",
    "a" * 129,
    "~",
    "%2e%2e",
    "a:b",
]


def test_a_file_name_that_could_leave_its_directory_is_refused() -> None:
    for name in (*TRAVERSAL, *ODD):
        with protocol_cases.refuses(Reason.MALFORMED, case=ascii(name)):
            decode(encode(FileRef(name, protocol_cases.CHUNK)), FileRef)


@pytest.mark.parametrize(
    "name", ["config.json", "a", "tokenizer_config.json", "x..y", "A-1", "a" * 128]
)
def test_a_plain_file_name_is_taken(name: str) -> None:
    assert decode(encode(FileRef(name, protocol_cases.CHUNK)), FileRef).name == name


@given(st.text(max_size=20))
def test_a_file_name_that_is_taken_is_one_path_component(name: str) -> None:
    try:
        taken = decode(encode(FileRef(name, protocol_cases.CHUNK)), FileRef).name
    except RemoteProtocolError:
        return
    assert taken.isascii()
    assert taken.isprintable()
    assert not set(taken) & set("/\\: ")
    assert not taken.startswith(".")


BEYOND: list[tuple[str, object]] = [
    ("model.files", (FileRef("a", protocol_cases.CHUNK),) * 65),
    ("model.vocab_size", 0),
    ("model.vocab_size", 2**24 + 1),
    ("model.stop_token_ids", (1,) * 65),
    ("model.base_state", bytes(31)),
    ("environments.0.config", bytes(64 * 1024 + 1)),
    ("environments.0.id", "x" * 257),
    ("environments.0.name", "x" * 257),
    ("environments", ()),
    ("environments", protocol_cases.MANIFEST.environments * 65),
    ("environments.0.sampling.temperature", -0.1),
    ("environments.0.sampling.temperature", 2.1),
    ("environments.0.sampling.max_tokens", 0),
    ("environments.0.sampling.top_p", 0.0),
    ("environments.0.sampling.top_p", 1.1),
    ("environments.0.sampling.top_k", -1),
    ("environments.0.sampling.stop", ("",)),
    ("environments.0.sampling.stop", ("a" * 65,)),
    ("environments.0.sampling.stop", ("a",) * 9),
    ("limits.max_off_policy_steps", -1),
    ("environments.0.group_size", 0),
    ("environments.0.group_size", 4097),
    ("environments.0.max_turns", 0),
    ("limits.max_model_len", 1),
    ("trainer", bytes(33)),
    ("created", -1),
    ("created", 2**53 + 1),
    ("max_steps", 0),
    ("nonce", b""),
    ("name", "x" * 257),
    ("adapters.rank", 0),
    ("adapters.rank", 10**9),
    ("adapters.rank", -1),
    ("adapters.alpha", 0.0),
    ("adapters.alpha", float("nan")),
    ("adapters.alpha", float("inf")),
    ("adapters.target_modules", ()),
    ("adapters.target_modules", ("q_proj",) * 65),
    ("adapters.target_modules", ("x" * 257,)),
    ("adapters.base.size", 2**40),
    ("adapters.base.digest", b""),
]
"""Fields of a run manifest, and values beyond their limits."""


def test_a_run_manifest_has_limits() -> None:
    for path, value in BEYOND:
        with protocol_cases.refuses(Reason.MALFORMED, case=(path, value)):
            decode(replaced(protocol_cases.ADAPTED, path, value), RunManifest)


SNAPSHOT = protocol_cases.POLICY_MANIFEST.artifacts[0]
TENSOR = protocol_cases.POLICY_MANIFEST.tensors[0]


def with_artifact(**changes: object) -> bytes:
    wrong = msgspec.structs.replace(SNAPSHOT, **changes)
    return encode(msgspec.structs.replace(protocol_cases.POLICY_MANIFEST, artifacts=(wrong,)))


def with_tensor(**changes: object) -> bytes:
    wrong = msgspec.structs.replace(TENSOR, **changes)
    return encode(msgspec.structs.replace(protocol_cases.POLICY_MANIFEST, tensors=(wrong,)))


@pytest.mark.parametrize(
    "document",
    [
        with_artifact(kind="patch"),
        with_artifact(base_version=-2),
        with_artifact(base_state=b""),
        with_artifact(size=-1),
        with_artifact(size=2**48 + 1),
        with_artifact(codec="x" * 257),
        with_artifact(chunks=(msgspec.structs.replace(protocol_cases.CHUNK, size=MAX_CHUNK + 1),)),
        with_artifact(chunks=(msgspec.structs.replace(protocol_cases.CHUNK, size=0),)),
        with_artifact(chunks=(msgspec.structs.replace(protocol_cases.CHUNK, digest=bytes(16)),)),
        with_tensor(name="x" * 257),
        with_tensor(dtype="F" * 9),
        with_tensor(shape=(1,) * 9),
        with_tensor(shape=(-1,)),
        with_tensor(shape=(2**40 + 1,)),
        with_tensor(digest=bytes(33)),
        encode(msgspec.structs.replace(protocol_cases.POLICY_MANIFEST, artifacts=())),
        encode(msgspec.structs.replace(protocol_cases.POLICY_MANIFEST, artifacts=(SNAPSHOT,) * 17)),
        encode(msgspec.structs.replace(protocol_cases.POLICY_MANIFEST, version=-1)),
    ],
)
def test_a_policy_manifest_has_limits(document: bytes) -> None:
    with protocol_cases.refuses(Reason.MALFORMED):
        decode(document, PolicyManifest)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("term", -1),
        ("version", 2**53 + 1),
        ("previous", b""),
        ("manifest_size", 0),
        ("manifest_size", MAX_MANIFEST + 1),
        ("expires", -1),
    ],
)
def test_a_head_has_limits(field: str, value: object) -> None:
    assert decode(encode(protocol_cases.head(1)), PolicyHead) == protocol_cases.head(1)
    with protocol_cases.refuses(Reason.MALFORMED):
        decode(replaced(protocol_cases.head(1), field, value), PolicyHead)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("role", "root"),
        ("addresses", ("x",) * 17),
        ("addresses", ("x" * 257,)),
        ("discovery", ("x",) * 17),
        ("share_address", 1),
        ("node", bytes(31)),
        ("name", "x" * 33),
        ("name", 1),
    ],
)
def test_a_peer_record_has_limits(field: str, value: object) -> None:
    with protocol_cases.refuses(Reason.MALFORMED):
        decode(replaced(protocol_cases.RECORD, field, value), PeerRecord)


def test_we_never_publish_a_document_that_peers_refuse() -> None:
    assert check_sizes(bytes(MAX_GOSSIP), MAX_GOSSIP) == bytes(MAX_GOSSIP)
    with pytest.raises(LocalProtocolError, match="4097"):
        check_sizes(bytes(MAX_GOSSIP + 1), MAX_GOSSIP)
