"""The `[engine]` section of every command that has an engine: which engine, its shape, its concurrency."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_config import BaseConfig

SPECULATIVE = "speculative_config"
"""Key of `engine.vllm`: vLLM's speculative decoding."""
Positive = Annotated[int, Field(ge=1)]
EXACT_NEEDS_VLLM = (
    "exact numerics need vLLM on workers and auditors: set engine.type to vllm, and verification.auditor to "
    "auto or vllm"
)
STAGES_WITHOUT_ROUTES = "vLLM's stages do not tell each other which experts read a token"
PIPELINES_NEED_VLLM = (
    "pipelines between nodes need vLLM for their stages: set engine.type to vllm, or leave pp out"
)


class ConcurrencyConfig(BaseConfig):
    """The number of sequences that a worker keeps in flight; prime-rl's names and defaults."""

    min_inflight: Positive = 1
    """Fewest sequences in flight, however full the engine's cache is."""
    max_inflight: Positive = 1024
    """Equal to min_inflight it fixes the number."""
    initial_inflight: Annotated[int, Field(ge=0)] = 0
    """0: as many as the engine's cache holds at full length, or engine.max_batch where it has none."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.min_inflight > self.max_inflight:
            raise ValueError("min_inflight must not exceed max_inflight")
        return self


class PipelineConfig(BaseConfig):
    """Holding a model together with other nodes, each some of its layers."""

    mode: Literal["auto", "on", "off"] = "auto"
    """`auto`: offer this machine's memory where the model does not fit into it; `on`: always; `off`: never."""
    rank: Annotated[int, Field(ge=-1, lt=16)] = -1
    """The stage to be, with world_size; -1 leaves it to the trainer."""
    world_size: Annotated[int, Field(ge=0, le=16)] = 0
    """Number of stages; 0 leaves it to the trainer."""
    name: Annotated[str, Field(max_length=64)] = ""
    """Only nodes with the same name are put together."""
    memory_gib: Annotated[float, Field(ge=0)] = 0.0
    """Memory to offer; 0: the free memory of this machine's GPU, or without one of the machine."""
    encoding: Literal["raw", "fp8", "int8"] = "raw"
    """Format of hidden states on the wire: as they are, or 8 bits a number with one scale a token."""
    stall_s: Annotated[float, Field(gt=0)] = 20.0
    """Seconds without an answer after which a stage counts as lost."""

    @property
    def wanted(self) -> bool:
        """The operator asked for a pipeline explicitly."""
        return self.mode == "on" or (
            self.mode == "auto" and (self.rank >= 0 or self.world_size > 0)
        )

    @model_validator(mode="after")
    def _is_a_place(self) -> Self:
        if self.rank >= 0 and not 2 <= self.world_size:
            raise ValueError("pp.rank wants pp.world_size, 2 or more")
        if self.world_size == 1 or (self.rank >= self.world_size > 0):
            raise ValueError("pp.world_size must be 2 or more, and above pp.rank")
        return self


class EngineConfig(BaseConfig):
    """The engine that generates."""

    type: Literal["hf", "vllm"] = "hf"
    """`hf`: a loop over transformers weights, on a GPU in a process of its own; `vllm`: vLLM in processes of
    its own."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of weights and activations; in a run it has to be the one in its manifest."""
    device: str = "auto"
    """`auto` takes cuda where there is one, else cpu."""
    max_batch: Positive = 256
    """Most sequences generated at once, by each engine."""
    max_model_len: Positive = 1024
    """Longest sequence, prompt and reply, in tokens. Where it is set, it bounds the run of a trainer; a worker
    serves those of its run, or shorter ones where it is set to less."""
    batch_window_ms: Annotated[float, Field(ge=0)] = 3.0
    """Time that `hf` waits for more requests before it starts a batch."""
    tp: Positive | Literal["auto"] = 1
    """GPUs that share each layer (vLLM's tensor parallelism); `auto`: all that are visible,
    divided by pp and dp."""
    pp: Positive = 1
    """GPUs in a row that each hold some layers (vLLM's pipeline parallelism, on this host)."""
    dp: Positive = 1
    """Whole engines side by side, fed from one copy of the weights; not together with pp."""
    max_restarts: Annotated[int, Field(ge=0)] = 5
    """Times in a row that vLLM is started again after it died, before this node gives up."""
    sleep_after_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds without work after which vLLM gives its GPU memory away until there is work again (its sleep
    mode), for a GPU that a trainer uses too; 0 never does."""
    batch_invariant: bool = False
    """vLLM computes each token by the same operations in any batch (its batch-invariant kernels, slower on a
    GPU); a run with exact numerics switches it on."""
    enable_return_routed_experts: bool = False
    """Record which experts of a mixture read each token; a run whose trainer replays them
    (training.enable_router_replay) switches it on."""
    concurrency: ConcurrencyConfig = ConcurrencyConfig()
    vllm: dict[str, Any] = {}
    """Passed to vLLM's engine arguments; those that would break proofs or versions are refused. Speculative
    decoding is `speculative_config = {method = "ngram", num_speculative_tokens = 4, prompt_lookup_min = 2,
    prompt_lookup_max = 5}`: the same tokens and proofs, faster where replies repeat their own text or the
    prompt's and few sequences run at once."""

    @property
    def draft_tokens(self) -> int:
        """Most tokens that are drafted for a sequence in one step; 0 without speculative decoding."""
        config = self.vllm.get(SPECULATIVE)
        count = config.get("num_speculative_tokens") if isinstance(config, dict) else None
        return count if isinstance(count, int) else 0

    @model_validator(mode="after")
    def _is_one_shape(self) -> Self:
        if self.pp > 1 and self.draft_tokens:
            raise ValueError(
                f"pp and vllm.{SPECULATIVE} cannot be combined: the first stage does not learn in time which "
                "drafts were right; leave one out"
            )
        if self.dp > 1 and self.pp > 1:
            raise ValueError(
                "dp and pp cannot be combined: start one node per pipeline, each with its own pp"
            )
        return self
