"""A small real model, sharper than random ones, for runs with real parts."""

from pathlib import Path

import torch
from support.swarm import STOP, VOCABULARY, make_model


def make_sharp(directory: Path, layers: int) -> Path:
    """With the tokenizer of the other swarms, whose end is STOP; its policies differ in what they draw."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    make_model(directory)
    shape = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        eos_token_id=STOP,
        bos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Qwen3ForCausalLM(shape)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.data *= 8
    model.save_pretrained(directory)
    return directory
