"""Drawing and recording inside vLLM's worker, driven by runners that behave like vLLM's two."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from primerl.node.inference.fingerprint import Projection
from primerl.node.inference.sampler import draw
from primerl.node.inference.vllm import projection_proof
from primerl.node.inference.vllm_arguments import SAMPLING, SERVED
from primerl.node.inference.vllm_sampling import Hooks, Recorder

torch.set_num_threads(1)
WIDTH, VOCABULARY, LENGTH = 16, 50, 256


class Forbid:
    """A processor of V1: one row asks for no last token."""

    def apply(self, logits: Tensor) -> Tensor:
        logits[1, -1] = -torch.inf
        return logits


class Sampler:
    """As vLLM's: sample() is looked up on the instance."""

    def __init__(self, *, second: bool = False) -> None:
        self.second = second
        self.temperatures: dict[int, float] = {}
        """Of rows, for requests of vLLM's own server; 0 for the others."""
        self.told: Tensor | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        rows = len(logits)
        temperature = torch.tensor([self.temperatures.get(row, 0.0) for row in range(rows)])
        safe = temperature.masked_fill(temperature == 0, 1.0) if self.second else temperature
        metadata = SimpleNamespace(
            temperature=safe,
            max_num_logprobs=1,
            logitsprocs=SimpleNamespace(argmax_invariant=[Forbid()]),
        )
        tokens, self.told = self.sample(logits, metadata)
        return tokens

    def sample(self, logits: Tensor, metadata: Any) -> tuple[Tensor, Tensor | None]:
        return logits.argmax(-1), None

    def apply_sampling_params(
        self, logits: Tensor, metadata: Any, *, skip_top_k_top_p: bool
    ) -> Tensor:
        """V2's: what vLLM does to logits before it draws, temperature included."""
        assert skip_top_k_top_p
        return logits / metadata.temperature[:, None]


@dataclass
class Request:
    """A request as a scheduler sees it."""

    prompt: int
    tokens: list[int] = field(default_factory=list[int])
    computed: int = 0
    known: int = 0
    """Tokens that had been there when it was started or went on."""


@dataclass
class Runner:
    """A model whose hidden states and logits depend on (request, position) only.

    `second`: what the V2 runner holds, else V1's.
    """

    second: bool
    requests: dict[str, Request] = field(default_factory=dict[str, Request])
    execute_model_state: Any = None

    def __post_init__(self) -> None:
        self.sampler = Sampler(second=self.second)
        if self.second:
            self.req_states = object()
        self.input_batch = SimpleNamespace(num_reqs=0, req_ids=[], num_computed_tokens_cpu=None)
        self.discard_request_mask = SimpleNamespace(np=np.zeros(8, bool))

    def execute_model(self, scheduled: Any) -> None:
        counts = scheduled.num_scheduled_tokens
        ids = sorted(counts, key=counts.__getitem__)
        requests = [self.requests[one] for one in ids]
        computed = np.array([one.computed for one in requests], np.int32)
        new = np.array([counts[one] for one in ids], np.int32)
        ends = computed + new
        rows = np.cumsum(new) - 1
        hidden = torch.full((int(new.sum()) + 3, WIDTH), torch.nan)
        for one, row, end in zip(ids, rows, ends, strict=True):
            hidden[row] = hidden_state(one, int(end) - 1)
        known = np.array([one.known for one in requests], np.int32)
        batch = SimpleNamespace(
            num_reqs=len(ids),
            num_tokens=int(new.sum()),
            req_ids=ids,
            num_computed_tokens_np=computed,
            num_computed_tokens_cpu=computed,
            num_scheduled_tokens=new,
            prefill_len_np=known,
            logits_indices=torch.from_numpy(rows),
        )
        self.execute_model_state = SimpleNamespace(hidden_states=hidden)
        if self.second:
            self.execute_model_state.input_batch = batch
        else:
            self.input_batch = batch
            self.discard_request_mask.np[: len(ids)] = ends < known
            self.execute_model_state.scheduler_output = scheduled
            self.execute_model_state.sample_hidden_states = hidden[torch.from_numpy(rows)]
        self._rows = list(zip(ids, ends.tolist(), (ends >= known).tolist(), strict=True))

    def sample_tokens(self, grammar: None) -> None:
        self.execute_model_state = None
        logits = torch.stack([logits_of(one, end) for one, end, _ in self._rows])
        tokens = self.sampler(logits).tolist()
        for (one, end, samples), token in zip(self._rows, tokens, strict=True):
            self.requests[one].computed = end
            if samples:
                self.requests[one].tokens.append(token)


