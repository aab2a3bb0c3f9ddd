"""A model directory without a model: the byte-level tokenizer and chat template of the demo."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT, IM_START, IM_END, USER, ASSISTANT, SYSTEM = range(256, 262)
UNDEFINED = 287
"""An id inside the model's padded vocabulary that no token has."""

COMPACT = (
    "{%- for m in messages -%}<|{{ m.role }}|>{{ m.content or '' }}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
THINKING = COMPACT.replace(
    "<|assistant|>",
    "<|assistant|>{%- if enable_thinking is defined and not enable_thinking -%}x{%- endif -%}",
)
"""COMPACT with an option: without thoughts the model's turn begins with an x."""
TOOLED = (
    "{%- if tools -%}<|system|><tools>\n{%- for t in tools %}{{ t | tojson }}\n{%- endfor -%}</tools>"
    "{%- endif -%}"
    "{%- for m in messages -%}<|{{ m.role }}|>{{ m.content or '' }}"
    "{%- for c in m.tool_calls or [] -%}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{%- endfor -%}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
"""COMPACT with tools and their calls."""
TWO_ENDS = (
    "{%- for m in messages -%}"
    "{{ '<|' + m.role + '|>' + m.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|assistant|>' }}"
    "{%- else -%}{{ eos_token }}<|endoftext|>{%- endif -%}"
)
"""In the manner of Phi-3: a conversation ends with a stop token of its own."""
FORGETFUL = (
    "{%- set ns = namespace(last=none, after=false) -%}"
    "{%- for m in messages if m.role == 'user' -%}{%- set ns.last = m -%}{%- endfor -%}"
    "{%- if tools -%}<|system|>{%- for t in tools %}{{ t | tojson }}{%- endfor -%}<|im_end|>{%- endif -%}"
    "{%- for m in messages -%}<|{{ m.role }}|>"
    "{%- if m == ns.last -%}{%- set ns.after = true -%}{%- endif -%}"
    "{%- if m.reasoning_content and ns.after -%}<think>{{ m.reasoning_content }}</think>{%- endif -%}"
    "{{ m.content or '' }}"
    "{%- for c in m.tool_calls or [] -%}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{%- endfor -%}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
"""TOOLED with reasoning, which it drops from turns before the last user message."""
BESIDE_LAST = (
    "{%- for m in messages if m.role != 'system' -%}"
    "{%- if m.role == 'user' -%}<|user|>"
    "{%- if loop.last and messages[0].role == 'system' -%}{{ messages[0].content }} {% endif -%}"
    "{{ m.content }}{%- else -%}<|assistant|>{{ m.content }}<|im_end|>{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
"""In the manner of Mistral 7B v0.3: the system message stands beside a user message that comes last."""
CHATML = (
    "{%- for m in messages -%}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def make_chat_model(directory: Path, template: str = COMPACT) -> Path:
    """Token ids 0..255 are the bytes, then the special tokens."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE(vocab=_bytes(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            f"<|{name}|>"
            for name in ("endoftext", "im_start", "im_end", "user", "assistant", "system")
        ]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": IM_END}))
    (directory / "chat_template.jinja").write_text(template)
    return directory


def _bytes() -> dict[str, int]:
    """Byte-level BPE writes every byte as a printable character."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {byte: chr(byte) for byte in plain}
    hidden = [byte for byte in range(256) if byte not in names]
    names |= {byte: chr(256 + place) for place, byte in enumerate(hidden)}
    return {name: byte for byte, name in names.items()}
