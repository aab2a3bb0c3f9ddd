"""Briefly trained models of a synthetic language, and policy updates of them.

Their distributions are peaked. Random weights have almost flat distributions, which hide the effects of cheats
and rounding. The language mixes prose (a Markov chain: a few bits per token), reversals, copies and sums
(almost certain tokens). Trained models are cached on disk by their recipe, in fp32 as a trainer holds them; a
State is the bf16 rounding.
"""

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primerl.node.config.run import TrainingConfig
from primerl.node.models import huggingface
from primerl.node.models.tensors import from_torch, to_torch
from primerl.node.training.backend import Sample, TrainBatch
from primerl.node.weights.state import State
from primerl.scripts.bench.models import SHAPES

PROSE, REVERSE, COPY, SUM, PLUS, IS = range(10, 16)
"""Marks; ids 0..9 are digits."""
WORD = 16
"""Id of the first word."""
SUCCESSORS = 12
BUSY = 256
"""Ids from here to 511 are the tokenizer's own."""
LONGEST = 48
LOSS = "loss.json"
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "trained"


@dataclass(frozen=True)
class Recipe:
    """All inputs that determine a trained model."""

    name: str
    shape: tuple[tuple[str, int], ...]
    """Fields of [model.create]."""
    words: int
    steps: int
    rows: int
    """Sequences per step."""
    length: int
    lr: float
    seed: int = 0


def recipe(name: str, *, steps: int | None = None, **shape: int) -> Recipe:
    """Return one of RECIPES, with another number of steps or another shape."""
    found = RECIPES[name]
    label = "-".join([name, *(f"{key}{value}" for key, value in shape.items())])
    merged = tuple((dict(found.shape) | shape).items())
    return replace(found, name=label, shape=merged, steps=steps or found.steps)


def _recipe(name: str, shape: dict[str, int], *rest: Any) -> Recipe:
    return Recipe(name, tuple(shape.items()), *rest)


# (words, steps, rows, length, learning rate) follow the shape
RECIPES: dict[str, Recipe] = {
    one.name: one
    for one in (
        _recipe("tiny", {}, 160, 240, 32, 96, 4e-3),
        _recipe(
            "50m",
            {
                "hidden_size": 768,
                "num_hidden_layers": 6,
                "num_attention_heads": 12,
                "num_key_value_heads": 4,
                "head_dim": 64,
                "intermediate_size": 2816,
                "vocab_size": 8192,
                "rope_theta": 10000,
            },
            160,
            150,
            16,
            96,
            1.5e-3,
        ),
        _recipe("0.6b", SHAPES["0.6b"] | {"rope_theta": 10000}, 256, 200, 64, 256, 1e-3),
    )
}


# -- the language ----------------------------------------------------------------------------------


