"""Conversations, a template with tools and reasoning, and data files for tests of supervised learning."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.chat_model import make_chat_model

from primerl.node.environments.chat import ChatFormat
from primerl.node.sft.tokens import Tokens

QWEN = """
{%- if tools %}<|im_start|>system
{% if messages and messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif -%}
TOOLS{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|im_end|>
{% elif messages and messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if m.reasoning_content and loop.index0 > ns.last %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""In the manner of Qwen3: reasoning of earlier turns is left out of the history."""

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"city": "string"}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Rome or Oslo?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I need the weather.",
        "tool_calls": [
            {"function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
        ],
    },
    {"role": "tool", "content": "sunny"},
    {"role": "assistant", "content": "Rome.", "reasoning_content": "Sun is better."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Welcome!"},
]
REPLIES = [
    "<think>\nI need the weather.\n</think>\n\n<tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>',
    "<think>\nSun is better.\n</think>\n\nRome.<|im_end|>",
    "Welcome!<|im_end|>",
]
"""What the model would have sampled in TALK, turn by turn."""


def qwen_chat(directory: Path) -> ChatFormat:
    return ChatFormat.load(make_chat_model(directory, QWEN))


def trained_texts(chat: ChatFormat, tokens: Tokens) -> list[str]:
    """Decode every run of trained tokens, with special tokens."""
    runs: list[list[int]] = []
    before = False
    for token, trained in zip(tokens.token_ids, tokens.mask, strict=True):
        if trained and not before:
            runs.append([])
        if trained:
            runs[-1].append(token)
        before = trained
    # one token more, so that text() takes no stop token off the end
    return [chat.text([*run, 0])[:-1] for run in runs]


def write_rows(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pairs(count: int) -> list[dict[str, str]]:
    """Prompts and completions of several lengths."""
    return [{"prompt": f"say {n}", "completion": f"{n} " * (n % 5 + 1)} for n in range(count)]
