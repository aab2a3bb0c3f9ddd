"""The bundled tasksets: tasks and rewards are the same everywhere, and rewarded is what was asked for."""

import json
import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import chain, islice, product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pydantic import ValidationError
from support.chat_model import IM_END, make_chat_model
from support.counting_environment import shown_reply
from support.late_imports import imported_late

from primerl.node.config.run import EnvironmentConfig
from primerl.node.environments.allowed import BUNDLED
from primerl.node.environments.environment import Environment, EnvironmentFailed, Episode
from primerl.node.environments.tasksets.draws import Draws
from primerl.node.environments.verifiers import VerifiersEnvironment
from primerl.node.inference.engine import Completion

if TYPE_CHECKING:
    from primerl.node.environments.tasksets import (
        alphabet_sort,
        alphabet_sort_hub,
        math,
        math_env,
        reasoning_gym,
        word_game,
    )

MODULES = ("alphabet_sort", "alphabet_sort_hub", "math", "math_env", "reasoning_gym", "word_game")
late_imports = imported_late(
    globals(), **{name: f"primerl.node.environments.tasksets.{name}" for name in MODULES}
)

OWN = ("math", "alphabet-sort", "word-game", "reverse-text", "arithmetic")
"""Bundled tasksets that need nothing else."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("model"))


async def opened(model_dir: Path, name: str, *, seed: int = 0, **args: object) -> Environment:
    environment = VerifiersEnvironment(
        EnvironmentConfig(id=name, args=args),
        model_dir=model_dir,
        seed=seed,
        max_tokens=1024,
        temperature=1.0,
    )
    await environment.start()
    return environment


class Scripted:
    """A policy with one reply a turn, which keeps what it was asked."""

    def __init__(self, *replies: str) -> None:
        self.replies = replies
        self.prompts: list[str] = []

    async def __call__(self, prompt: Sequence[int], turn: int) -> Completion:
        self.prompts.append(bytes(one for one in prompt if one < 256).decode())
        ids = [*self.replies[turn].encode(), IM_END]
        return Completion(ids, [-1.0] * len(ids), "stop", 0, 0)


async def play(environment: Environment, index: int, *replies: str) -> tuple[Episode, Scripted]:
    """A rollout of task `index`, whose score was recomputed and is the same."""
    task, policy = await environment.task(index), Scripted(*replies)
    episode = await environment.run(task, policy)
    assert episode.error == ""
    assert await environment.score(task, episode.branches) == episode.score
    return episode, policy


async def asked(environment: Environment, index: int, split: str = "train") -> str:
    task = await environment.task(index, "eval" if split == "eval" else "train")
    return bytes(one for one in await environment.prompt(task) if one < 256).decode()


GOLDEN = {
    "math": ("84b6e4a0407bbf59", "b3768beb47c7293f"),
    "alphabet-sort": ("a010a62959f41723", "8a5db69004038e37"),
    "word-game": ("15c59a19f7625124", "e94b17db4a1edf9f"),
    "reverse-text": ("a661a50bfbeff431", "26953de85c2ba0d2"),
    "arithmetic": ("4d663dfe1327287d", "00367a363cb033f0"),
}
"""First 8 bytes of the digests of task 5, to train and held out: a change breaks every run under way."""


@pytest.mark.parametrize("name", OWN)
async def test_tasks_are_the_same_on_every_machine(name: str, model_dir: Path) -> None:
    one, again, other = [await opened(model_dir, name, seed=seed) for seed in (0, 0, 1)]
    digests = [
        [(await environment.task(index)).digest for index in range(40)]
        for environment in (one, again, other)
    ]
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]
    held = [(await one.task(5, split)).digest[:8].hex() for split in ("train", "eval")]
    assert tuple(held) == GOLDEN[name]


@pytest.mark.parametrize("name", ["math", "alphabet-sort", "reverse-text", "arithmetic"])
async def test_held_out_questions_never_turn_up_in_training(name: str, model_dir: Path) -> None:
    environment, other = await opened(model_dir, name), await opened(model_dir, name, seed=1)
    held_out = {await asked(environment, index, "eval") for index in range(100)}
    trained = {await asked(one, index) for one in (environment, other) for index in range(400)}
    assert not held_out & trained
    assert len(held_out) > 80


def test_a_secret_word_is_either_trained_on_or_held_out() -> None:
    secrets: dict[str, set[str]] = {"train": set(), "eval": set()}
    for split, seed in product(secrets, (0, 1)):
        options = {"id": "w", "split": split, "seed": seed, "max_guesses": 1}  # guesses take time
        taskset = word_game.WordGameTaskset(word_game.WordGameConfig.model_validate(options))
        secrets[split] |= {taskset.task_at(index).data.secret for index in range(400)}
    assert not secrets["train"] & secrets["eval"]
    assert min(map(len, secrets.values())) > 30


def test_draws_are_uniform_and_a_function_of_their_name() -> None:
    counts = [0] * 7
    draws = Draws("dice", 1)
    for _ in range(7000):
        counts[draws.below(7)] += 1
    assert all(850 < count < 1150 for count in counts)
    assert Draws("a", 1).sample(range(9), 9) == Draws("a", 1).sample(range(9), 9)
    assert Draws("a", 1).sample(range(9), 9) != Draws("a", 2).sample(range(9), 9)
    assert [Draws("x").between(3, 3), Draws("x").choice("z")] == [3, "z"]


# -- math -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["linear", "fraction", "quadratic", "product", "system"])
async def test_the_known_answer_of_a_problem_is_right(family: str, model_dir: Path) -> None:
    environment = await opened(model_dir, "math", families=[family])
    for index in range(8):
        shown = await shown_reply(environment, await environment.task(index))
        answer = bytes(shown[:-1]).decode()
        right, _ = await play(environment, index, f"<think>\\boxed{{0}}</think> So {answer}.")
        assert right.score.metrics == {"correct": 1.0, "boxed": 1.0}
        wrong, _ = await play(environment, index, "\\boxed{123456}")
        assert wrong.score.metrics == {"correct": 0.0, "boxed": 1.0}
        bare, _ = await play(environment, index, answer[7:-1])
        assert bare.score.metrics == {"correct": 0.0, "boxed": 0.0}


def test_problems_have_the_answers_that_they_are_said_to_have() -> None:
    """By arithmetic of their own, not by the code that made them."""
    taskset = math.MathTaskset(
        math.MathConfig(id="math", families=("linear", "quadratic", "system"))
    )
    for index in range(60):
        data = taskset.task_at(index).data
        question, answer = str(data.prompt), data.answer[7:-1]
        if found := re.search(r"for x: (\d+)x \+ (\d+) = (\d+)", question):
            slope, offset, result = map(int, found.groups())
            value = Fraction(re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", r"\1/\2", answer))
            assert slope * value + offset == result
        elif found := re.search(r"(larger|smaller).*x\^2 ([+-]) (\d+)x ([+-]) (\d+)", question):
            middle, last = int(found[2] + found[3]), int(found[4] + found[5])
            root = int(answer)
            assert root * root + middle * root + last == 0
            assert (2 * root >= -middle) == (found[1] == "larger") or 2 * root == -middle
        else:
            total, factor, rest = map(
                int, re.findall(r"x \+ y = (\d+) and (\d+)x - y = (-?\d+)", question)[0]
            )
            x, y = map(int, re.findall(r"\d+", answer))
            assert (x + y, factor * x - y) == (total, rest)


@pytest.mark.parametrize(
    ("answer", "given"),
    [
        ("\\frac{1}{2}", "0.5"),
        ("\\frac{1}{2}", "1/2"),
        ("-\\frac{3}{4}", "\\frac{-3}{4}"),
        ("7", "7.0"),
        ("7", "x = 7"),
        ("(3, 4)", "(3,4)"),
        ("2\\sqrt{3}", "\\sqrt{12}"),
        ("x^2 + 3x - 4", "(x-1)(x+4)"),
    ],
)
def test_answers_of_equal_value_are_equal(answer: str, given: str) -> None:
    assert math.is_right(f"so \\boxed{{{given}}}", f"\\boxed{{{answer}}}")


@pytest.mark.parametrize(
    "given",
    [
        *("8", "seven", "", "{", "}{", "\\frac{1}{0}", "\\infty", "7, 8", "__import__('os')"),
        *("2 + 5", "14 \\cdot 0.5", "8-1"),  # left to the judge to compute
        *(
            "9^{9^{9^9}}",
            "9**9**9**9",
            "2^{99999}",
            "(x+y)^{99}",
            "170!",
            "1" * 300,
            "\\sqrt{" * 60,
        ),
    ],
)
def test_other_answers_are_not_whatever_they_look_like(given: str) -> None:
    assert not math.is_right(f"\\boxed{{{given}}}", "\\boxed{7}")


@pytest.mark.parametrize(
    ("answer", "given", "right"),
    [
        ("1.6\\times 10^{-19}", "1.7\\times 10^{-19}", False),
        ("1.6\\times10^{-19}", "1.60 \\times 10^{-19}", True),
        ("0.000001", "0.0000012", False),
        ("(2, 0.000001)", "(2, 0.0000012)", False),
        ("\\pi/10^{20}", "2\\pi/10^{20}", False),
        ("-0.0000004", "0.0000004", False),
        ("300000000", "3 \\times 10^8", True),
        ("\\frac{1}{3}", "0.333333", True),
        ("123456789", "123456789.5", False),
    ],
)
def test_small_numbers_are_compared_as_closely_as_large_ones(
    answer: str, given: str, *, right: bool
) -> None:
    assert math.is_equal(answer, given) == right


@pytest.mark.parametrize(
    ("answer", "given", "right"),
    [
        ("50\\%", "50", True),
        ("50", "50\\%", True),
        ("50\\%", "0.5", False),
        ("0.5", "50\\%", False),
        ("5\\%", "5 \\text{ cm}", False),
        ("5\\text{ cm}", "5 m", False),
        ("5\\text{ cm}", "5", True),
        ("5\\text{ centimeters}", "5\\,\\mathrm{cm}", True),
        ("12\\pi\\text{ cm}^2", "12\\pi\\text{ cm}^3", False),
        ("12\\text{ square feet}", "12\\text{ ft}^{2}", True),
        ("60\\text{ mph}", "60\\text{ miles per hour}", True),
        ("60\\text{ mph}", "60\\text{ km/h}", False),
        ("\\$5", "5\\text{ cents}", False),
        ("90^\\circ", "90\\text{ radians}", False),
        ("12\\text{ red apples}", "12\\text{ apples}", True),
    ],
)
def test_a_unit_may_be_left_out_and_not_be_another(answer: str, given: str, *, right: bool) -> None:
    assert math.is_equal(answer, given) == right


@pytest.mark.parametrize("text", ["2m + 3g", "x s", "\\text{Monday}", "x = 5", "\\sin", "7"])
def test_a_variable_and_a_word_are_no_units(text: str) -> None:
    assert math.read_unit(text) == frozenset()


def test_an_answer_inside_unfinished_thoughts_does_not_count() -> None:
    assert not math.is_right("<think>it is \\boxed{7}", "\\boxed{7}")


# -- data sets ------------------------------------------------------------------------------------

GENESYS = [
    {
        "problem_id": str(number),
        "task_type": "verifiable_math",
        "prompt": f"What is {number} + 1? Put it in \\boxed{{}}.",
        "verification_info": json.dumps({"ground_truth": str(number + 1)}),
        "solve_rate_qwen_r1_distill_7b": number / 40,
    }
    for number in range(40)
]
"""PrimeIntellect/INTELLECT-2-only-math, justus27/math-hendrycks-genesys-format."""
SCHEMAS: dict[str, tuple[str, list[dict[str, object]]]] = {
    "hendrycks-math": (
        "PrimeIntellect/Hendrycks-Math",
        [{"question": f"What is {n} + 1?", "answer": str(n + 1), "level": "1"} for n in range(40)],
    ),
    "intellect-math": ("PrimeIntellect/INTELLECT-2-only-math", [dict(row) for row in GENESYS]),
    "deepscaler": (
        "agentica-org/DeepScaleR-Preview-Dataset",
        [{"problem": f"What is {n} + 1?", "answer": str(n + 1), "solution": ""} for n in range(40)],
    ),
    "simple-math": ("justus27/math-hendrycks-genesys-format", [dict(row) for row in GENESYS]),
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def store(home: Path, name: str, rows: Sequence[dict[str, object]], ending: str = ".jsonl") -> None:
    """Put a data set where its owner would."""
    folder = home / ".primerl" / "datasets" / name
    folder.mkdir(parents=True)
    if ending == ".jsonl":
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    import pyarrow
    from pyarrow import parquet

    for number, part in enumerate((rows[:4], rows[4:])):
        table = pyarrow.Table.from_pylist(list(part))
        parquet.write_table(table, folder / f"train-{number:05}-of-00002.parquet")


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
@pytest.mark.parametrize("name", SCHEMAS)
async def test_a_seeds_data_set_is_read_from_files_of_its_schema(
    name: str, ending: str, home: Path, model_dir: Path
) -> None:
    store(home, *SCHEMAS[name], ending)
    environment = await opened(model_dir, name, len_reward=None)
    found = [await asked(environment, index) for index in range(60)]
    held_out = {await asked(environment, index, "eval") for index in range(20)}
    assert len(held_out) + len(set(found)) == len({*found, *held_out}) == 40
    number = int(re.findall(r"(\d+) \+ 1\?", found[0])[0])
    assert "\\boxed" in found[0]
    right, _ = await play(environment, 0, f"\\boxed{{{number + 1}}}")
    wrong, _ = await play(environment, 0, f"\\boxed{{{number}}}")
    assert (right.score.reward, wrong.score.reward) == (1.0, 0.0)


def test_answers_that_a_table_made_dates_of_are_text_again(home: Path) -> None:
    from datasets import Dataset

    rows: list[dict[str, object]] = [
        {"question": f"Which day is number {n}?", "answer": f"2021-01-{n:02}"} for n in (1, 2)
    ]
    store(home, "nobody/days", rows)
    folder = home / ".primerl" / "datasets" / "nobody" / "days"
    table = Dataset.from_json(str(folder / "train.jsonl"), cache_dir=str(home / "cache"))
    assert isinstance(table, Dataset)
    assert not isinstance(table[0]["answer"], str), "the library still makes dates of them"
    table.to_parquet(str(folder / "train.parquet"))
    (folder / "train.jsonl").unlink()
    config = math_env.MathEnvConfig(id="math-env", dataset_name="nobody/days")
    answers = [task.data.answer for task in math_env.MathEnvTaskset(config).load()]
    assert answers == ["\\boxed{2021-01-01}", "\\boxed{2021-01-02}"]


async def test_intellect_math_tells_and_rewards_target_lengths(home: Path, model_dir: Path) -> None:
    store(home, *SCHEMAS["intellect-math"])
    environment = await opened(model_dir, "intellect-math", len_reward={"target_lengths": [500]})
    prompt = await asked(environment, 0)
    assert prompt.startswith("Think for 500 tokens before giving a response.")
    number = int(re.findall(r"(\d+) \+ 1\?", prompt)[0])
    episode, _ = await play(environment, 0, f"\\boxed{{{number + 1}}}")
    length = len(f"\\boxed{{{number + 1}}}") + 1
    assert episode.score.reward == pytest.approx(0.0003 * (500 - length) + 0.5)
    assert episode.score.metrics["off_target"] == length - 500


def test_length_rewards_are_those_of_prime_rl() -> None:
    def reward(kind: str, length: int, solved: float = 1.0) -> float:
        config = math_env.LenRewardConfig.model_validate({"reward_type": kind})
        return config.apply(solved, 1000, length)

    assert reward("max", 1000) == 0.5
    assert reward("max", 0) == pytest.approx(0.8)
    assert reward("max", 5000) == 0.0
    assert reward("max", 500, 0.0) == 0.0
    assert reward("exact", 1100) == pytest.approx(0.97)
    assert reward("exact", 900, 0.0) == pytest.approx(-0.03)
    assert [reward("clip", 1000), reward("clip", 1001)] == [1.0, 0.0]
    discrete = {math_env.LenRewardConfig().target(Draws(n)) for n in range(100)}
    assert discrete == {500, 1000, 2000, 3000}
    ranged = math_env.LenRewardConfig(target_length_sampling="range", min_length=7, max_length=9)
    assert {ranged.target(Draws(n)) for n in range(100)} == {7, 8, 9}


def rows_asked(name: str, **options: object) -> list[str]:
    config = math_env.MathEnvConfig.model_validate({"id": name, **options})
    return [str(task.data.prompt) for task in math_env.MathEnvTaskset(config).load()]


def test_rows_are_chosen_by_difficulty_and_shuffled_by_seed(home: Path) -> None:
    rows = SCHEMAS["simple-math"][1]
    store(
        home,
        SCHEMAS["simple-math"][0],
        [*rows, {**rows[0], "prompt": None}, {"prompt": "no answer"}],
    )
    everything = rows_asked("simple-math")
    assert everything == [str(row["prompt"]) for row in rows]
    hard = rows_asked(
        "simple-math",
        difficulty_key="solve_rate_qwen_r1_distill_7b",
        min_avg_reward=0.2,
        max_avg_reward=0.5,
    )
    assert hard == everything[8:21]
    shuffled = [
        rows_asked("simple-math", dataset_shuffle=True, dataset_seed=seed) for seed in (1, 1, 2)
    ]
    assert shuffled[0] == shuffled[1] != shuffled[2]
    assert sorted(shuffled[2]) == sorted(everything)


def test_answers_of_other_schemas_are_found(home: Path) -> None:
    rows: list[dict[str, object]] = [
        {"question": "gsm8k", "answer": "3 + 4 is\n#### 7"},
        {"question": "solution", "answer": "so it is $\\boxed{7}$."},
        {"question": "number", "answer": 7},
    ]
    store(home, "openai/gsm8k", rows)
    config = math_env.MathEnvConfig(id="math-env", dataset_name="openai/gsm8k")
    answers = [task.data.answer for task in math_env.MathEnvTaskset(config).load()]
    assert answers == ["\\boxed{7}"] * 3


@pytest.mark.parametrize(
    "name", ["/etc", "../secrets", "a/../b", "a/b/c", ".ssh", "~/x", "https://x/y"]
)
def test_a_run_names_a_data_set_and_no_path(name: str, home: Path) -> None:
    with pytest.raises(ValidationError, match="no name of a data set"):
        math_env.MathEnvConfig(id="math-env", dataset_name=name)
    with pytest.raises(ValidationError):
        math_env.MathEnvConfig.model_validate({"id": "math-env", "dataset_split": f"{name}/"})


@pytest.mark.slow
async def test_a_data_set_that_is_nowhere_is_one_line(
    home: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    with pytest.raises(EnvironmentFailed, match=r"^task 0 cannot be made"):
        await opened(model_dir, "math-env", dataset_name="nobody/nothing")
    store(home, "nobody/blank", [{"prompt": "x"}])
    with pytest.raises(EnvironmentFailed, match="correct question_key, answer_key"):
        await opened(model_dir, "math-env", dataset_name="nobody/blank")


def test_a_data_set_of_the_hub_is_read_by_the_library(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder in the working directory stands for the hub, for `datasets` as well."""
    folder = home / "somebody" / "sums"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    monkeypatch.chdir(home)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", home / "cache")
    assert rows_asked("math-env", dataset_name="somebody/sums", instruction_prompt="") == ["1 + 1?"]


