import json

from primerl.node.errors import UsageError

from .conftest import Ask, Serve

NODE = "1f0c2a" + 58 * "0"


async def test_a_worker_is_banned_and_pardoned_by_its_id(ask: Ask, serve: Serve) -> None:
    node = str(await serve(ban={"node": NODE}, pardon={"node": NODE}))
    assert (await ask("ban", "1f0c", "--why", "a reason", "-d", node)).out == "banned 1f0c2a0000\n"
    assert (await ask("pardon", "1f0c", "-d", node)).out == "pardoned 1f0c2a0000\n"
    assert json.loads((await ask("ban", "1f0c", "--json", "-d", node)).out) == {"node": NODE}


async def test_an_id_of_no_worker_is_one_line(ask: Ask, serve: Serve) -> None:
    node = str(await serve(ban=UsageError("no worker has an id that begins with 'beef'")))
    (await ask("ban", "beef", "-d", node)).refused(1, "no worker has an id")


async def test_bans_are_listed_with_time_reason_and_ticket(ask: Ask, serve: Serve) -> None:
    row = {"id": NODE, "short": "1f0c2a0000", "since": 1796000000.0, "why": "bad_proof: [b]no"}
    row |= {"ticket": "anna 12345678", "accepted": 3, "rejected": 1}
    node = str(await serve(bans=[row]))
    out = (await ask("bans", "-d", node)).out
    assert out.splitlines()[0].split() == ["NODE", "SINCE", "TICKET", "OK/REJECTED", "WHY"]
    for part in ("1f0c2a0000", "2026-11-", "anna 12345678", "3/1", "bad_proof: [b]no"):
        assert part in out
    assert json.loads((await ask("bans", "--json", "-d", node)).out) == {"bans": [row]}


async def test_a_run_without_bans_says_so(ask: Ask, serve: Serve) -> None:
    node = str(await serve(bans=[]))
    assert (await ask("bans", "-d", node)).out == "nobody is banned\n"
