"""Every key of prime-rl's: its value there, and the value here that means the same.

Of prime-rl's config classes on 2026-08-21 (0.8): `data/prime_rl_keys.txt` lists their keys by program, and
`data/prime_rl_resolved.json` is what `rl --dry-run` writes for a config that sets next to nothing. A line of
`data/prime_rl_values.txt` is `key = value there ; others that it needs | key = value here ; ...`, TOML
on the left and JSON on the right. There `played` is an environment of [orchestrator.eval], `served` a file of
`inference` alone.
"""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from primerl.node.config import prime_rl
from primerl.node.config.loader import merge
from primerl.node.config.prime_rl import COMMANDS, ImportedConfig, read_configs
from primerl.node.config.training import TrainingConfig
from primerl.node.errors import UsageError
from primerl.node.training.optimizer import learning_rate

DATA = Path(__file__).parent / "data"
AFTER_0_8 = """
trainer.model.compile.mode trainer.model.fusions.enabled trainer.model.fusions.shard_fused_on_dim1
trainer.model.moe.compute.type trainer.model.moe.compute.apply_to trainer.model.moe.compute.backend
trainer.model.moe.compute.recipe trainer.model.moe.dispatch.type trainer.model.moe.dispatch.transport
trainer.model.moe.dispatch.num_sms trainer.model.moe.dispatch.token_chunk_size
trainer.loss.eps trainer.loss.max_importance_ratio trainer.loss.score_centering trainer.loss.ratio_low
trainer.loss.ratio_high orchestrator.constant_trainer_batch_size orchestrator.train.group_size
orchestrator.train.select.limit orchestrator.train.select.shuffle orchestrator.train.env.retries.max_retries
orchestrator.train.sampling.top_p orchestrator.train.sampling.top_k orchestrator.train.algo.type
orchestrator.train.algo.length_weighted_baseline orchestrator.train.algo.loss_aggregation
orchestrator.train.algo.advantage orchestrator.train.algo.roles.tool.alpha
orchestrator.train.algo.filter.import_path
orchestrator.eval.select.limit orchestrator.eval.select.include.ids orchestrator.eval.env.timeout
dashboard monitors.prime.name
""".split()
"""Keys that prime-rl's classes and documentation have after 0.8, as they were public until November 2026."""


def _tree(key: str, value: Any) -> dict[str, Any]:
    """A file of the key's program in which the key has this value."""
    owner, _, rest = key.partition(".")
    parts = key.split(".")
    if owner in ("source", "played", "served", "evals") or (
        owner in ("data", "renderer", "val") and parts[0] != "orchestrator"
    ):
        parts = parts if owner in ("data", "renderer", "val") else rest.split(".")
    nested = value
    for part in reversed(parts):
        nested = {("agent" if part == "AGENT" else part): nested}
    if owner == "source":
        return {"orchestrator": {"train": {"source": [nested]}}}
    if owner == "played":
        return {"orchestrator": {"eval": {"source": [nested]}}}
    if owner in ("data", "renderer", "val"):
        return merge({"data": {"name": "o/chats"}}, nested)
    if owner == "evals":
        return merge({"source": [{"id": "a"}], "client": {"base_url": "http://h/v1"}}, nested)
    if owner == "served":
        served = nested if "server" in nested else {"vllm": nested}
        return merge({"vllm": {"model": "o/m"}}, served)
    if owner == "optim":
        return nested
    return merge({"trainer": {}}, nested)


