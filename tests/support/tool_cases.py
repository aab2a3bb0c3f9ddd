"""A small model whose chat template shows tools, and which calls them as Hermes does: JSON between tokens."""

from pathlib import Path
from typing import Any

from support.chat_model import END_OF_TEXT, IM_END

from primerl.node.config.run import ModelCreateConfig
from primerl.node.models import huggingface

SHAPE = ModelCreateConfig(hidden_size=32, intermediate_size=64, head_dim=16, vocab_size=272)
TEMPLATE = """
{%- if tools %}<|system|>{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>{% endif -%}
{%- for m in messages -%}
<|{{ m.role }}|>
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif -%}
{{ m.content }}
{%- for c in m.tool_calls or [] -%}
<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How it is there.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def tool_dir(directory: Path, template: str = TEMPLATE) -> Path:
    """The files of a model of SHAPE, weights included."""
    huggingface.create(directory, SHAPE, 3)
    (directory / "chat_template.jinja").write_text(template)
    return directory


def ids_of(model_dir: Path, text: str) -> list[int]:
    """Tokens that say `text`, marks as one token each, and the end of a reply."""
    tokenizer: Any = huggingface.load_tokenizer(model_dir)
    found = list(tokenizer.encode(text, add_special_tokens=False))
    assert END_OF_TEXT not in found
    return [*found, IM_END]
