#!/usr/bin/env bash
# Runs a benchmark, or pytest, on a CUDA machine with the package importable from here and vLLM offline.
#
#   [PYTHON=python3] bash scripts/bench/gpu.sh PROGRAM [ARGUMENTS]...
#
# PROGRAM is a file of this folder without .py (gpu_run, gpu_plan, worker, update, trainer), or pytest:
#   bash scripts/bench/gpu.sh gpu_run --gpus 1 --max-steps 40
#   PRIMERL_TEST_DEVICE=cuda bash scripts/bench/gpu.sh pytest tests/conformance/test_backend.py
#   bash scripts/bench/gpu.sh pytest -m gpu tests/gpu
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
mkdir -p build && ln -sfn .. build/primerl
export PYTHONPATH="$root/build:$root/tests${PYTHONPATH:+:$PYTHONPATH}"
# in memory: stalls of a disk would be measured
if [[ -z ${TMPDIR:-} && -w /dev/shm ]]; then export TMPDIR=/dev/shm; fi
export VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 PYTHONUNBUFFERED=1
export CUBLAS_WORKSPACE_CONFIG=:4096:8
unset PYTHONDONTWRITEBYTECODE # else every process of vLLM would compile all its imports

program=$1
shift
if [[ $program == pytest ]]; then
    exec "${PYTHON:-python3}" -m pytest -q -p no:cacheprovider -o filterwarnings=default -o log_level=INFO "$@"
fi
exec "${PYTHON:-python3}" "scripts/bench/$program.py" "$@"