# -- prime-rl's reverse-text and alphabet-sort ----------------------------------------------------


async def test_a_text_of_a_data_set_is_reversed_in_tags_as_prime_rl_asks_for(
    home: Path, model_dir: Path
) -> None:
    texts = [f"text {number}: was it a car or a cat I saw?" for number in range(30)]
    store(home, "PrimeIntellect/Reverse-Text-RL", [{"prompt": text} for text in texts])
    environment = await opened(model_dir, "reverse-text-hub")
    prompt = await asked(environment, 0)
    assert (
        "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
        in prompt
    )
    text = next(text for text in texts if text in prompt)

    async def reward(reply: str) -> float:
        return (await play(environment, 0, reply))[0].score.reward

    turned = text[::-1]
    assert await reward(f"<reversed_text>\n{turned}\n</reversed_text>") == 1.0
    assert await reward(f"So: <reversed_text>{turned}</reversed_text>!") == 1.0
    assert await reward(turned) == 0.0
    assert await reward(f"<reversed_text>{turned}") == 0.0
    # 2 * matches / length of both, of the first tagged text
    half = turned[: len(turned) // 2]
    share = 2 * len(half) / (len(half) + len(turned))
    first = f"<reversed_text>{half}</reversed_text><reversed_text>{turned}</reversed_text>"
    assert await reward(first) == pytest.approx(share)
    demonstration = await environment.demonstration(await environment.task(0))
    assert demonstration is not None
    assert turned.encode() in bytes(one for one in demonstration.token_ids if one < 256)


async def test_a_long_reply_with_a_wrong_beginning_earns_nothing_as_in_prime_rl(
    home: Path, model_dir: Path
) -> None:
    """difflib leaves characters out that make up more than a hundredth of 200 and more."""
    pattern = "not a tin on it an " * 20
    texts = [pattern[:length] for length in (60, 199, 200, 301)]
    store(home, "nobody/long", [{"prompt": text} for text in texts])
    environment = await opened(model_dir, "reverse-text-hub", dataset_name="nobody/long")
    found: dict[int, float] = {}
    for index in range(len(texts)):
        task = await environment.task(index)
        prompt = bytes(one for one in await environment.prompt(task) if one < 256).decode()
        text = max((one for one in texts if one in prompt), key=len)
        reply = f"<reversed_text>?{text[::-1][1:]}</reversed_text>"
        found[len(text)] = (await play(environment, index, reply))[0].score.reward
    assert min(reward for length, reward in found.items() if length < 200) > 0.95
    assert {reward for length, reward in found.items() if length >= 200} == {0.0}


async def test_a_data_set_without_texts_is_refused_with_its_column(
    home: Path, model_dir: Path
) -> None:
    store(home, "nobody/words", [{"text": "abc"}])
    with pytest.raises(EnvironmentFailed, match="nobody/words has no text in its column prompt"):
        await opened(model_dir, "reverse-text-hub", dataset_name="nobody/words")
    store(home, "nobody/few", [{"names": ["Ada Abbott"]}])
    with pytest.raises(EnvironmentFailed, match="no row of nobody/few has as many names"):
        await opened(model_dir, "alphabet-sort-hub", dataset_name="nobody/few", min_turns=2)


NAMED: list[dict[str, object]] = [
    {"names": ["Ada de Berg", "Zoe Adler", "Ada de Berg", "Lin Xu", "Bela Zimmer", "Wei Castro"]},
    {"names": ["Too Few"]},
    {"names": ["Olga Novak", "Hugo Ito", "Tara Wong", "Ivan Evans", "Pedro Ueda"]},
]


def test_names_of_a_data_set_are_sorted_over_turns_as_prime_rl_asks_for(home: Path) -> None:
    store(home, "kalomaze/alphabetic-arxiv-authors-it1", NAMED)
    options = {"id": "alphabet-sort-hub", "min_turns": 2, "max_names_per_turn": 2}
    config = alphabet_sort_hub.AlphabetSortHubConfig.model_validate(options)
    tasks = list(islice(alphabet_sort_hub.AlphabetSortHubTaskset(config).load(), 40))
    assert [task.data.idx for task in tasks] == list(range(40))
    assert len({task.data.model_dump_json(exclude={"idx"}) for task in tasks}) > 20
    for data in (task.data for task in tasks):
        opening = (
            r"Sort these names in alphabetical order by (FIRST|LAST) name: (.*)\n\nUse exactly"
        )
        match = re.match(opening, str(data.prompt))
        assert match is not None
        assert re.search(
            r"<alphabetical_sorted>\n(Name\d\n)+</alphabetical_sorted>$", str(data.prompt)
        )
        label, told = match.groups()
        known: list[str] = []
        for turn, answer in enumerate(data.answers):
            if turn:
                told = data.follow_ups[turn - 1].split("name: ")[1].split("\n")[0]
            new = told.split(", ")
            known += new
            # the first part ends before the second capital
            parts = {"AdadeBerg": ("Adade", "Berg")}
            key = {name: parts.get(name) or re.findall("[A-Z][a-z]*", name) for name in known}
            ranked = sorted(known, key=lambda name: key[name][label == "LAST"])
            assert list(answer) == [
                name + " // new name!" if turn and name in new else name for name in ranked
            ]
        assert "Follow the same format as before." not in data.follow_ups[0]
        assert all("Follow the same format" in text for text in data.follow_ups[1:])


async def test_a_sorted_list_of_a_data_set_earns_what_prime_rl_pays(
    home: Path, model_dir: Path
) -> None:
    store(home, "kalomaze/alphabetic-arxiv-authors-it1", NAMED)
    one: dict[str, object] = {"min_turns": 2, "max_turns": 2, "task": {"similarity_power": 2}}
    environment = await opened(model_dir, "alphabet-sort-hub", seed=0, **one)
    config = alphabet_sort_hub.AlphabetSortHubConfig.model_validate(
        {"id": "alphabet-sort-hub", **one}
    )
    first = await asked(environment, 0)
    tasks = islice(alphabet_sort_hub.AlphabetSortHubTaskset(config).load(), 40)
    data = next(task.data for task in tasks if str(task.data.prompt) in first)
    right = [tagged(answer, turn) for turn, answer in enumerate(data.answers)]
    episode, policy = await play(environment, 0, *right)
    assert episode.score.reward == 1.0
    assert "Now sort ALL of these names" in policy.prompts[1]
    wrong, _ = await play(environment, 0, right[0], "none")
    assert wrong.score.reward == 0.5


# -- alphabet-sort --------------------------------------------------------------------------------


def sort_data(**options: object) -> "list[alphabet_sort.AlphabetSortData]":
    config = alphabet_sort.AlphabetSortConfig.model_validate({"id": "alphabet-sort", **options})
    taskset = alphabet_sort.AlphabetSortTaskset(config)
    return [taskset.task_at(index).data for index in range(30)]


def tagged(lines: Sequence[str], turn: int) -> str:
    tag = "combined_alphabetical_sorted" if turn else "alphabetical_sorted"
    return f"<{tag}>\n" + "\n".join(lines) + f"\n</{tag}>"


async def test_right_lists_are_shown_turn_by_turn(model_dir: Path) -> None:
    environment = await opened(model_dir, "alphabet-sort", min_turns=2, max_turns=2)
    for index in range(3):
        shown = await environment.demonstration(await environment.task(index))
        assert shown is not None
        said = [bytes(one for one in reply if one < 256).decode() for _, reply in shown.turns()]
        data = sort_data(min_turns=2, max_turns=2)[index]
        assert said == [tagged(lines, turn) for turn, lines in enumerate(data.answers)]
        episode, _ = await play(environment, index, *said)
        assert episode.score.reward == 1.0


def test_lists_are_in_order_and_mark_what_is_new() -> None:
    for data in sort_data(min_turns=2, max_turns=4):
        assert len(data.follow_ups) + 1 == len(data.answers)
        told = [
            re.findall(r"[A-Z][a-z]+[A-Z][a-z]+", text)
            for text in (str(data.prompt), *data.follow_ups)
        ]
        place = 0 if "FIRST" in str(data.prompt) else 1
        for turn, answer in enumerate(data.answers):
            names = [line.partition(" // ")[0] for line in answer]
            parts = [re.findall("[A-Z][a-z]+", name)[place] for name in names]
            assert parts == sorted(set(parts))
            assert set(names) == set(chain(*told[: turn + 1]))
            new = {line.partition(" // ")[0] for line in answer if line.endswith(" // new name!")}
            assert new == (set(told[turn]) if turn else set())


async def test_an_episode_has_all_its_turns_and_right_lists_earn_one(model_dir: Path) -> None:
    options = {"min_turns": 3, "max_turns": 3}
    environment = await opened(model_dir, "alphabet-sort", **options)
    data = sort_data(**options)[2]
    right = [tagged(lines, turn) for turn, lines in enumerate(data.answers)]
    episode, policy = await play(environment, 2, *right)
    assert episode.score.metrics == {"alphabet_sort": 1.0, "exact": 1.0}
    assert [
        policy.prompts[turn].endswith(text)
        for turn, text in enumerate((str(data.prompt), *data.follow_ups))
    ]
    assert policy.prompts[2].startswith(str(data.prompt) + right[0] + data.follow_ups[0] + right[1])
    assert [branch.finish for branch in episode.branches] == ["stop"]
    partly, _ = await play(environment, 2, right[0], "I do not know", right[2])
    assert partly.score.reward == pytest.approx(2 / 3)
    none, _ = await play(environment, 2, "", right[0], tagged(["Nobody"], 2))
    assert none.score.reward < 0.05
    assert none.score.metrics["exact"] == 0.0


def test_turns_are_scored_by_similarity_and_repeated_lists_have_to_improve() -> None:
    right, close = ["AdaBerg", "LinCho"], ["AdaBerg", "LinCh"]
    score = alphabet_sort.turn_score
    tag = "alphabetical_sorted"
    assert score(tagged(right, 0), right, tag, 4) == 1.0
    assert score(tagged([" adaberg ", "", "LINCHO"], 0), right, tag, 4) == 1.0
    near = score(tagged(close, 0), right, tag, 1)
    assert 0.9 < near < 1.0
    assert score(tagged(close, 0), right, tag, 4) == pytest.approx(near**4)
    assert score(tagged(close, 0) + tagged(right, 0), right, tag, 4) == 1.0
    assert score(tagged(right, 0) + tagged(close, 0), right, tag, 4) == 0.0
    assert score("\n".join(right), right, tag, 4) == 0.0
    assert score(tagged(right, 1), right, tag, 4) == 0.0


async def test_the_power_may_apply_to_the_mean(model_dir: Path) -> None:
    first = tagged(sort_data(min_turns=2, max_turns=2)[0].answers[0], 0)
    score = {"power_per_turn": False, "similarity_power": 2}
    environment = await opened(model_dir, "alphabet-sort", min_turns=2, max_turns=2, task=score)
    half, _ = await play(environment, 0, first, "no")
    assert half.score.reward == pytest.approx(0.25)


# -- word-game ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guess", "secret", "expected"),
    [
        ("crane", "crane", "GGGGG"),
        ("nacre", "crane", "YYYYG"),
        ("llama", "label", "GYY--"),  # two l and two a in the guess: label has two l, one a
        ("sweet", "steel", "G-GGY"),
        ("zzzzz", "crane", "-----"),
        ("", "crane", "-----"),
    ],
)
def test_letters_are_marked_as_often_as_the_secret_has_them(
    guess: str, secret: str, expected: str
) -> None:
    assert word_game.marks(guess, secret) == expected


