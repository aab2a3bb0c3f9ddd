import sys
from pathlib import Path

import pytest

from primerl.cli.sft import figures, summary_lines
from primerl.cli.tables import ProgressView
from primerl.node.config.loader import load
from primerl.node.config.sft import SftConfig
from primerl.node.sft.loop import SftProgress

from .conftest import Cli


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--data.files", "a.jsonl", "--data.hub", "a/b"], "give one of data.files"),
        (["--data.loss-roles", '["robot"]'], "data.loss_roles"),
        (["--data.render", "qwen3"], "did you mean data.renderer"),
        (["--batch-tokens", "9"], "batch_tokens must be"),
        (["--validation.split", "test"], "validation.split needs data.hub"),
        (["--training.lr", "0"], "training.lr"),
        (["@", "sft_demo", "--validation.fraction", "0.1"], "holds out tasks by itself"),
    ],
)
def test_a_config_says_what_is_wrong_with_it(cli: Cli, args: list[str], message: str) -> None:
    cli("sft", *args).refused(2, message)


def test_no_data_is_one_line(cli: Cli, home: Path) -> None:
    (home / "config.json").write_text('{"model_type": "llama"}')
    ran = cli("sft", "--data.files", "nothing.jsonl", "--model.name", str(home))
    ran.refused(2, "no such file or directory: nothing.jsonl")


def test_a_variable_of_sft_is_known_to_other_commands(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIMERL_DATA__HUB", "a/b")
    assert cli("train", "--dry-run").code == 0
    assert 'hub = "a/b"' in cli("sft", "--dry-run").out


def test_defaults_of_supervised_learning_stay_where_a_neighbour_is_set() -> None:
    config = load(SftConfig, ["--training.seq-len", "99"], {})
    assert config.training.lr == SftConfig().training.lr == 1e-5
    assert config.training.scheduler == "linear"


def test_a_pipe_gets_a_line_now_and_then_and_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressView("title", 2.0, sys.stdout) as view:
        for step in range(1, 10):
            told = SftProgress(step, 9, 0.5, 0.75 if step < 9 else None, 0.1, 12345.6)
            view.update("step", step, 9, figures(told))
    assert capsys.readouterr().out.splitlines() == [
        "step 1/9 | loss 0.5000 | validation 0.7500 | epoch 0.10 | 12,346 tokens/s",
        "step 9/9 | loss 0.5000 | epoch 0.10 | 12,346 tokens/s",
    ]


def test_the_summary_leaves_out_what_was_not_measured() -> None:
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
    more = dict(
        summary_lines(summary | {"validation_loss_before": 1.0, "validation_loss_after": 0.5})
    )
    assert more["validation"] == "1.0000 before, 0.5000 after"
