"""What a run may set on a taskset, and which tasksets it then has.

The options came with the run, from somebody else: those that name files, functions or services of this
machine are refused.
"""

from collections.abc import Callable, Mapping
from typing import Any, get_args

from ..config.run import EnvironmentConfig
from .allowed import NAME
from .environment import EnvironmentFailed, Split

Finder = Callable[[str], tuple[Callable[[Any], Any], Any]]
"""Id -> (class of the taskset, class of its options); raises what importing a module raises."""

_HOST_OPTIONS = frozenset({"id", "system_prompt"})
_HOST_TASK_OPTIONS = frozenset({"judges", "stops", "metrics", "rewards"})


def load_tasksets(config: EnvironmentConfig, seed: int, find: Finder) -> dict[Split, Any]:
    """The taskset of each split; only `train` where it knows no splits. Its `seed`, where it has one
    and the config names none, is the run's. Raises EnvironmentFailed."""
    from pydantic import ValidationError

    _refuse_host_options(config.args)
    taskset, options = _find(config.id, find)
    fields = options.model_fields
    values: dict[str, Any] = {**config.args, "id": config.id}
    if "seed" in fields:
        values.setdefault("seed", seed)
    known = get_args(fields["split"].annotation) if "split" in fields else ()
    splits: tuple[Split, ...] = ("train", "eval")
    own: dict[Split, dict[str, str]] = {it: {"split": it} for it in splits}
    if not set(splits) <= set(known):
        splits, own = ("train",), {"train": {}}
    try:
        found: dict[Split, Any] = {
            it: taskset(options.model_validate({**values, **own[it]})) for it in splits
        }
    except ValidationError as error:
        raise EnvironmentFailed(f"environment.args does not fit {config.id!r}: {error}") from error
    _refuse_unservable(config.id, found["train"])
    return found


def _find(name: str, find: Finder) -> tuple[Callable[[Any], Any], Any]:
    if not NAME.fullmatch(name):
        raise EnvironmentFailed(
            f"no taskset named {name!r}: environment.id is a module name, such as reverse-text"
        )
    try:
        return find(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise EnvironmentFailed(
            f"no taskset named {name!r}: install it, or use reverse-text or arithmetic ({error})"
        ) from error


def _refuse_host_options(args: Mapping[str, Any]) -> None:
    task = args.get("task")
    found = _HOST_OPTIONS & set(args)
    if isinstance(task, dict):
        found |= _HOST_TASK_OPTIONS & {str(name) for name in task}
    if found:
        raise EnvironmentFailed(
            f"environment.args may not set {', '.join(sorted(found))}: "
            "it names things on the machine that plays; write it into the taskset"
        )


def _refuse_unservable(name: str, taskset: Any) -> None:
    task = type(taskset).task_type()
    if taskset.toolsets(taskset.config) or task.toolsets(taskset.config.task):
        raise EnvironmentFailed(
            f"{name!r} needs tool servers, which nodes do not start: use another"
        )
    if task.NEEDS_CONTAINER:
        raise EnvironmentFailed(
            f"{name!r} needs a container, which nodes do not start: use another"
        )
