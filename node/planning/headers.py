"""What the safetensors files of a model directory hold, by their headers alone: no weight is read."""

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import EngineError

MOST = 100 << 20
"""Bytes of a header, as the format allows."""
LENGTH = 8


@dataclass
class Stored:
    """Tensors of a directory."""

    elements: int = 0
    nbytes: int = 0
    dtypes: Counter[str] = field(default_factory=Counter[str])
    """Elements of each."""

    @property
    def dtype(self) -> str:
        """The one that most elements have, as safetensors calls it."""
        return self.dtypes.most_common(1)[0][0] if self.dtypes else ""


def stored(directory: Path) -> Stored | None:
    """What the files of `directory` hold; None if there are none. Raises EngineError."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        return None
    found = Stored()
    for path in files:
        try:
            _add(found, path)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise EngineError(f"{path} cannot be read ({error}): fetch the model again") from error
    return found


def _add(found: Stored, path: Path) -> None:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH), "little")
        if length > MOST:
            raise ValueError("its header is too long")
        header: dict[str, Any] = json.loads(file.read(length))
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        count = math.prod(tensor["shape"])
        start, end = tensor["data_offsets"]
        found.elements += count
        found.nbytes += end - start
        found.dtypes[str(tensor["dtype"])] += count
