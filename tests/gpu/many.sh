#!/usr/bin/env bash
# Shows on GPUs what a machine without them cannot, and prints each goal beside its figure.
#
#   [PYTHON=python3] bash tests/gpu/many.sh PART OUT
#
#   PART      GPUs   what
#   tests     1, 2, 3   pytest -m gpu: engines; the trainer and its kernels on a second GPU, families of models on a third
#   audits    1, 2   audits by vLLM: honest noise, cheats, speed; 0.6B, and 4B on a second GPU
#   exact     1, 2   the same with exact numerics
#   honest    1, 2   5,120 honest rollouts judged by bounds that 256 others made: 0.6B, and 4B on a second GPU
#   honest-8b 1, 2   the same: 8B, and a mixture of experts of 3B on a second GPU
#   honest-trained 1, 2   the same with models that are trained first: 0.6B, and the mixture on a second GPU
#   envelope  1, 2   honest engines that nobody measured, and cheats, judged by readings in float32: 0.6B, or the checkpoint
#                    in $MODEL, and 4B on a second GPU
#   worker    1, 2   a worker beside bare vLLM, replies of 1,000; 256 sequences, and 512 on a second GPU
#   run       1      a whole run of 0.6B whose trainer and worker share a GPU by MPS; on a second one 4B with adapters
#   run2      2      a whole run of 0.6B, a GPU each
#   run2-long 2      the same with replies of 2,000
#   run2-kept 2      the same with keys and values kept across versions
#   run2-4b   2      the same with 4B and adapters, the trainer's audits beside its steps by MPS
#   turns     1      an 83M model learns a task of several turns and one with a tool, with vLLM
#   kernels   1, 2   a step of the trainer with FlashAttention-4, with torch's flash kernel, and a plain loop; 0.6B, and
#                    Qwen3.5's 0.8B on a second GPU
#   run4-4b   4, 8   a whole run of 4B, all weights: two GPUs train, each other one is a worker
#   trainer   2+     weak scaling of the trainer over all GPUs, two copies (HSDP), 0.6B
#   trainer-4b   2+  weak scaling with 4B, activations recomputed
#   trainer-long 2+  one sequence of 65,536 tokens a GPU, and one that GPUs share, 0.6B
#   trainer-moe  2+  a mixture of 2.9B, its experts divided among GPUs
#   fp8       1      pytest of FP8 weights
#   options   1+     vLLM's options and parallelism, each with proofs, before and after an update
#   parallel  4      the same, tp 4, tp 2 x pp 2 and tp 2 x dp 2 only, beside one GPU
#   stages    4      a pipeline of four nodes beside vLLM's own, 4B
#   stages-tp 4      the same with two GPUs in each of two nodes, shared with the other two, without vLLM's own
#
# A part ends within ten minutes: what is not done by then is stopped, and what it printed is kept. OUT gets a text and,
# but for pytest, a JSON of every program. Needs CUDA, vLLM and what scripts/install.sh installs.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
part=${1:?a part: see the head of this file}
out=$(mkdir -p "${2:?a folder}" && cd "$2" && pwd)
python=${PYTHON:-python3}
seconds=560
gpus=$(nvidia-smi -L | wc -l)

