"""`join`: the ticket that is given, and the environment that a run wants to run here."""

import asyncio
import io
import json
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.web_server import Quiet, certificate, static_server

from primerl.cli.join import (
    asked,
    is_pipe,
    piped_text,
    ticket_place,
    ticket_text,
    with_allowed,
    with_checked_ticket,
)
from primerl.crypto.keys import SecretKey
from primerl.node.app.tickets import remember, run_directory
from primerl.node.config.run import JoinConfig
from primerl.node.environments.allowed import EnvironmentNotAllowed, Package
from primerl.node.errors import TicketError
from primerl.node.inference.vllm_arguments import is_installed
from primerl.node.p2p.seeds import fetch_text
from primerl.node.storage.ledger import Ledger
from primerl.protocol.manifests import Ticket
from primerl.protocol.tickets import issue

from .conftest import Cli, Terminal, torch_is

KEY = SecretKey.from_seed(bytes(32))


def ticket(*, expires_in: int = 3600) -> str:
    now = int(time.time())
    body = Ticket(bytes(32), KEY.node_id, ("127.0.0.1:1",), (), now, now + expires_in)
    return issue(KEY, body)


async def test_a_piped_ticket_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for parts, said in (([b"primerl1", b"-x\n"], "primerl1-x"), ([b"\n"], "")):
        mine, theirs = socket.socketpair()
        monkeypatch.setattr(sys, "stdin", theirs.makefile("r"))
        assert is_pipe(theirs.fileno())
        reading = asyncio.create_task(piped_text(100))
        for part in parts:
            await asyncio.get_running_loop().run_in_executor(None, mine.sendall, part)
        mine.close()
        if said:
            assert await reading == said
        else:
            with pytest.raises(TicketError, match="standard input holds no ticket"):
                await reading
        theirs.close()


