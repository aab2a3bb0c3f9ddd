#!/usr/bin/env bash
# Installs primerl-node into .venv beside the repository; asking again does nothing.
#
#   scripts/install.sh [EXTRAS]        default: run        e.g. run,dev
#
# Needs Python >= 3.11 with venv, and pip's way to a package index. PYTHON names another interpreter.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
extras=${1:-run}

say() { printf '%s\n' "primerl-node: $*" >&2; }

good_python() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    local name
    for name in ${PYTHON:+"$PYTHON"} python3.12 python3.11 python3.13 python3.14 python3 python; do
        if good_python "$name"; then
            command -v "$name"
            return
        fi
    done
    say "no Python >= 3.11 with venv and pip found: install one (on Debian also python3-venv)," \
        "or name it: PYTHON=/path/to/python bash $0"
    return 1
}

# A stamp per set of extras: what was asked for, at which state of the files that say what it is.
wanted_stamp() {
    { echo "$extras"; cat "$root/pyproject.toml" "$root/constraints.txt"; } | "$venv/bin/python" -c \
        'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

# pip in the background, with a line that shows it lives; its words are in the log.
install() {
    local log=$venv/install.log started=$SECONDS code=0
    "$venv/bin/python" -m pip install --disable-pip-version-check --constraint "$root/constraints.txt" \
        --editable "$root[$extras]" >"$log" 2>&1 &
    local pip=$!
    trap 'kill "$pip" 2>/dev/null || true' INT TERM EXIT
    while kill -0 "$pip" 2>/dev/null; do
        sleep 1
        if [[ -t 2 ]]; then
            printf '\rprimerl-node: installing, %d s: %.60s\033[K' $((SECONDS - started)) \
                "$(tail -n 1 "$log")" >&2
        elif (((SECONDS - started) % 30 == 0)); then
            say "installing, $((SECONDS - started)) s"
        fi
    done
    wait "$pip" || code=$?
    trap - INT TERM EXIT
    if [[ -t 2 ]]; then printf '\r\033[K' >&2; fi
    if ((code != 0)); then
        tail -n 20 "$log" >&2
        say "installation failed: the whole log is $log"
        return 1
    fi
    say "installed in $((SECONDS - started)) s"
}

if [[ ! -x $venv/bin/python ]]; then
    python=$(find_python)
    say "making $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi
stamp=$venv/.installed-${extras//,/-}
if [[ -f $stamp && $(cat "$stamp") == "$(wanted_stamp)" ]]; then
    exit 0
fi
say "installing into $venv (the first time some minutes, mostly torch)"
install
wanted_stamp >"$stamp"
