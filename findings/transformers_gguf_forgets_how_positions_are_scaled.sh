#!/usr/bin/env bash
# transformers 5.24.0: a Llama from a GGUF file whose metadata scales RoPE (`llama.rope.scaling.type` linear, factor 4), or
# with factors of its own (`rope_freqs.weight`, as files of Llama 3.1 have), is loaded as the plain model: no error, no
# warning, and the logits are those of a file without these, to the last bit.
#
# One would guess otherwise: the loader maps a dozen keys of that metadata into config.json (rope.freq_base among them),
# config.json has `rope_parameters` for both, and a tensor that a model has no place for is reported for safetensors.
#
# Output, 2026-11-29, CPython 3.11.7, x86_64:
#
#     linear scaling by 4    rope_type default, largest difference of logits 0.0
#     rope_freqs of 8        rope_type default, largest difference of logits 0.0
#     rope.freq_base 50      rope_type default, logits differ
#
# Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet "torch==2.13.0" "transformers==5.24.0" "gguf==0.19.0" accelerate

cat > loaded.py <<'PYTHON'
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM

WIDTH, HEADS, INNER, LAYERS, WORDS = 32, 2, 48, 2, 64


def written(change, base=500.0):
    path = Path("model.gguf")
    path.unlink(missing_ok=True)
    file = gguf.GGUFWriter(path, "llama")
    file.add_context_length(128)
    file.add_embedding_length(WIDTH)
    file.add_block_count(LAYERS)
    file.add_feed_forward_length(INNER)
    file.add_head_count(HEADS)
    file.add_head_count_kv(HEADS)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_freq_base(base)
    file.add_rope_dimension_count(WIDTH // HEADS)
    file.add_vocab_size(WORDS)
    file.add_tokenizer_model("gpt2")
    file.add_token_list([f"t{n}" for n in range(WORDS)])
    file.add_token_types([1] * WORDS)
    file.add_token_merges([])
    change(file)
    draw = np.random.default_rng(0)
    shapes = {"token_embd": (WORDS, WIDTH), "output": (WORDS, WIDTH), "output_norm": (WIDTH,)}
    for layer in range(LAYERS):
        for name, shape in {
            "attn_q": (WIDTH, WIDTH), "attn_k": (WIDTH, WIDTH), "attn_v": (WIDTH, WIDTH),
            "attn_output": (WIDTH, WIDTH), "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH),
            "ffn_down": (WIDTH, INNER), "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,),
        }.items():
            shapes[f"blk.{layer}.{name}"] = shape
    for name, shape in shapes.items():
        file.add_tensor(f"{name}.weight", draw.normal(size=shape).astype(np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return AutoModelForCausalLM.from_pretrained(".", gguf_file=path.name, dtype=torch.float32).eval()


def logits(model):
    with torch.no_grad():
        return model(torch.arange(40)[None], use_cache=False).logits


def scale(file):
    file.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    file.add_rope_scaling_factor(4.0)


def factors(file):
    file.add_tensor("rope_freqs.weight", np.full(WIDTH // HEADS // 2, 8.0, np.float32))


plain = logits(written(lambda file: None))
for name, change in {"linear scaling by 4": scale, "rope_freqs of 8": factors}.items():
    model = written(change)
    kind = model.config.rope_parameters.get("rope_type")
    most = float((logits(model) - plain).abs().max())
    print(f"{name:22} rope_type {kind}, largest difference of logits {most}")
    assert (kind, most) == ("default", 0.0), "it is kept now, or refused"
other = written(lambda file: None, base=50.0)
assert float((logits(other) - plain).abs().max()) > 0.01, "another base is read"
print(f"{'rope.freq_base 50':22} rope_type default, logits differ")
PYTHON
env/bin/python loaded.py 2>/dev/null
