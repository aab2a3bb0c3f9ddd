"""Confine the process of an environment: its files, sockets, processes and memory.

Sandbox limits the process, on every Linux: confine.py filters its system calls, which needs no privilege and
holds for root, too, where RLIMIT_NPROC does not. Files are not confined. Landlock shuts files as well, by the
kernel's module of that name. Bubblewrap adds namespaces, made by the program of that name: the process sees
some of the file system, read-only, and no other process. Invariants:
- confine.py runs before any code of an environment and cannot be undone from inside;
- what confines files shows only the paths that are named here, of a home or a node's directory what is needed;
- without a sandbox of files, unless the owner asked for that by name, only bundled environments are played.
"""

import fcntl
import json
import math
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import __path__ as root
from ..config.paths import expand_home, home_directory
from ..config.sandbox import SandboxConfig
from ..errors import UsageError, one_line
from ..process.spawn import PARENT_VARIABLE
from ..removal import remove_own
from . import confine
from .allowed import BUNDLED
from .confine import MACHINES, SCOPES_SINCE, SETTINGS_VARIABLE, TCP_SINCE, landlock_version

CONFINE = (sys.executable, "-I", "-S", confine.__file__)
"""Confines itself, and becomes the program whose words follow."""
MIB, GIB = 1 << 20, 1 << 30
MARGIN = 64
"""Descendants counted beyond the limit; the rest of a fork bomb is not counted."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""Variables of a process without sockets: data sets come from the cache, without tries at a hub."""

BWRAP = "bwrap"
MISSING = "bubblewrap is not installed: install it (Debian, Ubuntu: apt install bubblewrap)"
NO_LANDLOCK = "this kernel has no Landlock (Linux 5.13 or newer, switched on)"
OWN_WORD = 'sandbox.type be "limits"'
BROKEN = "it needs release 0.7 or newer, and a system or container that allows user namespaces"
PROBE_S = 20.0
TEMPORARY = Path("/tmp")
SCRATCH = 512 * MIB
"""Space in each of /tmp, the home directory and a cache outside of it, bytes; lost at the end."""
SHARED = 64 * MIB
"""Size of the shared memory, bytes."""
PARTS = ("__init__.py", "crypto", "protocol", "node")
"""Parts of this package that a process needs; its root may also hold directories of runs."""
OWN_DATA = Path(".primerl") / "datasets"
"""Data sets of the machine's owner, below the home directory; see tasksets/hub_rows.py."""
LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
"""System directories, on most systems links into /usr."""
SYSTEM = (
    "/usr /nix/store /gnu/store /etc/alternatives /etc/group /etc/hosts /etc/ld.so.cache /etc/localtime "
    "/etc/nsswitch.conf /etc/passwd /etc/pki/ca-trust /etc/pki/tls/certs /etc/resolv.conf /etc/ssl/certs"
).split()
SIGNALLED = 128
"""Exit codes of bwrap above this one are this + the signal that ended the process."""
MOST_FILES = 20_000
"""Most files in the scratch directory of a process under Landlock, where nothing else bounds their sum."""
SCRATCH_PREFIX = "primerl-environment-"


@dataclass(frozen=True)
class Start:
    """Arguments, variables and folder with which an environment's process starts."""

    command: list[str]
    variables: dict[str, str]
    scratch: "Scratch | None" = None
    """Close it once the process has ended."""


