#!/usr/bin/env bash
# On a CUDA machine with GPU vLLM: a run of the whole stack on its GPUs, trainer and worker on one or each its own.
#
#   [GPUS=1] [PYTHON=python3] [OUT=directory of the report] bash tests/gpu/measure_run.sh [FLAGS OF rl]...
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
mkdir -p build && ln -sfn .. build/primerl
export PYTHONPATH="$root/build:$root/tests${PYTHONPATH:+:$PYTHONPATH}"
# not on a disk, whose pauses would be measured
if [ -z "${TMPDIR:-}" ] && [ -w /dev/shm ]; then export TMPDIR=/dev/shm; fi
export VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 PYTHONUNBUFFERED=1

exec timeout 570 "${PYTHON:-python3}" tests/gpu/measure_run.py --gpus "${GPUS:-1}" --out "${OUT:-.}" "$@"
