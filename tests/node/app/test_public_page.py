"""The page of a run for the world: what it shows, and that nothing else gets out, whatever is asked."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from support.figures import PEER, TRAINER

from primerl.node.app.page_queries import EvaluationLine
from primerl.node.app.public_page import PublicRun, read_address
from primerl.node.errors import UsageError
from primerl.node.ops.control import ControlServer
from primerl.node.ops.dashboard import FILES, Dashboard, DashboardLimits
from primerl.node.ops.figures import (
    MAX_PUBLIC_PEERS,
    Curves,
    NodeFigures,
    PeerRow,
    Status,
    public_figures,
)

SECRET = "192.168.7.9:4433 token=s3cret primerl1-ticket"
SHOWN = {"short", "role", "run_name", "phase"}
"""Texts of Status and PeerRow that everybody may read."""
EVALUATION = EvaluationLine(3, "math", 0.5, 0.4, 0.6, {"pass@4": 0.7})


def marked(row: msgspec.Struct) -> dict[str, str]:
    """Put SECRET into each text of a struct that is not SHOWN."""
    fields = msgspec.structs.fields(type(row))
    return {field.name: SECRET for field in fields if field.type is str} | {
        name: getattr(row, name) for name in SHOWN if hasattr(row, name)
    }


def rows(count: int) -> list[PeerRow]:
    peer = msgspec.structs.replace(PEER, **marked(PEER), reasons={SECRET: 1}, trusts={SECRET: 1.0})
    peer.chunk_bytes = {SECRET: 1}
    return [
        msgspec.structs.replace(peer, short=f"{at:010x}", accepted=at, refused="", left=False)
        for at in range(count)
    ]


class Trainer:
    """What a trainer's control socket answers."""

    def __init__(self) -> None:
        status: Status = msgspec.structs.replace(
            TRAINER, **marked(TRAINER), warnings=[SECRET], chunk_bytes_by_source={SECRET: 1}
        )
        self.figures = NodeFigures(1.0, status, rows(MAX_PUBLIC_PEERS + 50))
        self.asked = 0

    async def public(self) -> object:
        return public_figures(self.figures, Curves([1, 2], {"reward/mean": [0.25, 0.5]}))

    async def evaluations(self) -> list[EvaluationLine]:
        self.asked += 1
        return [EVALUATION]


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    """A page for the world, of a trainer that is full of secrets."""
    trainer = Trainer()
    secrets = {name: trainer.public for name in ("log", "ticket", "figures", "dashboard")}
    commands = {"public": trainer.public, "evaluations": trainer.evaluations, **secrets}
    control = ControlServer(tmp_path, commands)
    await control.start()
    limits = DashboardLimits(every_s=0.01, share=1.0)
    page = Dashboard(PublicRun(tmp_path), 0, limits, public_host="127.0.0.1")
    page.open()
    yield page.url
    assert trainer.asked <= 1  # whoever asks for evaluations does not keep the trainer reading
    await page.close()
    await control.close()


async def events(session: aiohttp.ClientSession, url: str) -> dict[str, str]:
    """Read the first figures and curves of a page."""
    found: dict[str, str] = {}
    async with session.get(f"{url}events") as reply:
        while len(found) < 2:
            name = (await reply.content.readline()).decode().removeprefix("event: ").strip()
            found[name] = (await reply.content.readline()).decode().removeprefix("data: ")
            await reply.content.readline()
    return found


async def test_everybody_sees_the_run_without_a_token_and_under_any_name(url: str) -> None:
    headers = {"Host": "run.example.org", "Origin": "https://run.example.org"}
    async with aiohttp.ClientSession(headers=headers, read_bufsize=1 << 24) as session:
        shown = await events(session, url)
        figures, curves = json.loads(shown["figures"]), json.loads(shown["curves"])
        assert (figures["status"]["run_name"], figures["status"]["step"]) == ("demo", 3)
        assert figures["status"]["environments"][0]["name"] == "math"
        assert figures["workers"] == {"paused": MAX_PUBLIC_PEERS + 50}
        assert len(figures["peers"]) == MAX_PUBLIC_PEERS
        assert figures["peers"][0]["accepted"] == MAX_PUBLIC_PEERS + 49
        assert curves["values"]["reward/mean"] == [0.25, 0.5]
        for _ in range(3):
            async with session.get(f"{url}api/evaluations") as reply:
                assert (await reply.json())[0]["figures"] == {"pass@4": 0.7}


async def test_no_answer_holds_an_address_a_prompt_a_ticket_a_token_or_a_peer_s_word(
    url: str,
) -> None:
    asked = [path.removeprefix("/") for path in FILES] + ["api/evaluations"]
    refused = ["metrics"] + [
        f"api/{name}" for name in "log ticket figures dashboard verdicts rollouts rollout".split()
    ]
    answers: dict[str, str] = {}
    async with aiohttp.ClientSession(read_bufsize=1 << 24) as session:
        for path in (*asked, *refused):
            async with session.get(url + path) as reply:
                assert reply.status == (404 if path in refused else 200), path
                answers[path] = await reply.text() + str(reply.headers)
        shown = await events(session, url)
        answers |= shown
    for path, text in answers.items():
        for secret in (SECRET, "192.168", "s3cret", "primerl1-t", "stale [", TRAINER.id, PEER.id):
            assert secret not in text, path
    named = {name for row in json.loads(shown["figures"])["peers"] for name in row}
    assert named == (
        {"short", "role", "state", "version", "lag"}
        | {"accepted", "rejected", "audited", "trust", "trust_low"}
    )


async def test_a_peer_is_shown_if_there_is_a_role_like_its_own() -> None:
    roles = ("validator", "<b>10.0.0.1</b>", "")
    peers = [msgspec.structs.replace(PEER, role=role) for role in roles]
    shown = public_figures(NodeFigures(0.0, TRAINER, peers), Curves())
    assert [peer.role for peer in shown.peers] == ["validator"]


async def test_a_run_that_does_not_answer_is_said_to_be_away_and_no_more(tmp_path: Path) -> None:
    page = Dashboard(PublicRun(tmp_path), 0, public_host="127.0.0.1")
    page.open()
    async with aiohttp.ClientSession() as session:
        for path in ("events", "api/evaluations", "events"):
            async with session.get(page.url + path) as reply:
                text = await reply.text()
                assert (reply.status >= 400, "does not answer" in text) == (True, True)
                assert str(tmp_path) not in text
    await page.close()


async def test_a_viewer_whose_run_ends_is_hung_up_on(tmp_path: Path) -> None:
    control = ControlServer(tmp_path, {"public": Trainer().public})
    await control.start()
    limits = DashboardLimits(every_s=0.01, share=1.0)
    page = Dashboard(PublicRun(tmp_path), 0, limits, public_host="127.0.0.1")
    page.open()
    async with (
        aiohttp.ClientSession(read_bufsize=1 << 24) as session,
        session.get(f"{page.url}events") as reply,
    ):
        assert await reply.content.readline() == b"event: figures\n"
        await control.close()
        async with asyncio.timeout(60):
            while await reply.content.readany():
                pass
    await page.close()


def test_an_address_is_a_port_with_or_without_a_host() -> None:
    assert read_address("8480") == ("0.0.0.0", 8480)
    assert read_address("127.0.0.1:8480") == ("127.0.0.1", 8480)
    assert read_address("[::]:0") == ("::", 0)
    for text in ("", "host", "70000", "127.0.0.1:", "1:x", "-1", "9" * 99):
        with pytest.raises(UsageError, match=r"--public is PORT or HOST:PORT"):
            read_address(text)
