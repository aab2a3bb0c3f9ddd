"""fp32 masters of a model that computes in bf16 on one device. Imports torch: import lazily.

What is learned is the masters; the model's own weights are their rounding, and have to be written anew
whenever the masters changed. Gradients are added up in fp32, as sharded ones are.
"""

import torch
from torch import Tensor, nn


class Masters:
    """Makes the trainable parameters of `model` the rounding of fp32 ones that are `named` as they are."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Every parameter gets `dtype`, what is frozen too."""
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

    def _watch(self, name: str, parameter: nn.Parameter, master: nn.Parameter) -> None:
        self.named[name] = master
        self._rounded.append(parameter)
        self._exact.append(master)

        def collect(done: Tensor) -> None:
            """A gradient is complete: add it to the master's, and free it."""
            grad, done.grad = done.grad, None
            if grad is None:
                return
            if master.grad is None:
                master.grad = grad.float()
            else:
                master.grad.add_(grad)

        parameter.register_post_accumulate_grad_hook(collect)
