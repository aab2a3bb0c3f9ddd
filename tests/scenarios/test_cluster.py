"""The SLURM templates with real nodes: a trainer of two machines, both this one, and a worker by its ticket."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .processes import CONFIG, HERE

pytestmark = [pytest.mark.net, pytest.mark.nightly, pytest.mark.timeout(1200)]

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


def batch(directory: Path, script: str, *arguments: str) -> "subprocess.Popen[bytes]":
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


def test_a_run_of_two_nodes_and_an_array_of_workers(tmp_path: Path) -> None:
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    cpu = ("--training.device", "cpu", "--evaluation.prompts", "0", "--max-steps", "3")
    trainer = batch(tmp_path, "trainer.sbatch", str(CONFIG), "two", *cpu)
    engine = ("--engine.type", "hf", "--engine.dtype", "float32", "--network.host", "127.0.0.1")
    allowed = ("--allow-environment", "early_letters")
    worker = batch(tmp_path, "workers.sbatch", "outputs/two/ticket.txt", *engine, *allowed)
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
