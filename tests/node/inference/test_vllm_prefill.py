"""Measuring prompts inside vLLM's worker, driven by a runner that holds what vLLM's two do."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from primerl.node.inference import prefill
from primerl.node.inference.fingerprint import signs
from primerl.node.inference.sampler import MOST_MARGIN, Narrowed, draw
from primerl.node.inference.vllm_prefill import PromptReader
from primerl.node.inference.vllm_sampling import HiddenProjection, RouteBuffer
from primerl.protocol.manifests import RouteShape

torch.set_num_threads(1)
WIDTH, VOCABULARY = 16, 50
HEAD = torch.randn(WIDTH, VOCABULARY, generator=torch.Generator().manual_seed(1))
CPU = torch.device("cpu")
ROUTES = RouteShape(layers=3, experts=5, top_k=2)


def hidden_state(name: str, position: int) -> Tensor:
    """The state of a request's token, which leads to the next one."""
    seed = 1000 * ord(name[0]) + position
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))


def router_logits(hidden: Tensor, layer: int) -> Tensor:
    """Of the state of a token, in place of what the layer reads."""
    return hidden[2 * layer : 2 * layer + ROUTES.experts]


def logits_of(hidden: Tensor) -> Tensor:
    return hidden @ HEAD


def no_numbers(hidden: Tensor) -> Tensor:
    return hidden @ HEAD * torch.nan


def nothing(hidden: Tensor) -> None:
    """What vLLM gives on the ranks that it gathers no logits on."""


@dataclass
class Runner:
    """Computes what it is told to: `second` as the V2 runner does, else as V1."""

    second: bool
    execute_model_state: Any = None
    computed: dict[str, int] = field(default_factory=dict[str, int])
    device: torch.device = CPU
    sampled: int = 0
    routers: list[Any] = field(default_factory=list[Any])
    """What each router tells its logits and its choice."""

    def __post_init__(self) -> None:
        if self.second:
            self.req_states = object()
        self.model = SimpleNamespace(compute_logits=logits_of)
        self.query_start_loc = SimpleNamespace(np=None)

    def execute_model(self, scheduled: Any) -> None:
        counts: dict[str, int] = scheduled.num_scheduled_tokens
        before = np.array([self.computed.get(one, 0) for one in counts])
        rows = [
            hidden_state(one, first + at)
            for one, first in zip(counts, before.tolist(), strict=True)
            for at in range(counts[one])
        ]
        starts = np.cumsum([0, *counts.values()])
        batch = SimpleNamespace(
            num_reqs=len(counts),
            req_ids=[*counts, "of an older batch"],
            query_start_loc_np=starts,
            num_computed_tokens_np=before,
            num_computed_tokens_cpu=before,
            num_scheduled_tokens=np.array(list(counts.values())),
        )
        self.query_start_loc.np = starts
        for layer, tell in enumerate(self.routers):
            logits = torch.stack([router_logits(row, layer) for row in rows])
            tell(logits, logits.topk(2).indices)
        self.execute_model_state = SimpleNamespace(
            hidden_states=torch.stack([*rows, torch.full((WIDTH,), torch.nan)]),
            scheduler_output=scheduled,
            input_batch=batch,
        )
        self.input_batch = batch

    def sample_tokens(self, grammar: None) -> None:
        self.execute_model_state = None
        self.sampled += 1


