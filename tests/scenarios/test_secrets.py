"""Secrets of real nodes: in no log, crash dump, list of processes, child's variables, metric or bundle."""

import base64
import json
import signal
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import psutil  # pyright: ignore[reportMissingModuleSource]
import pytest
from scenarios.processes import Nodes, Program, nodes

from primerl.crypto.keys import SecretKey
from primerl.node.ops import control

pytestmark = [pytest.mark.net, pytest.mark.timeout(1200), pytest.mark.slow]

PASSPHRASE = "planted-passphrase-7c1e"
VARIABLES = {
    "PRIMERL_PASSPHRASE": PASSPHRASE,
    "HF_TOKEN": "hf_plantedTokenOfTheHub",
    "WANDB_API_KEY": "plantedkeyofwandb0123456789abcdef0123456",
    "SERVER_API_KEY": "sk-plantedKeyOfTheServer",
}
ENDLESS = ("--max-steps", "100000", "--log.level", "debug")
HOLD_TICKETS = {"ticket.txt", "ledger.db", "ledger.db-wal", "join.toml"}
"""Files that have to hold the ticket: the trainer's for its operator, and what a worker joins again by."""


def forms(key: SecretKey) -> list[bytes]:
    """Return a key as it might be written."""
    raw = key.seed()
    return [raw, raw.hex().encode(), base64.b64encode(raw), base64.urlsafe_b64encode(raw)]


def seen_of_processes(programs: list[Program]) -> Iterator[tuple[str, bytes]]:
    """Yield what the list of processes shows of nodes and what they started, and the children's variables."""
    for program in programs:
        node = psutil.Process(program.process.pid)
        for process in [node, *node.children(recursive=True)]:
            yield f"arguments of {process.pid}", "\0".join(process.cmdline()).encode()
            if process.pid != node.pid:
                variables = Path(f"/proc/{process.pid}/environ").read_bytes()
                name = next(iter(process.cmdline()[-1:]), "")
                yield f"variables of {name}", variables


def seen_on_page(run: Nodes, token: str) -> Iterator[tuple[str, bytes]]:
    """Yield what the trainer's page answers, with the operator's link and without."""
    link = str(control.ask(run.run_dir / "trainer", "dashboard")["link"])
    address = link.partition("/#")[0]
    for path in ("/", "/metrics", "/page.js", "/api/log"):
        request = urllib.request.Request(address + path)
        if path.startswith("/api"):
            request.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=60) as reply:
            yield f"page {path}", reply.read()


def seen_in_bundle(run: Nodes, data_dir: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the texts of a node's bundle."""
    out = run.directory / f"{data_dir.name}.zip"
    program = run.start(
        f"bundle-{data_dir.name}", "bundle", "-d", str(data_dir), "-o", str(out), "--yes"
    )
    assert program.wait() == 0, program.output()
    with zipfile.ZipFile(out) as files:
        for name in files.namelist():
            yield f"bundle {name}", files.read(name)
    out.unlink()


def seen_in_files(directory: Path) -> Iterator[tuple[str, bytes]]:
    """Yield all files, the programs' output among them."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            yield str(path.relative_to(directory)), path.read_bytes()


def test_secrets_are_in_nothing_that_others_read_or_that_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (VARIABLES | {"PYTHONFAULTHANDLER": "1"}).items():
        monkeypatch.setenv(name, value)
    with nodes(tmp_path) as run:
        trainer = run.trainer(*ENDLESS)
        run.until("ticket", run.has_ticket)
        ticket_file = run.run_dir / "ticket.txt"
        worker = run.start(
            "worker", "join", "--ticket", str(ticket_file), "--data-dir", str(tmp_path / "worker"),
            "--network.host", "127.0.0.1", "--allow-environment", "early_letters", "--log.level", "debug",
        )  # fmt: skip
        run.until("work", lambda: int(run.status("worker").get("accepted", 0)) > 0)
        link = str(control.ask(run.run_dir / "trainer", "dashboard")["link"])
        token = link.partition("#token=")[2]
        seen = dict(seen_of_processes([trainer, worker]))
        seen |= dict(seen_on_page(run, token))
        for data_dir in (run.run_dir / "trainer", tmp_path / "worker"):
            seen |= dict(seen_in_bundle(run, data_dir))
        for program in (worker, trainer):  # both leave a crash dump
            program.process.send_signal(signal.SIGABRT)
            assert program.wait() == -signal.SIGABRT
            assert "most recent call first" in program.output()
        monkeypatch.setenv("PRIMERL_PASSPHRASE", f"not-{PASSPHRASE}")
        refused = run.trainer("--resume", "true")
        assert refused.wait() != 0
        seen |= dict(seen_in_files(tmp_path))
        keys = [
            SecretKey.load(it / "key.pem", PASSPHRASE)
            for it in (run.run_dir / "trainer", tmp_path / "worker")
        ]
        ticket = ticket_file.read_text().strip()
    secrets = {value.encode() for value in VARIABLES.values()} | {token.encode()}
    secrets |= {form for key in keys for form in forms(key)}
    leaks = [where for where, data in seen.items() if any(secret in data for secret in secrets)]
    assert not leaks
    shown = {where for where, data in seen.items() if ticket.encode() in data}
    assert {Path(where).name for where in shown} <= HOLD_TICKETS, shown
    assert "outputs/early/ticket.txt" in shown  # else nothing was looked for
    assert any(where.startswith("variables") for where in seen)


@pytest.mark.parametrize("shares", [True, False])
def test_an_address_that_is_not_shared_is_in_nothing_of_another_worker(
    tmp_path: Path, shares: bool
) -> None:
    """Over iroh and libp2p; with an address that is shared the other one has it."""
    home, started, connected = "127.0.0.3", dict[str, Program](), False
    with nodes(tmp_path) as run:
        run.trainer(*ENDLESS, "--network.host", "127.0.0.2")
        run.until("ticket", run.has_ticket)
        for name, host, share in (("home", home, shares), ("other", "127.0.0.4", True)):
            started[name] = run.start(
                name, "join", "--ticket", str(run.run_dir / "ticket.txt"), "--data-dir", str(tmp_path / name),
                "--network.host", host, "--network.share-address", f"{share}".lower(),
                "--allow-environment", "early_letters", "--log.level", "debug",
            )  # fmt: skip
        for name in ("home", "other"):
            run.until("work", lambda name=name: int(run.status(name).get("accepted", 0)) > 0)
        version = int(run.status("other")["version"])

        def went_on() -> bool:
            nonlocal connected
            ours, theirs = (
                psutil.Process(started[name].process.pid).net_connections("tcp") for name in started
            )
            connected |= bool({it.laddr for it in ours} & {it.raddr for it in theirs if it.raddr})
            return int(run.status("other").get("version", 0)) > version + 5

        run.until("versions", went_on)
        told = json.dumps([control.ask(tmp_path / "other", it) for it in ("peers", "status")])
        files = dict(seen_in_files(tmp_path / "other")) | dict(seen_in_files(tmp_path))
        mine = [
            told.encode(),
            *(data for where, data in files.items() if where.startswith("other")),
        ]
    assert connected == shares
    assert shares or not any(home.encode() in data for data in mine)
