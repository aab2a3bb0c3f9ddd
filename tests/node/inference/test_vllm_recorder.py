"""Drawing and recording inside vLLM's worker, driven by runners that behave like vLLM's two."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from primerl.node.inference.fingerprint import Projection, pack
from primerl.node.inference.sampler import Narrowed, draw
from primerl.node.inference.vllm_arguments import SAMPLING, SERVED
from primerl.node.inference.vllm_sampling import (
    DraftLayout,
    Hooks,
    Recorder,
    RouteBuffer,
    equal_drafts,
)
from primerl.protocol.manifests import RouteShape

torch.set_num_threads(1)
WIDTH, VOCABULARY, LENGTH = 16, 50, 256
CPU = torch.device("cpu")


class Forbid:
    """A processor of V1: one row asks for no last token."""

    def apply(self, logits: Tensor) -> Tensor:
        logits[1:2, -1] = -torch.inf
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

    def apply_logits_processors(
        self, logits: Tensor, metadata: Any, *, predict_bonus_token: bool
    ) -> Tensor:
        """V1's: of the rows behind all drafts; no first token."""
        assert predict_bonus_token
        return logits.index_fill(1, torch.tensor([0]), -torch.inf)

    def apply_sampling_params(
        self, logits: Tensor, metadata: Any, *, skip_top_k_top_p: bool
    ) -> Tensor:
        """V2's: what vLLM does to logits before it draws, temperature included."""
        assert skip_top_k_top_p
        return logits / metadata.temperature[:, None]


class Judge:
    """As V1's rejection sampler: forward() is looked up on the instance."""

    def __init__(self) -> None:
        self.told: Tensor | None = None

    def __call__(self, drafts: Any, logits: Tensor, temperatures: list[float]) -> Tensor:
        served = any(temperatures)
        metadata = SimpleNamespace(
            temperature=torch.tensor(temperatures) if served else None,
            max_num_logprobs=1 if served else None,
        )
        return self.forward(drafts, None, logits, metadata).sampled_token_ids

    def forward(self, drafts: Any, probabilities: None, logits: Tensor, metadata: Any) -> Any:
        likeliest = logits[drafts.bonus_logits_indices].argmax(-1, keepdim=True)
        return SimpleNamespace(sampled_token_ids=likeliest)

    def apply_logits_processors(self, logits: Tensor, metadata: Any, drafts: Any) -> Tensor:
        """Of the rows that have a draft; no last token."""
        assert len(logits) == sum(drafts.num_draft_tokens)
        return logits.index_fill(1, torch.tensor([-1]) % VOCABULARY, -torch.inf)

    def _get_logprobs_tensors(
        self, most: int, drafts: Any, logits: Tensor, made: Tensor, last: Tensor, tokens: Tensor
    ) -> Tensor:
        assert (len(made), len(last)) == (len(logits) - len(tokens), len(tokens))
        self.told = logits
        return logits