@dataclass
class Engine:
    """A scheduler in miniature, above a runner that the reader is in."""

    runner: Runner
    reader: PromptReader
    waiting: list[Any] = field(default_factory=list[Any])

    def add(
        self,
        name: str,
        claims: bytes,
        *,
        cached: int = 0,
        temperature: float = 1.0,
        top_k: int = 0,
        width: int = 0,
    ) -> None:
        extra = {prefill.PREFILL: [ord(name[0]), temperature, top_k, 1.0, claims, width]}
        self.waiting.append(
            SimpleNamespace(req_id=name, sampling_params=SimpleNamespace(extra_args=extra))
        )
        self.runner.computed[name] = cached

    def step(self, *, finished: frozenset[str] = frozenset(), **counts: int) -> None:
        fresh, self.waiting = self.waiting, []
        scheduled = SimpleNamespace(
            num_scheduled_tokens=counts, scheduled_new_reqs=fresh, finished_req_ids=finished
        )
        self.runner.execute_model(scheduled)
        self.runner.sample_tokens(None)
        for name, count in counts.items():
            self.runner.computed[name] += count

    def rows(self, name: str) -> NDArray[np.float32]:
        [[key, rows]] = self.reader.collect([ord(name[0])])
        assert key == ord(name[0])
        return prefill.read_rows(rows)


@pytest.fixture(params=[False, True], ids=["V1", "V2"])
def engine(request: pytest.FixtureRequest) -> Engine:
    runner = Runner(request.param)
    projection = HiddenProjection(CPU, WIDTH, torch.float32)
    buffer = RouteBuffer(keeps_logits=True)
    runner.routers = [buffer.hook(None) for _ in range(ROUTES.layers)]
    reader = PromptReader(runner, projection, VOCABULARY, (buffer, ROUTES))
    reader.install()
    return Engine(runner, reader)


def claims(
    places: list[int],
    seed: int,
    tokens: list[int],
    drawn: bool = True,
    routes: "NDArray[np.int64] | None" = None,
    support: "NDArray[np.int32] | None" = None,
) -> bytes:
    """The same seed for all of them; `routes` [N, layers, k]."""
    count = len(places)
    raw = np.zeros((count, ROUTES.token_bytes), np.uint8)
    if routes is not None:
        raw[:] = routes.reshape(count, -1)
    found = prefill.make_claims(np.array(places), np.full(count, seed), np.array(tokens), raw)
    if support is not None:
        found = prefill.with_support(found, support)
    found["drawn"] = drawn
    found["routed"] = routes is not None
    return found.tobytes()


def honest_tokens(name: str, places: list[int], seed: int, temperature: float = 1.0) -> list[int]:
    """What a worker would have drawn there."""
    logits = torch.stack([hidden_state(name, place - 1) for place in places]) @ HEAD
    count = len(places)
    heat = torch.full((count,), temperature)
    return draw(logits, heat, torch.full((count,), seed), torch.tensor(places)).tokens.tolist()


def projected(name: str, places: list[int]) -> NDArray[np.float32]:
    states = torch.stack([hidden_state(name, place - 1) for place in places])
    return states.numpy() @ signs(WIDTH)


def test_claimed_places_are_measured_as_they_were_drawn(engine: Engine) -> None:
    places = [3, 4, 5, 8]
    tokens = honest_tokens("a", places, 7, 0.8)
    engine.add("a", claims(places, 7, tokens), temperature=0.8)
    engine.step(a=8)
    rows = engine.rows("a")
    assert rows[:, prefill.PROJECTED :] == pytest.approx(projected("a", places), abs=1e-5)
    assert (rows[:, prefill.MARGIN] == 0).all()
    logits = torch.stack([hidden_state("a", place - 1) for place in places]) @ HEAD / 0.8
    own = torch.log_softmax(logits, -1)[torch.arange(4), torch.tensor(tokens)]
    assert rows[:, prefill.LOGPROB] == pytest.approx(own.numpy(), abs=1e-5)


def test_a_token_that_was_not_drawn_has_a_margin(engine: Engine) -> None:
    [token] = honest_tokens("a", [3], 7)
    engine.add("a", claims([3, 3], 7, [token, (token + 1) % VOCABULARY]))
    engine.step(a=3)
    rows = engine.rows("a")
    assert rows[0, prefill.MARGIN] == 0 < rows[1, prefill.MARGIN]


