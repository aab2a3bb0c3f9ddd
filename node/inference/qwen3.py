"""A dense Qwen3 written out as tensor functions, with fused projections and sequences packed into one row.

It must equal transformers' Qwen3ForCausalLM (tests compare every logit); computes() refuses an architecture
that differs in any detail. docs/inference.md says what it gains. Shapes: T tokens of all sequences in a row, H
query heads and KV key heads of D numbers, d the hidden size. Only attention knows whose a token is.
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.tensors import to_torch, torch_dtype
from ..ops.errors import EngineError
from ..weights.state import Changed, State
from .device import compiles, upload
from .model_output import LayerHooks, ModelOutput, RouterHooks
from .placement import write

_FLOATS = ("BF16", "F16", "F32", "F64")


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
    matrix = (config.vocab_size, hidden)
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": matrix,
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = matrix
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


logger = logging.getLogger(__name__)

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, H, D], k [T, KV, D], v [T, KV, D]) -> attention output [T, H, D]."""

_WIDEST = 256
"""Numbers a head that flash attention takes at most, in steps of 8."""
_FLASH_SINCE = (8, 0)
"""Compute capability."""


def among(
    lengths: Sequence[int], *, device: torch.device, dtype: torch.dtype, width: int
) -> Attend:
    """Attention within each of the sequences of `lengths`, of heads of `width` numbers."""
    longest = max(lengths)
    if longest == 1 or not _has_flash(device, dtype, width):
        return _by_runs(lengths)
    return _by_flash(
        upload(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device), longest
    )


def _by_flash(ends: Tensor, longest: int) -> Attend:
    kernel, extra = _flash()

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernel(q, k, v, ends, ends, longest, longest, window_size=(-1, 0), **extra)

    return attend


def _by_runs(lengths: Sequence[int]) -> Attend:
    """Neighbours of equal length go together."""
    runs = [(length, len(list(run))) for length, run in groupby(lengths)]
    sizes = [length * count for length, count in runs]

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pieces = zip(runs, *(one.split(sizes) for one in (q, k, v)), strict=True)
        mixed = [_equal(count, *heads) for (_, count), *heads in pieces]
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    return attend


def _equal(count: int, *heads: Tensor) -> Tensor:
    q, k, v = (one.unflatten(0, (count, -1)).transpose(1, 2) for one in heads)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(0, 1)


@cache
def _has_flash(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether torch's flash attention is there, takes this, and gives what it should."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    if torch.cuda.get_device_capability(device) < _FLASH_SINCE or width % 8 or width > _WIDEST:
        return False
    lengths, generator = [3, 5], torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(8, heads, width, generator=generator, device=device).to(dtype)
        for heads in (4, 2, 2)
    )
    try:
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        found = _by_flash(ends, max(lengths))(0, q, k, v)
    except (ImportError, TypeError, ValueError, RuntimeError) as error:
        detail = str(error).strip().partition("\n")[0]
        logger.warning("prefills are slower than they could be: no flash attention (%s)", detail)
        return False
    wanted = _by_runs(lengths)(0, q, k, v)
    return bool(torch.allclose(found.float(), wanted.float(), atol=0.05))


