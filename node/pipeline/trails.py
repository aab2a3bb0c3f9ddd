"""Trails between daemons: every stage signs what it and those before it said of a step; stage 0 checks it all.

Without signatures any later stage could change what an earlier one had said, and have it named for what it did
not do. Those who compute never see a signature: it is put on behind them, and taken off before them.
"""

import msgspec

from ...crypto.keys import SIGNATURE_BYTES, SecretKey, verify
from ...protocol.pipelines import PipelinePlan
from .frames import PREFIX_BYTES, Kind, Packet

ROW = 8
"""Bytes of one state's fingerprint (node/inference/fingerprint.py)."""


class BadTrail(Exception):
    """A trail of another size than the rows and boundaries that it is of."""


def append(trail: bytes, own: bytes) -> bytes:
    """The trail with this stage's fingerprints: `own` holds ROW bytes for each row, none for no row."""
    if len(own) % ROW:
        raise ValueError(f"{len(own)} bytes are no rows of {ROW}: a bug of this stage")
    return trail + own


def latest(trail: bytes, rows: int, count: int) -> bytes:
    """What the last one of `count` stages so far says of its rows. Raises BadTrail."""
    check(trail, rows, count)
    return trail[len(trail) - rows * ROW :]


def check(trail: bytes, rows: int, count: int) -> None:
    """Raise BadTrail for one that is not of `rows` rows at `count` boundaries."""
    if len(trail) != rows * count * ROW:
        raise BadTrail(f"{len(trail)} bytes of fingerprints for {rows} rows at {count} boundaries")


DOMAIN = b"primerl boundary\x00"
"""No envelope begins like this."""
MAX_WAITING = 256
"""Steps that an engine may be behind: more than are ever in flight."""


class SignedTrails:
    """Of one plan, at one stage. A step whose rows lead to no token has no trail, and nothing to sign."""

    def __init__(self, key: SecretKey, run: bytes, plan: PipelinePlan, rank: int) -> None:
        self._key = key
        self._nodes = [stage.node for stage in plan.stages]
        self._rank = rank
        self._about = b"".join(
            [
                DOMAIN,
                run,
                plan.group,
                plan.generation.to_bytes(8, "big"),
            ]
        )
        self._epoch = -1
        self._waiting: dict[int, tuple[bytes, bytes]] = {}
        """Number of a step -> its trail as it came, and without signatures."""

    def inward(self, packet: Packet) -> Packet:
        """`packet` from the stage before, for our own engine. Raises BadTrail."""
        if packet.kind not in (Kind.STEP, Kind.DRAWN) or not packet.head.trail:
            return packet
        trail = _trail(packet)
        if self._rank == 0:
            plain = self._checked(packet, trail)
        else:
            plain = b"".join(_parted(trail, self._rank))
            self._keep(packet, trail, plain)
        return _with(packet, plain)

    def outward(self, packet: Packet) -> Packet:
        """`packet` from our own engine, for the stage after. Raises BadTrail."""
        if packet.kind not in (Kind.STEP, Kind.DRAWN) or not packet.head.trail:
            return packet
        trail = _trail(packet)
        came, plain = b"", b""
        if self._rank > 0:
            if packet.head.epoch != self._epoch or packet.head.number not in self._waiting:
                raise BadTrail("our engine gave a trail that did not come with its step")
            came, plain = self._waiting.pop(packet.head.number)
        if not trail.startswith(plain):
            raise BadTrail("our engine changed what the stages before it said")
        if self._rank == len(self._nodes) - 1:
            return _with(packet, came)
        said = came + trail[len(plain) :]
        return _with(packet, said + self._key.sign(self._message(packet, self._rank, said)))

    def _keep(self, packet: Packet, trail: bytes, plain: bytes) -> None:
        if packet.head.epoch != self._epoch:
            self._epoch = packet.head.epoch
            self._waiting.clear()
        self._waiting[packet.head.number] = trail, plain
        if len(self._waiting) > MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]

    def _checked(self, packet: Packet, trail: bytes) -> bytes:
        """Without signatures, which all are their stages'."""
        parts = _parted(trail, len(self._nodes) - 1)
        end = 0
        for rank, part in enumerate(parts):
            end += len(part)
            signature = trail[end : end + SIGNATURE_BYTES]
            if not verify(self._nodes[rank], signature, self._message(packet, rank, trail[:end])):
                raise BadTrail(f"what stage {rank} said of its states was changed behind it")
            end += SIGNATURE_BYTES
        return b"".join(parts)

    def _message(self, packet: Packet, rank: int, said: bytes) -> bytes:
        head = packet.head
        where = (rank, head.epoch, head.number)
        return b"".join([self._about, *(one.to_bytes(8, "big") for one in where), said])


def _trail(packet: Packet) -> bytes:
    body = packet.head.body
    return packet.contents[body : body + packet.head.trail]


def _with(packet: Packet, trail: bytes) -> Packet:
    """The same packet with another trail."""
    head, contents = packet.head, packet.contents
    raw = msgspec.msgpack.encode(msgspec.structs.replace(head, trail=len(trail)))
    after = head.body + head.trail
    return Packet(
        msgspec.structs.replace(head, trail=len(trail)),
        len(raw).to_bytes(PREFIX_BYTES, "big") + raw,
        b"".join([contents[: head.body], trail, contents[after:]]),
    )


def _parted(trail: bytes, stages: int) -> list[bytes]:
    """What each of `stages` stages said, the signature behind it left out. Raises BadTrail."""
    size, odd = divmod(len(trail), stages)
    rows, half = divmod(size - SIGNATURE_BYTES, ROW)
    if odd or half or rows < 1:
        raise BadTrail(f"{len(trail)} bytes are no signed trail of {stages} stages")
    return [trail[at : at + rows * ROW] for at in range(0, len(trail), size)]
