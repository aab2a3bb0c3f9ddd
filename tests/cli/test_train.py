"""`train`, `rl` and `sft` before anything starts: engines, GPUs and disks that they refuse."""

import json
import socket
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.machine import fill, make_read_only, small_disk

from primerl.node.config.evaluation import EvalConfig
from primerl.node.config.judge import JudgeRunConfig
from primerl.node.config.loader import load
from primerl.node.config.run import RunConfig
from primerl.node.errors import UsageError
from primerl.node.inference.vllm_arguments import is_installed
from primerl.node.storage.run_files import MARK, claim, held

from .conftest import Cli, Ran, torch_is

# -- engines ---------------------------------------------------------------------------------------

VLLM = ("--engine.type", "vllm")
JOIN, RL = ("join",), ("rl", "@", "demo")


@pytest.mark.parametrize("command", [JOIN, RL])
def test_short_flags_are_the_config_s_keys(cli: Cli, command: tuple[str, ...]) -> None:
    ran = cli(*command, "--dry-run", "--json", *VLLM, "--tp", "auto", "--dp", "2", "--pp", "1")
    assert ran.code == 0, ran.err
    engine = json.loads(ran.out)["engine"]
    assert (engine["tp"], engine["pp"], engine["dp"]) == ("auto", 1, 2)


@pytest.mark.parametrize("dry", [("--dry-run",), ()])
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("--dp 2 --pp 2", "dp and pp cannot be combined: start one node per pipeline"),
        ("--engine.vllm.quantization fp8", "would fail every audit"),
        ("--engine.vllm.tensor_parallel_size 2", "set engine.tp"),
        ('--engine.vllm.speculative_config {"method":"eagle"}', "drafts of an EAGLE head"),
        (
            '--pp 2 --engine.vllm.speculative_config {"method":"ngram","num_speculative_tokens":4}',
            "pp and vllm.speculative_config cannot be combined",
        ),
    ],
)
def test_an_engine_that_breaks_proofs_is_refused_with_the_reason_also_by_a_dry_run(
    cli: Cli, dry: tuple[str, ...], given: str, reason: str
) -> None:
    for command in (JOIN, RL):
        ran = cli(*command, *dry, *VLLM, *given.split())
        ran.refused(2, reason)
        assert not ran.out


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("rl @ demo --engine vllm --tp 3", "set it to one of 1, 2, 4"),
        ("join --tp 2", "set engine.type to vllm"),
        ("join --pp.rank 0 --pp.world-size 2", "need vLLM for their stages: set engine.type to vllm"),
        ("join --engine hf --pp.mode on", "need vLLM for their stages"),
    ],
)  # fmt: skip
def test_a_shape_that_an_engine_or_a_model_does_not_have_is_refused(
    cli: Cli, line: str, reason: str
) -> None:
    cli(*line.split(), "--dry-run").refused(2, reason)
    cli(*line.split()).refused(2, reason)


def test_a_teacher_that_is_not_there_or_cannot_be_computed_is_refused_by_a_dry_run(
    cli: Cli, tmp_path: Path
) -> None:
    line = ("rl", "@", "demo", "--training.loss.type", "reverse_kl", "--training.loss.reference")
    cli(*line, str(tmp_path / "nowhere"), "--dry-run").refused(2, "is not a directory")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    cli(*line, str(tmp_path), "--dry-run").refused(2, "cannot be trained")


