#!/usr/bin/env bash
# Checks that a commit must pass: format, lint, types, tests with warnings as errors.
#
#   bash scripts/check.sh [PYTEST ARGUMENTS]...
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
bash scripts/install.sh run,dev,docs

# pyright does not know that the repository root is the package: this link tells it.
mkdir -p build
ln -sfn .. build/primerl

run() {
    printf '== %s\n' "$*"
    "$@"
}
run .venv/bin/ruff format --check .
run .venv/bin/ruff check .
run .venv/bin/pyright
run .venv/bin/python scripts/lines.py
run bash scripts/package.sh --check
run env NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet # the site, into build/site
run bash scripts/test.sh -W error "$@"
