"""A worker whose environment attacks: it costs that rollout, and the others of the same worker are accepted."""

import os
import socket
import sys
from pathlib import Path

import pytest
from support import fake_environment_process as fake
from support.swarm import Swarm

from primerl.node.config.run import EnvironmentConfig
from primerl.node.config.sandbox import SandboxConfig, SandboxType, WorkerSandboxConfig
from primerl.node.environments.hosted import HostedEnvironment
from primerl.node.environments.sandbox import Sandbox, choose
from primerl.node.errors import UsageError

ATTACKS = "exits dies hangs allocates bombs connects steals writes opens-memory".split()
MOODS = " ".join(f"good {attack}" for attack in ATTACKS)


class Hostile(HostedEnvironment):
    """Task i is scored as word i of `moods` says."""

    def __init__(self, moods: str, sandbox: Sandbox) -> None:
        super().__init__(
            EnvironmentConfig(id="moody", args={"moods": moods}, timeout_s=2.0),
            model_dir=Path(),
            seed=0,
            max_tokens=4,
            temperature=1.0,
            sandbox=sandbox,
            program=(sys.executable, fake.__file__),
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["limits", "landlock", "bubblewrap"])
async def test_an_attack_costs_its_rollout_and_the_workers_others_are_accepted(
    kind: SandboxType, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "w1" / "key"
    try:
        sandbox = choose(WorkerSandboxConfig(type=kind), [key.parent])
    except UsageError as error:
        pytest.skip(str(error))
    key.parent.mkdir()
    key.write_text("secret")
    monkeypatch.setenv("HOSTILE_FILE", str(key))
    monkeypatch.setenv("HOSTILE_NODE", str(os.getpid()))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        monkeypatch.setenv("HOSTILE_PORT", str(server.getsockname()[1]))
        async with Swarm(tmp_path, model_dir, max_steps=5) as swarm:
            played = Hostile(MOODS, sandbox)
            swarm.environments["w1"] = {"reverse-text": played}
            scored = Hostile("good", Sandbox(SandboxConfig()))
            swarm.environments["trainer"] = {"reverse-text": scored}
            await swarm.start_trainer()
            worker = swarm.add_worker("w1")
            summary = await swarm.finished()
            rows = swarm.metrics()
            await worker.ended()
        with pytest.raises(TimeoutError):
            server.accept()
    accepted = [line["rollouts/accepted"] for line in rows if "rollouts/accepted" in line]
    assert summary["steps"] == 5
    # four groups of four a step; one that was played beside an attack may lose a rollout with the process
    assert accepted[-1] >= 5 * 4 * 3
    assert summary["rejected"].keys() <= {"stale", "environment_error"}
    assert summary["rejected"]["environment_error"] >= 6
    assert played.restarts >= 2
    assert scored.restarts == 0
    assert (key.parent / "planted").exists() == (kind == "limits")  # files are held by one alone
