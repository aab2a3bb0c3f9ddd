"""Small models, states and requests for the tests of engines."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from primerl.node.config.run import EngineConfig
from primerl.node.inference.engine import Engine, GenerateRequest
from primerl.node.models import huggingface
from primerl.node.models.created_model import created_config
from primerl.node.weights.state import Changed, State, Tensor

STOP = 258
"""<|im_end|> of the byte-level tokenizer."""
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "vocab_size": 272}
MAX_LENGTH = 256
FP32 = EngineConfig(device="cpu", max_model_len=MAX_LENGTH)


MADE = created_config(SHAPE)
"""Its config.json."""


def make_qwen3(directory: Path, seed: int, shape: Mapping[str, Any] = SHAPE) -> State:
    """Create a model in `directory`; return its bf16 state, ten times as sharp as a random one."""
    huggingface.create(directory, shape, seed)
    return sharp(huggingface.policy_state(huggingface.load_model(directory)))


def make_llama(directory: Path, seed: int) -> State:
    """Create a model of an architecture that only transformers' network computes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    huggingface.create(directory, SHAPE, seed)  # for the tokenizer and the stop tokens
    config = LlamaConfig(
        vocab_size=272,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=STOP,
        pad_token_id=256,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    return sharp(huggingface.policy_state(model))


def sharp(state: State) -> State:
    """Multiply the weight matrices by 16, so that distributions differ between prompts."""
    from primerl.node.models.tensors import from_torch, to_torch

    return {
        name: from_torch(to_torch(tensor) * 16) if len(tensor.shape) == 2 else tensor
        for name, tensor in state.items()
    }


def repeating(state: State, tokens: int, chance: float, period: int = 16) -> State:
    """Weights of an untied model that goes round circles of `period` tokens, among the first `tokens` ones.

    Its layers compute as much as before and add nothing. After a token comes its neighbour in the circle with
    the `chance`, else another of the `tokens`, a multiple of `period`: H[next(i)] . norm(E[i]) is the log of
    (tokens - 1) chance / (1 - chance), and about 0 for the others.
    """
    from primerl.node.models.tensors import from_torch, to_torch

    found = dict(state)
    for name, tensor in state.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            found[name] = from_torch(torch.zeros_like(to_torch(tensor)))
    final = found["model.norm.weight"]
    found["model.norm.weight"] = from_torch(torch.ones_like(to_torch(final)))
    head, table = "lm_head.weight", "model.embed_tokens.weight"
    kind, width = to_torch(state[head]).dtype, state[head].shape[1]
    # a coordinate that all share makes the tokens beyond the first impossible
    made = torch.randn(state[table].shape, generator=torch.Generator().manual_seed(1))
    made[:, 0] = 4.0
    normed = made * (width / made.square().sum(1, keepdim=True)).sqrt()
    apart = normed[:tokens] - normed[:tokens].mean(0)
    before = torch.arange(tokens)
    before += torch.where(before % period == 0, period - 1, -1)
    rows = torch.zeros_like(made)
    likely = log_odds(tokens, chance)
    rows[:tokens] = likely * apart[before] / apart.square().sum(1).mean()
    rows[tokens:, 0] = -30.0
    found[table], found[head] = from_torch(made.to(kind)), from_torch(rows.to(kind))
    return found


def log_odds(tokens: int, chance: float) -> float:
    """Logit of a token that has this chance, where the others of `tokens` have the logit 0."""
    return math.log((tokens - 1) * chance / (1 - chance))


def write_draft_head(directory: Path, config: Path, state: State, sharpness: float = 1.0) -> None:
    """A checkpoint of a repeating() `state` with an MTP head, whose logits are the model's x `sharpness`.

    `config`: the model's directory. As in published checkpoints of glm4_moe the head is one more layer. It
    reads the embedding of the latest token, and nothing of the state before it.
    """
    from safetensors.torch import save_file

    from primerl.node.models.tensors import to_torch

    directory.mkdir(parents=True)
    shutil.copyfile(config / "config.json", directory / "config.json")
    shape = json.loads((config / "config.json").read_text())
    layers, width = shape["num_hidden_layers"], shape["hidden_size"]
    tensors = {name: to_torch(tensor) for name, tensor in state.items()}
    last, head = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    tensors |= {
        head + name.removeprefix(last): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    final = tensors["model.norm.weight"]
    ones = torch.ones(width, dtype=final.dtype)
    tensors[head + "eh_proj.weight"] = torch.eye(width, 2 * width, dtype=final.dtype)
    tensors |= {head + f"{name}.weight": ones.clone() for name in ("enorm", "hnorm")}
    tensors[head + "shared_head.norm.weight"] = sharpness * final
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


_reference: list[Any] = []
"""The state and the directory that reference_logprobs() was given last, and their model: asking takes less time
than building it."""


def reference_logprobs(
    model_dir: Path, state: State, tokens: list[int], temperature: float
) -> list[float]:
    """log p(token i | tokens before) by one plain forward pass of transformers, 0.0 for the first."""
    if not _reference or _reference[0] is not state or _reference[1] != model_dir:
        _reference[:] = state, model_dir, huggingface.model_from_state(model_dir, state)
    with torch.inference_mode():
        logits = _reference[2](input_ids=torch.tensor([tokens])).logits[0].float() / temperature
    logprobs = torch.log_softmax(logits[:-1], -1)
    targets = torch.tensor(tokens[1:])[:, None]
    return [0.0, *logprobs.gather(1, targets)[:, 0].tolist()]


def request(
    text: str = "abc",
    *,
    seed: int = 1,
    max_tokens: int = 12,
    temperature: float = 1.0,
    stop: tuple[int, ...] = (STOP,),
) -> GenerateRequest:
    return GenerateRequest(tuple(text.encode()), max_tokens, temperature, seed, stop)


def varied_requests() -> list[GenerateRequest]:
    """Make requests with various prompts (some shared), lengths, temperatures and stops."""
    texts = ["abc", "abc", "a", "the longest prompt of them all", "abc", "xyz", "q", "xyz"]
    return [
        request(
            text,
            seed=100 + index,
            max_tokens=3 + 5 * (index % 4),
            temperature=0.6 + 0.2 * (index % 3),
            stop=(STOP, *range(64 * (index % 3))),
        )
        for index, text in enumerate(texts)
    ]


async def started(engine: Engine, model_dir: Path, *states: State, fingerprint: str = "") -> Engine:
    """Start `engine` and load `states` as versions 0, 1, ..."""
    await engine.start(model_dir, fingerprint=fingerprint)
    for version, state in enumerate(states):
        await engine.load(version, state)
    return engine


def blended(old: State, new: State, share: float, seed: int = 0) -> tuple[State, Changed]:
    """Take a `share` of elements from `new`, the rest from `old`; return also their positions.

    Vectors (norms, equal in all fresh models) change too, one of them as a whole; the first matrix
    of all does not change at all.
    """
    rng = np.random.default_rng(seed)
    vectors = [name for name in sorted(old) if len(old[name].shape) == 1]
    untouched = next(name for name in sorted(old) if len(old[name].shape) == 2)
    state = dict(old)
    changed: dict[str, np.ndarray | None] = {}
    for name, tensor in old.items():
        size = tensor.data.size
        positions = np.flatnonzero(rng.random(size) < share)
        if name == untouched:
            continue
        data = tensor.data.copy()
        if name in vectors:
            positions = np.array([0, size - 1])
            data[positions] ^= 0x30  # of a bf16's seven bits of mantissa
            changed[name] = None if name == vectors[0] else positions
        else:
            data[positions] = new[name].data[positions]
            changed[name] = positions
        state[name] = Tensor(tensor.dtype, tensor.shape, data)
    return state, changed
