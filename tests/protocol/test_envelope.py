import msgspec
import pytest
from support.protocol_cases import NOW, OTHER_RUN, RUN, STRANGER, TRAINER, WORKER, head, refuses
from support.protocol_cases import sealed as sealed_for

from primerl.crypto.hashing import digest
from primerl.crypto.keys import verify
from primerl.protocol.envelope import ANYBODY, Envelope, Opened, Purpose, seal, unseal
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.manifests import PolicyHead, encode
from primerl.protocol.version import CLOCK_SKEW_S, OLDEST_WIRE_VERSION, WireRange

HEAD = head(3)
SEALED = seal(
    TRAINER,
    Purpose.HEAD,
    RUN,
    HEAD,
    recipient=WORKER.node_id,
    sequence=3,
    expires=NOW + 3600,
)


def opened(sealed: bytes, now: int = NOW) -> Opened[PolicyHead]:
    """Opened as a worker does: every expectation stated."""
    return unseal(
        sealed,
        Purpose.HEAD,
        PolicyHead,
        now=now,
        run=RUN,
        signer=TRAINER.node_id,
        recipient=WORKER.node_id,
    )


def opened_by_anybody(sealed: bytes) -> Opened[PolicyHead]:
    """Opened without expectations: only the signature stands between a forger and us."""
    return unseal(sealed, Purpose.HEAD, PolicyHead, now=NOW)


def forged(**changes: object) -> bytes:
    """SEALED with fields exchanged and the old signature."""
    envelope = msgspec.msgpack.decode(SEALED, type=Envelope)
    return msgspec.msgpack.encode(msgspec.structs.replace(envelope, **changes))


def test_what_was_sealed_is_opened() -> None:
    assert opened(SEALED) == Opened(TRAINER.node_id, 3, NOW + 3600, HEAD, encode(HEAD))
    assert opened_by_anybody(SEALED).body == HEAD


def test_bytes_already_encoded_are_sealed_as_they_are() -> None:
    sealed = seal(TRAINER, Purpose.HEAD, RUN, encode(HEAD), expires=NOW)
    assert sealed == seal(TRAINER, Purpose.HEAD, RUN, HEAD, expires=NOW)
    assert opened_by_anybody(sealed).payload == encode(HEAD)


def test_the_signature_covers_what_the_design_says() -> None:
    """The preimage written out once more: a change of it is a change of the wire version."""
    payload = encode(HEAD)
    preimage = (
        b"primerl envelope\x00"
        + (2).to_bytes(2, "big")
        + b"\x04head"
        + RUN
        + TRAINER.node_id
        + WORKER.node_id
        + (3).to_bytes(8, "big")
        + (NOW + 3600).to_bytes(8, "big")
        + len(payload).to_bytes(8, "big")
        + payload
    )
    signature = msgspec.msgpack.decode(SEALED, type=Envelope).signature
    assert verify(TRAINER.node_id, signature, preimage)
    next_version = preimage[:18] + b"\x03" + preimage[19:]
    assert not verify(TRAINER.node_id, signature, next_version)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"wire_version": 3}, Reason.WRONG_VERSION),
        ({"purpose": "lease"}, Reason.WRONG_PURPOSE),
        ({"run": OTHER_RUN}, Reason.WRONG_RUN),
        ({"signer": STRANGER.node_id}, Reason.WRONG_SIGNER),
        ({"recipient": STRANGER.node_id}, Reason.WRONG_RECIPIENT),
        ({"recipient": ANYBODY}, Reason.WRONG_RECIPIENT),
        ({"sequence": 4}, Reason.BAD_SIGNATURE),
        ({"expires": NOW + 3601}, Reason.BAD_SIGNATURE),
        ({"expires": NOW - 61}, Reason.EXPIRED),
        ({"payload": encode(head(4))}, Reason.BAD_SIGNATURE),
        ({"payload": b""}, Reason.BAD_SIGNATURE),
        ({"signature": bytes(64)}, Reason.BAD_SIGNATURE),
        ({"signature": TRAINER.sign(encode(HEAD))}, Reason.BAD_SIGNATURE),
    ],
)
def test_every_field_is_bound(changes: dict[str, object], reason: Reason) -> None:
    with refuses(reason):
        opened(forged(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"run": OTHER_RUN},
        {"signer": STRANGER.node_id},
        {"recipient": STRANGER.node_id},
        {"recipient": ANYBODY},
        {"sequence": 0},
        {"expires": 2**53},
        {"payload": encode(head(4))},
    ],
)
def test_a_field_that_is_not_compared_is_bound_by_the_signature(changes: dict[str, object]) -> None:
    with refuses(Reason.BAD_SIGNATURE):
        opened_by_anybody(forged(**changes))