def test_each_text_is_measured_by_the_limits_it_was_drawn_under(engine: Engine) -> None:
    """A rank that draws tokens freely for a lease of the likeliest one alone, beside one that may."""
    for name, top_k in (("a", 1), ("b", 0)):
        tokens = honest_tokens(name, [3, 4, 5], 7, 9.0)
        engine.add(name, claims([3, 4, 5], 7, tokens), top_k=top_k, temperature=9.0)
    engine.add("c", claims([3], 7, [int((hidden_state("c", 2) @ HEAD).argmax())]), top_k=1)
    engine.step(b=5, c=3, a=5)
    assert (engine.rows("a")[:, prefill.MARGIN] > 0).any()
    assert (engine.rows("b")[:, prefill.MARGIN] == 0).all()
    assert (engine.rows("c")[:, prefill.MARGIN] == 0).all()


def test_supports_are_measured_beside_texts_that_state_none_or_others(engine: Engine) -> None:
    places = [3, 4, 5]
    for name, size, claimed in (("a", 2, 2), ("b", 3, 2), ("c", 0, 0)):
        logits = torch.stack([hidden_state(name, place - 1) for place in places]) @ HEAD
        rows, at = torch.arange(3), torch.tensor(places)
        limits = Narrowed(rows, torch.full((3,), size), torch.ones(3)) if size else None
        found = draw(logits, torch.ones(3), torch.full((3,), 7), at, limits)
        support = logits.topk(claimed).indices if claimed else None
        if support is not None:
            inside = (support == found.tokens[:, None]).any(1, keepdim=True)
            support = support.where(inside, found.tokens[:, None]).int().numpy()
        stated = claims(places, 7, found.tokens.tolist(), support=support)
        engine.add(name, stated, top_k=size, width=claimed)
    engine.step(b=5, c=5, a=5)
    assert (engine.rows("a")[:, prefill.MARGIN] == 0).all()
    assert (engine.rows("b")[:, prefill.MARGIN] == MOST_MARGIN).all()
    assert (engine.rows("c")[:, prefill.MARGIN] == 0).all()


def test_prompts_that_are_read_in_parts_and_together_keep_their_rows_apart(
    engine: Engine,
) -> None:
    places = {"a": [2, 5, 6], "b": [1, 4], "c": [9]}
    for name, claimed in places.items():
        engine.add(name, claims(claimed, 7, honest_tokens(name, claimed, 7)))
    engine.step(b=2, a=4, c=3)
    engine.step(a=2, c=6, b=2)
    for name, claimed in places.items():
        rows = engine.rows(name)
        assert rows[:, prefill.PROJECTED :] == pytest.approx(projected(name, claimed), abs=1e-5)
        assert (rows[:, prefill.MARGIN] == 0).all()


def test_positions_within_a_cached_prefix_are_reported_as_not_computed(engine: Engine) -> None:
    engine.add("a", claims([3, 4, 5], 7, [0, 0, 0]), cached=3)
    engine.step(a=2)
    assert prefill.not_computed(engine.rows("a")).tolist() == [True, False, False]


def test_what_is_not_wanted_costs_no_logits(engine: Engine) -> None:
    engine.runner.model.compute_logits = None
    engine.add("a", claims([2, 3], 7, [0, 0], drawn=False))
    engine.step(a=3)
    rows = engine.rows("a")
    assert not prefill.not_computed(rows).any()


def test_a_rank_without_logits_goes_on(engine: Engine) -> None:
    """vLLM gathers them on one rank of several."""
    engine.runner.model.compute_logits = nothing
    engine.reader.collecting = False
    engine.add("a", claims([2, 3], 7, [0, 0]))
    engine.step(a=3)
    assert engine.reader.collect([ord("a")]) == []
    assert engine.runner.sampled == 1


