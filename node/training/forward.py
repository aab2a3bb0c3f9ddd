"""One forward pass of a micro-batch. Imports torch: import this file lazily.

Logprobs are always the trainer's own, recomputed at the sampler's temperature; token t is predicted from
the logits at position t - 1.
"""

from typing import TYPE_CHECKING

import torch

from .losses import TokenInputs, token_logprobs
from .packing import MicroBatch

if TYPE_CHECKING:
    from ..models import PreTrainedModel


def trained_tokens(
    model: "PreTrainedModel", micro_batch: MicroBatch, temperature: float
) -> TokenInputs:
    """The trained tokens of a micro-batch, row by row, flat; gradient flows through `logprobs`.

    On CUDA the pass runs in bf16 over fp32 masters, softmax and logprobs in fp32.
    """
    device = model.device
    ids = torch.from_numpy(micro_batch.token_ids).to(device)
    mask = torch.from_numpy(micro_batch.mask).to(device)[:, 1:]
    # Logits are the largest tensor: those left of every trained token are not computed.
    first = int(micro_batch.mask.any(0).argmax()) - 1
    kept = ids.shape[1] - 1 - first
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=kept).logits
    logprobs, entropy = token_logprobs(logits[mask[:, first:]], ids[:, 1:][mask], temperature)
    behaviour = torch.from_numpy(micro_batch.logprobs).to(device)[:, 1:][mask]
    advantages = torch.from_numpy(micro_batch.advantages).to(device)[:, 1:][mask]
    return TokenInputs(logprobs, behaviour, advantages, entropy)