def test_words_are_five_letters_and_none_occurs_twice() -> None:
    assert all(re.fullmatch("[a-z]{5}", word) for word in word_game.WORDS)
    assert len(set(word_game.WORDS)) == len(word_game.WORDS) > 500


@pytest.mark.parametrize(
    ("reply", "guess"),
    [
        ("[crane]", "crane"),
        ("first [abcde], no: [ CRANE ]", "crane"),
        ("crane", ""),
        ("[cranes]", ""),
        ("[crane] or [cranes]", ""),
        ("[cra\nne]", ""),
        ("[12345]", ""),
    ],
)
def test_the_last_brackets_are_the_guess(reply: str, guess: str) -> None:
    assert word_game.read_guess(reply) == guess


def secret_of(index: int) -> str:
    config = word_game.WordGameConfig(id="word-game")
    return word_game.WordGameTaskset(config).task_at(index).data.secret


async def test_a_game_ends_with_the_secret_and_each_guess_is_answered(model_dir: Path) -> None:
    environment = await opened(model_dir, "word-game")
    secret = secret_of(4)
    rolled = secret[1:] + secret[0]
    episode, policy = await play(
        environment, 4, f"[{rolled}]", "hm", f"so it is [{secret}]", "never said"
    )
    assert len(policy.prompts) == 3
    marks = " ".join(word_game.marks(rolled, secret))
    assert f"{marks}\n5 guesses left." in policy.prompts[1]
    assert "That was no guess" in policy.prompts[2]
    assert policy.prompts[2].endswith("4 guesses left.")
    assert secret.upper() not in policy.prompts[2].replace(" ", "")
    assert episode.score.metrics == {
        "solved": 1.0,
        "closeness": 1.0,
        "guesses": 3.0,
        "invalid": 1.0,
    }
    assert episode.score.reward == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("guesses", "secret", "shown"),
    [
        (["zzzzz"], "crane", "c----"),
        (["zzaze"], "crane", "c-a-e"),
        (["zzaze", ""], "crane", "c-a-e"),  # a reply without a guess earns no hint
        (["zzaze", "zzzzz"], "crane", "cra-e"),
        (
            ["zzaze", "zzzzz", "zzzzz"],
            "crane",
            "cra-e",
        ),  # the last letter is for the player to find
        (["zrane", "zzzzz"], "crane", "-rane"),
        ([""], "crane", "-----"),
    ],
)
def test_hints_are_the_letters_in_place_and_one_more(
    guesses: list[str], secret: str, shown: str
) -> None:
    assert word_game.known(guesses, secret) == shown


