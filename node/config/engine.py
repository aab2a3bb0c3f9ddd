"""The `[engine]` section of all commands with an engine: type, parallelism, limits."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from .base import BaseConfig

SPECULATIVE = "speculative_config"
"""Key of `engine.vllm`: vLLM's speculative decoding."""
KEPT_ALONE = (
    SPECULATIVE,
    "kv_transfer_config",
    "kv_offloading_size",
    "block_size",
    "scheduler_cls",
)
"""Keys of `engine.vllm` that do not go with keep_kv_cache."""
Positive = Annotated[int, Field(ge=1)]
Quantization = Literal["none", "fp8"]
EXACT_NEEDS_VLLM = (
    "exact numerics need vLLM on workers and auditors: set engine.type to vllm, and verification.auditor to "
    "auto or vllm"
)
KEPT_NEEDS_VLLM = (
    "only vLLM keeps keys and values when its weights change, and audits what was drawn so: set engine.type to "
    "vllm, and verification.auditor to auto or vllm"
)
STAGES_WITHOUT_ROUTES = "vLLM's stages do not tell each other which experts read a token"
PIPELINES_NEED_VLLM = (
    "pipelines between nodes need vLLM for their stages: set engine.type to vllm, or remove pp"
)


class PipelineConfig(BaseConfig):
    """Pipelines over several nodes, each of which holds some layers of the model."""

    mode: Literal["auto", "on", "off"] = "auto"
    """`auto`: offer this machine's memory if the model does not fit into it; `on`: always; `off`: never."""
    rank: Annotated[int, Field(ge=-1, lt=16)] = -1
    """This node's stage, with world_size; -1 lets the trainer choose."""
    world_size: Annotated[int, Field(ge=0, le=16)] = 0
    """Number of stages; 0 lets the trainer choose."""
    name: Annotated[str, Field(max_length=64)] = ""
    """Only nodes with the same name form a pipeline."""
    memory_gib: Annotated[float, Field(ge=0)] = 0.0
    """Memory to offer; 0: the free memory of this machine's GPUs, or of the machine if it has none."""
    encoding: Literal["raw", "fp8", "int8"] = "raw"
    """How hidden states are sent: unchanged, or 8 bits per element with one scale per token."""

    @property
    def wanted(self) -> bool:
        """Whether the operator asked for a pipeline explicitly."""
        return self.mode == "on" or (
            self.mode == "auto" and (self.rank >= 0 or self.world_size > 0)
        )

    @model_validator(mode="after")
    def _is_a_place(self) -> Self:
        if self.rank >= 0 and not 2 <= self.world_size:
            raise ValueError("pp.rank needs pp.world_size, 2 or more")
        if self.world_size == 1 or (self.rank >= self.world_size > 0):
            raise ValueError("pp.world_size must be 2 or more, and above pp.rank")
        return self


