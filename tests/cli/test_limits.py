"""`pause`, `resume` and `reload`: what they ask of the node, and what they say."""

import json
from pathlib import Path

from primerl.node.errors import UsageError
from primerl.node.ops import control

from .conftest import Ask, Cli, Serve


async def test_a_worker_is_paused_for_a_time_and_says_what_it_finishes(
    ask: Ask, short_dir: Path
) -> None:
    asked = dict[str, object]()

    async def pause(seconds: float | None = None, now: bool = False) -> dict[str, object]:
        asked.update(seconds=seconds, now=now)
        return {"paused": "by its owner, until 14:00", "held": 2, "handed_back": now}

    node, server = str(short_dir), control.ControlServer(short_dir, {"pause": pause})
    await server.start()
    ran = await ask("pause", "--for", "2h", "-d", node)
    assert ran.out == "paused by its owner, until 14:00; 2 leases finished first\n"
    assert asked == {"seconds": 7200, "now": False}
    ran = await ask("pause", "--now", "-d", node)
    assert ran.out == "paused by its owner, until 14:00; 2 leases handed back\n"
    assert asked == {"seconds": None, "now": True}
    answer = json.loads((await ask("pause", "--json", "-d", node)).out)
    assert (answer["data_dir"], answer["held"]) == (node, 2)
    await server.close()


async def test_a_wrong_time_is_one_line_and_pauses_nothing(ask: Ask, serve: Serve) -> None:
    node = str(await serve())
    for text in ("2", "soon", "-1h", "2 hours"):
        (await ask("pause", f"--for={text}", "-d", node)).refused(2, "is no duration")


async def test_resume_says_what_pauses_it_still(ask: Ask, serve: Serve) -> None:
    node = str(await serve(resume={"paused": ""}))
    assert (await ask("resume", "-d", node)).out == "works again\n"
    node = str(await serve("other", resume={"paused": "outside its hours, until 22:00"}))
    ran = await ask("resume", "-d", node)
    assert ran.out == "still paused: outside its hours, until 22:00\n"


async def test_reload_names_what_it_applied_and_what_needs_a_restart(
    ask: Ask, serve: Serve
) -> None:
    node = str(await serve(reload={"applied": ["limits.upload = 5.0"], "restart": ["leases"]}))
    ran = await ask("reload", "-d", node)
    assert ran.out == "applied: limits.upload = 5.0\nneeds a restart: leases\n"
    node = str(await serve("same", reload={"applied": [], "restart": []}))
    assert (await ask("reload", "-d", node)).out == "nothing has changed\n"
    node = str(await serve("wrong", reload=UsageError("unknown key limits.uplod")))
    (await ask("reload", "-d", node)).refused(1, "unknown key limits.uplod")


async def test_without_a_directory_the_worker_is_found_beside_a_trainer(
    ask: Ask, serve: Serve
) -> None:
    trainer = await serve("trainer")
    worker = await serve("worker", pause={"paused": "by its owner", "held": 0})
    entries = [
        control.register(trainer, "trainer", "r"),
        control.register(worker, "inference", "r"),
    ]
    try:
        assert (await ask("pause")).out == "paused by its owner\n"
        control.unregister(entries.pop())
        (await ask("pause")).refused(2, "no node that runs here can pause")
    finally:
        for entry in entries:
            control.unregister(entry)


def test_hours_and_rates_that_make_no_sense_are_named(cli: Cli, home: Path) -> None:
    for flag, value, words in (
        ("hours", "22-7", "no range of hours"),
        ("hours", "22:00-25:00", "no time of day"),
        ("hours", "sun-mun 22:00-23:00", "no day"),
        ("hours", "07:00-07:00", "all day is 00:00-24:00"),
        ("upload", "0.1", "at least 0.5"),
        ("download", "0.5", "at least 1"),
        ("when", "sometimes", "always"),
        ("monthly-gb", "-1", "limits.monthly_gb"),
    ):
        ran = cli("join", "--ticket", "primerl2-x", f"--limits.{flag}", value, "--dry-run")
        ran.refused(2, words)
