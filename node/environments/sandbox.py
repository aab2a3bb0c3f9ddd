"""Confine the process of an environment: no sockets, no other processes, bounded memory, nobody to signal.

Linux filters system calls (seccomp), which needs no privilege and holds for root, too, where RLIMIT_NPROC does
not. Other systems have none of it: holds() says so. Invariant: enter() runs before any code of an environment
and cannot be undone from inside, as a filter is inherited and never removed.

What the code may read and write in the file system is not limited beyond the rights of its user.
"""

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

from ..config.sandbox import SandboxConfig

SANDBOX_VARIABLE = "PRIMERL_ENVIRONMENT_SANDBOX"
"""Holds a SandboxConfig as JSON for the process of an environment."""
GIB = 1 << 30
MARGIN = 64
"""Descendants that are counted beyond the limit, before the rest of a fork bomb is left uncounted."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""Without sockets: data sets come from the cache at once, not after attempts to reach a hub."""

PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 22, 36, 38
SECCOMP_MODE_FILTER = 2
"""<linux/prctl.h>, <linux/seccomp.h>"""
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in struct seccomp_data; of an argument the low word, on little-endian machines."""
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_CLONE_THREAD = 0x00010000
_X32 = 0x40000000
"""System calls of the x32 ABI, which has numbers of its own on x86_64."""

_NAMES = (
    "clone clone3 fork vfork socket kill tgkill prlimit64 tkill rt_sigqueueinfo rt_tgsigqueueinfo "
    "pidfd_send_signal pidfd_getfd ptrace process_vm_readv process_vm_writev io_uring_setup setsid setpgid "
    "unshare setns mount umount2 bpf perf_event_open keyctl add_key request_key init_module finit_module "
    "reboot"
).split()
_X86_64 = (
    "56 435 57 58 41 62 234 302 200 129 297 424 438 101 310 311 425 112 109 272 308 165 166 321 298 250 248 "
    "249 175 313 169"
)
_AARCH64 = (
    "220 435 - - 198 129 131 261 130 138 240 424 438 117 270 271 425 157 154 97 268 40 39 280 241 219 217 "
    "218 105 273 142"
)
_SYSTEMS: dict[str, tuple[int, str]] = {
    "x86_64": (0xC000003E, _X86_64),
    "aarch64": (0xC00000B7, _AARCH64),
}
"""Machine -> its AUDIT_ARCH and the numbers of _NAMES there, from the kernel's headers; - where it has none."""
_ALWAYS_REFUSED = _NAMES[_NAMES.index("tkill") :]
"""What reaches into other processes, leaves the process group, or is the kernel's own business."""

_Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, constant: struct sock_filter."""


def holds() -> str:
    """What of a sandbox this system cannot enforce, for the operator; empty where all of it holds."""
    if sys.platform != "linux":
        return "only Linux keeps an environment from sockets, other processes and more memory"
    if platform.machine() not in _SYSTEMS:
        return f"sockets and processes of environments are not confined on {platform.machine()}"
    return ""


def enter(config: SandboxConfig) -> None:
    """Confine this process, for good. Raises OSError where the system has the means but refuses them."""
    _limit(resource.RLIMIT_CORE, 0)
    if sys.platform != "linux":
        return
    _limit(resource.RLIMIT_DATA, int(config.memory_gib * GIB))
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # no descendant gets out of the sight of overrun()
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    if platform.machine() in _SYSTEMS:
        _install(_filter(config, os.getpid()))


def overrun(pid: int, config: SandboxConfig) -> str:
    """Why the environment with this process id has to be ended; empty while it keeps its limits.

    Sees Linux alone. Its process and descendants are counted, and the memory that they hold.
    """
    found = _descendants(pid, config.processes + MARGIN)
    if len(found) > config.processes:
        return (
            f"the environment's code has more than {config.processes} processes running: mend it, or raise "
            "sandbox.processes"
        )
    if found and sum(map(_resident, [pid, *found])) > config.memory_gib * GIB:
        return (
            f"the environment's processes hold more than {config.memory_gib:g} GiB: mend it, or raise "
            "sandbox.memory_gib"
        )
    return ""


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


# -- the filter ------------------------------------------------------------------------------------


def _filter(config: SandboxConfig, pid: int) -> list[_Instruction]:
    """The program that decides about each system call of the process `pid`."""
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
        # a C library that finds no clone3 makes its threads by clone, whose flags can be read here
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
    """Let a system call through if its first argument is one of `values`."""
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
    """Process ids of at most `most` children, grandchildren and so on; none where there is no /proc."""
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
    """Bytes of memory that a process holds by itself; 0 if it has ended."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")
