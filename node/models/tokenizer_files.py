"""Read what a model directory says of its tokenizer as transformers does, without transformers.

Special tokens come from every file that transformers reads, chat templates from the files and the names that it
prefers. huggingface.check_tokenizer() compares the result with transformers' own; a directory that differs is
refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ..errors import BAD_FILE, EngineError, one_line
from .json_files import read_json

SPECIAL_NAMES = tuple(f"{name}_token" for name in "bos eos unk sep pad cls mask".split())
TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names of the template of a conversation, and of one with tools where that has its own."""
FILES = ("tokenizer_config.json", "special_tokens_map.json", TEMPLATE_FILE, TEMPLATE_FOLDER)
"""Files that are read in a directory."""


@dataclass(frozen=True)
class TokenizerFiles:
    """Special tokens by their names in templates, and chat templates by name."""

    special: Mapping[str, str]
    templates: Mapping[str, str]


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Read special tokens and chat templates of a model directory. Raises EngineError."""
    path = directory / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    legacy = directory / "special_tokens_map.json"
    tokens = settings
    if legacy.is_file() and "added_tokens_decoder" not in settings:
        tokens = settings | read_json(legacy)
    named = tokens.get("extra_special_tokens")
    if isinstance(named, dict):
        tokens = tokens | cast("dict[str, Any]", named)
    special = {
        key: text
        for key, value in tokens.items()
        if key.endswith("_token") and (text := _text(value))
    }
    return TokenizerFiles(special, _templates(directory, settings.get("chat_template")))


def _text(token: object) -> str:
    """Read a special token: a string, or an object that holds one."""
    if isinstance(token, dict):
        token = cast("dict[str, Any]", token).get("content")
    return token if isinstance(token, str) else ""


def _templates(directory: Path, configured: object) -> dict[str, str]:
    paths = {DEFAULT: directory / TEMPLATE_FILE}
    paths |= {path.stem: path for path in sorted((directory / TEMPLATE_FOLDER).glob("*.jinja"))}
    templates: dict[str, str] = {}
    for name, path in paths.items():
        if path.is_file():
            try:
                templates[name] = path.read_text(encoding="utf-8")
            except BAD_FILE as error:
                raise EngineError(
                    f"{path} cannot be read ({error}): fetch the model again"
                ) from error
    if templates:  # the files stand in place of what is configured
        return templates
    if isinstance(configured, str):
        return {DEFAULT: configured}
    try:
        listed = cast("list[dict[str, str]]", configured or [])
        return {str(entry["name"]): str(entry["template"]) for entry in listed}
    except (KeyError, TypeError) as error:
        raise EngineError(
            f"{directory / 'tokenizer_config.json'}: chat_template is no text and no list of names and "
            f"templates ({one_line(error)}): fetch the model again"
        ) from error
