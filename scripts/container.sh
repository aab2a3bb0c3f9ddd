#!/usr/bin/env bash
# Builds the image of the CPU and plays compose.yaml with it: workers join, the trainer's container is stopped and started, and
# the run goes on. Before a release. Needs podman and podman-compose, or docker; ten minutes, most of them for the build.
#
#   bash scripts/container.sh [ARGUMENTS OF THE BUILD]...       e.g. --build-arg BASE=registry.example/debian:bookworm-slim
#
# BUILD and COMPOSE name other commands: BUILD='buildah bud --layers' COMPOSE='podman-compose --podman-run-args=--ulimit=host'.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
if docker info &>/dev/null; then engine=docker compose="docker compose"; else engine=podman compose=podman-compose; fi
${BUILD:-$engine build} --tag primerl-node:cpu --target cpu "$@" .

play() { ${COMPOSE:-$compose} -p primerl-check "$@"; }
count() { # a number of the trainer's status; 0 while it does not answer
    play exec -T trainer primerl-node status --json 2>/dev/null | python3 -c \
        'import json, sys; print(json.load(sys.stdin)["status"][sys.argv[1]])' "$1" 2>/dev/null || echo 0
}
until_more() { # NUMBER THAN: wait for more
    local now deadline=$((SECONDS + 600))
    while now=$(count "$1"); ((now <= $2)); do
        ((SECONDS < deadline)) || { play logs; echo "$1 is $now after ten minutes" >&2; exit 1; }
        sleep 5
    done
    echo "$1: $now"
}

trap 'play down --volumes --timeout 60 &>/dev/null' EXIT
play up -d
until_more accepted 0
step=$(count step)
play stop --timeout 300 trainer
play start trainer
until_more step $((step + 2))
play exec -T trainer primerl-node peers
