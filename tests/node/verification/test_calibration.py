"""A calibration from end to end, on a tiny model with sharp weights, float32, in this process."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import msgspec
import pytest
import torch
from support.engine_cases import make_qwen3

from primerl.crypto.hashing import digest
from primerl.node.config.run import RunConfig
from primerl.node.environments.environment import Branch, Episode, Policy, Score, Split, Task
from primerl.node.errors import EngineError, NodeError, UsageError
from primerl.node.inference.engine import Completion
from primerl.node.verification.auditor import AuditItem, Measured, Unreadable, audit_terms
from primerl.node.verification.bounds import proof_contract, read_calibration
from primerl.node.verification.calibration import (
    CalibrationReport,
    CalibrationRequest,
    Calibrator,
    batch_sizes,
    entropy_share,
    trial_run,
)
from primerl.node.verification.prefill_audit import PrefillAudit
from primerl.node.weights.state import State
from primerl.protocol.manifests import RunManifest, encode
from primerl.protocol.rollouts import MEASURES

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
    report.check()


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
    with pytest.raises(NodeError, match=r"cannot be told from int8 weights.*nothing was written"):
        found.check()


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


@pytest.fixture
def written(report: CalibrationReport, tmp_path: Path) -> Path:
    path = tmp_path / "calibration.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report.calibration("2026-11-21"))))
    return path


def test_a_calibration_goes_into_the_run_manifest(report: CalibrationReport, written: Path) -> None:
    assert read_calibration(written) == report.calibration("2026-11-21")
    settings = config(calibration=written)
    proofs = proof_contract(settings, report.model)
    assert (proofs.reject, proofs.suspect) == (report.reject, report.suspect)
    assert (proofs.honest_rollouts, proofs.honest_tokens) == (48, report.tokens)
    assert proofs.source == "hf against hf on cpu, 2026-11-21"
    bare = trial_run(settings, config_file=b"", vocab_size=272, stop_token_ids=(258,))
    manifest = encode(msgspec.structs.replace(bare, proofs=proofs))
    assert msgspec.msgpack.decode(manifest, type=RunManifest).proofs == proofs


def test_a_calibration_of_something_else_is_refused(
    report: CalibrationReport, written: Path
) -> None:
    settings: dict[str, dict[str, object]] = {"verification": {"calibration": written}}
    other: dict[str, dict[str, object]] = {**settings, "engine": {"dtype": "bfloat16"}}
    for model, wrong in (("00" * 32, settings), (report.model, other)):
        with pytest.raises(UsageError, match=r"another model, fingerprint, engine\.dtype"):
            proof_contract(RunConfig.model_validate(wrong), model)


@pytest.mark.parametrize(
    ("old", "new"), [(b'"projection"', b'"toploc"'), (b"}", b"")], ids=["removed", "cut short"]
)
def test_a_calibration_that_cannot_be_read_is_refused(
    written: Path, old: bytes, new: bytes
) -> None:
    written.write_bytes(written.read_bytes().replace(old, new))
    with pytest.raises(UsageError, match="run primerl-node calibrate"):
        read_calibration(written)


def test_rollouts_are_made_alone_and_in_company() -> None:
    assert batch_sizes(512, 256) == [(64, 1), (192, 8), (256, 256)]
    assert batch_sizes(16, 4) == [(2, 1), (14, 4)]
    assert [count for count, _ in batch_sizes(1, 256)] == [1]


def test_entropy_is_that_of_an_even_distribution() -> None:
    assert entropy_share([], 272) == 0.0
