"""Predict the device memory of engines and trainers; refuse engines that cannot start.

Memory that vLLM counts goes against its budget, gpu_memory_utilization x the GPU's memory. Memory that it does
not count (CUDA context, captured graphs), and what this package keeps beside it (proofs, updates), must fit
into the rest. Nothing is loaded: only a ModelShape and a config are needed. Items marked `estimate` were
measured on other models (docs/benchmarks.md), the others are computed; tests/node/memory_plan compares both
with real runs.
"""

import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from ...protocol.audits import held_versions
from ...protocol.rollouts import FINGERPRINT_NUMBERS
from ..config.engine import EngineConfig
from ..config.run import RunConfig
from ..config.training import TrainingConfig
from ..errors import EngineError, UsageError
from ..gpus import GpuMemory, installed, visible_memory
from ..models.architectures import text_config
from ..models.json_files import read_json
from .shape import ModelShape, read_shape

logger = logging.getLogger(__name__)

GIB, MIB = 1 << 30, 1 << 20
ELEMENT = {"float32": 4, "bfloat16": 2}
"""dtype -> bytes of an element."""
RESERVE = 256 * MIB  # of a GPU, for the driver and other programs
SHARED_RESERVE = 512 * MIB  # the same where several processes fill it: an H100 keeps 479 MiB

# vLLM's own default.
UTILIZATION = 0.92
UNCHECKED = 0.01
"""gpu_memory_utilization of a vLLM whose cache is given in bytes: that much has to be free when it starts."""
# Tokens of a step. After a new version all sequences in flight are read anew: by steps of 2,048 tokens, vLLM's
# default for an embedded engine, a large GPU waits for the host.
STEP_TOKENS, LARGE_STEP_TOKENS, LARGE_GPU = 2048, 16384, 70 * GIB
CPU_STEP_TOKENS = 4096
STATE_BYTES = 4
"""Bytes per element of linear attention's state, which vLLM keeps in fp32."""
BLOCK_TOKENS = {"cuda": 16, "cpu": 128}

# Measured on an H200 with vLLM 0.25.1.
CONTEXT = 512 * MIB  # CUDA context, kernels and cuBLAS workspaces of one process
LIBRARIES = 512 * MIB  # inside vLLM's budget, beside the tensors named here
UNCOUNTED = 576 * MIB  # outside vLLM's budget
COLLECTIVES = 512 * MIB  # NCCL and vLLM's all-reduce, with more than one rank
GRAPHS_MODEL, GRAPHS_LAYER = 128 * MIB, 16 * MIB  # CUDA graphs of vLLM's default sizes

# Without a GPU.
CPU_PROCESS = 1536 * MIB
HF_PROCESS = 768 * MIB
CPU_CACHE_SHARE = 8  # vLLM's cache gets at most this part of the machine's memory
MIN_CPU_CACHE = 64 * MIB

# Weight updates, beside the engine.
CHANGED = 0.02  # share of the weights that a step of reinforcement learning changes, or less
UPDATE_BYTES = 20  # per changed element: position and value, before and after layers are fused

# The learner and what runs beside it.
LOGITS_BUFFERS = (
    3  # logits of a chunk, their gradient, and as much for what packed steps need beside them
)
ALLOCATOR_SLACK = 0.05
LINEAR_TRITON = (3, 7, 1)
"""Triton of torch 2.12.1: earlier ones miscompile flash-linear-attention on Hopper, so it refuses them."""
PADDING = 2
"""Most tokens per token of a row after padding to its longest sequence (LOOSE in training/attention.py)."""
AUDIT_TOKENS = {"hf": 1 << 14, "vllm": 1 << 15}  # of an auditor's forward pass (verification/)
AUDIT_KEEPS = 1 << 30  # bytes of small networks that the auditor keeps
AUDIT_COPIES = 2 << 30  # bytes of the copies of weights that an auditing vLLM keeps
LEAST_COPIES = 2  # fewer are not worth their memory
AUDIT_LOGITS = 256 * MIB

STARVED = 0.2  # share of a GPU below which a worker's vLLM generates much more slowly
REFUSAL_MARGIN = 0.85  # factor on estimates before an engine is refused, as they may be too high


@dataclass(frozen=True)
class MemoryItem:
    """One use of memory on a device."""

    name: str
    nbytes: int
    estimate: bool = False