def test_a_good_ticket_passes_as_text_out_of_a_file_and_through_a_pipe(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ticket()
    (home / "t").write_text(text + "\n")
    for given in (text, f"  {text}\n", "t", "~/t"):
        assert with_checked_ticket(JoinConfig(ticket=given)).ticket == text
    monkeypatch.setattr(sys, "stdin", io.StringIO("primerl1-x\n"))
    assert ticket_text("-") == "primerl1-x"
    os.mkfifo(home / "pipe")
    with ThreadPoolExecutor(1) as pool:
        pool.submit((home / "pipe").write_text, "primerl1-x\n")
        assert ticket_text("pipe") == "primerl1-x"


def test_a_file_or_a_link_can_be_read_again_a_ticket_and_a_pipe_cannot(home: Path) -> None:
    text = ticket()
    os.mkfifo(home / "pipe")
    for given in ("", "-", text, f" {text}", "pipe", "none", "x" * 5000, "a\0b"):
        assert ticket_place(given) is None
    (home / "t").write_text("")
    place = ticket_place("~/t")
    assert place
    assert place.name == str(home / "t")
    with pytest.raises(TicketError, match="holds no ticket"):
        place.read()
    (home / "t").write_text(text)
    assert place.read() == text
    link = ticket_place("https://example.org/t?secret=1")
    assert link
    assert link.name == "https://example.org/t"


class Pages(Quiet):
    """Serves files; one path leads elsewhere, another never ends its reply."""

    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/ticket.txt")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif self.path == "/silent":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"primerl2-")
            self.wfile.flush()
            RELEASED.wait(60.0)
        else:
            super().do_GET()


RELEASED = threading.Event()


def test_a_ticket_is_fetched_from_an_https_link_and_from_nothing_else(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ticket()
    (home / "ticket.txt").write_text(f"{text[:70]}\n{text[70:]}\n")
    (home / "large").write_text("primerl2-" + "a" * 2**20)
    (home / "page.html").write_text("<html>the ticket is at the door</html>")
    certified, tls = certificate(home)
    with static_server(home, tls, Pages) as port:
        link = f"https://127.0.0.1:{port}"
        with pytest.raises(TicketError, match=r"from 127\.0\.0\.1: .*certificate"):
            ticket_text(f"{link}/ticket.txt")  # nobody vouches for this server
        monkeypatch.setenv("SSL_CERT_FILE", str(certified))
        config = with_checked_ticket(JoinConfig(ticket=f"{link}/ticket.txt?key=hidden"))
        assert "".join(config.ticket.split()) == text
        for path, said in (
            ("large", "is too large for a ticket"),
            ("page.html", "holds no ticket"),
            ("missing?key=hidden", "answers 404: ask"),
            ("moved", "answers 302 \\(a redirect"),
        ):
            with pytest.raises(TicketError, match=said) as refused:
                ticket_text(f"{link}/{path}")
            assert "hidden" not in str(refused.value)
        with pytest.raises(TicketError, match="did not send a ticket within"):
            asyncio.run(fetch_text(f"{link}/silent", 99, deadline_s=0.3))
        RELEASED.set()
    for wrong, said in (
        (f"http://127.0.0.1:{port}/ticket.txt", "over https alone"),
        ("file:///etc/passwd", "over https alone"),
        ("https://[::1", "cannot be read"),
        (f"{link}/ticket.txt?key=hidden", "no ticket can be fetched from 127"),  # it is down
    ):
        with pytest.raises(TicketError, match=said) as refused:
            ticket_text(wrong)
        assert "hidden" not in str(refused.value)


@pytest.mark.parametrize("command", ["join", "inference"])
@pytest.mark.parametrize("dry", [("--dry-run",), ()])
@pytest.mark.parametrize(
    ("name", "said"),
    [("/dev/zero", "no file"), (".", "no file"), ("large", "too large"), ("none", "neither")],
)
def test_what_cannot_hold_a_ticket_is_refused_before_anything_else(
    command: str, dry: tuple[str, ...], name: str, said: str, cli: Cli, home: Path
) -> None:
    (home / "large").write_text("primerl1-" + "a" * 2**20)
    cli(command, "--ticket", name, "--data-dir", "d", *dry).refused(3, said)


def test_a_ticket_that_is_missing_expired_or_damaged_is_refused_offline(
    cli: Cli, home: Path
) -> None:
    cli("join").refused(3, "primerl-node ticket")
    expired = cli("join", "--ticket", ticket(expires_in=-3600))
    expired.refused(3, "expired 360", "s ago by our clock (", "check the clock of this machine")
    text = ticket()
    middle = len(text) // 2
    flipped = text[:middle] + ("A" if text[middle] != "A" else "B") + text[middle + 1 :]
    (home / "binary").write_bytes(b"\xff\x00\xfe")
    (home / "note").write_text("see you at nine")
    invented = ("primerl1-", "primerl1-!!", "primerl1-AAAA", "binary", "note")
    for bad in (flipped, text[:-20], *invented):
        cli("join", "--ticket", bad).refused(3)
    cli("join", "--ticket", flipped).refused(3, "damaged: copy it again, from its first character")


def test_a_directory_that_was_admitted_passes_with_an_expired_ticket_and_with_none(
    home: Path,
) -> None:
    old = ticket(expires_in=-3600)
    ledger = Ledger(run_directory(home / "node", bytes(32)) / "ledger.db", fsync=False)
    config = JoinConfig(ticket=old, data_dir=home / "node")
    with pytest.raises(TicketError, match="expired"):
        with_checked_ticket(config)
    remember(ledger, old)
    ledger.close()
    assert with_checked_ticket(config).ticket == old
    assert with_checked_ticket(JoinConfig(data_dir=home / "node")).ticket == old
    with pytest.raises(TicketError, match="never admitted"):
        with_checked_ticket(JoinConfig(data_dir=home / "other"))


def test_an_unknown_role_is_a_usage_error(cli: Cli) -> None:
    cli("join", "--role", "miner", "--ticket", ticket()).refused(2, "role")


@pytest.mark.skipif(is_installed(), reason="there is a vLLM here")
def test_an_engine_that_is_not_installed_is_named_before_anything_is_sent(cli: Cli) -> None:
    ran = cli("join", "--ticket", ticket(), "--engine.type", "vllm")
    ran.refused(7, "vLLM is not installed")


@pytest.mark.parametrize("kind", [socket.SOCK_DGRAM, socket.SOCK_STREAM])
def test_a_port_that_is_taken_is_named_before_anything_is_sent(
    cli: Cli, home: Path, kind: socket.SocketKind
) -> None:
    with socket.socket(socket.AF_INET, kind) as taken:
        taken.bind(("127.0.0.1", 0))
        if kind == socket.SOCK_STREAM:
            taken.listen()
        given = ("join", "--ticket", ticket(), "--data-dir", "node", "--network.host", "127.0.0.1")
        ran = cli(*given, "--network.port", str(taken.getsockname()[1]))
    ran.refused(4, "in use", "choose another")
    assert list(home.iterdir()) == []


def test_a_gpu_that_is_not_there_is_named_before_anything_is_sent(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_is("2.13.0+cpu", monkeypatch)
    ran = cli("join", "--ticket", ticket(), "--engine.device", "cuda")
    ran.refused(2, "engine.device is cuda, and torch is a CPU build here: leave it out")


# -- the environment of a run ----------------------------------------------------------------------

REFUSED = EnvironmentNotAllowed(
    Package("sort-digits", "sort-digits 0.1.0", bytes(range(32))), Path("worker")
)


def test_yes_allows_it_for_this_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = with_allowed(JoinConfig(data_dir=tmp_path), ["other"])
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert asked(config, REFUSED).environments.allow == ["other", "sort-digits"]
    assert list(tmp_path.iterdir()) == []
    said = capsys.readouterr().err
    assert "wants to run the environment 'sort-digits'" in said
    assert "package sort-digits 0.1.0, digest 000102030405" in said
    assert "[y/N/always]" in said


def test_always_is_kept_in_the_data_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("always\n"))
    asked(JoinConfig(data_dir=tmp_path), REFUSED)
    held = json.loads((tmp_path / "allowed_environments.json").read_text())
    assert held == {"sort-digits": bytes(range(32)).hex()}


@pytest.mark.parametrize("typed", [Terminal("\n"), Terminal("no\n"), io.StringIO("y\n")])
def test_any_other_answer_and_no_terminal_refuse(
    tmp_path: Path, typed: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", typed)
    with pytest.raises(EnvironmentNotAllowed):
        asked(JoinConfig(data_dir=tmp_path), REFUSED)
    assert list(tmp_path.iterdir()) == []
