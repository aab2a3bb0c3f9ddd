"""`primerl-node model import`: a run takes what it writes; mistakes are one line and an exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.engine_cases import SHAPE
from support.repository import ROOT

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


@pytest.mark.parametrize("recipe", ["laptop", pytest.param("gpu", marks=pytest.mark.slow)])
def test_the_script_of_the_real_model_runs_a_recipe_with_a_model_that_is_there(
    home: Path, recipe: str
) -> None:
    huggingface.create(home / "a model", SHAPE, 3)
    ran = subprocess.run(
        ["bash", str(ROOT / "scripts/smollm2.sh"), recipe, "--name", "mine", "--dry-run"],
        env={**os.environ, "MODEL": str(home / "a model"), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert f'[model]\nname = "{home / "a model"}"' in ran.stdout
    assert 'name = "mine"' in ran.stdout
    environment = {"laptop": "arithmetic", "gpu": "alphabet-sort"}[recipe]
    assert f'[environment]\nid = "{environment}"' in ran.stdout