class Corpus:
    """A language of `words` words, and endless text in it; `stop` ends a text now and then."""

    def __init__(self, words: int, stop: int) -> None:
        rng = np.random.default_rng(7)
        beyond = np.arange(2 * BUSY, 2 * BUSY + words)
        self._ids = np.concatenate([np.arange(WORD, BUSY), beyond])[:words]
        self._next = rng.integers(0, words, (words, SUCCESSORS))
        weights = 1.0 / np.arange(1, SUCCESSORS + 1) ** 1.3
        self._share = np.cumsum(weights / weights.sum())
        self._stop = stop
        self._words = words

    def text(self, seed: Sequence[int], tokens: int) -> list[int]:
        """Return the first `tokens` tokens of text number `seed`."""
        found: list[int] = []
        for part in self._parts(np.random.default_rng(seed), tokens // 16 + 2):
            found += part
            if len(found) >= tokens:
                return found[:tokens]
        raise AssertionError("parts are longer than that")

    def rows(self, seed: int, count: int, length: int) -> NDArray[np.int64]:
        """Return text in rows of equal length [count, length]."""
        rng = np.random.default_rng([seed, count])
        stream: list[int] = []
        while len(stream) < count * length:
            for part in self._parts(rng, 4096):
                stream += part
        return np.array(stream[: count * length], np.int64).reshape(count, length)

    def _parts(self, rng: np.random.Generator, count: int) -> Iterator[list[int]]:
        walks = self._walks(rng, count)
        kinds = rng.choice([PROSE, REVERSE, COPY, SUM], count, p=[0.55, 0.15, 0.15, 0.15])
        sizes = rng.integers(16, LONGEST, count)
        numbers = rng.integers(0, 100, (count, 2))
        ends = rng.random(count) < 0.05
        for kind, size, walk, pair, end in zip(kinds, sizes, walks, numbers, ends, strict=True):
            words = walk[: size if kind == PROSE else max(8, size // 3)].tolist()
            yield [int(kind), *_said(int(kind), words, pair), *([self._stop] if end else [])]

    def _walks(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        place = rng.integers(0, self._words, count)
        steps = [place]
        for _ in range(LONGEST - 1):
            choice = np.searchsorted(self._share, rng.random(count)).clip(0, SUCCESSORS - 1)
            place = self._next[place, choice]
            steps.append(place)
        return self._ids[np.stack(steps, 1)]


def _said(kind: int, words: list[int], pair: NDArray[np.int64]) -> list[int]:
    if kind == PROSE:
        return words
    if kind == SUM:
        sums = [list(map(int, str(number))) for number in (pair[0], pair[1], pair.sum())]
        said = [*sums[0], PLUS, *sums[1], IS, *sums[2]]
        return [*said, PROSE, *words]
    return [*words, IS, *(words[::-1] if kind == REVERSE else words)]


# -- training --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """A model on disk, its bf16 state, and its language."""

    directory: Path
    """Directory of config, tokenizer and fp32 weights."""
    state: State
    corpus: Corpus
    loss: float
    """Nats per token at the end."""


def trained_model(
    wanted: Recipe, *, device: str = "cpu", cache: Path = CACHE, say: Callable[[str], None] = print
) -> Trained:
    """Return the model of a recipe, trained now or read from the cache."""
    key = hashlib.sha256(json.dumps(asdict(wanted)).encode()).hexdigest()[:12]
    directory = cache / f"{wanted.name}-{key}"
    if not directory.exists():
        with tempfile.TemporaryDirectory(dir=_made(cache)) as name:
            work = Path(name) / "model"
            huggingface.create(work, dict(wanted.shape), wanted.seed)
            (work / LOSS).write_text(json.dumps(_train(work, wanted, device, say)))
            if not directory.exists():  # another process may have been faster
                work.rename(directory)
    loss = json.loads((directory / LOSS).read_text())
    state = _bf16(directory)
    return Trained(directory, state, corpus_of(wanted, directory), loss)


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def corpus_of(wanted: Recipe, directory: Path) -> Corpus:
    """Return the language of a recipe; the stop token is the model's."""
    return Corpus(wanted.words, stop_token(directory))


@lru_cache
def stop_token(directory: Path) -> int:
    """Return the token that ends a completion."""
    return huggingface.stop_token_ids(directory)[0]


def _train(directory: Path, wanted: Recipe, device: str, say: Callable[[str], None]) -> float:
    """Train cross entropy on every token; write the fp32 weights and return the last loss."""
    import torch

    torch.manual_seed(wanted.seed)
    model: Any = huggingface.load_model(directory, device=device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=wanted.lr, betas=(0.9, 0.98), weight_decay=0.01
    )
    rows = corpus_of(wanted, directory).rows(wanted.seed, wanted.rows * 64, wanted.length)
    coarse = sum(value.numel() for value in model.parameters()) > 10**7
    loss = 0.0
    for step in range(wanted.steps):
        first = step * wanted.rows % len(rows)
        batch = torch.from_numpy(rows[first : first + wanted.rows]).to(device)
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=coarse):
            hidden = model.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
        loss = _backward(model.lm_head, hidden, batch[:, 1:], coarse)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        left = 1 - step / wanted.steps
        for group in optimizer.param_groups:
            group["lr"] = wanted.lr * min(1.0, (step + 1) / 20, 0.05 + 1.5 * left)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0 or step + 1 == wanted.steps:
            say(f"training {wanted.name}: step {step + 1}/{wanted.steps}, loss {loss:.3f}")
    model.save_pretrained(directory)
    return loss


def _backward(head: Any, hidden: Any, targets: Any, coarse: bool) -> float:
    """Compute the gradients of the mean cross entropy, and return its value.

    Logits exist for eight rows at a time, to save memory.
    """
    import torch
    import torch.nn.functional as F

    leaf = hidden.detach().requires_grad_()
    total = 0.0
    for rows, wanted in zip(leaf.split(8), targets.split(8), strict=True):
        with torch.autocast(hidden.device.type, dtype=torch.bfloat16, enabled=coarse):
            logits = head(rows)
        loss = F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten(), reduction="sum")
        (loss / targets.numel()).backward()
        total += float(loss.detach()) / targets.numel()
    hidden.backward(leaf.grad)
    return total


@dataclass(frozen=True)
class Course:
    """Settings of train_for()."""

    seconds: float
    rows: int
    """Sequences per step."""
    length: int
    lr: float
    device: str


def train_for(
    model_dir: Path, corpus: Corpus, course: Course, *, say: Callable[[str], None] = print
) -> State:
    """Train a directory's model by the project's own learner; return its bf16 state.

    The loss is cross entropy.
    """
    from primerl.node.training.learner import Learner

    # no compilation, which would take as long as the training
    config = TrainingConfig(device=course.device, seq_len=4096, compile=False)
    learner = Learner.build(model_dir, config, max_steps=1, seed=0, temperature=1.0)
    try:
        began = said = time.monotonic()
        step, loss, text = 0, 0.0, list[list[int]]()
        while (spent := time.monotonic() - began) < course.seconds:
            if step % 64 == 0:
                text = corpus.rows(step, 64 * course.rows, course.length).tolist()
            first = step % 64 * course.rows
            examples = [(row[:1], row[1:]) for row in text[first : first + course.rows]]
            left = 1 - spent / course.seconds
            lr = course.lr * min(1.0, (step + 1) / 20, 0.05 + 1.5 * left)
            loss = learner.supervised_step(examples, lr)
            step += 1
            if time.monotonic() - said > 5:
                said = time.monotonic()
                say(f"training: step {step}, loss {loss:.3f}")
        say(f"trained for {spent:.0f} s: {step} steps of {course.rows} rows, loss {loss:.3f}")
        return learner.state()
    finally:
        learner.close()


def _bf16(directory: Path) -> State:
    return huggingface.policy_state(huggingface.load_model(directory))


def with_massive_channel(state: State, factor: float) -> State:
    """Make one channel of every embedding `factor` times as large; every norm compensates."""
    if not factor:
        return state
    found = dict(state)
    for name, tensor in state.items():
        weights = to_torch(tensor).float()
        if name == "model.embed_tokens.weight":
            weights[:, 5] = factor * weights.std()
        elif name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight")):
            weights[5] = 0.0
            weights *= factor / weights.shape[0] ** 0.5  # mostly that channel's length now
        elif name == "model.norm.weight":
            weights[5] = 0.0
            weights *= factor / weights.shape[0] ** 0.5
        found[name] = from_torch(weights.bfloat16())
    return found


# -- policy updates --------------------------------------------------------------------------------


def policy_updates(
    directory: Path, samples: Sequence[Sample], *, lr: float, updates: int, device: str = "cpu"
) -> list[State]:
    """Return versions 0 .. `updates`: RL steps over equal shares of `samples`.

    They are as a trainer publishes them.
    """
    from primerl.node.training.learner import Learner

    config = TrainingConfig(lr=lr, device=device)
    learner = Learner.build(directory, config, max_steps=updates, seed=0, temperature=1.0)
    try:
        states = [learner.state()]
        for step in range(1, updates + 1):
            learner.step(TrainBatch(step, list(samples[step - 1 :: updates])))
            states.append(learner.state())
    finally:
        learner.close()
    return states
