#!/usr/bin/env bash
# On a CUDA machine with GPU vLLM: the cheat book on a model of 0.6B, and beside it on small ones on the CPU.
#
#   [PYTHON=python3] [OUT=directory of the reports] bash tests/gpu/measure_cheats.sh [ARGUMENTS]...
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
mkdir -p build && ln -sfn .. build/primerl
export PYTHONPATH="$root/build:$root/tests${PYTHONPATH:+:$PYTHONPATH}"
export VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 PYTHONUNBUFFERED=1
export OUT=${OUT:-.} OPENBLAS_NUM_THREADS=2
logs=$(mktemp -d)
python=${PYTHON:-python3}

small() {
    timeout 540 "$python" scripts/bench/cheats.py --models "$1" --audit "$6" --threads "$2" --blocks "$3" --rollouts "$4" \
        --train-device cuda --save "$OUT/$5.json" >"$logs/$5.log" 2>&1
}
if [ -z "${GPU_ONLY:-}" ]; then
small tiny 2 12000 128 tiny "" &
small tiny:bfloat16 2 12000 128 tiny_bf16 float32,bfloat16 &
small 50m 7 5000 64 50m "" &
fi
timeout 540 "$python" tests/gpu/measure_cheats.py "$@" 2>&1 | tee "$OUT/h200.log"
big=$?
wait
tail -n 12 "$logs"/*.log
echo "figures $big (0 is good)"
exit $big