class Sandbox:
    """Limits of the environment's process. Its files are not confined."""

    name = "limits"
    wrapping = 0
    """Number of the sandbox's own processes, parents of the environment's."""
    confines_files = False

    def __init__(self, config: SandboxConfig, missing: str = "") -> None:
        """Take the limits from `config`; `missing` says why a stronger sandbox is not used."""
        self.config = config
        self.missing = missing

    def __str__(self) -> str:
        confined = " and ".join(self.confined()) or "nothing"
        return f"{self.name}: {'; '.join([f'confines {confined}', *self.gaps()])}"

    def confined(self) -> Iterator[str]:
        """Yield what is confined, and by which mechanism."""
        if sys.platform == "linux":
            yield "the node's memory (not dumpable)"
            yield from self._confined_calls()

    def _confined_calls(self) -> Iterator[str]:
        if sys.platform == "linux" and platform.machine() in MACHINES:
            sockets = "" if self.config.network else "sockets, "
            yield f"{sockets}processes, scheduling (filter of system calls)"

    def gaps(self) -> Iterator[str]:
        """Yield descriptions of the gaps in the confinement."""
        yield from self._gaps_of_calls()
        why = f" ({self.missing})" if self.missing else ""
        yield f"files are not confined, so they can read this node's key{why}"

    def _gaps_of_calls(self) -> Iterator[str]:
        if sys.platform != "linux":
            yield "only Linux keeps an environment from sockets, other processes and more memory"
        elif platform.machine() not in MACHINES:
            yield f"sockets and processes of environments are not confined on {platform.machine()}"
        elif self.config.network:
            yield "sockets are allowed (sandbox.network)"

    def refusal(self, environment: str) -> str:
        """Explain why this environment must not run here without its owner's word; empty if it may."""
        if not self.missing or environment in BUNDLED:
            return ""
        return (
            f"nothing here keeps its code from your files and this node's key ({self.missing}): mend that, or, "
            f"if you trust it, let {OWN_WORD}"
        )

    def start(self, program: Sequence[str], needed: Iterable[Path] = ()) -> Start:
        """Prepare to start `program`, which reads the files and directories `needed`. Raises OSError."""
        return Start([*CONFINE, *program], self._variables({}))

    def _variables(self, more: Mapping[str, Any]) -> dict[str, str]:
        """Return the environment variables of the process, for confine() and leave_with_parent()."""
        limits = self.config.model_dump(include={"network", "processes", "memory_gib"})
        settings = json.dumps({**limits, **more})
        variables = {SETTINGS_VARIABLE: settings, PARENT_VARIABLE: str(os.getpid())}
        return variables if self.config.network else {**variables, **OFFLINE}

    def exit_code(self, code: int | None) -> int | None:
        """Convert the command's exit code to the environment's, negative for a signal."""
        return code

    def family(self, pid: int) -> list[int]:
        """List process `pid` and its descendants; not many more of these than it may have. Linux only."""
        return [pid, *_descendants(pid, self.config.processes + self.wrapping + MARGIN)]

    def overrun(self, family: Sequence[int]) -> str:
        """Explain why an environment's processes have to be ended; empty within their limits.

        Counts the memory of all; pages that forks share count once.
        """
        config = self.config
        if len(family) - 1 > config.processes + self.wrapping:
            return (
                f"the environment's code has more than {config.processes} processes running: mend it, or raise "
                "sandbox.processes"
            )
        most = config.memory_gib * GIB
        if sum(map(_resident, family)) > most and sum(map(_proportional, family)) > most:
            return (
                f"the environment's processes hold more than {config.memory_gib:g} GiB: mend it, or raise "
                "sandbox.memory_gib"
            )
        return ""


