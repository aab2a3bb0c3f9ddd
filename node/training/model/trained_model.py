"""A causal model of transformers made ready for training: packed rows in, logprobs out. Imports torch lazily.

The order matters: what is recomputed in backward, then compiled, then sharded. Nothing here changes the names
of parameters: a checkpoint or an export calls them as transformers does.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ...config.training import TrainingConfig
from ...models import huggingface
from ...models.architectures import untrainable
from ...models.json_files import read_json
from ...models.tensors import torch_dtype
from ...ops.errors import EngineError
from ..losses.formulas import TokenInputs
from ..packing import MicroBatch
from ..world import World
from . import attention, expert_parallel, experts, kernels
from .attention import Layout
from .experts import ExpertLoad
from .head import head_logprobs
from .masters import Masters

if TYPE_CHECKING:
    from ...models.huggingface import PreTrainedModel

logger = logging.getLogger(__name__)

MULTIPLE = 128
"""Rows are padded to a multiple of this on a GPU: what matrix kernels like, and few shapes."""
WHOLE_SEQUENCES = ("gspo", "custom")
"""Losses that may add up over the tokens of a sequence."""
PROBE = 5
"""Tokens with which the way to the logprobs is compared with the model's own."""
PROBE_NATS = 1e-3


class TrainedModel(nn.Module):
    """The module that is sharded as a whole; `causal` is transformers' own."""

    def __init__(self, causal: "PreTrainedModel", config: TrainingConfig, world: World) -> None:
        super().__init__()
        self.causal: Any = causal
        self._chunk = config.head_chunk
        self._world = world
        self._masters: Masters | None = None
        self.expert_load = ExpertLoad([], world)
        """Of a mixture of experts that is trained."""

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
        """The model of a directory with fp32 masters, on the world's device, sharded over its mesh.

        `attach` may add to it before that. With `frozen` it is only read: in the dtype of forward, without
        gradients. Raises EngineError.
        """
        if reason := untrainable(read_json(model_dir / "config.json"), config.seq_len):
            raise EngineError(f"the model cannot be trained: {reason}")
        dtype = compute_dtype(config, world) if frozen else torch.float32
        kernels.use_flash_attention_3(world.device)
        huggingface.register_attention(attention.NAME, attention.attend)
        check_context(huggingface.load_config(model_dir), config)
        causal = huggingface.load_model(model_dir, dtype=str(dtype).removeprefix("torch."))
        check_head(causal)
        huggingface.use_attention(causal, attention.NAME)
        if attach is not None:
            attach(causal)
        causal.train(not frozen).requires_grad_(False) if frozen else causal.train()
        model = cls(causal, config, world)
        owned = expert_parallel.share_out(
            causal, config.expert_parallel, world, compute_dtype(config, world)
        )
        model.expert_load = experts.prepare(
            causal, world, freeze_router=config.freeze_router, count=not frozen
        )
        for layer in layers_of(causal):
            layer.forward = _prepared(layer.forward, config, world)
        return model._shard(config, world, owned)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        layout: Layout,
        rows: Tensor,
        targets: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies [N] of `targets` [N], predicted at `rows` [N] of the row `ids` [T]."""
        hidden = self.causal.base_model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            sequence_ends=layout.ends,
            sequence_offsets=layout.offsets,
            context=self._world.context,
        ).last_hidden_state[0]
        weight = self.causal.get_output_embeddings().weight
        return head_logprobs(hidden[rows], weight, targets, temperature, self._chunk)

    def read(self, row: MicroBatch, temperature: float) -> TokenInputs:
        """The trained tokens of this rank's part of a row; gradient flows through `logprobs`."""
        world = self._world
        layout = Layout.of(row.lengths, world.device)
        own = row.part(world.context_rank, world.context_size)
        arrays = (own.token_ids, own.positions, own.rows, own.targets, own.logprobs)
        ids, positions, rows, targets, behaviour = (_upload(one, world.device) for one in arrays)
        logprobs, entropy = self(ids, positions, layout, rows, targets, temperature)
        advantages, sequences = (
            _upload(one, world.device) for one in (own.advantages, own.sequences)
        )
        return TokenInputs(logprobs, behaviour, advantages, entropy, sequences)

    def release(self) -> None:
        """Compute no more: what stands before a layer's own forward holds the layer, a circle that keeps its
        weights until garbage is collected."""
        for module in self.causal.modules():
            module.__dict__.pop("forward", None)

    def masters(self) -> dict[str, Tensor]:
        """What is learned, fp32, by name; a tied weight appears once. Ask before the first forward pass."""
        if self._masters is not None:
            return self._masters.named
        return dict(self.causal.named_parameters())

    def settle(self) -> None:
        """The masters were changed: compute with what they are now."""
        if self._masters is not None:
            self._masters.settle()

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
        for layer in layers_of(self.causal):
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
    """Raise EngineError if heads, or the loss, cannot be shared as context_parallel wants it."""
    ranks, heads = wanted.context_parallel, config.get_text_config().num_key_value_heads
    if heads % ranks:
        raise EngineError(
            f"{heads} key-value heads are not divisible by context_parallel {ranks}: take a divisor"
        )
    if ranks > 1 and wanted.loss.type in WHOLE_SEQUENCES:
        raise EngineError(
            f"loss {wanted.loss.type!r} needs whole sequences on a rank: set context_parallel to 1"
        )


