"""scripts/install.sh, and what pyproject.toml says of libp2p, whose own requirements want a compiler."""

import os
import pty
import re
import shutil
import subprocess
import sys
import tomllib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import requires
from pathlib import Path
from threading import Thread

import pytest
from support.repository import ROOT

from primerl.node.p2p.libp2p import INSTALL, OPTIONAL

NEVER_IMPORTED = {"grpcio", "lru-dict", "mypy-protobuf", "rpcudp", "types-requests"}
"""What libp2p requires and no part of it that a node uses imports."""
PROGRAMS = "bash cat cp dirname grep mkdir mktemp rm sleep stty tail uname".split()
"""What a machine without a compiler has, as far as the scripts need it."""

TEST_TOOLS = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis")


def name_of(requirement: str) -> str:
    """The project's name in a requirement."""
    found = re.match(r"[\w.-]+", requirement)
    assert found
    return found[0].lower()


def own_requirements() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {name_of(one): one for one in project["dependencies"]}


def test_what_libp2p_requires_is_ours_too_or_is_known_to_be_needless() -> None:
    theirs = [one for one in requires("libp2p") or [] if "extra ==" not in one]
    needed = {name_of(one) for one in theirs if 'python_version < "3.11"' not in one}
    needed -= NEVER_IMPORTED | OPTIONAL
    assert "noiseprotocol" in needed  # else nothing was read
    assert needed <= set(own_requirements())
    assert "libp2p" not in own_requirements()  # it would bring fastecdsa, which has no wheel


def test_the_version_of_libp2p_is_the_same_everywhere() -> None:
    pinned = INSTALL.rpartition(" ")[2]
    assert pinned in (ROOT / "constraints.txt").read_text().splitlines()
    assert INSTALL in (ROOT / "docs" / "install.md").read_text()


def bare_machine(tmp_path: Path) -> dict[str, str]:
    """An environment in which no compiler can be found: a PATH of a few links, and no way round it."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in PROGRAMS:
        found = shutil.which(name)
        assert found
        (programs / name).symlink_to(found)
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    proxies = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    nothing = "/nonexistent"
    return {
        **kept,
        **proxies,
        "PATH": str(programs),
        "HOME": os.environ.get("HOME", str(tmp_path)),
        "PYTHON": os.path.realpath(sys.executable),
        **dict.fromkeys(("CC", "CXX", "CPP", "LD", "CPATH", "C_INCLUDE_PATH"), nothing),
    }


def clone(tmp_path: Path) -> Path:
    """The files of the repository, as a fresh clone has them."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    root = tmp_path / "clone with a space"
    for name in filter(None, listed.stdout.split("\0")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, root / name)
    return root


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_a_machine_without_a_compiler_installs_everything_and_finds_peers_by_libp2p(
    tmp_path: Path,
) -> None:
    """The daemon alone, since torch takes minutes; the tests' own environment is installed by the same script.

    That no compiler is found is only half of the proof, for what pip built and cached before needs none. The
    other half is the installer, which takes nothing but wheels: whatever has none is found nowhere.
    """
    environ = bare_machine(tmp_path)
    root = clone(tmp_path)
    for tool in ("cc", "gcc", "c++", "clang"):
        assert shutil.which(tool, path=environ["PATH"]) is None

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            command,
            cwd=root,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    run("bash", root / "scripts/install.sh", "")
    python = root / ".venv/bin/python"
    run(python, "-m", "pip", "install", "-q", "--only-binary", ":all:", *TEST_TOOLS)
    said = run(python, "-m", "pip", "list", "--format", "freeze")
    installed = {name_of(line) for line in said.splitlines()}
    assert "libp2p" in installed
    assert installed.isdisjoint({*OPTIONAL, "torch"})
    tests = [f"tests/node/p2p/test_libp2p{which}.py" for which in ("", "_attacks")]
    assert " passed" in run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    assert run(root / ".venv/bin/primerl-node", "--help").startswith("Usage:")
    assert (root / ".venv/share/man/man1/primerl-node.1").read_text().startswith(".TH")


FAKE_PYTHON = """#!/bin/bash
case "$1 $2" in
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip") echo "$WORDS" "${{@:3}}" && sleep 1.2 && exit "$CODE" ;;
"-m primerl.cli.main") ;;
*) exec {python} "$@" ;;
esac
"""


@pytest.fixture
def installer(tmp_path: Path) -> Path:
    """The installer in a directory of its own, beside an interpreter whose pip only talks."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/install.sh", "pyproject.toml", "constraints.txt"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON.format(python=os.path.realpath(sys.executable)))
    python.chmod(0o755)
    return tmp_path / "scripts/install.sh"


def test_the_progress_of_an_installation_stays_on_its_line(installer: Path) -> None:
    columns = 40
    environ = {
        **os.environ,
        "PYTHON": str(installer.parent.parent / "python"),
        "TORCH_CPU_INDEX": "",
        "WORDS": "Collecting " + "a-package-with-a-long-name " * 20,
        "CODE": "0",
        "COLUMNS": str(columns),
    }
    ours, theirs = pty.openpty()
    with subprocess.Popen(["bash", installer], env=environ, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
        assert process.wait() == 0
    os.close(ours)
    lines = re.findall(r"\r(primerl-node: installing, [^\r\x1b]*)\x1b", shown.decode())
    assert lines
    assert max(map(len, lines)) == columns - 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("ERROR: No matching distribution found for torch==2.13.0", "PYTHON="),
        ("Retrying after connection broken. No matching distribution found", "package index"),
        ("OSError: [Errno 28] No space left on device", "make room"),
        ("something else", "report it"),
    ],
)
def test_a_failed_installation_says_what_to_do(installer: Path, words: str, said: str) -> None:
    python = installer.parent.parent / "python"
    environ = {**os.environ, "PYTHON": str(python), "WORDS": words, "CODE": "1"}
    environ["TORCH_CPU_INDEX"] = ""
    done = subprocess.run(
        ["bash", installer], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert words in done.stderr
    assert said in done.stderr.splitlines()[-1]


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU")
def test_without_a_gpu_torch_comes_from_the_index_of_its_cpu_build(
    installer: Path, tmp_path: Path
) -> None:
    (tmp_path / "index" / "torch").mkdir(parents=True)
    environ = {**os.environ, "PYTHON": str(tmp_path / "python"), "WORDS": "", "CODE": "0"}

    def installed(extras: str, index: str) -> tuple[str, str]:
        done = subprocess.run(
            ["bash", installer, extras],
            env={**environ, "TORCH_CPU_INDEX": index},
            capture_output=True,
            text=True,
            check=True,
        )
        return (tmp_path / ".venv/install.log").read_text(), done.stderr

    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "index"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        index = f"http://127.0.0.1:{server.server_port}"
        assert f"--extra-index-url {index} " in installed("run", index)[0]
        log, said = installed("run,dev", f"{index}/nowhere")
        server.shutdown()
    assert "--extra-index-url" not in log
    assert "TORCH_CPU_INDEX names another" in said
    assert "--extra-index-url" not in installed("", index)[0], "the daemon alone has no torch"
