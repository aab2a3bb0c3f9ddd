import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Ran

QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}
WORKER = ("--engine", "vllm", "--engine.dtype", "bfloat16")


@pytest.fixture
def model(home: Path) -> str:
    directory = home / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(QWEN3_8B))
    return str(directory)


def test_the_machine_alone_is_examined_without_a_model(cli: Callable[..., Ran]) -> None:
    ran = cli("doctor")
    assert "MACHINE" in ran.out
    assert "no plan: give a model" in ran.out
    assert not ran.err


def test_a_plan_for_another_machine_says_what_to_give(cli: Callable[..., Ran], model: str) -> None:
    ran = cli("doctor", "--model.name", model, "--gpu-memory", "24", *WORKER)
    assert "WORKER: vllm, bfloat16, on the GPU, 24.0 GiB" in ran.out
    assert "gpu_memory_utilization 0.92" in ran.out
    assert "only 40 of 256 sequences may reach 1024 tokens" in ran.out
    assert "TRAINER: 2048 tokens a row" in ran.out


def test_what_does_not_fit_is_an_exit_code_and_names_what_does(
    cli: Callable[..., Ran], model: str
) -> None:
    ran = cli("doctor", "--model.name", model, "--gpu-memory", "16", *WORKER)
    assert ran.code == 1
    assert "short of one sequence of 1024 tokens" in ran.out


def test_programs_get_the_same(cli: Callable[..., Ran], model: str) -> None:
    ran = cli("doctor", "--model.name", model, "--gpu-memory", "24", "--json", *WORKER)
    told = json.loads(ran.out)
    assert told["plan"]["worker"]["fits"] is True
    assert told["plan"]["model"]["parameters"] == 8190735360
    assert {check["state"] for check in told["machine"]} <= {"ok", "warning", "problem"}


def test_a_config_of_a_run_is_planned_for_the_memory_of_this_machine(
    cli: Callable[..., Ran],
) -> None:
    ran = cli("doctor", "@", "demo", "--cpu", "--json")
    told = json.loads(ran.out)
    assert told["plan"]["worker"]["device"]["kind"] == "cpu"
    assert told["plan"]["worker"]["fits"] is True


def test_a_model_that_cannot_be_read_is_said_and_the_machine_is_examined(
    cli: Callable[..., Ran], home: Path
) -> None:
    (home / "empty").mkdir()
    ran = cli("doctor", "--model.name", str(home / "empty"))
    assert "no plan: " in ran.out
    assert "config.json is missing" in ran.out


def test_an_unknown_key_is_a_usage_error(cli: Callable[..., Ran]) -> None:
    assert cli("doctor", "--engine.max-model-length", "4").code == 2


def test_a_plan_loads_nothing_heavy(model: str) -> None:
    program = (
        "import sys; from primerl.cli.main import execute; execute(sys.argv[1:]);"
        "print(*sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", program, "doctor", "--model.name", model, "--gpu-memory", "24"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert loaded.isdisjoint(
        {"numpy", "torch", "vllm", "transformers", "iroh", "libp2p", "verifiers"}
    )


WINDOWED = {**QWEN3_8B, "model_type": "mistral", "sliding_window": 64}


@pytest.mark.parametrize("command", ["train", "rl", "sft"])
@pytest.mark.parametrize("dry", [["--dry-run"], []], ids=str)
def test_a_model_that_cannot_be_trained_is_refused_before_anything_starts(
    cli: Callable[..., Ran], home: Path, model: str, command: str, dry: list[str]
) -> None:
    Path(model, "config.json").write_text(json.dumps(WINDOWED))
    data = ["--data.files", "rows.jsonl"] if command == "sft" else []
    ran = cli(command, "--model.name", model, "--output-dir", str(home / "outputs"), *data, *dry)
    assert ran.code == 2
    assert "its layers see a window of 64 tokens" in ran.err
    assert ran.err.count("\n") == 1
    assert not (home / "outputs").exists()


def test_doctor_says_that_a_model_cannot_be_trained(cli: Callable[..., Ran], model: str) -> None:
    ran = cli("doctor", "--model.name", model, "--gpu-memory", "80", "--json")
    assert {"model": "ok"}.items() <= checks_of(ran).items()
    Path(model, "config.json").write_text(json.dumps(WINDOWED))
    ran = cli("doctor", "--model.name", model, "--gpu-memory", "80", "--json")
    assert ran.code == 1
    assert checks_of(ran)["model"] == "problem"
    Path(model, "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 768}))
    ran = cli("doctor", "--model.name", model)
    assert ran.code == 1
    assert "cannot be trained" in ran.out


def checks_of(ran: Ran) -> dict[str, str]:
    """The state of each check, by its name."""
    return {check["name"]: check["state"] for check in json.loads(ran.out)["machine"]}
