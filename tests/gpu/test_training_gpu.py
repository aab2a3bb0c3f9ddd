"""Training's kernels on a GPU: against plain mathematics in fp32, compiled or not, packed or not."""

import copy
import inspect
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.family_cases import FAMILIES, make_family
from torch import Tensor, nn

from primerl.node.config.run import ModelCreateConfig, TrainingConfig
from primerl.node.models import huggingface
from primerl.node.training import attention, attention_kernels, linear_attention
from primerl.node.training.attention_kernels import Layout
from primerl.node.training.backend import Sample, TrainBatch
from primerl.node.training.learner import Learner
from primerl.node.training.model import head_logprobs
from primerl.node.training.optimizer import Optimizer
from primerl.node.training.world import World

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # compilation warns of what it imports
]

CUDA = torch.device("cuda")
HEADS, KEYS, WIDTH = 16, 8, 128
SCALE = WIDTH**-0.5
LAYOUTS = {
    "one long": [4096],
    "long ones": [4096, 2500, 1596],
    "long and short": [8000, 100, 92],
    "short ones": [700, 3, 1, 1000, 512, 344],
    "very many": [1] * 64 + [17] * 64,
}
NEAR = 0.02
"""Of bf16 kernels, relative and root mean square."""
SAME = 2e-3
"""Of one bf16 kernel with itself."""
DENSE = ModelCreateConfig(
    hidden_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=512,
    max_position_embeddings=8192,
)
KINDS = {
    "dense": DENSE,
    "experts": DENSE.model_copy(update={"num_experts": 8, "moe_intermediate_size": 128}),
}


def apart(one: Tensor, other: Tensor) -> float:
    """Root mean square of the difference over that of `other`."""
    one, other = one.detach().float(), other.detach().float()
    return float((one - other).square().mean().sqrt() / other.square().mean().sqrt())


# -- attention -------------------------------------------------------------------------------------


def random_inputs(tokens: int) -> list[Tensor]:
    rng = torch.Generator("cuda").manual_seed(tokens)
    shapes = [(tokens, heads, WIDTH) for heads in (HEADS, KEYS, KEYS)]
    return [
        torch.randn(shape, generator=rng, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for shape in shapes
    ]


def plain(parts: list[Tensor], lengths: list[int]) -> Tensor:
    """Each sequence alone by the mathematics of SDPA, in fp32."""
    found: list[Tensor] = []
    for group in zip(*(one.float().split(lengths) for one in parts), strict=True):
        q, k, v = (one.transpose(0, 1)[None] for one in group)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            mixed = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=SCALE, enable_gqa=True
            )
        found.append(mixed[0].transpose(0, 1))
    return torch.cat(found)


def pulled(out: Tensor, parts: list[Tensor]) -> list[Tensor]:
    rng = torch.Generator("cuda").manual_seed(5)
    pull = torch.randn(out.shape, generator=rng, device="cuda").to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, parts, pull)]


def packed(parts: list[Tensor], lengths: list[int], window: int = 0, cap: float = 0.0) -> Tensor:
    layout = Layout.of(lengths, CUDA)
    q, k, v, *sinks = parts
    return attention.packed_attention(
        q, k, v, sinks[0] if sinks else None, layout.ends, layout.offsets, SCALE, window, cap
    )[0]


def never(*_: Any) -> bool:
    return False