def hidden_state(request: str, position: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * ord(request[0]) + position)
    return torch.randn(WIDTH, generator=generator)


def logits_of(request: str, position: int) -> Tensor:
    generator = torch.Generator().manual_seed(7777 + 1000 * ord(request[0]) + position)
    return 3 * torch.randn(VOCABULARY, generator=generator)


@dataclass
class Engine:
    """A scheduler in miniature, above a runner that our hooks are in."""

    runner: Runner
    recorder: Recorder
    keys: dict[str, int] = field(default_factory=dict[str, int])
    served: set[str] = field(default_factory=set[str])
    """Requests of vLLM's own server."""

    def add(self, name: str, prompt: int) -> None:
        self.runner.requests[name] = Request(prompt, known=prompt)

    def step(self, counts: dict[str, int]) -> None:
        fresh: list[Any] = []
        for name in counts:
            if name not in self.keys or (self.runner.second and not self.computed(name)):
                key = self.keys.setdefault(name, ord(name[0]))
                served = name in self.served
                drawn_at = 1.0 if served else 0.5 + key / 100
                extra = {SAMPLING: [key, 2**63 - key, drawn_at]}
                extra |= {SERVED: True} if served else {}  # type: ignore[dict-item]
                parameters = SimpleNamespace(extra_args=extra)
                tokens = [0] * self.runner.requests[name].prompt
                fresh.append(
                    SimpleNamespace(
                        req_id=name, sampling_params=parameters, prompt_token_ids=tokens
                    )
                )
        self.runner.execute_model(
            SimpleNamespace(
                num_scheduled_tokens=counts, scheduled_new_reqs=fresh, finished_req_ids=set()
            )
        )
        self.runner.sample_tokens(None)

    def computed(self, name: str) -> int:
        return self.runner.requests[name].computed

    def preempt(self, name: str, *, lost: int = 0) -> None:
        """Its keys and values are gone, and its latest `lost` tokens."""
        one = self.runner.requests[name]
        del one.tokens[len(one.tokens) - lost :]
        one.computed, one.known = 0, one.prompt + len(one.tokens)

    def collect(self, name: str, count: int | None = None) -> list[Any]:
        wanted = len(self.runner.requests[name].tokens) if count is None else count
        [found] = self.recorder.collect([[self.keys[name], wanted]], [])
        return found


def make_engine(*, second: bool, fingerprint: str = "projection", requests: int = 4) -> Engine:
    runner = Runner(second)
    recorder = Recorder(
        torch.device("cpu"),
        width=WIDTH,
        dtype=torch.float32,
        fingerprint=fingerprint,
        requests=requests,
        length=LENGTH,
    )
    recorder.version = 1
    Hooks(runner, recorder).install()
    return Engine(runner, recorder)


def expected(name: str, prompt: int, count: int) -> tuple[list[int], list[float], NDArray[Any]]:
    """Tokens, logprobs and hidden states of one request that runs alone."""
    key = ord(name[0])
    positions = torch.arange(prompt, prompt + count)
    logits = torch.stack([logits_of(name, int(one)) for one in positions])
    seeds = torch.full((count,), 2**63 - key)
    drawn = draw(logits, torch.full((count,), 0.5 + key / 100), seeds, positions)
    hidden = torch.stack([hidden_state(name, int(one) - 1) for one in positions])
    return drawn.tokens.tolist(), drawn.logprobs.tolist(), hidden.numpy()