def _joined(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """Merge two files; lists of one environment are merged by their element."""
    found = merge(left, right)
    for section in ("train", "eval"):
        one, other = (
            tree.get("orchestrator", {}).get(section, {}).get("source") for tree in (left, right)
        )
        if one and other:
            found["orchestrator"][section]["source"] = [merge(one[0], other[0])]
    return found


def converted(directory: Path, text: str) -> ImportedConfig:
    """Convert the assignments `a = 1 ; b.c = 2` of prime-rl's."""
    tree: dict[str, Any] = {}
    for assignment in text.split(" ; "):
        key, _, value = assignment.partition(" = ")
        tree = _joined(tree, _tree(key.strip(), tomllib.loads(f"v = {value}")["v"]))
    train = tree.get("orchestrator", {}).get("train", {}).get("source", [])
    if train and not {"id", "env"} & train[0].keys():
        train[0]["id"] = "a"
    path = directory / "mine.json"
    path.write_text(json.dumps(tree))
    return read_configs([path])


def looked_up(tree: Any, path: str) -> Any:
    for part in path.split("."):
        if isinstance(tree, list):
            tree = tree[int(part)] if int(part) < len(tree) else None
        else:
            tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


ROWS = [row.split(" | ") for row in (DATA / "prime_rl_values.txt").read_text().splitlines()]


def test_a_value_there_is_a_value_here_that_means_the_same(tmp_path: Path) -> None:
    for there, here in ROWS:
        config = converted(tmp_path, there)
        for expected in here.split(" ; "):
            path, _, value = expected.partition(" = ")
            assert looked_up(config.values, path) == json.loads(value), there
        key = there.partition(" = ")[0].partition(".")[2]
        assert [note for note in config.missing if note.key.endswith(key)] == [], there
        COMMANDS[config.command].model_validate(config.values)


def test_every_key_that_is_converted_has_a_row() -> None:
    rows = {there.partition(" = ")[0] for there, _ in ROWS}
    names = {name.replace("played.", "source.") for name in rows}
    names |= {name.replace("served.", "inference.vllm.") for name in rows}
    names |= {name.replace("served.", "inference.") for name in rows}
    for rule in prime_rl.RULES.values():
        if rule.kind not in ("same", "differs"):
            continue
        covered = rule.key in names or (
            rule.key.endswith("*") and any(name.startswith(rule.key[:-1]) for name in names)
        )
        assert covered, rule.key


BASES: dict[str, dict[str, Any]] = {
    "rl": {"trainer": {}, "orchestrator": {"train": {"source": [{"id": "a"}]}}},
    "sft": {"data": {"name": "o/chats"}},
    "evals": {"eval": {"source": [{"id": "a"}], "client": {"base_url": "http://h/v1"}}},
}


@pytest.mark.parametrize("program", BASES)
def test_every_key_of_prime_rl_is_converted_or_listed_with_its_effect(
    tmp_path: Path, program: str
) -> None:
    sections = (DATA / "prime_rl_keys.txt").read_text().split("\n\n")
    keys = next(one.split() for one in sections if one.startswith(f"{program}:"))[1:]
    keys += AFTER_0_8 if program == "rl" else []
    assert len(keys) > 40
    path = tmp_path / "mine.json"
    for key in keys:
        nested: Any = 1
        for part in reversed(key.split(".")):
            nested = {part: nested}
        path.write_text(json.dumps(merge(BASES[program], nested)))
        try:
            config = read_configs([path])
        except UsageError:  # 1 is no value of it: it is known
            continue
        unknown = [one.key for one in config.missing if one.reason.startswith("not a known key")]
        assert unknown == [], key


def test_a_dry_run_of_prime_rl_reads_as_the_config_that_it_resolved() -> None:
    config = read_configs([DATA / "prime_rl_resolved.json"])
    run = COMMANDS["rl"].model_validate(config.values).model_dump()
    assert run["output_dir"] / run["name"] == Path("outputs/r")
    training = run["training"]
    assert (training["lr"], training["weight_decay"], training["max_norm"]) == (1e-6, 0.01, 1.0)
    assert (training["betas"], training["loss"]["kl_tau"]) == ((0.9, 0.999), 1e-3)
    assert (training["activation_checkpointing"], training["compile"]) == ("full", True)
    assert run["rollouts"]["groups_per_batch"] * run["rollouts"]["group_size"] == 128
    (played,) = run["evaluation"]["environments"]
    assert (played["prompts"], played["interval"], played["samples"]) == (-1, 100, 1)
    unknown = [note for note in config.missing if note.reason.startswith("not a known key")]
    assert unknown == []
    assert {note.key for note in config.missing} == {
        "trainer.model.ac_offloading",
        *(f"{owner}.tokenizer.name" for owner in ("trainer", "orchestrator")),
        *(f"{owner}.tokenizer.trust_remote_code" for owner in ("trainer", "orchestrator")),
        *("run.dir", "inference.server.port", "inference.vllm.tool_call_parser"),
        *("inference.enable_fp32_lm_head", "inference.enable_fp32_router_logits"),
    }


# -- what differs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "reason"),
    [
        ('trainer.scheduler.type = "linear" ; max_steps = 50', "scheduler.decay_steps = 10: the rate falls"),
        ("trainer.scheduler.decay_steps = 20 ; trainer.scheduler.type = \"linear\" ; max_steps = 50",
         "scheduler.decay_steps = 20: the rate falls from the warm-up to max_steps"),
        ('played.id = "b"', "eval.sampling: the run's temperature and max_tokens"),
        ('source.id = "b"', "trainer.loss: dppo_kl and weight_decay 0.01, the defaults up to prime-rl 0.8"),
        ("orchestrator.train.group_size = 4", "constant_trainer_batch_size: true from 0.9 on"),
        ("orchestrator.eval.skip_first_step = true", "the first version and the last are always evaluated"),
        ("orchestrator.train.algo.loss_aggregation = \"prompt\"", "losses are means over tokens"),
        ("orchestrator.train.select.limit = 9", "all tasks are trained"),
        ("source.select.limit = 9", "the tasks in the order of the taskset"),
        ("source.min_abs_advantage = 0.1", "nearest: training.curriculum.gates"),
        ("source.sampler.type = \"difficulty_pool\"", "whose difficulty_pool needs num_tasks"),
        ("trainer.loss.score_centering = true", "logprobs are corrected by ratios alone"),
        ("trainer.loss.type = \"dpo\"", "losses are those of docs/algorithms.md"),
        ("trainer.loss.adv_tau = 0.5 ; trainer.loss.type = \"ppo\"", "grpo_two_sided has none"),
        ("orchestrator.algo.roles.user.alpha = 0.2 ; orchestrator.algo.type = \"echo\"", "whatever their role"),
        ("evals.select.shuffle = true", "the first tasks, in the order of the taskset"),
    ],
)  # fmt: skip
def test_what_does_not_mean_the_same_is_said(tmp_path: Path, there: str, reason: str) -> None:
    assert reason in "\n".join(converted(tmp_path, there).report())


