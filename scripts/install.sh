#!/usr/bin/env bash
# Installs primerl-node into .venv in the repository; running it again does nothing.
#
#   scripts/install.sh [EXTRAS]        default: run        e.g. run,dev; '' is the daemon without torch
#
# Needs Python >= 3.11 with venv, and a package index that pip can reach. Needs no compiler: it installs only
# wheels, and two packages of pure Python that have none. PYTHON names another interpreter, TORCH_CPU_INDEX another
# index of torch's CPU build, which a machine without a GPU gets; empty: as pip's own indexes have it.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
extras=${1-run}
unbuilt=varint,python-baseconv # pure Python, published as source only
cpu_index=${TORCH_CPU_INDEX-https://download.pytorch.org/whl/cpu}
indexes=()

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

# A stamp of the requested extras and of the files that define them.
wanted_stamp() {
    { echo "$extras"; cat "$root/pyproject.toml" "$root/constraints.txt"; } | "$venv/bin/python" -c \
        'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

# Width of the terminal, to keep the progress on one line.
columns() {
    local size=${COLUMNS:-$(stty size <&2 2>/dev/null || true)}
    size=${size##* }
    if [[ $size =~ ^[1-9][0-9]*$ ]]; then echo "$size"; else echo 80; fi
}

# Advice after a failure of pip, from its log.
advice() {
    if grep -qi 'no space left on device' "$log"; then
        say "the disk is full: make room (about 4 GB for the CPU build of torch, 10 for CUDA), or point TMPDIR at" \
            "a larger one, and run this again"
    elif grep -qiE 'connection|name resolution|timed out|retrying|proxy|certificate' "$log"; then
        say "pip did not reach its package index: look at the network, the proxy and pip's settings" \
            "(\`pip config list\`), and run this again"
    elif grep -qiE 'no matching distribution|could not find a version' "$log"; then
        say "a package has no wheel for this interpreter ($("$venv/bin/python" --version 2>&1)): remove $venv and run" \
            "this again with another, PYTHON=/path/to/python3.12; docs/install.md says which are known to work"
    else
        say "remove $venv and run this again; if that does not help, report it with the log"
    fi
}

# Without a GPU, take torch's CPU build: the package index has the CUDA build, of several GB.
find_cpu_index() {
    if [[ ,$extras, != *,run,* || -z $cpu_index || -e /dev/nvidiactl || -e /dev/dxg ]]; then return; fi
    if "$venv/bin/python" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=10)' \
        "$cpu_index/torch/" >/dev/null 2>&1; then
        indexes=(--extra-index-url "$cpu_index")
    else
        say "$cpu_index, which has torch's CPU build, does not answer: unless pip knows another such index, this" \
            "takes the CUDA build, several GB more; TORCH_CPU_INDEX names another"
    fi
}

# Run pip in the background, with a progress line; its output goes to the log.
install() {
    local code=0 line
    "$venv/bin/python" -m pip install --disable-pip-version-check --only-binary :all: --no-binary "$unbuilt" \
        --constraint "$root/constraints.txt" ${indexes[@]+"${indexes[@]}"} "$@" >>"$log" 2>&1 &
    local pip=$!
    trap 'kill "$pip" 2>/dev/null || true' INT TERM EXIT
    while kill -0 "$pip" 2>/dev/null; do
        sleep 1
        if [[ -t 2 ]]; then
            line="primerl-node: installing, $((SECONDS - started)) s: $(tail -n 1 "$log")"
            printf '\r%s\033[K' "${line:0:$(columns)-1}" >&2
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
        advice
        return 1
    fi
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
log=$venv/install.log started=$SECONDS
: >"$log"
find_cpu_index
install --editable "$root${extras:+[$extras]}"
install --no-deps libp2p # one of its requirements needs a compiler; pyproject.toml lists the others
mkdir -p "$venv/share/man/man1" # `man primerl-node` finds it while .venv is activated
"$venv/bin/python" -m primerl.cli.main man >"$venv/share/man/man1/primerl-node.1"
wanted_stamp >"$stamp"
say "installed in $((SECONDS - started)) s"