class EngineConfig(BaseConfig):
    """The engine that generates."""

    type: Literal["hf", "vllm"] = "hf"
    """`hf`: a generation loop on transformers weights, in its own process if on a GPU; `vllm`: vLLM, in its own
    processes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of weights and activations; must be the one in a run's manifest."""
    quantization: Quantization = "none"
    """`fp8`: linear layers compute with FP8 weights, one scale per output, which each engine makes of the bf16
    weights; on a GPU vLLM quantizes their inputs per token, too. Set it on the trainer: workers and auditors do
    as the run's manifest says. Not for mixtures of experts, linear or latent attention, pipelines between
    nodes, or exact numerics."""
    device: str = "auto"
    """`auto`: cuda if available, else cpu."""
    max_batch: Positive = 256
    """Most sequences in a batch of each engine. A worker keeps in flight what the cache holds."""
    max_model_len: Positive = 1024
    """Longest sequence, prompt and reply, in tokens. If set on a trainer, it bounds the run; a worker serves
    its run's length, or less if set to less."""
    tp: Positive | Literal["auto"] = 1
    """GPUs that share each layer (vLLM's tensor parallelism); `auto`: all visible ones, divided by pp and
    dp."""
    pp: Positive = 1
    """GPUs of this host in a pipeline, each with some of the layers (vLLM's pipeline parallelism)."""
    dp: Positive | Literal["auto"] = "auto"
    """Number of engine replicas, fed from one copy of the weights; not together with pp. `auto`: one, but a
    worker's vLLM has up to three of a small model on its GPU, if they find enough memory and cores."""
    sleep_after_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds without work after which vLLM releases its GPU memory until there is work again (its sleep mode),
    for GPUs shared with a trainer; 0: never."""
    batch_invariant: bool = False
    """Use vLLM's batch-invariant kernels, which compute a token in the same way whatever else is in the batch
    (slower on a GPU); enabled by runs with exact numerics."""
    keep_kv_cache: bool = False
    """Keep the keys and values of a sequence's earlier tokens, in whole blocks, when the weights change while
    it is drawn, in place of computing them anew. Faster for long replies, whose later tokens then depend on
    several policies. Set it on the trainer: workers and auditors do as the run's manifest says, and have to be
    vLLM. Only for models whose layers all have full attention; not with exact numerics, pipelines, drafts or
    kv_transfer_config."""
    enable_return_routed_experts: bool = False
    """Record the experts that process each token; enabled by runs whose trainer replays them
    (training.enable_router_replay)."""
    vllm: dict[str, Any] = {}
    """Further engine arguments for vLLM; those that would break proofs or versions are refused. Speculative
    decoding is `speculative_config = {method = "ngram", num_speculative_tokens = 4, prompt_lookup_min = 2,
    prompt_lookup_max = 5}`: the same tokens and proofs, faster if replies repeat parts of themselves or of the
    prompt and few sequences run at once. With method `mtp` the model's own MTP head drafts; `model` is then a
    directory with its published checkpoint."""

    @property
    def replicas(self) -> int:
        """engine.dp as a number; 1 for an `auto` that memory_plan/memory.py has not resolved."""
        return 1 if self.dp == "auto" else self.dp

    @property
    def shares_gpu(self) -> bool:
        """Whether several replicas may run on one GPU: how much memory each has was decided."""
        alone = self.pp == 1 and self.tp in (1, "auto")
        return self.replicas > 1 and alone and "kv_cache_memory_bytes" in self.vllm

    @property
    def draft_tokens(self) -> int:
        """Most draft tokens of a sequence per step; 0 without speculative decoding."""
        config = self.vllm.get(SPECULATIVE)
        count = config.get("num_speculative_tokens") if isinstance(config, dict) else None
        return count if isinstance(count, int) else 0

    @property
    def draft_head(self) -> str | None:
        """Directory of the checkpoint whose MTP head drafts; None without one."""
        config = self.vllm.get(SPECULATIVE)
        if not isinstance(config, dict) or config.get("method") != "mtp":
            return None
        return str(config.get("model"))

    def _not_with_kept_cache(self) -> str:
        """Name a setting that does not go with keep_kv_cache; "" if there is none."""
        settings = {
            "batch_invariant": self.batch_invariant,
            "pp": self.pp > 1,
            **{f"vllm.{name}": self.vllm.get(name) for name in KEPT_ALONE},
        }
        return next((name for name, value in settings.items() if value), "")

    @model_validator(mode="after")
    def _is_one_shape(self) -> Self:
        if self.quantization != "none" and self.batch_invariant:
            raise ValueError(
                "quantization and batch_invariant cannot be combined, as FP8 products may depend on the batch: "
                "remove one"
            )
        if self.keep_kv_cache and (other := self._not_with_kept_cache()):
            raise ValueError(
                f"keep_kv_cache and {other} cannot be combined, as they were never tried together: remove one"
            )
        if self.pp > 1 and self.draft_tokens:
            raise ValueError(
                f"pp and vllm.{SPECULATIVE} cannot be combined, as the first stage does not learn in time "
                "which drafts were accepted: remove one"
            )
        if self.replicas > 1 and self.pp > 1:
            raise ValueError(
                "dp and pp cannot be combined: start one node per pipeline, each with its own pp"
            )
        return self
