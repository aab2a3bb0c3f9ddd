"""The fast network: dense Qwen3, written out as plain tensor functions with fused projections.

It must stay equal to transformers' Qwen3ForCausalLM (tests compare every logit); an architecture
that differs in any detail does not come here, see computes(). Tokens of all sequences are in one row, T;
only attention knows whose they are. A part of the layers can be held alone, see through(). What lies
between two products is done by Plain, or on a GPU for many tokens by the kernels of qwen3_kernel.py, which
round where Plain does.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.tensors import to_torch, torch_dtype
from ..weights.state import Changed, State
from .compiling import compiles
from .model_output import LayerHooks, ModelOutput
from .packed import Attend, among
from .placement import write
from .qwen3_shapes import check_state, shapes
from .transfers import upload

logger = logging.getLogger(__name__)

_SPARE = 32
"""Least cache slots to grow by."""
_MANY = 1024
"""Tokens from which on a kernel's launch costs less than what it saves."""


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
    """A Network of the weights `state`; raises EngineError if they do not fit `config`.

    With `layers` it holds these only, and what stands before or behind them at the model's ends.
    """

    def __init__(
        self,
        config: Any,
        state: State,
        *,
        dtype: str,
        device: torch.device,
        layers: range | None = None,
    ) -> None:
        whole = range(config.num_hidden_layers)
        held = whole if layers is None else layers
        self._shapes = shapes(config, layers)
        check_state(state, self._shapes)
        self.layers = len(held)
        self._first, self._all = held.start, whole.stop
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self._eps = config.rms_norm_eps
        self._device = device
        self._dtype = torch_dtype(dtype)
        self._places: dict[str, Tensor] = {}  # checkpoint name -> its elements in our weights, flat
        self._vocabulary = config.vocab_size
        tied = config.tie_word_embeddings
        self._embedding = self._head = self._norm = torch.empty(0)
        if held.start == 0 or (tied and held.stop == whole.stop):
            self._embedding = self._read(state, "model.embed_tokens.weight")
        if held.stop == whole.stop:
            self._norm = self._read(state, "model.norm.weight")
            self._head = self._embedding if tied else self._read(state, "lm_head.weight")
        self._blocks = [self._layer(state, index) for index in held]
        exponents = torch.arange(0, self.head_dim, 2, device=device).float() / self.head_dim
        self._frequencies = 1.0 / config.rope_parameters["rope_theta"] ** exponents
        self._plain: Between = Plain(self._eps, self.kv_heads)
        self._kernels = _kernels(self._plain, self._blocks[0], self.heads, self.kv_heads)

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
        return self._vocabulary

    @property
    def places(self) -> Mapping[str, Tensor]:
        """Checkpoint name -> its elements in these weights, flat."""
        return self._places

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._device

    def prefill(self, tokens: Tensor, mask: Tensor) -> tuple["Qwen3Session", ModelOutput]:
        """See Network."""
        session = Qwen3Session(self, mask)
        positions = (mask.long().cumsum(1) - 1).clamp_min(0)
        hidden = self.run(tokens.flatten(), positions.flatten(), session.attend_prompt)
        return session, self.output(hidden.unflatten(0, tokens.shape)[:, -1])

    def packed(
        self, tokens: Tensor, lengths: Sequence[int], taps: LayerHooks | None = None
    ) -> Tensor:
        """See Network."""
        positions = upload(torch.cat([torch.arange(length) for length in lengths]), self._device)
        return self.run(tokens, positions, self.among(lengths), taps)

    def among(self, lengths: Sequence[int]) -> Attend:
        """Attention within each of packed sequences of these lengths."""
        return among(lengths, device=self._device, dtype=self._dtype, width=self.head_dim)

    def hidden(self, tokens: Tensor) -> Tensor:
        """See Network."""
        rows, columns = tokens.shape
        return self.packed(tokens.flatten(), [columns] * rows).unflatten(0, tokens.shape)

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

    def output(self, hidden: Tensor) -> ModelOutput:
        """The states [B, d] and what they come to."""
        return ModelOutput(hidden, self.logits(hidden))

    def run(
        self, tokens: Tensor, positions: Tensor, attend: Attend, taps: LayerHooks | None = None
    ) -> Tensor:
        """through(), from `tokens` [T] on: the states [T, d] that feed the head."""
        return self.through(self.embedded(tokens), positions, attend, taps)

    def embedded(self, tokens: Tensor) -> Tensor:
        """The residual stream [T, d] that goes into the model's first layer."""
        return F.embedding(tokens, self._embedding)

    def through(
        self, x: Tensor, positions: Tensor, attend: Attend, taps: LayerHooks | None = None
    ) -> Tensor:
        """The residual stream behind our layers, of `x` [T, d] at `positions` [T] of their sequences.

        Where the model ends it is normed: what feeds the head. `x` is overwritten.
        """
        angles = positions[:, None].float() * self._frequencies
        cos, sin = angles.cos().to(self._dtype), angles.sin().to(self._dtype)
        turn = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        between = self._kernels if len(x) >= _MANY else self._plain
        y = F.rms_norm(x, x.shape[1:], self._blocks[0].norm_in, self._eps)
        for index, layer in enumerate(self._blocks):
            qkv = F.linear(y, layer.qkv).unflatten(-1, (-1, self.head_dim))
            mixed = attend(index, *between.turned(qkv, self.heads, layer, turn))
            x, y = between.added(x, F.linear(mixed.flatten(1), layer.out), layer.norm_mlp)
            more = F.linear(between.gated(F.linear(y, layer.gate_up)), layer.down)
            following, coming = self._norm_behind(index), self._first + index + 1
            if following is None:
                x = y = x.add_(more)
            else:
                x, y = between.added(x, more, following)
            if taps is not None and following is not None and coming in taps.layers:
                x, y = self._tapped(taps, coming, x, y, following)
        return y

    def _tapped(
        self, taps: LayerHooks, layer: int, x: Tensor, y: Tensor, following: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The stream that goes on, and its norm."""
        seen = taps.take(layer, x)
        if seen is x:
            return x, y
        return seen, F.rms_norm(seen, following.shape, following, self._eps)

    def _norm_behind(self, index: int) -> Tensor | None:
        """The norm before what follows our layer `index`; None if another network holds that."""
        if index + 1 < self.layers:
            return self._blocks[index + 1].norm_in
        return self._norm if len(self._norm) else None

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

    def attend_prompt(self, layer: int, *heads: Tensor) -> Tensor:
        """Causal attention among the prompts' columns, which fill the cache."""
        rows = len(self._positions)
        q, k, v = (one.unflatten(0, (rows, -1)).transpose(1, 2) for one in heads)
        columns = q.shape[2]
        self._keys[layer, :, :, :columns] = k
        self._values[layer, :, :, :columns] = v
        mask = self._prompt_mask(columns) if self._padded else None
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return mixed.transpose(1, 2).flatten(0, 1)

    def _prompt_mask(self, columns: int) -> Tensor:
        square = torch.ones(columns, columns, dtype=torch.bool, device=self._mask.device)
        causal = square.tril() & self._mask[:, None, :columns]
        # padding sees itself: a row that sees nothing would be NaN
        return (causal | torch.eye(columns, dtype=torch.bool, device=square.device))[:, None]

    def _attend_next(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        used = self._used
        self._keys[layer, :, :, used - 1] = k
        self._values[layer, :, :, used - 1] = v
        mask = self._mask[:, None, None, :used] if self._padded else None
        # the heads that share a key head are its queries: nothing has to be repeated
        grouped = q.unflatten(1, (k.shape[1], -1))
        keys, values = self._keys[layer, :, :, :used], self._values[layer, :, :, :used]
        mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        return mixed.flatten(1, 2)

    def select(self, rows: Tensor) -> None:
        """See Session."""
        self._keys = self._keys.index_select(1, rows)
        self._values = self._values.index_select(1, rows)
        self._mask = self._mask[rows]
        self._positions = self._positions[rows]

    def step(self, tokens: Tensor) -> ModelOutput:
        """See Session."""
        if self._used == self._keys.shape[3]:
            self._grow(max(_SPARE, self._used // 2))
        self._used += 1
        hidden = self._network.run(tokens, self._positions, self._attend_next)
        self._positions = self._positions + 1
        return self._network.output(hidden)

    def _grow(self, slots: int) -> None:
        self._keys = F.pad(self._keys, (0, 0, 0, slots))
        self._values = F.pad(self._values, (0, 0, 0, slots))
        self._mask = F.pad(self._mask, (0, slots), value=True)


class Between(Protocol):
    """What lies between two products. Every argument may be overwritten."""

    def turned(
        self, qkv: Tensor, heads: int, layer: Layer, turn: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, H, D], k and v [T, KV, D] of their products `qkv` [T, H + 2 KV, D]: the first two normed, then
        rotated by `turn` (halves convention, Su et al. 2021): cosines twice [T, D], and sines, minus first."""
        ...

    def added(self, x: Tensor, more: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """x + more, all [T, d], and its norm."""
        ...

    def gated(self, both: Tensor) -> Tensor:
        """silu(gate) * up [T, inner] of `both` [T, 2 inner], side by side."""
        ...


class Plain:
    """By torch's own operations."""

    def __init__(self, eps: float, kv_heads: int) -> None:
        self.eps = eps
        self._kv_heads = kv_heads

    def turned(
        self, qkv: Tensor, heads: int, layer: Layer, turn: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Between."""
        q, k, v = qkv.split([heads, self._kv_heads, self._kv_heads], 1)
        return self._turn(q, layer.norm_q, *turn), self._turn(k, layer.norm_k, *turn), v

    def _turn(self, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self._norm(x, weight)
        across = x.roll(x.shape[-1] // 2, -1).mul_(sin[:, None])
        return x.mul_(cos[:, None]).add_(across)

    def added(self, x: Tensor, more: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """See Between."""
        x = x.add_(more)
        return x, self._norm(x, weight)

    def gated(self, both: Tensor) -> Tensor:
        """See Between."""
        gate, up = both.chunk(2, -1)
        return F.silu(gate, inplace=True).mul_(up)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)


def _kernels(plain: Plain, layer: Layer, heads: int, kv_heads: int) -> Between:
    """Kernels where the weights are on a GPU and can be compiled for, else `plain`."""
    if not compiles(layer.qkv):
        return plain
    from .qwen3_kernel import FAILURES, Kernels, differ

    kernels = Kernels(plain.eps, kv_heads)
    try:
        with torch.inference_mode():
            wrong = differ(kernels, plain, layer, heads, kv_heads)
    except FAILURES as error:
        wrong = str(error).strip().partition("\n")[0] or type(error).__name__
    if wrong:
        logger.warning("prefills are slower than they could be: no kernels (%s)", wrong)
    return plain if wrong else kernels
