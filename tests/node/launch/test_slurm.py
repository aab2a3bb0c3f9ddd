"""The SLURM templates, run with small programs in the place of SLURM's and ours that write down their words."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from primerl.node.config.loader import load
from primerl.node.config.run import JoinConfig, RunConfig
from primerl.node.training.rank_group import PROGRAM, command

SLURM = Path(__file__).resolve().parents[3] / "scripts" / "slurm"
NOTE = '#!/bin/bash\nprintf \'%s\\x1f\' "$@" >>"$CALLS.{name}"; printf \'\\n\' >>"$CALLS.{name}"\n'
SRUN = """#!/bin/bash
shift  # --kill-on-bad-exit
export SLURM_PROCID
for ((SLURM_PROCID = 0; SLURM_PROCID < SLURM_JOB_NUM_NODES; SLURM_PROCID++)); do "$@" || exit; done
"""


class Cluster:
    """A directory with the programs that the templates call."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._calls = directory / "calls"
        (directory / ".venv" / "bin").mkdir(parents=True)
        self.program(".venv/bin/primerl-node", NOTE.format(name="node"))
        self.program(".venv/bin/python", NOTE.format(name="python"))
        self.program("scontrol", "#!/bin/bash\n[[ $3 == 'n[1-3]' ]] && printf 'n%d\\n' 1 2 3\n")
        self.program("srun", SRUN)

    def program(self, name: str, text: str) -> None:
        path = self._directory / name
        path.write_text(text)
        path.chmod(0o755)

    def run(
        self, script: str, *arguments: str, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{self._directory}:{os.environ['PATH']}",
            "CALLS": str(self._calls),
            "PAUSE": "0.05",
            **variables,
        }
        return subprocess.run(
            ["bash", str(SLURM / script), *arguments],
            capture_output=True,
            text=True,
            cwd=self._directory,
            env=environment,
            check=False,
            timeout=280,
        )

    def calls(self, name: str) -> list[list[str]]:
        path = self._calls.with_suffix(f".{name}")
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.split("\x1f")[:-1] for line in lines]


THREE = {
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_JOB_ID": "712345",
}


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_a_trainer_of_three_nodes_is_one_run_and_two_helpers(
    cluster: Cluster, tmp_path: Path
) -> None:
    done = cluster.run("trainer.sbatch", "demo", "big one", "--seed", "3", **THREE)
    assert (done.returncode, done.stderr) == (0, "")
    [train] = cluster.calls("node")
    assert train[0] == "train"
    config = load(RunConfig, train[1:], {})
    assert (config.name, config.output_dir, config.seed) == ("big one", tmp_path / "outputs", 3)
    assert (config.training.backend, config.resume) == ("fsdp", None)
    assert config.training.fsdp.rendezvous == "n1:22345"
    helpers = cluster.calls("python")
    asked = command(config.training, config.training.fsdp.ranks, PROGRAM)[1:]
    assert helpers == [
        [number if word == "NODE" else word for word in asked] for number in ("1", "2")
    ]


def test_a_job_that_is_requeued_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "r" / "checkpoints" / "step_4").mkdir(parents=True)
    cluster.run("trainer.sbatch", "demo", "r", OUTPUT_DIR=str(tmp_path / "elsewhere"), **THREE)
    [train] = cluster.calls("node")
    assert load(RunConfig, train[1:], {}).goes_on


def test_helpers_come_again_after_a_failure(cluster: Cluster) -> None:
    fails_twice = '[[ $(wc -l <"$CALLS.python") -ge 3 ]]\n'
    cluster.program(".venv/bin/python", NOTE.format(name="python") + fails_twice)
    two = THREE | {"SLURM_JOB_NUM_NODES": "2"}
    assert cluster.run("trainer.sbatch", "demo", "r", **two).returncode == 0
    assert len(cluster.calls("python")) == 3


def test_a_trainer_that_fails_ends_the_job(cluster: Cluster) -> None:
    cluster.program(".venv/bin/primerl-node", "#!/bin/bash\nexit 8\n")
    assert cluster.run("trainer.sbatch", "demo", "r", **THREE).returncode == 8
    assert cluster.calls("python") == []


def test_a_worker_joins_with_a_key_of_its_own(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "ticket.txt").write_text("T")
    flags = ("--engine.tp", "2")
    done = cluster.run("workers.sbatch", "ticket.txt", *flags, SLURM_ARRAY_TASK_ID="5")
    assert (done.returncode, done.stderr) == (0, "")
    [join] = cluster.calls("node")
    assert join[0] == "join"
    config = load(JoinConfig, join[1:], {})
    assert (config.ticket, config.data_dir) == ("ticket.txt", tmp_path / "workers" / "5")
    assert (config.engine.type, config.engine.tp) == ("vllm", 2)


@pytest.mark.parametrize(
    ("script", "arguments"), [("trainer.sbatch", ("demo",)), ("workers.sbatch", ())]
)
def test_what_is_missing_is_told(script: str, arguments: tuple[str, ...], cluster: Cluster) -> None:
    done = cluster.run(script, *arguments, **THREE, SLURM_ARRAY_TASK_ID="0")
    assert done.returncode == 2
    assert "say which" in done.stderr
    assert cluster.calls("node") == []


@pytest.mark.parametrize("script", ["trainer.sbatch", "workers.sbatch"])
def test_what_slurm_reads_stands_before_the_first_command(script: str) -> None:
    """sbatch ignores every #SBATCH line after it."""
    lines = (SLURM / script).read_text().splitlines()
    asked = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    first = next(number for number, line in enumerate(lines) if re.match(r"[^#\s]", line))
    assert len(asked) > 5
    assert max(asked) < first