async def test_hints_alone_do_not_win_a_game(model_dir: Path) -> None:
    environment = await opened(model_dir, "word-game", max_guesses=3, hints=True)
    secret = secret_of(0)
    episode, policy = await play(environment, 0, "[zzzzz]", "hm", f"[{secret[0]}zzzz]")
    assert [prompt.endswith(f"{secret[0]}----") for prompt in policy.prompts] == [False, True, True]
    assert episode.score.metrics["solved"] == 0.0
    assert episode.score.reward == pytest.approx(0.2 * 0.2)
    won, _ = await play(environment, 0, "[zzzzz]", f"[{secret}]")
    assert won.score.reward == pytest.approx(1.2)


GAMES = range(60)


def shown_games(**options: object) -> list[tuple[str, list[str]]]:
    """(secret, guesses) of demonstrations."""
    config = word_game.WordGameConfig.model_validate({"id": "word-game", **options})
    taskset = word_game.WordGameTaskset(config)
    found = [taskset.task_at(index).data for index in GAMES]
    return [(one.secret, [reply[1:-1] for reply in one.replies]) for one in found]


@pytest.mark.parametrize("hints", [False, True])
def test_a_demonstration_knows_what_its_answers_told_and_no_more(hints: bool) -> None:
    games = shown_games(hints=hints)
    for secret, guesses in games:
        assert len(guesses) == 6 or guesses[-1] == secret
        for place, guess in enumerate(guesses):
            before = guesses[:place]
            if hints:
                assert word_game.fits(guess, word_game.known(before, secret))
            else:
                assert all(
                    word_game.marks(one, guess) == word_game.marks(one, secret) for one in before
                )
    assert sum(guesses[0] == secret for secret, guesses in games) < 3, "nobody tells it the secret"


