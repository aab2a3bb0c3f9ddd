"""Problems of a data set of the hub, scored as in math.py: training data of prime-rl.

`math-env` takes the options of prime-rl's environment of that name; `hendrycks-math`, `intellect-math`,
`deepscaler` and `simple-math` are the same with other defaults; the INTELLECT runs train on such data. Rows
are those of hub_rows.py.
"""

# A hook must name the library's bare Trace, which is generic.
# pyright: reportMissingTypeArgument=false, reportUnknownParameterType=false

import json
from collections.abc import Iterator, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from functools import cached_property
from typing import Any, Literal

import verifiers.v1 as vf
from pydantic import BaseModel, ConfigDict, Field, model_validator
from verifiers.v1.utils.score import extract_boxed_answer

from .draws import Draws
from .hub_rows import HubRowsConfig
from .math import INSTRUCTION, boxed_answer, is_right

GENESYS = {
    "question_key": "prompt",
    "answer_key": "verification_info.ground_truth",
    "instruction_prompt": "",
}
"""Columns of INTELLECT-2's data; its prompts ask for a box themselves."""
PRESETS: dict[str, dict[str, Any]] = {
    "hendrycks-math": {"dataset_name": "PrimeIntellect/Hendrycks-Math"},
    "intellect-math": {
        **GENESYS,
        "dataset_name": "PrimeIntellect/INTELLECT-2-only-math",
        "len_reward": {},
    },
    "deepscaler": {
        "dataset_name": "agentica-org/DeepScaleR-Preview-Dataset",
        "question_key": "problem",
    },
    "simple-math": {**GENESYS, "dataset_name": "justus27/math-hendrycks-genesys-format"},
}
"""Id of an environment -> its own defaults."""