def scores(name: str, places: list[int]) -> Tensor:
    """What its routers rank by for the tokens before places [N, layers, E]."""
    states = [hidden_state(name, place - 1) for place in places]
    return torch.stack(
        [
            torch.stack([router_logits(one, layer) for layer in range(ROUTES.layers)])
            for one in states
        ]
    )


def test_routes_are_compared_with_the_choice_for_the_token_before(engine: Engine) -> None:
    """Over prompts in parts, beside a text whose routes are not asked for."""
    places = [2, 5, 6]
    ranks = scores("a", places).sort(descending=True)
    own, order = ranks.indices[..., :2].numpy(), ranks.indices.numpy()
    forged = own.copy()
    forged[1, 2, 0] = order[1, 2, 4]  # the worst in place of the best
    forged[2, :, 1] = order[2, :, 2]
    engine.add("a", claims(places * 2, 7, [0] * 6, routes=np.concatenate([own, forged])))
    engine.add("b", claims([1, 4], 7, [0, 0]))
    engine.step(b=2, a=4)
    engine.step(a=2, b=2)
    rows = engine.rows("a")[:, prefill.ROUTING : prefill.PROJECTED]
    values = ranks.values
    margins = values[1, 2, 1] - values[1, 2, 4], (values[2, :, 1] - values[2, :, 2]).max()
    wanted = [[0, 0]] * 4 + [[1 / 6, margins[0]], [3 / 6, margins[1]]]
    assert rows == pytest.approx(np.array(wanted), abs=1e-6)
    assert (engine.rows("b")[:, prefill.ROUTING : prefill.PROJECTED] == 0).all()


def test_a_router_that_has_a_bias_ranks_by_it() -> None:
    buffer, shape = RouteBuffer(keeps_logits=True), RouteShape(layers=1, experts=3, top_k=1)
    tell = buffer.hook(SimpleNamespace(e_score_correction_bias=torch.tensor([0.0, 2.0, 0.0])))
    tell(torch.tensor([[1.0, -1.0, 0.0]]), torch.tensor([[1]]))
    found = buffer.compare(torch.tensor([0, 0]), torch.tensor([[[1]], [[0]]]), shape)
    margin = 2 + torch.tensor(-1.0).sigmoid() - torch.tensor(1.0).sigmoid()
    assert found.numpy() == pytest.approx(np.array([[0, 0], [1, margin]]), abs=1e-6)


def test_routers_that_keep_no_logits_are_an_error() -> None:
    buffer, shape = RouteBuffer(), RouteShape(layers=1, experts=3, top_k=1)
    buffer.hook(None)(torch.zeros(1, 3), torch.tensor([[1]]))
    with pytest.raises(RuntimeError, match="do not tell their logits"):
        buffer.compare(torch.tensor([0]), torch.tensor([[[1]]]), shape)


def test_a_text_that_was_given_up_is_forgotten(engine: Engine) -> None:
    engine.add("a", claims([2, 6], 7, [0, 0]))
    engine.step(a=3)
    engine.runner.computed["b"] = 0
    engine.step(finished=frozenset({"a"}), b=2)
    assert engine.reader.collect([ord("a")]) == []
    engine.add("a", claims([2], 7, honest_tokens("a", [2], 7)))  # its id may come again
    engine.step(a=2)
    assert engine.rows("a")[0, prefill.MARGIN] == 0


def test_states_that_are_no_numbers_are_infinitely_far_off(engine: Engine) -> None:
    engine.runner.model.compute_logits = no_numbers
    engine.add("a", claims([2], 7, [0]))
    engine.step(a=2)
    assert engine.rows("a")[0, prefill.MARGIN] == np.inf


def test_a_runner_that_is_not_known_is_refused() -> None:
    runner = Runner(second=False)
    del runner.query_start_loc
    reader = PromptReader(runner, HiddenProjection(CPU, WIDTH, torch.float32), VOCABULARY)
    with pytest.raises(RuntimeError, match="query_start_loc"):
        reader.install()
