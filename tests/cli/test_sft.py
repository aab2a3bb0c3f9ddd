import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from primerl.cli.sft import figures, summary_lines
from primerl.cli.tables import ProgressView
from primerl.node.config.loader import load
from primerl.node.config.sft import SftConfig
from primerl.node.sft.loop import SftProgress

from .conftest import Ran

PROGRESS = SftProgress(
    step=3, max_steps=9, loss=0.5, validation_loss=None, epoch=0.25, tokens_per_s=12345.6
)


def test_a_dry_run_prints_a_config_that_reads_back(cli: Callable[..., Ran], home: Path) -> None:
    ran = cli("sft", "@", "sft_demo", "--seed", "4", "--dry-run")
    assert ran.code == 0
    (home / "again.toml").write_text(ran.out)
    config = load(SftConfig, ["@", "again.toml"], {})
    assert config.seed == 4
    assert config == load(SftConfig, ["@", "sft_demo", "--seed", "4"], {})
    assert tomllib.loads(ran.out)["data"]["environment"]["id"] == "reverse-text"


def test_a_config_says_what_is_wrong_with_it(cli: Callable[..., Ran]) -> None:
    for args, message in [
        (["--data.files", "a.jsonl", "--data.hub", "a/b"], "give one of data.files"),
        (["--data.loss-roles", '["robot"]'], "data.loss_roles"),
        (["--data.render", "qwen3"], "did you mean data.renderer"),
        (["--batch-tokens", "9"], "batch_tokens must be"),
        (["--validation.split", "test"], "validation.split needs data.hub"),
        (["--training.lr", "0"], "training.lr"),
        (["@", "sft_demo", "--validation.fraction", "0.1"], "holds out tasks by itself"),
    ]:
        ran = cli("sft", *args)
        assert ran.code == 2, args
        assert message in ran.err
        assert ran.err.count("\n") == 1


def test_a_variable_of_sft_is_known_to_other_commands(
    cli: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIMERL_DATA__HUB", "a/b")
    assert cli("train", "--dry-run").code == 0
    assert 'hub = "a/b"' in cli("sft", "--dry-run").out


def test_defaults_of_supervised_learning_stay_where_a_neighbour_is_set() -> None:
    config = load(SftConfig, ["--training.seq-len", "99"], {})
    assert config.training.lr == SftConfig().training.lr == 1e-5
    assert config.training.scheduler == "linear"


def test_no_data_is_one_line(cli: Callable[..., Ran], home: Path) -> None:
    (home / "config.json").write_text('{"model_type": "llama"}')
    ran = cli("sft", "--data.files", "nothing.jsonl", "--model.name", str(home))
    assert ran.code == 2
    assert "no such file or directory: nothing.jsonl" in ran.err


def test_a_pipe_gets_a_line_now_and_then_and_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressView("title", 2.0, sys.stdout) as view:
        for step in range(1, 10):
            view.update("step", step, 9, figures(SftProgress(step, 9, 0.5, 0.75, 0.1, 100.0)))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 1/9 | loss 0.5000 | validation 0.7500 | epoch 0.10 | 100 tokens/s"
    assert lines[-1].startswith("step 9/9")


def test_figures_leave_out_what_was_not_measured() -> None:
    assert figures(PROGRESS) == "loss 0.5000 | epoch 0.25 | 12,346 tokens/s"


def test_the_summary_is_what_summary_json_says() -> None:
    summary = {
        "run": "x",
        "seed": 0,
        "steps": 5,
        "loss": 0.25,
        "validation_loss_before": None,
        "validation_loss_after": None,
        "samples": 10,
        "tokens": 100,
        "skipped_rows": {"too_long": 2},
        "weights": "here",
    }
    assert dict(summary_lines(summary)) == {
        "run": "x  seed 0, 5 steps",
        "loss": "0.2500",
        "data": "10 samples, 100 tokens",
        "left out": "2 too_long (rows)",
        "weights": "here",
    }
