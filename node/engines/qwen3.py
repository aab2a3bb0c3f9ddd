"""The fast network: dense Qwen3, written out as plain tensor functions with fused projections.

It must stay equal to transformers' Qwen3ForCausalLM (tests compare every logit); an architecture
that differs in any detail does not come here, see computes().
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import EngineError
from ..tensors import to_torch, torch_dtype
from ..weights.state import Changed, State
from .output import Output
from .placement import write

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [B, H, N, D], k [B, KV, N, D], v [B, KV, N, D]) -> attention output [B, H, N, D]."""

_FLOATS = ("BF16", "F16", "F32", "F64")
_SPARE = 32
"""Least cache slots to grow by."""


def computes(config: Any) -> bool:
    """Whether Qwen3Network computes the architecture of a transformers config."""
    return (
        config.model_type == "qwen3"
        and config.hidden_act == "silu"
        and not config.attention_bias
        and config.rope_parameters.get("rope_type") == "default"
        and all(kind == "full_attention" for kind in config.layer_types)
    )


@dataclass(frozen=True)
class Layer:
    """Weights of one block; `qkv` and `gate_up` are stacked so that each is one product."""

    norm_in: Tensor
    qkv: Tensor
    norm_q: Tensor
    norm_k: Tensor
    out: Tensor
    norm_mlp: Tensor
    gate_up: Tensor
    down: Tensor