class Landlock(Sandbox):
    """Sandbox with rules of the kernel: few files, to be read; writes go to a scratch directory."""

    name = "landlock"
    confines_files = True

    def __init__(
        self, config: SandboxConfig, version: int, hidden: Iterable[Path] = (), lacking: str = ""
    ) -> None:
        """Use Landlock of that version.

        Paths below `hidden` are not shown even if one above them is. `lacking`: why it is not bubblewrap.
        """
        super().__init__(config)
        self._version = version
        self._hidden = _named(hidden)
        self._lacking = lacking

    def confined(self) -> Iterator[str]:
        """See Sandbox."""
        confined = ["files", "the node's memory"]
        if self._version >= SCOPES_SINCE:
            confined.append("signals")
        if self._version >= TCP_SINCE and not self.config.network:
            confined.append("TCP")
        yield f"{', '.join(confined)} (Landlock {self._version})"
        yield from self._confined_calls()

    def gaps(self) -> Iterator[str]:
        """See Sandbox."""
        yield from self._gaps_of_calls()
        if self._version < SCOPES_SINCE and self.config.processes:
            yield "it can signal other programs of this user (Landlock 6, Linux 6.12, prevents that)"
        why = f" ({self._lacking})" if self._lacking else ""
        yield f"names of files and programs are not hidden{why}"

    def start(self, program: Sequence[str], needed: Iterable[Path] = ()) -> Start:
        """See Sandbox."""
        scratch = Scratch()
        try:
            shown = list(_shown(self.config, needed))
            files = {
                "read": self._files(shown),
                "write": [str(scratch.path)],
                # what Python does not see in a directory it does not import
                "list": [str(Path(root[0]).resolve())],
            }
            rules = {"landlock": self._version, "files": files, "file_bytes": SCRATCH}
            variables = self._variables(rules)
            return Start([*CONFINE, *program], variables | scratch.furnish(shown), scratch)
        except BaseException:  # also when interrupted: the folder would stay
            scratch.close()
            raise

    def _files(self, shown: Iterable[Path]) -> list[str]:
        """Return the paths to be read, without those below others."""
        system = [Path(path) for path in (*SYSTEM, *LINKS) if Path(path).exists()]
        # what is not in bubblewrap is shut here, and code that looks for its settings takes that for an error
        system += [path for path in Path("/etc").iterdir() if _is_for_everybody(path)]
        readable: set[Path] = set()
        for path in sorted(
            {path.resolve() for path in system} | {path.resolve() for path in shown}
        ):
            if not readable.intersection((path, *path.parents)):
                readable.update(_without(path, self._hidden))
        return [str(path) for path in sorted(readable)]


