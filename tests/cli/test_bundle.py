"""`primerl-node bundle`: listed, asked about, then written."""

import json
import zipfile
from pathlib import Path

from .conftest import Ask, Cli, Serve

NAMES = ["about.json", "doctor.json", "status.json", "peers.json", "logs/worker.jsonl"]


async def test_a_bundle_is_listed_and_written_with_what_the_node_answers(
    ask: Ask, serve: Serve, home: Path
) -> None:
    node = await serve(status={"step": 3, "page": "http://203.0.113.7:1/"}, peers=[{"id": "ab"}])
    (node / "logs").mkdir()
    (node / "logs" / "worker.jsonl").write_text('{"message": "from 203.0.113.7"}\n')
    ran = await ask("bundle", "-d", str(node), "-o", "b.zip", "--yes")
    assert ran.code == 0
    assert [line.split()[-1] for line in ran.out.splitlines()[: len(NAMES)]] == NAMES
    assert "2 of kind address" in ran.out
    with zipfile.ZipFile(home / "b.zip") as archive:
        assert archive.namelist() == NAMES
        assert json.loads(archive.read("status.json"))["step"] == 3
        assert b"203.0.113" not in b"".join(map(archive.read, NAMES))


async def test_without_a_yes_nothing_is_written_and_print_shows_all_of_it(
    ask: Ask, serve: Serve, home: Path
) -> None:
    node = str(await serve(status={"step": 3}, peers=[]))
    refused = await ask("bundle", "-d", node)
    assert refused.code == 2
    assert "add --yes" in refused.err
    shown = await ask("bundle", "-d", node, "--print")
    assert '"step": 3' in shown.out
    assert not (home / "primerl-bundle.zip").exists()


def test_a_directory_that_is_not_there_is_one_line(cli: Cli) -> None:
    ran = cli("bundle", "-d", "nowhere")
    assert ran.code == 2
    assert "is no node's directory" in ran.err
