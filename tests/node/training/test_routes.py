"""Routes of samplers in training: the trainer's own change nothing, others are those of a reference."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.training_cases import TINY, batch, learner, sample
from support.weights_cases import same
from torch import Tensor, nn

from primerl.node.models import huggingface
from primerl.node.models.routers import RouterTap, mixtures, route_shape
from primerl.node.models.routes import pack_routes, route_fault, unpack_routes
from primerl.node.training.backend import Sample, TrainBatch
from primerl.node.training.packing import pack
from primerl.protocol.manifests import RouteShape

SHAPE = RouteShape(layers=2, experts=6, top_k=2)


def with_routes(one: Sample, routes: "np.ndarray[Any, Any]") -> Sample:
    """`one` with the routes of the tokens before its sampled ones, of `routes` [T, layers, k] of all."""
    led = np.flatnonzero(one.mask[1:])
    return Sample(
        one.token_ids, one.mask, one.logprobs, one.advantage, routes=pack_routes(routes[led], SHAPE)
    )


def own_routes(directory: Path, one: Sample) -> "np.ndarray[Any, Any]":
    """What the routers of transformers' model choose [T, layers, k]."""
    plain: Any = huggingface.load_model(directory)
    found: list[Tensor] = []

    def take(_layer: int, _scores: Tensor, chosen: Tensor) -> None:
        found.append(chosen)

    with RouterTap(plain).watched(take):
        plain(input_ids=torch.tensor([one.token_ids]))
    return torch.stack(found, 1).numpy()


def random_routes(one: Sample, seed: int) -> "np.ndarray[Any, Any]":
    rng = np.random.default_rng(seed)
    shape = (len(one.token_ids), SHAPE.layers)
    return np.argsort(rng.random((*shape, SHAPE.experts)), axis=2)[..., : SHAPE.top_k]


class Fixed(nn.Module):
    """A router that takes `chosen` [T, k] where that is not below 0, as R3 defines it."""

    def __init__(self, router: Any, chosen: Tensor) -> None:
        super().__init__()
        self.weight, self.chosen, self.num_experts = router.weight, chosen, router.num_experts

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden @ self.weight.T
        own = logits.topk(self.chosen.shape[1]).indices
        chosen = torch.where(self.chosen < 0, own, self.chosen)
        weights = logits.gather(1, chosen).softmax(-1)  # normalised over the chosen
        return logits, weights, chosen


def reference(directory: Path, one: Sample) -> tuple[Tensor, list[Tensor]]:
    """Logprobs of the trained tokens of one sample, and the gradients of the routers, by plain transformers."""
    plain: Any = huggingface.load_model(directory)
    led = np.flatnonzero(one.mask[1:])
    routes = np.full((len(one.token_ids), SHAPE.layers, SHAPE.top_k), -1)
    routes[led] = unpack_routes(one.routes, SHAPE)
    routers = [router for router, _ in mixtures(plain)]
    for layer, block in enumerate(plain.model.layers):
        block.mlp.gate = Fixed(block.mlp.gate, torch.from_numpy(routes[:, layer].copy()))
    logits = plain(input_ids=torch.tensor([one.token_ids])).logits[0]
    targets = torch.tensor(one.token_ids)[led + 1]
    logprobs = logits.log_softmax(-1)[led].gather(1, targets[:, None])[:, 0]
    logprobs.sum().backward()
    return logprobs.detach(), [router.weight.grad for router in routers]


# -- the same and others -----------------------------------------------------------------------------


def test_the_routes_that_a_trainer_chooses_itself_change_no_bit(directory: Path) -> None:
    plain, replaying = learner(directory), learner(directory)
    first = batch(1)
    replayed = TrainBatch(
        1, [with_routes(one, own_routes(directory, one)) for one in first.samples]
    )
    figures = [plain.step(first).values, replaying.step(replayed).values]
    for name in ("loss/mean", "mismatch_kl/all/mean", "optim/grad_norm"):
        assert figures[0][name] == figures[1][name]
    assert figures[1]["samples/malformed"] == 0.0
    assert same(plain.state(), replaying.state())


