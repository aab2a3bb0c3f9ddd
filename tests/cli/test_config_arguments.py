import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic_config import BaseConfig

from primerl.cli.main import CONFIGURED, PLAIN
from primerl.node.config.evaluation import EvalConfig
from primerl.node.config.judge import JudgeRunConfig
from primerl.node.config.loader import load, model_in, to_toml
from primerl.node.config.run import JoinConfig, ResumeConfig, RunConfig
from primerl.node.config.serving import ServeConfig
from primerl.node.config.sft import SftConfig
from primerl.node.errors import UsageError

from .conftest import Ran


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_later_layers_win(tmp_path: Path) -> None:
    a = written(
        tmp_path / "a.toml", "seed = 1\nmax_steps = 1\n[training]\nlr = 1e-1\nseq_len = 100"
    )
    b = written(tmp_path / "b.toml", "max_steps = 2\n[training]\nlr = 1e-2")
    args = ["@", a, "@", b, "--training.lr", "1e-4"]
    config = load(RunConfig, args, {"PRIMERL_TRAINING__LR": "1e-3", "PRIMERL_MAX_STEPS": "3"})
    assert config.training.lr == 1e-4
    assert config.max_steps == 3
    assert config.seed == 1
    assert config.training.seq_len == 100
    assert config.rollouts == RunConfig().rollouts


def test_another_environment_does_not_inherit_the_options_of_the_one_before(tmp_path: Path) -> None:
    a = written(tmp_path / "a.toml", '[environment]\nid = "reverse-text"\nargs = { min_len = 5 }')
    assert load(RunConfig, ["@", a], {}).environment.args == {"min_len": 5}
    same = load(RunConfig, ["@", a, "--environment.id", "reverse-text"], {})
    assert same.environment.args == {"min_len": 5}
    other = ["@", a, "--environment.id", "arithmetic"]
    assert load(RunConfig, other, {}).environment.args == {}
    told = load(RunConfig, [*other, "--environment.args.digits", "2"], {})
    assert told.environment.args == {"digits": 2}


def test_the_order_of_files_and_flags_on_the_line_does_not_matter(tmp_path: Path) -> None:
    a = written(tmp_path / "a.toml", "seed = 1")
    assert load(RunConfig, ["--seed", "2", "--resume", "@", a], {}).seed == 2


def test_a_file_can_fill_one_section(tmp_path: Path) -> None:
    a = written(tmp_path / "a.toml", "lr = 0.5")
    assert load(RunConfig, ["--training", "@", a], {}).training.lr == 0.5
    assert load(RunConfig, ["--training", f"@{a}"], {}).training.lr == 0.5


@pytest.mark.parametrize("name", ["demo", "demo.toml", "configs/demo.toml"])
def test_bundled_configs_are_found_by_name(name: str, home: Path) -> None:
    assert load(RunConfig, ["@", name], {}).name == "demo"


@pytest.mark.parametrize("name", ["inference/pp_2", "configs/inference/pp_2.toml"])
def test_bundled_configs_in_folders_are_found_too(name: str, home: Path) -> None:
    assert load(JoinConfig, ["@", name, "--pp.rank", "1"], {}).pp.rank == 1


def test_a_name_leads_to_no_file_outside_the_bundled_ones(home: Path) -> None:
    with pytest.raises(UsageError, match="no config file"):
        load(JoinConfig, ["@", "inference/../../pyproject"], {})


def test_a_file_of_the_user_goes_before_a_bundled_one(home: Path) -> None:
    written(home / "demo.toml", 'name = "mine"')
    assert load(RunConfig, ["@", "demo.toml"], {}).name == "mine"


NODES = ("ab" * 32, "cd" * 32, "ef" * 32)


@pytest.mark.parametrize(
    "given",
    [
        "--verification.validators A --verification.validators B C",
        '--verification.validators ["A","B"] --verification.validators C',
        '--verification.validators=["A"] --max-steps 3 --verification.validators ["B","C"]',
    ],
)
def test_a_list_that_is_given_more_than_once_has_all_of_its_values(
    tmp_path: Path, given: str
) -> None:
    """It had the last ones alone: one validator of two was not known. A list of a file is replaced."""
    file = written(tmp_path / "a.toml", f'[verification]\nvalidators = ["{"00" * 32}"]')
    for letter, node in zip("ABC", NODES, strict=True):
        given = re.sub(rf"\b{letter}\b", node, given)
    config = load(RunConfig, ["@", file, *given.split()], {})
    assert config.verification.validators == list(NODES)


