import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from primerl.cli import calibrate
from primerl.node.config.run import RunConfig
from primerl.node.verification.bounds import BUILT_IN, FalsePositives, read_calibration
from primerl.node.verification.calibration import (
    CalibrationReport,
    CalibrationRequest,
    EngineNoise,
)
from primerl.node.verification.cheats import Separated
from primerl.protocol.rollouts import MEASURES

from .conftest import Cli


def report(caught: float) -> CalibrationReport:
    reject, suspect = BUILT_IN["float32"]
    return CalibrationReport(
        model="ab" * 32,
        name="tiny",
        dtype="float32",
        device="cpu",
        noise=[
            EngineNoise("hf", 64, 640, {name: [0.0, 1e-7, 2e-7, 3e-7, 4e-7] for name in MEASURES})
        ],
        rollouts=64,
        tokens=640,
        entropy=0.3,
        reject=reject,
        suspect=suspect,
        other_scale=0.5,
        false_positives=FalsePositives(64, 0, 1, 0.0457, 0.0719),
        separation=[
            Separated("int8 weights", 16, 4, 9, caught, True),
            Separated("next version", 16, 0, 0, 0.0, False),
        ],
        d_prime={"int8 weights": 2.5},
    )


@pytest.fixture
def measured(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[CalibrationReport], list[tuple[RunConfig, CalibrationRequest]]]:
    """Let the command find a report without measuring; what it asked for is in the list."""
    asked: list[tuple[RunConfig, CalibrationRequest]] = []

    def use(found: CalibrationReport) -> list[tuple[RunConfig, CalibrationRequest]]:
        async def measure(
            config: RunConfig, wanted: CalibrationRequest, weights: Path | None
        ) -> CalibrationReport:
            asked.append((config, wanted))
            return found

        monkeypatch.setattr(calibrate, "_measure", measure)
        return asked

    return use


Measured = Callable[[CalibrationReport], list[tuple[RunConfig, CalibrationRequest]]]


def test_what_was_measured_is_shown_and_written(cli: Cli, home: Path, measured: Measured) -> None:
    asked = measured(report(1.0))
    ran = cli(
        *("calibrate", "--out", "c.json", "--rollouts", "100", "--tokens", "32"),
        *("--against", "hf", "--against", "vllm", "--training.lr", "1e-5", "--seed", "4"),
    )
    assert (ran.code, ran.err.count("wrote c.json")) == (0, 1)
    assert "int8 weights" in ran.out
    assert "1 suspected (at most 7.19%; 95 %)" in ran.out
    assert read_calibration(home / "c.json").honest_rollouts == 64
    [(config, wanted)] = asked
    assert (config.sampling.max_tokens, config.training.lr, config.seed) == (32, 1e-5, 4)
    assert (wanted.rollouts, wanted.engines) == (100, ("hf", "vllm"))


def test_shorter_replies_are_drawn_as_each_environment_says(
    cli: Cli, home: Path, measured: Measured
) -> None:
    asked = measured(report(1.0))
    own = "{ temperature = 0.5, max_tokens = 9, top_k = 3 }"
    (home / "run.toml").write_text(f'[[environments]]\nid = "reverse-text"\nsampling = {own}\n')
    assert cli("calibrate", "@", "run.toml", "--out", "c.json", "--tokens", "4").code == 0
    [(config, _)] = asked
    drawn = config.mixture[0].sampling
    assert (drawn.temperature, drawn.max_tokens, drawn.top_k) == (0.5, 4, 3)


def test_bounds_that_let_another_model_pass_are_not_written(
    cli: Cli, home: Path, measured: Measured
) -> None:
    measured(report(0.98))
    ran = cli("calibrate", "--out", "c.json")
    assert ran.code == 1
    assert "cannot be told from int8 weights" in ran.err
    assert "NOT SEPARATED" in ran.out
    assert not (home / "c.json").exists()
    forced = cli("calibrate", "--out", "c.json", "--force")
    assert forced.code == 0
    assert (home / "c.json").exists()


def test_the_report_is_json_on_request(cli: Cli, home: Path, measured: Measured) -> None:
    measured(report(0.5))
    shown = json.loads(cli("calibrate", "--out", "c.json", "--json").out)
    assert shown["inseparable"] == ["int8 weights"]
    assert shown["noise"][0]["quantiles"]["logprob"][-1] == 4e-7
    assert msgspec.convert(shown["false_positives"], FalsePositives).suspected == 1


def test_a_reply_that_does_not_fit_is_a_wrong_command_line(cli: Cli, measured: Measured) -> None:
    asked = measured(report(1.0))
    ran = cli("calibrate", "--out", "c.json", "--tokens", "5000")
    assert (ran.code, asked) == (2, [])
    assert "max_tokens" in ran.err
    assert cli("calibrate").code == 2


def test_a_disk_that_takes_no_file_is_a_storage_error(
    cli: Cli, home: Path, measured: Measured
) -> None:
    measured(report(1.0))
    ran = cli("calibrate", "--out", "missing/c.json")
    assert ran.code == 5
    assert "name another --out" in ran.err


@pytest.mark.nightly
def test_the_demo_before_its_warm_up_is_refused_and_can_be_forced(cli: Cli, home: Path) -> None:
    command = ("calibrate", "@", "demo", "--quick", "--out", "c.json", "--engine.device", "cpu")
    ran = cli(*command)
    assert ran.code == 2
    assert "random weights" in ran.err
    forced = cli(*command, "--force", "--rollouts.group-size", "4")
    assert forced.code == 0
    assert read_calibration(home / "c.json").honest_rollouts == 64
