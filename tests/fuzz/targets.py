"""What must hold whatever bytes a stranger sends: run(data) decodes them and raises AssertionError if not.

The first byte of `data` chooses a decoder, the rest is what it is given. Used by fuzz_codec.py and by the tests
beside it, which mutate what seeds() gives.
"""

import base64
import functools
import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from fuzz import state_targets
from msgspec import structs
from support import fingerprint_cases, ring_cases
from support import weights_cases as cases
from support.protocol_cases import (
    ENVELOPES,
    MESSAGES,
    OFFER,
    POLICY_MANIFEST,
    SUBMISSION,
    sealed_head,
)
from support.protocol_cases import head as policy_head

from primerl.node.inference.fingerprint import BadProof, Projection
from primerl.node.pipeline.frames import (
    PREFIX_BYTES,
    Frame,
    FrameLimits,
    Kind,
    encode,
    head_size,
    read_head,
)
from primerl.node.pipeline.frames import decode as decode_frame
from primerl.node.weights.codec import (
    apply_delta,
    decode_full,
    encode_delta,
    encode_full,
)
from primerl.node.weights.payload import (
    DELTA,
    FULL,
    Offsets,
    check_layout,
    chunks_for,
    header,
    layout_of,
)
from primerl.node.weights.replica import Policy, WeightReplica, prove
from primerl.node.weights.state import (
    BITS,
    Changed,
    CodecError,
    DigestMismatch,
    State,
    Tensor,
    numel,
)
from primerl.protocol.envelope import Envelope, read_envelope
from primerl.protocol.errors import RemoteProtocolError
from primerl.protocol.manifests import ChunkRef, TensorInfo
from primerl.protocol.messages import Beginning, Message
from primerl.protocol.session import decode
from primerl.protocol.version import SPOKEN

LIMITS = FrameLimits.of(ring_cases.SHAPE)
MAX_IMPLIED = 1 << 22
"""Bytes: what a manifest made of foreign bytes may imply here, else one input fills the memory by right."""


def pair() -> tuple[State, State]:
    """Two states whose delta uses every method of a block and every coding of positions and values."""
    base = {
        "bytes": cases.tensor("U8", (120,), bytes(120)),
        "dense": cases.like_a_model(1, 700),
        "empty": cases.tensor("F16", (0, 4), b""),
        "far": cases.tensor("I32", (300,), bytes(1200)),
        "raw": cases.tensor("F32", (40,), bytes(160)),
        "scalar": cases.tensor("I64", (), bytes(8)),
        "skip": cases.bf16(0x8000, 0x7FC1, 0xFFFF),
        "sparse": cases.like_a_model(2, 3000),
        "wide": cases.tensor("F64", (9, 10), bytes(720)),
    }
    noise = np.random.default_rng(3)
    far, wide = base["far"].data.copy(), base["wide"].data.copy()
    near = base["bytes"].data.copy()
    near[::5] += noise.integers(30, 100, near[::5].size).astype(near.dtype)
    far[::7] += noise.integers(1, 9000, far[::7].size).astype(far.dtype)
    wide[:] += noise.integers(1, 200, wide.size).astype(wide.dtype)
    new = base | {
        "bytes": cases.tensor("U8", (120,), near.tobytes()),
        "dense": cases.stepped(base["dense"], 4, 0.95),
        "far": cases.tensor("I32", (300,), far.tobytes()),
        "raw": cases.tensor("F32", (40,), noise.bytes(160)),
        "scalar": cases.tensor("I64", (), b"\xff" * 8),
        "sparse": cases.stepped(base["sparse"], 5, 0.02),
        "wide": cases.tensor("F64", (9, 10), wide.tobytes()),
    }
    return base, new


BASE, NEW = pair()
INFOS = cases.infos(NEW)
LAYOUT = layout_of(NEW)
WHOLE, STEP = b"".join(encode_full(NEW)), b"".join(encode_delta(BASE, NEW))
HELD = prove(6, BASE)
MANIFEST = cases.manifest(7, NEW, cases.delta(6, HELD.digest, STEP))
BITS_BEFORE = {name: tensor.data.tobytes() for name, tensor in BASE.items()}
SCHEMES = (Projection(),)
STATES = fingerprint_cases.exact(40)
EVERY_MESSAGE: Any = functools.reduce(operator.or_, Message.__subclasses__())
EXAMPLES: tuple[msgspec.Struct, ...] = (
    POLICY_MANIFEST,
    SUBMISSION,
    *(body for _, body, _ in ENVELOPES.values()),
    OFFER,
)
"""One of each kind of document."""
DOCUMENTS = (*dict.fromkeys(type(example) for example in EXAMPLES), Beginning, Envelope)


def full(data: bytes) -> bool:
    """A full state: decoded to the layout of the manifest, or refused."""
    try:
        state = decode_full(data, INFOS)
    except CodecError:
        return False
    assert layout_of(state) == LAYOUT
    assert cases.same(decode_full(list(encode_full(state)), INFOS), state)
    return True