class Drafter:
    """As V1's whose drafts come of a model: _sample_draft_tokens() is looked up on the instance."""

    def __init__(self) -> None:
        self.model = self

    def compute_logits(self, states: Tensor) -> Tensor:
        """Those of the model itself, for states [n, 2] of a request's name and a position."""
        return torch.stack([logits_of(chr(name), place) for name, place in states.tolist()])

    def _sample_draft_tokens(self, states: Tensor, metadata: Any) -> tuple[Tensor, None]:
        return self.compute_logits(states).argmax(-1), None


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
    num_spec_tokens: int = 0
    device: torch.device = CPU
    routers: list[Any] = field(default_factory=list[Any])
    """What each router tells its logits and its choice."""
    drafter: Drafter | None = None
    drafted: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """By the drafter, after the latest step."""

    def __post_init__(self) -> None:
        self.sampler = Sampler(second=self.second)
        self.rejection_sampler = Judge()
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
        drafts = getattr(scheduled, "scheduled_spec_decode_tokens", {})
        hidden = torch.full((int(new.sum()) + 3, WIDTH), torch.nan)
        indices: list[int] = []
        for one, last, end in zip(ids, np.cumsum(new) - 1, ends, strict=True):
            for back in range(len(drafts.get(one, ())), -1, -1):
                hidden[last - back] = hidden_state(one, int(end) - back - 1)
                indices.append(int(last) - back)
        rows = np.array(indices)
        for layer, tell in enumerate(self.routers):
            chosen = torch.full((len(hidden), 2), 299, dtype=torch.int32)
            for one, start, last in zip(ids, computed, np.cumsum(new), strict=True):
                count = counts[one]
                places = range(int(start), int(start) + count)
                chosen[last - count : last] = torch.tensor([route(one, p, layer) for p in places])
            tell(torch.zeros(len(hidden), 1), chosen)
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
            query_start_loc_np=np.concatenate([[0], np.cumsum(new)]),
        )
        self.execute_model_state = SimpleNamespace(hidden_states=hidden)
        if self.second:
            self.execute_model_state.input_batch = batch
        else:
            self.input_batch = batch
            self.discard_request_mask.np[: len(ids)] = ends < known
            self.execute_model_state.scheduler_output = scheduled
            self.execute_model_state.sample_hidden_states = hidden[torch.from_numpy(rows)]
        self._drafts = drafts
        self._rows = list(zip(ids, ends.tolist(), (ends >= known).tolist(), strict=True))

    def sample_tokens(self, grammar: None) -> None:
        self.execute_model_state = None
        if self._drafts:
            self._verify_drafts()
        else:
            self._draw()
        if self.drafter is not None:
            self.drafted = {one: [] for one, _, _ in self._rows}
            for _ in range(self.num_spec_tokens):
                self._draft(self.drafter)

    def _draft(self, drafter: Drafter) -> None:
        requests = [self.requests[one] for one in self.drafted]
        ends = [one.prompt + len(one.tokens) for one in requests]
        states = [
            [ord(name), end + len(found)]
            for (name, found), end in zip(self.drafted.items(), ends, strict=True)
        ]
        metadata = SimpleNamespace(
            temperature=torch.tensor(
                [self.sampler.temperatures.get(row, 0) for row in range(len(ends))]
            ),
            logitsprocs=SimpleNamespace(argmax_invariant=[]),
        )
        sample = drafter._sample_draft_tokens  # pyright: ignore[reportPrivateUsage]
        tokens, _ = sample(torch.tensor(states), metadata)
        for found, token in zip(self.drafted.values(), tokens.tolist(), strict=True):
            found.append(token)

    def _draw(self) -> None:
        logits = torch.stack([logits_of(one, end) for one, end, _ in self._rows])
        tokens = self.sampler(logits).tolist()
        for (one, end, samples), token in zip(self._rows, tokens, strict=True):
            self.requests[one].computed = end
            if samples:
                self.requests[one].tokens.append(token)

    def _verify_drafts(self) -> None:
        drafts = [self._drafts.get(one, []) for one, _, _ in self._rows]
        counts = np.array([len(one) for one in drafts])
        last = np.cumsum(counts + 1) - 1
        rows = [
            logits_of(one, end - back)
            for (one, end, _), mine in zip(self._rows, drafts, strict=True)
            for back in range(len(mine), -1, -1)
        ]
        metadata = SimpleNamespace(
            draft_token_ids=torch.tensor([token for one in drafts for token in one]),
            num_draft_tokens=counts.tolist(),
            target_logits_indices=torch.from_numpy(np.delete(np.arange(len(rows)), last)),
            bonus_logits_indices=torch.from_numpy(last),
        )
        warm = [self.sampler.temperatures.get(row, 0.0) for row in range(len(drafts))]
        found = self.rejection_sampler(metadata, torch.stack(rows), warm).tolist()
        for (one, end, samples), mine, tokens in zip(self._rows, drafts, found, strict=True):
            new = [token for token in tokens if token >= 0]
            self.requests[one].computed = end - len(mine) + (len(new) - 1 if samples else 0)
            if samples:
                self.requests[one].tokens += new


