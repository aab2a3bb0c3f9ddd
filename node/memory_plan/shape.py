"""Read a model's sizes from its config.json: parameters, KV cache elements per token.

Nothing is loaded and torch is not needed. Counts are exact for the families in FAMILIES; other models are
counted like a llama, and `ModelShape.exact` is false.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import EngineError

VOCABULARY_MULTIPLE = 64  # vLLM pads the rows of embeddings to it, divided by its ranks
CHUNK = 64  # tokens that linear attention reads together


@dataclass(frozen=True)
class Family:
    """Properties of a model family that its config.json does not state."""

    qkv_bias: bool = False  # query, key and value have biases, whatever `attention_bias` says
    head_norms: bool = False  # a norm over each head of queries and of keys
    norms: int = 2  # norms of the hidden size per layer
    tied: bool = False  # tied embeddings by default
    sliding: bool = False  # `sliding_window` alone enables windows, in all layers
    wide_norms: bool = False  # one norm over all queries and one over all keys
    sinks: bool = False  # an attention sink per head
    plain_output: bool = False  # `attention_bias` does not apply to the output projection
    expert_bias: bool = False  # experts and router have biases
    shared_gate: bool = True  # the shared expert has a gate
    gated: bool = False  # queries have an output gate of the same size


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(sliding=True),
    "mixtral": Family(sliding=True),
    "qwen2": Family(qkv_bias=True),
    "qwen2_moe": Family(qkv_bias=True),
    "qwen3": Family(head_norms=True),
    "qwen3_moe": Family(head_norms=True),
    "gemma": Family(tied=True),
    "gemma2": Family(norms=4, tied=True),
    "gemma3_text": Family(norms=4, head_norms=True, tied=True),
    "glm": Family(plain_output=True),
    "glm4": Family(norms=4, plain_output=True),
    "glm4_moe": Family(plain_output=True, shared_gate=False),
    "gpt_oss": Family(sinks=True, expert_bias=True),
    "granite": Family(),
    "granitemoe": Family(),
    "ministral3": Family(sliding=True),
    "olmo2": Family(wide_norms=True),
    "olmo3": Family(wide_norms=True),
    "olmoe": Family(wide_norms=True),
    "phi3": Family(sliding=True),
    "qwen3_5_moe_text": Family(head_norms=True, gated=True),
    "qwen3_5_text": Family(head_norms=True, gated=True),
    "qwen3_next": Family(head_norms=True, gated=True),
    "seed_oss": Family(plain_output=True),
    "smollm3": Family(),
}
"""`model_type` -> family; tests compare each with transformers' own model."""


