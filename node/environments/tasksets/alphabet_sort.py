"""Keep a list of names in alphabetical order while more names come in, over several turns.

Tags, options and the score are those of prime-rl's environment of this name, which takes its names from a data
set of the hub; here they are drawn from the lists below. An ordinary `verifiers` v1 package with an Env of its
own; it needs draws.py. The hash of an episode's names assigns it to one split permanently.
"""

# A hook must name the library's bare types, which are generic, and data is known at run time only.
# pyright: reportMissingTypeArgument=false, reportUnknownParameterType=false
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeArguments=false
# pyright: reportIncompatibleVariableOverride=false

import difflib
import itertools
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field, model_validator

from .draws import Draws, is_held_out

MAX_ATTEMPTS = 1000
FIRST_TAG, LATER_TAG = "alphabetical_sorted", "combined_alphabetical_sorted"
MARK = " // new name!"
FIRST = (
    "Ada Alan Amara Anders Beatriz Bela Boris Carmen Chen Clara Dario Dina Edgar Elena Emre Esther Farid "
    "Fatima Felix Gita Goran Greta Hana Hugo Ibrahim Ines Ivan Jana Jonas Julia Kaito Karin Kofi Lars Leila "
    "Lin Lucia Magnus Maria Mateo Mina Nadia Nils Noor Olga Omar Oscar Paula Pedro Petra Priya Qiu Rafael "
    "Ravi Rosa Ruth Samir Sofia Stefan Sven Tara Theo Tomas Ulla Umar Vera Viktor Wanda Wei Xenia Yara Yusuf "
    "Zoe Zoltan"
).split()
LAST = (
    "Abbott Adler Aydin Banerjee Bauer Berg Bianchi Blom Castro Cho Cohen Costa Dahl Demir Diaz Dubois Eriksen "
    "Evans Farkas Fischer Fontana Garcia Ghosh Gruber Haas Hansen Hoang Ibsen Ito Ivanov Jansen Jensen Joshi "
    "Kato Keller Khan Kovacs Larsen Laurent Lopez Maier Mehta Moreau Nagy Nakamura Novak Okafor Olsen Ortiz "
    "Patel Petrov Popov Quist Ramos Reyes Rossi Sato Schmidt Silva Singh Tanaka Torres Tran Ueda Urban Vargas "
    "Vogel Wagner Weber Wong Xu Yamada Yilmaz Zhang Zimmer"
).split()


class AlphabetSortTaskConfig(vf.TaskConfig):
    """Options of the score."""

    similarity_power: int = Field(default=4, ge=1, le=64)
    """Exponent of a turn's similarity: the higher, the less a nearly right list is worth."""
    power_per_turn: bool = True
    """Whether the exponent applies to each turn, or to the mean of all turns."""


class AlphabetSortConfig(vf.TasksetConfig):
    """Options of the taskset: seed, split and lengths of episodes."""

    seed: int = 0
    split: Literal["train", "eval"] = "train"
    min_turns: int = Field(1, ge=1)
    max_turns: int = Field(3, le=8)
    min_names_per_turn: int = Field(1, ge=1)
    max_names_per_turn: int = Field(5, le=8)
    task: AlphabetSortTaskConfig = AlphabetSortTaskConfig()

    @model_validator(mode="after")
    def _check_bounds(self) -> "AlphabetSortConfig":
        if self.min_turns > self.max_turns:
            raise ValueError("min_turns must not exceed max_turns")
        if self.min_names_per_turn > self.max_names_per_turn:
            raise ValueError("min_names_per_turn must not exceed max_names_per_turn")
        return self


class AlphabetSortData(vf.TaskData):
    """One episode: the messages of later turns, and the correct list of every turn."""

    follow_ups: tuple[str, ...]
    answers: tuple[tuple[str, ...], ...]

    @property
    def replies(self) -> tuple[str, ...]:
        """Replies with the correct lists, for demonstrations; no part of the task's digest."""
        tags = [FIRST_TAG] + [LATER_TAG] * len(self.follow_ups)
        lists = ("\n".join(names) for names in self.answers)
        return tuple(f"<{tag}>\n{names}\n</{tag}>" for tag, names in zip(tags, lists, strict=True))