@pytest.mark.parametrize("again", ["none", "full"])
def test_other_routes_are_those_of_a_reference_with_gradients_to_the_router(
    directory: Path, again: str
) -> None:
    mine = learner(directory, activation_checkpointing=again)
    samples = [sample(random.Random(n), drawn=4 + n) for n in range(3)]
    samples = [with_routes(one, random_routes(one, n)) for n, one in enumerate(samples)]
    samples.append(sample(random.Random(9), drawn=6))  # one of an engine that gives none
    [row] = pack(samples, 64).rank(0)
    found = mine._model.read(row, 1.0).logprobs
    found.sum().backward()
    longest_first = sorted(samples, key=lambda one: -len(one.token_ids))
    samples[-1] = with_routes(samples[-1], own_routes(directory, samples[-1]))
    wanted = [reference(directory, samples[-1] if not one.routes else one) for one in longest_first]
    assert torch.allclose(found.detach(), torch.cat([one for one, _ in wanted]), atol=1e-5)
    for layer, (router, _) in enumerate(mixtures(mine._model.causal)):
        gradient = torch.stack([grads[layer] for _, grads in wanted]).sum(0)
        assert torch.allclose(router.weight.grad, gradient, atol=1e-4)
    without = mine._model.read(
        next(pack([Sample(s.token_ids, s.mask, s.logprobs, 1.0) for s in samples], 64).rank(0)), 1.0
    )
    assert not torch.allclose(found, without.logprobs, atol=1e-3)


def test_a_row_in_parts_keeps_the_routes_of_each(directory: Path) -> None:
    samples = [sample(random.Random(n), drawn=9) for n in range(3)]
    samples = [with_routes(one, random_routes(one, n)) for n, one in enumerate(samples)]
    [row] = pack(samples, 64, multiple=4).rank(0)
    parts = [row.part(index, 4) for index in range(4)]
    size = len(row.token_ids) // 4
    joined = np.concatenate([one.routed + n * size for n, one in enumerate(parts)])
    assert joined.tolist() == row.routed.tolist()
    assert np.array_equal(np.concatenate([one.routes for one in parts]), row.routes)
    assert all((one.routed >= 0).all() and (one.routed < size).all() for one in parts)


@pytest.mark.parametrize("routes", [b"\x00\x01", bytes(4 * 5), bytes([0, 1, 2, 6] * 5)])
def test_routes_that_fit_no_token_cost_their_sample_alone(directory: Path, routes: bytes) -> None:
    """Of another length, twice the same expert, an expert that is not there."""
    mine = learner(directory)
    good, bad = sample(random.Random(1)), sample(random.Random(2))
    bad = Sample(bad.token_ids, bad.mask, bad.logprobs, 1.0, routes=routes)
    values = mine.step(TrainBatch(1, [good, bad])).values
    assert (values["samples/malformed"], values["optim/skipped"]) == (1.0, 0.0)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of torch's own tracing
def test_compiled_layers_take_routes_and_do_without(directory: Path) -> None:
    mine, plain = learner(directory), learner(directory)
    for layer in mine._model.causal.model.layers:
        layer.mlp.forward = torch.compile(layer.mlp.forward, backend="aot_eager", fullgraph=True)
    for step in (1, 2, 3):
        found = batch(step)
        if step != 2:
            samples = [with_routes(one, random_routes(one, step)) for one in found.samples]
            found = TrainBatch(step, samples)
        values = [one.step(found).values["loss/mean"] for one in (mine, plain)]
        assert values[0] == pytest.approx(values[1], abs=1e-5)


# -- shapes and bytes --------------------------------------------------------------------------------


def test_the_shape_of_routes_is_that_of_the_layers_with_experts(
    directory: Path, tmp_path: Path
) -> None:
    assert route_shape(directory) == SHAPE
    huggingface.create(tmp_path, TINY, 7)
    assert route_shape(tmp_path) is None


def test_more_than_256_experts_take_two_bytes_each() -> None:
    wide = RouteShape(layers=3, experts=300, top_k=2)
    routes = np.array([[[299, 0], [1, 2], [256, 255]]])
    data = pack_routes(routes, wide)
    assert len(data) == wide.token_bytes == 12
    assert np.array_equal(unpack_routes(data, wide), routes)
    assert not route_fault(data, 1, wide)
    assert "expert 301" in route_fault(pack_routes(routes + 2, wide), 1, wide)
    assert RouteShape(layers=48, experts=128, top_k=8).token_bytes == 384
