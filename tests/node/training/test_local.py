import gc
import json
import math
import random
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.family_cases import make_family
from support.training_cases import FAST, TINY, batch, contents, logprobs, sample

from primerl.node.config.training import LossConfig, MixedSftConfig, TrainingConfig
from primerl.node.errors import EngineError, StorageError
from primerl.node.models import huggingface
from primerl.node.models.created_model import CREATED
from primerl.node.training.backend import Sample, SampleTerms, TrainBatch
from primerl.node.training.learner import Learner
from primerl.node.training.local_backend import LocalBackend
from primerl.node.training.losses import M2_THRESHOLD
from primerl.node.weights.state import digests


def learner(model_dir: Path, config: TrainingConfig = FAST, temperature: float = 1.0) -> Learner:
    return Learner.build(model_dir, config, max_steps=10, seed=0, temperature=temperature)


def terms(temperature: float, loss: LossConfig | None = None) -> SampleTerms:
    return SampleTerms(temperature, (loss or LossConfig()).model_dump_json())


def masters(subject: Learner, directory: Path) -> dict[str, bytes]:
    """Everything that save() writes: fp32 weights, moments, RNG, step."""
    subject.save(directory)
    return contents(directory)


def test_packed_logprobs_are_those_of_each_sample_alone(model_dir: Path) -> None:
    model = huggingface.load_model(model_dir)
    rng = random.Random(0)
    samples = [sample(rng, prompt=rng.randint(1, 6), drawn=rng.randint(1, 9)) for _ in range(9)]
    samples[0] = replace(samples[0], mask=[True] * len(samples[0].mask))  # from the first token on
    together = learner(model_dir, temperature=0.7).packed_logprobs(samples)
    alone: list[float] = []
    for one in sorted(samples, key=lambda s: -len(s.token_ids)):
        logits = model(input_ids=torch.tensor([one.token_ids])).logits[0].float() / 0.7
        table = logits.detach().log_softmax(-1)
        alone += [
            float(table[t - 1, token]) for t, token in enumerate(one.token_ids) if t and one.mask[t]
        ]
    assert together == pytest.approx(alone, abs=1e-5)


