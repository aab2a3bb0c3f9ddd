#!/usr/bin/env bash
# Opens a tmux session on a run: status, peers, and the logs of trainer and workers, each in a pane.
#
#   bash scripts/tmux.sh RUN_DIR [SESSION]        e.g. outputs/demo; the session is named after it
#
# Read-only: closing the session does not affect the run. Called again, it opens the existing session;
# call `tmux kill-session -t SESSION` first to add panes for new workers.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
most=6 # panes per window

say() { printf 'tmux.sh: %s\n' "$*" >&2; }

if [[ $# -lt 1 || $# -gt 2 ]]; then
    say "which run? bash scripts/tmux.sh RUN_DIR [SESSION]"
    exit 2
fi
if [[ ! -d $1/logs ]]; then
    say "$1/logs is not there: name the directory of a run that was started by \`primerl-node rl\`"
    exit 2
fi
if ! command -v tmux >/dev/null; then
    say "tmux is not installed: install it, or \`tail -F $1/logs/*.log\`"
    exit 1
fi
run=$(cd "$1" && pwd)
session=${2:-primerl-$(basename "$run")}
session=${session//[.:]/_} # tmux uses them to separate windows and panes in names

program=$root/.venv/bin/primerl-node
if [[ ! -x $program ]]; then program=primerl-node; fi

# Add one pane: NAME COMMAND...
panes=0
last=
pane() {
    local name=$1
    local where=(-d -P -F '#{pane_id}')
    shift
    if ((panes == 0)); then
        last=$(tmux new-session "${where[@]}" -s "$session" -n run -x 220 -y 60 -- "$@")
    elif ((panes % most == 0)); then
        last=$(tmux new-window "${where[@]}" -t "=$session:" -n "$name" -- "$@")
    else
        last=$(tmux split-window "${where[@]}" -t "$last" -- "$@")
        tmux select-layout -t "$last" tiled # makes room for the next pane
    fi
    panes=$((panes + 1))
}

# Show a node's status repeatedly: the node may start later, and restart
watch() {
    # shellcheck disable=SC2016  # the inner shell is to expand these
    local again='while :; do "$0" "$1" --watch --data-dir "$2"; sleep 2; done'
    pane "$1" bash -c "$again" "$program" "$1" "$run/trainer"
}

if ! tmux has-session -t "=$session" 2>/dev/null; then
    watch status
    watch peers
    pane trainer tail -n 200 -F "$run/logs/trainer.log"
    while IFS= read -r log; do
        pane workers tail -n 200 -F "$log"
    done < <(find "$run/logs" -maxdepth 1 -name 'worker_*.log' | sort -V)
fi

if [[ ! -t 1 ]]; then
    say "look at it with \`tmux attach -t '=$session'\`"
elif [[ -n ${TMUX:-} ]]; then
    tmux switch-client -t "=$session"
else
    exec tmux attach-session -t "=$session"
fi
