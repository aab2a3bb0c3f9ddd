"""The bench of calibrations from end to end, on a tiny model with sharp weights, float32, in this process."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch
from support.engine_cases import make_qwen3
from support.noise_cases import noise, rollout

from primerl.crypto.hashing import digest
from primerl.node.config.run import RunConfig
from primerl.node.environments.environment import Branch, Episode, Policy, Score, Split, Task
from primerl.node.errors import EngineError, UsageError
from primerl.node.inference.engine import Completion
from primerl.node.verification.auditor import AuditItem, Measured, Unreadable, audit_terms
from primerl.node.verification.bounds import at_least, bands, proof_contract
from primerl.node.verification.prefill_audit import PrefillAudit
from primerl.node.weights.state import State, Tensor
from primerl.protocol.manifests import RunManifest
from primerl.protocol.rollouts import MEASURES
from primerl.scripts.bench.calibrate import (
    CalibrationReport,
    CalibrationRequest,
    Calibrator,
    batch_sizes,
    d_prime,
    entropy_share,
    goals,
    quantiles,
)
from primerl.scripts.bench.calibrate_cheats import (
    batches_caught,
    int4,
    int8,
    most_suspects,
    nudged,
    separate,
)

pytestmark = pytest.mark.slow  # no run needs it
Answer = Measured | Unreadable
TOKENS = 24
WANTED = CalibrationRequest(rollouts=48, cheats=16)


class Letters:
    """Prompts of letters, of three lengths; whatever comes is an answer."""

    name = "letters"
    status = ""
    judge_fault = ""
    stops = None

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def task(self, index: int, split: Split = "train") -> Task:
        return Task(index, digest(f"{split} {index}".encode()), split)

    async def prompt(self, task: Task) -> list[int]:
        letters = blake2b(task.digest, digest_size=4 + 6 * (task.index % 3)).digest()
        return [97 + byte % 26 for byte in letters]

    async def demonstration(self, task: Task) -> None: ...

    async def run(self, task: Task, policy: Policy) -> Episode:
        prompt = await self.prompt(task)
        said = await policy(prompt, 0)
        return Episode([self._branch(prompt, said)], Score(0.0))

    async def score(self, task: Task, branches: Sequence[Branch]) -> Score:
        return Score(0.0, turns=((0,),))

    def _branch(self, prompt: list[int], said: Completion) -> Branch:
        count = len(said.token_ids)
        mask = [False] * len(prompt) + [True] * count
        logprobs = [0.0] * len(prompt) + said.logprobs
        return Branch.of_turns([*prompt, *said.token_ids], mask, logprobs, [said])


class HereAuditor:
    """The auditor's core without its process; what it found can be changed by `bend`."""

    loading_s = 0.0

    def __init__(self, bend: Callable[[list[Answer]], list[Answer]] = list) -> None:
        self._bend = bend
        self.items: list[AuditItem] = []

    async def start(self, model_dir: Path, run: RunManifest) -> None:
        self._prefill = PrefillAudit(audit_terms(model_dir, run, "cpu"))

    async def audit(
        self,
        items: Sequence[AuditItem],
        states: Mapping[int, State],
    ) -> list[Answer]:
        self.items += items
        return self._bend(self._prefill.measure(items, states))

    async def close(self) -> None: ...


def blind(found: list[Answer]) -> list[Answer]:
    """Nothing is measured, whatever there was to see."""
    return [Measured(0, 0, 64, 0, 0, 0, 0, 0, 0) for _ in found]


def lost(found: list[Answer]) -> list[Answer]:
    """One proof cannot be read."""
    return [*found[:-1], Unreadable("out of memory", proof=False)]


def config(top_p: float = 1.0, **verification: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "engine": {"device": "cpu", "max_batch": 64, "max_model_len": 64},
            "sampling": {"max_tokens": TOKENS, "top_p": top_p},
            "rollouts": {"group_size": 4},
            "seed": 3,
            "training": {"lr": 1e-4},
            "verification": verification,
        }
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("model")
    return directory, make_qwen3(directory, 1)


Calibrate = Callable[..., CalibrationReport]


