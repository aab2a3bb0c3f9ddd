"""Signed fingerprint trails: every stage signs the fingerprints up to its own.

Stage 0 verifies all signatures. Without signatures a later stage could alter an earlier one's fingerprints and
shift the blame to it. Signatures exist between nodes only: they are removed before a frame goes to the engine,
and added after it returns.
"""

import msgspec

from ...crypto.keys import SIGNATURE_BYTES, SecretKey, verify
from ...protocol.pipelines import PipelinePlan
from ...protocol.recent import RecentDict
from .frames import FINGERPRINT_BYTES, PREFIX_BYTES, Kind, Packet


class BadTrail(Exception):
    """A trail of the wrong size, or with altered contents or a wrong signature."""


def append(trail: bytes, own: bytes) -> bytes:
    """Append this stage's fingerprints `own`, FINGERPRINT_BYTES per row; may be empty."""
    if len(own) % FINGERPRINT_BYTES:
        raise ValueError(
            f"{len(own)} bytes are not rows of {FINGERPRINT_BYTES} bytes: a bug of this stage"
        )
    return trail + own


def latest(trail: bytes, rows: int, count: int) -> bytes:
    """Return the fingerprints of the last of `count` stages. Raises BadTrail."""
    check(trail, rows, count)
    return trail[len(trail) - rows * FINGERPRINT_BYTES :]


def check(trail: bytes, rows: int, count: int) -> None:
    """Check that a trail holds `rows` rows for each of `count` boundaries. Raises BadTrail."""
    if len(trail) != rows * count * FINGERPRINT_BYTES:
        raise BadTrail(f"{len(trail)} bytes of fingerprints for {rows} rows at {count} boundaries")


DOMAIN = b"primerl boundary\x00"
"""Prefix of signed bytes, which no envelope has."""
MAX_WAITING = 256
"""Most steps in the engine at a time; more than are ever in flight."""


class SignedTrails:
    """Adds and removes trail signatures on one stage of a plan.

    Steps that sample no token have no trail.
    """

    def __init__(self, key: SecretKey, run: bytes, plan: PipelinePlan, rank: int) -> None:
        self._key = key
        self._nodes = [stage.node for stage in plan.stages]
        self._rank = rank
        self._about = DOMAIN + run + plan.group + plan.generation.to_bytes(8, "big")
        self._epoch = -1
        self._waiting = RecentDict[int, tuple[bytes, bytes]](MAX_WAITING)
        """Step number -> (trail as received, the same without signatures)."""

    def inward(self, packet: Packet) -> Packet:
        """Remove the signatures from the previous stage's packet, for our engine. Raises BadTrail."""
        if packet.kind not in (Kind.STEP, Kind.DRAWN) or not packet.head.trail:
            return packet
        trail = _trail(packet)
        if self._rank == 0:
            plain = self._verified(packet, trail)
        else:
            plain = b"".join(_split(trail, self._rank))
            self._keep(packet, trail, plain)
        return _with_trail(packet, plain)

    def outward(self, packet: Packet) -> Packet:
        """Restore and add signatures on our engine's packet, for the next stage. Raises BadTrail."""
        if packet.kind not in (Kind.STEP, Kind.DRAWN) or not packet.head.trail:
            return packet
        trail = _trail(packet)
        received, plain = b"", b""
        if self._rank > 0:
            if packet.head.epoch != self._epoch or packet.head.number not in self._waiting:
                raise BadTrail("our engine returned a trail for a step that had none")
            received, plain = self._waiting.pop(packet.head.number)
        if not trail.startswith(plain):
            raise BadTrail("our engine changed the fingerprints of earlier stages")
        if self._rank == len(self._nodes) - 1:
            return _with_trail(packet, received)
        claims = received + trail[len(plain) :]
        signature = self._key.sign(self._message(packet, self._rank, claims))
        return _with_trail(packet, claims + signature)

    def _keep(self, packet: Packet, trail: bytes, plain: bytes) -> None:
        if packet.head.epoch != self._epoch:
            self._epoch = packet.head.epoch
            self._waiting.clear()
        self._waiting[packet.head.number] = trail, plain

    def _verified(self, packet: Packet, trail: bytes) -> bytes:
        """Verify all signatures; return the trail without them. Raises BadTrail."""
        parts = _split(trail, len(self._nodes) - 1)
        end = 0
        for rank, part in enumerate(parts):
            end += len(part)
            signature = trail[end : end + SIGNATURE_BYTES]
            if not verify(self._nodes[rank], signature, self._message(packet, rank, trail[:end])):
                raise BadTrail(f"the fingerprints of stage {rank} were changed by a later stage")
            end += SIGNATURE_BYTES
        return b"".join(parts)

    def _message(self, packet: Packet, rank: int, claims: bytes) -> bytes:
        head = packet.head
        where = (rank, head.epoch, head.number)
        return b"".join([self._about, *(number.to_bytes(8, "big") for number in where), claims])


def _trail(packet: Packet) -> bytes:
    body = packet.head.body
    return packet.contents[body : body + packet.head.trail]


def _with_trail(packet: Packet, trail: bytes) -> Packet:
    """Return a copy of `packet` with this trail."""
    head, contents = packet.head, packet.contents
    raw = msgspec.msgpack.encode(msgspec.structs.replace(head, trail=len(trail)))
    after = head.body + head.trail
    return Packet(
        msgspec.structs.replace(head, trail=len(trail)),
        len(raw).to_bytes(PREFIX_BYTES, "big") + raw,
        b"".join([contents[: head.body], trail, contents[after:]]),
    )


def _split(trail: bytes, stages: int) -> list[bytes]:
    """Split a signed trail into the fingerprints of each stage, without signatures.

    Raises BadTrail.
    """
    size, odd = divmod(len(trail), stages)
    rows, half = divmod(size - SIGNATURE_BYTES, FINGERPRINT_BYTES)
    if odd or half or rows < 1:
        raise BadTrail(f"{len(trail)} bytes are not a signed trail of {stages} stages")
    return [trail[at : at + rows * FINGERPRINT_BYTES] for at in range(0, len(trail), size)]