def test_not_one_bit_of_an_envelope_may_change() -> None:
    for bit in range(8 * len(SEALED)):
        damaged = bytearray(SEALED)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RemoteProtocolError):
            opened(bytes(damaged))


def test_an_envelope_cut_anywhere_is_malformed() -> None:
    for size in range(len(SEALED)):
        with refuses(Reason.MALFORMED):
            opened(SEALED[:size])
    with refuses(Reason.MALFORMED):
        opened(SEALED + b"\0")


@pytest.mark.parametrize("signed_for", list(Purpose))
def test_bytes_signed_for_one_purpose_never_pass_for_another(signed_for: Purpose) -> None:
    sealed = seal(TRAINER, signed_for, RUN, HEAD, expires=NOW)
    envelope = msgspec.msgpack.decode(sealed, type=Envelope)
    for purpose in Purpose:
        relabelled = msgspec.msgpack.encode(
            msgspec.structs.replace(envelope, purpose=purpose.value)
        )
        if purpose == signed_for:
            assert unseal(relabelled, purpose, PolicyHead, now=NOW).body == HEAD
            continue
        with refuses(Reason.WRONG_PURPOSE):
            unseal(sealed, purpose, PolicyHead, now=NOW)
        with refuses(Reason.BAD_SIGNATURE):
            unseal(relabelled, purpose, PolicyHead, now=NOW)


@pytest.mark.parametrize("purpose", list(Purpose))
def test_nothing_is_replayed_into_another_run(purpose: Purpose) -> None:
    with refuses(Reason.WRONG_RUN):
        unseal(sealed_for(purpose), purpose, msgspec.Raw, now=NOW, run=OTHER_RUN)


def test_a_lease_of_one_node_is_no_lease_of_another() -> None:
    with refuses(Reason.WRONG_RECIPIENT):
        unseal(
            sealed_for(Purpose.LEASE),
            Purpose.LEASE,
            msgspec.Raw,
            now=NOW,
            recipient=STRANGER.node_id,
        )


@pytest.mark.parametrize("late", [0, 1, CLOCK_SKEW_S])
def test_honest_clocks_may_differ_by_the_skew(late: int) -> None:
    assert opened(SEALED, NOW + 3600 + late).body == HEAD


@pytest.mark.parametrize("late", [CLOCK_SKEW_S + 1, 299, 600, 10**9])
def test_beyond_the_skew_an_envelope_is_expired(late: int) -> None:
    with refuses(Reason.EXPIRED):
        opened(SEALED, NOW + 3600 + late)


def test_a_bad_signature_is_found_before_anything_of_the_payload_is_read() -> None:
    garbage = b"\xc1 not MessagePack"
    with refuses(Reason.BAD_SIGNATURE):
        opened(forged(payload=garbage))
    signed = seal(TRAINER, Purpose.HEAD, RUN, garbage, expires=NOW)
    with refuses(Reason.MALFORMED):
        opened_by_anybody(signed)


def test_a_signed_payload_of_another_kind_is_malformed() -> None:
    with refuses(Reason.MALFORMED):
        unseal(sealed_for(Purpose.PEER), Purpose.PEER, PolicyHead, now=NOW)


@pytest.mark.parametrize(
    "changes",
    [
        {"purpose": "x" * 33},
        {"wire_version": None},
        {"run": digest(b"")[:31]},
        {"signer": bytes(33)},
        {"recipient": b""},
        {"sequence": -1},
        {"sequence": 2**63},
        {"expires": -1},
        {"expires": 2**53 + 1},
        {"signature": bytes(63)},
        {"payload": "text"},
        {"sequence": 1.5},
        {"expires": None},
    ],
)
def test_a_field_beyond_its_limits_is_malformed(changes: dict[str, object]) -> None:
    with refuses(Reason.MALFORMED):
        opened(forged(**changes))


