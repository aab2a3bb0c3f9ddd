"""Read a node's config again, and say what of it changed.

Only limits and the level of the log change while a node runs; everything else stays as it was at the start.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from .run import NodeConfig

APPLIED = ("limits", "log.level")
"""Keys and sections that change while a node runs."""


class ConfigChanges(NamedTuple):
    """Changes of a config that was read again."""

    config: NodeConfig
    applied: list[str]
    """Keys with their new values that were applied, as limits.upload = 5.0."""
    restart: list[str]
    """Keys that changed and need a restart."""


@dataclass
class ConfigSource:
    """The files, variables and flags that a node was started with."""

    read: Callable[[], NodeConfig]
    """Reads them again. Raises UsageError."""
    applied: NodeConfig
    """The config that is in force."""

    def reread(self) -> ConfigChanges:
        """Read them again, and take what may change. Raises UsageError."""
        fresh = self.read()
        before, after = dict(_leaves(self.applied.model_dump())), dict(_leaves(fresh.model_dump()))
        changed = sorted(key for key in {*before, *after} if before.get(key) != after.get(key))
        applied = [key for key in changed if _may_change(key)]
        log = self.applied.log.model_copy(update={"level": fresh.log.level})
        self.applied = self.applied.model_copy(update={"limits": fresh.limits, "log": log})
        return ConfigChanges(
            self.applied,
            [f"{key} = {json.dumps(after.get(key))}" for key in applied],
            [key for key in changed if key not in applied],
        )


def _may_change(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in APPLIED)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """List dotted keys with their values."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(cast("Mapping[str, Any]", value), f"{prefix}{name}.")
        else:
            yield prefix + name, value