def hidden_state(request: str, position: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * ord(request[0]) + position)
    return torch.randn(WIDTH, generator=generator)


def route(request: str, position: int, layer: int) -> list[int]:
    """The experts of a token in a layer."""
    return [(ord(request[0]) + 3 * position + layer) % 300, position % 7]


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
    kept: dict[str, int] = field(default_factory=dict[str, int])
    """Tokens whose keys and values the requests that were preempted still have."""
    group: bytes = b""

    def add(self, name: str, prompt: int) -> None:
        self.runner.requests[name] = Request(prompt, known=prompt)

    def step(self, counts: dict[str, int], drafts: dict[str, list[int]] | None = None) -> None:
        """`counts` of tokens, to which those of `drafts` are added."""
        drafts = drafts or {}
        resumed = {name for name in counts if name in self.kept}
        for name in resumed:
            self.runner.requests[name].computed = self.kept.pop(name)
        counts = {name: count + len(drafts.get(name, ())) for name, count in counts.items()}
        fresh: list[Any] = []
        for name in counts:
            if name not in self.keys or (self.runner.second and name in resumed):
                key = self.keys.setdefault(name, ord(name[0]))
                served = name in self.served
                drawn_at = 1.0 if served else 0.5 + key / 100
                extra = {
                    SAMPLING: [key, 2**63 - key, drawn_at, TOP_K.get(name, 0), 1.0, self.group]
                }
                extra |= {SERVED: True} if served else {}  # type: ignore[dict-item]
                parameters = SimpleNamespace(extra_args=extra)
                tokens = [0] * self.runner.requests[name].prompt
                fresh.append(
                    SimpleNamespace(
                        req_id=name,
                        sampling_params=parameters,
                        prompt_token_ids=tokens,
                        num_computed_tokens=self.computed(name),
                    )
                )
        rest = [name for name in counts if name not in {one.req_id for one in fresh}]
        cached = SimpleNamespace(
            req_ids=rest,
            resumed_req_ids=resumed & set(rest),
            num_computed_tokens=[self.computed(name) for name in rest],
        )
        self.runner.execute_model(
            SimpleNamespace(
                num_scheduled_tokens=counts,
                scheduled_new_reqs=fresh,
                scheduled_cached_reqs=cached,
                finished_req_ids=set(),
                scheduled_spec_decode_tokens=drafts,
            )
        )
        self.runner.sample_tokens(None)

    def computed(self, name: str) -> int:
        return self.runner.requests[name].computed

    def preempt(self, name: str, *, lost: int = 0, kept: int = 0) -> None:
        """Its keys and values are gone but for `kept` tokens, and its latest `lost` tokens."""
        one = self.runner.requests[name]
        self.kept[name] = kept
        del one.tokens[len(one.tokens) - lost :]
        one.computed, one.known = 0, one.prompt + len(one.tokens)

    def collect(self, name: str, count: int | None = None) -> list[Any]:
        wanted = len(self.runner.requests[name].tokens) if count is None else count
        [found] = self.recorder.collect([[self.keys[name], wanted]], [])
        return found


def make_engine(
    *,
    second: bool = False,
    fingerprint: str = "projection",
    requests: int = 4,
    drafts: int = 0,
    drafter: Drafter | None = None,
) -> Engine:
    runner = Runner(second, num_spec_tokens=drafts, drafter=drafter)
    recorder = Recorder(
        torch.device("cpu"),
        width=WIDTH,
        dtype=torch.float32,
        fingerprint=fingerprint,
        requests=requests,
        length=LENGTH,
        drafts=drafts,
    )
    recorder.version = 1
    Hooks(runner, recorder).install()
    return Engine(runner, recorder)


