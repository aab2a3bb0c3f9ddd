"""--tp, --pp, --dp and engine.vllm: said on the command line, refused before anything starts."""

import json
from collections.abc import Callable

import pytest

from .conftest import Ran

VLLM = ("--engine.type", "vllm")


@pytest.mark.parametrize("command", [("join",), ("rl", "@", "demo")])
def test_short_flags_are_the_config_s_keys(
    cli: Callable[..., Ran], command: tuple[str, ...]
) -> None:
    ran = cli(*command, "--dry-run", "--json", *VLLM, "--tp", "auto", "--dp", "2", "--pp", "1")
    assert ran.code == 0, ran.err
    engine = json.loads(ran.out)["engine"]
    assert (engine["tp"], engine["pp"], engine["dp"]) == ("auto", 1, 2)


@pytest.mark.parametrize("command", [("join",), ("rl", "@", "demo")])
@pytest.mark.parametrize("dry", [("--dry-run",), ()])
@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (("--dp", "2", "--pp", "2"), "dp and pp cannot be combined: start one node per pipeline"),
        (("--engine.vllm.quantization", "fp8"), "would fail every audit"),
        (("--engine.vllm.tensor_parallel_size", "2"), "set engine.tp"),
        (("--engine.vllm.speculative_config", '{"method": "ngram"}'), "no seeds and no proof"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason_also_by_a_dry_run(
    cli: Callable[..., Ran],
    command: tuple[str, ...],
    dry: tuple[str, ...],
    said: tuple[str, ...],
    reason: str,
) -> None:
    ran = cli(*command, *dry, *VLLM, *said)
    assert ran.code == 2
    assert reason in ran.err
    assert not ran.out


def test_a_shape_that_the_model_of_a_run_does_not_allow_is_refused(cli: Callable[..., Ran]) -> None:
    ran = cli("rl", "@", "demo", "--dry-run", *VLLM, "--tp", "3")
    assert ran.code == 2
    assert "set it to one of 1, 2, 4" in ran.err


@pytest.mark.parametrize("dry", [("--dry-run",), ()])
@pytest.mark.parametrize("engine", [(), ("--engine.type", "hf")])
@pytest.mark.parametrize(
    "pipeline", [("--pp.rank", "0", "--pp.world-size", "2"), ("--pp.mode", "on")]
)
def test_a_pipeline_of_another_engine_is_refused_with_the_one_that_it_needs(
    cli: Callable[..., Ran],
    dry: tuple[str, ...],
    engine: tuple[str, ...],
    pipeline: tuple[str, ...],
) -> None:
    ran = cli("join", *dry, *engine, *pipeline)
    assert ran.code == 2
    assert "need vLLM for their stages: set engine.type to vllm" in ran.err
    assert not ran.out


def test_another_engine_has_no_shape(cli: Callable[..., Ran]) -> None:
    ran = cli("join", "--dry-run", "--tp", "2")
    assert ran.code == 2
    assert "set engine.type to vllm" in ran.err