def test_a_tuple_of_any_length_that_is_given_twice_has_both_values_and_one_of_two_the_last() -> (
    None
):
    agents = "--training.episode-agents a --training.episode-agents b".split()
    betas = "--training.betas [0.1,0.2] --training.betas [0.9,0.99]".split()
    training = load(RunConfig, [*agents, *betas], {}).training
    assert (training.episode_agents, training.betas) == (("a", "b"), (0.9, 0.99))


@pytest.mark.parametrize("flag", ["--environment.args.a-b", "--environment.args.a_b"])
def test_a_flag_sets_the_key_of_a_file_that_has_dashes_in_its_name(
    tmp_path: Path, flag: str
) -> None:
    """There were two keys then, `a-b` of the file and `a_b` of the flag."""
    file = written(tmp_path / "a.toml", 'environment = { id = "x", args = { "a-b" = 1, c = 2 } }')
    config = load(RunConfig, ["@", file, flag, "5"], {})
    assert config.environment.args == {"a-b": 5, "c": 2}
    config = load(RunConfig, ["@", file], {"PRIMERL_ENVIRONMENT__ARGS__A_B": "6"})
    assert config.environment.args == {"a-b": 6, "c": 2}
    other = load(RunConfig, ["@", file, "--environment.id", "y", flag, "5"], {})
    assert other.environment.args == {"a_b": 5}


@pytest.mark.parametrize("beside", ['"text"', "1", '{ d = "e" }'])
def test_the_type_of_a_value_does_not_depend_on_what_the_file_says_beside_it(
    tmp_path: Path, beside: str
) -> None:
    """Strings became numbers where all values of the table were strings."""
    text = f'environment = {{ id = "x", args = {{ a = "5", b = "true", c = {beside} }} }}'
    file = written(tmp_path / "a.toml", text)
    args = load(RunConfig, ["@", file], {}).environment.args
    assert (args["a"], args["b"]) == ("5", "true")
    for text, value in (("7", 7), ('"7"', "7"), ("yes", "yes"), ('{"f":"7"}', {"f": "7"})):
        flag = ["--environment.args.g", text]
        assert load(RunConfig, flag, {}).environment.args == {"g": value}
        assert load(RunConfig, ["@", file, *flag], {}).environment.args["g"] == value


@pytest.mark.parametrize("name", [".", "..", "configs", "/"])
def test_a_directory_in_place_of_a_file_is_refused_in_one_line(
    cli: Callable[..., Ran], home: Path, name: str
) -> None:
    (home / "configs").mkdir()
    cli("train", "@", name).refused(2, f"{name} is a directory: name a config file in it")


def test_the_name_of_another_model_replaces_one_that_would_be_created(tmp_path: Path) -> None:
    other = written(tmp_path / "other.toml", '[model]\nname = "other"')
    for args, environ in (
        (["--model.name", "other"], {}),
        (["--model.name=other"], {}),
        (["@", other], {}),
        ([], {"PRIMERL_MODEL__NAME": "other"}),
    ):
        model = load(RunConfig, ["@", "demo", *args], environ).model
        assert (model.name, model.create) == ("other", None)
    for args in (
        ["--model.name", "tiny-qwen3"],
        ["--model.name", "other", "--model.create.hidden-size", "64"],
    ):
        assert load(RunConfig, ["@", "demo", *args], {}).model.create is not None


def test_values_of_every_kind_arrive() -> None:
    flags = [
        *("--training.betas", "[0.8,0.9]", "--network.advertise", "a:1", "b:2", "--no-clean"),
        *("--environment.args.min-len", "4", "--name", "007", "--warmup.target", "0.5", "--resume"),
        *('--engine.vllm={"a": 1}', "--network.libp2p=false"),
    ]
    config = load(RunConfig, ["@", "demo", *flags], {"PRIMERL_CLEAN": "true"})
    assert config.training.betas == (0.8, 0.9)
    assert config.network.advertise == ["a:1", "b:2"]
    assert config.environment.args == {"min_len": 4, "max_len": 7}
    assert config.name == "007"
    assert config.warmup is not None
    assert config.warmup.target == 0.5
    assert config.engine.vllm == {"a": 1}
    tables = [
        "--engine.vllm.a",
        '{"b": "c"}',
        "--engine.vllm.d",
        '{b = "c"}',
        "--engine.vllm.e",
        "{",
    ]
    found = load(RunConfig, ["@", "demo", *tables], {}).engine.vllm
    assert found == {"a": {"b": "c"}, "d": {"b": "c"}, "e": "{"}
    assert (config.clean, config.resume, config.network.libp2p) == (False, ResumeConfig(), False)


