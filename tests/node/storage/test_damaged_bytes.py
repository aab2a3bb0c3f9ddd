"""The readers of every file that nodes keep, given damaged bytes: what was written, nothing, or one line."""

import asyncio
import json
import shutil
from collections.abc import Callable, Coroutine
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.counting_backend import CountingBackend
from support.damages import damage, damages
from support.kept_cases import row
from support.swarm import make_model

from primerl.crypto.hashing import digest
from primerl.crypto.keys import KeyFileError, SecretKey
from primerl.node.app import retirement
from primerl.node.app.daemon import load_key
from primerl.node.config import loader
from primerl.node.config.limits import LimitsConfig
from primerl.node.environments import allowed
from primerl.node.errors import NodeError
from primerl.node.evaluation.candidates import run_config
from primerl.node.evaluation.online import Evaluated, EvaluationLog
from primerl.node.evaluation.statistics import Estimate, EvalFigures
from primerl.node.models.json_files import read_json
from primerl.node.models.model_files import view_state
from primerl.node.ops import control
from primerl.node.ops.limits import HomeLimits
from primerl.node.ops.metrics import MetricsLog
from primerl.node.storage import run_files
from primerl.node.storage.chunk_store import FileStore
from primerl.node.storage.judge_answers import JudgeAnswers
from primerl.node.storage.ledger import Ledger, LedgerView
from primerl.node.storage.rollouts import RolloutFiles, StepRecord
from primerl.node.training.checkpoint import Checkpoints
from primerl.node.training.resume_points import ResumePoints
from primerl.node.weights.checkpoint import read_checkpoint as read_state
from primerl.node.weights.state import digests
from primerl.protocol.retirement import retire

FLIPS = 60


@dataclass(frozen=True)
class Kept:
    """A kept file: written by `write` in an empty directory, and read there."""

    name: str
    path: str
    write: Callable[[Path, int], Coroutine[Any, Any, None] | None]
    """Of a run of that number."""
    read: Callable[[Path], Any]
    checked: bool = True
    """Whether what is read is what was written, or nothing: a changed byte never counts."""


def write_ledger(directory: Path, run: int) -> None:
    with closing(Ledger(directory / "ledger.db", fsync=False)) as ledger:
        for _ in range(run + 1):
            ledger.count_boot()
        for number in range(1, 4):
            body = bytes([run, number]) * 40
            ledger.receive(digest(body), number, bytes(32), body, 7)
            ledger.add_verdict(bytes(32), b"on %d" % number, number, {bytes(32): b"{}"})


def read_ledger(directory: Path) -> object:
    with closing(Ledger(directory / "ledger.db", fsync=False)) as ledger:
        bodies = [one.sealed for one in ledger.arrived_after(0)]
        return (bodies, ledger.reputations(), ledger.boots()) if bodies else None


def view_ledger(directory: Path) -> object:
    with closing(LedgerView(directory / "ledger.db")) as view:
        return view.heads(), list(view.verdicts())


async def write_checkpoint(directory: Path, run: int) -> None:
    backend = CountingBackend(seed=run)
    await backend.start(directory)
    checkpoints = Checkpoints(directory, keep_last=1, fsync=False)
    await checkpoints.write(1, {"cursor": b"run %d" % run, "buffer": b"b"}, backend)


def read_checkpoint(directory: Path) -> object:
    return asyncio.run(Checkpoints(directory, keep_last=1).read(1))


async def write_point(directory: Path, run: int) -> None:
    points = ResumePoints(directory, fsync=False)
    points.begin(1, {"cursor": b"run %d" % run, "buffer": b"b"})
    await points.finish()


def write_metrics(directory: Path, run: int) -> None:
    with closing(MetricsLog(directory / "metrics.jsonl")) as log:
        for step in range(1, 4):
            log.write(step, {"loss/mean": run + step / 7})


def read_metrics(directory: Path) -> None:
    with closing(MetricsLog(directory / "metrics.jsonl")) as log:
        log.go_back(3, {"loss/mean": 1.0})
        log.curves.curves()
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] <= 3 for line in lines]


def write_rollouts(directory: Path, run: int) -> None:
    RolloutFiles(directory, fsync=False).write(
        StepRecord(1, groups=1, kept=1), [row(1, reward=run)]
    )


def read_limits(directory: Path) -> object:
    limits = HomeLimits(LimitsConfig(), directory, 0.0)
    limits.open(0.0)
    return None


def write_limits(directory: Path, run: int) -> None:
    limits = HomeLimits(LimitsConfig(), directory, 0.0, fsync=False)
    limits.pause(0.0, run + 9.0)


def write_answers(directory: Path, run: int) -> None:
    with closing(JudgeAnswers(directory / "judge.db")) as answers:
        for number in range(4):
            answers.add(bytes([number]) * 32, "model", "question", f"answer {run}", cut=False)


def read_answers(directory: Path) -> object:
    with closing(JudgeAnswers(directory / "judge.db")) as answers:
        return [answers.get(bytes([number]) * 32) for number in range(4)]


def write_chunk(directory: Path, run: int) -> None:
    FileStore(directory, max_bytes=1 << 20, fsync=False).put(b"weights" * 40)
    if run:
        (directory / CHUNK).write_bytes(b"others" * 40)


def write_key(directory: Path, run: int) -> None:
    SecretKey.from_seed(bytes([run]) * 32).save(directory / "key.pem")


def write_retirement(directory: Path, run: int) -> None:
    retirement.keep(directory, retire(SecretKey.from_seed(bytes([run]) * 32), 7))


