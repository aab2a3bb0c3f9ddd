"""Confine this process, then become the program of an environment: `python -I -S confine.py PROGRAM ...`.

The node starts this file (sandbox.py), with its settings in a variable. Seccomp filters system calls, Landlock
files, both without any privilege. Invariants:
- only Python's own library is imported: numpy and others start threads, which neither filter nor Landlock would
  hold, and the program begins as a new image that has one thread;
- nothing of it can be undone from inside: filter and rules are inherited and never removed, capabilities lost;
- what cannot be confined as asked ends the process, before the program begins.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SETTINGS_VARIABLE = "PRIMERL_ENVIRONMENT_SANDBOX"
"""Holds the settings of confine() as JSON."""
GIB = 1 << 30

PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 22, 36, 38
SECCOMP_MODE_FILTER = 2
CAPABILITIES_3 = 0x20080522
"""<linux/prctl.h>, <linux/seccomp.h>, <linux/capability.h>"""


def main() -> None:
    """Confine this process by the settings of SETTINGS_VARIABLE, and run the program of the command line."""
    confine(json.loads(os.environ[SETTINGS_VARIABLE]))
    os.execv(sys.argv[1], sys.argv[1:])


def confine(settings: Mapping[str, Any]) -> None:
    """Confine this process irrevocably. Raises OSError if the system refuses a call.

    Of `settings`, `network`, `processes` and `memory_gib` are SandboxConfig's. `files`, if there, has lists of
    paths: those to `read`, those to `write` below, and directories of which only names are to be seen (`list`).
    Everything else is shut by what version `landlock` knows, and a file holds `file_bytes` at most.
    """
    _limit(resource.RLIMIT_CORE, 0)
    if sys.platform != "linux":
        return
    _limit(resource.RLIMIT_DATA, int(settings["memory_gib"] * GIB))
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # keeps orphaned descendants visible to the node's watch
    _drop_capabilities()
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    files = settings.get("files")
    if files:
        _limit(resource.RLIMIT_FSIZE, settings["file_bytes"])
        _restrict(settings["landlock"], files, network=settings["network"])
    if platform.machine() in MACHINES:
        _install(_filter(settings, os.getpid()))


def protect_node() -> None:
    """Shut this process's memory, variables and open files to others of its user; call it before they start.

    Linux only. Without CAP_SYS_PTRACE nobody opens them in /proc or debugs it, and it leaves no core dump.
    """
    if sys.platform == "linux":
        _prctl(PR_SET_DUMPABLE, ctypes.c_ulong(0))


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(kind, (most, most))


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _fault(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


def _prctl(option: int, *arguments: object) -> None:
    filled = [*arguments, *(ctypes.c_ulong(0) for _ in range(4 - len(arguments)))]
    if _library().prctl(option, *filled):
        raise _fault(f"prctl({option})")


def _drop_capabilities() -> None:
    """Give up what root may beyond others; programs that it starts do not get it back."""
    if _library().capset(struct.pack("Ii", CAPABILITIES_3, 0), bytes(24)):
        raise _fault("capset")


# -- Landlock --------------------------------------------------------------------------------------

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_BLOCK, _REFER, _TRUNCATE, _IOCTL = 1 << 6, 1 << 11, 1 << 13, 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
"""Rights that a file may have; the others are those of directories."""
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_WRITE = 0xFFFF & ~(_MAKE_CHAR | _MAKE_BLOCK | _IOCTL)
_TCP = 0b11
"""Bind and connect."""
_SCOPES = 0b11
"""Abstract unix sockets and signals."""
_SINCE = ((_REFER, 2), (_TRUNCATE, 3), (_IOCTL, 5))
"""Right of files -> first version that knows it; <linux/landlock.h>, as the rest."""
TCP_SINCE, SCOPES_SINCE = 4, 6

_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_PROC = "cpuinfo filesystems loadavg meminfo stat sys uptime version".split()
"""Files of /proc about the machine; of processes there is its own directory only."""


def landlock_version() -> int:
    """Return the version of the kernel's Landlock; 0 without it."""
    if sys.platform != "linux":
        return 0
    size = ctypes.c_size_t(0)
    return max(0, _library().syscall(_CREATE_RULESET, None, size, _VERSION_FLAG))


