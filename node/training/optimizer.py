"""AdamW or Muon over fp32 masters, with moments on the device or in host memory.

Imports torch: import lazily. A step is a function of gradients, moments and rate alone: the place of the
moments changes no bit. Each rank changes its own shards; only the norm of the gradient is exchanged.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..config.training import TrainingConfig
from ..errors import UsageError


def learning_rate(config: TrainingConfig, step: int, max_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (counted from 1).

    Rises linearly to `lr` over `warmup_steps`; then `constant` stays there, `linear` and `cosine` (half a
    period) fall to lr * min_lr_ratio at `max_steps`, where they stay.
    """
    if step < 1:
        raise ValueError("steps count from 1")
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.scheduler == "constant":
        return config.lr
    span = max(1, max_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    if config.scheduler == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return config.lr * (1 - (1 - config.min_lr_ratio) * progress)


BUCKET = 1 << 26
"""Elements whose offloaded moments are on the device at once: 512 MiB of moments."""
CLIP_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_()."""
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
NOT_HIDDEN = ("embed", "lm_head", "wte", "wpe")
"""Parts of the names of embedding matrices and the head, for which Muon is not meant."""


class Optimizer:
    """AdamW, or Muon for hidden matrices, of the parameters that require gradients.

    Muon (Jordan 2024) sets all singular values of the momentum to about 1 and scales by 0.2 sqrt(larger side):
    steps about as large as AdamW's at the same rate (Moonlight, arXiv 2502.16982).
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        config: TrainingConfig,
        *,
        betas: tuple[float, float] | None = None,
        weight_decay: float | None = None,
    ) -> None:
        """`betas` and `weight_decay` replace those of `config`; with `betas` it is always AdamW.

        Raises UsageError for Muon over sharded parameters: it needs whole matrices.
        """
        self.parameters = {
            name: parameter for name, parameter in parameters.items() if parameter.requires_grad
        }
        self._max_norm = config.max_norm
        # plain tensors: operations on sharded ones are dispatched one by one while the device waits
        self._locals = {name: _local(parameter) for name, parameter in self.parameters.items()}
        on_gpu = any(tensor.is_cuda for tensor in self._locals.values())
        self._offload = config.optimizer_offload and on_gpu
        """Whether moments are in the host's memory between steps."""
        decay = config.weight_decay if weight_decay is None else weight_decay
        muon = config.optimizer == "muon" and betas is None
        hidden = {
            name for name, tensor in self._locals.items() if muon and _is_hidden(name, tensor)
        }
        if hidden and any(isinstance(parameter, DTensor) for parameter in self.parameters.values()):
            raise UsageError(
                'training.optimizer = "muon" needs whole matrices, and these are sharded over ranks: set '
                'training.fsdp.ranks to 1, or optimizer to "adamw"'
            )
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        rest = [tensor for name, tensor in self._locals.items() if name not in hidden]
        if rest:
            self._optimizers["adamw"] = torch.optim.AdamW(
                rest,
                lr=config.lr,
                betas=betas or config.betas,
                weight_decay=decay,
                fused=on_gpu,
            )
        if hidden:
            self._optimizers["muon"] = torch.optim.Muon(
                [tensor for name, tensor in self._locals.items() if name in hidden],
                lr=config.lr,
                momentum=config.muon_momentum,
                weight_decay=decay,
                adjust_lr_fn="match_rms_adamw",
            )
        self._of = {name: "muon" if name in hidden else "adamw" for name in self._locals}
        self._is_fused = on_gpu and not hidden
        """Whether a step is AdamW's fused kernel alone, which can scale the gradient, and skip the step."""

    def clip(self) -> Tensor:
        """Scale the gradient to at most `max_norm`; return the norm before, over all ranks, [].

        A fused step() scales it, which saves reading it once more. The host does not wait for the norm.
        """
        self._take_gradients()
        grads = [tensor.grad for tensor in self._locals.values() if tensor.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        group = self._shards()
        if group is not None:
            squared = norm.square()
            dist.all_reduce(squared, group=group)
            norm = squared.sqrt()
        if self._is_fused:
            divisor = ((norm + CLIP_EPSILON) / self._max_norm).clamp(min=1.0)
            self._optimizers["adamw"].grad_scale = divisor  # type: ignore[attr-defined]
        else:
            torch.nn.utils.clip_grads_with_norm_(self._locals.values(), self._max_norm, norm)
        return norm

    def step(self, lr: float, finite: Tensor | None = None) -> None:
        """Update the parameters by the gradients of the last clip().

        If `finite`, bool [], is False nothing changes. AdamW on a GPU is launched without waiting for it.
        """
        found_inf = None
        if finite is not None and self._is_fused and not self._offload:
            found_inf = (~finite).float()
        elif finite is not None and not finite:
            return
        for optimizer in self._optimizers.values():
            (group,) = optimizer.param_groups
            group["lr"] = lr
            if self._is_fused:  # as torch.amp.GradScaler does
                optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            if not self._offload:
                optimizer.step()
                continue
            everything = group["params"]
            try:
                for bucket in _buckets(everything):
                    _bring(optimizer, bucket)
                    group["params"] = bucket
                    optimizer.step()
                    _send_away(optimizer, bucket)
            finally:
                group["params"] = everything
                torch.cuda.current_stream(everything[0].device).synchronize()

    def is_finite(self) -> bool:
        """Return whether this rank's parameters are finite, and stay so in bf16. Waits for the device."""
        own = [tensor.detach() for tensor in self._locals.values() if tensor.numel()]
        if not own:
            return True
        largest = torch.nn.utils.get_total_norm(own, math.inf)  # NaN if one is
        return bool(largest <= torch.finfo(torch.bfloat16).max)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter, own in zip(self.parameters.values(), self._locals.values(), strict=True):
            parameter.grad = own.grad = None

    def moments(self) -> dict[str, Tensor]:
        """Return `<parameter>:<moment>` -> tensor, sharded like its parameter.

        Empty before the first step.
        """
        return {
            f"{name}:{key}": _sharded_as(self.parameters[name], value) if key in MOMENTS else value
            for name, own in self._locals.items()
            for key, value in self._optimizers[self._of[name]].state.get(own, {}).items()
        }

    def set_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Replace all moments, also by none; each must be sharded like its parameter.

        Raises UsageError for moments of another optimizer; then nothing has changed.
        """
        for key in moments:
            name, _, moment = key.rpartition(":")
            if (moment == "momentum_buffer") != (self._of[name] == "muon"):
                raise UsageError(
                    f"the checkpoint has {moment} of {name}, which is another optimizer's than "
                    "training.optimizer says: name the one that wrote the checkpoint"
                )
        for optimizer in self._optimizers.values():
            optimizer.state.clear()
        for key, value in moments.items():
            name, _, moment = key.rpartition(":")
            own = _local(value)
            if self._offload and moment in MOMENTS:
                own = own.cpu().pin_memory()
            self._optimizers[self._of[name]].state[self._locals[name]][moment] = own

    def _take_gradients(self) -> None:
        """Attach the gradients of sharded parameters to their local parts."""
        for parameter, own in zip(self.parameters.values(), self._locals.values(), strict=True):
            if own is not parameter:
                own.grad = None if parameter.grad is None else _local(parameter.grad)

    def _shards(self) -> dist.ProcessGroup | None:
        """Return the ranks with the other shards of the parameters; None if unsharded."""
        for parameter in self.parameters.values():
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                return mesh.get_group(mesh.ndim - 1) if mesh.size(mesh.ndim - 1) > 1 else None
        return None


def _is_hidden(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and not any(part in name for part in NOT_HIDDEN)


def _bring(optimizer: torch.optim.Optimizer, bucket: Sequence[Tensor]) -> None:
    """Copy moments to the device."""
    for own in bucket:
        state = optimizer.state.get(own, {})
        for name in MOMENTS:
            if name in state:
                state[f"host {name}"] = state[name]
                state[name] = state[name].to(own.device, non_blocking=True)


def _send_away(optimizer: torch.optim.Optimizer, bucket: Sequence[Tensor]) -> None:
    """Copy moments to the host."""
    for own in bucket:
        state = optimizer.state.get(own, {})
        for name in MOMENTS:
            if name in state:
                here = state[name]
                host = state.pop(f"host {name}", None)
                if host is None:
                    host = torch.empty_like(here, device="cpu", pin_memory=True)
                state[name] = host.copy_(here, non_blocking=True)


def _local(tensor: Tensor) -> Tensor:
    """Return a rank's own part, sharing memory; a plain tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def _sharded_as(parameter: Tensor, own: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return own
    return DTensor.from_local(
        own,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group neighbouring parameters into buckets of about BUCKET elements."""
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        bucket.append(parameter)
        size += parameter.numel()
        if size >= BUCKET:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