class Bubblewrap(Sandbox):
    """Sandbox with namespaces of `bwrap`: few files, read-only; no network, no other process."""

    name = "bubblewrap"
    wrapping = 2
    """bwrap outside, and bwrap as the namespace's first process, whose end ends all others."""
    confines_files = True

    def __init__(self, config: SandboxConfig, program: str, hidden: Iterable[Path] = ()) -> None:
        """Use the program bwrap at the path `program`.

        Paths below `hidden` are not shown even if one above them is.
        """
        super().__init__(config)
        self._program = program
        self._hidden = _named(hidden)

    def confined(self) -> Iterator[str]:
        """See Sandbox."""
        yield "files, other programs, the node's memory (namespaces of bubblewrap)"
        yield from self._confined_calls()

    def gaps(self) -> Iterator[str]:
        """See Sandbox."""
        yield from self._gaps_of_calls()

    def start(self, program: Sequence[str], needed: Iterable[Path] = ()) -> Start:
        """See Sandbox. The process cannot see its parent; bwrap ends it with the node."""
        options = ["--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]
        if self.config.network:
            options.append("--share-net")
        options += ["--proc", "/proc", "--dev", "/dev", *_scratch(Path("/dev/shm"), SHARED)]
        view = self._view(needed)
        for path in sorted(view, key=lambda path: len(path.parts)):  # parent directories come first
            options += view[path]
        here = str(Path.cwd())
        options += ["--dir", here]
        for path in ("/dev", *map(str, self._hidden & view.keys()), "/"):
            options += ["--remount-ro", path]
        variables = self._variables({})
        del variables[PARENT_VARIABLE]
        return Start(
            [self._program, *options, "--chdir", here, "--", *CONFINE, *program], variables
        )

    def exit_code(self, code: int | None) -> int | None:
        """See Sandbox."""
        return SIGNALLED - code if code is not None and code > SIGNALLED else code

    def _view(self, needed: Iterable[Path]) -> dict[Path, list[str]]:
        """Return the options that mount each path."""
        writable = _writable()
        above = _above(writable)
        view = {path: _scratch(path, SCRATCH) for path in writable} | _system()
        for path in _shown(self.config, needed):
            real = path.resolve()
            view[real] = ["--ro-bind", str(real), str(real)]
            # inside a shown directory the link exists, and its target is shown
            if not view.keys() & {path, *path.parents} - above:
                view[path] = ["--ro-bind", str(real), str(path)]
        for path in self._hidden:
            if path.is_dir() and view.keys() & {path, *path.parents} - above:
                view[path] = ["--tmpfs", str(path)]
        return view


def choose(
    config: SandboxConfig, hidden: Iterable[Path] = (), *, landlock: int | None = None
) -> Sandbox:
    """Return the strongest sandbox of `config` that works here; it shows nothing below `hidden`.

    `landlock`: version to use, that of this kernel unless it is given; 0: none. Raises UsageError if a sandbox
    that is requested by name does not work.
    """
    for path in map(expand_home, config.readable):
        if not path.exists():
            raise UsageError(f"sandbox.readable: {path} does not exist")
        if {path.absolute(), path.resolve()} & _above(_writable()):
            raise UsageError(
                f"sandbox.readable: {path} has the home directory or {TEMPORARY} in it, which are never shown: "
                "name the files or directories below it that code may read"
            )
    if config.type == "limits":
        return Sandbox(config)
    hidden = list(hidden)
    lacking = ""
    if config.type != "landlock":
        sandbox, lacking = _bubblewrap(config, hidden)
        if sandbox is not None:
            return sandbox
    if config.type == "bubblewrap":
        raise UsageError(f'sandbox.type is "bubblewrap", and {lacking}, or set it to "auto"')
    version = landlock_version() if landlock is None else landlock
    confined = Landlock(config, version, hidden, lacking)
    failure = _failure(confined) if version else ""
    if version and not failure:
        return confined
    missing = f"Landlock does not work here ({failure})" if failure else NO_LANDLOCK
    if config.type == "landlock":
        raise UsageError(
            f'sandbox.type is "landlock", and {missing}: use a system that has it, or set it to "auto"'
        )
    return Sandbox(config, f"{missing}, and {lacking}")


def _bubblewrap(config: SandboxConfig, hidden: list[Path]) -> tuple[Sandbox | None, str]:
    """Return bubblewrap if it works here, else None with what to do about it."""
    program = shutil.which(BWRAP)
    if program is None:
        return None, MISSING
    sandbox = Bubblewrap(config, program, hidden)
    if failure := _failure(sandbox):
        return None, f"bubblewrap does not work here ({failure}): {BROKEN}"
    return sandbox, ""


def python_path() -> str:
    """Return PYTHONPATH for the process, so that it can import the same modules."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


def _failure(sandbox: Sandbox) -> str:
    """Start Python in a sandbox; return the reason if that fails, else an empty string."""
    program = [sys.executable, "-P", "-c", f"import {__package__}"]
    scratch: Scratch | None = None
    try:
        start = sandbox.start(program)
        scratch = start.scratch
        ran = subprocess.run(
            start.command,
            env={**os.environ, **start.variables, "PYTHONPATH": python_path()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return one_line(error)
    finally:
        if scratch is not None:
            scratch.close()
    lines = ran.stderr.decode(errors="replace").strip().splitlines()
    return (lines or [f"exit code {ran.returncode}"])[-1] if ran.returncode else ""


# -- a scratch directory ---------------------------------------------------------------------------


class Scratch:
    """A directory for the files of one process, in place of the home and /tmp: close() removes it.

    It is locked while this node lives. Those that a killed node left behind are removed with the next one.
    """

    def __init__(self, place: Path | None = None) -> None:
        """Make it below `place`, the system's place of temporary files by default. Raises OSError."""
        place = Path(tempfile.gettempdir()) if place is None else place
        for stale in place.glob(f"{SCRATCH_PREFIX}*"):
            _remove_unlocked(stale)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=place)).resolve()
            with suppress(OSError):  # another node took it for one left behind
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self.path.exists():
                    return
                os.close(self._lock)

    def furnish(self, shown: Iterable[Path]) -> dict[str, str]:
        """Link what is shown of the home and of caches of data sets into it; return variables that name it."""
        home, temporary = self.path / "home", self.path / "tmp"
        cache = home / ".cache"
        hub = cache / "huggingface"
        fetched, prepared = _hub_caches()
        copies = {home_directory(): home, fetched: hub / "hub", prepared: hub / "datasets"}
        for directory in (temporary, *copies.values()):
            directory.mkdir(parents=True)
        for path in shown:
            for real, copy in copies.items():
                if real in path.parents:
                    _link(copy / path.relative_to(real), path)
        return {
            "HOME": str(home),
            "TMPDIR": str(temporary),
            "XDG_CACHE_HOME": str(cache),
            "HF_HOME": str(hub),
            "HF_HUB_CACHE": str(hub / "hub"),
            "HF_DATASETS_CACHE": str(hub / "datasets"),
        }

    def overrun(self, most: int = MOST_FILES) -> str:
        """Explain why its process has to be ended; empty with at most SCRATCH bytes in `most` files."""
        nbytes = files = 0
        for directory, _, names in os.walk(self.path):
            for name in names:
                with suppress(OSError):  # gone since
                    nbytes += os.lstat(os.path.join(directory, name)).st_blocks * 512
            files += 1 + len(names)
            if nbytes > SCRATCH or files > most:
                return f"the environment wrote more than {SCRATCH // MIB} MiB or {most:,} files: mend it"
        return ""

    def close(self) -> None:
        """Remove it."""
        _remove(self.path)
        os.close(self._lock)


