"""What an engine takes of one GPU, or of a machine's memory, and how many sequences its cache then holds.

What vLLM counts goes against its budget, gpu_memory_utilization x the GPU; what it does not count (CUDA's
context, captured graphs) and what this package keeps beside it (proofs, updates) has to fit into the rest.
Lines marked as estimates were not derived but measured elsewhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..engine_config import EngineConfig
from ..errors import UsageError
from .bill import MIB, Bill, Line
from .shape import ModelShape

ELEMENT = {"float32": 4, "bfloat16": 2}
UTILIZATION = 0.92
"""vLLM's own gpu_memory_utilization where engine.vllm names none."""
STEP_TOKENS = 2048
"""vLLM's own max_num_batched_tokens for an engine that is no server."""
CPU_STEP_TOKENS = 4096
"""What this package sets on a CPU."""
BLOCK_TOKENS = {"cuda": 16, "cpu": 128}
"""Tokens of a block of vLLM's cache, where engine.vllm.block_size says nothing."""
CONTEXT = 512 * MIB
"""CUDA's context, kernels and cuBLAS's workspaces in one process."""
LIBRARIES = 512 * MIB
"""What vLLM counts of its budget beside the tensors named here: kernels, workspaces."""
UNCOUNTED = 576 * MIB
"""What it takes and does not count: 0.54 GiB of an H200 with vLLM 0.25.1 (docs/benchmarks.md)."""
COLLECTIVES = 512 * MIB
"""NCCL's buffers and vLLM's own all-reduce, once there is more than one rank."""
GRAPHS = (128 * MIB, 16 * MIB)
"""CUDA graphs of vLLM's default sizes: for a model, and for each layer."""
CPU_PROCESS = 1536 * MIB
"""Of vLLM on a CPU: interpreter, torch, its libraries."""
HF_PROCESS = 768 * MIB
CPU_SHARE = 8
"""On a CPU vLLM's cache gets at most this part of the machine's memory."""
MIN_CPU_CACHE = 64 * MIB
RESERVE = 256 * MIB
"""Of a GPU, for the driver and for what others do."""
CHANGED = 0.02
"""Share of the weights that a step of reinforcement learning changes, or less (docs/benchmarks.md)."""
UPDATE_BYTES = 20
"""Of each changed element while an update is ready: position, value, place and value again where layers
are fused (handover.py, placement.py)."""


@dataclass(frozen=True)
class Device:
    """Where an engine computes."""

    kind: Literal["cuda", "cpu"]
    nbytes: int
    """All of its memory."""
    taken: int = 0
    """By others, while the engine runs."""