@pytest.mark.parametrize("command", ["rl", "train", "sft --data.files rows.jsonl"])
def test_a_dry_run_names_keys_of_the_model_that_have_no_effect_and_still_reads_back(
    cli: Cli, command: str, tmp_path: Path
) -> None:
    config = {"model_type": "llama", "vocab_size": 320, "num_beams": 4, "is_llama_config": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = (*command.split(), "--model.name", str(tmp_path), "--dry-run")
    said = "config.json: transformers does not read num_beams, is_llama_config"
    out = cli(*line).out
    assert f"# {said}\n" in out
    assert tomllib.loads(out)["model"]["name"] == str(tmp_path)
    ran = cli(*line, "--json")
    assert said in ran.err
    assert json.loads(ran.out)["model"]["name"] == str(tmp_path)


@pytest.mark.skipif(find_spec("wandb") is not None, reason="it is installed")
@pytest.mark.parametrize("line", ["rl @ demo", "train @ demo", "sft @ sft_demo", "join"])
def test_a_monitor_that_is_not_installed_is_refused_by_a_dry_run(cli: Cli, line: str) -> None:
    ran = cli(*line.split(), "--monitors.wandb.project", "p", "--dry-run")
    ran.refused(2, "primerl-node[wandb]")


@pytest.mark.skipif(is_installed(), reason="there is a vLLM here")
@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("rl @ demo --engine.type vllm", "vLLM is not installed"),
        ("rl @ demo --verification.auditor vllm", "verification.auditor is vllm"),
        ("train @ demo --verification.auditor vllm", "verification.auditor is vllm"),
        ("inference --engine.type vllm --model.name here", "vLLM is not installed"),
        ("judge --model.name here --verification.auditor vllm", "verification.auditor is vllm"),
        (
            'eval --engine.type vllm --models m --environments [{"id":"demo"}]',
            "vLLM is not installed",
        ),
    ],
)
def test_a_vllm_that_is_needed_and_not_installed_is_named_before_anything_is_made(
    cli: Cli, home: Path, line: str, missing: str
) -> None:
    """`rl` made the model and restarted its workers three times, a minute long, before it said so."""
    cli(*line.split()).refused(7, missing)
    assert list(home.iterdir()) == []


@pytest.mark.skipif(is_installed(), reason="there is a vLLM here")
def test_a_vllm_of_workers_elsewhere_is_not_looked_for(cli: Cli, home: Path) -> None:
    (home / "outputs").touch()
    line = ("rl", "@", "demo", *VLLM, "--launch.workers", "0")
    cli(*line).refused(5, "outputs")


@pytest.mark.parametrize("command", ["train", "rl"])
@pytest.mark.parametrize("dry", [("--dry-run",), ()])
def test_groups_of_one_are_refused_as_nothing_is_learned_from_them(
    cli: Cli, home: Path, command: str, dry: tuple[str, ...]
) -> None:
    ran = cli(command, "@", "demo", "--rollouts.group-size", "1", *dry)
    ran.refused(2, "group_size of reverse-text is 1", "set it to 2 or more")
    own = '[{"id":"reverse-text"},{"id":"arithmetic","group_size":1}]'
    ran = cli(command, "--environments", own, *dry)
    ran.refused(2, "group_size of arithmetic is 1")
    assert list(home.iterdir()) == []


@pytest.mark.slow
def test_a_seq_len_below_every_sample_ends_a_run_before_its_first_step(cli: Cli) -> None:
    ran = cli("train", "@", "demo", "--training.seq-len", "12", "--no-network.libp2p")
    assert ran.code == 2
    assert "warm-up step" not in ran.err
    assert "training.seq_len" in ran.err.splitlines()[-1]
    assert ran.err.splitlines()[-1].startswith("primerl-node: error: the ")


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (socket.SOCK_DGRAM, "train @ demo --network.port PORT"),
        (socket.SOCK_DGRAM, "rl @ demo --network.port PORT"),
        (socket.SOCK_STREAM, "train @ demo --network.port PORT"),
        (socket.SOCK_STREAM, "inference --model.name here --api.port PORT"),
        (socket.SOCK_STREAM, "judge --model.name here --api.port PORT"),
    ],
)
def test_a_port_that_is_taken_is_found_before_anything_is_made(
    cli: Cli, home: Path, kind: socket.SocketKind, line: str
) -> None:
    """It was found after the model was made and the environment started."""
    with socket.socket(socket.AF_INET, kind) as taken:
        taken.bind(("127.0.0.1", 0))
        if kind == socket.SOCK_STREAM:
            taken.listen()
        given = line.replace("PORT", str(taken.getsockname()[1])).split()
        cli(*given, "--network.host", "127.0.0.1").refused(4, "in use", "choose another")
    assert list(home.iterdir()) == []


