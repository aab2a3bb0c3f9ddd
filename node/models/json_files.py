"""JSON files of a model directory, read plainly: nothing heavy is imported, so commands may do it at once."""

import json
from pathlib import Path
from typing import Any

from ..ops.errors import EngineError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises EngineError."""
    try:
        loaded = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise EngineError(
            f"{path} is missing: give a complete Hugging Face model directory"
        ) from error
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} cannot be read ({error}): fetch the model again") from error
    if not isinstance(loaded, dict):
        raise EngineError(f"{path} does not hold a JSON object: fetch the model again")
    return loaded