@cache
def _flash() -> tuple[Callable[..., Any], dict[str, Any]]:
    """torch's own, and what makes it take several query heads a key head. Raises ImportError."""
    from torch.nn.attention.varlen import varlen_attn

    # before there was a word for it, the kernel took fewer key heads all the same
    known = inspect.signature(varlen_attn).parameters
    return varlen_attn, {"enable_gqa": True} if "enable_gqa" in known else {}


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
    """A LanguageModel of the weights `state`; raises EngineError if they do not fit `config`."""

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
        self._plain = Plain(self._eps, self.kv_heads)
        self._kernels: Plain = _kernels(self._plain, self._blocks[0], self.heads)

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
        return len(self._embedding)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._device

    def prefill(
        self, tokens: Tensor, mask: Tensor, *, keep_routes: bool = False
    ) -> tuple["Qwen3Session", ModelOutput]:
        """See LanguageModel. It has no experts, so there are no routes."""
        session = Qwen3Session(self, mask)
        positions = (mask.long().cumsum(1) - 1).clamp_min(0)
        hidden = self.run(tokens.flatten(), positions.flatten(), session.attend_prompt)
        return session, self.output(hidden.unflatten(0, tokens.shape)[:, -1])

    def packed(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        taps: LayerHooks | None = None,
        routes: RouterHooks | None = None,
    ) -> Tensor:
        """See LanguageModel."""
        positions = upload(torch.cat([torch.arange(length) for length in lengths]), self._device)
        attend = among(lengths, device=self._device, dtype=self._dtype, width=self.head_dim)
        return self.run(tokens, positions, attend, taps)

    def hidden(self, tokens: Tensor) -> Tensor:
        """See LanguageModel."""
        rows, columns = tokens.shape
        return self.packed(tokens.flatten(), [columns] * rows).unflatten(0, tokens.shape)

    def logits(self, hidden: Tensor) -> Tensor:
        """See LanguageModel."""
        return F.linear(hidden, self._head)

    def forward(self, tokens: Tensor) -> Tensor:
        """See LanguageModel."""
        return self.logits(self.hidden(tokens))

    def update(self, state: State, changed: Changed) -> bool:
        """See LanguageModel. Every tensor has its place."""
        check_state(state, self._shapes)
        for name, positions in changed.items():
            write(self._places[name], state[name], positions)
        return True

    def output(self, hidden: Tensor) -> ModelOutput:
        """The states [B, d] and their logits."""
        return ModelOutput(hidden, self.logits(hidden))

    def run(
        self, tokens: Tensor, positions: Tensor, attend: Attend, taps: LayerHooks | None = None
    ) -> Tensor:
        """Read `tokens` [T] at `positions` [T] of their sequences: the states [T, d] that feed the head."""
        x = F.embedding(tokens, self._embedding)
        angles = positions[:, None].float() * self._frequencies
        cos, sin = angles.cos().to(self._dtype), angles.sin().to(self._dtype)
        turn = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        between = self._kernels if len(x) >= _MANY else self._plain
        norms = [*(layer.norm_in for layer in self._blocks), self._norm]
        y = F.rms_norm(x, x.shape[1:], norms[0], self._eps)
        for index, layer in enumerate(self._blocks):
            qkv = F.linear(y, layer.qkv).unflatten(-1, (-1, self.head_dim))
            mixed = attend(index, *between.turned(qkv, self.heads, layer, turn))
            x, y = between.added(x, F.linear(mixed.flatten(1), layer.out), layer.norm_mlp)
            more = F.linear(between.gated(F.linear(y, layer.gate_up)), layer.down)
            following = norms[index + 1]
            x, y = between.added(x, more, following)
            if taps is not None and index + 1 in taps.layers:
                seen = taps.take(index + 1, x)
                if seen is not x:
                    x, y = seen, F.rms_norm(seen, following.shape, following, self._eps)
        return y

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


class Plain:
    """The operations between two matrix products, by torch. Every argument may be overwritten."""

    def __init__(self, eps: float, kv_heads: int) -> None:
        self.eps = eps
        self.kv_heads = kv_heads

    def turned(
        self, qkv: Tensor, heads: int, layer: Layer, turn: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, ...]:
        """Split `qkv` [T, H + 2 KV, D] into q [T, H, D], k and v [T, KV, D]; norm and rotate q and k.

        `turn`: cosines twice [T, D], and sines, minus first (halves convention, Su et al. 2021).
        """
        q, k, v = qkv.split([heads, self.kv_heads, self.kv_heads], 1)
        return self._turn(q, layer.norm_q, *turn), self._turn(k, layer.norm_k, *turn), v

    def added(self, x: Tensor, more: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """x + more, all [T, d], and its norm."""
        x = x.add_(more)
        return x, self._norm(x, weight)

    def gated(self, both: Tensor) -> Tensor:
        """silu(gate) * up [T, inner] of `both` [T, 2 inner], side by side."""
        gate, up = both.chunk(2, -1)
        return F.silu(gate, inplace=True).mul_(up)

    def _turn(self, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self._norm(x, weight)
        across = x.roll(x.shape[-1] // 2, -1).mul_(sin[:, None])
        return x.mul_(cos[:, None]).add_(across)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)


def _kernels(plain: Plain, layer: Layer, heads: int) -> Any:
    """Choose kernels where the weights are on a GPU and can be compiled for, else `plain`."""
    if not compiles(layer.qkv):
        return plain
    from .kernels import FAILURES, Kernels, differ

    kernels = Kernels(plain.eps, plain.kv_heads)
    try:
        with torch.inference_mode():
            wrong = differ(kernels, plain, layer, heads)
    except FAILURES as error:
        wrong = str(error).strip().partition("\n")[0] or type(error).__name__
    if wrong:
        logger.warning("prefills are slower than they could be: no kernels (%s)", wrong)
    return plain if wrong else kernels