def write_text(name: str, text: str) -> Callable[[Path, int], None]:
    """A file of text, in which RUN is the number of the run."""
    return lambda directory, run: run_files.write(directory / name, text.replace("RUN", str(run)))


def write_evaluations(directory: Path, run: int) -> None:
    log = EvaluationLog(directory / "evaluations.jsonl")
    for version in range(3):
        log.add(Evaluated(version, run + 0.5, {"counting": FIGURES}))


def read_evaluations(directory: Path) -> None:
    log = EvaluationLog(directory / "evaluations.jsonl")
    log.open(3)
    log.latest()


def write_entry(directory: Path, run: int) -> None:
    control.register(directory / "data", "trainer", f"run {run}", where=directory).rename(
        directory / ENTRY
    )


def make(directory: Path, run: int) -> None:
    make_model(directory)


FIGURES = EvalFigures(
    prompts=1,
    samples=1,
    success=1.0,
    avg=Estimate(0.5, None, None, "none"),
    passes={},
    reward=0.5,
    truncated=0.0,
    failed=0.0,
    reasons={},
    metrics={},
    prompt_tokens=2,
    completion_tokens=3,
    completion_mean=3.0,
)
ENTRY = "7-01234567.json"
NAME = digest(b"weights" * 40)
CHUNK = f"{NAME.hex()[:2]}/{NAME.hex()[2:4]}/{NAME.hex()}"
ALLOWED = '{"reverse-text": "RUN"}'
JOIN = 'ticket = "run RUN"\n[engine]\ntype = "hf"\n'

KEPT = (
    Kept("ledger", "ledger.db", write_ledger, read_ledger),
    Kept("ledger, by explain", "ledger.db", write_ledger, view_ledger, checked=False),
    *(
        Kept(f"checkpoint, {part}", f"step_1/{part}", write_checkpoint, read_checkpoint)
        for part in ("COMPLETE", "parts/cursor", "backend/counting.json")
    ),
    Kept(
        "resume point",
        "step_1.resume",
        write_point,
        lambda place: ResumePoints(place).newest_first(0) or None,
    ),
    Kept("chunk", CHUNK, write_chunk, lambda place: FileStore(place, max_bytes=1 << 20).get(NAME)),
    Kept("metrics", "metrics.jsonl", write_metrics, read_metrics, checked=False),
    Kept(
        "rollouts", "step_000001.parquet", write_rollouts, lambda place: RolloutFiles(place).read(1)
    ),
    Kept("limits", "limits.json", write_limits, read_limits, checked=False),
    Kept("answers of judges", "judge.db", write_answers, read_answers, checked=False),
    Kept("key", "key.pem", write_key, lambda place: load_key(place), checked=False),
    Kept(
        "retirement", "key.retired", write_retirement, lambda p: retirement.read(p / "key.retired")
    ),
    Kept(
        "allowed environments",
        allowed.REMEMBERED,
        write_text(allowed.REMEMBERED, ALLOWED),
        allowed.remembered,
        checked=False,
    ),
    Kept(
        "settings of a worker",
        "join.toml",
        write_text("join.toml", JOIN),
        lambda place: loader.read_file(place / "join.toml"),
        checked=False,
    ),
    Kept(
        "config of a run",
        "config.json",
        write_text("config.json", '{"name": "r", "seed": RUN, "model": {"name": "m"}}'),
        lambda place: (run_files.is_run(place), run_config(place / "..")),
        checked=False,
    ),
    Kept(
        "mark", run_files.MARK, lambda place, _: run_files.claim(place), run_files.begun_on, False
    ),
    Kept("evaluations", "evaluations.jsonl", write_evaluations, read_evaluations, checked=False),
    Kept("entry", ENTRY, write_entry, lambda place: control.running(where=place), checked=False),
    Kept("a model's config", "config.json", make, lambda p: read_json(p / "config.json"), False),
    Kept(
        "a model's weights",
        "model.safetensors",
        make,
        lambda p: digests(view_state(p)),
        checked=False,
    ),
    Kept(
        "weights",
        "model.safetensors",
        make,
        lambda p: digests(read_state(p / "model.safetensors")),
        False,
    ),
)


def written(directory: Path, kept: Kept, run: int) -> bytes:
    """The bytes of the file, of that run, in a new directory."""
    directory.mkdir()
    if (begun := kept.write(directory, run)) is not None:
        asyncio.run(begun)
    return (directory / kept.path).read_bytes()


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: kept.name.replace(" ", "-"))
def test_damaged_bytes_are_read_as_what_was_written_as_nothing_or_as_one_line(
    kept: Kept, tmp_path: Path
) -> None:
    whole, place = tmp_path / "whole", tmp_path / "damaged"
    data, other = written(whole, kept, 0), written(tmp_path / "other", kept, 1)
    expected = kept.read(whole)
    outcomes: set[str] = set()
    written(place, kept, 0)
    for way, damaged in damages(data, other, kept.name, FLIPS):
        shutil.rmtree(place)
        shutil.copytree(whole, place)
        damage(place / kept.path, way, damaged)
        outcome = outcome_of(kept, place, expected)
        assert outcome != "other" or not kept.checked or way == "another's", way
        outcomes.add(outcome)
    assert outcomes <= {"same", "nothing", "other", "line"}
    assert outcomes & {"line", "nothing"} or not kept.checked


def outcome_of(kept: Kept, place: Path, expected: object) -> str:
    """What reading gives: the `same` as before, `nothing`, something `other`, or an error of one `line`."""
    try:
        found = kept.read(place)
    except (NodeError, KeyFileError) as error:
        return "line" if str(error) and "\n" not in str(error) else f"no line: {error}"
    if found == expected:
        return "same"
    return "other" if found else "nothing"
