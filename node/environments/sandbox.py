"""Confine the process of an environment: its files, sockets, processes and memory.

Sandbox limits the process, on every Linux: seccomp filters its system calls, which needs no privilege and holds
for root, too, where RLIMIT_NPROC does not. Files are not confined. Bubblewrap adds namespaces, made by the
program of that name: the process sees some of the file system, read-only, and no other process. Invariants:
- enter() runs before any code of an environment and cannot be undone from inside, as a filter is inherited and
  never removed;
- bubblewrap shows only the paths that are named here: of a home or a node's directory only the needed files.
"""

import ctypes
import errno
import os
import platform
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ... import __path__ as root
from ..config.paths import expand_home
from ..config.sandbox import SandboxConfig
from ..ops.errors import UsageError, one_line
from ..process.spawn import PARENT_VARIABLE

SANDBOX_VARIABLE = "PRIMERL_ENVIRONMENT_SANDBOX"
"""Holds a SandboxConfig as JSON for the process of an environment."""
MIB, GIB = 1 << 20, 1 << 30
MARGIN = 64
"""Descendants counted beyond the limit; the rest of a fork bomb is not counted."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""Variables of a process without sockets: data sets come from the cache, without tries at a hub."""

BWRAP = "bwrap"
MISSING = "bubblewrap is not installed: install it (Debian, Ubuntu: apt install bubblewrap)"
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
"""Data sets of the machine's owner, below the home directory; see tasksets/math_env.py."""
LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
"""System directories, on most systems links into /usr."""
SYSTEM = (
    "/usr /nix/store /gnu/store /etc/alternatives /etc/group /etc/hosts /etc/ld.so.cache /etc/localtime "
    "/etc/nsswitch.conf /etc/passwd /etc/pki/ca-trust /etc/pki/tls/certs /etc/resolv.conf /etc/ssl/certs"
).split()
SIGNALLED = 128
"""Exit codes of bwrap above this one are this + the signal that ended the process."""

PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 22, 36, 38
SECCOMP_MODE_FILTER = 2
"""<linux/prctl.h>, <linux/seccomp.h>"""
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in struct seccomp_data; that of an argument is of its low word, little-endian."""
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_CLONE_THREAD = 0x00010000
_X32 = 0x40000000
"""First number of the x32 ABI's system calls on x86_64."""

_NAMES = (
    "clone clone3 fork vfork socket kill tgkill prlimit64 tkill rt_sigqueueinfo rt_tgsigqueueinfo "
    "pidfd_send_signal pidfd_getfd ptrace process_vm_readv process_vm_writev io_uring_setup setsid setpgid "
    "unshare setns mount umount2 bpf perf_event_open keyctl add_key request_key init_module finit_module "
    "reboot memfd_create memfd_secret shmget"
).split()
_X86_64 = (
    "56 435 57 58 41 62 234 302 200 129 297 424 438 101 310 311 425 112 109 272 308 165 166 321 298 250 248 "
    "249 175 313 169 319 447 29"
)
_AARCH64 = (
    "220 435 - - 198 129 131 261 130 138 240 424 438 117 270 271 425 157 154 97 268 40 39 280 241 219 217 "
    "218 105 273 142 279 447 194"
)
_SYSTEMS: dict[str, tuple[int, str]] = {
    "x86_64": (0xC000003E, _X86_64),
    "aarch64": (0xC00000B7, _AARCH64),
}
"""Machine -> AUDIT_ARCH and the numbers of _NAMES, from the kernel's headers; - for none."""
_ALWAYS_REFUSED = _NAMES[_NAMES.index("tkill") :]
"""System calls that access other processes, leave the process group, administer the kernel, or make memory that
belongs to no process."""

_Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, constant: struct sock_filter."""


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
        return ": ".join(filter(None, (self.name, "; ".join(self.gaps()))))

    def gaps(self) -> Iterator[str]:
        """Yield descriptions of the gaps in the confinement."""
        if sys.platform != "linux":
            yield "only Linux keeps an environment from sockets, other processes and more memory"
        elif platform.machine() not in _SYSTEMS:
            yield f"sockets and processes of environments are not confined on {platform.machine()}"
        elif self.config.network:
            yield "sockets are allowed (sandbox.network)"
        if not self.confines_files:
            why = f" ({self.missing})" if self.missing else ""
            yield f"files are not confined, so they can read this node's key{why}"

    def command(self, program: Sequence[str], needed: Iterable[Path] = ()) -> list[str]:
        """Make the command that runs `program`, which reads the files and directories `needed`."""
        return list(program)

    def variables(self) -> dict[str, str]:
        """Return the environment variables of the process, for enter() and leave_with_parent()."""
        told = self.config.model_dump_json(include=set(SandboxConfig.model_fields))
        found = {SANDBOX_VARIABLE: told, PARENT_VARIABLE: str(os.getpid())}
        return found if self.config.network else {**found, **OFFLINE}

    def exit_code(self, code: int | None) -> int | None:
        """Convert the command's exit code to the environment's, negative for a signal."""
        return code

    def overrun(self, pid: int) -> str:
        """Explain why the environment of process `pid` has to be ended; empty within its limits.

        Linux only. Counts all descendants and their memory; pages that forks share count once.
        """
        config = self.config
        found = _descendants(pid, config.processes + self.wrapping + MARGIN)
        if len(found) > config.processes + self.wrapping:
            return (
                f"the environment's code has more than {config.processes} processes running: mend it, or raise "
                "sandbox.processes"
            )
        most = config.memory_gib * GIB
        if (
            sum(map(_resident, [pid, *found])) > most
            and sum(map(_proportional, [pid, *found])) > most
        ):
            return (
                f"the environment's processes hold more than {config.memory_gib:g} GiB: mend it, or raise "
                "sandbox.memory_gib"
            )
        return ""


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
        self._hidden = {one for path in hidden for one in (path.absolute(), path.resolve())}

    def command(self, program: Sequence[str], needed: Iterable[Path] = ()) -> list[str]:
        """See Sandbox."""
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
        return [self._program, *options, "--chdir", here, "--", *program]

    def variables(self) -> dict[str, str]:
        """See Sandbox. The process cannot see its parent; bwrap ends it with the node."""
        found = super().variables()
        del found[PARENT_VARIABLE]
        return found

    def exit_code(self, code: int | None) -> int | None:
        """See Sandbox."""
        return SIGNALLED - code if code is not None and code > SIGNALLED else code

    def failure(self) -> str:
        """Start Python in the sandbox; return the reason if that fails, else an empty string."""
        program = [sys.executable, "-P", "-c", f"import {__package__}"]
        try:
            ran = subprocess.run(
                self.command(program),
                env={**os.environ, **self.variables(), "PYTHONPATH": python_path()},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=PROBE_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return one_line(error)
        said = ran.stderr.decode(errors="replace").strip().splitlines()
        return (said or [f"exit code {ran.returncode}"])[-1] if ran.returncode else ""

    def _view(self, needed: Iterable[Path]) -> dict[Path, list[str]]:
        """Return the options that mount each path."""
        writable = _writable()
        above = _above(writable)
        view = {path: _scratch(path, SCRATCH) for path in writable} | _system()
        shown = [Path(sys.prefix), Path(sys.base_prefix), *map(Path, sys.path)]
        shown += [Path(root[0]).resolve() / part for part in PARTS]
        shown += [*_data_sets(), *map(expand_home, self.config.readable), *needed]
        for path in sorted(path.absolute() for path in shown if path.exists()):
            if path in above or (real := path.resolve()) in above:
                continue
            view[real] = ["--ro-bind", str(real), str(real)]
            # inside a shown directory the link exists, and its target is shown
            if not view.keys() & {path, *path.parents} - above:
                view[path] = ["--ro-bind", str(real), str(path)]
        for path in self._hidden:
            if path.is_dir() and view.keys() & {path, *path.parents} - above:
                view[path] = ["--tmpfs", str(path)]
        return view


def choose(config: SandboxConfig, hidden: Iterable[Path] = ()) -> Sandbox:
    """Return the strongest sandbox of `config` that works here; it shows nothing below `hidden`.

    Raises UsageError if a sandbox that is requested by name does not work.
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
    missing = MISSING
    if (program := shutil.which(BWRAP)) is not None:
        bubblewrap = Bubblewrap(config, program, hidden)
        if not (failure := bubblewrap.failure()):
            return bubblewrap
        missing = f"bubblewrap does not work here ({failure}): {BROKEN}"
    if config.type == "bubblewrap":
        raise UsageError(f'sandbox.type is "bubblewrap", and {missing}, or set it to "auto"')
    return Sandbox(config, missing)


