"""Write the laptop recipes' small data sets: ~/.primerl/datasets/laptop/NAME/train.jsonl.

    python scripts/recipe_data.py

The data sets are sums, in the columns of the hub data sets of the larger recipes, and conversations of the two
games for supervised fine-tuning on their form. Their names differ from those of the hub data sets, so that no
larger recipe reads them by mistake.
"""

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from primerl.node.environments.tasksets.alphabet_sort import AlphabetSortConfig, AlphabetSortTaskset
from primerl.node.environments.tasksets.word_game import (
    WORDS,
    WordGameConfig,
    WordGameTaskset,
    answer_to,
)

FOLDER = Path(".primerl") / "datasets" / "laptop"
GAMES = 512
FAR = 1 << 20
"""Index of the first game in the data, beyond all games that reinforcement learning plays."""
Row = Mapping[str, Any]


def sums() -> Iterator[tuple[str, str]]:
    """Yield (question, answer) of all sums below ten."""
    for left in range(10):
        for right in range(10 - left):
            yield f"What is {left} + {right}?", str(left + right)


def plain(question: str, answer: str) -> Row:
    """Make a row in the format of PrimeIntellect/Hendrycks-Math."""
    return {"question": question, "answer": answer}


def deepscaler(question: str, answer: str) -> Row:
    """Make a row in the format of agentica-org/DeepScaleR-Preview-Dataset."""
    return {"problem": question, "answer": answer, "solution": ""}


def genesys(question: str, answer: str) -> Row:
    """Make a row in the format of INTELLECT-2's data sets, whose prompts ask for a box."""
    return {
        "prompt": f"{question} Answer in \\boxed{{}}.",
        "verification_info": json.dumps({"ground_truth": answer}),
        "solve_rate_qwen_r1_distill_7b": 0.5,
    }


def sorted_names() -> Iterator[Row]:
    """Yield correctly answered episodes of alphabet-sort."""
    config = AlphabetSortConfig.model_validate(
        {"max_turns": 2, "max_names_per_turn": 2, "id": "alphabet-sort"}
    )
    taskset = AlphabetSortTaskset(config)
    for index in range(FAR, FAR + GAMES):
        data = taskset.task_at(index).data
        yield conversation(zip([data.prompt, *data.follow_ups], data.replies, strict=True))


def guessed_words() -> Iterator[Row]:
    """Yield games of two random guesses."""
    taskset = WordGameTaskset(WordGameConfig.model_validate({"max_guesses": 2, "id": "word-game"}))
    draw = random.Random(0)
    for index in range(FAR, FAR + GAMES):
        data = taskset.task_at(index).data
        first, second = draw.choice(WORDS), draw.choice(WORDS)
        told = answer_to(first, data.secret, 1)
        yield conversation([(data.prompt, f"[{first}]"), (told, f"[{second}]")])


def conversation(turns: Any) -> Row:
    """Make a row in the format of `primerl-node sft`."""
    messages: list[Row] = []
    for said, reply in turns:
        messages += [
            {"role": "user", "content": said},
            {"role": "assistant", "content": reply},
        ]
    return {"messages": messages}


def write(name: str, rows: Iterator[Row]) -> None:
    """Write one data set below the home directory."""
    path = Path.home() / FOLDER / name / "train.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    write("hendrycks-math", (plain(*one) for one in sums()))
    write("deepscaler", (deepscaler(*one) for one in sums()))
    write("intellect-math", (genesys(*one) for one in sums()))
    write("simple-math", (genesys(*one) for one in sums()))
    write("alphabet-sort", sorted_names())
    write("word-game", guessed_words())