def expect_record(engine: Engine, name: str, prompt: int) -> None:
    """What was drawn and kept for a request is what it would have been alone."""
    one = engine.runner.requests[name]
    tokens, logprobs, hidden = expected(name, prompt, len(one.tokens))
    _, rows, *_ = engine.collect(name)
    numbers = np.frombuffer(rows, np.float32).reshape(len(tokens), -1)
    assert one.tokens == tokens
    assert numbers[:, 0].tolist() == pytest.approx(logprobs, abs=1e-6)
    assert Projection().compare(projection_proof(numbers[:, 1:]), hidden).distance < 1e-3


@pytest.fixture(params=[False, True], ids=["V1", "V2"])
def second(request: pytest.FixtureRequest) -> bool:
    return request.param


def test_mixed_batches_give_each_token_one_row_that_knows_nothing_of_its_neighbours(
    second: bool,
) -> None:
    engine = make_engine(second=second)
    engine.add("a", 5)
    engine.add("b", 9)
    engine.step({"a": 5, "b": 4})  # a part of b's prompt
    engine.step({"a": 1, "b": 2})
    engine.add("c", 1)
    engine.step({"a": 1, "b": 3, "c": 1})  # b draws for the first time
    for _ in range(20):
        engine.step({"a": 1, "b": 1, "c": 1})
    engine.step({"c": 1, "a": 1})
    assert [len(one.tokens) for one in engine.runner.requests.values()] == [24, 21, 22]
    for name, prompt in (("a", 5), ("b", 9), ("c", 1)):
        expect_record(engine, name, prompt)


def test_a_preempted_request_goes_on_where_it_was(second: bool) -> None:
    engine = make_engine(second=second)
    engine.add("a", 5)
    engine.add("b", 3)
    engine.step({"a": 5, "b": 3})
    engine.step({"a": 1, "b": 1})
    engine.preempt("a")
    engine.step({"b": 1})
    engine.step({"a": 4, "b": 1})
    engine.step({"a": 3, "b": 1})  # all 7 tokens again, then the next
    engine.step({"a": 1, "b": 1})
    assert len(engine.runner.requests["a"].tokens) == 4
    expect_record(engine, "a", 5)
    expect_record(engine, "b", 3)


@pytest.mark.parametrize("lost", [1, 2])
def test_tokens_that_vllm_throws_away_are_drawn_again_under_the_version_that_draws_them(
    second: bool, lost: int
) -> None:
    engine = make_engine(second=second)
    engine.add("a", 5)
    for count in (5, 1, 1, 1):
        engine.step({"a": count})
    engine.preempt("a", lost=lost)
    engine.recorder.version = 2
    engine.step({"a": 9 - lost})
    for _ in range(3):
        engine.step({"a": 1})
    expect_record(engine, "a", 5)
    assert engine.collect("a")[2] == [[0, 1], [4 - lost, 2]]


def test_spans_name_the_version_of_every_token_and_of_no_token_beyond_the_last(
    second: bool,
) -> None:
    engine = make_engine(second=second)
    engine.add("a", 5)
    engine.add("b", 5)
    engine.step({"a": 5})
    engine.recorder.version = 2  # nobody draws under it
    engine.recorder.version = 3
    engine.step({"a": 1, "b": 5})
    engine.step({"a": 1, "b": 1})
    engine.recorder.version = 4
    engine.step({"a": 1, "b": 1})
    assert engine.collect("a")[2] == [[0, 1], [1, 3], [3, 4]]
    assert engine.collect("a", 3)[2] == [[0, 1], [1, 3]]
    assert engine.collect("b")[2] == [[0, 3], [2, 4]]


@pytest.mark.parametrize("fingerprint", ["", "projection"])
def test_more_requests_than_slots_and_slots_that_were_used_before(fingerprint: str) -> None:
    engine = make_engine(second=False, fingerprint=fingerprint, requests=1)
    for name in "abcde":  # nobody collects: the slots grow
        engine.add(name, 2)
        engine.step({name: 2})
        for _ in range(40):
            engine.step({name: 1})
    rows = {name: engine.collect(name) for name in "abcde"}
    assert engine.recorder.collect([], [engine.keys[name] for name in "abcd"]) == []
    for name in "fgh":
        engine.add(name, 2)
        engine.step({name: 2, "e": 1})
        assert np.frombuffer(engine.collect(name)[1], np.float32)[0] == pytest.approx(
            expected(name, 2, 1)[1][0], abs=1e-6
        )
    assert engine.collect("e", 41) == rows["e"]
    assert len({found[1] for found in rows.values()}) == 5
    assert engine.recorder._slots.size == 8  # pyright: ignore[reportPrivateUsage]


