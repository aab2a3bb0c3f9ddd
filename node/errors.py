"""Errors of a running node, each with the exit code that the CLI returns.

    NodeError                1   anything else that has a one-line explanation
      UsageError             2   bad config, bad flags, unknown keys
      TicketError            3   wrong or expired ticket, other run
      BusyError              4   port, socket or data directory already in use
      StorageError           5   disk full, unreadable or corrupt data
      NetworkError           6   nobody could be reached
      EngineError            7   the engine or the trainer backend failed
        EngineLost           7   an engine's process died and is being started again
        RankFailed           7   a process of the trainer backend died: another one can go on
      RunFailed              8   the run itself stopped: ten empty batches, equivocation

The message says what to do; it is printed as one line on stderr.
"""

from collections.abc import Iterator


class NodeError(Exception):
    """Base of everything that ends a command with one line instead of a traceback."""

    exit_code = 1


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
    """The disk is full, or what it holds cannot be read."""

    exit_code = 5


class NetworkError(NodeError):
    """No peer could be reached in time."""

    exit_code = 6


class EngineError(NodeError):
    """An engine or a trainer backend failed."""

    exit_code = 7


class EngineLost(EngineError):
    """An engine's process died; what it was doing is lost, but another one is being started."""


class RankFailed(EngineError):
    """A process that trains with others died or hangs, and all of them were ended.

    A new backend can go on from the last checkpoint.
    """


class RunFailed(NodeError):
    """The run cannot go on."""

    exit_code = 8


def one_line(error: object) -> str:
    """A foreign error's text, short enough for a message of ours."""
    return " ".join(str(error).split())[:300]


def named_line(error: BaseException) -> str:
    """As one_line(), with the name of its class, which says more than the text of many errors."""
    return one_line(f"{type(error).__name__} {error}")


def first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to report of a task group that fell: a NodeError if there is one, else the first."""
    leaves = list(_leaves(group))
    return next((leaf for leaf in leaves if isinstance(leaf, NodeError)), leaves[0])


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
