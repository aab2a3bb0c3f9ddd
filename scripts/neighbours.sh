#!/usr/bin/env bash
# Checks this tree against another commit, as a release against the one before it: data that the other wrote is
# resumed, and a trainer of either works with a worker of the other. A minute or two each, on the CPU.
#
#   bash scripts/neighbours.sh COMMIT [FIXTURE.tar.xz]
#
# COMMIT runs from an archive of git, on the packages of this tree's .venv. FIXTURE is a file to pack what it wrote
# into: tests/older/written_by_COMMIT.tar.xz, for tests/cli/test_older_data.py.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
commit=${1:?a commit or tag of the other release} fixture=${2:-}
python=$root/.venv/bin/python
work=$(mktemp -d)
pids=()
finish() {
    ((${#pids[@]} == 0)) || kill "${pids[@]}" 2>/dev/null || true
}
trap finish EXIT
trap 'exit 143' INT TERM

mkdir -p "$work/other/primerl" "$work/here"
git -C "$root" archive "$commit" | tar x -C "$work/other/primerl"
ln -s "$root" "$work/here/primerl"
export XDG_RUNTIME_DIR=$work OMP_NUM_THREADS=1

say() { printf '== %s\n' "$*"; }
node() { # node SIDE ARGUMENTS...: primerl-node of `other` or `here`
    PYTHONPATH=$work/$1 "$python" -m primerl.cli.main "${@:2}"
}
settings=$root/tests/older/run.toml

say "$commit writes a run of three steps"
node other rl @ "$settings" --output-dir "$work/out" >"$work/rl.log" 2>&1 || { tail -n 30 "$work/rl.log"; exit 1; }
if [[ $fixture ]]; then
    # what the tests do not read stays out; the worker fetches again what it lacks
    tar c -C "$work/out" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner \
        --exclude=reward.png --exclude=weights --exclude=logs --exclude='worker_1/runs/*/chunks' \
        --exclude='worker_1/runs/*/model' --exclude='*.lock' before | xz -9e >"$fixture"
    say "$fixture: $(stat -c %s "$fixture") bytes"
fi

say "this tree resumes it"
node here rl @ "$settings" --output-dir "$work/out" --resume --max-steps 5 >"$work/rl.log" 2>&1 ||
    { tail -n 30 "$work/rl.log"; exit 1; }
grep -E '^(rollouts|stale) ' "$work/rl.log"

for sides in "other here" "here other"; do
    read -r trainer worker <<<"$sides"
    say "a trainer of $trainer with a worker of $worker (other: $commit)"
    out=$work/$trainer-$worker
    node "$trainer" train @ "$settings" --output-dir "$out" >"$out.trainer.log" 2>&1 &
    pids+=($!)
    trained=$!
    for _ in {1..600}; do
        [[ -s $out/before/ticket.txt ]] && break
        sleep 0.2
    done
    node "$worker" join --ticket "$out/before/ticket.txt" --data-dir "$out.worker" --network.host 127.0.0.1 \
        >"$out.worker.log" 2>&1 &
    pids+=($!)
    joined=$!
    # the worker ends when its trainer does; before that only with an error
    wait "$joined" && wait "$trained" || { tail -n 30 "$out".*.log; exit 1; }
    grep -E '^(rollouts|stale) ' "$out.trainer.log"
done
say "both releases work together (all that they wrote: $work)"