@pytest.fixture(params=["flash4", "torch's"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-4 where it is installed: then it must agree and be used; and what is used without it."""
    if request.param != "flash4":
        monkeypatch.setattr(attention_kernels, "flash4_agrees", never)
        return
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    q, k = torch.empty(1, HEADS, WIDTH, device=CUDA), torch.empty(1, KEYS, WIDTH, device=CUDA)
    taken = attention_kernels.kernel_for(q.bfloat16(), k.bfloat16(), attention_kernels.Rules(SCALE))
    assert taken is attention_kernels.FLASH4


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("window", "cap"), [(0, 0), (2, 0), (100, 0), (0, 20.0), (100, 20.0)])
@pytest.mark.parametrize("name", ["long ones", "short ones"])
def test_kernels_mix_by_windows_caps_and_sinks_as_the_mathematics_does(
    name: str, window: int, cap: float, sinks: bool
) -> None:
    lengths = LAYOUTS[name]
    parts = random_inputs(sum(lengths))
    if sinks:
        scores = torch.linspace(-2, 6, HEADS, device=CUDA, dtype=torch.bfloat16)
        parts.append(scores.requires_grad_())
    mine = pulled(packed(parts, lengths, window, cap), parts)
    q, k, v, *rest = (one.float() for one in parts)
    rules = attention_kernels.Rules(SCALE, window, cap)
    ends = Layout.of(lengths, CUDA).ends
    wanted = pulled(
        attention.attend_plainly(q, k, v, ends, rules, rest[0] if rest else None), parts
    )
    assert [apart(one, other) < NEAR for one, other in zip(mine, wanted, strict=True)] == [
        True
    ] * len(mine)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_kernels_mix_what_the_mathematics_mixes(name: str) -> None:
    lengths = LAYOUTS[name]
    parts = random_inputs(sum(lengths))
    mine, wanted = (pulled(how(parts, lengths), parts) for how in (packed, plain))
    assert [apart(one, other) < NEAR for one, other in zip(mine, wanted, strict=True)] == [True] * 4


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("name", ["long ones", "short ones"])
def test_a_neighbour_s_tokens_change_nothing(name: str) -> None:
    lengths = LAYOUTS[name]
    parts = random_inputs(sum(lengths))
    own = slice(lengths[0], lengths[0] + lengths[1])
    hostile = [one.detach().clone() for one in parts]
    for one in hostile:
        one[own] = 60.0
    hostile = [one.requires_grad_() for one in hostile]
    before = pulled(packed(parts, lengths), parts)
    after = pulled(packed(hostile, lengths), hostile)
    for at, (one, other) in enumerate(zip(before, after, strict=True)):
        for place in (slice(None, own.start), slice(own.stop, None)):
            # what is read changes in no bit; gradients are added up in an order that varies from run to run
            assert torch.equal(one[place], other[place]) or at
            assert apart(one[place], other[place]) < SAME


@pytest.mark.parametrize("name", ["long and short", "short ones"])
def test_the_operator_is_sound(name: str) -> None:
    lengths = LAYOUTS[name]
    layout = Layout.of(lengths, CUDA)
    sinks = torch.zeros(HEADS, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    arguments = (*random_inputs(sum(lengths)), sinks, layout.ends, layout.offsets, SCALE, 0, 0.0)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(attention.packed_attention, arguments, test_utils=checks)


def test_linear_attention_reads_a_packed_row_in_one_call_as_the_mathematics_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = pytest.importorskip("fla.utils", reason="flash-linear-attention is not installed")
    if kernels.IS_NVIDIA_HOPPER and not kernels.TRITON_ABOVE_3_7_1:
        pytest.skip("flash-linear-attention refuses this Triton")
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    torch.manual_seed(0)
    make: Any = Qwen3_5TextConfig
    config = make(
        hidden_size=256,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=4,
        linear_num_value_heads=8,
    )
    module: Any = modeling.Qwen3_5GatedDeltaNet(config, 0).to(CUDA)
    half = copy.deepcopy(module).bfloat16()
    assert linear_attention.reads_packed_rows(half, CUDA, torch.bfloat16)
    lengths = LAYOUTS["short ones"]
    row = torch.randn(1, sum(lengths), 256, device=CUDA)
    layout = Layout.of(lengths, CUDA)

    def results(read: Any, row: Tensor) -> list[Tensor]:
        row = row.detach().requires_grad_()
        out = read(row, sequence_ends=layout.ends, sequence_offsets=layout.offsets)
        return pulled(out, [row])

    mine = results(linear_attention.in_one_call(half), row.bfloat16())
    plain_code: Any = inspect.unwrap(modeling.torch_chunk_gated_delta_rule)

    def without_kernels(*rows: Tensor, cu_seqlens: None, **named: Any) -> Any:
        return plain_code(*rows, **named)

    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", without_kernels)
    wanted = results(linear_attention.sequence_for_sequence(module), row)
    assert [apart(one, other) < NEAR for one, other in zip(mine, wanted, strict=True)] == [True] * 2


# -- a learner -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=sorted(KINDS))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    huggingface.create(directory, KINDS[request.param], 3)
    return directory


def learner(directory: Path, **changes: Any) -> Learner:
    config = TrainingConfig(lr=1e-3, seq_len=4096, device="cuda").model_copy(update=changes)
    return Learner.build(directory, config, max_steps=9, seed=1, temperature=1.0)


def samples(lengths: list[int]) -> list[Sample]:
    rng = random.Random(0)
    return [
        Sample(
            [rng.randrange(256) for _ in range(n)],
            [False] * 3 + [True] * (n - 3),
            [-5.0] * n,
            rng.choice([-1.0, 1.0]),
        )
        for n in lengths
    ]


FIGURES = ("loss/mean", "optim/grad_norm", "entropy/all/mean", "mismatch_kl/all/mean")


def figures(of: Learner) -> list[float]:
    """Of two steps."""
    found: list[float] = []
    for step in (1, 2):
        values = of.step(TrainBatch(step, samples([900, 300, 40, 2500, 7, 1100]))).values
        assert values["optim/skipped"] == 0.0
        found += [values[name] for name in FIGURES]
    of.close()
    return found


@pytest.mark.parametrize("again", ["none", "selective", "full"])
def test_compiled_and_recomputed_steps_are_the_plain_ones(directory: Path, again: str) -> None:
    changes = {"activation_checkpointing": again}
    compiled = figures(learner(directory, compile=True, **changes))
    assert compiled == pytest.approx(figures(learner(directory, compile=False)), rel=0.03, abs=0.01)


def test_after_compiling_ahead_no_step_compiles(directory: Path) -> None:
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    graphs = counters["stats"]
    mine = learner(directory, compile=True)
    mine.compile_step()
    compiled = graphs["unique_graphs"]
    assert compiled > 0
    for step, lengths in enumerate(([900, 300, 40, 2500], [700, 80], [1100] * 3), 1):
        mine.step(TrainBatch(step, samples(lengths)))
    assert graphs["unique_graphs"] == compiled
    mine.close()


def test_packed_logprobs_are_those_of_each_sequence_alone(directory: Path) -> None:
    mine = learner(directory, compile=False)
    row = samples([900, 300, 40, 7])
    together = torch.tensor(mine.packed_logprobs(row))
    alone = torch.tensor([one for sample in row for one in mine.packed_logprobs([sample])])
    mine.close()
    assert float((together - alone).abs().mean()) < 0.01
    assert float((together - alone).mean().abs()) < 0.002


def test_a_gpu_says_what_a_cpu_says(directory: Path) -> None:
    row = samples([300, 40])
    here = learner(directory, device="cpu", threads=0)
    there = learner(directory, compile=False)
    one, other = (torch.tensor(each.packed_logprobs(row)) for each in (here, there))
    there.close()
    assert float((one - other).abs().mean()) < 0.02


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_s_compiled_step_in_bf16_is_that_in_fp32(family: str, tmp_path: Path) -> None:
    make_family(family, tmp_path)
    found: list[tuple[Tensor, dict[str, float]]] = []
    for changes in ({"dtype": "float32", "compile": False}, {"compile": True}):
        mine = learner(tmp_path, seq_len=512, **changes)
        row = samples([300, 150, 40, 7])
        logprobs = torch.tensor(mine.packed_logprobs(row))
        found.append((logprobs, mine.step(TrainBatch(1, row)).values))
        mine.close()
    (exact, of_exact), (rounded, of_rounded) = found
    assert float((exact - rounded).abs().mean()) < 0.05
    assert of_rounded["optim/skipped"] == 0.0
    assert of_rounded["optim/grad_norm"] == pytest.approx(of_exact["optim/grad_norm"], rel=0.1)


def test_experts_are_counted_on_a_gpu_as_on_a_cpu(tmp_path: Path) -> None:
    huggingface.create(tmp_path, KINDS["experts"], 3)
    batch = TrainBatch(1, samples([500, 524]))  # a whole row: no padding is counted
    loads: list[list[float]] = []
    for changes in ({"device": "cpu"}, {"compile": True}, {"activation_checkpointing": "full"}):
        mine = learner(tmp_path, **changes)
        values = mine.step(batch).values
        loads.append([values[f"expert_load/max_mean/{fold}"] for fold in ("mean", "max")])
        mine.close()
    assert loads[1] == pytest.approx(loads[0], rel=0.05)
    assert loads[2] == pytest.approx(loads[0], rel=0.05)


def test_a_single_learner_keeps_to_its_share_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    half = torch.cuda.get_device_properties(CUDA).total_memory // 2
    try:
        World.join(TrainingConfig(gpu_memory_utilization=0.1))
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(half, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


# -- the head and the optimizer --------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [100, 512, 10_000])
def test_fused_logprobs_are_those_of_log_softmax(chunk: int) -> None:
    rng = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (
        torch.randn(shape, generator=rng, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for shape in ((1000, 64), (5003, 64))
    )
    targets = torch.randint(0, 5003, (1000,), generator=rng, device="cuda")
    found, _ = head_logprobs(hidden, weight, targets, 0.8, chunk)
    wanted = (hidden.float() @ weight.float().T / 0.8).log_softmax(-1)
    wanted = wanted.gather(-1, targets[:, None])[:, 0]
    parts = [hidden, weight]
    for one, other in zip(pulled(found, parts), pulled(wanted, parts), strict=True):
        assert apart(one, other) < NEAR


@pytest.mark.parametrize("offload", [False, True])
def test_a_step_that_is_not_finite_changes_no_weight_and_no_moment(offload: bool) -> None:
    config = TrainingConfig(lr=1e-2, optimizer_offload=offload)
    held = {"w": nn.Parameter(torch.ones(300, 200, device="cuda"))}
    optimizer = Optimizer(held, config)
    seen: list[tuple[float, float]] = []
    for value in (1.0, float("nan"), 1.0):
        held["w"].grad = torch.full((300, 200), value, device="cuda")
        optimizer.step(1e-2, optimizer.clip().isfinite())
        moments = optimizer.moments()
        seen.append((float(held["w"][0, 0]), float(moments["w:step"])))
    (first, one), (second, still), (third, two) = seen
    assert (one, still, two) == (1.0, 1.0, 2.0)
    assert 1 > first == second > third


@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_a_fused_step_clips_the_gradient_as_torch_does(size: float) -> None:
    config = TrainingConfig(lr=1e-2, max_norm=0.5)
    mine, wanted = (nn.Parameter(torch.ones(300, 200, device="cuda")) for _ in range(2))
    ours = Optimizer({"w": mine}, config)
    theirs = torch.optim.AdamW([wanted], 1e-2, config.betas, weight_decay=config.weight_decay)
    rng = torch.Generator("cuda").manual_seed(2)
    for scale in (1.0, 0.1, 3.0):
        grad = torch.randn(mine.shape, generator=rng, device="cuda") * size * scale
        mine.grad, wanted.grad = grad.clone(), grad.clone()
        norm = torch.nn.utils.clip_grad_norm_([wanted], config.max_norm)
        assert (float(norm) > config.max_norm) == (size == 1.0)
        assert ours.clip().equal(norm)
        ours.step(1e-2)
        theirs.step()
        torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-6)


def test_moments_in_the_host_s_memory_change_no_bit() -> None:
    config = TrainingConfig(lr=1e-2, max_norm=0.5)
    found: list[list[Tensor]] = []
    for offload in (False, True):
        rng = torch.Generator("cuda").manual_seed(1)
        shapes = [(300, 200), (7,), (1,)]
        held = {
            str(at): nn.Parameter(torch.randn(shape, generator=rng, device="cuda"))
            for at, shape in enumerate(shapes)
        }
        one = Optimizer(held, config.model_copy(update={"optimizer_offload": offload}))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("primerl.node.training.optimizer.BUCKET", 1000)
            for _ in range(4):
                for parameter in held.values():
                    parameter.grad = torch.randn(parameter.shape, generator=rng, device="cuda")
                one.clip()
                one.step(1e-2)
                one.zero_grad()
        places = {value.device.type for key, value in one.moments().items() if "exp" in key}
        assert places == {"cpu" if offload else "cuda"}
        moments = [value.to("cuda") for value in one.moments().values()]
        found.append([*(each.detach() for each in held.values()), *moments])
    assert len(found[0]) == 3 + 3 * 3
    assert all(one.equal(other) for one, other in zip(*found, strict=True))
