"""Commands in README and docs: each is a command of this program, with flags that it takes."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer.main

from primerl.cli.command import config_of
from primerl.cli.main import CONFIGURED, app
from primerl.cli.service import COMMANDS as SERVICES
from primerl.node.config.loader import keys

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)(?:#([^)\s]+))?\)")
COMMAND = re.compile(r"primerl-node ([a-z][a-z-]*)((?: [^`\n|#]*)?)")


def commands(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the command and its arguments, from code blocks and from code in a line."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"```.*?```|^    .*$|`[^`\n]*`", text, re.DOTALL | re.MULTILINE)
    for block in blocks:
        yield from COMMAND.findall(block)


@cache
def flags_of(name: str) -> frozenset[str]:
    """Return the flags that a command takes, with _ for -; those of its subcommands as well."""
    program: Any = typer.main.get_command(app)
    command = program.commands[name]
    every = [command, *getattr(command, "commands", {}).values()]
    found: set[str] = {flag for one in every for part in one.params for flag in part.opts}
    if name in CONFIGURED:
        found |= {f"--{key}" for key in keys(config_of(name))}
    if name == "service":  # its arguments are a command's
        found = found.union(*map(flags_of, SERVICES))
    return frozenset(flag.replace("-", "_") for flag in found) | {"__help", "__help_all"}


def test_commands_in_a_page_exist_and_take_their_flags() -> None:
    wrong: list[str] = []
    for source, name, given in ((page, *words) for page in PAGES for words in commands(page)):
        known = flags_of(name)
        for flag in re.findall(r"(?<=\s)-(?:-[a-z][\w.-]*|[a-z]\b)", given):
            plain = flag.rstrip(".").replace("-", "_")
            key = plain.replace("__no_", "__", 1)
            section = any(one.startswith(f"{key}.") for one in known)
            table = any(plain.startswith(f"{one}.") for one in known)
            if not {plain, key} & known and not section and not table:
                wrong.append(f"{source.name}: primerl-node {name}{given}: {flag}")
    assert not wrong


def slugs(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    lines = page.read_text(encoding="utf-8").splitlines()
    titles = [re.sub(r"[`*]", "", line).lstrip("# ") for line in lines if line[:1] == "#"]
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_of_a_page_lead_to_files_and_headings() -> None:
    for page in PAGES:
        for path, heading in LINK.findall(page.read_text(encoding="utf-8")):
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page}: {path}"
            assert not heading or heading in slugs(target), f"{page}: {path}#{heading}"