class LenRewardConfig(BaseModel):
    """Target lengths of replies, as INTELLECT-2 was trained with; names and defaults are prime-rl's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reward_type: Literal["exact", "max", "clip"] = "max"
    """Meaning of the target: an exact length (exact), a limit with shorter being better (max), or a bound
    (clip)."""
    target_length_sampling: Literal["discrete", "range"] = "discrete"
    length_prompt_location: Literal["system_prompt", "instruction"] = "system_prompt"
    min_length: int = Field(default=1000, ge=1)
    max_length: int = Field(default=24000, ge=1)
    target_lengths: tuple[int, ...] = Field(default=(500, 1000, 2000, 3000), min_length=1)
    reward_coef: float = 0.0003
    """Reward per token."""
    max_reward_delta: float = 0.5
    """Factor of a right reply that has exactly the target length (max)."""

    @model_validator(mode="after")
    def _check_lengths(self) -> "LenRewardConfig":
        if self.min_length > self.max_length:
            raise ValueError("min_length must not exceed max_length")
        return self

    def target(self, draws: Draws) -> int:
        """Draw a target length in tokens."""
        if self.target_length_sampling == "discrete":
            return draws.choice(self.target_lengths)
        return draws.between(self.min_length, self.max_length)

    def instruction(self, target: int) -> str:
        """Tell the target to the model."""
        bound = "at most " if self.reward_type == "clip" else ""
        return f"Think for {bound}{target} tokens before giving a response."

    def apply(self, reward: float, target: int, length: int) -> float:
        """Return the reward of a reply of `length` tokens; `reward`: its reward at any length."""
        match self.reward_type:
            case "exact":
                return reward - self.reward_coef * abs(target - length)
            case "max":
                return reward * min(
                    1.0, max(0.0, self.reward_coef * (target - length) + self.max_reward_delta)
                )
            case "clip":
                return reward * (length <= target)


class MathEnvConfig(HubRowsConfig):
    """Options of the data set and the choice of its rows."""

    seed: int = 0
    """Seed of the target lengths."""
    dataset_name: str = "PrimeIntellect/Hendrycks-Math"
    dataset_shuffle: bool = False
    dataset_seed: int = 42
    question_key: str = "question"
    answer_key: str = "answer"
    """Name of a column, followed after dots by keys of the JSON in it."""
    difficulty_key: str = ""
    """Column with an average reward or solve rate; rows outside of the two bounds are skipped."""
    min_avg_reward: float = 0.0
    max_avg_reward: float = 1.0
    instruction_prompt: str = INSTRUCTION
    """Text after each question."""
    len_reward: LenRewardConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {**PRESETS.get(str(values.get("id")), {}), **values}


class MathEnvData(vf.TaskData):
    """One problem, its boxed answer, and the options of the length reward."""

    answer: str
    target_length: int = 0
    len_reward: LenRewardConfig | None = None


class MathEnvTask(vf.Task[MathEnvData]):
    """Task of one turn: right answer in the last box after any thoughts, at the target length."""

    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        """End the conversation after one reply."""
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        """Return 1.0 for a boxed answer of the same value, else 0.0, then apply len_reward if there is one."""
        solved = self._solved(trace)
        if self.data.len_reward is None:
            return solved
        return self.data.len_reward.apply(solved, self.data.target_length, _length(trace))

    @vf.metric
    async def solved(self, trace: vf.Trace) -> float:
        """Return 1.0 for a right answer, of whatever length."""
        return self._solved(trace)

    @vf.metric
    async def boxed(self, trace: vf.Trace) -> float:
        """Return 1.0 if there is a boxed answer at all."""
        return float(bool(boxed_answer(trace.last_reply)))

    @vf.metric
    async def off_target(self, trace: vf.Trace) -> float:
        """Return how many tokens longer than its target the reply is; 0 without a target."""
        target = self.data.target_length
        return float(_length(trace) - target) if target else 0.0

    def _solved(self, trace: vf.Trace) -> float:
        return float(is_right(trace.last_reply, self.data.answer))


def _length(trace: vf.Trace) -> int:
    usage = trace.calls[-1].usage
    return usage.completion_tokens if usage is not None else 0


class MathEnvTaskset(vf.Taskset[MathEnvTask, MathEnvConfig]):
    """Taskset with one task for each row that has a question and an answer."""

    def load(self) -> Iterator[MathEnvTask]:
        """Yield the tasks of all rows in order, or shuffled by dataset_seed."""
        for number, (question, answer) in enumerate(self._problems):
            yield MathEnvTask(self._data(number, question, answer), self.config.task)

    def _data(self, number: int, question: str, answer: str) -> MathEnvData:
        lengths = self.config.len_reward
        prompt, system, target = question + self.config.instruction_prompt, None, 0
        if lengths is not None:
            target = lengths.target(Draws("math-env", self.config.seed, number))
            instruction = lengths.instruction(target)
            if lengths.length_prompt_location == "system_prompt":
                system = instruction
            else:
                prompt = f"{prompt} {instruction}"
        values = {
            "prompt": prompt,
            "system_prompt": system,
            "answer": f"\\boxed{{{answer}}}",
            "target_length": target,
            "len_reward": lengths,
        }
        return MathEnvData.model_validate(values)

    @cached_property
    def _problems(self) -> list[tuple[str, str]]:
        """List (question, answer) of each selected row. Raises ValueError if there is none."""
        config = self.config
        problems = [
            (question, answer)
            for row in config.rows()
            for question, answer in _problem(row, config)
        ]
        if not problems:
            raise ValueError(
                f"{config.dataset_name} has no row with {config.question_key} and {config.answer_key} that "
                "is asked: correct question_key, answer_key or the bounds of difficulty_key"
            )
        if config.dataset_shuffle:
            draws = Draws("shuffle", config.dataset_seed)
            for place in range(len(problems) - 1, 0, -1):
                other = draws.below(place + 1)
                problems[place], problems[other] = problems[other], problems[place]
        return problems


def _problem(row: Mapping[str, Any], config: MathEnvConfig) -> Iterator[tuple[str, str]]:
    """Yield question and answer of a row; nothing if one is missing or its difficulty excluded."""
    if config.difficulty_key:
        rate = _value(row, config.difficulty_key)
        if not isinstance(rate, int | float):
            return
        if not config.min_avg_reward <= rate <= config.max_avg_reward:
            return
    question, answer = _value(row, config.question_key), _value(row, config.answer_key)
    answer = _as_text(answer)
    if isinstance(question, str) and isinstance(answer, str):
        answer = answer.rsplit("####", 1)[-1]  # the form of gsm8k
        answer = (extract_boxed_answer(answer, strict=True) or answer).strip()
        if question.strip() and answer:
            yield question, answer


def _as_text(answer: Any) -> Any:
    """Return an answer as it was written, where a table made a number or a date of it."""
    if isinstance(answer, datetime):  # a table knows no days, only moments
        return (answer.date() if answer.time() == time() else answer).isoformat()
    if isinstance(answer, date | time):
        return answer.isoformat()
    return str(answer) if isinstance(answer, int | float | Decimal) else answer


def _value(row: Mapping[str, Any], key: str) -> Any:
    """Return the value of `key`, whose dots lead into JSON or nested values; None if missing."""
    column, *inner = [key] if key in row else key.split(".")
    value = row.get(column)
    for name in inner:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                return None
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


__all__ = ["MathEnvTaskset"]