def test_what_was_given_up_is_gone_and_what_never_began_may_be_given_up() -> None:
    engine = make_engine(second=False)
    engine.add("a", 2)
    engine.step({"a": 2})
    assert engine.recorder.collect([[engine.keys["a"], 2], [999, 1]], [998]) == []  # not yet
    assert len(engine.recorder.collect([[engine.keys["a"], 1]], [])) == 1
    assert engine.recorder.collect([[engine.keys["a"], 1]], [engine.keys["a"]]) == []


def test_a_runner_that_is_not_known_is_refused() -> None:
    recorder = make_engine(second=False).recorder
    for broken in ("execute_model_state", "sampler", "input_batch"):
        runner = SimpleNamespace(
            **{
                name: Sampler()
                for name in (
                    "execute_model",
                    "sample_tokens",
                    "execute_model_state",
                    "sampler",
                    "input_batch",
                    "discard_request_mask",
                )
                if name != broken
            }
        )
        with pytest.raises(RuntimeError, match=broken):
            Hooks(runner, recorder).install()
    other = Runner(second=True)
    other.sampler.sample = lambda metadata, logits: None  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="sample"):
        Hooks(other, recorder).install()


def test_a_step_that_samples_past_our_sampler_ends_the_engine(second: bool) -> None:
    engine = make_engine(second=second)
    engine.add("a", 2)
    engine.runner.sampler = Sampler()
    with pytest.raises(RuntimeError, match="past"):
        engine.step({"a": 2})


def test_a_request_that_is_not_ours_ends_the_engine(second: bool) -> None:
    engine = make_engine(second=second)
    engine.add("a", 2)
    engine.keys["a"] = 1
    if second:
        engine.runner.requests["a"].computed = 1
    with pytest.raises(RuntimeError, match="not this node's"):
        engine.step({"a": 1})


def test_vllms_own_dummy_runs_are_sampled_by_vllm(second: bool) -> None:
    engine = make_engine(second=second)
    assert engine.runner.sampler(torch.eye(3)).tolist() == [0, 1, 2]


def test_ranks_that_keep_nothing_draw_the_same_tokens() -> None:
    silent, loud = make_engine(second=True), make_engine(second=True)
    silent.recorder.collecting = False
    for engine in (silent, loud):
        engine.add("a", 2)
        engine.step({"a": 2})
        engine.step({"a": 1})
    assert silent.runner.requests == loud.runner.requests
    assert silent.recorder.collect([[silent.keys["a"], 1]], []) == []


def test_what_vllms_own_server_asks_for_is_drawn_by_seed_from_what_vllm_made_of_the_logits(
    second: bool,
) -> None:
    engine = make_engine(second=second)
    engine.served = {"b"}
    engine.add("a", 4)
    engine.add("b", 5)
    sampler = engine.runner.sampler
    sampler.temperatures = {1: 0.7}
    key = ord("b")
    for step in range(3):
        engine.step({"a": 1, "b": 1} if step else {"a": 4, "b": 5})
        made = logits_of("b", 5 + step) / 0.7
        if not second:
            made[-1] = -torch.inf
        place = torch.tensor([2**63 - key]), torch.tensor([5 + step])
        drawn = draw(made[None], torch.ones(1), *place)
        assert engine.runner.requests["b"].tokens[-1] == int(drawn.tokens)
        assert sampler.told is not None
        told = torch.log_softmax(sampler.told[1], -1)[int(drawn.tokens)]
        assert float(told) == pytest.approx(float(drawn.logprobs), abs=1e-5)
    assert engine.recorder.versions([key, ord("x")]) == [[1]]
    expect_record(engine, "a", 4)  # a request of the node beside it is what it is alone
