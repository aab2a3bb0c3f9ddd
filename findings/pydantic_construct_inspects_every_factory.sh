#!/usr/bin/env bash
# pydantic 2.14.3: model_construct(), which skips validation and is meant to be the quick way for trusted data, inspects
# the signature of the default factory of each field that is not given, for every object. So an object with
# eight of them takes some hundred times as long to construct as to validate, which inspects nothing after the class was
# made. A library that constructs a message for each turn of a conversation (verifiers 0.4.0) spends half of the time of
# a rollout there.
#
# One would guess otherwise: the class knows from its creation whether a factory takes the validated data, and the
# documentation offers model_construct() where validation costs too much.
#
# Output, 2026-11-30, CPython 3.11.7, x86_64 (the last line is a time: only its direction is checked):
#
#     signatures inspected by 100 x model_validate({})     0
#     signatures inspected by 100 x model_construct()      800
#     ... with every field given                           0
#     construct / validate, time of an object              247.3
#
# Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet "pydantic==2.14.3"

cat > messages.py <<'PYTHON'
import inspect
import sys
import timeit

from pydantic import BaseModel, Field


class Message(BaseModel):
    tools: list[str] = Field(default_factory=list)
    calls: list[str] = Field(default_factory=list)
    parts: list[str] = Field(default_factory=list)
    spans: list[int] = Field(default_factory=list)
    marks: list[int] = Field(default_factory=list)
    extra: dict[str, str] = Field(default_factory=dict)
    state: dict[str, str] = Field(default_factory=dict)
    names: set[str] = Field(default_factory=set)


def inspected(make) -> int:
    """Count the calls of inspect.signature() while 100 objects are made."""
    make()
    count, code = 0, inspect.signature.__code__

    def counting(frame, event, argument):
        nonlocal count
        count += event == "call" and frame.f_code is code

    sys.setprofile(counting)
    try:
        for _ in range(100):
            make()
    finally:
        sys.setprofile(None)
    return count


given = {name: [] for name in Message.model_fields}
validated = inspected(lambda: Message.model_validate({}))
constructed = inspected(lambda: Message.model_construct())
complete = inspected(lambda: Message.model_construct(**given))
ratio = min(timeit.repeat(lambda: Message.model_construct(), number=2000, repeat=5)) / min(
    timeit.repeat(lambda: Message.model_validate({}), number=2000, repeat=5)
)
print(f"{'signatures inspected by 100 x model_validate({})':52} {validated}")
print(f"{'signatures inspected by 100 x model_construct()':52} {constructed}")
print(f"{'... with every field given':52} {complete}")
print(f"{'construct / validate, time of an object':52} {ratio:.1f}")
assert (validated, constructed, complete) == (0, 800, 0), "pydantic inspects otherwise now"
assert ratio > 1, "constructing is quicker than validating now"
PYTHON
env/bin/python messages.py