class Qwen3Network:
    """A Network of the weights `state`; raises EngineError if they do not fit `config`."""

    def __init__(self, config: Any, state: State, *, dtype: str, device: torch.device) -> None:
        self._shapes = shapes(config)
        check_state(state, self._shapes)
        self.layers = config.num_hidden_layers
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self._eps = config.rms_norm_eps
        self._device = device
        self._dtype = torch_dtype(dtype)
        self._places: dict[str, Tensor] = {}  # checkpoint name -> its elements in our weights, flat
        self._embedding = self._read(state, "model.embed_tokens.weight")
        self._norm = self._read(state, "model.norm.weight")
        tied = config.tie_word_embeddings
        self._head = self._embedding if tied else self._read(state, "lm_head.weight")
        self._blocks = [self._layer(state, index) for index in range(self.layers)]
        exponents = torch.arange(0, self.head_dim, 2, device=device).float() / self.head_dim
        self._frequencies = 1.0 / config.rope_parameters["rope_theta"] ** exponents

    def _read(self, state: State, *names: str) -> Tensor:
        parts = [to_torch(state[name], self._device, self._dtype) for name in names]
        # clone: weights must not share memory with the state, which others hold too
        fused = torch.cat(parts) if len(parts) > 1 else parts[0].clone()
        rows = [len(part) for part in parts]
        self._places |= {
            name: part.view(-1) for name, part in zip(names, fused.split(rows), strict=True)
        }
        return fused

    def _layer(self, state: State, index: int) -> Layer:
        def read(*names: str) -> Tensor:
            return self._read(state, *(f"model.layers.{index}.{name}.weight" for name in names))

        return Layer(
            norm_in=read("input_layernorm"),
            qkv=read("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            norm_q=read("self_attn.q_norm"),
            norm_k=read("self_attn.k_norm"),
            out=read("self_attn.o_proj"),
            norm_mlp=read("post_attention_layernorm"),
            gate_up=read("mlp.gate_proj", "mlp.up_proj"),
            down=read("mlp.down_proj"),
        )

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self._embedding.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._device

    def prefill(self, tokens: Tensor, mask: Tensor) -> tuple["Qwen3Session", Output]:
        """See Network."""
        session = Qwen3Session(self, mask)
        positions = (mask.long().cumsum(1) - 1).clamp_min(0)
        return session, self.output(self.run(tokens, positions, session.attend_prompt))

    def hidden(self, tokens: Tensor) -> Tensor:
        """See Network."""

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        positions = torch.arange(tokens.shape[1], device=self._device)[None]
        return self._rms(self.run(tokens, positions, attend), self._norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """See Network."""
        return F.linear(hidden, self._head)

    def forward(self, tokens: Tensor) -> Tensor:
        """See Network."""
        return self.logits(self.hidden(tokens))

    def update(self, state: State, changed: Changed) -> bool:
        """See Network. Every tensor has its place."""
        check_state(state, self._shapes)
        for name, positions in changed.items():
            write(self._places[name], state[name], positions)
        return True

    def output(self, blocks: Tensor) -> Output:
        """What the last block's output [B, N, hidden] at the last position comes to."""
        hidden = self._rms(blocks[:, -1], self._norm)
        return Output(hidden, self.logits(hidden))

    def run(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """All blocks over `tokens` [B, N] at `positions` [B or 1, N]: what the last one gives [B, N, d]."""
        angles = positions[..., None].float() * self._frequencies
        angles = torch.cat([angles, angles], -1)[:, None]
        cos, sin = angles.cos().to(self._dtype), angles.sin().to(self._dtype)
        x = F.embedding(tokens, self._embedding)
        for index, layer in enumerate(self._blocks):
            q, k, v = self._project(self._rms(x, layer.norm_in), layer)
            mixed = attend(index, _rotate(q, cos, sin), _rotate(k, cos, sin), v)
            x = x + F.linear(mixed.transpose(1, 2).flatten(2), layer.out)
            gate, up = F.linear(self._rms(x, layer.norm_mlp), layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return x

    def _project(self, x: Tensor, layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
        heads = F.linear(x, layer.qkv).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], 1)
        return self._rms(q, layer.norm_q), self._rms(k, layer.norm_k), v

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._eps)

    def empty_cache(self, rows: int, slots: int) -> Tensor:
        """Room for keys or values: [layers, rows, KV, slots, D]."""
        shape = (self.layers, rows, self.kv_heads, slots, self.head_dim)
        return torch.empty(shape, dtype=self._dtype, device=self._device)


class Qwen3Session:
    """A Session; slot i of the cache is column i of the padded prompts and what follows them."""

    def __init__(self, network: Qwen3Network, mask: Tensor) -> None:
        rows, columns = mask.shape
        self._network = network
        self._used = columns
        self._padded = not bool(mask.all())
        self._positions = mask.sum(1)  # of the next token
        self._mask = F.pad(mask, (0, _SPARE), value=True)
        self._keys = network.empty_cache(rows, columns + _SPARE)
        self._values = network.empty_cache(rows, columns + _SPARE)

    def attend_prompt(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention among the prompts' columns, which fill the cache."""
        columns = q.shape[2]
        self._keys[layer, :, :, :columns] = k
        self._values[layer, :, :, :columns] = v
        mask = self._prompt_mask(columns) if self._padded else None
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )

    def _prompt_mask(self, columns: int) -> Tensor:
        square = torch.ones(columns, columns, dtype=torch.bool, device=self._mask.device)
        causal = square.tril() & self._mask[:, None, :columns]
        # padding sees itself: a row that sees nothing would be NaN
        return (causal | torch.eye(columns, dtype=torch.bool, device=square.device))[:, None]

    def _attend_next(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, heads, _, width = q.shape
        used = self._used
        self._keys[layer, :, :, used - 1 : used] = k
        self._values[layer, :, :, used - 1 : used] = v
        mask = self._mask[:, None, None, :used] if self._padded else None
        # the heads that share a key head are its queries: nothing has to be repeated
        grouped = q.reshape(rows, k.shape[1], -1, width)
        keys, values = self._keys[layer, :, :, :used], self._values[layer, :, :, :used]
        mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        return mixed.reshape(rows, heads, 1, width)

    def select(self, rows: Tensor) -> None:
        """See Session."""
        self._keys = self._keys.index_select(1, rows)
        self._values = self._values.index_select(1, rows)
        self._mask = self._mask[rows]
        self._positions = self._positions[rows]

    def step(self, tokens: Tensor) -> Output:
        """See Session."""
        if self._used == self._keys.shape[3]:
            self._grow(max(_SPARE, self._used // 2))
        self._used += 1
        blocks = self._network.run(tokens[:, None], self._positions[:, None], self._attend_next)
        self._positions = self._positions + 1
        return self._network.output(blocks)

    def _grow(self, slots: int) -> None:
        self._keys = F.pad(self._keys, (0, 0, 0, slots))
        self._values = F.pad(self._values, (0, 0, 0, slots))
        self._mask = F.pad(self._mask, (0, slots), value=True)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, halves convention (Su et al. 2021)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Checkpoint names and shapes of a dense Qwen3 model."""
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * width, config.num_key_value_heads * width
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "self_attn.q_norm": (width,),
        "self_attn.k_norm": (width,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_hidden_layers):
        found |= {f"model.layers.{index}.{name}.weight": size for name, size in layer.items()}
    return found


def check_state(state: State, wanted: dict[str, tuple[int, ...]]) -> None:
    """Raise EngineError unless `state` has exactly the tensors `wanted`, in floating point."""
    if missing := wanted.keys() - state.keys():
        raise EngineError(f"the state lacks {min(missing)}: load a state of this model")
    if extra := state.keys() - wanted.keys():
        raise EngineError(f"the state has {min(extra)} too many: load a state of this model")
    for name, shape in wanted.items():
        if state[name].shape != shape or state[name].dtype not in _FLOATS:
            raise EngineError(
                f"the state's {name} is {state[name].dtype} {state[name].shape} where the model has "
                f"{shape}: load a state of this model"
            )
