"""LanguageModel: equal to transformers, open about hidden states, updated in place."""

import functools
from collections.abc import Callable
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
from primerl.node.weights.state import State

UNTIED = SHAPE | {"tie_word_embeddings": False, "num_attention_heads": 6, "rope_theta": 1e6}


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    directory = tmp_path_factory.mktemp("untied")
    return directory, make_qwen3(directory, 4, UNTIED)


@pytest.fixture(params=["tied", "untied", "llama"])
def model(request: pytest.FixtureRequest) -> tuple[Path, State]:
    return request.getfixturevalue(request.param)


def network(model: tuple[Path, State], dtype: str = "float32") -> LanguageModel:
    return LanguageModel.build(*model, dtype=dtype, device="cpu")


def test_forward_equals_transformers(model: tuple[Path, State]) -> None:
    tokens = torch.randint(0, 272, (3, 40), generator=torch.Generator().manual_seed(0))
    reference: Any = huggingface.model_from_state(*model)
    with torch.inference_mode():
        assert torch.allclose(network(model).forward(tokens), reference(tokens).logits, atol=1e-5)


def test_a_session_equals_whole_forward_passes_over_select_padding_and_growth(
    model: tuple[Path, State],
) -> None:
    """60 steps outgrow the first cache; rows are dropped, repeated and reordered on the way."""
    reference: Any = huggingface.model_from_state(*model)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 272, (n,), generator=generator).tolist() for n in (3, 11, 1)]
    tokens = torch.tensor([[0] * (11 - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor(
        [[column >= 11 - len(prompt) for column in range(11)] for prompt in prompts]
    )
    sequences = prompts
    with torch.inference_mode():
        session, output = network(model).prefill(tokens, mask)
        for step in range(60):
            for row, sequence in enumerate(sequences):
                if step % 10 == 0:
                    whole = reference(torch.tensor([sequence])).logits[0, -1]
                    assert torch.allclose(output.logits[row], whole, atol=1e-5)
            if step % 20 == 5:
                rows = [2, 0, 0, 1][: 4 - step // 20]
                session.select(torch.tensor(rows))
                sequences = [list(sequences[row]) for row in rows]
            following = torch.randint(0, 272, (len(sequences),), generator=generator)
            sequences = [[*s, int(t)] for s, t in zip(sequences, following, strict=True)]
            output = session.step(following)


def test_hidden_states_are_what_feeds_the_head(model: tuple[Path, State]) -> None:
    tokens = torch.randint(0, 272, (3, 12), generator=torch.Generator().manual_seed(2))
    reference: Any = huggingface.model_from_state(*model)
    mine = network(model)
    with torch.inference_mode():
        wanted = reference.base_model(tokens).last_hidden_state
        hidden = mine.hidden(tokens)
        assert torch.allclose(hidden, wanted, atol=1e-5)
        assert torch.allclose(mine.logits(hidden), mine.forward(tokens), atol=1e-5)
        assert torch.allclose(mine.logits(hidden[1, 4]), mine.forward(tokens)[1, 4], atol=1e-5)


@pytest.mark.parametrize("lengths", [[5], [9, 9, 4, 9, 1], [700, 90, 600, 2]])
def test_packed_sequences_do_not_see_each_other(
    model: tuple[Path, State], lengths: list[int]
) -> None:
    mine = network(model)
    tokens = torch.randint(0, 272, (sum(lengths),), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        together = mine.packed(tokens, lengths).split(lengths)
        alone = [mine.hidden(one[None])[0] for one in tokens.split(lengths)]
    for found, wanted in zip(together, alone, strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)


def test_packing_pads_no_short_sequence_to_a_long_one(
    llama: tuple[Path, State],
) -> None:
    """So that memory grows with the tokens, and not with the longest times their number."""
    widths: list[int] = []
    made = network(llama)
    hidden = made.hidden

    def seen(tokens: torch.Tensor) -> torch.Tensor:
        widths.append(tokens.numel())
        return hidden(tokens)

    made.hidden = seen  # type: ignore[method-assign]
    lengths = [200, 180, 150, *[1] * 300]
    with torch.inference_mode():
        assert made.packed(torch.zeros(sum(lengths), dtype=torch.int64), lengths).shape[0] == 830
    assert len(widths) < 5
    assert sum(widths) < 2 * sum(lengths)


def test_each_step_s_hidden_state_is_that_of_a_whole_pass(model: tuple[Path, State]) -> None:
    mine, tokens = network(model), torch.tensor([[0, 7, 8], [4, 5, 6]])
    mask = torch.tensor([[False, True, True], [True, True, True]])
    with torch.inference_mode():
        session, output = mine.prefill(tokens, mask)
        after = session.step(torch.tensor([9, 9]))
        for row, sequence in enumerate(([7, 8, 9], [4, 5, 6, 9])):
            whole = mine.hidden(torch.tensor([sequence]))[0]
            assert output.hidden is not None
            assert after.hidden is not None
            assert torch.allclose(output.hidden[row], whole[-2], atol=1e-5)
            assert torch.allclose(after.hidden[row], whole[-1], atol=1e-5)


@pytest.mark.parametrize("kind", ["Gemma2", "Cohere", "Granite"])
def test_what_an_architecture_does_behind_its_head_is_done_to_given_states(kind: str) -> None:
    """Caps and scales of logits: LanguageModel knows none of them."""
    made = tiny(kind)
    tokens = torch.arange(12)[None] + 5
    with torch.inference_mode():
        hidden = made.hidden(tokens)
        plain = hidden @ made.head.weight.T
        wanted = made.forward(tokens)
        assert torch.allclose(made.logits(hidden), wanted, atol=1e-5)
    assert not torch.allclose(plain, wanted, atol=1e-3)


class Tiny(LanguageModel):
    """A network of random weights, and its head."""

    def __init__(self, model: Any) -> None:
        self.head = model.get_output_embeddings()
        super().__init__(model, huggingface.policy_state(model))


def tiny(kind: str) -> Tiny:
    import transformers

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": 0,
    }
    special = {"Gemma2": {"final_logit_softcapping": 0.5}, "Granite": {"logits_scaling": 4.0}}
    config = getattr(transformers, f"{kind}Config")(**sizes, **special.get(kind, {}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    return Tiny(model)


def untapped(model: tuple[Path, State], twist: Callable[[Any], None]) -> LanguageModel:
    loaded: Any = huggingface.model_from_state(*model)
    twist(loaded)
    return LanguageModel(loaded, model[1])


def _no_head(model: Any) -> None:
    model.get_output_embeddings = lambda: None


def _another_head(model: Any) -> None:
    """Logits depend on more than what feeds the head that shows itself."""
    forward = model.forward

    @functools.wraps(forward)  # it takes what the model takes
    def shifted(input_ids: torch.Tensor, **rest: Any) -> Any:
        output = forward(input_ids=input_ids, **rest)
        output.logits = output.logits + input_ids.float().mean()
        return output

    model.forward = shifted


@pytest.mark.parametrize("twist", [_no_head, _another_head])
def test_a_head_that_does_not_show_its_states_generates_but_proves_nothing(
    llama: tuple[Path, State], twist: Callable[[Any], None]
) -> None:
    made = untapped(llama, twist)
    with torch.inference_mode():
        for ask in (made.hidden, made.logits):
            with pytest.raises(EngineError, match="does not show"):
                ask(torch.ones(1, 3, dtype=torch.int64))
    [reply] = decode(made, [request()], max_length=256, cancelled=lambda: False)
    assert reply.token_ids
    with pytest.raises(EngineError, match="does not show"):
        decode(made, [request()], max_length=256, cancelled=lambda: False, keep_hidden=True)


def test_bfloat16_stays_near_transformers_in_bfloat16(tied: tuple[Path, State]) -> None:
    tokens = torch.arange(30)[None]
    reference: Any = huggingface.model_from_state(*tied, dtype="bfloat16")
    with torch.inference_mode():
        wanted = torch.log_softmax(reference(tokens).logits.float(), -1)
        found = torch.log_softmax(network(tied, "bfloat16").forward(tokens).float(), -1)
    assert float((wanted - found).abs().mean()) < 0.05


def test_a_network_does_not_share_memory_with_its_state(model: tuple[Path, State]) -> None:
    directory, state = model
    mine = {name: replace(tensor, data=tensor.data.copy()) for name, tensor in state.items()}
    for dtype in ("float32", "bfloat16"):
        made = LanguageModel.build(directory, mine, dtype=dtype, device="cpu")
        tokens = torch.arange(5)[None]
        with torch.inference_mode():
            before = made.forward(tokens).clone()
            for tensor in mine.values():
                tensor.data[:] = tensor.data[::-1].copy()
            assert made.forward(tokens).equal(before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_writes_what_a_new_network_would_hold(
    model: tuple[Path, State], dtype: str
) -> None:
    directory, state = model
    other = {name: replace(tensor, data=tensor.data[::-1].copy()) for name, tensor in state.items()}
    new, changed = blended(state, other, 0.05)
    mine = network(model, dtype)
    tokens = torch.arange(30)[None]
    with torch.inference_mode():
        before = mine.forward(tokens)
        assert mine.update(new, changed)
        after, wanted = mine.forward(tokens), network((directory, new), dtype).forward(tokens)
    assert after.equal(wanted)
    assert not after.equal(before)


def test_a_tensor_that_the_model_keeps_in_another_form_is_not_written(
    llama: tuple[Path, State],
) -> None:
    """Its parameter does not hold what the checkpoint says, so there is no place for an element."""
    directory, state = llama
    loaded: Any = huggingface.model_from_state(directory, state)
    kept, turned = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
    with torch.no_grad():
        weight = loaded.get_parameter(turned)
        weight.copy_(weight.t().clone())
    made = LanguageModel(loaded, state)
    before = weight.clone()
    assert not made.update(state, {kept: None, turned: None})
    assert weight.equal(before)
    assert made.update(state, {kept: None})
