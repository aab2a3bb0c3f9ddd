"""Make the pages of the site that are not in docs/, for mkdocs.yml.

README, CONTRIBUTING and CHANGELOG become pages, with their links into docs/ shortened. Commands and config keys
come from the programs' own help (cli/reference.py).
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from typer.main import get_command

from primerl.cli.main import app
from primerl.cli.reference import CONFIGS, commands_page, config_page

ROOT = Path(__file__).resolve().parents[1]
OF_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
"""Pages outside of docs/, and their names on the site."""
LINK = re.compile(r"(\]\()((?!https?:)[^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made."""
    for name, text in pages():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Lead links of docs/ that leave it to the pages that stand for those files."""
    return LINK.sub(lambda link: f"{link[1]}{_inside(link[2])}", markdown)


def pages() -> Iterator[tuple[str, str]]:
    """Make each page: its name, and its Markdown."""
    for source, name in OF_ROOT.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        yield name, LINK.sub(lambda link: f"{link[1]}{link[2].removeprefix('docs/')}", text)
    yield "commands.md", commands_page(get_command(app))
    for command in CONFIGS:
        yield f"keys-{command}.md", config_page(command)


def _inside(path: str) -> str:
    """Return where the site has what `path` is relative to docs/; without such a page, as it is."""
    outside = path.removeprefix("../")
    return OF_ROOT.get(outside, path) if outside != path else path
