"""What packed attention mixes: the tokens of one sequence, and not a bit of its neighbours."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from primerl.node.config.run import ModelCreateConfig, TrainingConfig
from primerl.node.models import huggingface
from primerl.node.training import attention, attention_kernels
from primerl.node.training.attention_kernels import MATHEMATICS, Layout, Rules
from primerl.node.training.backend import Sample
from primerl.node.training.learner import Learner
from primerl.node.training.packing import pack

CPU = torch.device("cpu")
HEADS, KEYS, WIDTH = 4, 2, 8
SCALE = 0.3
LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=7)
PADDED = [5, 5, 4, 6]
ONE_BY_ONE = [40, 1, 2, 1]
"""The first is read padded to one width, the second sequence by sequence: see LOOSE."""


def random_heads(tokens: int, seed: int = 0) -> list[Tensor]:
    """Queries, keys and values as a model makes them: [1, heads, T, width]."""
    rng = torch.Generator().manual_seed(seed)
    shapes = [(1, heads, tokens, WIDTH) for heads in (HEADS, KEYS, KEYS)]
    return [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes]


def mixed(parts: list[Tensor], lengths: list[int], **rules: Any) -> Tensor:
    layout = Layout.of(lengths, CPU)
    query, key, value, *sinks = parts
    found, weights = attention.attend(
        None,
        query,
        key,
        value,
        None,
        scaling=SCALE,
        sequence_ends=layout.ends,
        sequence_offsets=layout.offsets,
        s_aux=sinks[0] if sinks else None,
        is_causal=True,  # models say more than is asked for
        **rules,
    )
    assert weights is None
    return found


def alone(
    parts: list[Tensor],
    lengths: list[int],
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Each sequence by the definition: a masked softmax, one after the other."""
    found: list[Tensor] = []
    sinks = parts[3] if len(parts) > 3 else torch.full((HEADS,), -torch.inf, dtype=torch.float64)
    for q, k, v in zip(*(one.split(lengths, dim=2) for one in parts[:3]), strict=True):
        keys, values = (one.repeat_interleave(HEADS // KEYS, dim=1) for one in (k, v))
        length = q.shape[2]
        places = torch.arange(length)
        ahead = places[None] - places[:, None]
        scores = q @ keys.transpose(2, 3) * SCALE
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        unseen = (ahead > 0) | (ahead <= -(sliding_window or length))
        powers = scores.masked_fill(unseen, -torch.inf).exp()
        total = powers.sum(-1, keepdim=True) + sinks.exp()[None, :, None, None]
        found.append((powers / total @ values).transpose(1, 2))
    return torch.cat(found, 1)


def gradients(how: Any, parts: list[Tensor], lengths: list[int], **rules: Any) -> list[Tensor]:
    leaves = [one.clone().requires_grad_() for one in parts]
    found = how(leaves, lengths, **rules)
    pull = torch.randn(found.shape, generator=torch.Generator().manual_seed(9), dtype=found.dtype)
    found.backward(pull)
    return [found.detach(), *(one.grad for one in leaves if one.grad is not None)]


@given(lengths=LENGTHS)
@settings(max_examples=40, deadline=None)
def test_packed_attention_is_that_of_each_sequence_alone(lengths: list[int]) -> None:
    parts = random_heads(sum(lengths))
    packed, apart = gradients(mixed, parts, lengths), gradients(alone, parts, lengths)
    assert len(packed) == len(apart) == 4
    for one, other in zip(packed, apart, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [64], [1, 30, 1], ONE_BY_ONE, PADDED])
def test_layouts_at_the_edges_are_read_right(lengths: list[int]) -> None:
    parts = random_heads(sum(lengths))
    assert torch.allclose(mixed(parts, lengths), alone(parts, lengths), atol=1e-12)


RULES: dict[str, dict[str, Any]] = {
    "a window": {"sliding_window": 3},
    "a window of one": {"sliding_window": 1},
    "a soft cap": {"softcap": 0.7},
    "both": {"sliding_window": 4, "softcap": 0.7},
}


@pytest.mark.parametrize("lengths", [PADDED, ONE_BY_ONE, [1]])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_windows_caps_and_sinks_are_those_of_the_definition(
    name: str, sinks: bool, lengths: list[int]
) -> None:
    parts = random_heads(sum(lengths), 4) + (
        [torch.linspace(-1, 2, HEADS).double()] if sinks else []
    )
    packed = gradients(mixed, parts, lengths, **RULES[name])
    apart = gradients(alone, parts, lengths, **RULES[name])
    assert len(packed) == len(apart) == len(parts) + 1
    for one, other in zip(packed, apart, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_a_token_outside_its_window_is_not_seen() -> None:
    parts = random_heads(9)
    changed = [one.clone() for one in parts]
    for one in changed:
        one[:, :, :4] = 5.0
    before, after = (mixed(one, [9], sliding_window=3) for one in (parts, changed))
    assert torch.equal(before[:, 6:], after[:, 6:])
    assert not torch.equal(before[:, 5], after[:, 5])


def test_kernels_that_know_no_sinks_are_right_with_what_they_are_given() -> None:
    """They mix without sinks; backward makes weights from scores and logsumexp, and subtracts grad . out."""
    length, heads = 7, 3
    rng = torch.Generator().manual_seed(2)
    q, k, v, pull = (
        torch.randn(length, heads, WIDTH, generator=rng, dtype=torch.float64) for _ in range(4)
    )
    sinks = torch.tensor([-1.0, 0.5, 3.0], dtype=torch.float64)
    leaves = [one.clone().requires_grad_() for one in (q, k, v, sinks)]
    parts = [one.transpose(0, 1)[None] for one in leaves[:3]]
    scores = parts[0] @ parts[1].transpose(2, 3) * SCALE
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    total = scores.exp().sum(-1, keepdim=True) + leaves[3].exp()[None, :, None, None]
    wanted = (scores.exp() / total @ parts[2])[0].transpose(0, 1)
    wanted.backward(pull)

    scores = scores.detach()[0]
    plain, lse = (scores.softmax(-1) @ v.transpose(0, 1)).transpose(0, 1), scores.logsumexp(-1)
    out, lse = attention.with_sinks(plain, lse, sinks)
    weights = torch.exp(scores - lse[..., None])
    products = pull.transpose(0, 1) @ v.permute(1, 2, 0) - (pull * out).sum(-1).T[..., None]
    of_scores = weights * products * SCALE
    found = [
        (of_scores @ k.transpose(0, 1)).transpose(0, 1),
        (of_scores.transpose(1, 2) @ q.transpose(0, 1)).transpose(0, 1),
        (weights.transpose(1, 2) @ pull.transpose(0, 1)).transpose(0, 1),
        attention.gradient_of_sinks(pull, out, lse, sinks),
    ]
    assert torch.allclose(out, wanted.detach(), atol=1e-12)
    for one, leaf in zip(found, leaves, strict=True):
        assert leaf.grad is not None
        assert torch.allclose(one, leaf.grad, atol=1e-12)


@pytest.mark.parametrize("lengths", [PADDED, ONE_BY_ONE, [1]])
@pytest.mark.parametrize("name", ["none", *RULES])
def test_what_kernels_are_compared_with_is_the_definition(name: str, lengths: list[int]) -> None:
    rules = RULES.get(name, {})
    parts = random_heads(sum(lengths), 6)
    out, *wanted = gradients(alone, parts, lengths, **rules)
    q, k, v = (one[0].transpose(0, 1).float() for one in parts)
    layout = Layout.of(lengths, CPU)
    own = Rules(SCALE, rules.get("sliding_window", 0), rules.get("softcap", 0.0))
    found, lse = MATHEMATICS.forward(q, k, v, layout, own)
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)
    pulled = MATHEMATICS.backward(pull[0].float(), q, k, v, found, lse, layout, own)
    assert torch.allclose(found.double(), out[0], atol=1e-5)
    for one, other in zip(pulled, wanted, strict=True):
        assert torch.allclose(one.double(), other[0].transpose(0, 1), atol=1e-5)


def test_a_kernel_that_is_not_installed_is_not_taken() -> None:
    q, k = torch.zeros(3, 4, 8), torch.zeros(3, 2, 8)
    assert attention_kernels.kernel_for(q, k, Rules(1.0)) is attention_kernels.FLASH2
    assert attention_kernels.kernel_for(q, k, Rules(1.0, cap=5.0)) is MATHEMATICS


@pytest.mark.parametrize("fault", ["raises", "is off", "is right"])
def test_flash_attention_4_is_taken_only_if_it_agrees(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The package stands in for a release that does not run on this GPU, or computes something else."""

    class Package:
        def forward(self, *arguments: Any) -> Any:
            if fault == "raises":
                raise RuntimeError("no kernel for this device")
            out, lse = MATHEMATICS.forward(*arguments)
            return (out * 1.05 if fault == "is off" else out), lse

        def backward(self, *arguments: Any) -> Any:
            return MATHEMATICS.backward(*arguments)

    attention_kernels.flash4_agrees.cache_clear()
    monkeypatch.setattr(attention_kernels, "find_spec", str)
    monkeypatch.setattr(attention_kernels, "FLASH4", Package())
    q, k = torch.zeros(3, 4, 8), torch.zeros(3, 2, 8)
    taken = attention_kernels.kernel_for(q, k, Rules(1.0))
    attention_kernels.flash4_agrees.cache_clear()
    assert (taken is attention_kernels.FLASH4) is (fault == "is right")
    assert ("FlashAttention-4 is not used" in caplog.text) is (fault != "is right")


@given(lengths=LENGTHS)
@settings(max_examples=20, deadline=None)
def test_both_forms_on_a_cpu_give_the_same(lengths: list[int]) -> None:
    parts = random_heads(sum(lengths), 3)
    found: list[list[Tensor]] = []
    with pytest.MonkeyPatch.context() as patched:
        for loose in (0.0, float("inf")):
            patched.setattr(attention, "LOOSE", loose)
            found.append(gradients(mixed, parts, lengths))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("lengths", [PADDED, ONE_BY_ONE])
@pytest.mark.parametrize("attacked", range(4))
def test_nothing_of_a_sequence_reaches_another_one_not_a_bit(
    lengths: list[int], attacked: int
) -> None:
    """Not even where the attacker's numbers are as large as can be."""
    parts = random_heads(sum(lengths), 1)
    start = sum(lengths[:attacked])
    own = slice(start, start + lengths[attacked])
    hostile = [one.clone() for one in parts]
    for one in hostile:
        one[:, :, own] = 1e30
    others = torch.ones(sum(lengths), dtype=torch.bool)
    others[own] = False
    pairs = zip(gradients(mixed, parts, lengths), gradients(mixed, hostile, lengths), strict=True)
    mine, attacked_one = next(pairs)
    assert torch.equal(mine[:, others], attacked_one[:, others])
    assert not torch.equal(mine[:, own], attacked_one[:, own])
    for one, other in pairs:
        assert torch.equal(one[:, :, others], other[:, :, others])


def test_the_future_does_not_reach_the_past() -> None:
    parts = random_heads(9)
    changed = [one.clone() for one in parts]
    for one in changed:
        one[:, :, 6:] = 5.0
    before, after = (mixed(one, [9])[:, :6] for one in (parts, changed))
    assert torch.equal(before, after)


@given(lengths=LENGTHS)
def test_a_layout_says_where_sequences_end(lengths: list[int]) -> None:
    layout = Layout.of(lengths, CPU)
    assert layout.ends.dtype == layout.offsets.dtype == torch.int32
    assert layout.ends.tolist() == [sum(lengths[: i + 1]) for i in range(len(lengths))]
    assert layout.offsets.tolist() == [0, *layout.ends.tolist()]


# -- through a model -------------------------------------------------------------------------------

SHAPE = ModelCreateConfig(
    hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=48
)
MADE = {"dense": SHAPE, "experts": SHAPE.model_copy(update={"num_experts": 4})}


@pytest.fixture(scope="module", params=sorted(MADE))
def learner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("model")
    huggingface.create(directory, MADE[request.param], 3)
    config = TrainingConfig(threads=1, device="cpu", seq_len=64)
    return Learner.build(directory, config, max_steps=1, seed=0, temperature=1.0)


def samples(lengths: list[int], seed: int = 0) -> list[Sample]:
    rng = random.Random(seed)
    return [
        Sample([rng.randrange(256) for _ in range(n)], [True] * n, [-1.0] * n, 1.0) for n in lengths
    ]


def read(learner: Any, row: list[Sample], pulled: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Logprobs of a packed row, and the gradient of those of the sequences `pulled` alone."""
    model: Any = learner._model
    rows = pack(row, 64).rank(0)
    (only,) = rows
    inputs = model.read(only, 1.0)
    wanted = torch.isin(inputs.sequences, torch.tensor(pulled))
    grads = torch.autograd.grad(
        inputs.logprobs[wanted].sum(), list(model.parameters()), retain_graph=False
    )
    return inputs.logprobs.detach(), list(grads)


def test_other_tokens_in_one_sequence_change_no_bit_of_what_its_neighbours_teach(
    learner: Any,
) -> None:
    """Logprobs and gradients; the lengths stay, so that kernels add up in the same order."""
    lengths = [12, 11, 10]  # packed in this order: the longest first
    honest, hostile = samples(lengths), samples(lengths)
    hostile[1] = samples([11], seed=5)[0]
    logprobs, pulls = read(learner, honest, [0, 2])
    attacked, attacked_pulls = read(learner, hostile, [0, 2])
    others = [*range(11), *range(21, 30)]
    assert torch.equal(logprobs[others], attacked[others])
    assert not torch.equal(logprobs[11:21], attacked[11:21])
    assert len(pulls) > 20
    grouped = hasattr(learner._model.causal.config, "num_experts")  # sums group tokens by expert
    for one, other in zip(pulls, attacked_pulls, strict=True):
        assert torch.allclose(one, other, atol=1e-6 if grouped else 0.0, rtol=0.0)


def test_a_packed_sequence_teaches_what_it_teaches_alone(learner: Any) -> None:
    lengths = [12, 11, 10]
    row = samples(lengths)
    logprobs, _ = read(learner, row, [0])
    for index, part in enumerate(logprobs.split([n - 1 for n in lengths])):
        own, pulls = read(learner, [row[index]], [0])
        assert torch.allclose(own, part, atol=1e-5)
        _, packed_pulls = read(learner, row, [index])
        for one, other in zip(pulls, packed_pulls, strict=True):
            assert torch.allclose(one, other, atol=1e-5)


def test_the_model_s_own_attention_says_the_same(learner: Any) -> None:
    """Positions restart in each sequence, and no other sequence is seen: as if read by transformers itself."""
    row = samples([9, 7])
    logprobs, _ = read(learner, row, [0])
    plain: Any = huggingface.load_model(learner._model_dir)
    wanted: list[Tensor] = []
    for one in row:
        ids = torch.tensor([one.token_ids])
        with torch.no_grad():
            logits = plain(input_ids=ids, use_cache=False).logits[0, :-1]
        wanted.append(-F.cross_entropy(logits, ids[0, 1:], reduction="none"))
    assert torch.allclose(logprobs, torch.cat(wanted), atol=1e-5)