@pytest.mark.parametrize(
    "there",
    [
        'trainer.scheduler.type = "linear" ; trainer.scheduler.decay_steps = 40 ; max_steps = 50',
        'trainer.scheduler.type = "linear" ; trainer.scheduler.decay_steps = 0 ; max_steps = 50',
        'trainer.scheduler.type = "cosine" ; max_steps = 50',
        "orchestrator.algo.loss_aggregation = \"token\"",
        "orchestrator.train.select.limit = \"None\"",
        "orchestrator.algo.sampling.source = \"policy\"",
        "source.min_abs_advantage = 0.0",
    ],
)  # fmt: skip
def test_what_means_the_same_is_not_said_to_differ(tmp_path: Path, there: str) -> None:
    config = converted(tmp_path, there)
    said = [note for note in config.missing + config.differs if note.key.split(".")[-1] in there]
    assert [note for note in said if "max_steps" not in note.key] == []


@pytest.mark.parametrize(
    ("there", "kind"),
    [
        ("orchestrator.train.algo.type = 'grpo'", "ipo"),
        ("source.select.limit = 3", "ipo"),
        ("trainer.model.moe.compute.type = 'bf16'", "ipo"),
        ("orchestrator.train.env.retries.max_retries = 1", "ipo"),
        ("orchestrator.group_size = 8", None),
        ("source.curriculum = {gates = {}}", None),
        ("trainer.loss.type = 'default'", "dppo_kl"),
    ],
)
def test_a_run_has_the_defaults_of_the_releases_that_its_keys_are_of(
    tmp_path: Path, there: str, kind: str | None
) -> None:
    config = converted(tmp_path, there)
    training = config.values["training"]
    assert training.get("loss", {}).get("type") == kind
    assert training.get("weight_decay") == (0.0 if kind == "ipo" else None)
    assert "trainer.loss" not in {note.key for note in config.differs}


@pytest.mark.parametrize(
    "there",
    [
        "orchestrator.train.sampling.top_p = 'x' ; orchestrator.train.group_size = 4",
        "trainer.scheduler.type = 'linear' ; trainer.scheduler.decay_steps = 'x'",
        "trainer.scheduler.type = 'linear' ; trainer.scheduler.warmup_steps = []",
        "trainer.loss.type = 'ppo' ; trainer.loss.ratio_low = 'x'",
    ],
)
def test_a_value_that_is_no_number_is_one_line(tmp_path: Path, there: str) -> None:
    with pytest.raises(UsageError, match="must be a number"):
        converted(tmp_path, there)


def _their_rate(kind: str, step: int, *, steps: int, warm: int, decay: int, floor: float) -> float:
    """prime-rl's schedule (`trainer/scheduler.py`) at step `step` from 1, in parts of the rate."""
    import torch
    from torch.optim import lr_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    parts: list[Any] = [lr_scheduler.LinearLR(optimizer, floor or 1e-8, 1.0, warm)]
    stones = [warm]
    if kind == "cosine":
        parts.append(lr_scheduler.CosineAnnealingLR(optimizer, steps - warm, floor))
    else:
        parts.append(lr_scheduler.LinearLR(optimizer, 1.0, 1.0, max(1, steps - decay - warm)))
        parts.append(lr_scheduler.LinearLR(optimizer, 1.0, floor or 1e-8, decay - 1))
        stones.append(steps - decay)
    schedule = lr_scheduler.SequentialLR(optimizer, parts, stones)
    for _ in range(step - 1):
        optimizer.step()
        schedule.step()
    return optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(("kind", "floor"), [("cosine", 0.0), ("cosine", 0.1), ("linear", 0.0)])
def test_a_schedule_that_is_kept_has_their_rates_to_a_step(
    tmp_path: Path, kind: str, floor: float
) -> None:
    text = f'trainer.scheduler.type = "{kind}" ; max_steps = 50 ; trainer.optim.lr = 1.0'
    text += f" ; trainer.scheduler.min_lr = {floor}"
    text += " ; trainer.scheduler.decay_steps = 40" if kind == "linear" else ""
    training = TrainingConfig.model_validate(converted(tmp_path, text).values["training"])
    options: dict[str, Any] = {"steps": 50, "warm": 10, "decay": 40, "floor": floor}
    theirs = [_their_rate(kind, step, **options) for step in range(1, 51)]
    ours = [learning_rate(training, step, 50) for step in range(1, 51)]
    # both pass the same rates, theirs a step later: torch counts from 0
    between = [
        min(abs(mine - theirs[min(49, place + n)]) for n in (0, 1))
        for place, mine in enumerate(ours)
    ]
    assert max(between) < 0.02 + floor  # of the warm-up, which begins at min_lr there
    assert sum(ours) == pytest.approx(sum(theirs), rel=0.03)
