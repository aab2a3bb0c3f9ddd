#!/usr/bin/env bash
# From a fresh clone to an improved model: installs into .venv, then runs the demo.
#
#   bash scripts/demo.sh [--seed 1] [--KEY VALUE]...
#
# Needs Linux x86-64, Python >= 3.11 with venv and pip, two CPU cores, no GPU, no compiler.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/scripts/install.sh" run
cd "$root"
exec .venv/bin/primerl-node rl @ configs/demo.toml --clean "$@"