def _link(place: Path, target: Path) -> None:
    if not any(
        ancestor.is_symlink() for ancestor in (place, *place.parents)
    ):  # else it shows already
        place.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            place.symlink_to(target.resolve())


def _remove_unlocked(directory: Path) -> None:
    """Remove a scratch directory of this user whose node has ended."""
    try:
        if directory.is_symlink() or directory.stat().st_uid != os.getuid():
            return
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(directory)
    except OSError:  # its node lives
        pass
    finally:
        os.close(lock)


def _remove(directory: Path) -> None:
    """Remove a directory in which nothing runs any more, whatever modes its own were made with."""
    for above, names, _ in os.walk(directory):
        for name in names:
            path = os.path.join(above, name)
            if not os.path.islink(path):
                with suppress(OSError):
                    os.chmod(path, 0o700)
    remove_own(directory)


# -- paths that are shown ----------------------------------------------------------------------------


def _named(paths: Iterable[Path]) -> set[Path]:
    """Return each path as it is named and as it is."""
    return {form for path in paths for form in (path.absolute(), path.resolve())}


def _shown(config: SandboxConfig, needed: Iterable[Path]) -> Iterator[Path]:
    """Yield the paths to be read: Python, this package, data sets, `readable` and `needed`."""
    above = _above(_writable())
    shown = [Path(sys.prefix), Path(sys.base_prefix), *map(Path, sys.path)]
    shown += [Path(root[0]).resolve() / part for part in PARTS]
    shown += [*_data_sets(), *map(expand_home, config.readable), *needed]
    for path in sorted(path.absolute() for path in shown if path.exists()):
        if not {path, path.resolve()} & above:
            yield path


def _without(path: Path, hidden: set[Path]) -> Iterator[Path]:
    """Yield `path`, or if a hidden directory is in it what lies beside that."""
    if path in hidden:
        return
    if not any(path in other.parents for other in hidden):
        yield path
    elif path.is_dir() and not path.is_symlink():
        for child in path.iterdir():
            yield from _without(child, hidden)


def _scratch(path: Path, nbytes: int) -> list[str]:
    return ["--size", str(nbytes), "--tmpfs", str(path)]


