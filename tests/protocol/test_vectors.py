"""Today's code against the bytes that other nodes already speak: those of each wire version that it speaks.

A failure here is a change of the wire: either undo it, or raise WIRE_VERSION and run vectors/make.py. What
older versions say is compared with the same cases: one that changes for a later version is a case of its own.
"""

import json
from typing import Any

import msgspec
import pytest
from support.protocol_cases import (
    ADAPTED,
    CLASSED_SUBMISSION,
    CLASSED_VERDICT,
    ENVELOPES,
    LEASE,
    LOCATED,
    MANIFEST,
    MEASURED,
    MESSAGES,
    MIXED,
    MIXED_LEASE,
    NOW,
    POLICY_MANIFEST,
    PROMPTED_LEASE,
    RUN,
    SPLIT_REPORT,
    SPLIT_SUBMISSION,
    SPLIT_VERDICT,
    TICKET,
    TRAINER,
    USUAL_TICKET,
    WITH_EARLIER,
    WORKER,
)
from vectors.make import FOLDER, build, file_of

from primerl.crypto.hashing import digest
from primerl.crypto.keys import SecretKey
from primerl.protocol import tickets, version
from primerl.protocol.envelope import Envelope, Purpose, unseal
from primerl.protocol.leases import Lease, sample_seed
from primerl.protocol.manifests import PolicyManifest, RunManifest, run_id
from primerl.protocol.messages import Message
from primerl.protocol.session import HEADER_BYTES, decode, payload_size

SPOKEN = range(version.OLDEST_WIRE_VERSION, version.WIRE_VERSION + 1)
OF_VERSION: dict[int, dict[str, Any]] = {
    number: json.loads(file_of(number).read_text()) for number in SPOKEN
}
GOLDEN = OF_VERSION[version.WIRE_VERSION]
of_each_version = pytest.mark.parametrize("golden", OF_VERSION.values(), ids=OF_VERSION)


def test_every_version_that_is_spoken_has_its_bytes_here_and_no_other() -> None:
    assert set(FOLDER.glob("wire_*.json")) == {file_of(number) for number in SPOKEN}
    assert [golden["wire_version"] for golden in OF_VERSION.values()] == list(SPOKEN)


def test_the_vectors_are_complete() -> None:
    assert GOLDEN.keys() == build().keys()
    assert set(GOLDEN["envelopes"]) == {purpose.value for purpose in Purpose}
    assert set(GOLDEN["frames"]) == {kind.__name__ for kind in Message.__subclasses__()}


def test_documents_and_messages_are_still_made_of_these_bytes() -> None:
    built = build()
    for part, golden in GOLDEN.items():
        names = golden if isinstance(golden, dict) else ()
        assert [name for name in names if built[part][name] != golden[name]] == [], part
        assert built[part] == golden, part


@of_each_version
def test_a_frame_of_then_is_understood_now(golden: dict[str, Any]) -> None:
    for message in MESSAGES:
        if said := golden["frames"].get(type(message).__name__):  # else of a later version
            framed = bytes.fromhex(said)
            header, payload = framed[:HEADER_BYTES], framed[HEADER_BYTES:]
            assert payload_size(header) == len(payload)
            assert decode(payload, type(message)) == message


@of_each_version
def test_an_envelope_of_then_is_opened_now(golden: dict[str, Any]) -> None:
    for purpose in Purpose:
        key, body, recipient = ENVELOPES[purpose]
        if sealed := golden["envelopes"].get(purpose.value):  # else of a later version
            opened = unseal(
                bytes.fromhex(sealed),
                purpose,
                type(body),
                now=NOW,
                run=RUN,
                signer=key.node_id,
                recipient=recipient,
            )
            assert opened.body == body
            assert (opened.sequence, opened.expires) == (9, NOW + 3600)


def test_an_envelope_is_an_array_in_this_order() -> None:
    # Written out, so that fields cannot be swapped in code and vectors at once.
    fields = msgspec.msgpack.decode(bytes.fromhex(GOLDEN["envelopes"]["lease"]))
    assert fields[:7] == [2, "lease", RUN, TRAINER.node_id, WORKER.node_id, 9, NOW + 3600]
    assert msgspec.msgpack.decode(fields[7], type=type(LEASE)) == LEASE
    assert len(fields[8]) == 64
    assert Envelope.__struct_fields__[7:] == ("payload", "signature")


@of_each_version
def test_a_ticket_of_then_is_read_now(golden: dict[str, Any]) -> None:
    assert tickets.read(golden["ticket"], now=NOW) == TICKET
    assert tickets.read(golden["whole_ticket"], now=NOW) == TICKET  # as tickets were written first
    assert tickets.read(golden["usual_ticket"], now=NOW) == USUAL_TICKET


@of_each_version
def test_the_documents_of_then_are_read_now(golden: dict[str, Any]) -> None:
    manifest = bytes.fromhex(golden["run_manifest"])
    assert decode(manifest, RunManifest) == MANIFEST
    assert run_id(manifest).hex() == golden["run_id"]
    assert decode(bytes.fromhex(golden["adapted_run_manifest"]), RunManifest) == ADAPTED
    assert decode(bytes.fromhex(golden["mixed_run_manifest"]), RunManifest) == MIXED
    assert decode(bytes.fromhex(golden["mixed_lease"]), Lease) == MIXED_LEASE
    assert decode(bytes.fromhex(golden["prompted_lease"]), Lease) == PROMPTED_LEASE
    assert decode(bytes.fromhex(golden["policy_manifest"]), PolicyManifest) == POLICY_MANIFEST
    assert decode(bytes.fromhex(golden["located_policy_manifest"]), PolicyManifest) == LOCATED
    earlier = bytes.fromhex(golden["policy_manifest_with_earlier"])
    assert decode(earlier, PolicyManifest) == WITH_EARLIER
    assert decode(bytes.fromhex(golden["measured_run_manifest"]), RunManifest) == MEASURED
    classed = {"submission": CLASSED_SUBMISSION, "verdict": CLASSED_VERDICT}
    for name, document in classed.items():
        assert decode(bytes.fromhex(golden[f"classed_{name}"]), type(document)) == document
    split = {"submission": SPLIT_SUBMISSION, "verdict": SPLIT_VERDICT, "report": SPLIT_REPORT}
    for name, document in split.items():
        assert decode(bytes.fromhex(golden[f"split_{name}"]), type(document)) == document


def test_the_keys_are_those_of_their_seeds() -> None:
    for key in GOLDEN["keys"].values():
        assert SecretKey.from_seed(bytes.fromhex(key["seed"])).node_id.hex() == key["node_id"]


def test_the_seed_of_a_sample_is_the_golden_one() -> None:
    for name, seed in GOLDEN["sample_seeds"].items():
        task, index, turn = name.split(" / ")
        assert seed == sample_seed(
            RUN, LEASE, WORKER.node_id, digest(task.encode()), int(index), int(turn)
        )


def test_the_names_of_protocols_stay_so_that_a_node_of_another_version_gets_an_answer() -> None:
    assert GOLDEN["wire_version"] == version.WIRE_VERSION
    for alpn in (version.ALPN_CONTROL, version.ALPN_BLOBS, version.ALPN_PIPELINE):
        assert alpn.endswith(b"/1")
