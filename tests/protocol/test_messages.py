import functools
import math
import operator
from collections.abc import Iterator
from typing import Any

import msgspec
import msgspec.inspect
import pytest
from msgspec import structs
from support.protocol_cases import (
    LEASE,
    MESSAGES,
    POLICY_MANIFEST,
    SUBMISSION,
    VERDICT,
    head,
    refuses,
)

from primerl.protocol import manifests
from primerl.protocol import messages as m
from primerl.protocol.audits import MAX_CHOSEN, MAX_REPORT, AuditReport, Place
from primerl.protocol.envelope import Envelope
from primerl.protocol.errors import Reason
from primerl.protocol.leases import Lease
from primerl.protocol.messages import Message
from primerl.protocol.numerics import MAX_CLASSES, ClassBounds, NumericsClass
from primerl.protocol.pipelines import PipelinePlan
from primerl.protocol.rollouts import Receipt, Submission, Verdict
from primerl.protocol.session import decode
from primerl.protocol.trust import EquivocationProof
from primerl.protocol.version import (
    MAX_CHUNK,
    MAX_GOSSIP,
    MAX_LEASE,
    MAX_MESSAGE,
    MAX_SUBMISSION,
)

KIB64 = 64 * 1024
DIGEST = bytes(32)
ALL_MESSAGES: Any = functools.reduce(operator.or_, Message.__subclasses__())
DOCUMENTS = (
    manifests.RunManifest,
    manifests.PolicyManifest,
    manifests.PolicyHead,
    manifests.PeerRecord,
    manifests.Ticket,
    Lease,
    Submission,
    Receipt,
    Verdict,
    AuditReport,
    EquivocationProof,
    Envelope,
    PipelinePlan,
    ClassBounds,
    manifests.Holding,
)
KINDS: tuple[type[msgspec.Struct], ...] = (*Message.__subclasses__(), *DOCUMENTS)


def changed(message: msgspec.Struct, **fields: object) -> bytes:
    """The bytes of `message` with some fields exchanged, valid or not."""
    return msgspec.msgpack.encode(msgspec.structs.replace(message, **fields))


def example(kind: type[Message]) -> Message:
    """The example of one message."""
    return next(one for one in MESSAGES if type(one) is kind)


def test_there_is_an_example_of_every_message() -> None:
    assert {type(one) for one in MESSAGES} == set(Message.__subclasses__())


OPEN = {m.Hello, m.Welcome, m.Refusal}
"""Messages in which a node finds the version that both speak: unknown fields are passed over."""


def test_a_message_says_what_it_is_and_comes_back() -> None:
    for message in MESSAGES:
        said = msgspec.msgpack.encode(message)
        assert msgspec.msgpack.decode(said)["type"] == type(message).__name__
        assert decode(said, ALL_MESSAGES) == message


def test_an_unknown_field_is_refused_but_where_two_versions_meet() -> None:
    for message in MESSAGES:
        fields = msgspec.to_builtins(message, builtin_types=(bytes,))
        more = msgspec.msgpack.encode({**fields, "more": 1})
        if type(message) in OPEN:
            assert decode(more, type(message)) == message
        else:
            with refuses(Reason.MALFORMED, case=type(message)):
                decode(more, type(message))


@pytest.mark.parametrize(("oldest", "spoken"), [(0, (3, 3)), (2, (2, 3)), (3, (3, 3))])
def test_a_hello_states_a_range_and_one_without_speaks_one_version(
    oldest: int, spoken: tuple[int, int]
) -> None:
    hello = m.Hello(3, "inference", "1", b"", b"", oldest_wire_version=oldest)
    assert hello.spoken == spoken
    said = msgspec.msgpack.encode(hello)
    assert decode(said, m.Beginning).spoken == decode(said, m.Hello).spoken == spoken


def test_a_field_without_a_default_is_required() -> None:
    for message in MESSAGES:
        fields = msgspec.to_builtins(message, builtin_types=(bytes,))
        for field in msgspec.structs.fields(message):
            if field.required:
                rest = {name: value for name, value in fields.items() if name != field.encode_name}
                with refuses(Reason.MALFORMED, case=(type(message), field.name)):
                    decode(msgspec.msgpack.encode(rest), type(message))


@pytest.mark.parametrize("tag", ["Unknown", "hello", "", "Message", 1, None])
def test_an_unknown_tag_is_refused(tag: object) -> None:
    with refuses(Reason.MALFORMED):
        decode(msgspec.msgpack.encode({"type": tag}), ALL_MESSAGES)


