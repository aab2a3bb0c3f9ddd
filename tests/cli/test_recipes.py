"""Every bundled config: the command that its own comment gives, as a dry run; and the memory that it needs."""

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.repository import ROOT

from primerl.node.config.loader import load
from primerl.node.config.run import RunConfig
from primerl.node.gpus import GpuMemory
from primerl.node.launch.placement import place, planned_shares, shape_of
from primerl.node.memory_plan.memory import plan_trainer, with_fitting_auditor

from .conftest import Cli

CONFIGS = ROOT / "configs"
FILES = sorted(CONFIGS.rglob("*.toml"))
GIB = 2**30
QWEN3 = {
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 28,
    "tie_word_embeddings": True,
}
QWEN2 = {"model_type": "qwen2", "num_hidden_layers": 28, "tie_word_embeddings": False}
SHAPES: dict[str, dict[str, object]] = {
    "Qwen/Qwen3-0.6B": {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072},
    "Qwen/Qwen3-1.7B": {**QWEN3, "hidden_size": 2048, "intermediate_size": 6144},
    "Qwen/Qwen3-4B-Instruct-2507": {
        **QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": {
        **QWEN2,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": {
        **QWEN2,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "~/.primerl/models/smollm2-135m-instruct": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    },
    "outputs/reverse-text-gpu-sft/weights/step_100": {
        **QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
    },
}
"""What the hub has under these names: a test has no hub."""
COMMAND = re.compile(r"primerl-node (?:rl|train|sft|eval|inference|join) @ .*")


def commands() -> Iterator[tuple[str, str]]:
    """(file, command) of each command in the comments of a config that names the config itself."""
    for path in FILES:
        name = path.relative_to(CONFIGS).with_suffix("").as_posix()
        lines = [COMMAND.search(line) for line in path.read_text().splitlines()]
        own = [found[0] for found in lines if found and re.search(rf"\b{name}\b", found[0])]
        yield from ((name, command) for command in own)


@pytest.fixture
def eight_gpus(gpus_here: Callable[[int], None]) -> None:
    gpus_here(8)


def stand_in(config: str, directory: Path) -> Path:
    """A directory with the shape of the model that a config names."""
    named = re.findall(r'^name = "(.*?)"', config, re.M)
    shape = next((SHAPES[name] for name in named if name in SHAPES), QWEN3 | {"hidden_size": 96})
    made = directory / "model"
    made.mkdir(exist_ok=True)
    sizes = {"vocab_size": 152064, "max_position_embeddings": 40960, "intermediate_size": 192}
    (made / "config.json").write_text(json.dumps({**sizes, **shape}))
    return made


def test_every_config_says_how_it_is_used() -> None:
    assert {name for name, _ in commands()} == {
        path.relative_to(CONFIGS).with_suffix("").as_posix() for path in FILES
    }


@pytest.mark.parametrize(("name", "command"), list(commands()))
def test_the_command_of_a_config_passes_as_a_dry_run(
    cli: Cli, home: Path, request: pytest.FixtureRequest, name: str, command: str
) -> None:
    words = shlex.split(command)[1:]
    if "--ticket" in words:
        at = words.index("--ticket")
        del words[at : at + 2]
    if name.endswith("/node"):
        request.getfixturevalue("eight_gpus")
    text = (CONFIGS / f"{name}.toml").read_text()
    if "[model.create]" not in text and words[0] in ("rl", "train", "sft"):
        words += ["--model.name", str(stand_in(text, home))]
    ran = cli(*words, "--dry-run")
    assert (ran.code, ran.err) == (0, "")


def config_of(name: str, directory: Path) -> RunConfig:
    text = (CONFIGS / f"{name}.toml").read_text()
    flags = ["--model.name", str(stand_in(text, directory))]
    return load(RunConfig, ["@", name, *flags], {})


ON_ONE_GPU = [path.relative_to(CONFIGS).as_posix()[:-5] for path in CONFIGS.glob("*/gpu.toml")]
ON_EIGHT = [path.relative_to(CONFIGS).as_posix()[:-5] for path in CONFIGS.glob("*/node.toml")]


@pytest.mark.parametrize("name", ON_ONE_GPU)
def test_trainer_and_worker_fit_on_one_gpu_of_24_gb(tmp_path: Path, name: str) -> None:
    config = config_of(name, tmp_path)
    shares = planned_shares(config, lambda: [GpuMemory("0", "GPU-0", "", 24 * GIB, 24 * GIB, "")])
    assert shares is not None
    assert 0.1 < shares.workers < shares.trainer + shares.workers <= 1


@pytest.mark.parametrize("name", ON_EIGHT)
def test_a_trainer_fits_on_its_gpus_of_80_gb(tmp_path: Path, name: str) -> None:
    config = config_of(name, tmp_path)
    placed = place(config, [str(index) for index in range(8)], lambda config: None).applied(config)
    shape = shape_of(placed.model)
    assert shape is not None
    fitting = with_fitting_auditor(placed, shape, 80 * GIB)
    assert max(one.total for one in plan_trainer(fitting, shape, gpu=True)) < 72 * GIB
