"""`primerl-node eval` with real models on this machine."""

import json
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chat_model import COMPACT, make_chat_model
from support.run_weights import make_run

from primerl.cli.evaluate import estimate, progress_line, remarks, results_table
from primerl.cli.live import summary_lines
from primerl.cli.tables import ProgressView, console, status_lines
from primerl.node.app.eval import EvalFactories, evaluate
from primerl.node.config.evaluation import EvalConfig
from primerl.node.config.loader import load
from primerl.node.config.run import EnvironmentConfig
from primerl.node.config.training import LoraConfig
from primerl.node.environments.chat import DATE
from primerl.node.environments.environment import Environment, EnvironmentFailed
from primerl.node.errors import UsageError
from primerl.node.evaluation.candidates import Candidate, contract, identity, read
from primerl.node.evaluation.eval_suite import Cell, EvalProgress
from primerl.node.evaluation.evaluator import Rollout
from primerl.node.evaluation.statistics import Estimate, summarize
from primerl.node.models import huggingface
from primerl.node.ops.figures import Status
from primerl.node.storage.run_files import MARK, begun_on, claim
from primerl.node.training import lora
from primerl.node.weights.adapters import adapter_shapes, merge
from primerl.node.weights.state import Tensor, digests

from .conftest import Cli

FAST = ("--engine.device", "cpu", "--engine.max-model-len", "64")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights directory of a run that never was: steps 5 and 10, and adapters at 12."""
    return make_run(tmp_path_factory.mktemp("outputs") / "run")


@pytest.mark.slow
def test_the_steps_of_a_run_are_measured_and_found_again(
    cli: Cli, home: Path, weights: Path
) -> None:
    every = ("eval", "--weights-dir", str(weights), *FAST)
    ran = cli(*every)
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert [line.split()[1] for line in lines[1:4]] == ["base", "step_5", "step_10"]
    assert "64 x 4" in lines[1]
    assert "95 % intervals" in lines[4]
    results = home / "outputs" / "eval"
    cells = json.loads((results / "results.json").read_text())["cells"]
    assert [cell["step"] for cell in cells] == [None, 5, 10]
    assert len({cell["identity"] for cell in cells}) == 3
    for cell in cells:
        rows = [json.loads(line) for line in (results / cell["rollouts"]).read_text().splitlines()]
        assert len(rows) == 64 * 4
        told = cell["figures"]
        assert told["passes"].keys() == {"1", "2", "4"}
        assert told["completion_tokens"] == sum(row["completion_tokens"] for row in rows)
        assert max(row["completion_tokens"] for row in rows) == 4, "the run's own max_tokens"
    replies = [(results / cell["rollouts"]).read_text() for cell in cells]
    assert len(set(replies)) == 3, "each step has weights of its own"

    again = cli(*every, "--steps", "10", "--no-eval-base", "--json")
    assert again.code == 0
    (cell,) = json.loads(again.out)["cells"]
    assert cell == cells[2]
    assert "measured before" in again.err

    anew = cli(*every, "--steps", "10", "--no-eval-base", "--json", "--again")
    (cell,) = json.loads(anew.out)["cells"]
    assert cell["figures"] == cells[2]["figures"], "the same seeds and weights say the same"
    assert "measured before" not in anew.err


def test_other_weights_under_the_same_name_are_another_model(weights: Path) -> None:
    one, other = (Candidate("m", weights / f"step_{step}") for step in (5, 10))
    assert identity(one) != identity(other)
    assert contract(one) == contract(other) == contract(Candidate("b", weights.parent / "model"))


def test_adapters_are_merged_into_their_base(tmp_path: Path, weights: Path) -> None:
    base_dir = weights.parent / "trainer" / "model"
    base = huggingface.policy_state(huggingface.load_model(base_dir, dtype="bfloat16"))
    told = LoraConfig(rank=2, alpha=8.0, target_modules=("q_proj", "down_proj"))
    shapes = adapter_shapes({name: one.shape for name, one in base.items()}, told)
    generator = torch.Generator().manual_seed(1)
    adapters: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator).bfloat16().view(torch.int16)
        adapters[name] = Tensor("BF16", shape, values.numpy().reshape(-1).view("<u2"))
    lora.export(adapters, told, base_dir, tmp_path / "weights" / "step_12")
    candidate = Candidate("a", tmp_path / "weights" / "step_12", base_dir)
    assert digests(read(candidate)) == digests(merge(base, adapters, told))
    whole = Candidate("b", base_dir)
    assert identity(candidate) != identity(whole)
    assert contract(candidate) == contract(whole)
    path = tmp_path / "weights" / "step_12" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_dora": True}))
    with pytest.raises(Exception, match=r"use_dora\): merge them with PEFT"):
        read(candidate)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--weights-dir", "WEIGHTS", "--steps", "5,7"), 2, "has no weights of step 7, only 5, 10"),
        (("--weights-dir", "nowhere"), 2, "there is no directory nowhere"),
        ((), 2, "no model to evaluate"),
        (("--models", "a"), 2, "no environment to evaluate on"),
        (("--steps", "5,x", "--weights-dir", "WEIGHTS"), 2, "steps"),
        (("--models", "a", "--environments", '[{"id": "x", "prompt": 3}]'), 2, "environments"),
        (("--endpoints", '[{"url": "http://h/v1", "model": "m"}]', "--steps", "1"), 2, "no environment"),
        (
            ("--weights-dir", "WEIGHTS", "--environments", '[{"id": "no-such-thing"}]'),
            2,
            "no taskset named 'no-such-thing'",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_a_mistake_is_one_line(
    cli: Cli, weights: Path, args: tuple[str, ...], code: int, message: str
) -> None:
    given = (str(weights) if arg == "WEIGHTS" else arg for arg in args)
    cli("eval", *given, *FAST).refused(code, message)


@pytest.mark.slow
def test_an_evaluation_does_not_start_where_the_template_loses_a_tool(
    cli: Cli, home: Path, weights: Path
) -> None:
    model = Path(shutil.copytree(weights.parent / "model", home / "deaf"))
    make_chat_model(model, COMPACT)
    tooled = '[{"id": "calculator", "tool_call_parser": "hermes"}]'
    ran = cli("eval", "--models", f'["{model}"]', "--environments", tooled, *FAST)
    ran.refused(2, "the chat template leaves out the schema of a tool ('calculate')")


async def test_an_evaluation_writes_the_day_on_which_it_began(home: Path, weights: Path) -> None:
    model = Path(shutil.copytree(weights.parent / "model", home / "dated"))
    make_chat_model(model, "{{ strftime_now('%Y') }}" + COMPACT)
    told = {"models": [str(model)], "environments": [{"id": "reverse-text"}], "output_dir": home}
    config = EvalConfig.model_validate(told)
    claim(config.directory)
    mark = config.directory / MARK
    mark.write_text(mark.read_text().replace(begun_on(config.directory), "2020-02-20"))
    played: list[EnvironmentConfig] = []

    def environment(own: EnvironmentConfig, *_: object) -> Environment:
        played.append(own)
        raise EnvironmentFailed("enough")

    with pytest.raises(UsageError, match="enough"):
        await evaluate(
            config, watch=lambda _: None, factories=EvalFactories(environment=environment)
        )
    assert [own.chat_template_kwargs for own in played] == [{DATE: "2020-02-20"}]


def test_a_dry_run_prints_a_config_that_reads_back(cli: Cli, home: Path) -> None:
    args = ["--models", "m", "--environments", '[{"id": "arithmetic", "samples": 8}]']
    args += ["--endpoints", '[{"url": "http://h/v1/", "model": "x", "options": {"a": [1]}}]']
    ran = cli("eval", *args, "--dry-run")
    assert ran.code == 0, ran.err
    (home / "again.toml").write_text(ran.out)
    assert tomllib.loads(ran.out)["environments"][0]["samples"] == 8
    assert load(EvalConfig, ["@", "again.toml"], {}) == load(EvalConfig, args, {})


def test_steps_are_numbers_however_they_are_written() -> None:
    for args in (["--steps", "5,10"], ["--steps", "[5, 10]"], ["--steps", "5", "10"]):
        config = load(EvalConfig, ["--weights-dir", "w", *args], {})
        assert config.steps == [5, 10]


# -- what is shown --------------------------------------------------------------------------------


def cell(model: str, rewards: list[float], error: str = "") -> Cell:
    rollouts = [
        Rollout(task=0, digest=str(number // 2), sample=number % 2, reward=reward, error=error)
        for number, reward in enumerate(rewards)
    ]
    return Cell(
        key="k",
        environment="env",
        model=model,
        kind="local",
        identity="i",
        seed=0,
        seconds=1.0,
        rollouts="r",
        figures=summarize(rollouts, samples=2, success=1.0),
    )


def text(table: Any) -> str:
    screen = console()
    with screen.capture() as captured:
        screen.print(table)
    return captured.get()


def test_a_table_has_a_row_for_each_model_with_intervals() -> None:
    shown = text(results_table([cell("[b]one", [1.0, 0.0, 1.0, 1.0]), cell("two", [0.0] * 4)]))
    lines = shown.splitlines()
    names = "ENVIRONMENT MODEL PROMPTS avg@k pass@1 pass@2 CUT FAILED TOKENS"
    assert lines[0].split() == names.split()
    assert "[b]one" in lines[1]
    assert "0.750 (" in lines[1]
    assert "0.000 (0.000-" in lines[2]


def test_failures_are_told_below_the_table() -> None:
    dead = cell("dead", [0.0] * 4, "the API refuses")
    assert not dead.counts
    assert "failed: 4 of dead on env: the API refuses" in remarks([dead])


def test_a_mean_without_an_interval_says_none() -> None:
    assert estimate(Estimate(0.5, None, None, "none")) == "0.500"
    assert estimate(Estimate(0.5, 0.25, 0.75, "exact")) == "0.500 (0.250-0.750)"


def test_progress_in_a_pipe_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressView("eval", 5.0, sys.stderr) as view:
        for done in range(5):
            view.update(*progress_line(EvalProgress(1, 2, "m", "env", done, 4, 0.5, 1)))
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[-1] == "1/2 m on env 4/4 | reward 0.500 | 1 failed"
    assert len(lines) <= 3


def test_evaluations_beside_training_are_in_status_and_summary() -> None:
    told = {"version": 20.0, "avg@4": 0.5, "pass@1": 0.5, "failed": 0.25}
    status = Status(
        id="", short="t", role="trainer", software="1", pid=1, uptime_s=1.0, data_dir="d"
    )
    assert "eval" not in dict(status_lines(status))
    status.evaluations, status.evaluating = {"short": told}, 30
    shown = [value for name, value in status_lines(status) if name == "eval"]
    assert shown == ["short, version 20: avg@4 0.500, pass@1 0.500", "of version 30 runs"]
    rows = [{**told, "version": version} for version in (0, 10, 20)]
    lines = [line for line in summary_lines({"evaluations": {"short": rows}}) if "eval" in line[0]]
    assert [value.partition(":")[0] for _, value in lines] == ["version 0", "version 20"]
