"""Published config.json files of the families that are trained, and what becomes of each.

published_configs.jsonl has one a line: `source` (repository:path), `kind` (hub: as the maker or a fine-tuner
published it; test: shortened; tool: with keys that a tool added; draft: a head for speculative decoding) and
`config`, without token ids, dtypes, labels and vision encoders.

python -m support.published_configs      (prints the table of docs/models.md)
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from primerl.node.models.architectures import text_config
from primerl.node.training import parity

FILE = Path(__file__).with_suffix(".jsonl")
LONGEST = 64
REASONS = {
    "quantized": "quantised",
    "says that it is a": "the class is of another family",
    "code of a checkpoint": "transformers has it not",
    "has not been compared": "not compared",
    "which transformers computes with": "lacks what transformers computes with",
}
"""Part of a reason -> what the table says."""


@dataclass(frozen=True, eq=False)
class Published:
    """One published config.json."""

    source: str
    kind: str
    config: Mapping[str, Any]

    @property
    def family(self) -> str:
        return str(self.config["model_type"])

    @cached_property
    def text(self) -> Mapping[str, Any]:
        """That of the text model."""
        return text_config(self.config)

    @property
    def quantized(self) -> bool:
        parts = (self.config, self.config.get("text_config") or {})
        return any(key.startswith("quantization") and part[key] for part in parts for key in part)

    def fault(self) -> str:
        return parity.fault(self.text, LONGEST)


def read() -> list[Published]:
    """Read all of them, in the order of the file."""
    return [Published(**json.loads(line)) for line in FILE.read_text("utf-8").splitlines()]


def table(faults: Mapping[Published, str]) -> str:
    """Return the table of docs/models.md, given why each is refused ("": accepted)."""
    rows = ["| `model_type` | configs | accepted | refused |", "|---|---|---|---|"]
    groups: dict[str, list[str]] = {}
    for one, fault in faults.items():
        groups.setdefault("" if one.kind == "draft" else one.family, []).append(fault)
    for name, found in sorted(groups.items()):
        refused = Counter(_said(fault) for fault in found if fault)
        cells = ", ".join(f"{count} {said}" for said, count in sorted(refused.items()))
        label = f"`{name}`" if name else "drafts of any family"
        rows.append(f"| {label} | {len(found)} | {found.count('')} | {cells} |")
    return "\n".join(rows) + "\n"


def _said(fault: str) -> str:
    return next(said for part, said in REASONS.items() if part in fault)


if __name__ == "__main__":
    print(table({one: one.fault() for one in read()}), end="")
