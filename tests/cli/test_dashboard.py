"""`primerl-node dashboard`: the link, and how a browser gets it."""

import json
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from primerl.node.errors import NodeError

from .conftest import Ask, Serve

LINK = "http://127.0.0.1:8470/#token=s3cret"


async def test_the_link_of_a_running_node_is_printed(ask: Ask, serve: Serve) -> None:
    node = str(await serve(dashboard={"link": LINK}))
    assert (await ask("dashboard", "-d", node)).out == f"{LINK}\n"
    assert json.loads((await ask("dashboard", "-d", node, "--json")).out) == {"link": LINK}


async def test_a_browser_is_not_told_the_token_where_others_read_its_arguments(
    ask: Ask, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, browser = tmp_path / "told", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {told}\n')
    browser.chmod(0o700)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    node = str(await serve(dashboard={"link": LINK}))
    assert (await ask("dashboard", "-d", node, "--open")).code == 0
    _check_redirect(told)


def _check_redirect(told: Path) -> None:
    address = told.read_text()
    assert "s3cret" not in address
    page = Path(unquote(urlsplit(address).path))
    assert LINK in page.read_text()
    assert stat.S_IMODE(page.stat().st_mode) == 0o600


async def test_a_node_without_a_page_says_how_to_get_one(ask: Ask, serve: Serve) -> None:
    node = str(await serve(dashboard=NodeError("this node serves no page: start it with ...")))
    (await ask("dashboard", "-d", node)).refused(1, "serves no page")


async def test_trainers_have_a_page_by_default_and_others_when_they_are_asked(ask: Ask) -> None:
    for command, port in (("train @ demo", 0), ("rl @ demo", 0), ("join", "off")):
        ran = await ask(*command.split(), "--dry-run", "--json")
        assert json.loads(ran.out)["dashboard"]["port"] == port
    ran = await ask("join", "--dashboard.port", "8471", "--dry-run", "--json")
    assert json.loads(ran.out)["dashboard"]["port"] == 8471
    (await ask("join", "--dashboard.port", "on", "--dry-run")).refused(2, "dashboard.port")


async def test_a_page_for_the_world_needs_an_address_and_a_run(ask: Ask, serve: Serve) -> None:
    worker = str(await serve(dashboard={"link": LINK}))
    (await ask("dashboard", "-d", worker, "--public", "http")).refused(2, "--public is PORT")
    (await ask("dashboard", "-d", worker, "--public", "0")).refused(1, "ask its trainer")
