import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.chat_model import COMPACT, make_chat_model
from support.sft_cases import QWEN

from primerl.node.environments.confine import landlock_version
from primerl.node.gpus import TorchBuild

from .conftest import Cli

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
HYBRID = {**QWEN3_8B, "layer_types": ["linear_attention", "full_attention"]}
WORKER = ("--engine", "vllm", "--engine.dtype", "bfloat16")


@pytest.fixture
def model(home: Path) -> str:
    directory = home / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(QWEN3_8B))
    return str(directory)


def test_a_machine_is_examined_also_without_a_model_that_can_be_read(cli: Cli, home: Path) -> None:
    ran = cli("doctor")
    assert "MACHINE" in ran.out
    assert "no plan: give a model" in ran.out
    assert not ran.err
    (home / "empty").mkdir()
    out = cli("doctor", "--model.name", str(home / "empty")).out
    assert "MACHINE" in out
    assert "no plan: config.json is missing" in out or "config.json is missing" in out
    cli("doctor", "--engine.max-model-length", "4").refused(2)


def test_the_sandbox_of_environments_is_named_with_what_it_leaves_open(
    cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(home))
    checks = json.loads(cli("doctor", "--json").out)["machine"]
    (check,) = [one for one in checks if one["name"] == "sandbox"]
    held = "sockets, processes, scheduling (filter of system calls)"
    if landlock_version():
        assert check["state"] == "ok"
        assert "landlock: confines files, the node's memory" in check["found"]
        missing = "names of files and programs are not hidden (bubblewrap is not installed"
    else:
        assert check["state"] == "warning"
        assert "until then only bundled environments run" in check["advice"]
        missing = "files are not confined, so they can read this node's key (this kernel has no"
    assert missing in check["found"]
    assert "apt install bubblewrap" in check["found"] + check["advice"]
    (line,) = [one for one in cli("join", "--dry-run").out.splitlines() if "# sandbox: " in one]
    assert held in line
    assert missing in line
    shown = cli("train", "--sandbox.type", "bubblewrap", "--dry-run").out
    assert '# sandbox: sandbox.type is "bubblewrap", and bubblewrap is not installed' in shown
    ran = cli("doctor", "--sandbox.type", "limits", "--json")
    (check,) = [one for one in json.loads(ran.out)["machine"] if one["name"] == "sandbox"]
    assert check["state"] == "ok"


def test_a_plan_says_whether_worker_and_trainer_fit_and_by_how_much(cli: Cli, model: str) -> None:
    given = ("doctor", "--model.name", model, *WORKER, "--gpu-memory")
    out = cli(*given, "24").out
    assert "worker: vllm, bfloat16, on the GPU: " in out
    assert "of 24.0 GiB (gpu_memory_utilization 0.92)" in out
    assert "fits, but only 40 of 256 sequences can reach 1024 tokens at once" in out
    assert "trainer: 2048 tokens a row" in out
    assert 'short: set training.activation_checkpointing to "selective" or "full" or' in out
    ran = cli(*given, "16")
    assert ran.code == 1
    assert "short of one sequence of 1024 tokens" in ran.out
    both = cli(*given, "140", "--shared").out
    assert "on one GPU: the trainer leaves" in both


def test_programs_get_the_same(cli: Cli, model: str) -> None:
    ran = cli("doctor", "--model.name", model, "--gpu-memory", "24", "--json", *WORKER)
    told = json.loads(ran.out)
    assert told["plan"]["worker"]["fits"] is True
    assert told["plan"]["parameters"] == 8190735360
    assert {check["state"] for check in told["machine"]} <= {"ok", "warning", "problem"}
    worker = json.loads(cli("doctor", "@", "demo", "--cpu", "--json").out)["plan"]["worker"]
    assert (worker["device"]["kind"], worker["fits"]) == ("cpu", True)


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


@pytest.mark.parametrize("command", ["train", "rl", "sft"])
@pytest.mark.parametrize("dry", [["--dry-run"], []], ids=str)
def test_a_model_that_cannot_be_trained_is_refused_before_anything_starts(
    cli: Cli, home: Path, model: str, command: str, dry: list[str]
) -> None:
    Path(model, "config.json").write_text(json.dumps(HYBRID))
    data = ["--data.files", "rows.jsonl"] if command == "sft" else []
    ran = cli(command, "--model.name", model, "--output-dir", str(home / "outputs"), *data, *dry)
    ran.refused(2, "it has layers of type linear_attention")
    assert not (home / "outputs").exists()