# bench GPUS NAME PROGRAM [ARGUMENTS]...: in the background, on these GPUs, if there are as many
bench() {
    local on=$1 name=$2 program=$3
    shift 3
    local last=${on##*,}
    if ((last >= gpus)); then
        echo "$name: left out, it needs GPU $last and there are $gpus"
        return
    fi
    local json=()
    if [[ $program != pytest ]]; then json=(--json "$out/$name.json"); fi
    CUDA_VISIBLE_DEVICES=$on timeout -s TERM -k 20 $seconds bash scripts/bench/gpu.sh "$program" "$@" \
        ${json[@]+"${json[@]}"} > "$out/$name.txt" 2>&1 &
}

all=$(seq -s, 0 $((gpus - 1)))
whole="--mean 400 --most 1024 --groups 32 --group-size 16 --inflight 256 --window 9 --steps 14 --limit 400"
few="-m gpu -o addopts=--import-mode=importlib -rfE"
long="--mean 2000 --most 4096 --groups 8"
mps="--set launch.mps true"
kept="--set engine.keep_kv_cache true"
adapters="--shape 4b --adapters 16 --recompute --groups 16"
honest="--numerics calibrated --honest 5120 --reply 128 --minutes 8"
stages="--shape 4b --rtt 0 50 --rates"
case $part in
    tests)
        bench 0 tests-engines pytest $few tests/gpu/test_vllm_gpu.py tests/gpu/test_hosted_gpu.py tests/gpu/test_adapters_gpu.py
        bench 1 tests-trainer pytest $few tests/gpu/test_training_gpu.py tests/gpu/test_boundary_gpu.py tests/gpu/test_noise_gpu.py
        bench 2 tests-families pytest $few tests/gpu/test_families_gpu.py
        ;;
    audits)
        bench 0 audits-0.6b gpu_audit --shape 0.6b --numerics calibrated --rollouts 1024 --reply 256 --minutes 8
        bench 1 audits-4b gpu_audit --shape 4b --numerics calibrated --rollouts 1024 --reply 256 --minutes 8
        ;;
    exact)
        bench 0 exact-0.6b gpu_audit --shape 0.6b --numerics exact calibrated --reply 256 --minutes 8
        bench 1 exact-4b gpu_audit --shape 4b --numerics exact calibrated --reply 256 --minutes 8
        ;;
    honest)
        bench 0 honest-0.6b gpu_audit --shape 0.6b $honest
        bench 1 honest-4b gpu_audit --shape 4b $honest
        ;;
    honest-8b)
        bench 0 honest-8b gpu_audit --shape 8b $honest
        bench 1 honest-moe gpu_audit --shape moe $honest
        ;;
    honest-trained)
        bench 0 honest-trained-0.6b gpu_audit --shape 0.6b --trained $honest
        bench 1 honest-trained-moe gpu_audit --shape moe --trained $honest
        ;;
    envelope)
        of=(envelope-0.6b gpu_strangers --shape 0.6b --minutes 5)
        if [[ -n ${MODEL:-} ]]; then of=(envelope-model gpu_strangers --model "$MODEL" --minutes 6); fi
        bench 0 "${of[@]}"
        bench 1 envelope-4b gpu_strangers --shape 4b --minutes 6
        ;;
    worker)
        bench 0 worker-256 worker --sequences 256 --tokens 1000 --length 1088
        bench 1 worker-512 worker --sequences 512 --tokens 1000 --length 1088
        ;;
    run)
        bench 0 run-0.6b run --gpus 1 --shape 0.6b $whole $mps --logs "$out/run-0.6b"
        bench 1 run-4b run --gpus 1 $whole $adapters $mps $kept --steps 20 --logs "$out/run-4b"
        ;;
    run2) bench 0,1 run2 run --gpus 2 --shape 0.6b $whole --logs "$out/run2" ;;
    run2-long) bench 0,1 run2-long run --gpus 2 --shape 0.6b $whole $long --logs "$out/run2-long" ;;
    run2-kept) bench 0,1 run2-kept run --gpus 2 --shape 0.6b $whole $long $kept --logs "$out/run2-kept" ;;
    run2-4b) bench 0,1 run2-4b run --gpus 2 $whole $adapters $mps --logs "$out/run2-4b" ;;
    turns) bench 0 turns gpu_run --turns --out "$out" --limit 540 ;;
    kernels)
        bench 0 kernels trainer --shape 0.6b --tokens 16384 65536 --steps 4 --rows none "selective recompute" \
            "packed, 16 sequences" "packed, 16 sequences, torch's flash kernel" "plain loop, tuned"
        bench 1 kernels-hybrid trainer --shape hybrid --tokens 16384 --steps 3 \
            --rows "selective recompute" "packed, 16 sequences" none "plain loop"
        ;;
    run4-4b) bench "$all" run4-4b run --gpus "$gpus" --shape 4b --recompute $whole --logs "$out/run4-4b" ;;
    trainer) bench "$all" trainer trainer --shape 0.6b --ranks 1 2 "$gpus" --rows none "two copies (HSDP)" ;;
    trainer-4b) bench "$all" trainer-4b trainer --shape 4b --ranks 1 "$gpus" --steps 4 --rows "full recompute" ;;
    trainer-long)
        bench "$all" trainer-long trainer --shape 0.6b --ranks 1 "$gpus" --steps 4 --tokens 65536 \
            --rows "selective recompute" "context parallel, 2" "context parallel, 4"
        ;;
    trainer-moe)
        bench "$all" trainer-moe trainer --shape moe --ranks 1 2 "$gpus" --steps 4 \
            --rows none "expert parallel, 2" "expert parallel, 4"
        ;;
    fp8)
        bench 0 fp8-tests pytest $few tests/gpu/test_fp8_gpu.py
        ;;
    options) bench "$all" options gpu_options ;;
    parallel)
        for row in default tp-4 tp-pp tp-dp; do bench "$all" "parallel-$row" gpu_options "$row"; done
        ;;
    stages) bench 0,1,2,3 stages pipeline --stages 4 $stages --memory 0.8 --local ;;
    stages-tp) bench 0,1,2,3 stages-tp pipeline --stages 4 --tp 2 2 1 1 $stages --memory 0.4 ;;
    *) sed -n '4,39p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac
wait

"$python" - "$out" <<'PYTHON'
import json
import sys
from pathlib import Path

missed = total = 0
for text in sorted(Path(sys.argv[1]).glob("*.txt")):
    report = text.with_suffix(".json")
    print(f"== {text.stem}")
    if not report.exists():
        print("".join(text.read_text(errors="replace").splitlines(keepends=True)[-12:]))
        continue
    for goal in json.loads(report.read_text())["goals"]:
        total, missed = total + 1, missed + (not goal["ok"])
        mark = "ok" if goal["ok"] else "MISSED"
        print(f"{goal['name']:60} {goal['value']:12.5g}  goal {goal['goal']:<8g} {mark}")
print(f"{missed} of {total} goals missed")
sys.exit(missed > 0)
PYTHON