@pytest.mark.slow  # the C++ compiler takes a minute
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_compiling_ahead_changes_nothing_and_spares_the_first_step(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo import config as dynamo
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    graphs = counters["stats"]
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # an engine on the CPU has set it
    mine = learner(model_dir, FAST.model_copy(update={"compile": True}))
    before = masters(mine, tmp_path / "before")
    with dynamo.patch(disable=False):
        mine.compile_step()
        assert masters(mine, tmp_path / "after") == before
        compiled = graphs["unique_graphs"]
        assert compiled > 0
        values = mine.step(batch(1)).values
    assert graphs["unique_graphs"] == compiled
    plain = learner(model_dir).step(batch(1)).values
    assert values["loss/mean"] == pytest.approx(plain["loss/mean"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_layers_of_every_kind_stay_compiled_with_and_without_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo import config as dynamo
    from torch._dynamo.utils import counters

    make_family("gemma3_text", tmp_path)
    torch.compiler.reset()
    counters.clear()
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    mine = learner(tmp_path, FAST.model_copy(update={"compile": True}))
    with dynamo.patch(disable=False):
        mine.compile_step()
        for rows in (batch(1).samples, batch(2).samples[:2], batch(3).samples[:1]):
            mine.packed_logprobs(rows)
    frames = counters["frames"]
    assert frames["total"] == frames["ok"] > 0


def test_what_is_not_compiled_needs_no_time_ahead(model_dir: Path, tmp_path: Path) -> None:
    mine = learner(model_dir)
    before = masters(mine, tmp_path / "before")
    mine.compile_step()
    assert masters(mine, tmp_path / "after") == before


def test_the_size_of_micro_batches_does_not_change_the_step(
    model_dir: Path, tmp_path: Path
) -> None:
    wide, narrow = learner(model_dir), learner(model_dir, FAST.model_copy(update={"seq_len": 16}))
    one, other = wide.step(batch(1)).values, narrow.step(batch(1)).values
    assert other["loss/mean"] == pytest.approx(one["loss/mean"], rel=1e-5)
    assert other["optim/grad_norm"] == pytest.approx(one["optim/grad_norm"], rel=1e-4)
    assert other["tokens"] == one["tokens"] > 0


@pytest.mark.parametrize("loss", ["dppo_kl", "grpo_two_sided"])
def test_favoured_tokens_rise_and_disfavoured_ones_fall(model_dir: Path, loss: str) -> None:
    config = TrainingConfig(
        lr=1e-2,
        weight_decay=0.0,
        threads=1,
        device="cpu",
        loss=LossConfig.model_validate({"type": loss}),
    )
    subject = learner(model_dir, config)
    favoured = Sample([5, 6, 100], [False, False, True], [0.0, 0.0, 0.0], 1.0)
    rejected = Sample([5, 6, 200], [False, False, True], [0.0, 0.0, 0.0], -1.0)

    def probabilities() -> tuple[float, float]:
        table = logprobs(subject, [favoured, rejected])
        return math.exp(table[0][2]), math.exp(table[1][2])

    before = probabilities()
    for step in range(1, 13):
        current = probabilities()
        rows = [
            replace(favoured, logprobs=[0.0, 0.0, math.log(current[0])]),
            replace(rejected, logprobs=[0.0, 0.0, math.log(current[1])]),
        ]
        values = subject.step(TrainBatch(step, rows)).values
        assert values["mismatch_kl/all/mean"] == pytest.approx(0.0, abs=1e-6)
    after = probabilities()
    assert after[0] > 3 * before[0]
    assert after[1] < before[1]


def test_echo_makes_the_environments_tokens_likelier_and_the_prompt_not(model_dir: Path) -> None:
    loss = LossConfig(echo_alpha=0.1, rejection="second_moment")
    subject = learner(model_dir, FAST.model_copy(update={"lr": 1e-3, "loss": loss}))
    said = [False, False, False, True]
    row = Sample([5, 60, 100, 200], [False] * 4, [0.0] * 4, 0.0, said)
    prompt = replace(row, mask=[False, True, False, False], echo=None)

    def nats() -> tuple[float, float]:
        (heard,) = subject.packed_logprobs([row])
        return heard, logprobs(subject, [prompt])[0][1]

    before = nats()
    for step in range(1, 6):
        values = subject.step(TrainBatch(step, [row])).values
        if step == 1:
            assert values["nll/mean"] == pytest.approx(-before[0], abs=1e-5)
            assert (values["tokens"], values["nll/tokens"]) == (0, 1)
    after = nats()
    assert after[0] - before[0] > 5 * abs(after[1] - before[1])


def test_echo_and_the_loss_of_the_drawn_tokens_do_not_dilute_each_other(model_dir: Path) -> None:
    """The step's gradient is the sum of those of either alone, whatever their numbers of tokens."""
    drawn = Sample(
        [5, 6, 100, 7, 8, 9], [False, True, True] + [False] * 3, [0.0, -5.5, -5.5, 0, 0, 0], 1.0
    )
    both = replace(drawn, echo=[False] * 3 + [True] * 3)
    heard = replace(both, mask=[False] * 6)

    def moved(one: Sample) -> dict[str, torch.Tensor]:
        changes = {"loss": LossConfig(echo_alpha=0.5), "max_norm": 1e9}
        subject = learner(model_dir, FAST.model_copy(update=changes))
        subject.step(TrainBatch(1, [one]))
        moments = subject.saved().moments  # the first one is proportional to the gradient
        return {name: one for name, one in moments.items() if name.endswith(":exp_avg")}

    parts, whole = [moved(one) for one in (drawn, heard)], moved(both)
    assert len(whole) > 5
    for name, moment in whole.items():
        assert torch.allclose(moment, parts[0][name] + parts[1][name], atol=1e-7)


def test_a_mixed_step_has_the_weighted_sum_of_both_gradients(model_dir: Path) -> None:
    """weight x cross entropy at temperature 1 + the loss of the rollouts at theirs, in one packed row."""
    rollout = Sample([5, 6, 100], [False, False, True], [0.0, 0.0, -5.5], 1.0)
    shown = Sample([7, 8, 9, 10], [False, False, True, True], [0.0] * 4, 1.0, given=True)

    def moved(batch: TrainBatch) -> dict[str, torch.Tensor]:
        changes = {"sft": MixedSftConfig(files=["x.jsonl"], weight=0.3), "max_norm": 1e9}
        subject = learner(model_dir, FAST.model_copy(update=changes), temperature=0.7)
        figures.append(subject.step(batch).values)
        moments = subject.saved().moments  # the first one is proportional to the gradient
        return {name: one for name, one in moments.items() if name.endswith(":exp_avg")}

    figures: list[dict[str, float]] = []
    alone = moved(TrainBatch(1, [rollout]))
    taught = moved(TrainBatch(1, [replace(shown, given=False)], "ce"))
    for name, moment in moved(TrainBatch(1, [rollout, shown])).items():
        assert torch.allclose(moment, alone[name] + 0.3 * taught[name], atol=1e-7)
        assert not torch.allclose(moment, alone[name], atol=1e-7)
    assert figures[2]["sft_loss/mean"] == pytest.approx(figures[1]["loss/mean"], rel=1e-6)
    assert (figures[2]["tokens"], figures[2]["sft_loss/tokens"]) == (1, 2)


def test_a_demonstration_without_training_sft_is_not_taken_for_a_rollout(model_dir: Path) -> None:
    shown = Sample([7, 8, 9], [False, True, True], [0.0] * 3, 1.0, given=True)
    values = learner(model_dir).step(TrainBatch(1, [shown])).values
    assert (values["samples/malformed"], values["tokens"]) == (1, 0)


def teacher_of(directory: Path, **shape: int) -> Path:
    huggingface.create(directory, TINY | shape, seed=9)
    return directory


def distilling(teacher: Path | None) -> TrainingConfig:
    loss = LossConfig(type="reverse_kl", reference=teacher, kl_tau=0.0)
    return FAST.model_copy(update={"loss": loss})


def test_distillation_compares_with_the_teacher_that_is_named(
    model_dir: Path, tmp_path: Path
) -> None:
    teacher = teacher_of(tmp_path / "teacher", hidden_size=48, num_hidden_layers=3)
    rng = random.Random(5)
    row = sample(rng, drawn=6)

    def read(directory: Path) -> list[float]:
        return learner(directory).packed_logprobs([row])

    pi, wanted = read(model_dir), read(teacher)
    drawn = replace(row, logprobs=[0.0] * 4 + pi)
    values = learner(model_dir, distilling(teacher)).step(TrainBatch(1, [drawn])).values
    gaps = [other - own for own, other in zip(pi, wanted, strict=True)]
    assert values["loss/mean"] == pytest.approx(-sum(gaps) / 6, abs=1e-5)
    assert max(map(abs, gaps)) > 0.01
    alone = learner(model_dir, distilling(None)).step(TrainBatch(1, [drawn])).values
    assert alone["loss/mean"] == pytest.approx(0.0, abs=1e-5)


def test_a_teacher_behind_an_endpoint_teaches_what_it_teaches_from_a_directory(
    model_dir: Path, tmp_path: Path
) -> None:
    teacher = teacher_of(tmp_path / "teacher")
    rng = random.Random(5)
    rows = [sample(rng, drawn=drawn) for drawn in (6, 3, 5)]
    reader = learner(teacher)
    said = [
        replace(one, reference=[0.0] * 4 + reader.packed_logprobs([one])) for one in rows
    ]  # as a server of the teacher says it
    endpoint = {"url": "http://127.0.0.1:1/v1", "model": "teacher"}
    loss = distilling(None).loss.model_dump() | {"endpoint": endpoint}
    config = FAST.model_copy(update={"loss": LossConfig.model_validate(loss)})
    near = learner(model_dir, distilling(teacher)).step(TrainBatch(1, rows)).values
    far = learner(model_dir, config).step(TrainBatch(1, said)).values
    for name in ("loss/mean", "ref_kl/all/mean", "optim/grad_norm"):
        assert far[name] == pytest.approx(near[name], rel=1e-4)
    assert near["optim/grad_norm"] > 1e-4


def test_a_policy_becomes_like_its_teacher(model_dir: Path, tmp_path: Path) -> None:
    teacher = teacher_of(tmp_path / "teacher")
    long = {"seq_len": 1024}
    subject = learner(model_dir, distilling(teacher).model_copy(update=long))
    wanted = learner(teacher, FAST.model_copy(update=long))
    ids = range(256)
    every = [Sample([5, 6, 7, one], [False] * 3 + [True], [0.0] * 4, 0.0) for one in ids]

    def distance() -> float:
        pi, other = (model.packed_logprobs(every) for model in (subject, wanted))
        return sum(math.exp(a) * (a - b) for a, b in zip(pi, other, strict=True))

    before = distance()
    rng = random.Random(3)
    for step in range(1, 21):
        pi = subject.packed_logprobs(every)
        drawn = rng.choices(ids, [math.exp(one) for one in pi], k=64)
        rows = [replace(every[one], logprobs=[0.0] * 3 + [pi[one]]) for one in drawn]
        subject.step(TrainBatch(step, rows))
    assert distance() < 0.7 * before


HINT = [40, 41, 42]


def hinted(teacher: Path | None = None, **fields: object) -> TrainingConfig:
    whom = {"reference": teacher} if teacher else {"teacher": "policy"}
    loss = {"type": "reverse_kl", "hint": "{demonstration}", "kl_tau": 0.0}
    return FAST.model_copy(update={"loss": LossConfig.model_validate(loss | whom | fields)})


def with_hint(one: Sample) -> Sample:
    """What a teacher reads, written out."""
    blank = [0.0] * len(HINT)
    return replace(
        one,
        token_ids=[*HINT, *one.token_ids],
        mask=[False] * len(HINT) + one.mask,
        logprobs=blank + one.logprobs,
    )


@pytest.mark.parametrize("teaches", ["policy", "reference"])
def test_a_teacher_that_reads_a_hint_says_what_it_would_say_of_the_whole_text(
    model_dir: Path, tmp_path: Path, teaches: str
) -> None:
    """OPSD: log pi(token | hint, before it) - log pi(token | before it), on the tokens of the policy alone."""
    teacher = teacher_of(tmp_path / "teacher") if teaches == "reference" else None
    rng = random.Random(5)
    rows = [sample(rng, drawn=drawn) for drawn in (6, 3, 5)]
    pi = [learner(model_dir).packed_logprobs([one]) for one in rows]
    reader = learner(teacher or model_dir)
    gaps = [
        other - own
        for one, mine in zip(rows, pi, strict=True)
        for own, other in zip(mine, reader.packed_logprobs([with_hint(one)]), strict=True)
    ]
    drawn = [
        replace(one, logprobs=[0.0] * 4 + mine, hint=HINT)
        for one, mine in zip(rows, pi, strict=True)
    ]
    values = learner(model_dir, hinted(teacher)).step(TrainBatch(1, drawn)).values
    assert values["loss/mean"] == pytest.approx(-sum(gaps) / len(gaps), abs=1e-5)
    assert values["ref_kl/all/mean"] == pytest.approx(
        sum(math.exp(gap) - gap - 1 for gap in gaps) / len(gaps), abs=1e-5
    )
    assert max(map(abs, gaps)) > 0.01
    beside = hinted(teacher, type="reinforce", ref_kl_tau=0.5, adv_tau=0.0)
    values = learner(model_dir, beside).step(TrainBatch(1, drawn)).values
    assert values["loss/mean"] == pytest.approx(-0.5 * sum(gaps) / len(gaps), abs=1e-5)


def test_a_policy_without_a_hint_has_nothing_to_learn_from_itself(model_dir: Path) -> None:
    row = sample(random.Random(5), drawn=6)
    drawn = replace(row, logprobs=[0.0] * 4 + learner(model_dir).packed_logprobs([row]))
    values = learner(model_dir, hinted()).step(TrainBatch(1, [drawn])).values
    assert values["loss/mean"] == pytest.approx(0.0, abs=1e-5)
    assert values["optim/grad_norm"] == pytest.approx(0.0, abs=1e-4)


def test_a_policy_that_teaches_itself_has_no_gradient_through_what_it_teaches(
    model_dir: Path,
) -> None:
    """The step is that of a frozen copy of it as the teacher."""
    rows = [replace(sample(random.Random(n)), hint=HINT) for n in range(3)]

    def moved(teacher: Path | None) -> dict[str, torch.Tensor]:
        subject = learner(model_dir, hinted(teacher))
        subject.step(TrainBatch(1, rows))
        moments = subject.saved().moments  # the first one is proportional to the gradient
        return {name: one for name, one in moments.items() if name.endswith(":exp_avg")}

    itself, copied = moved(None), moved(model_dir)
    assert any(float(one.abs().max()) > 1e-6 for one in itself.values())
    for name, moment in itself.items():
        assert torch.allclose(moment, copied[name], atol=1e-8)


def test_a_hint_of_tokens_that_there_are_not_is_left_out_with_its_sample(model_dir: Path) -> None:
    row = replace(sample(random.Random(5)), hint=[1, 10**6])
    values = learner(model_dir, hinted()).step(TrainBatch(1, [row])).values
    assert (values["samples/malformed"], values["tokens"]) == (1, 0)


def test_a_teacher_of_other_tokens_is_refused(model_dir: Path, tmp_path: Path) -> None:
    teacher = teacher_of(tmp_path / "teacher")
    path = teacher / "tokenizer.json"
    tokenizer = json.loads(path.read_bytes())
    vocabulary = tokenizer["model"]["vocab"]
    one, other = sorted(vocabulary)[:2]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(EngineError, match="same tokenizer"):
        learner(model_dir, distilling(teacher))
    path.write_text("{}")
    with pytest.raises(EngineError, match="no vocabulary"):
        learner(model_dir, distilling(teacher))
    with pytest.raises(EngineError, match="is missing"):
        learner(model_dir, distilling(tmp_path / "nowhere"))


def test_a_teacher_with_fewer_rows_than_there_are_tokens_is_refused(
    model_dir: Path, tmp_path: Path
) -> None:
    teacher = teacher_of(tmp_path / "teacher", vocab_size=int(CREATED["vocab_size"]) - 8)
    with pytest.raises(EngineError, match="same tokenizer"):
        learner(model_dir, distilling(teacher))


def test_m2po_reads_a_batch_first_and_bounds_it_as_a_whole(model_dir: Path) -> None:
    rows = {"seq_len": 16, "loss": LossConfig(rejection="second_moment")}
    subject = learner(model_dir, FAST.model_copy(update=rows))
    samples = batch(1).samples
    far = sorted(
        (trained - drawn) ** 2
        for one, row in zip(samples, logprobs(subject, samples), strict=True)
        for trained, drawn, on in zip(row, one.logprobs, one.mask, strict=True)
        if on
    )
    means = [sum(far[: n + 1]) / (n + 1) for n in range(len(far))]
    kept = sum(mean <= M2_THRESHOLD for mean in means)
    assert 0 < kept < len(far)
    values = subject.step(TrainBatch(1, samples)).values
    masked = values["is_masked/mean"] * len(far)
    assert masked >= len(far) - kept
    plain = learner(model_dir, FAST.model_copy(update={"seq_len": 16}))
    assert masked - plain.step(TrainBatch(1, samples)).values["is_masked/mean"] * len(far) <= (
        len(far) - kept
    )


def test_the_random_state_of_torch_is_part_of_a_checkpoint(model_dir: Path, tmp_path: Path) -> None:
    subject = learner(model_dir)
    subject.save(tmp_path / "saved")
    expected = torch.rand(3).tolist()
    subject.load(tmp_path / "saved")
    assert torch.rand(3).tolist() == expected


def test_a_checkpoint_without_moments_resumes_before_the_first_step(
    model_dir: Path, tmp_path: Path
) -> None:
    subject = learner(model_dir)
    subject.save(tmp_path / "saved")
    expected = masters_after_one(subject, tmp_path / "a")
    other = learner(model_dir)
    other.step(batch(1, seed=5))
    other.load(tmp_path / "saved")
    assert masters_after_one(other, tmp_path / "b") == expected


def masters_after_one(subject: Learner, directory: Path) -> dict[str, bytes]:
    subject.step(batch(1))
    return masters(subject, directory)


@pytest.mark.parametrize("name", ["learner.json", "shard-00000-00000.safetensors"])
def test_a_torn_checkpoint_is_refused_and_changes_nothing(
    model_dir: Path, tmp_path: Path, name: str
) -> None:
    subject = learner(model_dir)
    subject.step(batch(1))
    subject.save(tmp_path / "saved")
    subject.step(batch(2))
    before = digests(subject.state())
    torn = tmp_path / "saved" / name
    torn.write_bytes(torn.read_bytes()[:-5])
    with pytest.raises(StorageError, match="earlier checkpoint"):
        subject.load(tmp_path / "saved")
    assert digests(subject.state()) == before
    assert subject.step_done == 2


def test_samples_that_do_not_fit_cost_themselves_only(model_dir: Path) -> None:
    good = batch(1).samples
    ids, mask, logprobs = good[0].token_ids, good[0].mask, good[0].logprobs
    poison = [
        replace(good[0], token_ids=[*ids[:-1], 288]),
        replace(good[0], token_ids=[-1, *ids[1:]]),
        replace(good[0], logprobs=[*logprobs[:-1], math.nan]),
        replace(good[0], logprobs=[*logprobs[:-1], -math.inf]),
        replace(good[0], logprobs=[*logprobs[:-1], 3.0]),
        replace(good[0], logprobs=logprobs[:-1]),
        replace(good[0], mask=mask[:-1]),
        replace(good[0], advantage=math.inf),
        Sample([], [], [], 1.0),
    ]
    long = Sample([1] * 65, [True] * 65, [-1.0] * 65, 1.0)
    clean, attacked = learner(model_dir), learner(model_dir)
    expected = clean.step(TrainBatch(1, good)).values
    values = attacked.step(TrainBatch(1, [*poison, *good, long])).values
    assert values["samples/malformed"] == len(poison)
    assert values["samples/too_long"] == 1
    assert values["loss/mean"] == expected["loss/mean"]
    assert digests(attacked.state()) == digests(clean.state())


def test_a_step_that_is_not_finite_changes_no_weight_and_is_counted(model_dir: Path) -> None:
    subject = learner(model_dir)
    before = digests(subject.state())
    huge = [replace(row, advantage=1e38) for row in batch(1).samples]
    assert subject.step(TrainBatch(1, huge)).values["optim/skipped"] == 1.0
    assert digests(subject.state()) == before
    values = subject.step(batch(2)).values
    assert values["optim/skipped"] == 0.0
    assert digests(subject.state()) != before


def test_an_empty_batch_only_advances_the_schedule(model_dir: Path) -> None:
    config = FAST.model_copy(update={"scheduler": "linear", "min_lr_ratio": 0.0})
    subject = learner(model_dir, config)
    before = digests(subject.state())
    values = subject.step(TrainBatch(4, [])).values
    assert digests(subject.state()) == before
    assert (subject.step_done, values["tokens"]) == (4, 0.0)
    assert values["optim/lr"] == pytest.approx(0.6 * FAST.lr)


def test_trainer_logprobs_are_taken_at_the_sampling_temperature(model_dir: Path) -> None:
    samples = batch(1).samples
    cold, warm = learner(model_dir, temperature=0.5), learner(model_dir, temperature=1.0)
    for subject, temperature in ((cold, 0.5), (warm, 1.0)):
        logits = huggingface.load_model(model_dir)(
            input_ids=torch.tensor([samples[0].token_ids])
        ).logits
        last = (logits[0, -2].float() / temperature).log_softmax(-1)[samples[0].token_ids[-1]]
        assert logprobs(subject, samples[:1])[0][-1] == pytest.approx(
            float(last.detach()), abs=1e-5
        )


def test_each_sample_of_a_row_is_read_at_its_environments_temperature(model_dir: Path) -> None:
    rng = random.Random(3)
    rows = [sample(rng, prompt=3, drawn=drawn) for drawn in (6, 5, 4)]
    named = [replace(one, environment=name) for one, name in zip(rows, ("a", "", "b"), strict=True)]
    own = {"a": terms(0.5), "b": terms(1.5)}
    subject = Learner.build(model_dir, FAST, max_steps=10, seed=0, temperature=0.8, own=own)
    alone = [
        value
        for one, temperature in zip(rows, (0.5, 0.8, 1.5), strict=True)
        for value in learner(model_dir, temperature=temperature).packed_logprobs([one])
    ]
    assert subject.packed_logprobs(named) == pytest.approx(alone, abs=1e-5)


LOSSES = [
    LossConfig(),
    LossConfig(type="gspo", echo_alpha=0.3),
    LossConfig(type="reinforce", importance="sequence", rejection="second_moment"),
]


def test_a_step_of_a_mixture_is_the_mean_over_the_tokens_of_all_its_losses(
    model_dir: Path,
) -> None:
    """Whatever the split into rows: each environment's gradient weighs by its share of the step's tokens."""
    rng = random.Random(4)
    rows = [sample(rng, drawn=5, advantage=(-1.0) ** at) for at in range(9)]
    names = ["a", "b", "c"] * 3
    named = [replace(one, environment=name) for one, name in zip(rows, names, strict=True)]
    heard = [replace(one, mask=[False] * 9, echo=[False] * 4 + [True] * 5) for one in named[1::3]]
    own = {
        name: terms(heat, loss)
        for name, heat, loss in zip("abc", (0.7, 1.0, 1.4), LOSSES, strict=True)
    }

    def moved(samples: list[Sample], seq_len: int = 64) -> dict[str, torch.Tensor]:
        config = FAST.model_copy(update={"max_norm": 1e9, "seq_len": seq_len})
        subject = Learner.build(model_dir, config, max_steps=10, seed=0, temperature=1.0, own=own)
        figures.append(subject.step(TrainBatch(1, samples)).values)
        moments = subject.saved().moments  # the first one is proportional to the gradient
        return {name: one for name, one in moments.items() if name.endswith(":exp_avg")}

    figures: list[dict[str, float]] = []
    parts = [moved([one for one in named if one.environment == name]) for name in "abc"]
    said = moved(heard)
    means = [one["loss/mean"] for one in figures[:3]]
    for seq_len in (64, 18):
        whole = moved([*named, *heard], seq_len)
        assert figures[-1]["tokens"] == 45
        assert figures[-1]["loss/mean"] == pytest.approx(sum(means) / 3, rel=1e-5, abs=1e-6)
        for name, moment in whole.items():
            wanted = sum(one[name] for one in parts) / 3 + said[name]
            assert torch.allclose(moment, wanted, rtol=1e-4, atol=1e-7)
            assert not torch.allclose(moment, said[name], rtol=1e-4, atol=1e-7)


def test_only_the_loss_that_has_a_teacher_compares_with_it(model_dir: Path, tmp_path: Path) -> None:
    taught = distilling(teacher_of(tmp_path / "teacher", hidden_size=48))
    own = {"free": terms(1.0, LossConfig())}
    subject = Learner.build(model_dir, taught, max_steps=10, seed=0, temperature=1.0, own=own)
    row = sample(random.Random(5), drawn=6)
    values = subject.step(TrainBatch(1, [row, replace(row, environment="free")])).values
    alone = learner(model_dir, taught).step(TrainBatch(1, [row])).values
    assert values["ref_kl/all/mean"] == pytest.approx(alone["ref_kl/all/mean"], rel=1e-5)
    assert values["loss/mean"] != pytest.approx(alone["loss/mean"], rel=1e-3)
    only = subject.step(TrainBatch(2, [replace(row, environment="free")])).values
    assert "ref_kl/all/mean" not in only


def test_environments_may_have_teachers_of_their_own_behind_endpoints(model_dir: Path) -> None:
    row = sample(random.Random(5), drawn=6)
    said = replace(row, environment="taught", reference=[-0.5] * len(row.token_ids))
    url = {"url": "http://127.0.0.1:1/v1", "model": "teacher"}
    taught = LossConfig.model_validate(distilling(None).loss.model_dump() | {"endpoint": url})

    def moved(config: TrainingConfig, own: dict[str, SampleTerms], row: Sample) -> dict[str, float]:
        subject = Learner.build(model_dir, config, max_steps=9, seed=0, temperature=1.0, own=own)
        return subject.step(TrainBatch(1, [row])).values

    alone = moved(FAST.model_copy(update={"loss": taught}), {}, said)
    beside = moved(FAST, {"taught": terms(1.0, taught)}, said)
    for name in ("loss/mean", "ref_kl/all/mean", "optim/grad_norm"):
        assert beside[name] == pytest.approx(alone[name], rel=1e-5)
    assert "ref_kl/all/mean" not in moved(FAST, {"taught": terms(1.0, taught)}, row)


def test_warm_up_leaves_no_moment_behind(model_dir: Path, tmp_path: Path) -> None:
    subject = learner(model_dir)
    subject.step(batch(1))
    examples = [([1, 2, 3], [3, 2, 1, 258])] * 4
    losses = [subject.supervised_step(examples, 1e-2) for _ in range(5)]
    assert losses[-1] < losses[0]
    subject.end_supervised()
    subject.save(tmp_path / "saved")
    assert not [name for name in contents(tmp_path / "saved") if "exp_avg" in name]


async def test_a_backend_before_start_and_after_close_says_so(model_dir: Path) -> None:
    backend = LocalBackend(FAST, max_steps=3, seed=0)
    with pytest.raises(EngineError, match="start"):
        await backend.state()
    await backend.start(model_dir)
    await backend.close()
    await backend.close()
    with pytest.raises(EngineError, match="start"):
        await backend.step(batch(1))


async def test_a_directory_without_a_model_is_an_engine_error(tmp_path: Path) -> None:
    backend = LocalBackend(FAST, max_steps=3, seed=0)
    with pytest.raises(EngineError):
        await backend.start(tmp_path)
    await backend.close()


@pytest.mark.parametrize("changes", [{}, {"activation_checkpointing": "full"}])
@pytest.mark.usefixtures("small_heap")
def test_the_weights_of_a_closed_learner_go_with_it(
    model_dir: Path, changes: dict[str, str]
) -> None:
    config = FAST.model_copy(update=changes)
    learner = Learner.build(model_dir, config, max_steps=2, seed=0, temperature=1.0)
    learner.step(batch(1))
    weights = [weakref.ref(one) for one in learner.saved().weights.values()]
    gc.collect()
    gc.disable()  # the counts alone have to do it
    try:
        learner.close()
        del learner
        alive = sum(one() is not None for one in weights)
    finally:
        gc.enable()
    assert alive == 0