@pytest.mark.parametrize("command", ["train", "rl", "sft", "eval", "doctor"])
@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (QWEN, "shows all parts, tool calls as hermes"),
        ("{{ strftime_now('%Y') }}" + COMPACT, "refuses reasoning, schemas of tools, calls"),
        ("{{ raise_exception('no users') }}", "refuses the conversation (no users)"),
        ("{{ messages", "does not compile"),
    ],
)
def test_what_a_template_leaves_out_is_shown_before_anything_starts(
    cli: Cli, home: Path, model: str, command: str, template: str, shown: str
) -> None:
    make_chat_model(Path(model), template)
    if command == "doctor":
        ran = cli("doctor", "--model.name", model, "--gpu-memory", "80", "--json")
        (check,) = [one for one in json.loads(ran.out)["machine"] if one["name"] == "chat template"]
        assert shown in check["found"] + check["advice"]
        assert (check["state"] == "problem") == ("strftime" not in template and template != QWEN)
        return
    given = {"sft": ["--data.files", "rows.jsonl"], "eval": ["--environments", '[{"id": "math"}]']}
    named = ["--models", f'["{model}"]'] if command == "eval" else ["--model.name", model]
    ran = cli(command, *named, *given.get(command, []), "--dry-run")
    if template == QWEN or "strftime" in template:
        assert [
            line for line in ran.out.splitlines() if "# chat template: " in line and shown in line
        ]
    else:
        ran.refused(2, shown)


@pytest.mark.parametrize(
    ("config", "state"),
    [(QWEN3_8B, "ok"), (HYBRID, "problem"), ({"model_type": "gpt2", "n_embd": 768}, "problem")],
)
def test_doctor_says_that_a_model_cannot_be_trained(
    cli: Cli, model: str, config: dict[str, object], state: str
) -> None:
    Path(model, "config.json").write_text(json.dumps(config))
    ran = cli("doctor", "--model.name", model, "--gpu-memory", "80", "--json")
    checks = {check["name"]: check["state"] for check in json.loads(ran.out)["machine"]}
    assert checks["model"] == state
    assert state == "ok" or ran.code == 1


@pytest.mark.parametrize(("where", "state"), [("--cpu", "problem"), ("--gpu-memory=80", "ok")])
def test_doctor_says_that_vllm_does_not_serve_a_model_there(
    cli: Cli, model: str, where: str, state: str
) -> None:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128}
    Path(model, "config.json").write_text(
        json.dumps(QWEN3_8B | {"model_type": "gpt_oss", **experts})
    )
    ran = cli("doctor", "--model.name", model, "--engine.type", "vllm", where, "--json")
    checks = {check["name"]: check["state"] for check in json.loads(ran.out)["machine"]}
    assert checks["engine"] == state


FULL_GRAPHS = ("--engine.vllm", '{"compilation_config": {"cudagraph_mode": "FULL"}}')


@pytest.mark.parametrize("asked", [("--verification.numerics", "exact"), FULL_GRAPHS])
@pytest.mark.parametrize(("size", "state"), [(128, "ok"), (64, "problem")])
def test_doctor_says_that_the_kernels_asked_for_do_not_compute_a_models_heads(
    cli: Cli, model: str, asked: tuple[str, ...], size: int, state: str
) -> None:
    Path(model, "config.json").write_text(json.dumps(QWEN3_8B | {"head_dim": size}))
    ran = cli("doctor", "--model.name", model, *WORKER, *asked, "--gpu-memory=80", "--json")
    checks = {check["name"]: check["state"] for check in json.loads(ran.out)["machine"]}
    assert checks["engine"] == state


@pytest.mark.parametrize("command", ["rl", "inference"])
@pytest.mark.parametrize("dry", [["--dry-run"], []], ids=str)
def test_kernels_that_compute_a_models_heads_wrongly_are_refused_before_anything_starts(
    cli: Cli, model: str, monkeypatch: pytest.MonkeyPatch, command: str, dry: list[str]
) -> None:
    def build() -> TorchBuild:
        return TorchBuild("2.13.0", "13.0")

    monkeypatch.setattr("primerl.node.gpus.torch_build", build)
    Path(model, "config.json").write_text(json.dumps(QWEN3_8B | {"head_dim": 64}))
    ran = cli(command, "--model.name", model, *WORKER, *FULL_GRAPHS, *dry)
    ran.refused(7, "heads have size 64, and cudagraph_mode FULL")