@pytest.fixture(scope="module")
def calibrate(model: tuple[Path, State]) -> Calibrate:
    def run(
        wanted: CalibrationRequest = WANTED,
        auditor: HereAuditor | None = None,
        state: State | None = None,
        top_p: float = 1.0,
    ) -> CalibrationReport:
        return asyncio.run(
            Calibrator(
                config(top_p),
                model[0],
                state or model[1],
                [Letters()],
                auditor or HereAuditor(),
                wanted,
                say=lambda line: None,
            ).run()
        )

    return run


@pytest.fixture(scope="module")
def report(calibrate: Calibrate) -> CalibrationReport:
    return calibrate(wanted=replace(WANTED, cross_dtype=True))


def test_honest_rollouts_of_every_batch_size_are_measured(report: CalibrationReport) -> None:
    assert report.rollouts == 48
    assert [noise.engine for noise in report.noise] == ["hf"]
    assert report.tokens == report.noise[0].tokens > 48
    assert set(report.noise[0].quantiles) == set(MEASURES)
    assert 0 < report.noise[0].quantiles["logprob"][-1] < 1e-4  # float32: not equal, but nearly
    assert (report.false_positives.rollouts, report.false_positives.rejected) == (48, 0)


def test_other_models_and_other_draws_are_outside_of_the_bounds(report: CalibrationReport) -> None:
    found = {one.name: one for one in report.separation}
    for name in ("int8 weights", "int4 weights", "foreign text", "one token edited"):
        assert found[name].required
        assert found[name].separates
        assert found[name].rejected >= 0.8 * found[name].rollouts > 0
    assert not found["next version"].required
    assert not found["computed in bfloat16"].required
    assert found["computed in bfloat16"].rejected > 0
    assert report.inseparable == []
    assert all(goal["ok"] for goal in goals(report))


def test_fingerprints_of_other_weights_stand_apart(report: CalibrationReport) -> None:
    assert report.d_prime["int4 weights"] > 3


def test_under_top_p_honest_rollouts_and_cheats_state_supports(calibrate: Calibrate) -> None:
    auditor = HereAuditor()
    found = calibrate(auditor=auditor, top_p=0.8)
    assert all(one.support for one in auditor.items)
    assert found.noise[0].quantiles["sampling_max"][-1] < 1e-3
    assert found.noise[0].quantiles["logprob"][-1] < 1e-4
    separation = {one.name: one for one in found.separation}
    for name in ("int4 weights", "foreign text", "one token edited"):
        assert separation[name].separates


def test_equal_seeds_measure_the_same(calibrate: Calibrate, report: CalibrationReport) -> None:
    again = calibrate()
    # batches form by the clock, and with them the last bits: what is drawn does not hang on it
    assert (again.tokens, again.entropy) == (report.tokens, pytest.approx(report.entropy, rel=1e-4))


def test_what_cannot_tell_cheats_from_honest_workers_is_refused(calibrate: Calibrate) -> None:
    found = calibrate(auditor=HereAuditor(blind))
    assert {"int8 weights", "foreign text", "one token edited"} <= set(found.inseparable)
    missed = {goal["name"] for goal in goals(found) if not goal["ok"]}
    assert "int8 weights: caught in 16" in missed


def test_an_honest_rollout_that_cannot_be_audited_ends_the_calibration(
    calibrate: Calibrate,
) -> None:
    with pytest.raises(EngineError, match="out of memory"):
        calibrate(auditor=HereAuditor(lost))


def flat(state: State) -> State:
    return {
        name: replace(tensor, data=tensor.data * 0) if len(tensor.shape) == 2 else tensor
        for name, tensor in state.items()
    }


def test_a_model_that_knows_nothing_is_refused(
    calibrate: Calibrate, model: tuple[Path, State]
) -> None:
    with pytest.raises(UsageError, match=r"draws almost evenly .*train it first"):
        calibrate(state=flat(model[1]))


def test_rollouts_are_made_alone_and_in_company() -> None:
    assert batch_sizes(512, 256) == [(64, 1), (192, 8), (256, 256)]
    assert batch_sizes(16, 4) == [(2, 1), (14, 4)]
    assert [count for count, _ in batch_sizes(1, 256)] == [1]


def test_entropy_is_that_of_an_even_distribution() -> None:
    assert entropy_share([], 272) == 0.0