def python_path() -> str:
    """Return PYTHONPATH for the process, so that it can import the same modules."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


def enter(config: SandboxConfig) -> None:
    """Confine this process irrevocably. Raises OSError if the system refuses a call."""
    _limit(resource.RLIMIT_CORE, 0)
    if sys.platform != "linux":
        return
    _limit(resource.RLIMIT_DATA, int(config.memory_gib * GIB))
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # keeps orphaned descendants visible to overrun()
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    if platform.machine() in _SYSTEMS:
        _install(_filter(config, os.getpid()))


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(kind, (most, most))


def _prctl(option: int, *arguments: object) -> None:
    filled = [*arguments, *(ctypes.c_ulong(0) for _ in range(4 - len(arguments)))]
    if ctypes.CDLL(None, use_errno=True).prctl(option, *filled):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


# -- paths that bubblewrap shows -----------------------------------------------------------------


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
    home = Path.home()
    elsewhere = {path for path in _hub_caches() if home not in path.parents}
    return {TEMPORARY, home, *elsewhere} - {Path("/")}


def _above(paths: Iterable[Path]) -> set[Path]:
    """Return these directories and all their parents."""
    named = {one for path in paths for one in (path, path.resolve())}
    return {*named, *(parent for path in named for parent in path.parents)}


def _hub_caches() -> tuple[Path, Path]:
    """Return Hugging Face's cache directories of downloads and of prepared data sets."""
    given = os.environ.get
    cache = Path(given("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface")
    cache = Path(given("HF_HOME") or cache)
    fetched = Path(given("HF_HUB_CACHE") or cache / "hub")
    return fetched.absolute(), Path(given("HF_DATASETS_CACHE") or cache / "datasets").absolute()


def _data_sets() -> Iterator[Path]:
    """Yield the owner's data sets and those in the caches, without the hub's token and models."""
    yield Path.home() / OWN_DATA
    fetched, made = _hub_caches()
    yield from fetched.glob("datasets--*")
    # one by one, as the library writes its locks beside them
    yield from (file.parent for file in made.glob("*/*/*/*/dataset_info.json"))


# -- the filter ------------------------------------------------------------------------------------


def _filter(config: SandboxConfig, pid: int) -> list[_Instruction]:
    """Make the seccomp program for the system calls of the process `pid`."""
    architecture, numbers = _SYSTEMS[platform.machine()]
    known = {
        name: int(number)
        for name, number in zip(_NAMES, numbers.split(), strict=True)
        if number != "-"
    }
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        _refuse(errno.EPERM),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        _refuse(errno.EPERM),
    ]
    refused = list(_ALWAYS_REFUSED)
    if not config.network:
        refused.append("socket")
    if not config.processes:
        refused += ["fork", "vfork"]
        # without clone3 a C library makes threads by clone, whose flags the filter can read
        program += [(_EQUAL, 0, 1, known["clone3"]), _refuse(errno.ENOSYS)]
        program += [(_EQUAL, 0, 4, known["clone"]), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
        program += [(_ANY_BIT, 1, 0, _CLONE_THREAD), _refuse(errno.EPERM), (_RETURN, 0, 0, _ALLOW)]
        program += _only(known["kill"], [pid, 0, (-pid) & 0xFFFFFFFF])
        program += _only(known["tgkill"], [pid])
    program += _only(known["prlimit64"], [pid, 0])
    for name in refused:
        if name in known:
            program += [(_EQUAL, 0, 1, known[name]), _refuse(errno.EPERM)]
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def _refuse(number: int) -> _Instruction:
    return (_RETURN, 0, 0, _REFUSE | number)


def _only(number: int, values: Sequence[int]) -> list[_Instruction]:
    """Allow a system call only if its first argument is one of `values`."""
    count = len(values)
    choices = [(_EQUAL, count - place, 0, value) for place, value in enumerate(values)]
    return [
        (_EQUAL, 0, count + 3, number),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        *choices,
        _refuse(errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _install(program: Sequence[_Instruction]) -> None:
    body = b"".join(struct.pack("HBBI", *one) for one in program)
    held = ctypes.create_string_buffer(body, len(body))
    # struct sock_fprog: a count, and a pointer at its own alignment
    head = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(held)))
    _prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), ctypes.byref(head))


# -- watching from outside -------------------------------------------------------------------------


def _descendants(pid: int, most: int) -> list[int]:
    """List the process ids of descendants, up to about `most`; none without /proc."""
    found: list[int] = []
    left = [pid]
    while left and len(found) < most:
        for file in Path(f"/proc/{left.pop()}/task").glob("*/children"):
            try:
                children = [int(word) for word in file.read_text().split()]
            except OSError:  # the thread has ended
                continue
            found += children
            left += children
    return found


def _resident(pid: int) -> int:
    """Return a process's memory without files, bytes; 0 if it has ended."""
    return _held(pid, "status", ("RssAnon", "RssShmem")) or 0


def _proportional(pid: int) -> int:
    """Return memory as _resident(), with shared pages divided among processes; far slower."""
    found = _held(pid, "smaps_rollup", ("Pss_Anon", "Pss_Shmem"))
    return _resident(pid) if found is None else found  # a process may deny access to its pages


def _held(pid: int, name: str, kinds: Iterable[str]) -> int | None:
    """Sum the `kinds` of memory in /proc/PID/NAME, bytes; None if the file or one of them is missing."""
    try:
        lines = Path(f"/proc/{pid}/{name}").read_text().splitlines()
    except OSError:
        return None
    held = dict(line.split(":", 1) for line in lines if ":" in line)
    try:
        return sum(int(held[kind].split()[0]) << 10 for kind in kinds)
    except KeyError:  # an older kernel, or a process that has ended
        return None