def test_a_demonstration_of_less_skill_fits_less_often() -> None:
    def share(skill: float) -> float:
        fitting = [
            word_game.fits(guess, word_game.known(guesses[:place], secret))
            for secret, guesses in shown_games(hints=True, demonstration_skill=skill)
            for place, guess in enumerate(guesses)
            if place
        ]
        return sum(fitting) / len(fitting)

    assert share(1.0) == 1.0
    assert 0.4 < share(0.5) < 0.7
    assert share(0.0) < 0.1


def test_a_demonstration_shows_no_word_that_is_held_out() -> None:
    held_out = {secret for secret, _ in shown_games(split="eval")}
    shown = {guess for _, guesses in shown_games(demonstration_skill=0.5) for guess in guesses}
    assert not shown & held_out


async def test_a_warm_up_is_shown_a_whole_game(model_dir: Path) -> None:
    environment = await opened(model_dir, "word-game", hints=True)
    shown = await environment.demonstration(await environment.task(4))
    assert shown is not None
    [(secret, guesses)] = shown_games(hints=True)[4:5]
    replies = [bytes(one for one in reply if one < 256).decode() for _, reply in shown.turns()]
    assert replies == [f"[{guess}]" for guess in guesses]
    assert f"[{secret}]" not in await asked(environment, 4)