@dataclass(frozen=True)
class LinearAttention:
    """Sizes of gated linear-attention layers (a short convolution, then a gated delta rule)."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # width of the convolution in tokens

    @property
    def state(self) -> int:
        """Elements of a sequence's state in one layer, whatever its length."""
        return self._mixed * (self.kernel - 1) + self.value_heads * self.key_dim * self.value_dim

    def parameters(self, hidden: int) -> int:
        """Return the parameters of one layer's module."""
        values = self.value_heads * self.value_dim
        inputs = hidden * (self._mixed + values + 2 * self.value_heads)
        decay = 2 * self.value_heads
        return inputs + self._mixed * self.kernel + decay + self.value_dim + values * hidden

    def kept_bytes(self, element: int, *, kernels: bool) -> int:
        """Return the bytes per token that one layer's module saves for backward, beside its input.

        `element`: bytes of an element of its input. With `kernels` flash-linear-attention computes the delta
        rule, else torch operations of transformers, which save everything in fp32, and a state for each chunk.
        Both read as many heads of queries and keys as of values.
        """
        keys, values = self.key_dim, self.value_dim
        single = (
            3 * values + 10
        )  # fp32, a head: the last norm's input, its gate twice; decays and rates
        given = 3 * values  # in the dtype of the input, a head: that norm's results, and the output
        if kernels:
            given += 2 * keys + values + CHUNK  # normalized, and the inverse of a chunk's matrix
        else:
            # queries 3 times, keys 5 times, values 3 times, products within a chunk 5 times, the state
            single += 8 * keys + 3 * values + 5 * CHUNK + keys * values // CHUNK
            if element == 4:  # copies where lengths are whole chunks
                single += 4 * keys + values
        convolved = 2 * self._mixed * element
        return self.value_heads * (4 * single + element * given) + convolved

    def backward_bytes(self, element: int) -> int:
        """Return the bytes per token that flash-linear-attention allocates in one layer's backward pass.

        It computes the states of all chunks again, and has 4 tensors like keys and 4 like values.
        """
        state = 2 * self.key_dim * self.value_dim // CHUNK
        return self.value_heads * element * (4 * (self.key_dim + self.value_dim) + state)

    @property
    def _mixed(self) -> int:
        """Elements of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


NO_LINEAR = LinearAttention(0, 0, 0, 0, 0, 1)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal language model, in elements."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    longest: int  # max_position_embeddings; 0: not given
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    shared_width: int = 0  # width of the shared experts, together
    sparse_layers: int = 0  # layers with experts
    window: int = 0  # tokens in the window of a sliding-window layer
    windowed_layers: int = 0
    qkv_biases: bool = False
    output_bias: bool = False
    head_norms: bool = False
    mlp_bias: bool = False
    linear: LinearAttention = NO_LINEAR

    @property
    def exact(self) -> bool:
        """Whether the family is known and `parameters` is exact."""
        return self.family in FAMILIES

    @property
    def _family(self) -> Family:
        return FAMILIES.get(self.family, Family())

    @property
    def attention_width(self) -> int:
        """Elements of a token's queries, and of the attention output: heads x head size."""
        return self.heads * self.head_dim

    @property
    def gated(self) -> bool:
        """Whether attention's output is multiplied by a gate of its size."""
        return self._family.gated

    @property
    def kv_width(self) -> int:
        """Elements of a token's keys, and of its values, in one layer."""
        return self.kv_heads * self.head_dim

    @property
    def embedding(self) -> int:
        """Parameters of the embedding; an untied head has as many."""
        return self.vocabulary * self.hidden

    @cached_property
    def parameters(self) -> int:
        """Number of all parameters; a tied embedding counts once."""
        tables = self.embedding * (1 if self.tied else 2)
        layers = self._mixers(1, 1) + self.layers * self._family.norms * self.hidden
        layers += (self.layers - self.sparse_layers) * self._dense(1)
        return tables + self.hidden + layers + self.sparse_layers * self._moe(1)

    def rank_parameters(self, tp: int = 1, pp: int = 1) -> int:
        """Return the parameters of vLLM's largest rank, given tensor and pipeline parallel sizes.

        The first and the last stage each hold an embedding table, even if embeddings are tied.
        """
        layers = -(-self.layers // pp)
        sparse = min(layers, -(-self.sparse_layers // pp))
        rows = -(-self.vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        tables = 1 if self.tied or pp > 1 else 2
        return (
            tables * rows * self.hidden // tp
            + self.hidden
            + layers * self._family.norms * self.hidden
            + self._mixers(tp, pp)
            + (layers - sparse) * self._dense(tp)
            + sparse * self._moe(tp)
        )

    def layer_parameters(self) -> int:
        """Return the parameters of the largest layer."""
        feed_forward = self._moe(1) if self.sparse_layers else self._dense(1)
        mixer = max(self._attention(1), self.linear.parameters(self.hidden))
        return mixer + self._family.norms * self.hidden + feed_forward

    def adapter_parameters(self, rank: int, modules: tuple[str, ...]) -> int:
        """Return the parameters of low-rank adapters on these linear layers (llama's names)."""
        d, q, kv, mlp = self.hidden, self.attention_width, self.kv_width, self.intermediate
        sizes = {"q_proj": d + q, "k_proj": d + kv, "v_proj": d + kv, "o_proj": q + d}
        sizes |= {"gate_proj": d + mlp, "up_proj": d + mlp, "down_proj": mlp + d}
        return self.layers * rank * sum(sizes.get(name, 0) for name in modules)

    def _mixers(self, tp: int, pp: int) -> int:
        """Return the attention parameters of all layers of one rank."""
        linear = -(-self.linear.layers // pp)
        full = -(-self.layers // pp) - linear
        return full * self._attention(tp) + linear * self.linear.parameters(self.hidden) // tp

    def _attention(self, tp: int) -> int:
        """Return one rank's attention parameters in a layer; with few KV heads, ranks hold copies."""
        queries = self.attention_width // tp
        keys = max(1, self.kv_heads // tp) * self.head_dim
        biases = (queries + 2 * keys) * self.qkv_biases + self.hidden * self.output_bias
        norms = 2 * self.head_dim * self.head_norms + self.heads * self._family.sinks
        norms += (self.attention_width + self.kv_width) * self._family.wide_norms
        gates = queries * self._family.gated
        return self.hidden * (2 * queries + gates + 2 * keys) + biases + norms

    def _dense(self, tp: int) -> int:
        width = self.intermediate // tp
        return 3 * self.hidden * width + (2 * width + self.hidden) * self.mlp_bias

    def _moe(self, tp: int) -> int:
        width = self.expert_width // tp
        experts = self.experts * 3 * self.hidden * width
        if self._family.expert_bias:
            experts += self.experts * (2 * width + self.hidden + 1)
        shared = 3 * self.hidden * (self.shared_width // tp)
        gate = bool(self.shared_width) and self._family.shared_gate
        return experts + shared + self.hidden * (self.experts + gate)


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Read a model's shape from its config.json.

    Raises EngineError unless it is a causal language model whose cache consists of keys and values, and of
    states of gated linear attention. Of a model that also reads images pass the text model's
    (architectures.text_config).
    """
    if config.get("kv_lora_rank") or config.get("ssm_cfg"):
        raise EngineError(
            f"memory cannot be planned for {config.get('model_type')!r}, whose cache is not plain keys and "
            "values: start it to see whether it fits"
        )
    name = str(config.get("model_type") or "unknown")
    family = FAMILIES.get(name, Family())
    layers, heads = _size(config, "num_hidden_layers"), _size(config, "num_attention_heads")
    hidden = _size(config, "hidden_size")
    experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
    windowed, window = _windows(config, layers, family)
    bias = bool(config.get("attention_bias", False))
    return ModelShape(
        family=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_first(config, "num_key_value_heads") or heads,
        head_dim=_first(config, "head_dim") or hidden // heads,
        intermediate=_size(config, "intermediate_size"),
        vocabulary=_size(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        longest=_first(config, "max_position_embeddings"),
        experts=experts,
        experts_per_token=_first(config, "num_experts_per_tok") if experts else 0,
        expert_width=_first(config, "moe_intermediate_size", "intermediate_size") if experts else 0,
        shared_width=_shared(config) if experts else 0,
        sparse_layers=_sparse(config, layers) if experts else 0,
        window=window,
        windowed_layers=windowed,
        qkv_biases=family.qkv_bias or bias,
        output_bias=(bias and not (family.qkv_bias or family.plain_output))
        or bool(config.get("attention_out_bias")),
        head_norms=family.head_norms or bool(config.get("use_qk_norm")),
        mlp_bias=bool(config.get("mlp_bias", False)),
        linear=_linear(config),
    )


def _linear(config: Mapping[str, Any]) -> LinearAttention:
    kinds = config.get("layer_types")
    layers = kinds.count("linear_attention") if isinstance(kinds, list) else 0
    if not layers:
        return NO_LINEAR
    return LinearAttention(
        layers,
        _size(config, "linear_num_key_heads"),
        _size(config, "linear_num_value_heads"),
        _size(config, "linear_key_head_dim"),
        _size(config, "linear_value_head_dim"),
        _size(config, "linear_conv_kernel_dim"),
    )


def _shared(config: Mapping[str, Any]) -> int:
    """Return the total width of all shared experts."""
    own = _first(config, "n_shared_experts") * _first(config, "moe_intermediate_size")
    return _first(config, "shared_expert_intermediate_size") or own


def _sparse(config: Mapping[str, Any], layers: int) -> int:
    step = _first(config, "decoder_sparse_step") or 1
    dense = set(config.get("mlp_only_layers") or ()) | set(
        range(_first(config, "first_k_dense_replace"))
    )
    return sum(layer not in dense and not (layer + 1) % step for layer in range(layers))


def _windows(config: Mapping[str, Any], layers: int, family: Family) -> tuple[int, int]:
    """Return the number of sliding-window layers, and the window in tokens."""
    window = _first(config, "sliding_window")
    kinds = config.get("layer_types")
    if not window or config.get("use_sliding_window") is False:
        return 0, 0
    if isinstance(kinds, list):
        count = sum(kind == "sliding_attention" for kind in kinds)
        return count, window if count else 0
    return (layers, window) if family.sliding else (0, 0)


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise EngineError(f"config.json has no {name}: use a causal language model")
    return value


def _first(config: Mapping[str, Any], *names: str) -> int:
    """Return the first non-zero integer among these keys; 0 if there is none."""
    values = (config.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and value), 0)
