#!/usr/bin/env bash
# On a machine with two or four CUDA devices, torch and transformers: the trainer's suites, and how it scales.
#
#   [RANKS=2] [PYTHON=python3] [OUT=directory of the reports] bash tests/gpu/measure_training.sh
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
mkdir -p build && ln -sfn .. build/primerl
export PYTHONPATH="$root/build:$root/tests${PYTHONPATH:+:$PYTHONPATH}"
export OUT=${OUT:-.} CUBLAS_WORKSPACE_CONFIG=:4096:8
python=${PYTHON:-python3}
ranks=${RANKS:-2}

timeout 180 "$python" scripts/bench/trainer.py --ranks "$ranks" --steps 5 --json "$OUT/scaling.json" 2>&1 |
    grep -v "^\[\|Warn\|W1\|\*\*\*\|OMP_NUM" | tail -n 12
PRIMERL_TEST_DEVICE=cuda timeout 150 "$python" -m pytest -q -p no:cacheprovider -o filterwarnings=default tests/conformance/test_backend.py 2>&1 | tail -n 12
timeout 120 "$python" -m pytest -q -p no:cacheprovider -m gpu tests/gpu/test_training_gpu.py 2>&1 | tail -n 12
timeout 100 "$python" tests/gpu/measure_ranks.py --ranks "$ranks" 2>&1 | grep -v "^\[\|Warn\|W1" | tail -n 16