def test_an_optional_section_can_be_switched_off() -> None:
    assert load(RunConfig, ["--no-warmup", "@", "demo"], {}).warmup is None
    assert load(RunConfig, ["@", "demo"], {"PRIMERL_WARMUP": "None"}).warmup is None


NEWEST, SEVENTH = ResumeConfig(), ResumeConfig(step=7)


@pytest.mark.parametrize(
    ("text", "environ", "args", "meant"),
    [
        ("", {}, [], None),
        ("", {}, ["--resume"], NEWEST),
        ("", {}, ["--resume", "@", "demo"], NEWEST),
        ("", {}, ["--resume=true"], NEWEST),
        ("", {}, ["--resume", "--seed", "1"], NEWEST),
        ("", {}, ["--no-resume"], None),
        ("", {}, ["--resume=false"], None),
        ("", {}, ["--resume.step", "7"], SEVENTH),
        ("", {}, ["--resume", "--resume.step=7"], SEVENTH),
        ("", {}, ["--resume.dir", "outputs/a"], ResumeConfig(dir=Path("outputs/a"))),
        ("", {"PRIMERL_RESUME": "1"}, [], NEWEST),
        ("", {"PRIMERL_RESUME": "true"}, [], NEWEST),
        ("", {"PRIMERL_RESUME": "false"}, [], None),
        ("", {"PRIMERL_RESUME": "0"}, ["--resume"], NEWEST),
        ("", {"PRIMERL_RESUME__STEP": "7"}, [], SEVENTH),
        ("", {"PRIMERL_RESUME__STEP": "7"}, ["--no-resume"], None),
        ("resume = true", {}, [], NEWEST),
        ("resume = false", {}, [], None),
        ("resume = false", {}, ["--resume"], NEWEST),
        ("resume = true", {}, ["--resume.step", "7"], SEVENTH),
        ("[resume]", {}, [], NEWEST),
        ("[resume]\nstep = 7", {}, [], SEVENTH),
        ("[resume]\nstep = 7", {}, ["--resume"], SEVENTH),
        ("[resume]\nstep = 7", {"PRIMERL_RESUME": "no"}, [], None),
    ],
)
def test_resume_is_a_word_or_a_section(
    tmp_path: Path, text: str, environ: dict[str, str], args: list[str], meant: ResumeConfig | None
) -> None:
    file = written(tmp_path / "a.toml", text)
    assert load(RunConfig, [*args, "@", file], environ).resume == meant


def test_only_a_fork_does_not_go_on_in_its_own_directory(home: Path) -> None:
    assert not load(RunConfig, [], {}).goes_on
    assert load(RunConfig, ["--resume"], {}).goes_on
    assert load(RunConfig, ["--resume.step", "3"], {}).goes_on
    fork = load(RunConfig, ["--resume.dir", "~/a"], {})
    assert not fork.goes_on
    assert fork.resume == ResumeConfig(dir=home / "a")


def test_a_flag_may_mend_what_a_file_got_wrong(tmp_path: Path) -> None:
    a = written(tmp_path / "a.toml", "[rollouts]\ngroups_per_batch = 2")
    with pytest.raises(UsageError, match="groups_per_lease must not exceed"):
        load(RunConfig, ["@", a], {})
    assert load(RunConfig, ["@", a, "--rollouts.groups-per-lease", "1"], {})


def test_variables_of_another_command_are_no_error() -> None:
    assert not load(JoinConfig, [], {"PRIMERL_TRAINING__LR": "1", "PRIMERL_PASSPHRASE": "x"}).wait
    assert load(RunConfig, [], {"PRIMERL_TICKET": "t", "PRIMERL_PARENT_PID": "1"}).seed == 0
    assert load(RunConfig, [], {"PRIMERL_API__SERVED_NAME": "the-judge"}).seed == 0


