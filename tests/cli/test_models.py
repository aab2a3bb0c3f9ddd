"""`primerl-node model import`: a run takes what it writes; mistakes are one line and an exit code."""

import json
from pathlib import Path

from support.engine_cases import SHAPE

from primerl.node.models import huggingface

from .conftest import Cli


def test_a_run_takes_what_import_writes(cli: Cli, home: Path) -> None:
    huggingface.create(home / "source", SHAPE, 3)
    path = home / "source" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": {"AutoModel": "x.Y"}}))
    made = cli("model", "import", "source", "models/made")
    assert (made.code, made.err) == (0, "")
    assert made.out.splitlines()[0].startswith("wrote models/made: qwen3, ")
    assert made.out.splitlines()[1:] == ["dropped from config.json: auto_map"]
    ran = cli("rl", "--model.name", "models/made", "--dry-run")
    assert (ran.code, ran.err) == (0, "")


def test_mistakes_of_import_are_one_line(cli: Cli, home: Path) -> None:
    cli("model", "import", "nowhere", "made").refused(2, "nowhere is neither a GGUF file nor")
    (home / "text.gguf").write_text("no model")
    cli("model", "import", "text.gguf", "made").refused(7, "text.gguf cannot be read as GGUF")
    cli("model", "import", "text.gguf", "text.gguf").refused(2, "text.gguf exists")
    cli("model", "import", "text.gguf").refused(2, "target")
    assert [path.name for path in home.iterdir() if path.name != "bin"] == ["text.gguf"]
