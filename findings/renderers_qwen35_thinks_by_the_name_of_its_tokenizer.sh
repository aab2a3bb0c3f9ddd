#!/usr/bin/env bash
# renderers 0.1.12: whether the renderer of Qwen3.5 opens a reply with a thought depends on the name under which the
# tokenizer was loaded. Qwen3.5-0.8B from a directory (or a fine-tune of it) is prompted to think, by its hub id it is not;
# the chat template, which is the same file, does not open a thought.
#
# One would guess otherwise: the field's docstring says that None "auto-detects from the tokenizer's chat-template default"
# and that the field "mirrors the chat template's enable_thinking kwarg". It reads a table of seven hub ids, else thinks.
#
# Output, 2026-11-29, CPython 3.11.7, x86_64:
#
#     chat template                    '<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n'
#     renderer, a directory            '<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n'
#     renderer, Qwen/Qwen3.5-0.8B      '<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n'
#
# Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet "renderers==0.1.12" "transformers==5.24.0" httpx

cat > rendered.py <<'PYTHON'
from renderers import create_renderer
from renderers.configs import Qwen35RendererConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CONTROL = (
    "<|im_start|> <|im_end|> <|endoftext|> <think> </think> <tool_call> </tool_call> <tool_response> "
    "</tool_response> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>"
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
ASKED = [{"role": "user", "content": "a"}]


def make(name: str) -> PreTrainedTokenizerFast:
    letters = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(CONTROL.split())
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)
    made.name_or_path = name
    return made


def rendered(name: str) -> str:
    tokenizer = make(name)
    renderer = create_renderer(tokenizer, Qwen35RendererConfig())
    return tokenizer.decode(renderer.render_ids(ASKED, add_generation_prompt=True))


found = {
    "chat template": make("x").apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True),
    "renderer, a directory": rendered("/models/Qwen3.5-0.8B"),
    "renderer, Qwen/Qwen3.5-0.8B": rendered("Qwen/Qwen3.5-0.8B"),
}
for name, text in found.items():
    print(f"{name:32} {text!r}")
template, directory, hub = found.values()
assert template == hub != directory, "renderers behaves otherwise now"
assert directory.endswith("<think>\n"), "renderers behaves otherwise now"
PYTHON
env/bin/python rendered.py