@pytest.mark.parametrize(
    ("args", "environ", "said"),
    [
        (
            ["--training.lrr", "1"],
            {},
            "training.lrr on the command line: did you mean training.lr?",
        ),
        (["--lr", "1"], {}, "did you mean training.lr?"),
        (["--warmup.lrr", "1"], {}, "did you mean warmup.lr?"),
        (["--xyzzy", "1"], {}, "unknown config key xyzzy"),
        ([], {"PRIMERL_TRAINING__LRR": "1"}, "did you mean PRIMERL_TRAINING__LR?"),
        (
            [],
            {"PRIMERL_TRAINING__LR": "x"},
            "training.lr in the environment: should be a valid number",
        ),
        ([], {"PRIMERL_NETWORK__ADVERTISE": "[x"}, "network.advertise is not valid JSON"),
        (["--training.lr", "x"], {}, "training.lr on the command line: should be a valid number"),
        (["--training.lr"], {}, "requires a value"),
        (["--environment.args.x"], {}, "needs a value"),
        (["--environment.args", "{x"], {}, "environment.args is not valid JSON"),
        (["--max-steps", "0", "--seed", "x"], {}, "(and 1 more)"),
        (["--training", "1"], {}, "config group"),
        (["stray"], {}, "unrecognized arguments: stray"),
        (["--resume", "7"], {}, "unrecognized arguments: 7"),
        (["--resume.step", "-1"], {}, "resume.step on the command line: should be greater"),
        (["--resume.dir", "outputs/run"], {}, "go back in this one by resume.step"),
        ([], {"PRIMERL_RESUME": "maybe"}, "resume in the environment: should be"),
        (["@"], {}, "followed by a config file"),
        (["@", "nope.toml"], {}, "no config file nope.toml: give a path, or a bundled"),
        (["@", "demoo.toml"], {}, "no config file demoo.toml: did you mean demo?"),
        (
            ["demo.toml"],
            {},
            "'demo.toml' is not understood here: a config file follows an @, as in `@ demo.toml`",
        ),
    ],
)
def test_a_mistake_names_the_key_and_the_way_out(
    args: list[str], environ: dict[str, str], said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        load(RunConfig, args, environ)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_and_bad_keys_of_a_file_name_the_file(tmp_path: Path) -> None:
    typo = written(tmp_path / "typo.toml", "[rollouts]\ngroup-size = 3")
    with pytest.raises(
        UsageError, match=r"group-size in .*typo\.toml: did you mean .*group_size\?"
    ):
        load(RunConfig, ["@", typo], {})
    bad = written(tmp_path / "bad.toml", "max_steps = -1")
    with pytest.raises(UsageError, match=r"max_steps in .*bad\.toml: should be greater"):
        load(RunConfig, ["@", bad], {})
    with pytest.raises(UsageError, match="max_steps on the command line"):
        load(RunConfig, ["@", bad, "--max-steps", "-2"], {})


def test_what_is_no_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not valid TOML"):
        load(RunConfig, ["@", written(tmp_path / "a.toml", "a = ")], {})
    with pytest.raises(UsageError, match="table of keys"):
        load(RunConfig, ["@", written(tmp_path / "a.json", "[1]")], {})
    with pytest.raises(UsageError, match="not valid TOML"):
        load(RunConfig, ["@", written(tmp_path / "b.toml", "\x00")], {})


def test_a_home_directory_is_expanded_everywhere(home: Path) -> None:
    assert load(RunConfig, [], {"PRIMERL_DATA_DIR": "~/x"}).data_dir == home / "x"
    nested = load(
        RunConfig,
        ["--training.loss.type", "reverse_kl", "--training.loss.reference", "~/teacher"],
        {},
    )
    assert nested.training.loss.reference == home / "teacher"


def test_a_key_that_was_removed_says_what_to_do_now(tmp_path: Path) -> None:
    old = written(tmp_path / "a.toml", '[verification]\ncalibration = "bounds.json"')
    with pytest.raises(
        UsageError, match=r"verification\.calibration in .*a\.toml was removed: a run in"
    ):
        load(RunConfig, ["@", old], {})


DRY_RUNS: dict[str, tuple[type[BaseConfig], list[str]]] = {
    "train": (RunConfig, ["@", "demo"]),
    "rl": (RunConfig, ["@", "demo"]),
    "join": (JoinConfig, []),
    "sft": (SftConfig, ["@", "sft_demo"]),
    "eval": (EvalConfig, ["@", "eval_demo"]),
    "inference": (ServeConfig, ["--model.name", "m"]),
    "judge": (JudgeRunConfig, ["--model.name", "m"]),
}
"""Every command with --dry-run: its config, and arguments that make one."""


def test_the_name_of_a_user_that_does_not_exist_is_left_alone() -> None:
    assert load(RunConfig, ["--output-dir", "~nobody-here/x"], {}).output_dir == Path(
        "~nobody-here/x"
    )
    with pytest.raises(UsageError, match="~nobody-here"):
        load(RunConfig, ["@", "~nobody-here/run.toml"], {})


def test_every_command_with_a_dry_run_is_listed(cli: Callable[..., Ran]) -> None:
    found = {name for name in (*CONFIGURED, *PLAIN) if "--dry-run" in cli(name, "--help").out}
    assert found == set(DRY_RUNS)


@pytest.mark.parametrize("command", DRY_RUNS)
@pytest.mark.parametrize("extra", [[], ["--log.level", "debug"]])
def test_a_dry_run_prints_a_config_that_reads_back_and_touches_nothing(
    command: str, extra: list[str], cli: Callable[..., Ran], home: Path
) -> None:
    cls, args = DRY_RUNS[command]
    ran = cli(command, *args, *extra, "--dry-run")
    assert (ran.code, ran.err) == (0, "")
    assert "None" not in ran.out
    assert list(home.iterdir()) == []
    back = load(cls, ["@", written(home / "back.toml", ran.out)], {})
    assert back == load(cls, [*args, *extra], {})


def leaves(
    cls: type[BaseModel], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every key of a config, and the type of its value."""
    for name, field in cls.model_fields.items():
        inner = model_in(field.annotation)
        if inner is None or get_origin(field.annotation) in (list, dict):
            yield (*path, name), field.annotation
        else:
            yield (*path, name), None
            yield from leaves(inner, (*path, name))


@cache
def keys_of(command: str) -> list[tuple[tuple[str, ...], Any]]:
    cls, _ = DRY_RUNS[command]
    return list(leaves(cls))


@cache
def plain(command: str) -> BaseModel:
    """The config that a command's arguments make."""
    cls, args = DRY_RUNS[command]
    return load(cls, args, {})


WORDS = st.text(max_size=8) | st.sampled_from(["", "None", "1", "a b", '"', "\\", "\x7f", "é", "#"])
FINITE = st.integers(0, 9) | st.sampled_from([1e-6, 0.5, 1.0, 1e16, 1e300])
NUMBERS = FINITE | st.just(float("inf"))
# a free table holds what JSON can hold, which infinity is not
TABLES = st.dictionaries(WORDS, FINITE | WORDS | st.booleans() | st.lists(FINITE), max_size=3)
VALUES = NUMBERS | WORDS | st.booleans() | st.lists(WORDS, max_size=3) | TABLES | st.none()


@pytest.mark.parametrize("command", DRY_RUNS)
@given(data=st.data())
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_config_reads_back_from_what_a_dry_run_prints(
    command: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cls, args = DRY_RUNS[command]
    directory = tmp_path_factory.mktemp("configs")
    files: list[str] = []
    config = plain(command)
    for number in range(data.draw(st.integers(1, 6))):
        path, kind = data.draw(st.sampled_from(keys_of(command)))
        values = st.sampled_from(get_args(kind)) if get_origin(kind) is Literal else VALUES
        tree = data.draw(values)
        for name in reversed(path):
            tree = {name: tree}
        file = written(directory / f"{number}.json", json.dumps(tree))
        try:
            config = load(cls, [*args, *files, "@", file], {})
        except UsageError:
            continue  # of another type, or outside its bounds
        files += ["@", file]
    printed = to_toml(config.model_dump(mode="json"))
    assert load(cls, ["@", written(directory / "back.toml", printed)], {}) == config


def test_a_dry_run_of_join_needs_no_ticket(cli: Callable[..., Ran]) -> None:
    ran = cli("join", "--data-dir", "d", "--engine.type", "vllm", "--dry-run", "--json")
    assert ran.code == 0
    shown = json.loads(ran.out)
    assert (shown["data_dir"], shown["engine"]["type"]) == ("d", "vllm")


def test_a_dry_run_shows_null_in_a_list_as_json_and_not_as_toml(cli: Callable[..., Ran]) -> None:
    given = ("join", "--engine.vllm", '{"a": [null]}', "--dry-run")
    assert json.loads(cli(*given, "--json").out)["engine"]["vllm"] == {"a": [None]}
    ran = cli(*given)
    assert ran.code == 2
    assert "--dry-run --json" in ran.err


def test_a_bad_config_is_one_line_with_code_2(cli: Callable[..., Ran]) -> None:
    ran = cli("train", "--lr", "1e-5")
    assert ran.code == 2
    assert ran.err == (
        "primerl-node: error: unknown config key lr on the command line: did you mean training.lr?\n"
    )


def test_all_unknown_keys_are_listed_at_once_each_with_the_nearest(
    cli: Callable[..., Ran], tmp_path: Path
) -> None:
    """As a config of another program has them; of bad values the first."""
    path = written(
        tmp_path / "other.toml",
        "max_step = 3\n[trainig]\nlr = 1\n[rollouts]\ngroupsize = 4\n[training]\nxyzzy = 1\nmax_norm = 0\n"
        "betsa = [0.9, 0.9]\nmax_steps = 3\n[[environments]]\nid = 'arithmetic'\nratoi = 2",
    )
    ran = cli("train", "@", path)
    assert ran.code == 2
    first, *lines = ran.err.replace(f" in {path}", "").splitlines()
    assert first == "primerl-node: error: 8 problems:"
    assert set(lines) == {
        "  - unknown config key training.max_steps: did you mean max_steps?",
        "  - unknown config key max_step: did you mean max_steps?",
        "  - unknown config key trainig: did you mean training?",
        "  - unknown config key training.betsa: did you mean training.betas?",
        "  - unknown config key environments.0.ratoi: did you mean environments.ratio?",
        "  - unknown config key rollouts.groupsize: did you mean rollouts.group_size?",
        "  - unknown config key training.xyzzy: --help-all lists the keys",
        "  - training.max_norm: should be greater than 0, not 0",
    }


def test_a_config_of_prime_rl_is_told_of_the_command_that_converts_it(
    cli: Callable[..., Ran], tmp_path: Path
) -> None:
    path = written(tmp_path / "rl.toml", "[trainer.optim]\nlr = 1\n[orchestrator]\nbatch_size = 4")
    cli("rl", "@", path, "--dry-run").refused(2, f"`primerl-node import {path} --output mine.toml`")
    ran = cli("rl", "@", "demo", "@", path, "--training.lrr", "1", "--orchestrator.batch-size", "4")
    assert set(ran.err.splitlines()[1:]) == {
        f"  - {path} is a config of prime-rl's: `primerl-node import {path} --output mine.toml` converts it",
        "  - unknown config key training.lrr on the command line: did you mean training.lr?",
    }
    ran = cli("rl", "@", "demo", "--orchestrator.batch-size", "4")
    ran.refused(2, "key orchestrator on the command line: prime-rl's; `primerl-node import --keys`")


def test_a_section_may_be_given_by_its_type(tmp_path: Path) -> None:
    assert load(RunConfig, ["@", "demo", "--engine", "vllm"], {}).engine.type == "vllm"
    assert load(RunConfig, ["--training.loss", "dppo_kl"], {}).training.loss.type == "dppo_kl"
    section = written(tmp_path / "engine.toml", 'dtype = "bfloat16"')
    config = load(RunConfig, ["--engine", "vllm", "--engine", "@", section], {})
    assert (config.engine.type, config.engine.dtype) == ("vllm", "bfloat16")


def test_a_wrong_type_of_a_section_is_refused() -> None:
    with pytest.raises(UsageError, match=r"engine\.type"):
        load(RunConfig, ["--engine", "vlm"], {})


def test_a_removed_key_that_a_node_of_the_release_before_kept_at_its_default_is_no_error(
    tmp_path: Path,
) -> None:
    kept = tmp_path / "join.toml"
    kept.write_text("leases = 0\n[network]\nmdns = false\n[weights]\nanchor_interval = 10\n")
    load(JoinConfig, ["@", str(kept)], {})
    kept.write_text("[weights]\nanchor_interval = 5\n")
    with pytest.raises(UsageError, match="every ten versions"):
        load(JoinConfig, ["@", str(kept)], {})