def test_an_address_that_is_not_of_this_machine_is_no_port_that_is_taken(
    cli: Cli, home: Path
) -> None:
    for host in ("192.0.2.1", "no such host"):
        cli("train", "@", "demo", "--network.host", host).refused(2, host, "--network.host")
    assert list(home.iterdir()) == []


# -- GPUs ------------------------------------------------------------------------------------------


@pytest.fixture
def four_gpus(gpus_here: Callable[[int], None]) -> None:
    gpus_here(4)


def placed(ran: Ran) -> list[str]:
    """The lines about processes; keys that are not set, and the sandbox, are comments too."""
    lines = [line[2:] for line in ran.out.splitlines() if line.startswith("# ")]
    return [line for line in lines if not line.endswith(" not set") and "sandbox: " not in line]


@pytest.mark.usefixtures("four_gpus")
def test_a_dry_run_shows_the_gpus_of_each_process_and_reads_back(cli: Cli, home: Path) -> None:
    given = "rl --engine vllm --trainer-gpus 2 --inference-gpus 2 --tp 2 --dry-run"
    ran = cli(*given.split())
    assert (ran.code, ran.err) == (0, "")
    assert placed(ran) == [
        "trainer: GPUs 0,1 (--training.backend fsdp --training.fsdp.ranks 2)",
        "worker_1: GPUs 2,3",
    ]
    (home / "back.toml").write_text(ran.out)
    back = load(RunConfig, ["@", "back.toml"], {})
    assert (back.training.backend, back.training.fsdp.ranks) == ("fsdp", 2)
    assert (back.launch.trainer_gpus, back.engine.tp) == ("2", 2)
    assert cli("rl", "@", "back.toml", "--dry-run").out == ran.out
    ran = cli("rl", "@", "demo", "--dry-run", "--json")
    assert json.loads(ran.out)["launch"]["workers"] == 2
    assert ran.err.splitlines()[0] == "trainer: GPU 0"