# -- figures ----------------------------------------------------------------------------------------

CONTRACT = proof_contract(RunConfig())


def test_quantiles_ascend_to_the_largest() -> None:
    honest = noise(300, 5)
    for name, row in quantiles(honest).items():
        assert row == sorted(row)
        assert row[-1] == max(getattr(one, name) for one in honest)


def test_d_prime_is_in_standard_deviations() -> None:
    chance = np.random.default_rng(6)
    ours = [rollout(0, fingerprint=float(v)) for v in chance.normal(1.0, 0.1, 4_000)]
    theirs = [rollout(0, fingerprint=float(v)) for v in chance.normal(1.5, 0.1, 4_000)]
    assert d_prime(ours, theirs) == pytest.approx(5.0, rel=0.1)


def test_a_cheat_separates_by_rejections_or_by_many_suspects_and_not_within_the_band() -> None:
    bound = bands(noise(1_000, 7))
    contract = bound.contract(CONTRACT)
    far = [rollout(n, fingerprint=10 * bound.reject.fingerprint) for n in range(32)]
    found = separate("far", far, contract)
    assert (found.rejected, found.suspected, found.batches) == (32, 32, 1.0)
    between = (bound.suspect.fingerprint + bound.reject.fingerprint) / 2
    odd = separate("between", [rollout(n, fingerprint=between) for n in range(32)], contract)
    assert (odd.rejected, odd.separates) == (0, True)
    inside = separate("inside", noise(64, 8), contract)
    assert (inside.separates, inside.batches < 0.2) == (False, True)


def test_batches_are_caught_as_often_as_arithmetic_says() -> None:
    assert batches_caught(10, 1, 1) == pytest.approx(1 - 0.9**16)
    assert batches_caught(10, 0, 10) == pytest.approx(1.0)
    assert batches_caught(0, 0, 0) == batches_caught(10, 0, 0) == 0.0


def test_a_few_suspects_in_a_batch_are_coincidence() -> None:
    limit = most_suspects(16)
    assert at_least(limit + 1, 16, 0.01) <= 1e-5 < at_least(limit, 16, 0.01)
    assert limit == 4


def bf16(values: np.ndarray) -> Tensor:
    bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return Tensor("BF16", values.shape, bits.reshape(-1))


def floats(tensor: Tensor) -> np.ndarray:
    return (tensor.data.astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)


def matrices(seed: int) -> dict[str, Tensor]:
    drawn = np.random.default_rng(seed).normal(0, 0.02, (64, 256))
    return {
        "model.layers.0.mlp.up_proj.weight": bf16(drawn),
        "model.embed_tokens.weight": bf16(drawn),
        "model.norm.weight": bf16(np.ones(256)),
    }


def test_quantised_weights_have_few_levels_and_leave_the_embedding_alone() -> None:
    state = matrices(1)
    name = "model.layers.0.mlp.up_proj.weight"
    for made, levels, error in ((int8(state), 255, 0.01), (int4(state), 2 * 15, 0.2)):
        assert made["model.embed_tokens.weight"] is state["model.embed_tokens.weight"]
        assert made["model.norm.weight"] is state["model.norm.weight"]
        assert len(np.unique(floats(made[name])[0])) <= levels
        apart = floats(made[name]) - floats(state[name])
        relative = np.sqrt((apart**2).mean() / (floats(state[name]) ** 2).mean())
        assert error / 4 < relative < error


def test_a_nudged_state_moves_by_the_step_on_average() -> None:
    state = matrices(2)
    name = "model.layers.0.mlp.up_proj.weight"
    for step in (1e-6, 1e-4):
        moved = np.abs(floats(nudged(state, step, 3)[name]) - floats(state[name]))
        assert moved.mean() == pytest.approx(step, rel=0.2)
    assert (moved > 0).mean() > 0.3
    small = floats(nudged(state, 1e-7, 3)[name]) != floats(state[name])
    assert 0 < small.mean() < 0.05  # most weights of a bf16 policy do not change in a step
    again = nudged(state, 1e-4, 3)[name]
    assert json.dumps(again.data.tolist()) == json.dumps(nudged(state, 1e-4, 3)[name].data.tolist())
