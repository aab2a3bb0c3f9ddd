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
from primerl.node.config.run import EngineConfig, RunConfig
from primerl.node.environments.environment import Branch, Episode, Policy, Score, Split, Task
from primerl.node.inference.engine import Completion
from primerl.node.ops.errors import EngineError, NodeError, UsageError
from primerl.node.verification.auditor import AuditItem, Measured, Unreadable
from primerl.node.verification.calibrator import CalibrationReport, CalibrationRequest, Calibrator
from primerl.node.verification.honest import company, entropy_share, trial_run
from primerl.node.verification.judge import FIELDS, proof_contract, read_calibration
from primerl.node.verification.replay import Replay
from primerl.node.verification.terms import terms
from primerl.node.weights.state import State
from primerl.protocol.manifests import RunManifest, encode

TOKENS = 24
WANTED = CalibrationRequest(rollouts=48, cheats=16)


class Letters:
    """Prompts of letters, of three lengths; whatever comes is an answer."""

    name = "letters"
    status = ""

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
    """The auditor's core without its process."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    async def start(self, model_dir: Path, run: RunManifest) -> None:
        self._replay = Replay(terms(model_dir, run, self._config.device))

    async def audit(
        self,
        items: Sequence[AuditItem],
        states: Mapping[int, State],
        others: Mapping[int, Sequence[int]],
    ) -> list[Measured | Unreadable]:
        return self._replay.measure(items, states, others)

    async def close(self) -> None: ...


class BlindAuditor(HereAuditor):
    """Measures nothing, whatever it is shown."""

    async def audit(
        self,
        items: Sequence[AuditItem],
        states: Mapping[int, State],
        others: Mapping[int, Sequence[int]],
    ) -> list[Measured | Unreadable]:
        return [Measured(len(item.logprobs), 0, 0, 0, 0, 0, 0) for item in items]


class LostAuditor(HereAuditor):
    """Cannot read one proof."""

    async def audit(
        self,
        items: Sequence[AuditItem],
        states: Mapping[int, State],
        others: Mapping[int, Sequence[int]],
    ) -> list[Measured | Unreadable]:
        found = await super().audit(items, states, others)
        return [*found[:-1], Unreadable("out of memory", proof=False)]


def config(**verification: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "engine": {"device": "cpu", "max_batch": 64, "max_model_len": 64},
            "sampling": {"max_tokens": TOKENS},
            "rollouts": {"group_size": 4},
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
        auditor: type[HereAuditor] = HereAuditor,
        state: State | None = None,
    ) -> CalibrationReport:
        return asyncio.run(
            Calibrator(
                config(),
                model[0],
                state or model[1],
                Letters(),
                wanted,
                make_auditor=auditor,
                seed=3,
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
    assert set(report.noise[0].quantiles) == set(FIELDS)
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


def test_equal_seeds_measure_the_same(calibrate: Calibrate, report: CalibrationReport) -> None:
    again = calibrate()
    # batches form by the clock, and with them the last bits: what is drawn does not hang on it
    assert (again.tokens, again.entropy) == (report.tokens, pytest.approx(report.entropy, rel=1e-4))


def test_what_cannot_tell_cheats_from_honest_workers_is_refused(calibrate: Calibrate) -> None:
    found = calibrate(auditor=BlindAuditor)
    assert {"int8 weights", "foreign text", "one token edited"} <= set(found.inseparable)
    with pytest.raises(NodeError, match=r"cannot be told from int8 weights.*nothing was written"):
        found.check()


def test_an_honest_rollout_that_cannot_be_audited_ends_the_calibration(
    calibrate: Calibrate,
) -> None:
    with pytest.raises(EngineError, match="out of memory"):
        calibrate(auditor=LostAuditor)


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


def test_a_calibration_goes_into_the_run_manifest(
    report: CalibrationReport, model: tuple[Path, State], tmp_path: Path
) -> None:
    path = tmp_path / "calibration.json"
    path.write_bytes(msgspec.json.encode(report.calibration("2026-11-21")))
    name = digest((model[0] / "config.json").read_bytes())
    settings = config(calibration=path)
    proofs = proof_contract(settings, name.hex())
    assert (proofs.reject, proofs.suspect) == (report.reject, report.suspect)
    assert (proofs.honest_rollouts, proofs.honest_tokens) == (48, report.tokens)
    assert proofs.source == "hf against hf on cpu, 2026-11-21"
    bare = trial_run(settings, config_file=b"", vocab_size=272, stop_token_ids=(258,))
    manifest = encode(msgspec.structs.replace(bare, proofs=proofs))
    assert msgspec.msgpack.decode(manifest, type=RunManifest).proofs == proofs


@pytest.mark.parametrize(
    ("model_name", "settings"),
    [
        ("00" * 32, {}),
        ("", {"engine": {"dtype": "bfloat16"}}),
    ],
)
def test_a_calibration_of_something_else_is_refused(
    report: CalibrationReport,
    tmp_path: Path,
    model_name: str,
    settings: dict[str, dict[str, object]],
) -> None:
    path = tmp_path / "calibration.json"
    path.write_bytes(msgspec.json.encode(report.calibration("2026-11-21")))
    settings.setdefault("verification", {})["calibration"] = path
    with pytest.raises(UsageError, match=r"another model, fingerprint or engine\.dtype"):
        proof_contract(RunConfig.model_validate(settings), model_name or report.model)


def test_a_calibration_of_a_fingerprint_that_was_removed_is_refused(
    report: CalibrationReport, tmp_path: Path
) -> None:
    path = tmp_path / "calibration.json"
    written = msgspec.json.encode(report.calibration("2026-11-21"))
    path.write_bytes(written.replace(b'"projection"', b'"toploc"'))
    with pytest.raises(UsageError, match="run primerl-node calibrate"):
        read_calibration(path)


def test_a_calibration_reads_back_as_it_was_written(
    report: CalibrationReport, tmp_path: Path
) -> None:
    path = tmp_path / "calibration.json"
    written = report.calibration("2026-11-21")
    path.write_bytes(msgspec.json.format(msgspec.json.encode(written), indent=2))
    assert read_calibration(path) == written
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UsageError, match="run primerl-node calibrate"):
        read_calibration(path)


def test_rollouts_are_made_alone_and_in_company() -> None:
    assert company(512, 256) == [(64, 1), (192, 8), (256, 256)]
    assert company(16, 4) == [(2, 1), (14, 4)]
    assert [count for count, _ in company(1, 256)] == [1]


def test_entropy_is_that_of_an_even_distribution() -> None:
    assert entropy_share([], 272) == 0.0