async def test_a_lost_game_is_over_after_its_last_guess(model_dir: Path) -> None:
    environment = await opened(model_dir, "word-game", max_guesses=2)
    secret = secret_of(0)
    wrong = f"[{secret[:4]}{'x' if secret[4] != 'x' else 'y'}]"
    episode, policy = await play(environment, 0, "[zzzzz]", wrong, f"[{secret}]")
    assert len(policy.prompts) == 2
    assert episode.score.metrics["solved"] == 0.0
    assert episode.score.reward == pytest.approx(0.2 * 0.8)


# -- reasoning-gym --------------------------------------------------------------------------------


async def test_a_puzzle_is_generated_and_scored_by_its_library(model_dir: Path) -> None:
    pytest.importorskip("reasoning_gym")
    environment = await opened(
        model_dir, "reasoning-gym", family="chain_sum", options={"min_terms": 3}
    )
    again = await opened(model_dir, "reasoning-gym", family="chain_sum", options={"min_terms": 3})
    for index in range(5):
        task = await environment.task(index)
        assert task == await again.task(index)
        shown = await shown_reply(environment, task)
        answer = bytes(shown[:-1]).decode()
        assert (await play(environment, index, f"so {answer}"))[0].score.reward == 1.0
        assert (await play(environment, index, "<answer>pear</answer>"))[0].score.reward < 0.1
        assert (await play(environment, index, answer[8:-9]))[0].score.reward == 0.0
    held_out = {await asked(environment, index, "eval") for index in range(20)}
    assert not held_out & {await asked(environment, index) for index in range(200)}