def _restrict(version: int, files: Mapping[str, Sequence[str]], *, network: bool) -> None:
    """Shut all files but those that are named."""
    known = 0xFFFF
    for right, since in _SINCE:
        if version < since:
            known &= ~right
    tcp = _TCP if version >= TCP_SINCE and not network else 0
    scopes = _SCOPES if version >= SCOPES_SINCE else 0
    rules = struct.pack("QQQ", known, tcp, scopes)
    size = ctypes.c_size_t(24 if scopes else 16 if version >= TCP_SINCE else 8)
    library = _library()
    ruleset = library.syscall(_CREATE_RULESET, rules, size, 0)
    if ruleset < 0:
        raise _fault("landlock_create_ruleset")
    own = f"/proc/{os.getpid()}"
    # never closed: the kernel may forget a directory of /proc, and its rule, that nobody has open
    os.set_inheritable(os.open(own, os.O_PATH), True)
    rights = dict.fromkeys(files["list"], _READ_DIR)
    rights |= dict.fromkeys([own, *(f"/proc/{name}" for name in _PROC), *files["read"]], _READ)
    rights |= dict.fromkeys(_DEVICES, _READ_FILE | _WRITE_FILE | _TRUNCATE)
    rights |= dict.fromkeys(files["write"], _WRITE)
    for path, right in rights.items():
        _allow(ruleset, path, right & known)
    if library.syscall(_RESTRICT_SELF, ruleset, 0):
        raise _fault("landlock_restrict_self")
    os.close(ruleset)


def _allow(ruleset: int, path: str, right: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # gone since, or never the user's to open
        return
    try:
        if not os.path.isdir(path):
            right &= _OF_FILES
        rule = struct.pack("=Qi", right, place)
        if _library().syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0):
            raise _fault(f"landlock_add_rule({path})")
    finally:
        os.close(place)


# -- the filter ------------------------------------------------------------------------------------

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _MASK, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in struct seccomp_data; that of an argument is of its low word, little-endian."""
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_CLONE_THREAD = 0x00010000
_CLONE_NAMESPACES = 0x7E020000
"""Cgroup, UTS, IPC, user, PID, network; mounts."""
_X32 = 0x40000000
"""First number of the x32 ABI's system calls on x86_64."""
_INET, _INET6, _NETLINK, _UNIX = 2, 10, 16, 1
_STREAMS = (0x1, 0x80001, 0x801, 0x80801)
"""SOCK_STREAM, with or without SOCK_CLOEXEC and SOCK_NONBLOCK."""
_OPEN_MODE, _READ_ONLY_TRUNCATE = 0x203, 0x200
"""Bits of O_ACCMODE and O_TRUNC, and those of an open file that is emptied and not written to."""
_ONE_PROCESS = 0
"""PRIO_PROCESS"""

