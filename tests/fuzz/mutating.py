"""Mutations that keep a payload plausible: the header stays right and blocks stay framed, mostly.

Without that almost every mutated payload falls at the first length, and nothing behind it is tried.
"""

import random
from collections.abc import Callable

from fuzz.targets import LAYOUT, TARGETS, full, mirror, seeds, step

from primerl.node.weights.payload import DELTA, FULL, PayloadReader, blocks_of, framed, header
from primerl.node.weights.state import CodecError

Mangle = Callable[[bytes], bytes]
"""Changes a few bytes anyhow."""
Frame = tuple[int, bytes]
"""Method and body of a block."""

KINDS = {TARGETS.index(full): FULL} | {TARGETS.index(target): DELTA for target in (step, mirror)}
"""Which targets read payloads, and of what kind."""
INTERESTING = (0, 1, 2, 3, 4, 15, 16, 31, 127, 128, 129, 254, 255)
METHODS = 6
"""Methods of a block, and a few that are none."""
START = 12
"""Bytes at the start of a body where the counts are."""


def mutated(rng: random.Random, data: bytes, mangle: Mangle) -> bytes:
    """A relative of `data`, an input of targets.run()."""
    kind = KINDS.get(data[0] % len(TARGETS)) if data else None
    if not data or rng.random() < 0.02:
        return rng.choice(SEEDS)
    if kind is None or rng.random() < 0.1:
        return data[:1] + mangle(data[1:])
    frames, rest = split(data[1:], kind)
    if not frames:
        return rng.choice([one for one in SEEDS if one[0] == data[0] % len(TARGETS)])
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        rng.choice((one_body, one_body, one_count, one_count, one_method, one_place, one_swap))(
            rng, frames, mangle
        )
    body = b"".join(framed(method, body) for method, body in frames)
    if rng.random() < 0.9:
        rest = b""
    return data[:1] + header(kind, LAYOUT) + body + rest


def split(payload: bytes, kind: int) -> tuple[list[Frame], bytes]:
    """The blocks at the start of a payload, as far as they are framed, and what follows."""
    reader = PayloadReader(payload)
    frames: list[Frame] = []
    used = len(header(kind, LAYOUT))
    try:
        reader.header(kind, LAYOUT)
        for _, dtype, shape in LAYOUT:
            for part in blocks_of(shape):
                method, body = reader.block(part, dtype)
                frames.append((method, bytes(body)))
                used += len(framed(method, bytes(body)))
    except CodecError:
        pass
    return frames, payload[used:]


def one_body(rng: random.Random, frames: list[Frame], mangle: Mangle) -> None:
    """A few bytes somewhere in a body."""
    at = rng.randrange(len(frames))
    frames[at] = (frames[at][0], mangle(frames[at][1]))


def one_count(rng: random.Random, frames: list[Frame], mangle: Mangle) -> None:
    """One of the first bytes of a body, where it says how much of what follows."""
    at = rng.randrange(len(frames))
    method, body = frames[at]
    if body:
        place = rng.randrange(min(START, len(body)))
        value = rng.choice((*INTERESTING, body[place] + 1 & 255, body[place] - 1 & 255))
        frames[at] = (method, body[:place] + bytes([value]) + body[place + 1 :])


def one_method(rng: random.Random, frames: list[Frame], mangle: Mangle) -> None:
    """The same body by another method."""
    at = rng.randrange(len(frames))
    frames[at] = (rng.randrange(METHODS), frames[at][1])


def one_place(rng: random.Random, frames: list[Frame], mangle: Mangle) -> None:
    """A body for another tensor, of this payload or of a valid one, or two halves of bodies."""
    at = rng.randrange(len(frames))
    method, body = rng.choice(rng.choice((frames, *VALID)))
    cut = rng.randrange(len(body) + 1) if rng.random() < 0.5 else 0
    frames[at] = (method, frames[at][1][:cut] + body[cut:])


def one_swap(rng: random.Random, frames: list[Frame], mangle: Mangle) -> None:
    """A block too many, too few, or at the place of another."""
    at, to = rng.randrange(len(frames)), rng.randrange(len(frames))
    frames[at], frames[to] = frames[to], frames[at]
    if rng.random() < 0.2:
        frames.insert(at, frames[to])
    elif rng.random() < 0.2 and len(frames) > 1:
        frames.pop(at)


def mangled(rng: random.Random, data: bytes) -> bytes:
    """`data` with flips, a cut, a repeated or inserted piece, or an interesting value."""
    out = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(out) or 1)
        how = rng.randrange(6)
        if how == 0 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif how == 1 and out:
            out[at] = rng.choice(INTERESTING)
        elif how == 2:
            del out[at:]
        elif how == 3:
            out[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif how == 4:
            out[at:at] = out[rng.randrange(len(out) or 1) :][: rng.randrange(1, 64)]
        else:
            del out[at : at + rng.randrange(1, 9)]
    return bytes(out)


SEEDS = seeds()
VALID = [split(one[1:], KINDS[one[0]])[0] for one in SEEDS if one[0] in KINDS]