def _system() -> dict[Path, list[str]]:
    """Return the mounts of system programs and libraries, and of their files in /etc; none is secret."""
    view = {Path(path): ["--ro-bind", path, path] for path in SYSTEM if Path(path).exists()}
    for path in map(Path, LINKS):
        if path.is_symlink():
            view[path] = ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            view[path] = ["--ro-bind", str(path), str(path)]
    return view


def _writable() -> set[Path]:
    """Return the directories that start empty and are writable: /tmp, home, hub caches elsewhere."""
    home = home_directory()
    elsewhere = {path for path in _hub_caches() if home not in path.parents}
    return {TEMPORARY, home, *elsewhere} - {Path("/")}


def _is_for_everybody(path: Path) -> bool:
    """Return whether a path is a file that every user of the machine may read."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) and bool(mode & stat.S_IROTH)


def _above(paths: Iterable[Path]) -> set[Path]:
    """Return these directories and all their parents."""
    named = {form for path in paths for form in (path, path.resolve())}
    return {*named, *(parent for path in named for parent in path.parents)}


def _hub_caches() -> tuple[Path, Path]:
    """Return Hugging Face's cache directories of downloads and of prepared data sets."""
    given = os.environ.get
    cache = Path(given("XDG_CACHE_HOME") or home_directory() / ".cache", "huggingface")
    cache = Path(given("HF_HOME") or cache)
    fetched = Path(given("HF_HUB_CACHE") or cache / "hub")
    return fetched.absolute(), Path(given("HF_DATASETS_CACHE") or cache / "datasets").absolute()


def _data_sets() -> Iterator[Path]:
    """Yield the owner's data sets and those in the caches, without the hub's token and models."""
    yield home_directory() / OWN_DATA
    fetched, prepared = _hub_caches()
    yield from fetched.glob("datasets--*")
    # one by one, as the library writes its locks beside them
    yield from (file.parent for file in prepared.glob("*/*/*/*/dataset_info.json"))


# -- watching from outside -------------------------------------------------------------------------


def cpu_clock(pid: int) -> float:
    """Return the CPU seconds of a process, exact while it runs; nan, which equals nothing, if it has none.

    It takes a microsecond, where /proc takes a hundred.
    """
    try:
        return time.clock_gettime(~pid << 3 | 2)  # the id that clock_getcpuclockid() gives
    except OSError:
        return math.nan


def _descendants(pid: int, most: int) -> list[int]:
    """List the process ids of descendants, up to about `most`; none without /proc."""
    pids: list[int] = []
    unvisited = [pid]
    while unvisited and len(pids) < most:
        threads = f"/proc/{unvisited.pop()}/task"
        with suppress(OSError):  # the process has ended
            for thread in os.listdir(threads):
                # by hand, as it is read four times a second; a thread that has ended has no file
                with suppress(OSError), open(f"{threads}/{thread}/children", "rb") as file:
                    children = [int(word) for word in file.read().split()]
                    pids += children
                    unvisited += children
    return pids


def _resident(pid: int) -> int:
    """Return a process's memory without files, bytes; 0 if it has ended."""
    return _held(pid, "status", ("RssAnon", "RssShmem")) or 0


def _proportional(pid: int) -> int:
    """Return memory as _resident(), with shared pages divided among processes; far slower."""
    size = _held(pid, "smaps_rollup", ("Pss_Anon", "Pss_Shmem"))
    return _resident(pid) if size is None else size  # a process may deny access to its pages


def _held(pid: int, name: str, kinds: Iterable[str]) -> int | None:
    """Sum the `kinds` of memory in /proc/PID/NAME, bytes; None if the file or one of them is missing."""
    try:
        with open(f"/proc/{pid}/{name}", encoding="ascii", errors="replace") as file:
            text = file.read()
    except OSError:
        return None
    sizes = [re.search(rf"^{kind}:\s*(\d+) kB", text, re.MULTILINE) for kind in kinds]
    # one is missing with an older kernel, or for a process that has ended
    return None if None in sizes else sum(int(size[1]) << 10 for size in sizes if size)
