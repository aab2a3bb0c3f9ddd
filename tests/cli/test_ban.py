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
