#!/usr/bin/env bash
# Renews requirements.lock: every package of `primerl-node[run]`, pinned, with the hashes of its files, for Python
# 3.11 to 3.14 and all platforms. Needs a network; takes seconds.
#
#   bash scripts/lock.sh              what pyproject.toml needs now; versions stay where they can
#   bash scripts/lock.sh --upgrade    the newest that it allows (further arguments are uv's)
#   bash scripts/lock.sh --check      changes nothing, and fails where pyproject.toml needs something else
#
# Install by it, torch first, in the build that fits the machine (the lock has none, for builds differ by GPU):
#
#   pip install torch -c constraints.txt
#   pip install --no-deps --require-hashes -r requirements.lock
#   pip install --no-deps .
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
lock=requirements.lock
source scripts/tools.sh uv

work=$(mktemp -d)
target=$lock
if [[ ${1:-} == --check ]]; then
    target=$work/$lock
    cp "$lock" "$target"
    shift
fi
# fastecdsa: see libp2p in pyproject.toml
printf '%s\n' "torch ; sys_platform == 'never'" "fastecdsa ; sys_platform == 'never'" >"$work/without"
grep '^libp2p==' constraints.txt >"$work/libp2p.in"
"$tools/uv" pip compile pyproject.toml "$work/libp2p.in" --extra run --universal \
    --python-version 3.11 --generate-hashes --no-annotate --override "$work/without" --quiet --no-emit-package torch --no-emit-package fastecdsa \
    --custom-compile-command "bash scripts/lock.sh" --output-file "$target" "$@"
diff -u "$lock" "$target" || { echo "requirements.lock is not what pyproject.toml needs: bash scripts/lock.sh" >&2; exit 1; }
