"""A bundle has what helps, and nothing that is a secret or says where somebody is."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from primerl.node.errors import NetworkError
from primerl.node.reports.bundle import MAX_LOG, Scrubber, collect
from primerl.node.reports.doctor import MachineCheck

TICKET = "primerl2-xyz_ABC-123"
CHECKS = [MachineCheck("disk", "ok", "1 GiB free in /home/ada/.primerl")]


def scrubber() -> Scrubber:
    return Scrubber(home="/home/ada", host="adas-box")


@pytest.mark.parametrize(
    ("text", "scrubbed"),
    [
        (f"join --ticket {TICKET} now", "join --ticket <secret> now"),
        ("the old primerl1-abc", "the old <secret>"),
        ("HF_TOKEN=hf_abcdefghijklmn", "HF_TOKEN=<secret>"),
        ("Authorization: Bearer abc.def", "Authorization: <secret>"),
        ("OPENAI sk-proj-0123456789", "OPENAI <secret>"),
        ("seed https://ada:pw@example.org/c?sig=1", "seed https://<secret>@example.org/c?<secret>"),
        ("from 203.0.113.7:4242, seen", "from <address>:4242, seen"),
        ("[2001:db8::1]:4242 and fe80::1", "[<address>]:4242 and <address>"),
        ("/ip4/198.51.100.2/tcp/1/p2p/12D3", "/ip4/<address>/tcp/1/p2p/12D3"),
        ("/dns4/home.example.org/tcp/1", "/dns/<address>/tcp/1"),
        ("in /home/ada/runs of adas-box", "in ~/runs of <host>"),
        ("/home/bob/x and /Users/eve/y", "/home/<user>/x and /home/<user>/y"),
    ],
)
def test_secrets_addresses_and_names_are_replaced(text: str, scrubbed: str) -> None:
    assert scrubber().text(text) == scrubbed


@pytest.mark.parametrize(
    "text",
    [
        "06:31:10 I primerl.node: step 3 | reward 0.5",
        "vLLM 0.25.1, torch 2.13.0+cpu, wire 7",
        "listening on 127.0.0.1:4000 and [::1]:4000 and 0.0.0.0",
        "peer 1f0c2a" + "0" * 58,
        "max_tokens 96, tokens/s 12.5",
        "std::vector is no address, nor is 1.2.3",
    ],
)
def test_what_a_fault_is_found_by_stays(text: str) -> None:
    kept = scrubber()
    assert kept.text(text) == text
    assert not kept.replaced


def test_whatever_a_key_calls_a_secret_is_replaced_and_numbers_stay() -> None:
    scrubbed = scrubber().values(
        {
            "api_key": "abc",
            "monitors": [{"wandb_token": "x", "password": ""}],
            "max_tokens": 96,
            "sampling": {"tokens": 3},
            "203.0.113.9:1": 2,
        }
    )
    assert scrubbed == {
        "api_key": "<secret>",
        "monitors": [{"wandb_token": "<secret>", "password": ""}],
        "max_tokens": 96,
        "sampling": {"tokens": 3},
        "<address>:1": 2,
    }


def run_with_logs(directory: Path) -> Path:
    """Make what a run of a trainer leaves; return the data directory of its node."""
    node = directory / "trainer"
    (directory / "logs").mkdir()
    node.mkdir()
    (directory / ".primerl-run").write_text("a run")
    (directory / "config.json").write_text(json.dumps({"name": "r", "api_key": "abc", "seed": 1}))
    (directory / "logs" / "trainer.jsonl").write_text('{"message": "from 203.0.113.7"}\n')
    (directory / "ticket.txt").write_text(TICKET)
    (node / "key.pem").write_text("PRIVATE")
    return node


def answering(command: str) -> Any:
    return {"command": command, "ticket": TICKET, "path": "203.0.113.7"}


def test_a_bundle_has_versions_checks_answers_config_and_logs(tmp_path: Path) -> None:
    files = collect(run_with_logs(tmp_path), answering, CHECKS, scrubber())
    assert list(files) == [
        *("about.json", "doctor.json", "status.json", "peers.json", "config.json"),
        "logs/trainer.jsonl",
    ]
    assert json.loads(files["about.json"])["packages"]["msgspec"]
    assert json.loads(files["doctor.json"])[0]["found"] == "1 GiB free in ~/.primerl"
    assert json.loads(files["config.json"]) == {"name": "r", "api_key": "<secret>", "seed": 1}
    assert files["logs/trainer.jsonl"] == '{"message": "from <address>"}\n'
    everything = "".join(files.values())
    for secret in (TICKET, "203.0.113.7", "PRIVATE", "/home/ada"):
        assert secret not in everything


def test_a_node_that_does_not_answer_has_its_files_all_the_same(tmp_path: Path) -> None:
    def silent(command: str) -> Any:
        raise NetworkError("no node runs there")

    node = run_with_logs(tmp_path)
    (tmp_path / "config.json").write_text("{")
    files = collect(node, silent, CHECKS, scrubber())
    assert json.loads(files["status.json"]) == "no answer: no node runs there"
    assert "no JSON" in files["config.json"]
    assert "logs/trainer.jsonl" in files


def test_of_long_logs_the_newest_whole_lines_are_taken_and_links_are_not_followed(
    tmp_path: Path,
) -> None:
    node = run_with_logs(tmp_path)
    line = b"\xff" + b"x" * 1023 + b"\n"
    (tmp_path / "logs" / "worker_1.log").write_bytes(line * 2000 + b"the last\n")
    (tmp_path / "logs" / "stolen.log").symlink_to(node / "key.pem")
    os.mkfifo(tmp_path / "logs" / "pipe.log")
    files = collect(node, answering, CHECKS, scrubber())
    assert sorted(name for name in files if name.startswith("logs/")) == [
        "logs/trainer.jsonl",
        "logs/worker_1.log",
    ]
    log = files["logs/worker_1.log"]
    assert log.endswith("the last\n")
    assert (
        MAX_LOG - 3000
        < len(log.encode("utf-8", "replace").replace(b"\xef\xbf\xbd", b"?"))
        <= MAX_LOG
    )
    assert len(log.splitlines()[0]) == 1024
