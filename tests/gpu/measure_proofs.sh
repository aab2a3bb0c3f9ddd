#!/usr/bin/env bash
# On a CUDA machine with GPU vLLM: what seeded sampling and proofs cost, under both of vLLM's runners.
#
#   [PYTHON=python3] [OUT=directory of the report] bash tests/gpu/measure_proofs.sh [ARGUMENTS]...
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
mkdir -p build && ln -sfn .. build/primerl
export PYTHONPATH="$root/build:$root/tests${PYTHONPATH:+:$PYTHONPATH}"
export VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 PYTHONUNBUFFERED=1
python=${PYTHON:-python3}

timeout 330 "$python" tests/gpu/measure_proofs.py "$@"
newer=$?
VLLM_USE_V2_MODEL_RUNNER=0 timeout 200 "$python" tests/gpu/measure_proofs.py \
    --name proofs_v1 --repeats 1 --sequences 256 "$@"
older=$?
echo "V2 runner $newer, V1 runner $older (0 is good)"
exit $((newer | older))