@dataclass(frozen=True)
class MemoryBreakdown:
    """The items that occupy one device at the same time."""

    items: tuple[MemoryItem, ...] = ()

    @classmethod
    def of(cls, items: Iterable[MemoryItem]) -> "MemoryBreakdown":
        """Make a breakdown of the items that are not empty."""
        return cls(tuple(item for item in items if item.nbytes > 0))

    @property
    def total(self) -> int:
        """Sum of all items, in bytes."""
        return sum(item.nbytes for item in self.items)

    def __iter__(self) -> Iterator[MemoryItem]:
        return iter(self.items)

    def __add__(self, other: "MemoryBreakdown") -> "MemoryBreakdown":
        return MemoryBreakdown(self.items + other.items)


def gib(nbytes: float) -> str:
    """Format a size for people: "1.4 GiB", "320 MiB"."""
    return f"{nbytes / GIB:.1f} GiB" if abs(nbytes) >= GIB else f"{nbytes / MIB:.0f} MiB"


@dataclass(frozen=True)
class Device:
    """A GPU, or the machine's memory; `taken`: bytes used by other programs."""

    kind: Literal["cuda", "cpu"]
    nbytes: int
    taken: int = 0


# -- engine ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineMemory:
    """The memory of one engine on each of its devices, and the capacity of its KV cache."""

    device: Device
    budget: int
    """Bytes that the engine may use, including its cache."""
    engine: MemoryBreakdown
    """Inside the budget, without the cache."""
    beside: MemoryBreakdown
    """Outside the budget."""
    cache: int
    """Bytes left for the cache; negative if the engine does not fit even without one."""
    sequence: int
    """Bytes of cache for a sequence of full length."""
    wanted: int
    """engine.max_batch."""
    length: int
    """engine.max_model_len."""
    utilization: float | None = None
    """gpu_memory_utilization; None unless vLLM runs on a GPU with it."""

    @property
    def at_once(self) -> int:
        """Sequences of full length that the cache holds; more fit while they are shorter than that."""
        return max(0, self.cache // self.sequence)

    @property
    def fits(self) -> bool:
        """Whether the engine starts and holds one sequence of full length."""
        return self.at_once >= 1 and self.overdrawn <= 0

    @property
    def holds_all(self) -> bool:
        """Whether max_batch sequences can all reach full length."""
        return self.fits and self.at_once >= self.wanted

    @property
    def overdrawn(self) -> int:
        """Bytes by which the budget exceeds the device's free memory; 0 or less if it does not."""
        return self.budget + self.device.taken - self.device.nbytes

    @property
    def missing(self) -> int:
        """Bytes missing for one sequence; 0 if it fits."""
        return max(0, self.sequence - self.cache, self.overdrawn)

    @property
    def verdict(self) -> str:
        """Summary in one line: whether the engine fits, and with how many sequences."""
        if not self.fits:
            return (
                f"does not fit: {gib(self.missing)} short of one sequence of {self.length} tokens"
            )
        if self.holds_all:
            return f"fits: {self.at_once} sequences of {self.length} tokens at once"
        return (
            f"fits, but only {self.at_once} of {self.wanted} sequences can reach {self.length} tokens at "
            "once: the others wait or are preempted"
        )


def plan_engine(
    config: EngineConfig, shape: ModelShape, device: Device, *, fingerprint: str = "projection"
) -> EngineMemory:
    """Predict the memory of an engine on each of its devices. engine.tp must be a number.

    `fingerprint`: the run's proof, "" for none.
    """
    if config.type == "vllm" and device.kind == "cuda":
        return _plan_gpu(config, shape, device, fingerprint)
    if config.type == "vllm":
        return _plan_cpu(config, shape, device)
    return _plan_hf(config, shape, device)


def token_bytes(config: EngineConfig, shape: ModelShape) -> int:
    """Compute the cache bytes of one token on one rank, in full-attention layers.

    2 (key and value) x layers x key-value heads x head size x element size.
    """
    full = shape.layers - shape.windowed_layers - shape.linear.layers
    layers = -(-full // config.pp) + (config.draft_head is not None)
    return layers * _layer_token_bytes(config, shape)


def sequence_bytes(config: EngineConfig, shape: ModelShape, length: int, device: Device) -> int:
    """Compute the cache bytes of a sequence of `length` tokens on one rank, in whole blocks.

    A sliding-window layer holds its window plus the tokens of one step, a linear-attention layer its state.
    """
    block = int(config.vllm.get("block_size") or BLOCK_TOKENS[device.kind])
    nbytes = token_bytes(config, shape) * -(-length // block) * block
    if shape.windowed_layers:
        window = min(shape.window - 1 + step_tokens(config, device), length)
        layers = -(-shape.windowed_layers // config.pp)
        nbytes += layers * _layer_token_bytes(config, shape) * (-(-window // block) + 1) * block
    linear = -(-shape.linear.layers // config.pp)
    return nbytes + linear * STATE_BYTES * shape.linear.state // tensor_parallel(config)


def rank_cache_bytes(config: EngineConfig, layers: int, layer_token: int, machine: int) -> int:
    """Choose the cache size of each vLLM rank on a CPU.

    `layer_token`: bytes per token and layer. Enough for max_batch sequences of max_model_len, but at most an
    eighth of the memory over all ranks.
    """
    ranks = tensor_parallel(config) * config.pp * config.replicas
    most = config.max_batch * config.max_model_len * -(-layers // config.pp) * layer_token
    return max(MIN_CPU_CACHE, min(most, machine // CPU_CACHE_SHARE // ranks))


def step_tokens(config: EngineConfig, device: Device) -> int:
    """Choose the largest number of tokens in one step of vLLM on `device` (max_num_batched_tokens)."""
    if given := config.vllm.get("max_num_batched_tokens"):
        return int(given)
    large = device.nbytes >= LARGE_GPU
    usual = CPU_STEP_TOKENS if device.kind == "cpu" else (STEP_TOKENS, LARGE_STEP_TOKENS)[large]
    whole = config.vllm.get("enable_chunked_prefill") is False  # no prompt is read in parts
    return max(usual, config.max_batch, config.max_model_len if whole else 0)


def tensor_parallel_on(config: EngineConfig, gpus: int) -> int:
    """Return engine.tp as a number; `auto` shares the visible `gpus` among the engines."""
    return config.tp if config.tp != "auto" else max(1, gpus // (config.pp * config.replicas))


def tensor_parallel(config: EngineConfig) -> int:
    """Return engine.tp as a number. Raises UsageError for `auto`."""
    if not isinstance(config.tp, int):
        raise UsageError('engine.tp is "auto": set it to the number of GPUs')
    return config.tp


def _layer_token_bytes(config: EngineConfig, shape: ModelShape) -> int:
    heads = max(1, shape.kv_heads // tensor_parallel(config))
    fp8 = str(config.vllm.get("kv_cache_dtype") or "auto").startswith("fp8")
    return 2 * heads * shape.head_dim * (1 if fp8 else ELEMENT[config.dtype])


def _plan_gpu(
    config: EngineConfig, shape: ModelShape, device: Device, fingerprint: str
) -> EngineMemory:
    """Plan a vLLM on each of its GPUs."""
    ranks = tensor_parallel(config) * config.pp
    engine = MemoryBreakdown.of(
        [
            *_step_items(config, shape, device),
            MemoryItem("libraries, workspaces", LIBRARIES, estimate=True),
            MemoryItem("collectives", COLLECTIVES * (ranks > 1), estimate=True),
        ]
    )
    beside = _beside_engine(config, shape, bool(fingerprint))
    fixed = int(config.vllm.get("kv_cache_memory_bytes") or 0)
    utilization = None if fixed else _utilization(config, shape, device, beside)
    budget = engine.total + fixed
    if utilization is not None:
        budget = int(utilization * device.nbytes)
    sequence = sequence_bytes(config, shape, config.max_model_len, device)
    cache = budget - engine.total
    limits = (config.max_batch, config.max_model_len)
    return EngineMemory(device, budget, engine, beside, cache, sequence, *limits, utilization)


def _plan_cpu(config: EngineConfig, shape: ModelShape, device: Device) -> EngineMemory:
    """Plan a vLLM without GPUs, whose ranks share one memory."""
    ranks = tensor_parallel(config) * config.pp
    layer_token = _layer_token_bytes(config, shape)
    fixed = int(config.vllm.get("kv_cache_memory_bytes") or 0)
    most = ranks * (fixed or rank_cache_bytes(config, shape.layers, layer_token, device.nbytes))
    proofs = _proofs(config, shape, config.max_batch * config.max_model_len)
    beside = MemoryBreakdown(
        (
            MemoryItem("proofs", proofs),
            MemoryItem("an incoming state", 2 * shape.parameters),
        )
    )
    processes = MemoryItem("processes", ranks * CPU_PROCESS, estimate=True)
    engine = MemoryBreakdown((*_step_items(config, shape, device), processes))
    sequence = ranks * sequence_bytes(config, shape, config.max_model_len, device)
    cache = min(most, device.nbytes - device.taken - engine.total - beside.total)
    limits = (config.max_batch, config.max_model_len)
    return EngineMemory(device, engine.total + most, engine, beside, cache, sequence, *limits)


def _plan_hf(config: EngineConfig, shape: ModelShape, device: Device) -> EngineMemory:
    """Plan the hf engine on a GPU or a CPU.

    It holds two models during a load, and a dense cache, twice in the worst case: with padded prompts attention
    repeats the key heads. Hidden states are stored, concatenated, and converted to fp32.
    """
    gpu, element = device.kind == "cuda", ELEMENT[config.dtype]
    free = device.nbytes - device.taken - RESERVE * gpu
    items = _step_items(config, shape, device)
    items.append(MemoryItem("the next weights", items[0].nbytes))
    items.append(MemoryItem("process", CONTEXT if gpu else HF_PROCESS, estimate=True))
    engine = MemoryBreakdown(tuple(items))
    token = 4 * shape.kv_width * shape.layers * element + shape.hidden * (2 * element + 4)
    cache, sequence = free - engine.total, config.max_model_len * token
    limits = (config.max_batch, config.max_model_len)
    return EngineMemory(device, free, engine, MemoryBreakdown(), cache, sequence, *limits)


def _step_items(config: EngineConfig, shape: ModelShape, device: Device) -> list[MemoryItem]:
    """List weights and the largest step's memory, on one GPU, or of all ranks without GPUs."""
    element, vllm = ELEMENT[config.dtype], config.type == "vllm"
    tp = tensor_parallel(config) if vllm else 1
    count = shape.rank_parameters(tp, config.pp) if vllm else shape.parameters
    ranks = tp * config.pp if vllm and device.kind == "cpu" else 1
    tokens = step_tokens(config, device)
    mixed = shape.attention_width // tp + 2 * max(1, shape.kv_heads // tp) * shape.head_dim
    dense = 3 * shape.intermediate // tp
    if shape.experts:
        expert = 3 * shape.expert_width // tp + shape.hidden
        dense = max(dense, shape.experts_per_token * expert + 3 * shape.shared_width // tp)
    width = 4 * shape.hidden + max(2 * mixed, dense)  # input, gates, product and output of a layer
    rows = _logit_rows(config) if vllm else config.max_batch
    logits = rows * shape.vocabulary * (element + 8) * (2 if vllm else 3) // 2
    weights = count * element
    if vllm and config.quantization == "fp8":
        tables = shape.embedding * (1 if shape.tied or config.pp > 1 else 2) // tp
        weights = tables * element + count - tables
    items = [
        MemoryItem("weights", ranks * weights),
        MemoryItem("logits", logits, estimate=True),
    ]
    if vllm:
        step = ranks * tokens * width * element
        items.insert(1, MemoryItem("activations", step, estimate=True))
    if vllm and config.draft_head is not None:
        head = shape.layer_parameters() // tp + 2 * shape.hidden**2
        items.append(MemoryItem("draft head", ranks * head * element, estimate=True))
    return items


def _logit_rows(config: EngineConfig) -> int:
    """Return the logit rows of a vLLM step: one per sequence, and one per draft token."""
    return config.max_batch * (1 + config.draft_tokens)


def _beside_engine(config: EngineConfig, shape: ModelShape, proofs: bool) -> MemoryBreakdown:
    """List the memory of a vLLM on a GPU, and of this package beside it, that its budget does not count."""
    update = int(UPDATE_BYTES * CHANGED * shape.parameters)
    return uncounted(config, shape) + MemoryBreakdown.of(
        [
            MemoryItem("proofs", _proofs(config, shape, _logit_rows(config)) if proofs else 0),
            MemoryItem("an incoming update", update),
        ]
    )


def uncounted(config: EngineConfig, shape: ModelShape) -> MemoryBreakdown:
    """List vLLM's memory on a GPU that its budget does not count."""
    layers = -(-shape.layers // config.pp)
    graphs = 0 if config.vllm.get("enforce_eager") else GRAPHS_MODEL + layers * GRAPHS_LAYER
    return MemoryBreakdown.of(
        [
            MemoryItem("CUDA context", UNCOUNTED, estimate=True),
            MemoryItem("CUDA graphs", graphs, estimate=True),
        ]
    )


def _proofs(config: EngineConfig, shape: ModelShape, rows: int) -> int:
    """Compute the bytes of the projection's signs and of `rows` uncollected fingerprints."""
    return (1 + FINGERPRINT_NUMBERS) * (shape.hidden * ELEMENT[config.dtype] + rows * 4)


def _utilization(
    config: EngineConfig, shape: ModelShape, device: Device, beside: MemoryBreakdown
) -> float:
    """Choose gpu_memory_utilization: configured, or vLLM's default.

    Less on a small or shared GPU.
    """
    configured = config.vllm.get("gpu_memory_utilization")
    if configured is not None:
        return float(configured)
    beyond = uncounted(config, shape).total
    free = device.nbytes - device.taken
    if UTILIZATION * device.nbytes + beyond <= free:
        return UTILIZATION
    needed = (
        beside.total if device.taken else beyond
    )  # without room for updates, states are loaded whole
    return max(0, int(100 * (free - needed - RESERVE) / device.nbytes)) / 100


REPLICAS = ((0.25e9, 3), (1.0e9, 2))
"""(Most parameters, replicas on one GPU): a step of a small model is Python on one core, and the GPU waits."""
REPLICA_CORES = 4
"""Cores of the machine for each replica; one keeps up to one and a half of them busy."""
REPLICA_SEQUENCES = 64
"""Fewest sequences of full length that each replica's cache has to hold."""


def replicated(
    config: EngineConfig,
    model_dir: Path,
    gpus: Sequence[GpuMemory] | None = None,
    cores: int | None = None,
) -> EngineConfig:
    """Return `config` with engine.dp as a number, and the memory of each replica if several share a GPU.

    None asks NVML for the visible GPUs, and the system for the cores there are for each GPU of the machine.
    """
    if config.dp != "auto":
        return config
    alone = config.model_copy(update={"dp": 1})
    if (
        config.type != "vllm"
        or config.device == "cpu"
        or config.pp > 1
        or config.tp not in (1, "auto")
    ):
        return alone
    gpus = visible_memory() if gpus is None else gpus
    if len(gpus) != 1 or config.draft_tokens:
        return alone
    if cores is None:
        cores = len(os.sched_getaffinity(0)) // max(1, len(installed()))
    try:
        shape = read_shape(text_config(read_json(model_dir / "config.json")))
    except EngineError:  # start() says so
        return alone
    wanted = next((count for most, count in REPLICAS if shape.parameters <= most), 1)
    plan = plan_engine(
        alone.model_copy(update={"tp": 1}),
        shape,
        Device("cuda", gpus[0].total, gpus[0].total - gpus[0].free),
    )
    for count in range(min(wanted, cores // REPLICA_CORES), 1, -1):
        each = (plan.cache - (count - 1) * (plan.engine.total + plan.beside.total)) // count
        if each >= min(REPLICA_SEQUENCES, config.max_batch) * plan.sequence:
            logger.info("%d engines share a GPU, each with a cache of %s", count, gib(each))
            vllm = {
                **config.vllm,
                "gpu_memory_utilization": UNCHECKED,
                "kv_cache_memory_bytes": each,
            }
            return alone.model_copy(update={"dp": count, "tp": 1, "vllm": vllm})
    return alone


def check_fits(
    config: EngineConfig,
    model_dir: Path,
    gpus: Sequence[GpuMemory] | None = None,
    *,
    fingerprint: str = "",
) -> None:
    """Check that vLLM on `gpus` can hold one sequence of engine.max_model_len; log the plan.

    None asks NVML for the visible GPUs. Raises UsageError only if it certainly does not
    fit. Without GPUs, for another engine or an unknown model, nothing is checked.
    """
    if config.type != "vllm" or config.device == "cpu":
        return
    gpus = visible_memory() if gpus is None else gpus
    if not gpus:
        return
    config = config.model_copy(update={"tp": tensor_parallel_on(config, len(gpus))})
    try:
        shape = read_shape(read_json(model_dir / "config.json"))
    except EngineError as error:
        logger.info("memory is not planned: %s", error)
        return
    smallest = min(gpu.total for gpu in gpus)
    plan = plan_engine(config, shape, Device("cuda", smallest), fingerprint=fingerprint)
    if plan.fits:
        logger.info("memory of %s: %s", gib(smallest), plan.verdict)
        return
    counted = sum(item.nbytes for item in plan.engine if not item.estimate) + plan.sequence
    most = plan.budget
    if "gpu_memory_utilization" not in config.vllm:  # the plan's is smaller only by estimates
        most = max(most, int(UTILIZATION * smallest))
    needed = max(counted, REFUSAL_MARGIN * (plan.budget + plan.missing))
    if plan.overdrawn <= 0 and needed <= most:
        logger.warning("memory of %s: %s, by estimates: trying", gib(smallest), plan.verdict)
        return
    raise UsageError(
        f"{model_dir.name} {plan.verdict} on a GPU of {gib(smallest)}: lower engine.max_model_len, raise "
        "engine.tp, or choose a smaller model (`primerl-node doctor` shows the whole plan)"
    )


# -- trainer ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LearnerMemory:
    """The memory of a learner on each of its GPUs, or in the machine, at its two peaks.

    At the start of backward all saved activations coexist with the head's logits; at its end all gradients
    coexist with one recomputed layer. Within 1.5 % of the measurements in docs/benchmarks.md.
    """

    resident: MemoryBreakdown
    """Allocated between steps, too."""
    backward_start: MemoryBreakdown
    backward_end: MemoryBreakdown

    @property
    def peak(self) -> MemoryBreakdown:
        """The larger of the two peaks, with the resident memory."""
        return self.resident + max(
            self.backward_start, self.backward_end, key=lambda moment: moment.total
        )

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return self.peak.total


def plan_learner(
    config: TrainingConfig,
    shape: ModelShape,
    *,
    gpu: bool,
    ranks: int = 1,
    exports: bool = True,
    kernels: bool | None = None,
) -> LearnerMemory:
    """Predict the memory of a learner sharded over `ranks` GPUs.

    `exports`: it publishes versions. `kernels`: flash-linear-attention is installed there; None: as here.
    """
    half = _is_half(config, gpu)
    element = 2 if half else 4
    tokens = -(-config.seq_len // config.context_parallel)
    kernels = has_linear_kernels(gpu and half, kernels)
    activations, layer = _kept(config, shape, element, gpu=gpu, kernels=kernels)
    rows = min(tokens, config.head_chunk)
    logits = LOGITS_BUFFERS * rows * shape.vocabulary * element
    if not gpu:
        logits += 2 * rows * shape.vocabulary * 4  # not compiled: in fp32 too
    head = 0 if config.lora else (4 + element) * shape.embedding

    def slack(moving: int) -> MemoryItem:
        return MemoryItem("allocator slack", int(ALLOCATOR_SLACK * moving * gpu), estimate=True)

    gradients = 4 * _trained(config, shape) // ranks
    return LearnerMemory(
        _resident(config, shape, gpu, ranks, exports),
        activations
        + MemoryBreakdown.of(
            [
                MemoryItem("logits", logits),
                MemoryItem("hidden states and gradient", 2 * tokens * shape.hidden * element),
                MemoryItem("gradient of the head", head),
                slack(activations.total + logits),
            ]
        ),
        MemoryBreakdown.of([MemoryItem("gradients", gradients)])
        + layer
        + MemoryBreakdown.of([slack(layer.total)]),
    )


LONG_ROW = 65536
"""Most tokens of a row that is longer than training.seq_len."""
ROW_SHARE = 0.3
"""Share of a GPU's memory that a longer row may take where gpu_memory_utilization is 1."""


def row_tokens(config: TrainingConfig, shape: ModelShape, gpu: int, *, ranks: int = 1) -> int:
    """Choose how many tokens a row of training holds on a GPU of that many bytes: seq_len or more.

    Launching a row's kernels takes as long for few tokens as for many.
    """
    share = config.gpu_memory_utilization
    row = LONG_ROW
    while row > config.seq_len:
        plan = plan_learner(
            config.model_copy(update={"seq_len": row}), shape, gpu=True, ranks=ranks
        )
        room = share * gpu if share < 1 else plan.resident.total + ROW_SHARE * gpu
        if plan.total - CONTEXT <= min(room, gpu - CONTEXT):
            return row
        row //= 2
    return config.seq_len


def _is_half(config: TrainingConfig, gpu: bool) -> bool:
    """Return whether a learner computes in bfloat16."""
    return config.dtype == "bfloat16" or (config.dtype == "auto" and gpu)


def has_linear_kernels(half: bool, kernels: bool | None = None) -> bool:
    """Return whether flash-linear-attention computes linear attention.

    `half`: in 16 bits on a GPU, else it does not. `kernels`: it is installed there; None: look for it here,
    with a Triton that it accepts on every GPU.
    """
    if not half or kernels is not None:
        return half and bool(kernels)
    triton = re.match(r"(\d+)\.(\d+)\.(\d+)", _installed("triton"))
    recent = triton is not None and tuple(map(int, triton.groups())) >= LINEAR_TRITON
    return bool(_installed("fla-core")) and (recent or bool(_installed("tilelang")))


def _installed(package: str) -> str:
    """Return the version of a package that is installed here; "" if it is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _kept(
    config: TrainingConfig, shape: ModelShape, element: int, *, gpu: bool, kernels: bool
) -> tuple[MemoryBreakdown, MemoryBreakdown]:
    """List what all layers keep for backward, and what the largest one takes at its end."""
    tokens = -(-config.seq_len // config.context_parallel)
    how = config.activation_checkpointing
    compiled = config.compile if config.compile is not None else gpu
    linear = shape.linear
    full = shape.layers - linear.layers
    attention = tokens * _kept_elements(shape, compiled) * element
    # a recomputed layer with a graph break is not compiled at all
    others = tokens * _unmixed_elements(shape, compiled and how == "none") * element
    module = tokens * linear.kept_bytes(element, kernels=kernels)
    padding = 0 if kernels else PADDING - 1
    again, modules = "a layer", linear.layers
    activations = full * attention + linear.layers * others
    if how != "none":
        again, modules = "a layer, computed again", 0
        width = shape.layers * shape.hidden + (how == "selective") * full * shape.attention_width
        activations = tokens * width * element
    largest = max(attention, others + module) if linear.layers else attention
    mixing = module if largest > attention else 0
    gradients = max(largest // 4, tokens * linear.backward_bytes(element) * kernels)
    return (
        MemoryBreakdown.of(
            [
                MemoryItem("kept for backward", activations),
                MemoryItem("of linear attention", modules * module),
                MemoryItem("of its padding, at most", modules * module * padding, estimate=True),
            ]
        ),
        MemoryBreakdown.of(
            [
                MemoryItem(again, largest - mixing),
                MemoryItem("of linear attention", mixing),
                MemoryItem("of its padding, at most", mixing * padding, estimate=True),
                MemoryItem("its gradients", gradients, estimate=True),
            ]
        ),
    )


def _trained(config: TrainingConfig, shape: ModelShape) -> int:
    """Return the number of trained parameters: all, or the adapters'."""
    lora = config.lora
    return shape.adapter_parameters(lora.rank, lora.target_modules) if lora else shape.parameters


def _reference(config: TrainingConfig, shape: ModelShape) -> int:
    """Return the number of parameters of the reference policy. Raises EngineError."""
    teacher = config.loss.reference
    if teacher is None:
        return shape.parameters
    return read_shape(text_config(read_json(teacher / "config.json"))).parameters


def _resident(
    config: TrainingConfig, shape: ModelShape, gpu: bool, ranks: int, exports: bool
) -> MemoryBreakdown:
    half = _is_half(config, gpu)
    element = 2 if half else 4
    count, trained = shape.parameters, _trained(config, shape)
    weights = MemoryItem("weights", 2 * count if half else 0)
    if ranks > 1:
        tables = shape.embedding * (1 if shape.tied else 2)
        gathered = tables + 2 * shape.layer_parameters()
        gathered = gathered if config.fsdp.reshard_after_forward else count
        weights = MemoryItem("weights, gathered", element * gathered)
    frozen = 4 * count if config.lora is not None and (not half or ranks > 1) else 0
    moments = 0 if config.optimizer_offload and gpu else 8 * trained
    reference = element * _reference(config, shape) if config.loss.loads_reference else 0
    bits = 2 * trained if exports else 0
    return MemoryBreakdown.of(
        [
            weights,
            MemoryItem("masters", (4 * trained + frozen) // ranks),
            MemoryItem("Adam's moments", moments // ranks),
            MemoryItem("bits of the last version", bits // ranks),
            MemoryItem("reference policy", reference // ranks),
            MemoryItem("CUDA context, libraries", CONTEXT * gpu, estimate=True),
        ]
    )


def _kept_elements(shape: ModelShape, compiled: bool) -> int:
    """Return the elements per token that one layer of attention saves for backward.

    Compiled: queries and keys before and after norm and rotation, values, the attention output and its gate.
    Not compiled: also the norms' input in fp32 and normalized value, the gate's activation and the product.
    """
    queries, keys = shape.attention_width, shape.kv_width
    elements = 2 * (queries + keys) + keys + queries + shape.gated * queries
    if not compiled:
        elements += 2 * (queries + keys) + 2 * shape.gated * queries
    return elements + _unmixed_elements(shape, compiled)


def _unmixed_elements(shape: ModelShape, compiled: bool) -> int:
    """Return the elements per token that one layer saves for backward, without attention.

    Compiled: its input, both norms' outputs and the sum between them, gate, up and their product. Not compiled:
    also each norm's input in fp32 and its normalized value, and the gate's activation.
    """
    width = shape.intermediate
    if shape.experts and shape.sparse_layers:
        routed = shape.experts_per_token * (3 * shape.expert_width + shape.hidden)
        width = (routed + 3 * shape.shared_width) // 3
    elements = 4 * shape.hidden + 3 * width
    return elements if compiled else elements + 6 * shape.hidden + width


def smaller_learner(
    config: TrainingConfig, shape: ModelShape, *, gpu: bool, kernels: bool | None = None
) -> str:
    """Return as advice the settings with which a learner takes less memory.

    `kernels`: flash-linear-attention is installed there; None: as here.
    """
    stronger = {"none": '"selective" or "full"', "selective": '"full"'}
    ways = ["training.seq_len lower"]
    if modes := stronger.get(config.activation_checkpointing):
        ways.insert(0, f"training.activation_checkpointing to {modes}")
    advice = f"set {' or '.join(ways)}"
    half = gpu and _is_half(config, gpu)
    if half and shape.linear.layers and not has_linear_kernels(half, kernels):
        advice += ", or install the extra `flash` with torch 2.12.1 or later"
    return advice


def plan_trainer(
    config: RunConfig, shape: ModelShape, *, gpu: bool
) -> tuple[LearnerMemory, MemoryBreakdown]:
    """Predict the learner's memory, and the other items on the trainer's first device."""
    element = ELEMENT[config.engine.dtype]
    network = shape.parameters * element
    evaluates = config.evaluates
    audit_context = 2 * LIBRARIES + UNCOUNTED if config.auditor == "vllm" else CONTEXT
    beside = MemoryBreakdown.of(
        [
            MemoryItem("evaluation's network", network * evaluates),
            MemoryItem("evaluation's CUDA context", CONTEXT * (gpu and evaluates), estimate=True),
            *plan_auditor(config, shape, held_versions(config.rollouts.max_off_policy_steps)),
            MemoryItem("the auditor's CUDA context", audit_context * gpu, estimate=True),
        ]
    )
    ranks = fsdp_ranks(config.training)
    return plan_learner(config.training, shape, gpu=gpu, ranks=ranks), beside


def plan_auditor(config: RunConfig, shape: ModelShape, versions: int) -> list[MemoryItem]:
    """List the memory items of an auditor that holds this many `versions`.

    hf keeps small models, vLLM one set of weights, copies of small ones, and a short cache.
    """
    element = ELEMENT[config.engine.dtype]
    network = shape.parameters * element
    width = 4 * shape.hidden + max(3 * shape.intermediate, 2 * shape.attention_width)
    at_once = AUDIT_TOKENS[config.auditor]
    step = at_once * width * element + 3 * AUDIT_LOGITS
    computing = MemoryItem("an audit's forward pass", step, estimate=True)
    if config.auditor == "vllm":
        copies = min(versions, auditor_copies(network))
        tokens = 2 * at_once + config.training.seq_len
        cache = tokens * 2 * shape.layers * shape.kv_width * element
        scored = shape.sparse_layers * shape.experts * config.training.enable_router_replay
        scores = MemoryItem("the routers' logits", at_once * scored * 4, estimate=True)
        return [
            MemoryItem("the auditor's weights", network),
            *([MemoryItem("the auditor's copies of weights", copies * network)] if copies else []),
            MemoryItem("the auditor's keys and values", cache),
            computing,
            *([scores] if scored else []),
        ]
    count = max(1, min(versions, AUDIT_KEEPS // (2 * shape.parameters)))
    networks = MemoryItem("the auditor's networks", count * network)
    # at most what it would keep in bf16 for backward; measured: 0.5 to 0.85 of that in any dtype
    layer = at_once * shape.linear.kept_bytes(2, kernels=False)
    mixing = MemoryItem("of linear attention, at most", layer, estimate=True)
    return [networks, computing, *([mixing] if layer else [])]


def auditor_copies(network: int) -> int:
    """Return the most copies that an auditing vLLM keeps of the weights of a network of `network` bytes."""
    count = AUDIT_COPIES // max(1, network)
    return count if count >= LEAST_COPIES else 0


def fsdp_ranks(training: TrainingConfig) -> int:
    """Return the number of GPUs that the model is sharded over, by the config; 1 if it is not."""
    if training.backend != "fsdp":
        return 1
    return max(1, (training.fsdp.ranks or 2) * training.fsdp.nodes // training.fsdp.replicas)


def worker_share(config: RunConfig, shape: ModelShape, gpu: int) -> float:
    """Choose gpu_memory_utilization for a worker's vLLM that shares its GPU with the trainer.

    `gpu`: bytes of the GPU. Returns 0.0 if the trainer needs all of it.
    """
    learner, beside = plan_trainer(config, shape, gpu=True)
    beyond = _beside_engine(config.engine, shape, proofs=True)
    left = gpu - learner.total - beside.total - beyond.total - SHARED_RESERVE
    return max(0, int(100 * left / gpu)) / 100


def with_fitting_auditor(config: RunConfig, shape: ModelShape, gpu: int) -> RunConfig:
    """Switch the auditor to hf if vLLM's leaves too little for a worker on the trainer's GPU.

    Not if the auditor is configured explicitly, or numerics are exact.
    """
    replaceable = config.may_replace_auditor and config.auditor == "vllm"
    if not replaceable or worker_share(config, shape, gpu) >= STARVED:
        return config
    embedded = config.verification.model_copy(update={"auditor": "hf"})
    return config.model_copy(update={"verification": embedded})