def step(data: bytes) -> bool:
    """A delta: the base is not touched, and every change is told."""
    pieces = [data[at : at + 97] for at in range(0, len(data), 97)]
    try:
        state, changed = apply_delta(BASE, pieces, INFOS)
    except CodecError:
        return False
    finally:
        assert {name: tensor.data.tobytes() for name, tensor in BASE.items()} == BITS_BEFORE
    assert layout_of(state) == LAYOUT
    check_told(state, changed)
    assert cases.same(cases.applied(BASE, encode_delta(BASE, state, changed=changed), INFOS), state)
    return True


def check_told(state: State, changed: Changed) -> None:
    """`changed` names every difference between BASE and `state`, in order."""
    for name, tensor in state.items():
        differs = np.flatnonzero(tensor.data != BASE[name].data)
        if name not in changed:
            assert tensor is BASE[name]
            continue
        told = changed[name]
        if told is not None:
            assert (np.diff(told) > 0).all()
            assert told.size == 0 or (told[0] >= 0 and told[-1] < tensor.data.size)
            assert np.isin(differs, told).all()


def mirror(data: bytes) -> bool:
    """A policy of a signed manifest: what is not exactly that state is refused, and nothing held changes."""
    subject = WeightReplica(HELD)
    try:
        prepared = subject.prepare(MANIFEST, MANIFEST.artifacts[0], data)
    except (CodecError, DigestMismatch):
        return False
    finally:
        assert subject.policy is HELD
    assert cases.same(prepared.policy.state, NEW)
    return True


def share(data: bytes) -> bool:
    """Places of tensors, and chunks, from a stranger: a node gets those it needs as signed, or a refusal."""
    names = {name for bit, (name, _, _) in enumerate(LAYOUT) if data and data[0] >> bit & 1}
    size = int.from_bytes(data[1:3], "little")
    try:
        offsets = msgspec.msgpack.decode(data[3 : 3 + size], type=tuple[int, ...])
    except msgspec.DecodeError:
        return False
    pieces = [data[at : at + 97] for at in range(3 + size, len(data), 97)]
    artifact = structs.replace(
        MANIFEST.artifacts[0],
        size=sum(map(len, pieces)),
        chunks=tuple(ChunkRef(at.to_bytes(32, "big"), len(one)) for at, one in enumerate(pieces)),
        offsets=offsets,
    )
    held = Policy(6, {name: BASE[name] for name in names}, HELD.digests, HELD.digest)
    subject = WeightReplica(held, share=lambda _: frozenset(names))
    try:
        needed = chunks_for(artifact, INFOS, names)
        given = [pieces[int.from_bytes(chunk.digest, "big")] for chunk in needed]
        prepared = subject.prepare(MANIFEST, artifact, given)
    except (CodecError, DigestMismatch):
        return False
    finally:
        assert subject.policy is held
    assert cases.same(prepared.policy.state, {name: NEW[name] for name in names})
    return True


def lying(data: bytes) -> bool:
    """A manifest of foreign bytes, and a payload that fits its tensors or pretends to."""
    size = int.from_bytes(data[:2], "little")
    try:
        tensors = msgspec.msgpack.decode(data[2 : 2 + size], type=tuple[TensorInfo, ...])
        layout = check_layout(tensors)
    except (msgspec.DecodeError, UnicodeDecodeError, CodecError):
        return False
    implied = sum(numel(shape) * BITS[dtype].itemsize for _, dtype, shape in layout)
    rest = data[2 + size :] if implied <= MAX_IMPLIED else data[2 + size :][:16]
    try:
        state = decode_full(header(FULL, layout) + rest, tensors)
        assert layout_of(state) == layout
        return True
    except CodecError:
        pass
    if implied > MAX_IMPLIED:
        return False
    base = {
        name: Tensor(dtype, shape, np.zeros(numel(shape), BITS[dtype]))
        for name, dtype, shape in layout
    }
    try:
        assert layout_of(cases.applied(base, header(DELTA, layout) + rest, tensors)) == layout
    except CodecError:
        return False
    return True


def fuzz_message(data: bytes) -> bool:
    """A message or a document: one that comes back as it was, or RemoteProtocolError."""
    kinds: tuple[Any, ...] = (EVERY_MESSAGE, *DOCUMENTS)
    kind = kinds[data[0] % len(kinds)] if data else EVERY_MESSAGE
    try:
        found = decode(data[1:], kind)
    except RemoteProtocolError:
        return False
    again = msgspec.msgpack.encode(found)
    assert msgspec.msgpack.encode(decode(again, kind)) == again  # equal but for NaN
    return True


def sealed(data: bytes) -> bool:
    """A sealed document of any wire version: one of ours, or RemoteProtocolError."""
    try:
        found = read_envelope(data)
    except RemoteProtocolError:
        return False
    assert SPOKEN.speaks(found.wire_version)
    return True


