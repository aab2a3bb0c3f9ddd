"""compose.yaml says what this program understands, and hands workers no key; no image is built here."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.repository import ROOT

from primerl.cli.main import execute
from primerl.crypto.keys import SecretKey
from primerl.protocol import tickets
from primerl.protocol.manifests import Ticket

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


@pytest.mark.parametrize("name", ["trainer", "worker_1", "worker_2"])
def test_the_command_of_a_service_is_one_of_ours(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word) for word in SERVICES[name]["command"]]
    key = SecretKey.generate()
    ticket = tickets.issue(key, Ticket(bytes(32), key.node_id, ("127.0.0.1:9",), (), 1, 2**40))
    command = [ticket if word.endswith("/ticket.txt") else word for word in command]
    assert execute([*command, "--dry-run"]) == 0, capsys.readouterr().err


def test_workers_see_the_ticket_and_no_key() -> None:
    """They share the directory of the run with the trainer, and not its data directory, with the key."""
    trainer = SERVICES["trainer"]
    directory = {
        option: trainer["command"][trainer["command"].index(option) + 1]
        for option in ("--output-dir", "--data-dir", "--name")
    }
    assert f"shared:{directory['--output-dir']}" in trainer["volumes"]
    assert not directory["--data-dir"].startswith(directory["--output-dir"])
    for name in ("worker_1", "worker_2"):
        worker = SERVICES[name]
        ticket = worker["command"][worker["command"].index("--ticket") + 1]
        assert ticket == f"{directory['--output-dir']}/{directory['--name']}/ticket.txt"
        assert worker["volumes"] == [f"{name}:/data", f"shared:{directory['--output-dir']}:ro"]


def test_workers_find_a_trainer_by_its_name_when_its_container_has_another_address() -> None:
    command = SERVICES["trainer"]["command"]
    port = command[command.index("--network.port") + 1]
    assert command[command.index("--network.advertise") + 1] == f'["trainer:{port}"]'


def test_every_folder_of_the_package_is_in_the_image_and_tests_are_not() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not {"cli", "configs", "crypto", "node", "protocol", "pyproject.toml"} & set(ignored)
    assert {".*", "tests", "outputs"} <= set(ignored)
