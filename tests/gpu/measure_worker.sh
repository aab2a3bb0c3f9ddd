#!/usr/bin/env bash
# On a CUDA machine with GPU vLLM: a whole worker against bare vLLM, at 256 and 512 sequences.
#
#   [PYTHON=python3] [OUT=directory of the report] bash tests/gpu/measure_worker.sh [ARGUMENTS OF bench/worker.py]...
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
mkdir -p build && ln -sfn .. build/primerl
export PYTHONPATH="$root/build:$root/tests${PYTHONPATH:+:$PYTHONPATH}"
# not on a disk, whose pauses would be measured
if [ -z "${TMPDIR:-}" ] && [ -w /dev/shm ]; then export TMPDIR=/dev/shm; fi
export VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 PYTHONUNBUFFERED=1

work=$(mktemp -d)
trap 'cp "$work"/*.log "${OUT:-.}"; rm -rf "$work"' EXIT
timeout 590 "${PYTHON:-python3}" scripts/bench/worker.py --keep "$work" --json "${OUT:-.}/worker.json" "$@"
