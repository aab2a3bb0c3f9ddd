"""The program under signals, as a process of its own."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, sys
from primerl.cli.main import execute
from primerl.cli.command import run_to_end
import primerl.cli.main as program

async def work():
    print("up", flush=True)
    try:
        await asyncio.sleep(60)
    finally:
        print("tidy", flush=True)
        {last}

def run():
    run_to_end(work())

program.app.command("work")(run)
sys.exit(execute(["work"]))
"""


def started(last: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(last=last)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_in_order(number: signal.Signals) -> None:
    process = started("pass")
    process.send_signal(number)
    out, err = process.communicate(timeout=100)
    assert (out, process.returncode) == ("tidy\n", 128 + number)
    assert err == "stopping; once more to stop at once\n"


def test_work_that_swallows_the_stop_still_counts_as_interrupted() -> None:
    process = started("return")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=100)
    assert process.returncode == 143


def test_the_second_signal_does_not_wait() -> None:
    process = started("await asyncio.sleep(60)")
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "tidy\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=100)
    assert process.returncode == -signal.SIGINT
