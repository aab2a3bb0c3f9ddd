"""What a user gets wrong is refused in one line, with the documented exit code."""

import socket
from pathlib import Path

import pytest
from scenarios.processes import CONFIG, nodes

from primerl.crypto.keys import SecretKey
from primerl.protocol import tickets
from primerl.protocol.manifests import Ticket

pytestmark = [pytest.mark.net, pytest.mark.timeout(600)]


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_a_busy_port_is_named(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken, nodes(tmp_path) as run:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        trainer = run.trainer("--network.port", port)
        assert trainer.wait() == 4, trainer.output()
        assert port in last_line(trainer.output())
        assert "Traceback" not in trainer.output()


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


def test_an_unknown_key_is_named(tmp_path: Path) -> None:
    with nodes(tmp_path) as run:
        wrong = run.start("wrong", "train", "@", str(CONFIG), "--training.learning-rate", "1")
        assert wrong.wait() == 2, wrong.output()
        assert "learning" in last_line(wrong.output())


def test_a_ticket_of_a_past_time_or_another_shape_is_refused(tmp_path: Path) -> None:
    key = SecretKey.generate()
    past = tickets.issue(key, Ticket(bytes(32), key.node_id, ("127.0.0.1:9",), (), 1, 2))
    with nodes(tmp_path) as run:
        for name, ticket in (("late", past), ("broken", past[:-9]), ("nonsense", "hello")):
            worker = run.start(name, "join", "--ticket", ticket, "--data-dir", str(tmp_path / name))
            assert worker.wait() == 3, worker.output()
            assert "Traceback" not in worker.output()
        assert "expired" in last_line(run.programs[0].output())
