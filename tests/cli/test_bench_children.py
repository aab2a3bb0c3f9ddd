"""The processes of a benchmark end with it."""

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
CHILD = """
import asyncio
from children import Wire

async def forever(command):
    await asyncio.sleep(10000)

async def echo(command):
    return {"said": command["say"]}

asyncio.run(Wire().serve({"forever": forever, "echo": echo}))
"""


def child(*commands: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """What it tells of these, after which the parent is gone."""
    lines = "".join(json.dumps(command) + "\n" for command in commands)
    return subprocess.run(
        [sys.executable, "-c", CHILD],
        input=lines, cwd=BENCH, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_a_child_answers_one_command_after_the_other() -> None:
    ran = child({"do": "echo", "say": "a"}, {"do": "echo", "say": "b"}, {"do": "stop"})
    assert ran.returncode == 0, ran.stderr
    assert [json.loads(line)["said"] for line in ran.stdout.splitlines()] == ["a", "b"]


def test_a_child_ends_with_its_parent_in_the_middle_of_a_command() -> None:
    ran = child({"do": "echo", "say": "a"}, {"do": "forever"})
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 1
