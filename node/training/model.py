"""A causal transformers model prepared for training: packed rows in, logprobs out.

Imports torch: import lazily. The order matters: first recomputation in backward, then compilation, then
sharding. None of these changes the names of parameters: a checkpoint or an export uses transformers' names.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ..config.training import TrainingConfig
from ..errors import EngineError
from ..models import huggingface
from ..models.architectures import untrainable
from ..models.device import upload_array
from ..models.json_files import read_json
from ..models.tensors import torch_dtype
from . import attention, experts, linear_attention
from .attention_kernels import Layout
from .experts import ExpertLoad, RouterReplay
from .losses import TokenInputs
from .packing import MicroBatch
from .world import World

if TYPE_CHECKING:
    from ..models.huggingface import PreTrainedModel


class Masters:
    """fp32 masters of a model's trainable parameters, `named` like these.

    The model's parameters are their rounding.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Cast every parameter to `dtype`, frozen ones too, and keep fp32 masters."""
        self.named: dict[str, Tensor] = {}
        self._rounded: list[Tensor] = []
        self._exact: list[Tensor] = []
        for name, parameter in model.named_parameters():
            exact = parameter.data
            parameter.data = exact.to(dtype)
            if parameter.requires_grad:
                self._watch(name, parameter, nn.Parameter(exact.float()))

    def settle(self) -> None:
        """Write the masters' rounding into the model."""
        with torch.no_grad():
            torch._foreach_copy_(self._rounded, self._exact)  # pyright: ignore

    def adopt(self) -> None:
        """Set the masters whose rounding is no longer the model's to the model's values."""
        with torch.no_grad():
            for rounded, exact in zip(self._rounded, self._exact, strict=True):
                exact.copy_(torch.where(exact.to(rounded.dtype) == rounded, exact, rounded.float()))

    def _watch(self, name: str, parameter: nn.Parameter, master: nn.Parameter) -> None:
        self.named[name] = master
        self._rounded.append(parameter)
        self._exact.append(master)

        def collect(done: Tensor) -> None:
            """Add a complete gradient to the master's, and free it."""
            grad, done.grad = done.grad, None
            if grad is None:
                return
            if master.grad is None:
                master.grad = grad.float()
            else:
                master.grad.add_(grad)

        parameter.register_post_accumulate_grad_hook(collect)


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    chunk: int,
    cap: float = 0.0,
    support: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log softmax(logits / temperature) of `targets`, and the entropies.

    With a `support` [N, W] int64, the softmax of a row is over these tokens, the target among them, filled up
    with -1; over all where a row is -1 alone. Entropies are of all tokens, in nats, and have no gradient.
    Logits l are hidden @ weight.T, or c tanh(l / c) with a `cap` c > 0. `temperature` is one number, or [N]
    float32. `hidden` [N, d] and `weight` [V, d] share a dtype; both results are [N] float32, and so are softmax
    and sums. At most `chunk` x V logits exist at a time, in the dtype of `hidden`.
    """
    return _HeadLogprobs.apply(  # type: ignore[no-any-return]
        hidden, weight, targets, 1.0 / temperature, chunk, cap, support
    )


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: float | Tensor,
        chunk: int,
        cap: float,
        support: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        read, _ = _kernels(hidden.is_cuda)
        # three tensors, not rows of one: autograd must not take the results for views
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy, log_z = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for part in _chunks(len(hidden), chunk):
            logits = hidden[part] @ weight.T
            own = scale[part] if isinstance(scale, Tensor) else scale
            ids = None if support is None else support[part]
            logprobs[part], entropy[part], log_z[part] = read(logits, targets[part], own, cap, ids)
            del logits  # before the next ones are computed
        ctx.save_for_backward(hidden, weight, targets, log_z, support)
        ctx.scale, ctx.chunk, ctx.cap = scale, chunk, cap
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, targets, log_z, support = ctx.saved_tensors
        pull = _kernels(hidden.is_cuda)[1]
        of_hidden = torch.empty_like(hidden)
        # fp32, so that bf16 rounding does not depend on the number of chunks
        learns = ctx.needs_input_grad[1]
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if learns else None
        for part in _chunks(len(hidden), ctx.chunk):
            logits = hidden[part] @ weight.T
            scale = ctx.scale[part] if isinstance(ctx.scale, Tensor) else ctx.scale
            ids = None if support is None else support[part]
            of_logits = pull(logits, targets[part], log_z[part], grad[part], scale, ctx.cap, ids)
            of_hidden[part] = of_logits @ weight
            if of_weight is not None:
                _add_product(of_weight, of_logits.T, hidden[part])
            del logits, of_logits  # before the next ones are computed
        of_head = None if of_weight is None else of_weight.to(weight.dtype)
        return of_hidden, of_head, None, None, None, None, None


def _read(
    logits: Tensor, targets: Tensor, scale: float | Tensor, cap: float, support: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logprobs of the targets, entropies, and log of what these logprobs are normalised by, [N] each."""
    scaled = _capped(logits.float(), cap) * _column(scale)
    most = scaled.amax(-1)
    below = scaled - most[:, None]
    weights = below.exp()
    total = weights.sum(-1)  # the next sum is of the same pass over the logits
    entropy = total.log() - (weights * below).sum(-1) / total
    log_z = most + total.log()
    if support is not None:
        inside = scaled.gather(-1, support.clamp_min(0)).masked_fill(support < 0, -torch.inf)
        log_z = inside.logsumexp(-1).where(support[:, 0] >= 0, log_z)
    return _chosen(logits, targets, cap) * scale - log_z, entropy, log_z


