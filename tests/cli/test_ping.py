import json
from typing import Any

import pytest

from .conftest import Ask, Serve

REPLY = {
    "id": "1f0c2a" + 58 * "0",
    "short": "1f0c2a0000",
    "role": "inference",
    "name": "anna",
    "path": "direct",
    "remote": "10.0.0.2",
    "connect_ms": 0.1,
    "rtt_ms": 12.34,
    "path_rtt_ms": 11.0,
}
NOTHING = {**REPLY, "rtt_ms": None, "path_rtt_ms": None, "path": "-", "why": "no reply in 5 s"}


def answers(*rows: dict[str, Any]) -> Any:
    """Answer one try after the other."""
    left = list(rows)
    return lambda: left.pop(0)


async def test_every_try_is_a_line_and_one_reply_is_enough(ask: Ask, serve: Serve) -> None:
    node = str(await serve(ping=answers(NOTHING, REPLY)))
    ran = await ask("ping", "anna", "-c", "2", "-i", "0.2", "-d", node)
    assert (ran.code, ran.out.splitlines()) == (
        0,
        [
            "nothing from 1f0c2a0000 (inference, anna): no reply in 5 s",
            "reply from 1f0c2a0000 (inference, anna) in 12.3 ms: direct 10.0.0.2, path 11.0 ms",
            "1 of 2 answered, shortest / mean / longest 12.3 / 12.3 / 12.3 ms",
        ],
    )


async def test_no_reply_at_all_is_exit_code_6(ask: Ask, serve: Serve) -> None:
    node = str(await serve(ping=NOTHING))
    ran = await ask("ping", "anna", "-c", "1", "-d", node, "--json")
    ran.refused(6, "did not answer in 1 tries: no reply in 5 s")
    assert json.loads(ran.out)["replies"] == 0


@pytest.mark.parametrize(
    "wrong", [("-c", "0"), ("-c", "1001"), ("-i", "0.1"), ("--timeout", "9"), ("--timeout", "0")]
)
async def test_tries_and_times_have_limits(ask: Ask, wrong: tuple[str, str]) -> None:
    (await ask("ping", "anna", *wrong)).refused(2, wrong[0])
