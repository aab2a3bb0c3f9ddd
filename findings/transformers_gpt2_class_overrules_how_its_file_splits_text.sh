#!/usr/bin/env bash
# transformers 5.24.0, tokenizers 0.23.3: a tokenizer's directory whose tokenizer.json splits digits one by one before its
# merges, and whose tokenizer_config.json says "tokenizer_class": "GPT2Tokenizer" (as checkpoints of several families do,
# whose vocabulary is byte-level), is loaded with GPT-2's own splitting in place of the file's: 123 is one token, which the
# model was never trained on, where tokenizers reads three from the same file. Nothing is logged. With the class
# PreTrainedTokenizerFast, with LlamaTokenizer, or without a class the file is followed.
#
# One would guess otherwise: tokenizer.json holds the whole pipeline, and the name of a class was only a wrapper around it.
#
# Output, 2026-11-29, CPython 3.11.7, x86_64:
#
#     tokenizers, the file itself  a Ġ 1 2 3
#     PreTrainedTokenizerFast      a Ġ 1 2 3
#     LlamaTokenizer               a Ġ 1 2 3
#     no class                     a Ġ 1 2 3
#     GPT2Tokenizer                a Ġ 123
#
# Fails if that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet "transformers==5.24.0" "tokenizers==0.23.3"

cat > split.py <<'PYTHON'
import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
vocabulary = {letter: number for number, letter in enumerate([*letters, "12", "123"])}
own = Tokenizer(models.BPE(vocabulary, [("1", "2"), ("12", "3")]))
own.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
model = Path("model")
model.mkdir()
own.save(str(model / "tokenizer.json"))
text = "a 123"
split = {"tokenizers, the file itself": own.encode(text).tokens}
for name in ("PreTrainedTokenizerFast", "LlamaTokenizer", "", "GPT2Tokenizer"):
    config = {"tokenizer_class": name} if name else {}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    split[name or "no class"] = AutoTokenizer.from_pretrained(model).tokenize(text)
for name, tokens in split.items():
    print(f"{name:28} {' '.join(tokens)}")
follows = [name for name, tokens in split.items() if tokens == ["a", "Ġ", "1", "2", "3"]]
assert follows == list(split)[:4], follows
assert split["GPT2Tokenizer"] == ["a", "Ġ", "123"], "the file is followed now"
PYTHON
env/bin/python split.py 2>/dev/null