@dataclass(frozen=True)
class WorkerPlan:
    """The memory of one engine, on each of its devices."""

    device: Device
    budget: int
    """What the engine may take, its cache included."""
    engine: Bill
    """What it takes before its cache, inside the budget."""
    beside: Bill
    """What is kept beside the budget."""
    sequence: int
    """Bytes of the cache for a sequence of full length."""
    room: int
    """Bytes that are left for the cache; negative if it does not even fit without."""
    wanted: int
    """Sequences at once that the config asks for."""
    length: int
    utilization: float | None = None
    """Of vLLM on a GPU: the share that it was planned with."""

    @property
    def at_once(self) -> int:
        """Sequences of full length that the cache holds; more fit while they are shorter."""
        return max(0, self.room // self.sequence)

    @property
    def fits(self) -> bool:
        """Whether it starts and holds one sequence of full length."""
        return self.at_once >= 1 and self.overdrawn <= 0

    @property
    def holds_all(self) -> bool:
        """Whether all sequences may be of full length at once."""
        return self.fits and self.at_once >= self.wanted

    @property
    def overdrawn(self) -> int:
        """Bytes by which budget and others exceed the device; not above 0 if all is well."""
        return self.budget + self.device.taken - self.device.nbytes

    @property
    def missing(self) -> int:
        """Bytes that it lacks to hold one sequence; 0 if it does."""
        return max(0, self.sequence - self.room, self.overdrawn)

    @property
    def tight(self) -> bool:
        """Whether what is kept beside the budget finds no room: updates are then loaded whole."""
        rest = self.device.nbytes - self.device.taken - self.budget
        return self.device.kind == "cuda" and self.beside.total > rest


def plan_worker(
    config: EngineConfig,
    shape: ModelShape,
    device: Device,
    *,
    fingerprint: str = "projection",
    changed: float = CHANGED,
) -> WorkerPlan:
    """The plan of one engine of `config`; engine.tp must be a number.

    `fingerprint` is the run's proof ("" for none), `changed` the share of the weights in an update.
    """
    if config.type == "vllm" and device.kind == "cuda":
        return _vllm_gpu(config, shape, device, fingerprint, changed)
    if config.type == "vllm":
        return _vllm_cpu(config, shape, device)
    return _embedded(config, shape, device)


def token_bytes(config: EngineConfig, shape: ModelShape) -> int:
    """Cache of one token on one rank, in the layers that see everything.

    2 (key and value) x layers x key-value heads x head size x element size.
    """
    layers = -(-(shape.layers - shape.windowed_layers) // config.pp)
    return layers * _layer_token_bytes(config, shape)


def sequence_bytes(
    config: EngineConfig, shape: ModelShape, length: int, kind: Literal["cuda", "cpu"]
) -> int:
    """Cache of a sequence of `length` tokens on one rank, in whole blocks.

    A layer with a window holds the window and what one step adds to it.
    """
    block = int(config.vllm.get("block_size") or BLOCK_TOKENS[kind])
    layer = _layer_token_bytes(config, shape)
    found = token_bytes(config, shape) * -(-length // block) * block
    if shape.windowed_layers:
        seen = min(shape.window - 1 + step_tokens(config, kind), length)
        found += -(-shape.windowed_layers // config.pp) * layer * (-(-seen // block) + 1) * block
    return found


def cpu_cache_bytes(config: EngineConfig, shape: ModelShape, machine: int) -> int:
    """What each rank of vLLM is given for its cache on a machine with so many bytes of memory."""
    return rank_cache_bytes(config, shape.layers, _layer_token_bytes(config, shape), machine)


def rank_cache_bytes(config: EngineConfig, layers: int, layer_token: int, machine: int) -> int:
    """The same, of a model with so many layers and bytes of a token in each on one rank.

    Room for max_batch sequences of max_model_len; all ranks take at most an eighth of the memory.
    """
    ranks = tensor_parallel(config) * config.pp * config.dp
    most = config.max_batch * config.max_model_len * -(-layers // config.pp) * layer_token
    return max(MIN_CPU_CACHE, min(most, machine // CPU_SHARE // ranks))


def step_tokens(config: EngineConfig, kind: Literal["cuda", "cpu"]) -> int:
    """Tokens that one step of vLLM computes at most."""
    default = STEP_TOKENS if kind == "cuda" else max(config.max_batch, CPU_STEP_TOKENS)
    return int(config.vllm.get("max_num_batched_tokens") or default)


def tensor_parallel(config: EngineConfig) -> int:
    """engine.tp as a number. Raises UsageError for `auto`."""
    if not isinstance(config.tp, int):
        raise UsageError('engine.tp is "auto": say how many GPUs there are')
    return config.tp


def _layer_token_bytes(config: EngineConfig, shape: ModelShape) -> int:
    heads = max(1, shape.kv_heads // tensor_parallel(config))
    return 2 * heads * shape.head_dim * _cache_element(config)


def _cache_element(config: EngineConfig) -> int:
    kind = str(config.vllm.get("kv_cache_dtype") or "auto")
    return 1 if kind.startswith("fp8") else ELEMENT[config.dtype]


# -- vLLM on a GPU ---------------------------------------------------------------------------------


def _vllm_gpu(
    config: EngineConfig, shape: ModelShape, device: Device, fingerprint: str, changed: float
) -> WorkerPlan:
    tp = tensor_parallel(config)
    ranks = tp * config.pp
    engine = Bill.of(
        [
            _weights(config, shape, tp, config.pp),
            _activations(config, shape, tp, step_tokens(config, "cuda")),
            Line("logits", _logits(config, shape), f"{config.max_batch} rows, in fp32 too", True),
            Line("libraries, workspaces", LIBRARIES, "", True),
            Line("collectives", COLLECTIVES if ranks > 1 else 0, f"{ranks} ranks", True),
        ]
    )
    beyond = uncounted(config, shape)
    beside = Bill.of(
        [
            *beyond,
            *_proofs(config, shape, fingerprint),
            Line(
                "an update on its way in",
                int(UPDATE_BYTES * changed * shape.parameters),
                f"{changed:.0%} of the weights, {UPDATE_BYTES} bytes each; shorter of room: loaded whole",
            ),
        ]
    )
    utilization = _utilization(config.vllm, device, Bill.of(beyond), beside)
    budget = int(utilization * device.nbytes)
    fixed = config.vllm.get("kv_cache_memory_bytes")
    if fixed:
        budget, room = engine.total + int(fixed), int(fixed)
    else:
        room = budget - engine.total
    return WorkerPlan(
        device=device,
        budget=budget,
        engine=engine,
        beside=beside,
        sequence=sequence_bytes(config, shape, config.max_model_len, "cuda"),
        room=room,
        wanted=config.max_batch,
        length=config.max_model_len,
        utilization=None if fixed else utilization,
    )


def _utilization(vllm: Mapping[str, Any], device: Device, beyond: Bill, beside: Bill) -> float:
    """What is said, or vLLM's own; on a GPU that is too small or shared for that, what all others leave."""
    said = vllm.get("gpu_memory_utilization")
    if said is not None:
        return float(said)
    if UTILIZATION * device.nbytes + beyond.total <= device.nbytes - device.taken:
        return UTILIZATION
    needed = beside if device.taken else beyond  # an update that finds no room is loaded whole
    left = device.nbytes - device.taken - needed.total - RESERVE
    return max(0, int(100 * left / device.nbytes)) / 100


def _weights(config: EngineConfig, shape: ModelShape, tp: int, pp: int) -> Line:
    count, element = shape.rank_parameters(tp, pp), ELEMENT[config.dtype]
    return Line("weights", count * element, f"{count / 1e6:,.0f} M x {element} bytes")


def _activations(config: EngineConfig, shape: ModelShape, tp: int, tokens: int) -> Line:
    """Of a step with the most tokens: the widest layer's input, gates, product and output."""
    mixed = shape.attention_width // tp + 2 * max(1, shape.kv_heads // tp) * shape.head_dim
    dense = 3 * shape.intermediate // tp
    if shape.experts:
        expert = 3 * shape.expert_width // tp + shape.hidden
        dense = max(dense, shape.experts_per_token * expert + 3 * shape.shared_width // tp)
    width = 4 * shape.hidden + max(2 * mixed, dense)
    return Line(
        "activations", tokens * width * ELEMENT[config.dtype], f"a step of {tokens} tokens", True
    )


def _logits(config: EngineConfig, shape: ModelShape) -> int:
    """As the model gives them, and vLLM's own fp32 copies in its dry run."""
    return config.max_batch * shape.vocabulary * (ELEMENT[config.dtype] + 8)


def uncounted(config: EngineConfig, shape: ModelShape) -> list[Line]:
    """What vLLM takes of a GPU beyond its budget."""
    model, layer = GRAPHS
    eager = bool(config.vllm.get("enforce_eager"))
    layers = -(-shape.layers // config.pp)
    graphs = 0 if eager else model + layers * layer
    return [
        Line("CUDA context", UNCOUNTED, "", True),
        Line("CUDA graphs", graphs, f"{layers} layers", True),
    ]


def _proofs(config: EngineConfig, shape: ModelShape, fingerprint: str) -> list[Line]:
    """What vllm_recorder.py keeps on the device."""
    from ..fingerprints.fingerprint import NUMBERS

    if fingerprint:
        signs = shape.hidden * (1 + NUMBERS) * ELEMENT[config.dtype]
        rows = config.max_batch * (1 + NUMBERS) * 4
        return [Line("proofs", signs + rows, "signs of the projection, one row a request")]
    return []


# -- without a GPU, and the embedded engine --------------------------------------------------------


def _vllm_cpu(config: EngineConfig, shape: ModelShape, device: Device) -> WorkerPlan:
    from ..fingerprints.fingerprint import NUMBERS

    tp = tensor_parallel(config)
    ranks = tp * config.pp
    cache = int(
        config.vllm.get("kv_cache_memory_bytes") or cpu_cache_bytes(config, shape, device.nbytes)
    )
    engine = Bill.of(
        [
            _times(_weights(config, shape, tp, config.pp), ranks),
            _times(_activations(config, shape, tp, step_tokens(config, "cpu")), ranks),
            Line("logits", _logits(config, shape), f"{config.max_batch} rows, in fp32 too", True),
            Line("processes", ranks * CPU_PROCESS, f"{ranks}", True),
        ]
    )
    columns = 1 + NUMBERS
    rows = config.max_batch * config.max_model_len * columns * 4
    beside = Bill.of(
        [
            Line("proofs", rows, "what was drawn and not collected yet"),
            Line("a state on its way in", shape.parameters * 2, "bf16, in shared memory"),
        ]
    )
    left = device.nbytes - device.taken - engine.total - beside.total
    return WorkerPlan(
        device=device,
        budget=engine.total + cache,
        engine=engine,
        beside=beside,
        sequence=sequence_bytes(config, shape, config.max_model_len, "cpu") * ranks,
        room=min(cache * ranks, left),
        wanted=config.max_batch,
        length=config.max_model_len,
    )


def _embedded(config: EngineConfig, shape: ModelShape, device: Device) -> WorkerPlan:
    """The hf engine: two networks during a load, a dense cache for a batch, hidden states of all of it."""
    element = ELEMENT[config.dtype]
    weights = shape.parameters * element
    process = CONTEXT if device.kind == "cuda" else HF_PROCESS
    engine = Bill.of(
        [
            Line("weights", weights, f"{shape.parameters / 1e6:,.0f} M x {element} bytes"),
            Line("the next weights", weights, "while they are loaded whole"),
            Line("logits", 3 * _logits(config, shape) // 2, f"{config.max_batch} rows", True),
            Line("process", process, "", True),
        ]
    )
    # the cache grows by half: the old and the new stand side by side; hidden states are kept, joined, and
    # turned into fp32
    cached = 2 * shape.kv_width * shape.layers * element
    hidden = shape.hidden * (2 * element + 4)
    budget = device.nbytes - device.taken - (RESERVE if device.kind == "cuda" else 0)
    return WorkerPlan(
        device=device,
        budget=budget,
        engine=engine,
        beside=Bill(()),
        sequence=config.max_model_len * (2 * cached + hidden),
        room=budget - engine.total,
        wanted=config.max_batch,
        length=config.max_model_len,
    )


def _times(line: Line, ranks: int) -> Line:
    return Line(line.name, line.nbytes * ranks, line.how, line.estimate)
