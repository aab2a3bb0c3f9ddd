import json
import time

import pytest

from primerl.cli.ticket import seconds
from primerl.node.errors import NodeError, UsageError

from .conftest import Ask, Cli, Serve

ROW = {
    "id": "ab" * 16,
    "label": "anna",
    "issued": 0,
    "expires": int(time.time()) + 86400,
    "uses": 2,
    "revoked": 0,
    "admitted": 1,
}


async def test_a_ticket_is_printed_alone_so_that_it_can_be_piped(ask: Ask, serve: Serve) -> None:
    node = str(await serve(ticket={"ticket": "primerl1-x", "uses": 0}))
    for options in ((), ("--uses", "2", "--expires", "30d")):
        assert (await ask("ticket", *options, "-d", node)).out == "primerl1-x\n"
    assert json.loads((await ask("ticket", "--json", "-d", node)).out)["ticket"] == "primerl1-x"


async def test_a_list_says_of_each_ticket_whether_it_still_admits(ask: Ask, serve: Serve) -> None:
    rows = [
        ROW,
        {**ROW, "admitted": 2},
        {**ROW, "expires": 10},
        {**ROW, "revoked": 5, "uses": 0, "label": ""},
    ]
    node = str(await serve(tickets=rows))
    lines = (await ask("ticket", "list", "-d", node)).out.splitlines()[1:]
    states = ["valid", "used up", "expired", "revoked"]
    assert [line.split("  ")[-1][16:].strip() for line in lines] == states
    assert lines[0].split()[:3] == ["ababababab", "anna", "1/2"]
    told = (await ask("ticket", "list", "--json", "-d", node)).out
    assert json.loads(told) == {"tickets": rows}


async def test_revoking_says_that_nodes_stay(ask: Ask, serve: Serve) -> None:
    node = str(await serve(revoke=[ROW]))
    assert (
        "1 node(s) that it admitted stay" in (await ask("ticket", "revoke", "anna", "-d", node)).out
    )
    wrong = str(await serve("wrong", revoke=NodeError("no ticket 'bob' can be revoked")))
    (await ask("ticket", "revoke", "bob", "-d", wrong)).refused(1, "no ticket 'bob'")


@pytest.mark.parametrize(
    ("text", "value"), [("90m", 5400), ("12h", 43200), ("30d", 30 * 86400), ("2w", 14 * 86400)]
)
def test_a_duration_has_a_unit(text: str, value: int) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "1.5h", "1 y", "9" * 20 + "d"])
def test_a_text_that_is_no_duration_says_how_to_write_one(cli: Cli, text: str) -> None:
    with pytest.raises(UsageError, match="30d"):
        seconds(text)
    if text:
        assert cli("ticket", f"--expires={text}", "-d", "nowhere").code == 2
