"""Errors of a running node, each with the exit code that the CLI returns.

    NodeError                1   anything else that has a one-line explanation
      UsageError             2   bad config, bad flags, unknown keys
      TicketError            3   wrong or expired ticket, other run
      BusyError              4   port, socket or data directory already in use
      StorageError           5   disk full, unreadable or corrupt data
      NetworkError           6   no peer could be reached
      EngineError            7   the engine or the trainer backend failed
        EngineLost           7   an engine's process died and is being started again
        RankFailed           7   a process of the trainer backend died: another one can go on
      RunFailed              8   the run itself stopped: ten empty batches, equivocation
      EnvironmentFailed      8   the environment gives no tasks any more (environments/environment.py)
      SteppedDown            9   another node leads the run now

The message says what to do; it is printed as one line on stderr.
"""

import errno
from collections.abc import Iterator


class NodeError(Exception):
    """Base of everything that ends a command with one line instead of a traceback."""

    exit_code = 1


BETWEEN_PROBLEMS = "\n  - "
"""Separates the problems of a config in one UsageError; the command line keeps them in lines of their own."""


class UsageError(NodeError):
    """The command line or a config is wrong."""

    exit_code = 2


class TicketError(NodeError):
    """The ticket is malformed, expired, or for something else."""

    exit_code = 3


class BusyError(NodeError):
    """Something that must be ours alone is in use."""

    exit_code = 4


class StorageError(NodeError):
    """The disk is full, or its content cannot be read."""

    exit_code = 5


class NetworkError(NodeError):
    """No peer could be reached in time."""

    exit_code = 6


class EngineError(NodeError):
    """An engine or a trainer backend failed."""

    exit_code = 7


class EngineLost(EngineError):
    """An engine's process died; its unfinished work is lost, but another one is being started."""


class RankFailed(EngineError):
    """A process that trains with others died or hangs, and all of them were ended.

    A new backend can go on from the last checkpoint.
    """


class RunFailed(NodeError):
    """The run cannot go on."""

    exit_code = 8


class SteppedDown(NodeError):
    """Another node leads the run now."""

    exit_code = 9


ADVICE = {
    errno.EISDIR: "a directory is where a file should be, move it away",
    errno.ENOTDIR: "a file is where a directory should be, move it away",
    errno.EEXIST: "something else is there, or a link to nothing: move it away",
    errno.ELOOP: "its links lead nowhere, remove them",
    errno.ENOSPC: "make room on that disk, then start again",
    errno.EDQUOT: "make room in your quota, then start again",
    errno.EROFS: "choose another directory with --output-dir or --data-dir",
    errno.EACCES: "give this user access to it, or choose another directory",
    errno.EPERM: "give this user access to it, or choose another directory",
}
"""errno -> advice about a file that cannot be used."""

BAD_FILE = (OSError, ValueError, RecursionError)
"""What reading and decoding a file may raise that is damaged, or of somebody else. ValueError has the errors of
json, tomllib, msgspec and UTF-8 below it: msgspec raises UnicodeDecodeError, too, which is no DecodeError."""


def is_of_file(error: OSError) -> bool:
    """Say whether a system error is about a file or a disk, not the network or a process."""
    return error.filename is not None or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def file_error(error: OSError, path: object = None) -> StorageError:
    """Explain which file cannot be used (`path`, or that of the error), why, and how to mend it."""
    path = path or error.filename2 or error.filename
    advice = ADVICE.get(error.errno or 0, "")
    return StorageError(
        f"cannot use {path or 'a file'}: {error.strerror or error}{': ' if advice else ''}{advice}"
    )


def one_line(error: object) -> str:
    """Shorten a foreign error's text for a message of ours."""
    return " ".join(str(error).split())[:300]


def printable(text: str, most: int | None = 64) -> str:
    """Cut a peer's text to `most` characters and replace control characters, for a terminal or a log."""
    return "".join(character if character.isprintable() else "?" for character in text)[:most]


def named_line(error: BaseException) -> str:
    """Shorten an error's text as one_line() does, and put the name of its class before it."""
    return one_line(f"{type(error).__name__} {error}")


def first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Choose the error to report of a failed task group: a NodeError if there is one, else the first."""
    leaves = list(_leaves(group))
    return next((leaf for leaf in leaves if isinstance(leaf, NodeError)), leaves[0])


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