def test_an_envelope_has_nine_fields_and_no_tenth() -> None:
    fields = msgspec.msgpack.decode(SEALED)
    assert len(fields) == 9
    for wrong in ([*fields, b"more"], fields[:-1], []):
        with refuses(Reason.MALFORMED):
            opened(msgspec.msgpack.encode(wrong))


def of_version(version: int) -> list[bytes]:
    """Envelopes as that version may have them: what is signed cannot be told."""
    old = ["ticket", RUN, TRAINER.node_id, ANYBODY, 0, NOW, b"payload", bytes(64)]
    later: list[object] = [version, {"signature": bytes(64)}, [b"payload"], "more"]
    shapes = [old] if version == 1 else [[version, *old], later, [version]]
    return [msgspec.msgpack.encode(shape) for shape in shapes]


@pytest.mark.parametrize("version", [1, 3, 200])
def test_an_envelope_of_another_version_is_distinguished_from_a_damaged_one(version: int) -> None:
    for sealed in of_version(version):
        with pytest.raises(RemoteProtocolError) as caught:
            unseal(sealed, Purpose.TICKET, PolicyHead, now=NOW)
        assert caught.value.reason == Reason.WRONG_VERSION
        told = caught.value.detail
        assert f"ticket is of wire version {version}, this node" in told
        advice = "it is of an older release" if version == 1 else "upgrade this node"
        assert f"speaks 2: {advice}" in told


def test_documents_of_every_version_that_a_node_speaks_are_read_and_of_no_other() -> None:
    spoken = WireRange(2, 3)
    later = seal(TRAINER, Purpose.HEAD, RUN, HEAD, expires=NOW, version=3)
    for sealed in (SEALED, later):
        opened = unseal(sealed, Purpose.HEAD, PolicyHead, now=NOW, spoken=spoken)
        assert opened.body == HEAD
    with pytest.raises(
        RemoteProtocolError, match=r"is of wire version 3, .* speaks 2: upgrade this"
    ):
        unseal(later, Purpose.HEAD, PolicyHead, now=NOW, spoken=WireRange(2, 2))
    with pytest.raises(
        RemoteProtocolError, match=r"is of wire version 2, .* speaks 3 to 4: it is of"
    ):
        unseal(SEALED, Purpose.HEAD, PolicyHead, now=NOW, spoken=WireRange(3, 4))


@pytest.mark.parametrize(
    ("ours", "theirs", "common"),
    [
        ((2, 2), (2, 2), 2),
        ((2, 3), (2, 2), 2),
        ((2, 2), (2, 3), 2),
        ((2, 4), (1, 3), 3),
        ((3, 4), (1, 2), None),
        ((1, 2), (3, 4), None),
        ((2, 3), (3, 2), None),
    ],
)
def test_two_nodes_speak_the_highest_version_that_both_know(
    ours: tuple[int, int], theirs: tuple[int, int], common: int | None
) -> None:
    assert WireRange(*ours).common(WireRange(*theirs)) == common


def test_what_is_sealed_can_be_read_by_the_oldest_nodes_that_are_spoken_with() -> None:
    assert msgspec.msgpack.decode(SEALED, type=Envelope).wire_version == OLDEST_WIRE_VERSION


def test_a_version_is_part_of_what_is_signed() -> None:
    envelope = msgspec.msgpack.decode(SEALED, type=Envelope)
    assert envelope.wire_version == 2
    later = forged(wire_version=3)
    with refuses(Reason.WRONG_VERSION):
        opened(later)


def test_what_expired_names_our_clock_as_a_possible_cause() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        opened(SEALED, NOW + 3600 + 305)
    assert caught.value.detail == (
        "the head expired 305 s ago by our clock (2027-01-15T09:05:05Z): "
        "if that is not so, check the clock of this machine"
    )
