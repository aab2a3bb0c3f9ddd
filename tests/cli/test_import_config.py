"""`primerl-node import`: small configs in each layout that prime-rl has had, and what is no config at all."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.repository import ROOT

from primerl.node.config import prime_rl
from primerl.node.config.loader import load, merge
from primerl.node.config.prime_rl import COMMANDS, ImportedConfig, key_table, read_configs
from primerl.node.environments.allowed import BUNDLED
from primerl.node.errors import UsageError

from .conftest import Cli

NEWEST = """
max_steps = 30
seq_len = 1024
[model]
name = "org/model"
[trainer.optim]
lr = 2e-6
[trainer.model.lora]
rank = 4
[orchestrator]
batch_size = 64
group_size = 16
[orchestrator.train.sampling]
max_completion_tokens = 96
[[orchestrator.train.source]]
name = "letters"
[orchestrator.train.source.env.taskset]
id = "alphabet-sort"
min_turns = 2
[orchestrator.train.source.env.taskset.task]
power_per_turn = false
[orchestrator.train.source.env.agent.harness]
id = "null"
[orchestrator.train.source.env.agent.runtime]
type = "subprocess"
[orchestrator.eval]
interval = 10
[[orchestrator.eval.source]]
env = { taskset = { id = "reverse-text" } }
num_examples = 20
group_size = 2
[inference.vllm]
gpu_memory_utilization = 0.5
tensor_parallel_size = 2
"""
MIDDLE = """
max_steps = 30
seq_len = 1024
model = { name = "org/model" }
trainer = { optim = { lr = 2e-6 }, model = { lora = { rank = 4 } } }
[orchestrator]
batch_size = 64
rollouts_per_example = 16
[orchestrator.train.sampling]
max_completion_tokens = 96
[[orchestrator.train.env]]
name = "letters"
taskset = { id = "alphabet-sort-v1", min_turns = 2, task = { power_per_turn = false } }
harness = { id = "null", runtime = { type = "subprocess" } }
[orchestrator.eval]
interval = 10
[[orchestrator.eval.env]]
taskset = { id = "reverse-text-v1" }
num_examples = 20
group_size = 2
[inference]
gpu_memory_utilization = 0.5
parallel = { tp = 2 }
"""
OLDEST = """
max_steps = 30
seq_len = 1024
model = { name = "org/model" }
trainer = { optim = { lr = 2e-6 }, model = { lora = { rank = 4 } } }
[orchestrator]
batch_size = 64
rollouts_per_example = 16
sampling = { max_tokens = 96 }
[[orchestrator.env]]
id = "owner/alphabet-sort"
args = { min_turns = 2, power_per_turn = false }
[orchestrator.eval]
interval = 10
[[orchestrator.eval.env]]
id = "owner/reverse-text"
num_examples = 20
rollouts_per_example = 2
[inference]
gpu_memory_utilization = 0.5
parallel = { tp = 2 }
"""
TRAINER = """
max_steps = 30
model = { name = "org/model", seq_len = 1024, lora = { rank = 4 } }
optim = { lr = 2e-6 }
"""
ORCHESTRATOR = """
max_steps = 30
batch_size = 64
group_size = 16
seq_len = 1024
model = { name = "org/model" }
[train.sampling]
max_completion_tokens = 96
[[train.source]]
env = { taskset = { id = "alphabet-sort", min_turns = 2, task = { power_per_turn = false } } }
[eval]
interval = 10
[[eval.source]]
env = { taskset = { id = "reverse-text" } }
num_examples = 20
group_size = 2
"""
INFERENCE = """
[vllm]
model = "org/model"
gpu_memory_utilization = 0.5
tensor_parallel_size = 2
"""
EXPECTED: dict[str, Any] = {
    "name": "mine",
    "max_steps": 30,
    "engine": {
        "type": "vllm",
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "tp": 2,
        "vllm": {"gpu_memory_utilization": 0.5},
    },
    "model": {"name": "org/model"},
    "environment": {
        "id": "alphabet-sort-hub",
        "args": {"min_turns": 2, "task": {"power_per_turn": False}},
    },
    "sampling": {"max_tokens": 96},
    "rollouts": {"group_size": 16, "groups_per_batch": 4},
    "training": {"lr": 2e-6, "seq_len": 1024, "lora": {"rank": 4}},
    "evaluation": {
        "prompts": 0,
        "interval": 10,
        "environments": [{"id": "reverse-text-hub", "samples": 2, "prompts": 20}],
    },
}
ONE_SOURCE = '\n[[orchestrator.train.source]]\nenv = { taskset = { id = "reverse-text" } }\n'


def convert(directory: Path, *texts: str) -> ImportedConfig:
    paths = [directory / f"mine{number or ''}.toml" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return read_configs(paths)


def notes(config: ImportedConfig) -> str:
    return "\n".join(config.report())


@pytest.mark.parametrize(
    ("text", "places", "owner", "suffix"),
    [
        (NEWEST, ("train.source", "eval.source"), "", ""),
        (MIDDLE, ("train.env", "eval.env"), "", "-v1"),
        (OLDEST, ("env", "eval.env"), "owner/", ""),
    ],
)
def test_a_run_is_the_same_in_each_layout_of_prime_rl(
    tmp_path: Path, text: str, places: tuple[str, str], owner: str, suffix: str
) -> None:
    config = convert(tmp_path, text)
    assert config.values == EXPECTED
    assert (config.command, config.missing) == ("rl", [])
    assert [str(note) for note in config.differs if note.key[-1] == "]"] == [
        f"orchestrator.{place}[0] = '{owner}{name}{suffix}': {name}-hub, which has its prompts, tags and "
        f"rewards on the same data set (a worker allows it by name); {name} here is another task"
        for (place, name) in zip(places, ("alphabet-sort", "reverse-text"), strict=True)
    ]


def test_a_run_is_the_same_in_three_files_and_in_json(tmp_path: Path) -> None:
    three = convert(tmp_path, TRAINER, ORCHESTRATOR, INFERENCE)
    assert three.values == EXPECTED
    assert not three.missing
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(EXPECTED | {"orchestrator": {"batch_size": 5}}))
    assert read_configs([path]).values["rollouts"]["groups_per_batch"] == 1


def test_what_is_written_reads_back_without_an_unknown_key(cli: Cli, home: Path) -> None:
    Path("rl.toml").write_text(NEWEST)
    ran = cli("import", "rl.toml", "--output", "mine.toml")
    assert (ran.code, ran.err) == (0, "")
    assert "primerl-node rl @ mine.toml" in ran.out
    back = load(COMMANDS["rl"], ["@", "mine.toml"], {}).model_dump()
    assert back["rollouts"]["groups_per_batch"] == 4
    assert back["environment"]["args"] == EXPECTED["environment"]["args"]
    printed = cli("import", "rl.toml")
    assert printed.out == Path("mine.toml").read_text()


def test_an_existing_file_is_never_overwritten(cli: Cli, home: Path) -> None:
    Path("rl.toml").write_text(NEWEST)
    cli("import", "rl.toml", "-o", "rl.toml").refused(2, "is there already")
    assert Path("rl.toml").read_text() == NEWEST


def test_every_key_without_a_counterpart_is_named_with_its_reason(tmp_path: Path) -> None:
    text = NEWEST + "[monitors.prime]\nteam = 'p'\n[slurm]\njob_name = 'j'\n[mystery]\nkey = 3\n"
    config = convert(tmp_path, text)
    assert {note.key for note in config.missing} == {
        "monitors.prime.team",
        "slurm.job_name",
        "mystery.key",
    }
    written = config.toml(["mine.toml"], "out.toml")
    assert "#   slurm.job_name = 'j': job scripts to edit are in scripts/slurm" in written
    assert "mystery.key = 3: not a known key of prime-rl" in written
    assert config.values == EXPECTED


def test_keys_that_prime_rl_does_not_have_are_listed_each_with_its_nearest(tmp_path: Path) -> None:
    text = NEWEST + "[orchestratr]\nbatch_size = 3\n[xyzzy]\nplugh = 3\n[run_]\nname = 'r'\n"
    text = text.replace("[orchestrator]\n", "[orchestrator]\ngroup_sise = 3\n", 1)
    notes = {note.key: note.reason for note in convert(tmp_path, text).missing}
    unknown = "not a known key of prime-rl"
    assert notes == {
        "orchestrator.group_sise": f"{unknown}: did you mean orchestrator.group_size?",
        "orchestratr.batch_size": f"{unknown}: did you mean orchestrator.batch_size?",
        "run_.name": f"{unknown}: did you mean run.name?",
        "xyzzy.plugh": unknown,
    }


def test_strict_writes_nothing_if_a_key_is_lost(cli: Cli, home: Path) -> None:
    Path("rl.toml").write_text(NEWEST)
    assert cli("import", "rl.toml", "--strict", "-o", "good.toml").code == 0
    Path("rl.toml").write_text(NEWEST + "[slurm]\njob_name = 'j'\npartition = 'p'\n")
    ran = cli("import", "rl.toml", "--strict", "-o", "mine.toml")
    assert ran.code == 2
    assert "2 keys have no counterpart" in ran.err
    assert "slurm.partition = 'p'" in ran.err
    assert not Path("mine.toml").exists()


def test_several_environments_are_trained_with_their_names_and_ratios(tmp_path: Path) -> None:
    second = (
        '[[orchestrator.train.source]]\nname = "b"\nratio = 0.3\nenv = { taskset = { id = "x" } }'
    )
    config = convert(tmp_path, ONE_SOURCE + second)
    assert "environment" not in config.values
    assert config.values["environments"] == [
        {"id": "reverse-text-hub"},
        {"id": "x", "name": "b", "ratio": 0.3},
    ]


def test_an_environment_keeps_the_sampling_of_its_own(tmp_path: Path) -> None:
    drawn = (
        "sampling = { temperature = 0.6, max_completion_tokens = 9000, top_p = 0.9, min_p = 0.1, "
        "extra_body = { top_k = 20, min_tokens = 0 } }\n"
    )
    played = (
        '[[orchestrator.eval.source]]\nenv = { taskset = { id = "reverse-text" } }\n'
        "sampling = { temperature = 0.0, top_p = 0.9, top_k = -1, max_completion_tokens = 64 }\n"
    )
    every = "[orchestrator.eval.sampling]\ntemperature = 0.8\ntop_k = 20\n"
    played = every + played
    config = convert(
        tmp_path, ONE_SOURCE.replace("reverse-text", "x") + ONE_SOURCE + drawn + played
    )
    first, second = config.values["environments"]
    assert "sampling" not in first
    assert second["sampling"] == {
        "temperature": 0.6,
        "max_tokens": 2047,
        "top_p": 0.9,
        "top_k": 20,
    }
    (evaluated,) = config.values["evaluation"]["environments"]
    assert evaluated["sampling"] == {
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 20,
        "max_tokens": 64,
    }
    assert [one.key for one in config.missing] == ["orchestrator.train.source[1].sampling.min_p"]
    only = convert(tmp_path, ONE_SOURCE + drawn.replace("9000", "90"))
    assert only.values["sampling"] == {
        "temperature": 0.6,
        "max_tokens": 90,
        "top_p": 0.9,
        "top_k": 20,
    }


def test_stops_and_variables_of_the_chat_template_go_to_the_environments(tmp_path: Path) -> None:
    body = "stop = '!'\nextra_body = { chat_template_kwargs = { enable_thinking = false } }\n"
    runs = f"[orchestrator.train.sampling]\n{body}[orchestrator.eval.sampling]\n{body}"
    own = "sampling = { stop = ['a', 'b'], extra_body = { chat_template_kwargs = { effort = 'low' } } }\n"
    played = '[[orchestrator.eval.source]]\nenv = { taskset = { id = "reverse-text" } }\n'
    config = convert(
        tmp_path, ONE_SOURCE + own + ONE_SOURCE.replace("reverse-text", "x") + played + runs
    )
    first, second = config.values["environments"]
    assert first["chat_template_kwargs"] == {"enable_thinking": False, "effort": "low"}
    (evaluated,) = config.values["evaluation"]["environments"]
    shared = {"enable_thinking": False}
    assert second["chat_template_kwargs"] == evaluated["chat_template_kwargs"] == shared
    assert (first["stop"], second["stop"], evaluated["stop"]) == (["a", "b"], ["!"], ["!"])
    assert config.missing == []
    alone = convert(tmp_path, ONE_SOURCE + runs)
    assert alone.values["environment"]["chat_template_kwargs"] == shared


def test_limits_of_sampling_are_those_of_the_run(tmp_path: Path) -> None:
    config = convert(
        tmp_path,
        ONE_SOURCE + "[orchestrator.train.sampling]\ntop_p = 0.95\nmin_p = 0.0\n"
        "extra_body = { top_k = -1, repetition_penalty = 1.1 }\n",
    )
    assert config.values["sampling"].items() >= {"top_p": 0.95, "top_k": 0}.items()
    (lost,) = [one.key for one in config.missing]
    assert lost == "orchestrator.train.sampling.extra_body.repetition_penalty"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ('env = { taskset = { id = "a" }, agent = { harness = { id = "bash" } } }', "null alone"),
        ('env = { taskset = { id = "a" }, agent = { runtime = { type = "modal" } } }', "subprocess alone"),
        ('env = { taskset = { id = "a" }, one = { harness = {} }, two = {} }', "a rollout has one agent"),
        ('env = { taskset = { id = "reverse-text", colour = "red" } }', "no such option here"),
        ('env = { taskset = { id = "wordle" } }', "bundled: word-game"),
        ('curriculum = { sampler = { type = "difficulty_pool" } }\nid = "a"', "needs num_tasks"),
        ('algo = { type = "sft" }\nid = "a"', "Another model's: docs/sft.md, or training.sft"),
    ],
)  # fmt: skip
def test_what_an_environment_asks_for_in_vain_is_reported(
    tmp_path: Path, source: str, reason: str
) -> None:
    config = convert(tmp_path, f"[[orchestrator.train.source]]\n{source}\n")
    assert reason in notes(config)


def test_gates_of_a_curriculum_are_kept_and_others_are_reported(tmp_path: Path) -> None:
    gate = "curriculum = { gates = { zero = { type = 'advantage_range', reject_min = -1.0 } } }\n"
    config = convert(tmp_path, ONE_SOURCE + gate)
    kept = {"zero": {"type": "advantage_range", "reject_min": -1.0}}
    assert config.values["training"]["curriculum"]["gates"] == kept
    assert not config.missing
    assert convert(tmp_path, ONE_SOURCE + gate.replace("advantage_range", "staleness")).missing


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("algo = { type = 'max_rl' }", {"advantage": "max_rl"}),
        (
            "algo = { type = 'grpo', length_penalty = { type = 'linear', num_turns_weight = 0.5 } }",
            {"advantage": "grpo_length", "length_penalty": {"num_turns_weight": 0.5}},
        ),
        (
            "algo = { type = 'opd', teacher = { name = 'org/teacher', base_url = 'http://h/v1' } }",
            {
                "loss": {
                    "type": "reverse_kl",
                    "endpoint": {"url": "http://h/v1", "model": "org/teacher"},
                }
            },
        ),
        (
            "algo = { type = 'opd', teacher = { name = 'org/teacher' } }",
            {"loss": {"type": "reverse_kl", "reference": "org/teacher"}},
        ),
        (
            "algo = { type = 'opsd', demo_key = 'answer' }",
            {"loss": {"type": "reverse_kl", "teacher": "policy", "hint": prime_rl.HINT}},
        ),
        (
            "algo = { type = 'opsd', template = 'It is {demonstration}.' }",
            {"loss": {"type": "reverse_kl", "teacher": "policy", "hint": "It is {demonstration}."}},
        ),
    ],
)
def test_algorithms_are_advantages_and_losses(
    tmp_path: Path, text: str, expected: dict[str, Any]
) -> None:
    config = convert(tmp_path, f"[orchestrator]\n{text}\n{ONE_SOURCE}")
    training = {key: value for key, value in config.values["training"].items() if key != "seq_len"}
    assert training == expected
    assert not config.missing


TEACHER = 'teacher = { name = "big", base_url = "http://h/v1" }'
ENDPOINT = {"url": "http://h/v1", "model": "big"}
TAUGHT = {"type": "reverse_kl", "endpoint": ENDPOINT}


@pytest.mark.parametrize(
    ("run", "own", "expected"),
    [
        ("type = 'grpo'", f"type = 'opd', {TEACHER}", {"loss": TAUGHT}),
        ("type = 'grpo'", "type = 'max_rl'", {"advantage": "max_rl"}),
        ("type = 'grpo'", "type = 'echo'", {"advantage": "grpo", "loss": {"echo_alpha": 0.1}}),
        ("type = 'echo'", "type = 'grpo'", {"advantage": "grpo", "loss": {"echo_alpha": 0.0}}),
        (
            "type = 'max_rl'",
            "type = 'grpo', length_penalty = { type = 'linear', num_turns_weight = 0.5 }",
            {"advantage": "grpo_length", "length_penalty": {"num_turns_weight": 0.5}},
        ),
        (
            f"type = 'opd', {TEACHER}",
            "type = 'grpo'",
            {"advantage": "grpo", "loss": {"type": "dppo_kl"}},
        ),
        (
            "type = 'opd', teacher = { name = 'small', base_url = 'http://h/v2' }",
            f"type = 'opd', {TEACHER}",
            {"loss": TAUGHT},
        ),
        ("type = 'opsd', demo_key = 'answer'", "type = 'opsd', demo_key = 'answer'", {}),
    ],
)
def test_an_environment_keeps_an_algorithm_of_its_own(
    tmp_path: Path, run: str, own: str, expected: dict[str, Any]
) -> None:
    source = f"[[orchestrator.train.source]]\nname = 'b'\nid = 'reverse-text'\nalgo = {{ {own} }}\n"
    text = f"[orchestrator]\nalgo = {{ {run} }}\n{ONE_SOURCE}name = 'a'\n{source}"
    config = convert(tmp_path, text)
    first, second = config.values["environments"]
    assert {key: one for key, one in second.items() if key not in ("id", "name")} == expected
    assert not {"advantage", "loss"} & set(first)
    assert not config.missing


@pytest.mark.parametrize(
    ("run", "own", "reason"),
    [
        ("type = 'opsd'", f"type = 'opd', {TEACHER}", "a run holds one teacher"),
        ("type = 'grpo'", "type = 'opd', teacher = { name = 'big' }", "a run holds one teacher"),
        ("type = 'grpo'", "type = 'rae', decay = 0.9", "training.rae_decay is the run's"),
    ],
)
def test_what_an_environment_cannot_have_of_its_own_is_reported(
    tmp_path: Path, run: str, own: str, reason: str
) -> None:
    source = f"[[orchestrator.train.source]]\nname = 'b'\nid = 'reverse-text'\nalgo = {{ {own} }}\n"
    text = f"[orchestrator]\nalgo = {{ {run} }}\n{ONE_SOURCE}name = 'a'\n{source}"
    config = convert(tmp_path, text)
    assert reason in notes(config)
    assert "loss" not in config.values["environments"][1]


def test_the_algorithm_of_the_only_environment_is_the_runs(tmp_path: Path) -> None:
    own = f"{ONE_SOURCE}algo = {{ type = 'opd', {TEACHER} }}\n"
    config = convert(tmp_path, f"[orchestrator]\nalgo = {{ type = 'max_rl' }}\n{own}")
    training = {key: value for key, value in config.values["training"].items() if key != "seq_len"}
    assert training == {"loss": TAUGHT}
    assert not config.missing


RL_LOSS = "[trainer.loss]\ntype = 'ipo'\nkl_tau = 0.01\n"


@pytest.mark.parametrize(
    ("algo", "own", "expected"),
    [
        (f"type = 'opd', {TEACHER}", "", TAUGHT),
        ("type = 'opsd'", f"algo = {{ type = 'opd', {TEACHER} }}\n", TAUGHT),
        ("type = 'opd', " + TEACHER, "algo.type = 'grpo'\n", {"type": "ipo", "kl_tau": 0.01}),
    ],
)
def test_a_distilling_run_has_a_fixed_loss_as_prime_rl_has_it(
    tmp_path: Path, algo: str, own: str, expected: dict[str, Any]
) -> None:
    config = convert(tmp_path, f"{RL_LOSS}[orchestrator]\nalgo = {{ {algo} }}\n{ONE_SOURCE}{own}")
    assert config.values["training"]["loss"] == expected
    assert not config.missing
    unread = {note.key for note in config.needless if note.reason.endswith("fixed loss")}
    assert unread == ({"trainer.loss.type", "trainer.loss.kl_tau"} if expected is TAUGHT else set())


def test_environments_that_do_not_distil_keep_the_loss_of_a_distilling_run(tmp_path: Path) -> None:
    second = "[[orchestrator.train.source]]\nname = 'b'\nid = 'reverse-text'\nalgo.type = 'grpo'\n"
    run = f"[orchestrator]\nalgo = {{ type = 'opd', {TEACHER} }}\n{ONE_SOURCE}name = 'a'\n"
    config = convert(tmp_path, f"{RL_LOSS}{run}{second}")
    assert config.values["training"]["loss"] == TAUGHT
    assert config.values["environments"][1]["loss"] == {"type": "ipo", "kl_tau": 0.01}
    assert "fixed loss" not in notes(config)


def test_a_distilled_rollout_gets_the_smallest_group_and_a_hint_shows_the_answer(
    tmp_path: Path,
) -> None:
    algorithm = "algo = { type = 'opsd', demo_key = 'expert' }"
    config = convert(tmp_path, f"[orchestrator]\nbatch_size = 32\n{algorithm}\n{ONE_SOURCE}")
    assert config.values["rollouts"] == {"group_size": 2, "groups_per_batch": 16}
    assert "demo_key = 'expert': a hint shows the `answer` of the task's data" in notes(config)


def test_an_algorithm_that_is_not_here_is_reported_and_trained_as_grpo(tmp_path: Path) -> None:
    config = convert(tmp_path, f"[orchestrator.algo]\ntype = 'sft'\n{ONE_SOURCE}")
    assert "orchestrator.algo.type = 'sft': trained as grpo" in notes(config)
    assert "advantage" not in config.values["training"]


def test_defaults_of_prime_rl_that_would_not_work_are_reported(tmp_path: Path) -> None:
    config = convert(tmp_path, ONE_SOURCE)
    assert config.values["rollouts"] == {"group_size": 8, "groups_per_batch": 16}
    assert config.values["sampling"] == {"max_tokens": 2047}
    assert config.values["max_steps"] == prime_rl.MANY_STEPS
    source = "orchestrator.train.source[0]"
    assert {note.key for note in config.differs} == {
        *("group_size", "max_steps", "trainer.loss"),
        source,
    }


def test_lengths_fit_into_each_other(tmp_path: Path) -> None:
    text = """
    trainer = { model = { seq_len = 4096 } }
    inference = { vllm = { max_model_len = 1024 } }
    orchestrator = { seq_len = 2048, train = { sampling = { max_completion_tokens = 1024 } } }
    """
    config = convert(tmp_path, text)
    assert config.values["training"]["seq_len"] == 4096
    assert config.values["engine"]["max_model_len"] == 1024
    assert config.values["sampling"]["max_tokens"] == 1023
    assert "max_completion_tokens = 1024: sampling.max_tokens = 1023" in notes(config)


def test_a_value_out_of_our_bounds_is_left_out_with_the_bound(tmp_path: Path) -> None:
    config = convert(tmp_path, f"[trainer.optim]\nlr = 0.0\n{ONE_SOURCE}")
    assert "lr" not in config.values["training"]
    assert "trainer.optim.lr = 0.0: training.lr: should be greater than 0" in notes(config)


def test_two_keys_that_disagree_are_not_both_taken(tmp_path: Path) -> None:
    text = (
        "trainer = { model = { name = 'org/a' } }\ninference = { vllm = { model = 'org/a-fp8' } }"
    )
    config = convert(tmp_path, text)
    assert config.values["model"]["name"] == "org/a"
    assert "inference.vllm.model = 'org/a-fp8': trainer.model.name has another value" in notes(
        config
    )


@pytest.mark.parametrize(
    ("text", "command", "values"),
    [
        ("num_train_gpus = 2\nnum_infer_gpus = 6", "rl",
         {"launch": {"trainer_gpus": "2", "inference_gpus": "6"}}),
        ("num_train_gpus = 1\nnum_infer_gpus = 1", "rl", {}),
        ("type = 'multi_node'\nnum_train_nodes = 2\nnum_infer_nodes = 4", "train",
         {"training": {"seq_len": 2048, "backend": "fsdp", "fsdp": {"ranks": 8, "nodes": 2}}}),
    ],
)  # fmt: skip
def test_gpus_and_nodes(tmp_path: Path, text: str, command: str, values: dict[str, Any]) -> None:
    config = convert(tmp_path, f"{ONE_SOURCE}[deployment]\n{text}\n")
    assert config.command == command
    assert merge(config.values, values) == config.values
    assert ("launch" in config.values) == ("launch" in values)


def test_muon_on_several_ranks_is_adamw(tmp_path: Path) -> None:
    text = "trainer = { optim = { type = 'muon' } }\ndeployment = { num_train_gpus = 2 }"
    config = convert(tmp_path, text)
    assert "optimizer" not in config.values["training"]
    assert "trainer.optim.type = 'muon'" in notes(config)


def test_sft_keeps_the_defaults_of_prime_rl(cli: Cli, home: Path) -> None:
    text = """
    max_steps = 5
    model = { name = "org/model", lora = { rank = 4 } }
    [data]
    name = "org/chats"
    splits = ["first"]
    batch_size = 4
    micro_batch_size = 1
    [eval]
    interval = 25
    """
    config = convert(home, text)
    assert config.values == {
        "name": "mine",
        "max_steps": 5,
        "batch_size": 4,
        "model": {"name": "org/model"},
        "data": {"hub": "org/chats", "split": "first"},
        "training": {"lr": 1e-6, "scheduler": "constant", "seq_len": 128, "lora": {"rank": 4}},
    }
    assert [str(note) for note in config.missing] == [
        "eval.interval = 25: measure its weights afterwards: `primerl-node eval`"
    ]
    Path("out.toml").write_text(config.toml(["sft.toml"], "out.toml"))
    assert load(COMMANDS["sft"], ["@", "out.toml"], {})


def test_a_server_and_an_evaluation(tmp_path: Path) -> None:
    server = convert(tmp_path, INFERENCE + "tool_call_parser = 'hermes'\n[server]\nport = 8001\n")
    assert server.command == "inference"
    assert server.values["api"] == {"port": 8001, "tool_call_parser": "hermes"}
    assert not server.missing
    text = """
    model = "org/model"
    [eval.client]
    base_url = "http://127.0.0.1:8000/v1"
    api_key_var = "SOME_KEY"
    [[eval.source]]
    env = { taskset = { id = "reverse-text" } }
    num_examples = 7
    """
    evaluation = convert(tmp_path, text)
    played = {"id": "reverse-text-hub", "samples": 1, "prompts": 7}
    assert evaluation.values["environments"] == [played]
    assert evaluation.values["endpoints"] == [
        {"url": "http://127.0.0.1:8000/v1", "model": "org/model", "key_variable": "SOME_KEY"}
    ]


# -- no configs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a = ", "not valid TOML"),
        ("", "is not a config of prime-rl's"),
        ("colour = 'red'", "is not a config of prime-rl's"),
        ("[orchestrator]\nbatch_size = 'many'", "batch_size must be an integer"),
        ("[trainer.optim]\nlr = 'high'", "trainer.optim.lr: should be a valid number"),
        ("[orchestrator]\nenv = 'reverse-text'", "must be a list of tables"),
        ("[[orchestrator.train.source]]\nenv = { taskset = {} }", "names no environment"),
        ("[[orchestrator.env]]\nid = 'a'\ncurriculum = 3", "is not a valid value in prime-rl"),
        ("model = 'org/m'\n[eval.client]\nbase_url = 'http://h/v1'", "no environment is named"),
    ],
)
def test_a_mistake_is_one_line(cli: Cli, home: Path, text: str, reason: str) -> None:
    Path("mine.toml").write_text(text)
    cli("import", "mine.toml", "-o", "out.toml").refused(2, reason)
    assert not Path("out.toml").exists()


def test_files_that_are_not_there_not_text_or_not_of_one_run_are_refused(
    cli: Cli, home: Path
) -> None:
    cli("import").refused(2, "name a config of prime-rl")
    cli("import", "nowhere.toml").refused(2, "no such file")
    cli("import", ".").refused(2, "no such file")
    Path("bytes.toml").write_bytes(b"\xff\xfe\x00")
    cli("import", "bytes.toml").refused(2, "not valid TOML")
    Path("rl.toml").write_text(NEWEST)
    Path("sft.toml").write_text("[data]\nname = 'org/chats'\n")
    cli("import", "rl.toml", "sft.toml").refused(2, "are not one run")


def test_names_in_a_config_cannot_write_lines_of_ours(tmp_path: Path) -> None:
    text = NEWEST + '[slurm]\n"x\\nmax_steps = 7\\n" = 1\n["b\\n[engine]"]\nc = "d\\ne = 3"\n'
    config = convert(tmp_path, text)
    Path(tmp_path / "out.toml").write_text(config.toml(["a\nname = 'b'"], "out.toml\nseed = 3"))
    back = load(COMMANDS["rl"], ["@", str(tmp_path / "out.toml")], {}).model_dump()
    assert (back["max_steps"], back["name"], back["seed"]) == (30, "mine", 0)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deep.toml", "[orchestrator]\n" + "a." * 2000 + "b = 1"),
        ("lists.toml", "[orchestrator]\nfilters = " + "[" * 9000 + "]" * 9000),
        ("deep.json", '{"trainer": ' * 100_000),
    ],
)
def test_tables_in_tables_without_end_are_one_line(
    cli: Cli, home: Path, name: str, text: str
) -> None:
    Path(name).write_text(text)
    cli("import", name).refused(2, name)


ODD: tuple[Any, ...] = ("x", -1, 2.5, [], {}, [{}], {"a": {"b": 1}})


def tree_with(key: str, value: Any) -> dict[str, Any]:
    """A config in which one key, of whichever program, has this value."""
    owner, _, rest = key.replace("*", "any").replace("AGENT", "agent").partition(".")
    nested = value
    for part in reversed(rest.split(".") if rest else []):
        nested = {part: nested}
    if owner == "source":
        return {"orchestrator": {"train": {"source": [merge({"id": "a"}, nested)]}}}
    if owner == "evals":
        source = {"source": [{"id": "a"}], "client": {"base_url": "http://h/v1"}}
        return {"eval": merge(source, nested)}
    sft = owner in ("data", "renderer", "val", "eval")
    return merge({"data": {"name": "o/chats"}} if sft else {"trainer": {}}, {owner: nested})


def tried(path: Path) -> tuple[ImportedConfig | None, str]:
    """What comes of a file: a config, or an error of ours."""
    try:
        return read_configs([path]), ""
    except UsageError as error:
        return None, str(error)


def test_no_value_of_any_key_is_more_than_a_one_line_error(tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    converted = 0
    for place, key in enumerate([*prime_rl.RULES, *(old for old, _ in prime_rl.RENAMED)]):
        for odd in (ODD * 2)[place % len(ODD) :][:3]:  # others for the next key
            path.write_text(json.dumps(tree_with(key, odd)))
            config, said = tried(path)
            assert "\n" not in said, (key, odd)
            converted += config is not None
    assert converted > 500


# -- the table -------------------------------------------------------------------------------------


def test_every_key_of_ours_in_the_table_is_one() -> None:
    names = {name for rule in prime_rl.RULES.values() for name in rule.ours.split(", ") if name}
    for name in names:
        plain = name.removesuffix(".*")
        assert any(prime_rl.has_key(cls, plain) for cls in COMMANDS.values()), name


def test_the_options_of_bundled_environments_are_theirs() -> None:
    from primerl.node.environments.tasksets.alphabet_sort_hub import AlphabetSortHubConfig
    from primerl.node.environments.tasksets.math_env import MathEnvConfig
    from primerl.node.environments.tasksets.reverse_text_hub import ReverseTextHubConfig

    inherited = {"id", "system_prompt", "task"}
    configs = {
        "alphabet-sort-hub": AlphabetSortHubConfig,
        "math-env": MathEnvConfig,
        "reverse-text-hub": ReverseTextHubConfig,
    }
    assert configs.keys() == {name for name, _ in prime_rl.ENVIRONMENTS.values()}
    for name, options in prime_rl.ENVIRONMENTS.values():
        config = configs[name]
        assert name in BUNDLED
        of_the_task = {one.removeprefix("task.") for one in options if one.startswith("task.")}
        own = {one for one in options if not one.startswith("task.")}
        assert own == set(config.model_fields) - inherited
        assert of_the_task <= set(config.model_validate({}).task.__class__.model_fields)


def test_the_page_has_the_table(cli: Cli, home: Path) -> None:
    page = (ROOT / "docs" / "prime-rl.md").read_text()
    assert key_table() in page, "write the output of `primerl-node import --keys` into it"
    assert cli("import", "--keys").out == key_table()
