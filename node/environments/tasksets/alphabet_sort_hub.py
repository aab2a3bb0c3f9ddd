"""prime-rl's `alphabet-sort`: names of a data set of the hub, in the wording of prime-rl's prompts.

Turns, tags and the score are those of alphabet_sort.py, which has names and prompts of its own; rows are those
of hub_rows.py. Tasks are drawn by draws.py, so that they are the same everywhere: the same kind of episodes as
there, not the same ones.
"""

# A hook must name the library's bare types, which are generic.
# pyright: reportIncompatibleVariableOverride=false, reportInvalidTypeArguments=false

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import verifiers.v1 as vf
from pydantic import Field, model_validator

from .alphabet_sort import (
    FIRST_TAG,
    LATER_TAG,
    MARK,
    AlphabetSortData,
    AlphabetSortEnv,
    AlphabetSortTask,
    AlphabetSortTaskConfig,
)
from .draws import Draws
from .hub_rows import HubRowsConfig


class AlphabetSortHubConfig(HubRowsConfig):
    """Options of the data set and of the lengths of episodes, with the defaults of prime-rl's."""

    dataset_name: str = "kalomaze/alphabetic-arxiv-authors-it1"
    seed: int = 0
    min_turns: int = Field(1, ge=1)
    max_turns: int = Field(3, le=8)
    min_names_per_turn: int = Field(1, ge=1)
    max_names_per_turn: int = Field(5, le=64)
    task: AlphabetSortTaskConfig = AlphabetSortTaskConfig()

    @model_validator(mode="after")
    def _check_bounds(self) -> "AlphabetSortHubConfig":
        if self.min_turns > self.max_turns:
            raise ValueError("min_turns must not exceed max_turns")
        if self.min_names_per_turn > self.max_names_per_turn:
            raise ValueError("min_names_per_turn must not exceed max_names_per_turn")
        return self


class AlphabetSortHubTaskset(vf.Taskset[AlphabetSortTask, AlphabetSortHubConfig]):
    """Endless taskset: each pass over the rows draws other turns."""

    INFINITE = True

    def load(self) -> Iterator[AlphabetSortTask]:
        """Yield all tasks in order. Raises ValueError if no row has enough names."""
        config, index = self.config, 0
        for number in itertools.count():
            most = 0
            for place, row in enumerate(config.rows()):
                names = [str(name).replace(" ", "") for name in row.get("names") or ()]
                names = list(dict.fromkeys(names))
                most = max(most, len(names))
                draws = Draws("alphabet-sort-hub", config.seed, number, place)
                if (episode := _episode(draws, config, names)) is not None:
                    data = AlphabetSortData.model_validate({"idx": index, **episode})
                    yield AlphabetSortTask(data, config.task)
                    index += 1
            if most < config.min_turns * config.min_names_per_turn:
                raise ValueError(
                    f"no row of {config.dataset_name} has as many names as an episode: lower min_turns or "
                    "min_names_per_turn, or give a dataset_name whose rows have names"
                )


def _episode(
    draws: Draws, config: AlphabetSortHubConfig, names: Sequence[str]
) -> dict[str, Any] | None:
    """Draw the prompt, the messages of later turns and all answers; None if there are too few names."""
    counts = [
        draws.between(config.min_names_per_turn, config.max_names_per_turn)
        for _ in range(draws.between(config.min_turns, config.max_turns))
    ]
    if len(names) < sum(counts):
        return None
    place = draws.below(2)
    label = ("FIRST", "LAST")[place]
    rest = iter(names)
    messages: list[str] = []
    answers: list[list[str]] = []
    known: list[str] = []
    for turn, count in enumerate(counts):
        new = list(itertools.islice(rest, count))
        known += new
        ranked = sorted(known, key=lambda name: _part(name, place))
        answers.append([name + MARK if turn and name in new else name for name in ranked])
        listed = ", ".join(draws.sample(new, count))
        if not turn:
            shown = draws.between(config.min_names_per_turn, config.max_names_per_turn)
            messages.append(
                f"Sort these names in alphabetical order by {label} name: {listed}\n\n"
                f"{_form(FIRST_TAG, [f'Name{i}' for i in range(1, shown + 1)])}"
            )
            continue
        message = (
            f"Now sort ALL of these names alphabetically by {label} name: {listed}\n\n"
            "These are in addition to the prior list. Mark any NEW names (that weren't in the prior list) with "
            f"`{MARK.strip()}` at the end."
        )
        if turn == 1:
            shown = draws.between(config.min_names_per_turn, len(known))
            unmarked = draws.below(shown)
            lines = [f"Name{i}" + MARK * (i > unmarked) for i in range(1, shown + 1)]
            message += f"\n\n{_form(LATER_TAG, lines)}"
        else:
            message += " Follow the same format as before."
        messages.append(message)
    return {"prompt": messages[0], "follow_ups": messages[1:], "answers": answers}


def _form(tag: str, lines: Sequence[str]) -> str:
    return "\n".join(["Use exactly this format:", f"<{tag}>", *lines, f"</{tag}>"])


def _part(name: str, place: int) -> str:
    """Return a name's first part (0), which ends before its second capital, or the rest (1)."""
    cut = next((i for i in range(1, len(name)) if name[i].isupper()), len(name))
    return (name[:cut], name[cut:])[place]


__all__ = ["AlphabetSortEnv", "AlphabetSortHubTaskset"]