CALLS = """
clone 56 220 | clone3 435 435 | fork 57 - | vfork 58 - | socket 41 198 | socketpair 53 199 | kill 62 129
tgkill 234 131 | prlimit64 302 261 | sched_setaffinity 203 122 | setpriority 141 140 | open 2 - | openat 257 56
openat2 437 437 | utimensat 280 88

other processes: tkill 200 130 | rt_sigqueueinfo 129 138 | rt_tgsigqueueinfo 297 240 | pidfd_open 434 434
pidfd_send_signal 424 424 | pidfd_getfd 438 438 | ptrace 101 117 | process_vm_readv 310 270
process_vm_writev 311 271 | kcmp 312 272 | process_madvise 440 440 | process_mrelease 448 448
move_pages 279 239 | migrate_pages 256 238 | get_robust_list 274 100 | setsid 112 157 | setpgid 109 154
scheduling: ioprio_set 251 30 | sched_setattr 314 274 | sched_setscheduler 144 119 | sched_setparam 142 118
the kernel: unshare 272 97 | setns 308 268 | mount 165 40 | umount2 166 39 | pivot_root 155 41 | chroot 161 51
open_tree 428 428 | move_mount 429 429 | fsopen 430 430 | fsconfig 431 431 | fsmount 432 432 | fspick 433 433
mount_setattr 442 442 | open_tree_attr 467 467 | bpf 321 280 | perf_event_open 298 241 | userfaultfd 323 282
io_uring_setup 425 425 | keyctl 250 219 | add_key 248 217 | request_key 249 218 | init_module 175 105
finit_module 313 273 | delete_module 176 106 | reboot 169 142 | kexec_load 246 104 | kexec_file_load 320 294
swapon 167 224 | swapoff 168 225 | acct 163 89 | syslog 103 116 | vhangup 153 58 | quotactl 179 60
quotactl_fd 443 443 | settimeofday 164 170 | clock_settime 227 112 | clock_adjtime 305 266 | adjtimex 159 171
sethostname 170 161 | setdomainname 171 162 | iopl 172 - | ioperm 173 - | fanotify_init 300 262
open_by_handle_at 304 265
memory that is no process's: memfd_create 319 279 | memfd_secret 447 447 | shmget 29 194 | shmat 30 196
semget 64 190 | msgget 68 186 | mq_open 240 180

truncate 76 45 | setxattr 188 5 | lsetxattr 189 6 | fsetxattr 190 7 | setxattrat 463 463 | removexattr 197 14
lremovexattr 198 15 | fremovexattr 199 16 | removexattrat 466 466 | file_setattr 469 469 | utime 132 -
utimes 235 - | futimesat 261 - | inotify_add_watch 254 27

chmod 90 - | fchmod 91 52 | fchmodat 268 53 | fchmodat2 452 452 | chown 92 - | lchown 94 - | fchown 93 55
fchownat 260 54
"""
"""System calls with their numbers on x86_64 and aarch64, from the kernel's headers; - for none. The first
paragraph is filtered by its arguments, the second always refused. The others reach files that Landlock shuts:
the third is refused, the last has no effect, since whatever copies or unpacks files ends if that is refused."""
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machine -> AUDIT_ARCH."""

_Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, constant: struct sock_filter."""


def _calls(machine: str) -> list[dict[str, int]]:
    """Return the numbers of system calls by name, for each paragraph of CALLS."""
    column = 1 + list(MACHINES).index(machine)
    tables: list[dict[str, int]] = []
    for paragraph in CALLS.strip().split("\n\n"):
        text = "|".join(line.rpartition(": ")[2] for line in paragraph.splitlines())
        rows = [row.split() for row in text.split("|")]
        tables.append({row[0]: int(row[column]) for row in rows if row[column] != "-"})
    return tables