class AlphabetSortTask(vf.Task[AlphabetSortData, vf.State, AlphabetSortTaskConfig]):
    """Task of as many turns as there are answers, each with the whole list so far."""

    @vf.reward(weight=1.0)
    async def alphabet_sort(self, trace: vf.Trace) -> float:
        """Average the similarity to the right list over all turns, 0.0..1.0; turns not played count 0."""
        replies = [message.content or "" for message in trace.assistant_messages]
        power = self.config.similarity_power
        inner = power if self.config.power_per_turn else 1
        scores = [
            turn_score(reply, answer, LATER_TAG if turn else FIRST_TAG, inner)
            for turn, (reply, answer) in enumerate(zip(replies, self.data.answers, strict=False))
        ]
        mean = sum(scores) / len(self.data.answers)
        return mean if self.config.power_per_turn else mean**power

    @vf.metric
    async def exact(self, trace: vf.Trace) -> float:
        """Return 1.0 if every turn has the right list, else 0.0."""
        replies = [message.content or "" for message in trace.assistant_messages]
        if len(replies) < len(self.data.answers):
            return 0.0
        turns = enumerate(zip(replies, self.data.answers, strict=False))
        return float(
            all(
                turn_score(reply, answer, LATER_TAG if turn else FIRST_TAG, 1) == 1.0
                for turn, (reply, answer) in turns
            )
        )


def turn_score(reply: str, answer: Sequence[str], tag: str, power: int) -> float:
    """Return the similarity of a reply's tagged list to the correct one, raised to `power`.

    If there are several lists the last one counts, and only if each is better than the one before it.
    """
    expected = "\n".join(answer).lower()
    scores: list[float] = []
    for text in re.findall(f"<{tag}>(.*?)</{tag}>", reply, re.DOTALL):
        lines = [line.strip().lower() for line in text.split("\n") if line.strip()]
        scores.append(difflib.SequenceMatcher(None, "\n".join(lines), expected).ratio() ** power)
    improves = all(later > earlier for earlier, later in pairwise(scores))
    return scores[-1] if scores and improves else 0.0


class AlphabetSortEnv(vf.SingleAgentEnv):
    """Env that sends the names of the later turns."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Play one episode."""
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            for follow_up in task.data.follow_ups:
                if segment.terminated:
                    break
                segment = await interaction.turn(follow_up)


class AlphabetSortTaskset(vf.Taskset[AlphabetSortTask, AlphabetSortConfig]):
    """Endless taskset; task number i is made directly, without iterating from 0."""

    INFINITE = True

    def load(self) -> Iterator[AlphabetSortTask]:
        """Yield all tasks in order."""
        return map(self.task_at, itertools.count())

    def task_at(self, index: int) -> AlphabetSortTask:
        """Return task number `index` (from 0), a function of seed, split, options and index alone."""
        config = self.config
        for attempt in range(MAX_ATTEMPTS):
            draws = Draws("alphabet-sort", config.seed, config.split, index, attempt)
            turns, place = _episode(draws, config)
            if is_held_out(" ".join(itertools.chain(*turns))) == (config.split == "eval"):
                data = AlphabetSortData.model_validate({"idx": index, **_texts(turns, place)})
                return AlphabetSortTask(data, config.task)
        raise ValueError(f"no episode of split {config.split!r} found: raise max_names_per_turn")


def _episode(draws: Draws, config: AlphabetSortConfig) -> tuple[list[list[str]], int]:
    """Draw (names of each turn in the order of telling, index of the part to sort by).

    No part occurs twice.
    """
    counts = [
        draws.between(config.min_names_per_turn, config.max_names_per_turn)
        for _ in range(draws.between(config.min_turns, config.max_turns))
    ]
    total = sum(counts)
    parts = zip(draws.sample(FIRST, total), draws.sample(LAST, total), strict=True)
    names = iter([first + last for first, last in parts])
    return [list(itertools.islice(names, count)) for count in counts], draws.below(2)


def _texts(turns: Sequence[Sequence[str]], place: int) -> dict[str, object]:
    label = ("FIRST", "LAST")[place]
    prompt = (
        f"Put these names into alphabetical order by their {label} name: {', '.join(turns[0])}\n\n"
        f"Answer in exactly this format, one name a line:\n<{FIRST_TAG}>\nName1\nName2\n</{FIRST_TAG}>"
    )
    answers, follow_ups, known = [_sorted(turns[0], place)], list[str](), list(turns[0])
    for number, names in enumerate(turns[1:]):
        known += names
        follow_up = (
            f"More names: {', '.join(names)}\n\nPut ALL names so far into alphabetical order by their {label} "
            f"name, and write `{MARK.strip()}` behind each name that is new in this message."
        )
        if not number:
            follow_up += (
                "\n\nAnswer in exactly this format:\n"
                f"<{LATER_TAG}>\nName1\nName2{MARK}\n</{LATER_TAG}>"
            )
        follow_ups.append(follow_up)
        ranked = _sorted(known, place)
        answers.append([name + MARK if name in names else name for name in ranked])
    return {"prompt": prompt, "follow_ups": follow_ups, "answers": answers}


def _sorted(names: Sequence[str], place: int) -> list[str]:
    return sorted(names, key=lambda name: re.findall("[A-Z][a-z]*", name)[place])


__all__ = ["AlphabetSortEnv", "AlphabetSortTaskset"]