def _pull(
    logits: Tensor,
    targets: Tensor,
    log_z: Tensor,
    grad: Tensor,
    scale: float | Tensor,
    cap: float,
    support: Tensor | None,
) -> Tensor:
    """Return the logits' gradient: (one-hot - softmax) x grad x scale, x a cap's derivative.

    Tokens outside of a support have none.
    """
    capped = _capped(logits.float(), cap)
    factor = (grad * scale)[:, None]
    gradient = -(capped * _column(scale) - log_z[:, None]).exp() * factor
    chosen = _chosen(logits, targets, cap)[:, None]
    own = (1 - (chosen * _column(scale) - log_z[:, None]).exp()) * factor
    if cap:
        gradient = gradient * (1 - (capped / cap) ** 2)
        own = own * (1 - (chosen / cap) ** 2)
    if support is not None:
        ids, is_stated = support.clamp_min(0), support[:, :1] >= 0
        inside = gradient.gather(-1, ids).masked_fill((support < 0) | ~is_stated, 0.0)
        gradient = gradient.masked_fill(is_stated, 0.0).scatter_add_(-1, ids, inside)
    # the targets are written afterwards: to compare every column with them takes twice as long
    return gradient.to(logits.dtype).scatter_(-1, targets[:, None], own.to(logits.dtype))


def _chosen(logits: Tensor, targets: Tensor, cap: float) -> Tensor:
    """Return the capped logits of the targets, [N]."""
    return _capped(logits.gather(-1, targets[:, None])[:, 0].float(), cap)


def _column(scale: float | Tensor) -> float | Tensor:
    return scale[:, None] if isinstance(scale, Tensor) else scale


