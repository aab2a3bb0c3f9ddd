"""Mixtures of experts in the hf engine: a state with a tensor for each expert is loaded and read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_cases import SHAPE, blended, make_qwen3, request

from primerl.node.errors import EngineError
from primerl.node.inference.decoding import decode
from primerl.node.inference.model import LanguageModel
from primerl.node.models import huggingface
from primerl.node.models.routers import RouterTap
from primerl.node.weights.state import State

EXPERTS = SHAPE.model_copy(update={"num_experts": 5, "moe_intermediate_size": 32})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("experts")
    return directory, make_qwen3(directory, 3, EXPERTS)


def network(model: tuple[Path, State]) -> LanguageModel:
    return LanguageModel.build(*model, dtype="float32", device="cpu")


def test_a_state_of_single_experts_becomes_the_network_of_transformers(
    model: tuple[Path, State],
) -> None:
    assert "model.layers.1.mlp.experts.4.down_proj.weight" in model[1]
    made = network(model)
    reference: Any = huggingface.load_model(model[0])
    with torch.no_grad():  # fixtures sharpen matrices
        fresh: Any = huggingface.model_from_state(*model)
        for own, other in zip(reference.parameters(), fresh.parameters(), strict=True):
            own.copy_(other)
    tokens = torch.randint(0, 272, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        wanted = reference(tokens).logits
        hidden = made.hidden(tokens)
        assert torch.allclose(made.forward(tokens), wanted, atol=1e-5)
        assert torch.allclose(made.logits(hidden), wanted, atol=1e-5)
        packed = made.packed(torch.cat([tokens[0, :9], tokens[1]]), [9, 40])
    assert torch.allclose(packed, torch.cat([hidden[0, :9], hidden[1]]), atol=1e-5)


def test_tokens_sampled_step_by_step_are_those_of_whole_passes(model: tuple[Path, State]) -> None:
    made = network(model)
    asked = request()
    [reply] = decode(made, [asked], max_length=256, cancelled=lambda: False, keep_hidden=True)
    assert reply.token_ids
    tokens = torch.tensor([[*asked.prompt, *reply.token_ids]])
    with torch.inference_mode():
        log_p = made.forward(tokens)[0].log_softmax(-1)
    first = len(asked.prompt)
    for place, (token, logprob) in enumerate(
        zip(reply.token_ids, reply.logprobs, strict=True), start=first
    ):
        assert logprob == pytest.approx(float(log_p[place - 1, token]), abs=1e-4)


def test_a_changed_expert_asks_for_another_network_and_nothing_is_half_written(
    model: tuple[Path, State],
) -> None:
    """transformers keeps experts in one tensor: a checkpoint's have no place of their own in it."""
    directory, state = model
    other = {name: replace(tensor, data=tensor.data[::-1].copy()) for name, tensor in state.items()}
    new, changed = blended(state, other, 0.05)
    made, tokens = network(model), torch.arange(30)[None]
    with torch.inference_mode():
        before = made.forward(tokens)
        assert not made.update(new, changed)
        assert made.forward(tokens).equal(before)
        assert not network((directory, new)).forward(tokens).equal(before)


def test_a_state_without_one_expert_is_refused(model: tuple[Path, State]) -> None:
    directory, state = model
    lacking = {name: one for name, one in state.items() if ".experts.3.up_proj" not in name}
    with pytest.raises(EngineError, match="does not fit"):
        network((directory, lacking))


def routes_of(model: tuple[Path, State], tokens: list[int]) -> torch.Tensor:
    """What the routers of transformers' model choose in one pass [T, layers, k]."""
    plain: Any = huggingface.model_from_state(*model)
    found: list[torch.Tensor] = []

    def take(_layer: int, _scores: torch.Tensor, chosen: torch.Tensor) -> None:
        found.append(chosen)

    with RouterTap(plain).watched(take), torch.inference_mode():
        plain(torch.tensor([tokens]))
    return torch.stack(found, 1)


def test_every_drawn_token_has_the_route_that_a_whole_pass_says(model: tuple[Path, State]) -> None:
    """The token before it chose: also of requests that share a prompt, and in a batch that shrinks."""
    made = network(model)
    asked = [request(seed=one, max_tokens=3 + 4 * one) for one in range(4)]
    replies = decode(made, asked, max_length=256, cancelled=lambda: False, keep_routes=True)
    for one, reply in zip(asked, replies, strict=True):
        wanted = routes_of(model, [*one.prompt, *reply.token_ids])[len(one.prompt) - 1 : -1]
        assert reply.routes is not None
        assert torch.equal(reply.routes, wanted)
        assert reply.routes.shape == (len(reply.token_ids), 2, 2)
    assert decode(made, asked, max_length=256, cancelled=lambda: False)[0].routes is None
