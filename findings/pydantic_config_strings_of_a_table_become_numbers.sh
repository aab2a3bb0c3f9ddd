#!/usr/bin/env bash
# prime-pydantic-config 0.4.3: strings of a field `dict[str, Any]` become numbers and truth values if all values of that
# table are strings, wherever they come from: a TOML file, a default, or Python. One value of another kind beside them,
# and they stay strings.
#
# One would guess otherwise: the code's own words are "TOML/programmatic dicts already have proper types and pass
# through unchanged", and a table that was written out reads back as another one.
#
# Output, CPython 3.11.7, x86_64:
#
#     {'x': '5'}              {'x': 5}
#     {'x': '5', 'y': 'on'}   {'x': 5, 'y': 'on'}
#     {'x': '5', 'y': 1}      {'x': '5', 'y': 1}
#     {'x': 'true'}           {'x': True}
#
# Fails if that changes; then node/config/base.py is not needed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet "prime-pydantic-config==0.4.3"

cat > tables.py <<'PYTHON'
from typing import Any

from pydantic_config import BaseConfig


class Section(BaseConfig):
    args: dict[str, Any] = {}


given = [{"x": "5"}, {"x": "5", "y": "on"}, {"x": "5", "y": 1}, {"x": "true"}]
found = [Section(args=dict(table)).args for table in given]
for table, args in zip(given, found, strict=True):
    print(f"{table!s:23} {args}")
assert found == [{"x": 5}, {"x": 5, "y": "on"}, {"x": "5", "y": 1}, {"x": True}], "it behaves otherwise now"
PYTHON
env/bin/python tables.py