def compute_dtype(config: TrainingConfig, world: World) -> torch.dtype:
    """Of forward and backward."""
    if config.dtype == "auto":
        return torch.float32 if world.device.type == "cpu" else torch.bfloat16
    return torch_dtype(config.dtype)


def layers_of(causal: Any) -> list[nn.Module]:
    """The blocks of a model, one after the other. Raises EngineError."""
    names: set[str] = set(getattr(causal, "_no_split_modules", None) or ())
    found = [one for one in causal.modules() if type(one).__name__ in names]
    if not found:
        raise EngineError(
            f"{type(causal).__name__} does not say what its layers are: choose a causal model of transformers"
        )
    return found


@torch.no_grad()
def check_head(causal: Any) -> None:
    """Raise EngineError unless the logits are the last hidden states times the head's weights, and no more."""
    head = causal.get_output_embeddings()
    device = next(causal.parameters()).device
    ids = (
        torch.arange(1, PROBE + 1, device=device)[None] % causal.config.get_text_config().vocab_size
    )
    hidden = causal.base_model(input_ids=ids, use_cache=False).last_hidden_state
    plain = (
        None if head is None or getattr(head, "bias", None) is not None else hidden @ head.weight.T
    )
    own = causal(input_ids=ids, use_cache=False).logits
    if plain is None or not torch.allclose(plain.float(), own.float(), atol=PROBE_NATS, rtol=1e-3):
        raise EngineError(
            f"{type(causal).__name__} does more between hidden states and logits than a matrix product: "
            "it cannot be trained here"
        )


def _prepared(
    forward: Callable[..., Any], config: TrainingConfig, world: World
) -> Callable[..., Any]:
    """A layer's forward with what the config wants done to it."""
    wanted = config.compile if config.compile is not None else world.device.type == "cuda"
    # where tokens travel graphs are cut, and a checkpoint around a cut is not compiled at all
    inside = config.expert_parallel > 1 and config.activation_checkpointing != "selective"
    inside = inside and wanted
    if inside:
        forward = torch.compile(forward)
    if config.activation_checkpointing != "none":
        extra: Mapping[str, Any] = {}
        if config.activation_checkpointing == "selective":
            extra = {"context_fn": partial(create_selective_checkpoint_contexts, _keep_attention)}
        forward = partial(checkpoint, forward, use_reentrant=False, **extra)
    return torch.compile(forward) if wanted and not inside else forward


def _keep_attention(_context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """Attention's output is small and dear: it is kept, the rest of a layer is computed again."""
    if operation in (torch.ops.primerl.packed_attention.default,):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _upload(array: Any, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
