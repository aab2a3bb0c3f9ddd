import json

from primerl.node.errors import UsageError

from .conftest import Ask, Serve

NODE = "1f0c2a" + 58 * "0"


async def test_a_worker_is_banned_and_pardoned_by_its_id(ask: Ask, serve: Serve) -> None:
    row = {"id": NODE, "short": "1f0c2a0000", "since": 1796000000.0, "why": "a reason"}
    node = str(await serve(ban=row, pardon={"node": NODE}))
    says = "banned 1f0c2a0000 until it is pardoned: a reason\n"
    assert (await ask("ban", "1f0c", "--why", "a reason", "-d", node)).out == says
    assert (await ask("ban", "1f0c", "--reason", "a reason", "-d", node)).out == says
    assert (await ask("pardon", "1f0c", "-d", node)).out == "pardoned 1f0c2a0000\n"
    assert json.loads((await ask("ban", "1f0c", "--json", "-d", node)).out) == {"node": NODE, **row}


async def test_a_ban_is_given_a_length_and_says_when_it_ends(ask: Ask, serve: Serve) -> None:
    row = {"id": NODE, "short": "1f0c2a0000", "since": 1796000000.0, "why": "a reason"}
    node = str(await serve(ban={**row, "until": 1796259200.0}))
    assert "until 2026-12-0" in (await ask("ban", "1f0c", "--for", "3d", "-d", node)).out
    (await ask("ban", "1f0c", "--for", "soon", "-d", node)).refused(2, "no duration")


async def test_an_id_of_no_worker_is_one_line(ask: Ask, serve: Serve) -> None:
    node = str(await serve(ban=UsageError("no worker has an id that begins with 'beef'")))
    (await ask("ban", "beef", "-d", node)).refused(1, "no worker has an id")


async def test_bans_are_listed_with_time_reason_and_ticket(ask: Ask, serve: Serve) -> None:
    row = {"id": NODE, "short": "1f0c2a0000", "since": 1796000000.0, "why": "bad_proof: [b]no"}
    row |= {"ticket": "anna 12345678", "accepted": 3, "rejected": 1}
    node = str(await serve(bans=[row]))
    out = (await ask("bans", "-d", node)).out
    assert out.splitlines()[0].split() == ["NODE", "SINCE", "UNTIL", "TICKET", "OK/REJECTED", "WHY"]
    for part in ("1f0c2a0000", "2026-11-", "anna 12345678", "3/1", "bad_proof: [b]no", "pardoned"):
        assert part in out
    assert json.loads((await ask("bans", "--json", "-d", node)).out) == {"bans": [row]}


async def test_a_run_without_bans_says_so(ask: Ask, serve: Serve) -> None:
    node = str(await serve(bans=[]))
    assert (await ask("bans", "-d", node)).out == "nobody is banned\n"
