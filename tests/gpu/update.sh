#!/usr/bin/env bash
# On a CUDA machine with GPU vLLM: the tests of updates in place, then their figures.
#
#   [PYTHON=python3] [OUT=directory of the report] bash tests/gpu/update.sh [ARGUMENTS OF bench/update.py]...
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
mkdir -p build && ln -sfn .. build/primerl
export PYTHONPATH="$root/build:$root/tests${PYTHONPATH:+:$PYTHONPATH}"
export VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 PYTHONUNBUFFERED=1
python=${PYTHON:-python3}

"$python" -m pytest -q -o filterwarnings= -p no:cacheprovider -m gpu tests/gpu/test_vllm_gpu.py
tests=$?
"$python" scripts/bench/update.py --engine vllm --shape 0.6b --json "${OUT:-.}/update.json" "$@"
bench=$?
echo "tests $tests, figures $bench (0 is good)"
exit $((tests | bench))
