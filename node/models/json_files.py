"""Read JSON files of a model directory, without heavy imports."""

import json
from pathlib import Path
from typing import Any

from ..errors import BAD_FILE, EngineError

INDEX = "model.safetensors.index.json"
"""Name of the file that says which tensor is in which file."""


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`. Raises EngineError."""
    try:
        loaded = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise EngineError(
            f"{path} is missing: give a complete Hugging Face model directory"
        ) from error
    except BAD_FILE as error:
        raise EngineError(f"{path} cannot be read ({error}): download the model again") from error
    if not isinstance(loaded, dict):
        raise EngineError(f"{path} does not hold a JSON object: download the model again")
    return loaded