def _filter(settings: Mapping[str, Any], pid: int) -> list[_Instruction]:
    """Make the seccomp program for the system calls of the process `pid`."""
    machine = platform.machine()
    calls, always, of_files, idle = _calls(machine)
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, MACHINES[machine]),
        _refuse(errno.EPERM),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        _refuse(errno.EPERM),
        # without clone3 a C library calls clone, whose flags the filter can read
        *_answer(calls["clone3"], errno.ENOSYS),
    ]
    refused = list(always.values())
    if not settings["processes"]:
        refused += [calls[name] for name in ("fork", "vfork") if name in calls]
        program += _if_any(calls["clone"], _CLONE_THREAD, otherwise=True)
        program += _only(calls["kill"], [pid, 0, (-pid) & 0xFFFFFFFF])
        program += _only(calls["tgkill"], [pid])
    program += _if_any(calls["clone"], _CLONE_NAMESPACES, otherwise=False)
    program += _only(calls["prlimit64"], [pid, 0])
    program += _only(calls["sched_setaffinity"], [pid, 0])
    program += _only(calls["setpriority"], [_ONE_PROCESS], [pid, 0])
    files = settings.get("files")
    if not settings["network"]:
        refused.append(calls["socket"])
    elif files:
        program += _only(calls["socket"], [_INET, _INET6, _NETLINK])
    if files or not settings["network"]:
        # a datagram socket of a pair may send to any other one that has a path
        program += _only(calls["socketpair"], [_UNIX], _STREAMS)
    if files:
        refused += of_files.values()
        for name, place in (("open", 1), ("openat", 2)):
            if name in calls:
                program += _not_emptied(calls[name], place)
        program += _answer(calls["openat2"], errno.ENOSYS)
        for number in idle.values():
            program += _answer(number, 0)
        program += _without_effect_unless_now(calls["utimensat"])
    for number in refused:
        program += _answer(number, errno.EPERM)
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def _refuse(number: int) -> _Instruction:
    return (_RETURN, 0, 0, _REFUSE | number)


def _answer(call: int, number: int) -> Iterator[_Instruction]:
    """Answer a system call with this error, or with success without effect for 0."""
    yield (_EQUAL, 0, 1, call)
    yield _refuse(number)


def _if_any(call: int, bits: int, *, otherwise: bool) -> list[_Instruction]:
    """Refuse a system call whose first argument has any of `bits`, or, `otherwise`, has none."""
    to_pass, to_refuse = 1, 0
    if_any, if_none = (to_pass, to_refuse) if otherwise else (to_refuse, to_pass)
    return [
        (_EQUAL, 0, 4, call),
        (_LOAD, 0, 0, _ARGUMENTS),
        (_ANY_BIT, if_any, if_none, bits),
        _refuse(errno.EPERM),
        (_LOAD, 0, 0, _NUMBER),
    ]


def _not_emptied(call: int, place: int) -> list[_Instruction]:
    """Refuse to empty a file by opening it to be read, which the first versions of Landlock do not see."""
    return [
        (_EQUAL, 0, 5, call),
        (_LOAD, 0, 0, _ARGUMENTS + 8 * place),
        (_MASK, 0, 0, _OPEN_MODE),
        (_EQUAL, 0, 1, _READ_ONLY_TRUNCATE),
        _refuse(errno.EPERM),
        (_LOAD, 0, 0, _NUMBER),
    ]


def _without_effect_unless_now(call: int) -> list[_Instruction]:
    """Answer utimensat(), without effect; refuse to set the time of now, as `touch` then makes the file."""
    return [
        (_EQUAL, 0, 4, call),
        (_LOAD, 0, 0, _ARGUMENTS + 8 * 2),
        (_EQUAL, 0, 1, 0),
        _refuse(errno.EPERM),
        _refuse(0),
    ]


def _only(call: int, *arguments: Sequence[int]) -> list[_Instruction]:
    """Allow a system call only if each of its first arguments is one of the values given for it."""
    checks: list[_Instruction] = []
    for place, values in enumerate(arguments):
        checks.append((_LOAD, 0, 0, _ARGUMENTS + 8 * place))
        count = len(values)
        checks += [(_EQUAL, count - at, 0, value) for at, value in enumerate(values)]
        checks.append(_refuse(errno.EPERM))
    return [(_EQUAL, 0, len(checks) + 1, call), *checks, (_RETURN, 0, 0, _ALLOW)]


def _install(program: Sequence[_Instruction]) -> None:
    body = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(body, len(body))
    # struct sock_fprog: a count, and a pointer at its own alignment
    head = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(buffer)))
    _prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), ctypes.byref(head))


if __name__ == "__main__":
    main()
