"""The loop to beat: transformers' model as it is, in bf16, with what everybody does to it.

Weights, gradients and AdamW's moments in bf16, torch.compile of each layer, cuDNN's attention, cross entropy
in chunks of 8,192 tokens. `tuned` compiles the chunks' loss too and takes the fused AdamW. One sequence a step,
cross entropy only: it cannot pack, learn from rollouts, or keep an update that is below bf16's last bit.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from primerl.node.models import huggingface

CHUNK = 8192


class PlainLoop:
    """A model and its optimizer."""

    def __init__(self, model_dir: Path, *, recompute: bool, tuned: bool) -> None:
        self._cuda = torch.cuda.is_available()
        device, dtype = ("cuda", "bfloat16") if self._cuda else ("cpu", "float32")
        self._model: Any = huggingface.load_model(model_dir, dtype=dtype, device=device).train()
        for layer in self._model.base_model.layers:
            forward: Callable[..., Any] = layer.forward
            if recompute:
                forward = partial(checkpoint, forward, use_reentrant=False)
            layer.forward = torch.compile(forward) if self._cuda else forward
        self.config = self._model.config
        self.parameters = sum(one.numel() for one in self._model.parameters())
        fused = True if tuned and self._cuda else None
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6, fused=fused)
        self._head_loss = torch.compile(_head_loss) if tuned and self._cuda else _head_loss

    def step(self, token_ids: list[int]) -> None:
        """One step of cross entropy, waited for."""
        ids = torch.tensor([token_ids], device=self._model.device)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if self._cuda else nullcontext():
            hidden = self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
            weight = self._model.get_output_embeddings().weight
            total = torch.zeros((), device=ids.device)
            for at in range(0, len(token_ids) - 1, CHUNK):
                part = slice(at, min(at + CHUNK, len(token_ids) - 1))
                targets = ids[0, 1:][part]
                total = total + checkpoint(
                    self._head_loss, hidden[part], weight, targets, use_reentrant=False
                )
            (total / len(token_ids)).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._cuda:
            torch.cuda.synchronize()


def _head_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), targets, reduction="sum")