@pytest.mark.parametrize("document", [head(), LEASE, SUBMISSION, VERDICT, POLICY_MANIFEST])
def test_an_unknown_field_of_a_document_is_refused(document: msgspec.Struct) -> None:
    fields = msgspec.to_builtins(document, builtin_types=(bytes,))
    with refuses(Reason.MALFORMED):
        decode(msgspec.msgpack.encode({**fields, "more": 1}), type(document))


AT_ITS_LIMIT: list[tuple[type[Message], str, object, object]] = [
    (m.Hello, "ticket", bytes(KIB64), bytes(KIB64 + 1)),
    (m.Hello, "record", bytes(MAX_GOSSIP), bytes(MAX_GOSSIP + 1)),
    (m.Hello, "software", "x" * 256, "x" * 257),
    (m.Hello, "role", "server", "root"),
    (m.Hello, "wire_version", 2, "1"),
    (m.Welcome, "manifest", bytes(KIB64), bytes(KIB64 + 1)),
    (m.WatchHeads, "term", 0, -1),
    (m.WatchHeads, "after", 2**53, 2**53 + 1),
    (m.WatchHeads, "after", -1, -2),
    (m.HeadNotice, "head", bytes(MAX_GOSSIP), bytes(MAX_GOSSIP + 1)),
    (m.HeadNotice, "manifest", bytes(4 * KIB64), bytes(4 * KIB64 + 1)),
    (m.RunEnded, "detail", "x" * 256, "x" * 257),
    (m.GetHeads, "after", -1, -2),
    (m.Heads, "notices", (m.HeadNotice(b""),) * 64, (m.HeadNotice(b""),) * 65),
    (m.LeaseRequest, "wanted", 64, 65),
    (m.LeaseRequest, "wanted", 0, -1),
    (m.LeaseRequest, "paused", "x" * 256, "x" * 257),
    (m.LeaseRequest, "stats", m.WorkerStats(-1), m.WorkerStats(-2)),
    (
        m.LeaseRequest,
        "stats",
        m.WorkerStats(0, chunk_bytes={str(i): 1 for i in range(64)}),
        m.WorkerStats(0, chunk_bytes={str(i): 1 for i in range(65)}),
    ),
    (
        m.LeaseRequest,
        "stats",
        m.WorkerStats(0, chunk_bytes={"x" * 256: 1}),
        m.WorkerStats(0, chunk_bytes={"x" * 257: 1}),
    ),
    (m.LeaseRequest, "numerics", NumericsClass("~" * 64), NumericsClass("~" * 65)),
    (m.LeaseRequest, "numerics", NumericsClass("a b"), NumericsClass("a\nb")),
    (m.LeaseRequest, "numerics", NumericsClass(""), NumericsClass("\u00b5")),
    (m.LeaseRequest, "numerics", NumericsClass(tp=1024), NumericsClass(tp=1025)),
    (m.LeaseRequest, "numerics", NumericsClass(tp=2), NumericsClass(tp=0)),
    (m.MeasuredBounds, "bounds", (b"",) * MAX_CLASSES, (b"",) * (MAX_CLASSES + 1)),
    (m.MeasuredBounds, "bounds", (bytes(MAX_GOSSIP),), (bytes(MAX_GOSSIP + 1),)),
    (m.LeaseReply, "leases", (b"",) * 64, (b"",) * 65),
    (m.LeaseReply, "leases", (bytes(MAX_LEASE),), (bytes(MAX_LEASE + 1),)),
    (m.LeaseReply, "verdicts", (b"",) * 64, (b"",) * 65),
    (m.LeaseReply, "upstreams", (b"",) * 64, (b"",) * 65),
    (m.LeaseReply, "downstreams", (b"",) * 64, (b"",) * 65),
    (m.LeaseReply, "upstreams", (bytes(MAX_GOSSIP),), (bytes(MAX_GOSSIP + 1),)),
    (m.LeaseReply, "retry_after_ms", 600_000, 600_001),
    (m.SubmitOffer, "digest", DIGEST, bytes(31)),
    (m.SubmitOffer, "size", MAX_SUBMISSION, MAX_SUBMISSION + 1),
    (m.SubmitOffer, "size", 1, 0),
    (m.SubmitOffer, "lease_id", 0, -1),
    (m.SubmitFrom, "offset", MAX_SUBMISSION, MAX_SUBMISSION + 1),
    (m.SubmitFrom, "offset", 0, -1),
    (m.Submitted, "receipt", bytes(KIB64), bytes(KIB64 + 1)),
    (m.GetVerdicts, "after", 2**53, 2**53 + 1),
    (m.GetVerdicts, "after", 0, -1),
    (m.Verdicts, "verdicts", (b"",) * 64, (b"",) * 65),
    (m.Verdicts, "verdicts", (bytes(KIB64),), (bytes(KIB64 + 1),)),
    (m.GetBackup, "known", DIGEST, bytes(31)),
    (m.BackupWait, "retry_after_ms", 600_000, 600_001),
    (m.Backup, "files", (m.BackupFile("a", ()),) * 4096, (m.BackupFile("a", ()),) * 4097),
    (m.Backup, "files", (m.BackupFile("a", ()),), ()),
    (m.Backup, "files", (m.BackupFile("x" * 256, ()),), (m.BackupFile("x" * 257, ()),)),
    (m.Backup, "files", (m.BackupFile("x", ()),), (m.BackupFile("", ()),)),
    (m.Backup, "step", 0, -1),
    (m.AuditRequest, "versions", (0,) * m.MAX_SHELF, (0,) * (m.MAX_SHELF + 1)),
    (m.AuditWait, "retry_after_ms", 600_000, 600_001),
    (m.AuditJob, "size", MAX_SUBMISSION, MAX_SUBMISSION + 1),
    (m.AuditJob, "size", 1, 0),
    (m.AuditJob, "challenge", DIGEST, bytes(31)),
    (m.AuditJob, "node", DIGEST, bytes(33)),
    (m.AuditJob, "chosen", (Place(0, 0),) * MAX_CHOSEN, (Place(0, 0),) * (MAX_CHOSEN + 1)),
    (m.AuditJob, "chosen", (Place(4096, 4096),), ()),
    (m.AuditJob, "chosen", (Place(0, 0),), (Place(4097, 0),)),
    (m.AuditJob, "versions", (0,) * m.MAX_SHELF, (0,) * (m.MAX_SHELF + 1)),
    (m.AuditJob, "versions", (0,), ()),
    (m.AuditJob, "others", (), (m.OtherPolicies(0, ()),) * (m.MAX_SHELF + 1)),
    (m.AuditJob, "others", (), (m.OtherPolicies(0, (0,) * 17),)),
    (m.AuditJob, "seconds", 86400.0, 86400.5),
    (m.AuditJob, "seconds", 0.1, 0.0),
    (m.AuditDone, "report", bytes(MAX_REPORT), bytes(MAX_REPORT + 1)),
    (m.SyncRecords, "records", (b"",) * 64, (b"",) * 65),
    (m.Goodbye, "detail", "x" * 256, "x" * 257),
    (m.GetChunk, "digest", DIGEST, bytes(33)),
    (m.GetChunk, "wait_ms", 60_000, 60_001),
    (m.GetChunk, "wait_ms", 0, -1),
    (m.ChunkFollows, "size", MAX_CHUNK, 2**26 + 1),
    (m.ChunkFollows, "size", 0, -1),
    (m.ChunkFollows, "index", m.MAX_WATCHED - 1, m.MAX_WATCHED),
    (m.ChunkFollows, "index", 0, -1),
    (m.GetAnyChunk, "wanted", (DIGEST,) * m.MAX_WATCHED, (DIGEST,) * (m.MAX_WATCHED + 1)),
    (m.GetAnyChunk, "wanted", (DIGEST,), ()),
    (m.GetAnyChunk, "wanted", (DIGEST,), (bytes(31),)),
    (m.WatchChunks, "chunks", (DIGEST,) * m.MAX_WATCHED, (DIGEST,) * (m.MAX_WATCHED + 1)),
    (m.WatchChunks, "chunks", (DIGEST,), ()),
    (m.HaveChunks, "held", bytes(m.MAX_WATCHED // 8), bytes(m.MAX_WATCHED // 8 + 1)),
    (m.Refusal, "detail", "x" * 256, "x" * 257),
    (m.Refusal, "reason", "busy", "because"),
]


def test_a_field_is_taken_at_its_limit_and_refused_beyond() -> None:
    for kind, field, good, bad in AT_ITS_LIMIT:
        said = changed(example(kind), **{field: good})
        assert msgspec.msgpack.encode(decode(said, kind)) == said, (kind, field)
        with refuses(Reason.MALFORMED, case=(kind, field)):
            decode(changed(example(kind), **{field: bad}), kind)


def nodes(kind: Any, path: str, seen: set[object]) -> Iterator[tuple[str, Any]]:
    """Every type that bytes of `kind` are decoded into, with the path to it."""
    yield path, kind
    if isinstance(kind, msgspec.inspect.StructType) and kind.cls not in seen:
        seen.add(kind.cls)
        for field in kind.fields:
            yield from nodes(field.type, f"{path}.{field.name}", seen)
    for name in ("item_type", "key_type", "value_type"):
        inner = getattr(kind, name, None)
        if isinstance(inner, msgspec.inspect.Type):
            yield from nodes(inner, f"{path}[]", seen)
    for inner in (*getattr(kind, "types", ()), *getattr(kind, "item_types", ())):
        yield from nodes(inner, path, seen)


def unbounded(kind: Any) -> bool:
    """Whether a sender decides how large this becomes."""
    inspect = msgspec.inspect
    if isinstance(kind, inspect.StrType):
        return kind.max_length is None and kind.pattern is None
    if isinstance(
        kind, inspect.BytesType | inspect.VarTupleType | inspect.ListType | inspect.DictType
    ):
        return kind.max_length is None
    return isinstance(kind, inspect.AnyType | inspect.RawType | inspect.ByteArrayType)


def test_every_text_bytes_and_list_has_a_limit() -> None:
    for kind in KINDS:
        parts = list(nodes(msgspec.inspect.type_info(kind), kind.__name__, set()))
        assert [path for path, part in parts if unbounded(part)] == []


MEASURES = manifests.Thresholds.__struct_fields__
ANY_NUMBER = {
    "RolloutRecord.reward": "one bad reward refuses its rollout (checks.py), not the whole submission",
    **{
        f"Evidence.{name}": "the trainer's own, infinite where nothing compares; a report has check_rows()"
        for name in MEASURES
    },
    "Blamed.distances": "as those of the trainer's own Evidence",
}
"""Numbers without bounds, by the field, and why."""


def open_ended(kind: Any) -> bool:
    """Whether a number may be NaN, infinite, or larger than anything that is made of it can bear."""
    if not isinstance(kind, msgspec.inspect.FloatType | msgspec.inspect.IntType):
        return False
    return (kind.ge is None and kind.gt is None) or (kind.le is None and kind.lt is None)


def structs_in(kind: type[msgspec.Struct]) -> list[msgspec.inspect.StructType]:
    """The structs that bytes of `kind` are decoded into."""
    parts = nodes(msgspec.inspect.type_info(kind), "", set())
    return [part for _, part in parts if isinstance(part, msgspec.inspect.StructType)]


def test_every_number_has_a_least_and_a_largest_value() -> None:
    for kind in KINDS:
        inner = structs_in(kind)
        known = {struct.cls for struct in inner}
        wrong = [
            f"{struct.cls.__name__}.{field.name}"
            for struct in inner
            for field in struct.fields
            if any(open_ended(part) for _, part in nodes(field.type, "", set(known)))
        ]
        assert [name for name in wrong if name not in ANY_NUMBER] == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e308])
@pytest.mark.parametrize("field", ["working_s", "generating_s"])
def test_what_is_no_number_of_seconds_is_refused_where_statistics_are_read(
    field: str, value: float
) -> None:
    said = functools.partial(changed, example(m.LeaseRequest))
    assert decode(said(stats=m.WorkerStats(3, 5.0, 2.5)), m.LeaseRequest).stats.working_s == 5.0
    with refuses(Reason.MALFORMED):
        decode(said(stats=structs.replace(m.WorkerStats(3), **{field: value})), m.LeaseRequest)


def test_every_struct_of_it_is_frozen_and_closed_but_where_two_versions_meet() -> None:
    for kind in KINDS:
        classes = [struct.cls for struct in structs_in(kind)]
        assert kind in classes
        for cls in classes:
            assert cls.__struct_config__.frozen, cls
            assert cls.__struct_config__.forbid_unknown_fields == (cls not in OPEN), cls


def test_the_limits_fit_into_each_other() -> None:
    assert MAX_GOSSIP < KIB64 < MAX_MESSAGE < MAX_CHUNK < MAX_SUBMISSION < 2**32
