#!/usr/bin/env bash
# msgspec 0.22.0: a number of a Struct that is bounded below (Meta(ge=0)) may be infinite when it comes as msgpack; NaN
# is refused by the same bound. As JSON such a Struct is written with null in the number's place, without an error,
# and the same type cannot read that back.
#
# One would guess otherwise: a type that reads what it wrote elsewhere (msgspec reads JSON's 1e400 as out of range),
# and a bound that refuses NaN seems to ask for a finite number. `le`, however large, refuses infinity.
#
# Output, 2026-11-29, CPython 3.11.7, x86_64:
#
#     msgpack inf, Meta(ge=0)              Row(x=inf)
#     msgpack nan, Meta(ge=0)              ValidationError
#     msgpack inf, Meta(ge=0, le=1e300)    ValidationError
#     as JSON                              b'{"x":null}'
#     read back                            ValidationError
#     JSON 1e400                           ValidationError
#
# Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet "msgspec==0.22.0"

cat > rows.py <<'PYTHON'
import math
import struct
from typing import Annotated

import msgspec


class Row(msgspec.Struct):
    x: Annotated[float, msgspec.Meta(ge=0)]


class Bounded(msgspec.Struct):
    x: Annotated[float, msgspec.Meta(ge=0, le=1e300)]


def packed(value: float) -> bytes:
    """A msgpack map {"x": value}."""
    return b"\x81\xa1x\xcb" + struct.pack(">d", value)


def tried(read) -> str:
    try:
        return repr(read())
    except msgspec.ValidationError as error:
        return type(error).__name__


infinite = msgspec.msgpack.decode(packed(math.inf), type=Row)
written = msgspec.json.encode(infinite)
found = {
    "msgpack inf, Meta(ge=0)": repr(infinite),
    "msgpack nan, Meta(ge=0)": tried(lambda: msgspec.msgpack.decode(packed(math.nan), type=Row)),
    "msgpack inf, Meta(ge=0, le=1e300)": tried(lambda: msgspec.msgpack.decode(packed(math.inf), type=Bounded)),
    "as JSON": repr(written),
    "read back": tried(lambda: msgspec.json.decode(written, type=Row)),
    "JSON 1e400": tried(lambda: msgspec.json.decode(b'{"x": 1e400}', type=Row)),
}
for name, value in found.items():
    print(f"{name:36} {value}")
assert list(found.values()) == [
    "Row(x=inf)", "ValidationError", "ValidationError", "b'{\"x\":null}'", "ValidationError", "ValidationError",
], "msgspec behaves otherwise now"
PYTHON
env/bin/python rows.py