def frame(data: bytes) -> bool:
    """What a stage is sent: a frame within its plan's limits that is the same when said again, or no."""
    try:
        size = head_size(data[:PREFIX_BYTES])
        head = read_head(data[PREFIX_BYTES : PREFIX_BYTES + size], LIMITS)
        assert head.size <= LIMITS.body + LIMITS.trail + LIMITS.tensors
        found = decode_frame(head, data[PREFIX_BYTES + size :])
    except RemoteProtocolError:
        return False
    start, *contents = encode(found, LIMITS)
    assert read_head(bytes(start)[PREFIX_BYTES:], LIMITS) == head
    assert b"".join(contents) == data[PREFIX_BYTES + size :]
    return True


def proof(data: bytes) -> bool:
    """A proof of some tokens: measured, all numbers finite, or BadProof, for any caller."""
    scheme = SCHEMES[data[0] % len(SCHEMES)] if data else SCHEMES[0]
    states = STATES[: data[1] % len(STATES) + 1] if len(data) > 1 else STATES
    said = data[2:]
    if data and data[0] & 128:  # else nearly every one would fall at its length
        size = scheme.size(len(states))
        said = said[:size].ljust(size, b"\x80")
    try:
        compared = scheme.compare(said, states, [-states])
    except BadProof:
        return not refuses(functools.partial(scheme.check, said, len(states)))
    scheme.check(said, len(states))
    sums = (compared.distance, compared.own, *compared.others)
    assert all(math.isfinite(number) and number >= 0 for number in sums)
    assert 0 <= compared.samples <= scheme.size(len(states))
    return True


def refuses(check: Callable[[], None]) -> bool:
    """Whether the check raises BadProof too; it must."""
    try:
        check()
    except BadProof:
        return True
    raise AssertionError("compare refuses what check accepts")


TARGETS: tuple[Callable[[bytes], bool], ...] = (
    full,
    step,
    mirror,
    lying,
    fuzz_message,
    proof,
    share,
    frame,
    sealed,
    *state_targets.TARGETS,
)


def run(data: bytes) -> bool:
    """Whether the bytes were accepted; AssertionError or whatever else is raised is a finding."""
    return bool(data) and TARGETS[data[0] % len(TARGETS)](data[1:])


def seeds() -> list[bytes]:
    """Valid inputs of every target."""
    table = msgspec.msgpack.encode(INFOS)
    lie = len(table).to_bytes(2, "little") + table
    offsets = Offsets(LAYOUT)
    step_again = b"".join(offsets.watch(encode_delta(BASE, NEW)))
    places = msgspec.msgpack.encode(offsets.found)
    located = len(places).to_bytes(2, "little") + places + step_again
    payloads: list[tuple[Callable[[bytes], bool], bytes]] = [
        (full, WHOLE),
        (step, STEP),
        (mirror, STEP),
        (lying, lie + WHOLE[len(header(FULL, LAYOUT)) :]),
        (lying, lie + STEP[len(header(DELTA, LAYOUT)) :]),
        (share, b"\x92" + located),
        (share, b"\x48" + located),
    ]
    payloads += [(fuzz_message, b"\0" + msgspec.msgpack.encode(message)) for message in MESSAGES]
    payloads += [
        (fuzz_message, bytes([1 + DOCUMENTS.index(type(it))]) + msgspec.msgpack.encode(it))
        for it in EXAMPLES
    ]
    payloads += state_targets.seeds()
    payloads.append((fuzz_message, bytes([len(DOCUMENTS)]) + sealed_head(policy_head(0))))
    payloads.append(
        (fuzz_message, bytes([len(DOCUMENTS) - 1]) + msgspec.msgpack.encode(MESSAGES[0]))
    )
    payloads.append((sealed, sealed_head(policy_head(0))))
    frames = (ring_cases.step(7, 1), Frame(Kind.RESET, 7, 0), Frame(Kind.FAULT, 7, 1, b"why"))
    payloads += [(frame, b"".join(encode(one, LIMITS))) for one in frames]
    for number, scheme in enumerate(SCHEMES):
        for tokens in (1, 32, 40):
            made = scheme.make(STATES[:tokens])
            payloads.append((proof, bytes([number, tokens - 1]) + made))
    return [bytes([TARGETS.index(target)]) + data for target, data in payloads]


CORPUS = Path(__file__).parent / "corpus"
"""Inputs that a fuzzer found to reach something new, in lines of base64, without the first byte."""


def kept() -> list[bytes]:
    """Return the inputs in CORPUS."""
    return [
        bytes([number]) + base64.b64decode(line)
        for number, target in enumerate(TARGETS)
        if (path := CORPUS / f"{target.__name__}.txt").exists()
        for line in path.read_text(encoding="ascii").splitlines()
    ]
