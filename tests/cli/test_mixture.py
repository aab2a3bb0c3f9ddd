"""The config of a run with several environments."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from primerl.node.app.factories import sample_terms
from primerl.node.app.trainer import step_settings
from primerl.node.config import run
from primerl.node.config.loader import load
from primerl.node.config.run import EnvironmentConfig, OwnSamplingConfig, RunConfig
from primerl.node.config.training import LossConfig
from primerl.node.environments.allowed import environment_contracts, options_of
from primerl.node.errors import UsageError
from primerl.node.reports.doctor import check_environments
from primerl.node.trainer.run_manifest import MAX_RUN
from primerl.node.trainer.scheduler import lease_policy
from primerl.protocol import manifests, rollouts
from primerl.protocol.manifests import encode

from .conftest import Ran

MIXTURE = """
[[environments]]
id = "reverse-text"
chat_template_kwargs = { enable_thinking = false }
stop = ["</answer>"]

[[environments]]
name = "sums"
id = "arithmetic"
args = { max_value = 9 }
ratio = 3.0
group_size = 16
max_turns = 1
advantage = "rloo"
[environments.sampling]
temperature = 0.6
max_tokens = 4
top_p = 0.9
top_k = 0
[environments.loss]
type = "gspo"
"""


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.fixture
def mixture(tmp_path: Path) -> RunConfig:
    return load(RunConfig, ["@", written(tmp_path / "mixture.toml", MIXTURE)], {})


def test_what_an_environment_leaves_out_is_the_runs(mixture: RunConfig) -> None:
    first, second = mixture.mixture
    assert (first.name, first.ratio, first.group_size) == ("reverse-text", 1.0, 8)
    assert (first.sampling.max_tokens, first.advantage) == (16, "grpo")
    assert (second.name, second.ratio, second.group_size) == ("sums", 3.0, 16)
    assert (second.sampling.max_tokens, second.advantage) == (4, "rloo")
    assert (first.sampling.temperature, second.sampling.temperature) == (1.0, 0.6)
    assert {name: one.loss.type for name, one in mixture.training_on().items()} == {
        "reverse-text": "dppo_kl",
        "sums": "gspo",
    }
    assert {name: one.advantage for name, one in mixture.training_on().items()} == {
        "reverse-text": "grpo",
        "sums": "rloo",
    }
    kept = step_settings(mixture)
    assert kept.training["advantage"] == "grpo"
    assert {name: one["advantage"] for name, one in kept.own.items()} == {"sums": "rloo"}
    assert kept.own["sums"]["loss"]["type"] == "gspo"
    assert (kept.temperature, kept.temperatures) == (1.0, {"sums": 0.6})
    learned = sample_terms(mixture)
    assert learned.keys() == {"sums"}, "what does not differ is the run's"
    assert learned["sums"].temperature == 0.6
    assert LossConfig.model_validate_json(learned["sums"].loss) == second.loss


def test_one_environment_is_a_mixture_of_one() -> None:
    config = load(RunConfig, ["--environment.id", "arithmetic", "--environment.max-turns", "3"], {})
    (only,) = config.mixture
    assert (only.name, only.max_turns, only.group_size) == ("arithmetic", 3, 8)
    assert only.options() == config.environment


def test_the_manifest_has_what_each_environment_is_played_by(mixture: RunConfig) -> None:
    first, second = environment_contracts(mixture)
    assert (first.name, first.id, first.group_size, first.max_turns) == (
        "reverse-text",
        "reverse-text",
        8,
        8,
    )
    assert (second.name, second.id, second.group_size, second.max_turns) == (
        "sums",
        "arithmetic",
        16,
        1,
    )
    assert [one.sampling.max_tokens for one in (first, second)] == [16, 4]
    assert [one.sampling.temperature for one in (first, second)] == [1.0, 0.6]
    assert [one.sampling.top_p for one in (first, second)] == [1.0, 0.9]
    assert options_of(first).chat_template_kwargs == {"enable_thinking": False}
    assert (first.sampling.stop, options_of(first).stop) == (("</answer>",), ["</answer>"])
    assert b"stop" not in first.config
    assert b"chat_template_kwargs" not in second.config, "older releases do not know it"
    wanted = EnvironmentConfig(id="arithmetic", args={"max_value": 9}, max_turns=1)
    assert options_of(second) == wanted, "a worker reads only what it plays by"


def test_an_environment_takes_the_limits_of_the_run_unless_it_has_its_own(tmp_path: Path) -> None:
    text = "[sampling]\ntop_p = 0.8\nextra_body = { top_k = 40 }\n" + MIXTURE
    config = load(RunConfig, ["@", written(tmp_path / "limits.toml", text)], {})
    contracts = [one.sampling for one in environment_contracts(config)]
    assert [(one.top_k, one.top_p) for one in contracts] == [(40, 0.8), (0, 0.9)]


def test_leases_have_room_for_the_largest_group(mixture: RunConfig) -> None:
    policy = lease_policy(mixture)
    assert [(one.group_size, one.ratio) for one in policy.environments] == [(8, 1.0), (16, 3.0)]
    assert policy.largest_group == 16
    assert policy.max_bytes > lease_policy(RunConfig()).max_bytes


def test_leases_have_room_for_the_supports_of_truncated_draws(mixture: RunConfig) -> None:
    limits = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    free = [
        one.model_copy(update={"sampling": OwnSamplingConfig.model_validate(limits)})
        for one in mixture.environments
    ]
    untruncated = lease_policy(mixture.model_copy(update={"environments": free}))
    tokens = mixture.training.seq_len * 16 * mixture.rollouts.groups_per_lease
    assert lease_policy(mixture).max_bytes - untruncated.max_bytes == 1017 * tokens


BOTH = MIXTURE + '[environment]\nid = "word-game"\n'
TWICE = '[[environments]]\nid = "arithmetic"\n' * 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOTH, r"\[environment\] is for one environment alone"),
        (TWICE, "environments must have different names: 'arithmetic' is there twice"),
        ('[[environments]]\nid = "a"\nname = "a/b"\n', 'has no "/"'),
        ('[[environments]]\nid = "a"\nname = "mean"\n', 'is not "mean"'),
        ('[[environments]]\nid = "a"\nratio = 0.0\n', "ratio"),
        ('[[environments]]\nid = "a"\ngroup_size = 5000\n', "group_size"),
        ('[[environments]]\nid = "a"\nratios = 1.0\n', "ratios"),
        ('[[environments]]\nid = "a"\n[environments.sampling]\ntemperature = 0\n', "temperature"),
        (
            '[[environments]]\nid = "a"\n[environments.sampling]\nmin_p = 0.9\nlogit_bias = 1\n',
            "environments.0.sampling.*: logit_bias and min_p cannot be set in training",
        ),
        ("[sampling]\ntop_p = 1.5\n", "top_p"),
        ("[sampling.extra_body]\nmin_tokens = 5\n", "min_tokens cannot be set in training"),
        ("[sampling.extra_body]\nguided_json = 5\n", "guided_json"),
        (
            '[sampling]\nstop = ["."]\n',
            r"stop depend on the text: give them in \[environment\]",
        ),
        (
            '[environment]\nstop = ["."]\ndeterministic_tools = false\n',
            "leave stop out",
        ),
        ('[environment]\nstop = [""]\n', "stop"),
        (
            "[sampling.extra_body.chat_template_kwargs]\nenable_thinking = false\n",
            r"give them in \[environment\]",
        ),
        ('[[environments]]\nid = "a"\n[environments.loss]\ntype = "best"\n', "type"),
        (
            '[training]\ncontext_parallel = 2\n[[environments]]\nid = "a"\n[environments.loss]\n'
            'type = "gspo"\n',
            "the environment 'a': loss.type 'gspo' .* needs whole sequences",
        ),
        (
            '[training.curriculum.gates.g]\n[[environments]]\nid = "a"\nadvantage = "rae"\n',
            'the environment .a.: advantage "rae" compares no groups',
        ),
        (
            '[[environments]]\nid = "a"\n[environments.loss]\ntype = "reverse_kl"\n',
            "the loss of the environment 'a' compares with a reference that is not training.loss's",
        ),
        (
            '[training.loss]\ntype = "reverse_kl"\nendpoint = { url = "http://h/v1", model = "m" }\n'
            '[[environments]]\nid = "a"\n[environments.sampling]\ntemperature = 0.7\n',
            "the environment 'a' samples at 0.7: set sampling.temperature = 1",
        ),
        (
            '[[environments]]\nid = "a"\n[environments.sampling]\nmax_tokens = 9000\n',
            "must be below training.seq_len",
        ),
        ('[[environments]]\nid = "a"\n' * 65, "64"),
    ],
)
def test_a_mistake_in_a_mixture_is_named(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        load(RunConfig, ["@", written(tmp_path / "wrong.toml", text)], {})


def test_losses_may_have_endpoints_of_their_own_but_no_second_model_that_is_held(
    tmp_path: Path,
) -> None:
    url = 'endpoint = { url = "http://h/v1", model = "%s" }\n'
    own = '[[environments]]\nid = "%s"\n[environments.loss]\ntype = "reverse_kl"\n'
    two = own % "a" + url % "big" + own % "b" + url % "small" + '[[environments]]\nid = "c"\n'
    found = load(RunConfig, ["@", written(tmp_path / "two.toml", two)], {}).training_on()
    assert [one.loss.endpoint and one.loss.endpoint.model for one in found.values()] == [
        *("big", "small", None)
    ]
    for held in ('[training.loss]\ntype = "reverse_kl"\n' + two, two + own % "d"):
        with pytest.raises(UsageError, match="compares with a reference that is not"):
            load(RunConfig, ["@", written(tmp_path / "held.toml", held)], {})


def test_a_dry_run_of_a_mixture_reads_back_and_names_what_is_not_installed(
    cli: Callable[..., Ran], tmp_path: Path
) -> None:
    text = MIXTURE + '[[environments]]\nid = "not-there"\n'
    ran = cli("train", "@", written(tmp_path / "three.toml", text), "--dry-run")
    assert ran.code == 0
    assert "# environment not-there: the environment 'not-there' is not installed here" in ran.out
    back = load(RunConfig, ["@", written(tmp_path / "back.toml", ran.out)], {})
    assert back.mixture == load(RunConfig, ["@", str(tmp_path / "three.toml")], {}).mixture


def test_the_doctor_looks_at_each_environment(mixture: RunConfig) -> None:
    found: list[Any] = list(check_environments(mixture))
    assert [(one.name, one.state) for one in found] == [
        ("environment reverse-text", "ok"),
        ("environment sums", "ok"),
    ]
    missing = RunConfig.model_validate({"environments": [{"id": "not-there"}]})
    (check,) = check_environments(missing)
    assert (check.state, "not installed" in check.advice) == ("problem", True)


def test_the_bundled_mixture_fits_a_manifest(home: Path) -> None:
    config = load(RunConfig, ["@", "mixture"], {})
    assert len(config.mixture) == 3
    assert run.MAX_ENVIRONMENTS == manifests.MAX_ENVIRONMENTS
    assert run.MAX_BRANCHES == rollouts.MAX_BRANCHES
    assert sum(len(encode(one)) for one in environment_contracts(config)) < MAX_RUN / 4
