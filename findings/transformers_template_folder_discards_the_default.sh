#!/usr/bin/env bash
# transformers 5.24.0: a tokenizer's directory whose chat template stands in tokenizer_config.json, and which has a folder
# additional_chat_templates/ with one more, named template, has no default template any more: apply_chat_template raises
# that no template named `default` is among them. Without the folder the same files render.
#
# One would guess otherwise: the folder's name says that its templates are additional, and with a chat_template.jinja beside
# it they are.
#
# Output, 2026-11-29, CPython 3.11.7, x86_64:
#
#     without the folder            'plain a'
#     with it                       ValueError, templates: ['tool_use']
#     with it, and the .jinja file  'plain a', templates: ['default', 'tool_use']
#
# Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet "transformers==5.24.0" jinja2

cat > templates.py <<'PYTHON'
import json
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

model = Path("model")
model.mkdir()
Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")).save(str(model / "tokenizer.json"))
template = "plain {{ messages[0].content }}"
config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "?", "chat_template": template}
(model / "tokenizer_config.json").write_text(json.dumps(config))


def rendered():
    tokenizer = AutoTokenizer.from_pretrained(model)
    names = sorted(tokenizer.chat_template) if isinstance(tokenizer.chat_template, dict) else []
    try:
        text = repr(tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False))
    except ValueError:
        text = "ValueError"
    return text + (f", templates: {names}" if names else "")


found = [rendered()]
more = model / "additional_chat_templates"
more.mkdir()
(more / "tool_use.jinja").write_text("tools")
found.append(rendered())
(model / "chat_template.jinja").write_text(template)
found.append(rendered())
for name, line in zip(("without the folder", "with it", "with it, and the .jinja file"), found):
    print(f"{name:29} {line}")
assert found == [
    "'plain a'",
    "ValueError, templates: ['tool_use']",
    "'plain a', templates: ['default', 'tool_use']",
], "the default is kept now"
PYTHON
env/bin/python templates.py 2>/dev/null