@pytest.mark.parametrize("family", ["acre", "word_ladder"])
async def test_a_family_of_few_items_opens_and_gives_tasks(family: str, model_dir: Path) -> None:
    pytest.importorskip("reasoning_gym")
    environment = await opened(model_dir, "reasoning-gym", family=family)
    shown = await shown_reply(environment, await environment.task(0))
    episode, _ = await play(environment, 0, bytes(shown[:-1]).decode())
    assert episode.score.reward == 1.0


def test_an_item_that_a_family_cannot_make_ends_none_after_it() -> None:
    """As word_ladder: an item that cannot be made becomes the family's end."""

    class Ladder:
        size = 5

        def __getitem__(self, item: int) -> int:
            if item == 1 or item >= self.size:
                self.size = min(item, self.size)
                raise IndexError(item)
            return item

    family = Ladder()
    with pytest.raises(IndexError):
        reasoning_gym.make_puzzle(family, "word_ladder", 1)
    assert reasoning_gym.make_puzzle(family, "word_ladder", 3) == 3


@pytest.mark.parametrize("family", ["prime_factorization", "time_intervals", "base_conversion"])
async def test_an_answer_that_a_family_cannot_read_earns_nothing(
    family: str, model_dir: Path
) -> None:
    pytest.importorskip("reasoning_gym")
    environment = await opened(model_dir, "reasoning-gym", family=family)
    assert (await play(environment, 0, "<answer>a b \x00</answer>"))[0].score.reward < 0.1


@pytest.mark.parametrize("family", ["countdown", "n_queens", "codeio"])
async def test_families_that_run_replies_as_code_are_refused(family: str, model_dir: Path) -> None:
    with pytest.raises(EnvironmentFailed, match="runs replies as code"):
        await opened(model_dir, "reasoning-gym", family=family)


async def test_unknown_families_and_options_are_one_line(model_dir: Path) -> None:
    pytest.importorskip("reasoning_gym")
    for family, options in (("nothing", {}), ("chain_sum", {"nothing": 1})):
        with pytest.raises(EnvironmentFailed, match="cannot be made"):
            await opened(model_dir, "reasoning-gym", family=family, options=options)


def test_every_bundled_name_has_its_module() -> None:
    folder = Path(math.__file__).parent
    assert all((folder / f"{module}.py").is_file() for module in BUNDLED.values())