def _capped(logits: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(logits / cap) if cap else logits


def _add_product(total: Tensor, first: Tensor, second: Tensor) -> None:
    """Add the matrix product to `total`, fp32; on a GPU it is not rounded to bf16 before."""
    if total.is_cuda:
        torch.addmm(total, first, second, out_dtype=torch.float32, out=total)  # pyright: ignore
    else:
        total += first @ second


@cache
def _kernels(fused: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return _read and _pull; compiled on a GPU, so that fp32 logits never exist there."""
    return (compiled_by_rows(_read), compiled_by_rows(_pull)) if fused else (_read, _pull)


def compiled_by_rows(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of tensors [N, ...] once for every N.

    Other dimensions are constants: with a vocabulary of any size, such kernels take twice as long.
    """
    compiled = torch.compile(kernel)

    def call(*arguments: Any) -> Any:
        for argument in arguments:
            if isinstance(argument, Tensor):
                torch._dynamo.maybe_mark_dynamic(argument, 0)  # pyright: ignore
        return compiled(*arguments)

    return call


def _chunks(count: int, size: int) -> Iterator[slice]:
    return (slice(at, min(at + size, count)) for at in range(0, count, size))


logger = logging.getLogger(__name__)

MULTIPLE = 128
"""Rows are padded to a multiple of this on a GPU: matrix kernels are fast, and there are few shapes."""
CASES = 64
"""Most compiled versions of a layer: of each kind, with gradients and without, trained and frozen, for lengths
that vary. torch compiles 8 by default, and computes any others uncompiled."""
PROBE = 5
"""Tokens for comparing the logprobs of this code with the model's own."""
PROBE_NATS = 1e-3


class TrainedModel(nn.Module):
    """The module that is sharded as a whole; `causal` is transformers' own."""

    def __init__(self, causal: "PreTrainedModel", config: TrainingConfig, world: World) -> None:
        super().__init__()
        self.causal: Any = causal
        self._chunk = config.head_chunk
        self._divisor = logit_divisor(causal)
        # c tanh(l / s / c) / t is (s c) tanh(l / (s c)) / (s t)
        self._cap = logit_cap(causal) * self._divisor
        self._world = world
        self._masters: Masters | None = None
        self.expert_load = ExpertLoad([], world)
        """Expert load of a trained mixture of experts."""
        self.replay = RouterReplay()

    @classmethod
    def build(
        cls,
        model_dir: Path,
        config: TrainingConfig,
        world: World,
        *,
        attach: "Callable[[PreTrainedModel], None] | None" = None,
        frozen: bool = False,
    ) -> "TrainedModel":
        """Load a model with fp32 masters, on the world's device, sharded over its mesh.

        `attach` may add to the model before sharding. With `frozen` the model is only read: in the dtype of
        forward, without gradients. Raises EngineError.
        """
        if reason := untrainable(read_json(model_dir / "config.json"), config.seq_len):
            raise EngineError(f"the model cannot be trained: {reason}")
        dtype = compute_dtype(config, world) if frozen else torch.float32
        huggingface.register_attention(attention.ATTENTION_NAME, attention.attend)
        check_context(huggingface.load_config(model_dir), config)
        causal = huggingface.load_model(model_dir, dtype=str(dtype).removeprefix("torch."))
        check_head(causal)
        huggingface.use_attention(causal, attention.ATTENTION_NAME)
        linear_attention.reset_between_sequences(causal, world.device, compute_dtype(config, world))
        if attach is not None:
            attach(causal)
        # without dropout or noise of routers: the policy that samplers have is the one that learns
        causal.eval()
        if frozen:
            causal.requires_grad_(False)
        model = cls(causal, config, world)
        owned = experts.share_out(
            causal, config.expert_parallel, world, compute_dtype(config, world)
        )
        model.expert_load, replay = experts.prepare(
            causal, world, freeze_router=config.freeze_router, count=not frozen
        )
        if not frozen:  # another policy has its own routes
            model.replay = replay
        for layer in huggingface.layers_of(causal):
            layer.forward = _prepared(layer.forward, config, world)
        return model._shard(config, world, owned)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        layout: Layout,
        rows: Tensor,
        targets: Tensor,
        sequences: Tensor,
        temperature: float | Sequence[float],
        given: Tensor | None = None,
        support: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropies [N] of `targets` [N], predicted at `rows` [N] of `ids` [T].

        `temperature` is one number, or one for each of the row's `sequences`, int64 [N]. Targets that are
        `given`, bool [N], have temperature 1. `support` is MicroBatch.support.
        """
        hidden = self.causal.base_model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            sequence_ends=layout.ends,
            sequence_offsets=layout.offsets,
            context=self._world.context,
        ).last_hidden_state[0]
        weight = self.causal.get_output_embeddings().weight
        # the tensor is made here, since FSDP rounds tensor arguments to the dtype of forward
        scale: float | Tensor = (
            temperature
            if isinstance(temperature, float | int)
            else upload_array(np.array(temperature, np.float32), ids.device)[sequences]
        )
        if given is not None:
            scale = torch.where(given, 1.0, scale)
        scale = scale * self._divisor
        ids_of_support = None if support is None else support.long()
        return head_logprobs(
            hidden[rows], weight, targets, scale, self._chunk, self._cap, ids_of_support
        )

    def read(self, row: MicroBatch, temperature: float | Sequence[float]) -> TokenInputs:
        """Return the trained tokens of this rank's part of a row; gradient flows through `logprobs`.

        `temperature` is one number, or one for each of the row's sequences.
        """
        world = self._world
        layout = Layout.of(row.lengths, world.device)
        own = row.part(world.context_rank, world.context_size)
        arrays = (own.token_ids, own.positions, own.rows, own.targets, own.sequences)
        ids, positions, rows, targets, sequences = (
            upload_array(array, world.device) for array in arrays
        )
        self.replay.set(own, world.device)
        given, echo = (
            upload_array(flags, world.device) if flags.any() else None
            for flags in (own.given, own.echo)
        )
        support = None if own.support is None else upload_array(own.support, world.device)
        logprobs, entropy = self(
            ids, positions, layout, rows, targets, sequences, temperature, given, support
        )
        # those that only the loss needs are uploaded while the device computes
        behaviour, advantages = (
            upload_array(array, world.device) for array in (own.logprobs, own.advantages)
        )
        return TokenInputs(
            logprobs, behaviour, advantages, entropy, sequences, echo=echo, given=given
        )

    def release(self) -> None:
        """Remove the wrapped forwards; the model cannot compute afterwards.

        A wrapper holds its layer in a reference cycle, which would keep the weights until garbage collection.
        """
        for module in self.causal.modules():
            module.__dict__.pop("forward", None)

    def masters(self) -> dict[str, Tensor]:
        """Return the trained parameters, fp32, by name; tied weights once.

        Call before any forward pass.
        """
        if self._masters is not None:
            return self._masters.named
        return dict(self.causal.named_parameters())

    def settle(self) -> None:
        """Copy changed masters into the computing weights."""
        if self._masters is not None:
            self._masters.settle()

    def adopt(self) -> None:
        """Take over computing weights that were set, where they differ from the rounded masters."""
        if self._masters is not None:
            self._masters.adopt()

    def _shard(
        self, config: TrainingConfig, world: World, owned: set[nn.Parameter]
    ) -> "TrainedModel":
        dtype = compute_dtype(config, world)
        if world.mesh is None:
            self.to(world.device)
            if dtype != torch.float32:
                self._masters = Masters(self.causal, dtype)
            return self
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in huggingface.layers_of(self.causal):
            fully_shard(
                layer,
                mesh=world.mesh,
                mp_policy=policy,
                reshard_after_forward=world.size > 1 and config.fsdp.reshard_after_forward,
                ignored_params=owned,
            )
        fully_shard(
            self,
            mesh=world.mesh,
            mp_policy=policy,
            reshard_after_forward=False,
            ignored_params=owned,
        )
        return self


def check_context(config: Any, wanted: TrainingConfig) -> None:
    """Raise EngineError if heads, layers or the loss do not allow this context_parallel."""
    ranks, heads = wanted.context_parallel, config.get_text_config().num_key_value_heads
    if heads % ranks:
        raise EngineError(
            f"{heads} key-value heads are not divisible by context_parallel {ranks}: take a divisor"
        )
    kinds: Any = getattr(config.get_text_config(), "layer_types", None) or ()
    if ranks > 1 and linear_attention.KIND in kinds:
        raise EngineError(
            "its linear attention reads whole sequences: set training.context_parallel to 1"
        )
    if ranks > 1 and wanted.loss.needs_sequences:
        raise EngineError(
            f"loss {wanted.loss.type!r} needs whole sequences on a rank: set context_parallel to 1"
        )


def compute_dtype(config: TrainingConfig, world: World) -> torch.dtype:
    """Return the dtype of forward and backward."""
    if config.dtype == "auto":
        return torch.float32 if world.device.type == "cpu" else torch.bfloat16
    return torch_dtype(config.dtype)


def logit_cap(causal: Any) -> float:
    """Return the soft cap of a model's logits; 0: none."""
    return float(getattr(causal.config.get_text_config(), "final_logit_softcapping", None) or 0.0)


def logit_divisor(causal: Any) -> float:
    """Return the number that a model's logits are divided by (Granite)."""
    return float(getattr(causal.config.get_text_config(), "logits_scaling", None) or 1.0)


@torch.no_grad()
def check_head(causal: Any) -> None:
    """Raise EngineError unless logits are hidden states times the head's weights, divided and capped or not."""
    head = causal.get_output_embeddings()
    if head is not None and getattr(head, "bias", None) is None:
        rng = torch.Generator().manual_seed(0)
        hidden = torch.randn(PROBE, head.weight.shape[1], generator=rng).to(head.weight)
        plain = _capped(hidden @ head.weight.T / logit_divisor(causal), logit_cap(causal))
        own = huggingface.head_logits(causal, hidden)
        if torch.allclose(plain.float(), own.float(), atol=PROBE_NATS, rtol=1e-3):
            return
    raise EngineError(
        f"{type(causal).__name__} does more between hidden states and logits than a matrix product, a "
        "division and a soft cap: it cannot be trained here"
    )


def is_compiled(config: TrainingConfig, world: World) -> bool:
    """Return whether the model's layers are compiled when they first run."""
    return config.compile if config.compile is not None else world.device.type == "cuda"


def _prepared(
    forward: Callable[..., Any], config: TrainingConfig, world: World
) -> Callable[..., Any]:
    """Wrap a layer's forward with the configured compilation and checkpointing."""
    wanted = is_compiled(config, world)
    # expert parallelism breaks graphs, and a checkpoint around a graph break is not compiled at all
    inside = config.expert_parallel > 1 and config.activation_checkpointing != "selective"
    inside = inside and wanted
    if inside:
        forward = _compiled(forward)
    if config.activation_checkpointing != "none":
        extra: Mapping[str, Any] = {}
        if config.activation_checkpointing == "selective":
            extra = {"context_fn": partial(create_selective_checkpoint_contexts, _keep_attention)}
        forward = partial(checkpoint, forward, use_reentrant=False, **extra)
    return _compiled(forward) if wanted and not inside else forward


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a layer's forward for more cases than torch would by itself."""
    config: Any = torch._dynamo.config  # pyright: ignore
    config.recompile_limit = max(config.recompile_limit, CASES)
    return torch.compile(forward)


def _keep_attention(_context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """Keep attention's output, which is small and expensive; recompute the rest of a layer."""
    if operation in (torch.ops.primerl.packed_attention.default,):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