@pytest.mark.usefixtures("four_gpus")
def test_hidden_gpus_and_a_torch_for_cpus_count(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-1")
    shown = placed(cli("rl", "--trainer-gpus", "1,", "--dry-run"))
    assert shown == ["trainer: GPU GPU-1", "worker_1: GPU 3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert placed(cli("rl", "--dry-run")) == ["trainer: CPU", "worker_1: CPU", "worker_2: CPU"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    torch_is("2.13.0+cpu", monkeypatch)
    assert placed(cli("rl", "--dry-run"))[0] == "trainer: CPU"
    cli("rl", "--trainer-gpus", "1", "--dry-run").refused(2, "whose version ends in +cpu")


@pytest.mark.usefixtures("four_gpus")
def test_gpus_that_are_not_there_are_refused_before_anything_starts(cli: Cli, home: Path) -> None:
    ran = cli("rl", "--trainer-gpus", "3", "--inference-gpus", "2")
    ran.refused(2, "error: --inference-gpus 2: 4 visible, 1 of them free")
    assert not (home / "outputs").exists()


@pytest.mark.parametrize(
    ("given", "code", "reason"),
    [
        ("rl @ demo --no-warmup --model.name /nope", 7, "is neither a directory nor a hub id"),
        ("train --environment.id no-such-environment", 2, "no model: set model.name"),
        ("train @ demo --environment.id no-such-environment", 2, "`pip install`"),
        ("rl @ demo --training.device cuda", 2, "training.device is cuda, and torch is a CPU build"),
        ("train @ demo --engine.device cuda:1", 2, "engine.device is cuda:1, and torch is a CPU"),
        ("sft @ sft_demo --training.device cuda", 2, "leave it out"),
        ("rl @ demo --environment.args.min-len 9", 2, "min_len must not exceed max_len"),
        ("rl @ demo --network.port PORT", 4, "a node may run already; else choose another"),
        ("sft @ sft_demo --no-data.environment --data.files nope.jsonl", 2, "nope.jsonl"),
    ],
)  # fmt: skip
def test_clean_removes_nothing_if_the_new_run_lacks_something(
    cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch, given: str, code: int, reason: str
) -> None:
    torch_is("2.13.0+cpu", monkeypatch)
    old = home / "outputs" / "run"
    (old / "weights").mkdir(parents=True)
    (old / "metrics.jsonl").write_text("{}\n")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        line = given.replace("PORT", str(taken.getsockname()[1]))
        ran = cli(*line.split(), "--name", "run", "--clean")
    ran.refused(code, reason)
    assert sorted(path.name for path in old.iterdir()) == ["metrics.jsonl", "weights"]


NO_NAMES = [
    "",
    "..",
    ".",
    "a/b",
    "/abs",
    "~",
    "~root",
    "-x",
    " a",
    "a\n",
    "a\0b",
    "\x1b[2J",
    "a" * 129,
]


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_runs_name_is_one_directory(cli: Cli, home: Path, name: str) -> None:
    """`--name ''` twice, with --clean, removed all that was in the output directory."""
    (home / "o" / "other").mkdir(parents=True)
    (home / "o" / "notes.md").write_text("mine")
    for command in ("train @ demo", "rl @ demo", "sft @ sft_demo"):
        ran = cli(*command.split(), f"--name={name}", "--output-dir", "o", "--clean")
        ran.refused(2, "choose another one")
    assert sorted(path.name for path in home.rglob("*")) == ["notes.md", "o", "other"]
    for config in (EvalConfig, JudgeRunConfig):
        with pytest.raises(UsageError, match="choose another one"):
            load(config, ["--models", "m"] * (config is EvalConfig) + [f"--name={name}"], {})


@pytest.mark.parametrize("name", ["run", "a b", "a.b-c_2", "...", "\u00fc", "a" * 128])
def test_names_of_one_directory_are_taken(name: str) -> None:
    config = load(RunConfig, ["--name", name, "--output-dir", "~/o"], {})
    assert config.run_dir == Path.home() / "o" / name


@pytest.mark.parametrize("where", [".", ".primerl"])
def test_clean_empties_neither_a_home_nor_the_directory_of_a_users_nodes(
    cli: Cli, home: Path, where: str
) -> None:
    """They may hold what every run holds: logs, checkpoints, metrics."""
    directory = (home / where).resolve()
    for name in ("key.pem", "logs/worker.jsonl", "checkpoints/step_1/COMPLETE", "metrics.jsonl"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("mine")
    before = sorted(directory.rglob("*"))
    line = ("--output-dir", str(directory.parent), "--name", directory.name, "--clean")
    cli("sft", "@", "sft_demo", *line).refused(2, "holds no run")
    assert [path for path in before if not path.exists()] == []


def test_a_run_that_goes_on_is_not_cleaned_wherever_its_data_are(cli: Cli, home: Path) -> None:
    """A trainer with a --data-dir elsewhere has no socket in its run's directory."""
    claim(home / "o" / "run")
    (home / "o" / "run" / "metrics.jsonl").write_text("{}")
    line = ("@", "demo", "--output-dir", "o", "--name", "run", "--clean", "--data-dir", "other")
    with held(home / "o" / "run"):
        for command in ("train", "rl"):
            cli(command, *line).refused(4, "another `primerl-node` works in")
    assert (home / "o" / "run" / "metrics.jsonl").read_text() == "{}"


# -- files and disks that cannot be used -----------------------------------------------------------

SMALL = ("@", "demo", "--name", "run")
SFT = ("@", "sft_demo", "--name", "run")


def one_line(ran: Ran, *words: str) -> None:
    """Assert that a command ended with the exit code of a disk, and one line with these words."""
    assert ran.code == 5, ran.err
    errors = [line for line in ran.err.splitlines() if line.startswith("primerl-node: error: ")]
    assert errors == ran.err.splitlines()[-1:]
    assert "Traceback" not in ran.err
    for word in words:
        assert word in errors[0]


@pytest.mark.parametrize("name", ["config.json", "ticket.txt", "metrics.jsonl", "summary.json"])
@pytest.mark.parametrize("command", ["train", "rl"])
def test_a_directory_where_a_file_of_the_run_should_be(
    cli: Cli, home: Path, command: str, name: str
) -> None:
    (home / "outputs" / "run" / name).mkdir(parents=True)
    resume = ["--resume"] if name == "metrics.jsonl" else []
    one_line(cli(command, *SMALL, *resume), f"run/{name}", "directory", "move it away")


@pytest.mark.parametrize("name", ["", "logs", "checkpoints", "trainer", "trainer/key.pem"])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_something_else_where_a_directory_or_the_key_should_be(
    cli: Cli, home: Path, name: str, kind: str
) -> None:
    path = home / "outputs" / "run" / name
    path.parent.mkdir(parents=True)
    if name:
        (home / "outputs" / "run" / MARK).touch()
    if kind == "link":
        path.symlink_to(home / "nowhere")
    elif name == "trainer/key.pem":
        path.mkdir()
    else:
        path.touch()
    ran = cli("train", *SMALL)
    one_line(ran, name)
    assert any(word in ran.err for word in ("move it away", "remove it"))


@pytest.mark.parametrize("name", ["config.json", "logs"])
def test_the_same_in_supervised_learning(cli: Cli, home: Path, name: str) -> None:
    path = home / "outputs" / "run" / name
    path.parent.mkdir(parents=True)
    path.mkdir() if name == "config.json" else path.touch()
    one_line(cli("sft", *SFT), f"run/{name}", "move it away")


@pytest.mark.parametrize("command", ["train", "rl", "sft", "init"])
def test_a_read_only_disk_is_one_line(cli: Cli, home: Path, command: str) -> None:
    with small_disk(home / "disk") as disk:
        (disk / "run").mkdir()
        make_read_only(disk)
        if command == "init":
            ran = cli("init", "--data-dir", str(disk / "node"))
        else:
            ran = cli(command, *(SFT if command == "sft" else SMALL), "--output-dir", str(disk))
        one_line(ran, "Read-only file system")


def test_a_full_disk_at_the_start_is_one_line_and_leaves_no_half_of_a_file(
    cli: Cli, home: Path
) -> None:
    with small_disk(home / "disk") as disk:
        run = disk / "run"
        run.mkdir()
        (run / MARK).touch()
        (run / "config.json").write_text(json.dumps({"name": "before"}))
        filling = fill(disk)
        one_line(cli("train", *SMALL, "--output-dir", str(disk)), "No space left on device")
        assert json.loads((run / "config.json").read_text()) == {"name": "before"}
        (disk / "node").mkdir()
        one_line(cli("init", "--data-dir", str(disk / "node")), "No space left on device")
        assert list((disk / "node").iterdir()) == []
        filling.unlink()
        assert cli("init", "--data-dir", str(disk / "node")).code == 0


def test_a_disk_that_fills_while_the_model_is_made_is_one_line_and_leaves_no_half_of_a_model(
    cli: Cli, home: Path
) -> None:
    with small_disk(home / "disk", kib=768) as disk:
        one_line(cli("train", *SMALL, "--output-dir", str(disk)), "run/model", "No space left")
        assert not (disk / "run" / "model" / "config.json").exists()