TOP_K = {"k": 2}
"""Number of tokens that a request may draw from, by its name; those of the others are not limited."""


def expected(name: str, prompt: int, count: int) -> tuple[list[int], list[float], NDArray[Any]]:
    """Tokens, logprobs and hidden states of one request that runs alone."""
    key = ord(name[0])
    positions = torch.arange(prompt, prompt + count)
    logits = torch.stack([logits_of(name, int(one)) for one in positions])
    seeds = torch.full((count,), 2**63 - key)
    few = torch.full((count,), TOP_K.get(name, 0))
    narrowed = Narrowed(torch.arange(count), few, torch.ones(count))
    drawn = draw(logits, torch.full((count,), 0.5 + key / 100), seeds, positions, narrowed)
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
    assert Projection().compare(pack(numbers[:, 1:]), hidden).distance < 1e-3


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
def test_tokens_that_vllm_throws_away_are_sampled_again_under_the_version_that_samples_them(
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


@pytest.mark.parametrize(
    ("kept", "lost"),
    [
        ((64,), False),  # 71 tokens were known: two whole blocks
        ((32,), True),
        ((0,), True),
        (
            (32, 64),
            True,
        ),  # preempted again before it drew: the second block is of the second version
    ],
)
def test_a_request_of_several_versions_has_lost_blocks_that_were_whole_at_the_change(
    second: bool, kept: tuple[int, ...], lost: bool
) -> None:
    engine = make_engine(second=second)
    engine.add("a", 69)
    for count in (69, 1):
        engine.step({"a": count})
    engine.recorder.version = 2
    *before, last = kept
    for tokens in before:
        engine.preempt("a", kept=tokens)
        engine.step({"a": 1})
    engine.preempt("a", kept=last)
    engine.step({"a": 71 - last})
    assert engine.collect("a")[3] is lost


def test_a_request_may_lose_blocks_of_its_last_version_and_no_others(second: bool) -> None:
    engine = make_engine(second=second)
    engine.add("a", 69)
    for count in (69, 1):
        engine.step({"a": count})
    engine.recorder.version = 2
    engine.preempt("a", kept=64)
    engine.step({"a": 7})
    for _ in range(60):
        engine.step({"a": 1})
    engine.preempt("a", kept=64)
    engine.step({"a": 132 - 64})
    assert engine.collect("a")[3] is False
    engine.preempt("a", kept=32)
    engine.step({"a": 133 - 32})
    assert engine.collect("a")[3] is True


def test_a_request_of_one_version_loses_nothing_that_it_cannot_compute_again(second: bool) -> None:
    engine = make_engine(second=second)
    engine.add("a", 69)
    for count in (69, 1):
        engine.step({"a": count})
    engine.preempt("a")
    engine.step({"a": 71})
    assert engine.collect("a")[3] is False


def test_requests_that_drew_nothing_yet_are_named(second: bool) -> None:
    engine = make_engine(second=second)
    for name, prompt in (("a", 3), ("b", 5)):
        engine.add(name, prompt)
    engine.step({"a": 3, "b": 4})
    keys = [ord("a"), ord("b"), ord("c")]
    assert engine.recorder.undrawn(keys) == [ord("b"), ord("c")]


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


def test_of_the_drafts_those_are_accepted_that_are_drawn_and_nothing_else_is_kept() -> None:
    """Each request is what it would have been alone, whatever was drafted for it and for others."""
    engine = make_engine(drafts=3)
    a, b, c = (expected(name, prompt, 30)[0] for name, prompt in (("a", 5), ("b", 9), ("c", 1)))

    def wrong(token: int) -> int:
        return (token + 1) % VOCABULARY

    engine.add("a", 5)
    engine.add("b", 9)
    engine.add("c", 1)
    engine.step({"a": 5, "b": 4})
    engine.step({"a": 1, "b": 2}, {"a": a[1:4]})  # all right, beside a part of a prompt
    assert engine.runner.requests["a"].tokens == a[:5]
    assert engine.runner.requests["b"].tokens == []
    engine.step({"a": 1, "b": 3, "c": 1}, {"a": [a[5], wrong(a[6]), a[7]]})
    assert (
        engine.runner.requests["a"].tokens == a[:7]
    )  # what comes after a wrong one is not looked at
    engine.step({"a": 1, "b": 1, "c": 1}, {"b": [wrong(b[1])], "c": [c[1], c[2]]})
    assert [len(engine.runner.requests[name].tokens) for name in "abc"] == [8, 2, 4]
    engine.step({"a": 1, "b": 1, "c": 1})  # and without any
    engine.step({"a": 1, "b": 1, "c": 1}, {"a": a[9:12], "b": [wrong(b[3]), b[4]], "c": [c[5]]})
    assert [len(engine.runner.requests[name].tokens) for name in "abc"] == [13, 4, 7]
    for name, prompt in (("a", 5), ("b", 9), ("c", 1)):
        expect_record(engine, name, prompt)


def test_drafts_are_accepted_by_the_limits_of_their_request() -> None:
    """A draft that would be drawn from all tokens, and not from the likeliest two, is wrong."""
    engine = make_engine(drafts=3)
    tokens, prompt = expected("k", 5, 9)[0], 5
    engine.add("k", prompt)
    engine.add("a", prompt)
    engine.step({"k": 5, "a": 5})
    wrong = (tokens[3] + 1) % VOCABULARY
    engine.step({"a": 1, "k": 1}, {"k": [*tokens[1:3], wrong], "a": expected("a", 5, 4)[0][1:]})
    assert [len(engine.runner.requests[name].tokens) for name in "ka"] == [4, 5]
    for name in "ka":
        expect_record(engine, name, prompt)


def test_drafts_that_were_wrong_are_in_no_record_and_under_no_version() -> None:
    engine = make_engine(drafts=3)
    a = expected("a", 5, 9)[0]
    engine.add("a", 5)
    engine.step({"a": 5})
    engine.step({"a": 1}, {"a": [a[1], a[2] - 1, a[3]]})  # two tokens
    with pytest.raises(ValueError, match="not enough values"):
        engine.collect("a", 4)  # the third row was a draft's
    engine.recorder.version = 2
    engine.step({"a": 1}, {"a": a[3:6]})
    engine.preempt("a", lost=2)
    engine.recorder.version = 3
    engine.step({"a": 10})
    assert engine.collect("a")[2] == [[0, 1], [3, 2], [5, 3]]
    expect_record(engine, "a", 5)


def test_drafts_are_judged_by_what_vllms_own_server_makes_of_the_logits() -> None:
    engine = make_engine(drafts=2)
    engine.served = {"b"}
    engine.add("b", 5)
    engine.step({"b": 5})
    engine.runner.sampler.temperatures = {0: 0.7}
    made = torch.stack([logits_of("b", 6), logits_of("b", 7)])
    made[0, -1] = made[1, 0] = -torch.inf  # of a row with a draft, and of the last
    seeds, positions = torch.full((2,), 2**63 - ord("b")), torch.tensor([6, 7])
    wanted = draw(made / 0.7, torch.ones(2), seeds, positions).tokens.tolist()
    engine.step({"b": 1}, {"b": wanted[:1]})
    assert engine.runner.requests["b"].tokens[1:] == wanted
    told = engine.runner.rejection_sampler.told
    assert told is not None
    assert torch.allclose(told, made / 0.7)


def test_drafts_that_another_sampler_verifies_end_the_engine() -> None:
    engine = make_engine(drafts=2)
    engine.add("a", 2)
    engine.step({"a": 2})
    engine.runner.rejection_sampler = Judge()
    with pytest.raises(RuntimeError, match="past"):
        engine.step({"a": 1}, {"a": [1]})
    unlike = Runner(second=False, num_spec_tokens=2)
    del unlike.rejection_sampler
    newer = Runner(second=True)
    newer.num_speculative_steps = 2  # type: ignore[attr-defined]
    for runner in (unlike, newer):
        with pytest.raises(RuntimeError, match="drafts"):
            Hooks(runner, engine.recorder).install()


def test_requests_of_a_group_get_no_further_than_those_that_began_before_them() -> None:
    """However right their drafts are: at an update the order of a group is looked at."""
    engine = make_engine(drafts=3)
    engine.group = b"g"
    a, b, c = (expected(name, 5, 12)[0] for name in "abc")

    def lengths() -> list[int]:
        return [len(engine.runner.requests[name].tokens) for name in "abc"]

    for name in "abc":
        engine.add(name, 5)
    engine.step({"a": 5, "b": 5, "c": 2})  # c draws nothing yet
    engine.step({"a": 1, "b": 1, "c": 3}, {"a": [(a[1] + 1) % VOCABULARY], "b": b[1:4]})
    assert lengths() == [2, 2, 1]
    engine.step({"a": 1, "b": 1, "c": 1}, {"a": a[2:4], "b": b[2:3], "c": c[1:4]})
    assert lengths() == [5, 4, 4]
    engine.step({"b": 1, "c": 1}, {"b": b[4:5], "c": c[4:7]})  # a has ended
    assert lengths() == [5, 6, 6]
    engine.group = b""
    engine.add("d", 5)
    engine.step({"c": 1, "d": 5}, {"c": c[6:9]})
    assert lengths() == [5, 6, 10]
    for name in "abcd":
        expect_record(engine, name, 5)


@pytest.mark.parametrize("seed", range(20))
def test_no_request_gets_ahead_of_those_of_its_group_that_began_before(seed: int) -> None:
    """The tensors say what a walk over the requests, oldest first, says."""
    chance = np.random.default_rng(seed)
    requests = 7
    rows = chance.integers(1, 5, requests)
    first = np.cumsum(rows) - rows
    request = np.repeat(np.arange(requests), rows)
    drafts = np.arange(rows.sum()) - first[request]
    wrong = (chance.random(rows.sum()) < 0.3).astype(np.int64)
    had, prompts = chance.integers(0, 4, requests), chance.integers(1, 9, requests)
    groups = [[5, 0, 3], [2, 6]]  # in the order in which they began

    expected = [1] * requests
    for one in range(requests):
        while expected[one] < rows[one] and not wrong[first[one] + expected[one] - 1]:
            expected[one] += 1
    for group in groups:
        least = had[group[0]] + expected[group[0]]
        for one in group:
            expected[one] = max(1, min(expected[one], least - had[one]))
            least = min(least, had[one] + expected[one])

    layout = DraftLayout(
        requests=torch.from_numpy(request),
        drafts=torch.from_numpy(drafts),
        first=torch.from_numpy(first),
        prompts=torch.from_numpy(prompts),
        members=torch.tensor([one for group in groups for one in group]),
        places=torch.tensor([0, 1, 2, 3, 4]),
        table=(2, 3),
    )
    positions = torch.from_numpy((had + prompts)[request] + drafts)
    assert layout.accepted(torch.from_numpy(wrong), positions).tolist() == expected


def test_a_drafter_with_the_models_own_logits_drafts_the_sampled_tokens() -> None:
    """At any temperature, which the likeliest token is not; after drafts that were right, wrong or missing."""
    engine = make_engine(drafts=3, drafter=Drafter())
    runner = engine.runner
    engine.served = {"c"}
    prompts = {"a": 5, "b": 9, "c": 3}
    for name, prompt in prompts.items():
        engine.add(name, prompt)
    engine.step({"a": 5, "b": 4})
    engine.step({"a": 1, "b": 5}, {"a": runner.drafted["a"]})
    assert [len(runner.requests[name].tokens) for name in "ab"] == [5, 1]
    likeliest = [int(logits_of("a", 10 + ahead).argmax()) for ahead in range(3)]
    assert runner.drafted["a"] != likeliest
    wrong = [runner.drafted["b"][0], (runner.drafted["b"][1] + 1) % VOCABULARY]
    engine.step({"a": 1, "b": 1}, {"b": wrong})
    assert [len(runner.requests[name].tokens) for name in "ab"] == [6, 3]
    guess = runner.drafted
    engine.step({"a": 1, "b": 1}, guess)
    for name in "ab":
        assert runner.requests[name].tokens[-4:-1] == guess[name]
        expect_record(engine, name, prompts[name])
    runner.sampler.temperatures = {0: 0.7}  # vLLM's own server divides by it before the draw
    engine.step({"c": 3})
    [seed], positions = [2**63 - ord("c")], torch.arange(4, 7)
    logits = torch.stack([logits_of("c", int(one)) for one in positions]) / 0.7
    seeds = torch.tensor([seed]).expand(3)
    assert runner.drafted["c"] == draw(logits, torch.ones(3), seeds, positions).tokens.tolist()


# -- routes of a mixture of experts ----------------------------------------------------------------


@pytest.mark.parametrize("experts", [256, 300])
@pytest.mark.parametrize(("second", "drafts"), [(False, 0), (True, 0), (False, 2)])
def test_the_route_of_the_token_before_is_kept_with_each_token(
    second: bool, drafts: int, experts: int
) -> None:
    """In batches that mix prompts in parts, single tokens and drafts, and after the rows have grown.

    With drafts, the last router is a drafter's.
    """
    shape = RouteShape(layers=3, experts=experts, top_k=2)
    engine, buffer = make_engine(second=second, requests=2, drafts=drafts), RouteBuffer()
    engine.runner.routers = [buffer.hook(None) for _ in range(shape.layers + (drafts > 0))]
    engine.recorder.record_routes(buffer, shape)
    prompts = {"a": 5, "b": 9, "c": 3}
    for name, prompt in prompts.items():
        engine.add(name, prompt)
    engine.step({"a": 5, "b": 4})
    engine.step({"a": 1, "b": 5, "c": 3})
    own = expected("a", 5, 8)[0]
    for _ in range(3):
        at = len(engine.runner.requests["a"].tokens)
        guess = {"a": own[at : at + drafts]} if drafts else {}
        engine.step({"a": 1, "b": 1, "c": 1}, guess)
    for name, prompt in prompts.items():
        tokens = len(engine.runner.requests[name].tokens)
        _, rows, *_ = engine.collect(name)
        numbers = np.frombuffer(rows, np.float32).reshape(tokens, -1)
        raw = np.ascontiguousarray(numbers[:, 8:]).view(np.uint8)[:, : shape.token_bytes]
        found = np.frombuffer(raw.tobytes(), shape.dtype).reshape(tokens, 3, 2)
        places = range(prompt - 1, prompt - 1 + tokens)
        wanted = np.array([[route(name, p, layer) for layer in range(3)] for p in places])
        assert np.array_equal(found, wanted.astype(shape.dtype))
        assert np.allclose(numbers[:, 0], expected(name, prompt, tokens)[1], atol=1e-5)


def test_routers_of_another_shape_are_refused() -> None:
    engine, buffer = make_engine(), RouteBuffer()
    engine.runner.routers = [buffer.hook(None) for _ in range(2)]
    engine.recorder.record_routes(buffer, RouteShape(layers=3, experts=8, top_k=2))
    engine.add("a", 5)
    with pytest.raises(RuntimeError, match="routers do not report"):
        engine.step({"a": 5})


def test_each_request_gets_as_many_drafts_as_any() -> None:
    def propose(number: int, *, most: int) -> list[list[int]]:
        return [[5, 6], [], [7] * most][:number]

    assert equal_drafts(propose, 3)(3, most=3) == [[5, 6, 0], [0, 0, 0], [7, 7, 7]]
