"""Decide which process of a run gets which GPUs of this machine, before anything starts.

A pure function of the config and the names of the visible GPUs; impossible requests are refused with
a remedy. Without GPUs nothing is decided and nothing of the environment changed.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..config.paths import expand_home
from ..config.run import LaunchConfig, ModelConfig, RunConfig
from ..errors import EngineError, UsageError
from ..gpus import GpuMemory, is_slice, visible_memory
from ..memory_plan.memory import (
    CONTEXT,
    UNCHECKED,
    Device,
    gib,
    plan_engine,
    plan_learner,
    plan_trainer,
    row_tokens,
    smaller_learner,
    with_fitting_auditor,
    worker_share,
)
from ..memory_plan.shape import ModelShape, read_shape
from ..models.architectures import text_config
from ..models.created_model import created_config
from ..models.json_files import read_json

Names = tuple[str, ...]


class GpuSplit:
    """Split GPUs between trainer and workers: named ones first, counted ones from the rest."""

    def __init__(self, config: RunConfig, gpus: Names, learns: bool, generates: bool) -> None:
        self._config = config
        self._launch = config.launch
        self._gpus = gpus
        self._generates = generates and self._launch.workers != 0
        self._trainer = _ask("trainer-gpus", self._launch.trainer_gpus, gpus)
        self._inference = _ask("inference-gpus", self._launch.inference_gpus, gpus)
        if self._trainer is None and not learns:
            self._trainer = 0
        if self._inference is None and not self._generates:
            self._inference = 0

    def make(self) -> tuple[Names, Names]:
        """Choose the GPUs of (trainer, inference). Raises UsageError."""
        if self._trainer is None:
            self._trainer = self._trainer_count()
        parts = [part for part in (self._trainer, self._inference) if isinstance(part, tuple)]
        named = {name for part in parts for name in part}
        free = [name for name in self._gpus if name not in named]
        trainer = self._take("trainer-gpus", self._trainer, free)
        free = [name for name in free if name not in trainer]
        if self._inference is not None:
            return trainer, self._take("inference-gpus", self._inference, free)
        if not free and len(self._gpus) > 1:
            raise UsageError(
                f"the trainer takes all {len(self._gpus)} visible GPUs and leaves none to the workers: "
                "lower --trainer-gpus, or name those to share in --inference-gpus"
            )
        return trainer, tuple(free) or trainer

    def _trainer_count(self) -> int:
        fsdp = self._config.training.backend == "fsdp"
        if fsdp and self._config.training.fsdp.ranks:
            return self._config.training.fsdp.ranks
        if not fsdp or len(self._gpus) == 1:
            return 1
        if self._inference is None:
            raise UsageError(
                f"training.backend is fsdp and {len(self._gpus)} GPUs are visible: say how many the "
                "trainer gets with --trainer-gpus N; the workers get the others"
            )
        inference = self._inference if isinstance(self._inference, int) else len(self._inference)
        return max(1, len(self._gpus) - inference)

    def _take(self, option: str, request: "int | Names", free: list[str]) -> Names:
        if isinstance(request, tuple):
            return request
        if request > len(free):
            raise UsageError(
                f"--{option} {request}: {len(self._gpus)} visible, {len(free)} of them free: ask for "
                "fewer, show more in CUDA_VISIBLE_DEVICES, or name the same ones for both to share"
            )
        return tuple(free[:request])


def _ask(option: str, text: str, gpus: Names) -> "int | Names | None":
    """Read an option: a number, names of visible GPUs, or None. Raises UsageError."""
    if not text:
        return None
    if text.isdigit():
        return int(text)
    names = [name for name in text.split(",") if name]
    devices = tuple(_find(option, name, gpus) for name in names)
    if len(set(devices)) < len(devices):
        raise UsageError(f"--{option} {text} names a GPU twice: name each once")
    return devices


def _find(option: str, name: str, gpus: Names) -> str:
    if name.isdigit() and int(name) < len(gpus):
        return gpus[int(name)]
    matching = [gpu for gpu in gpus if not name.isdigit() and gpu.startswith(name)]
    if len(matching) == 1:
        return matching[0]
    raise UsageError(
        f"--{option}: there is no GPU {name} among the visible ones ({', '.join(gpus)}); numbers count these "
        f"from 0 to {len(gpus) - 1}"
    )


logger = logging.getLogger(__name__)

KEPT_FREE = 0.15
"""Share of the memory left by the trainer that no worker gets: half of it is the trainer's, which may need
more than is planned."""
MOST = 0.7
"""Largest share of a worker's cache: more makes no worker faster, and all plans are estimates."""
LEAST = 0.03


class MemoryShares(NamedTuple):
    """Shares of a GPU's memory for the processes on it."""

    workers: float
    """vLLM's gpu_memory_utilization, of all workers together."""
    trainer: float
    """training.gpu_memory_utilization."""
    embedded: bool = False
    """Whether the embedded engine has to audit, since vLLM would leave the workers too little."""
    gpu: int = 0
    """Bytes of the GPU; 0 if they are not known."""


UNPLANNED = MemoryShares(workers=0.4, trainer=0.5)
"""Shares for a model of unknown shape."""


def planned_shares(
    config: RunConfig, gpus: Callable[[], Sequence[GpuMemory]] = visible_memory
) -> MemoryShares | None:
    """Plan the memory of a GPU that vLLM shares with the trainer of `config`; None if model or GPU are unknown.

    Raises UsageError where the trainer leaves nothing.
    """
    shape = shape_of(config.model)
    there = gpus() if shape is not None else ()
    if shape is None or not there:
        return None
    gpu = min(memory.total for memory in there)
    fitting = with_fitting_auditor(config, shape, gpu)
    left = worker_share(fitting, shape, gpu)
    learner = plan_trainer(fitting, shape, gpu=True)[0].total
    longer = {"seq_len": row_tokens(fitting.training, shape, gpu)}
    rows = plan_learner(fitting.training.model_copy(update=longer), shape, gpu=True).total - learner
    rows = min(rows / gpu, left / 3)
    left -= rows
    workers = min(MOST, (1 - KEPT_FREE) * left)
    if workers < LEAST:
        smaller = smaller_learner(config.training, shape, gpu=True)
        raise UsageError(
            "trainer and vLLM worker do not fit on one GPU (`primerl-node doctor` has the plan): use two, "
            f"a smaller model, or training.optimizer_offload. Or {smaller}. To try it all the same, set "
            "engine.vllm.gpu_memory_utilization"
        )
    # torch counts its own memory only
    own = (learner - CONTEXT) / gpu + rows
    return MemoryShares(
        workers=round(workers, 2),
        trainer=round(own + (left - workers) / 2, 2),
        embedded=fitting.auditor != config.auditor,
        gpu=gpu,
    )


def planned_cache(config: RunConfig, share: float, gpu: int, tp: int) -> int | None:
    """Plan the cache bytes of a vLLM worker that has a `share` of a GPU; None if they are not known.

    vLLM measures the free part of its share while it starts, when the trainer and the auditor start, too: it
    would count their memory as its own.
    """
    shape = shape_of(config.model)
    if shape is None or not gpu:
        return None
    vllm = {**config.engine.vllm, "gpu_memory_utilization": share}
    engine = config.engine.model_copy(update={"vllm": vllm, "tp": tp})
    cache = plan_engine(engine, shape, Device("cuda", gpu)).cache
    return cache if cache > 0 else None


def shape_of(model: ModelConfig) -> ModelShape | None:
    """Read the shape of a model that is made here or is in a directory; None for others."""
    try:
        if model.create is not None:
            return read_shape(created_config(model.create))
        directory = expand_home(model.name)
        if not directory.is_dir():
            return None
        return read_shape(text_config(read_json(directory / "config.json")))
    except EngineError as error:
        logger.info("memory is not planned: %s", error)
        return None


CPU_WORKERS = 2
MEMORY_OF_WORKERS = 0.9
"""Share of a GPU's memory for all vLLM workers that share it."""
MEMORY_KEYS = frozenset({"gpu_memory_utilization", "kv_cache_memory_bytes"})


@dataclass(frozen=True)
class GpuPlacement:
    """The GPUs of each process, by the names that CUDA_VISIBLE_DEVICES takes."""

    trainer: Names | None
    """None: there are no GPUs, and every process inherits CUDA_VISIBLE_DEVICES."""
    workers: tuple[Names | None, ...]
    ranks: int = 0
    """Ranks of an fsdp trainer; 0 leaves its config as it is."""
    memory: float | None = None
    """Share of a GPU's memory for each vLLM worker, where it has to share one."""
    cache: int | None = None
    """Bytes of each vLLM worker's cache, in place of its share, where that is planned."""
    trainer_memory: float | None = None
    """The same for the trainer, where it has to share one with workers."""
    embedded: bool = False
    """See MemoryShares."""
    notes: tuple[str, ...] = ()
    """Remarks for the operator."""

    def applied(self, config: RunConfig) -> RunConfig:
        """Apply the placement to a config."""
        training, engine = config.training, config.engine
        if self.ranks:
            fsdp = training.fsdp.model_copy(update={"ranks": self.ranks})
            training = training.model_copy(update={"backend": "fsdp", "fsdp": fsdp})
        if self.trainer_memory is not None:
            limit = {"gpu_memory_utilization": self.trainer_memory}
            training = training.model_copy(update=limit)
        verification = config.verification
        if self.embedded:
            verification = verification.model_copy(update={"auditor": "hf"})
        if self.memory is not None:
            vllm = {**engine.vllm, "gpu_memory_utilization": self.memory}
            if self.cache is not None:
                vllm |= {"gpu_memory_utilization": UNCHECKED, "kv_cache_memory_bytes": self.cache}
            engine = engine.model_copy(update={"vllm": vllm})
        changed = {"training": training, "engine": engine, "verification": verification}
        return config.model_copy(update=changed)

    def lines(self) -> list[str]:
        """Describe it: one line for each process, and the notes."""
        shown = [f"trainer: {_of(self.trainer)}"]
        if changed := self.trainer_arguments():
            shown[0] += f" ({' '.join(changed)})"
        for index, names in enumerate(self.workers, start=1):
            shown.append(f"worker_{index}: {_of(names)}")
        if self.memory is not None:
            shown.append(
                f"engine.vllm.gpu_memory_utilization of each worker: {self.memory:g}"
                if self.cache is None
                else f"engine.vllm.kv_cache_memory_bytes of each worker: {gib(self.cache)}"
            )
        return [*shown, *self.notes]

    def trainer_arguments(self) -> list[str]:
        """Return the changes as flags of `train`."""
        flags: list[str] = []
        if self.ranks:
            flags += ["--training.backend", "fsdp", "--training.fsdp.ranks", str(self.ranks)]
        if self.trainer_memory is not None:
            flags += ["--training.gpu-memory-utilization", f"{self.trainer_memory:g}"]
        if self.embedded:
            flags += ["--verification.auditor", "hf"]
        return flags


def place(
    config: RunConfig,
    gpus: Sequence[str],
    shares: Callable[[RunConfig], MemoryShares | None] = planned_shares,
) -> GpuPlacement:
    """Place a run on the visible `gpus`, in torch's order.

    `shares` plans the memory of a GPU, None where that is not known; it is called only where vLLM has to share
    one with the trainer.

    Raises UsageError: too few, unknown or doubly used GPUs, or a trainer that is configured for others.
    """
    launch = config.launch
    learns = config.training.device != "cpu"
    generates = config.engine.device != "cpu"
    cpu_workers = CPU_WORKERS if launch.workers is None else launch.workers
    if not gpus or not (learns or generates):
        _none_wanted(launch, gpus)
        return GpuPlacement(None, (None,) * cpu_workers)
    _check_devices(config)
    trainer, inference = GpuSplit(config, tuple(gpus), learns, generates).make()
    places, notes = _places(config, inference) if generates else (((),) * cpu_workers, [])
    memory, beside = _memory(config, trainer, places, shares)
    cache = None
    if memory is not None and beside is not None:
        tp = max(len(names or ()) for names in places) // (
            config.engine.pp * config.engine.replicas
        )
        cache = planned_cache(config, memory, beside.gpu, tp)
    has_limit = config.training.gpu_memory_utilization < 1
    return GpuPlacement(
        trainer=trainer,
        workers=places,
        ranks=_ranks(config, trainer),
        memory=memory,
        cache=cache,
        trainer_memory=None if beside is None or has_limit else beside.trainer,
        embedded=beside is not None and beside.embedded,
        notes=(*notes, *_together(trainer, places)),
    )


def _places(config: RunConfig, inference: Names) -> tuple[tuple[Names | None, ...], list[str]]:
    """Choose the GPUs of each worker; return notes, too."""
    wanted = config.launch.workers
    if wanted == 0:
        return (), []
    size = engine_size(config, len(inference), wanted or 1)
    parts = [inference[at : at + size] for at in range(0, len(inference) - size + 1, size)]
    explicit, idle = bool(config.launch.inference_gpus), len(inference) % size
    if not parts:
        raise UsageError(
            f"an engine of {size} GPUs (engine.tp x pp x dp) does not fit {_count(len(inference))} for "
            "inference: lower engine.tp, or give more with --inference-gpus"
        )
    if wanted is not None and wanted < len(parts):
        idle += (len(parts) - wanted) * size
        parts = parts[:wanted]
    if idle and explicit:
        raise UsageError(
            f"{_count(len(inference))} for inference in engines of {size} leave {idle} idle: ask for "
            f"--inference-gpus {len(parts) * size}, or change engine.tp, engine.dp or launch.workers"
        )
    workers = wanted or len(parts)
    why = "launch.workers asks for no more" if wanted else f"no engine of {size} fits there"
    notes = [f"idle: {_count(idle)}, {why}"] if idle else []
    return tuple(_joined(parts[index % len(parts)]) for index in range(workers)), notes


def engine_size(config: RunConfig, available: int, workers: int) -> int:
    """Count the GPUs of one worker. `auto` divides the `available` ones among the workers."""
    engine = config.engine
    if engine.type != "vllm":
        return 1
    others = engine.pp * engine.replicas
    if engine.tp != "auto":
        return engine.tp * others
    return max(1, available // workers // others) * others


def _ranks(config: RunConfig, trainer: Names) -> int:
    """Count the ranks of a trainer with these GPUs; 0: none. Raises UsageError if configured otherwise."""
    training, count = config.training, len(trainer)
    if count == 0:
        return 0
    if training.backend != "fsdp" and count == 1:
        return 0
    if training.backend == "local":
        raise UsageError(
            f'the trainer gets {count} GPUs, and training.backend "local" uses one: leave it out, or '
            'set it to "fsdp"'
        )
    if training.fsdp.ranks not in (0, count):
        raise UsageError(
            f"training.fsdp.ranks is {training.fsdp.ranks}, but the trainer gets {_count(count)}: leave it "
            f"out, or ask for --trainer-gpus {training.fsdp.ranks}"
        )
    _joined(trainer)
    return count


def _memory(
    config: RunConfig,
    trainer: Names,
    places: Sequence[Names | None],
    shares: Callable[[RunConfig], MemoryShares | None],
) -> tuple[float | None, MemoryShares | None]:
    """Divide the memory of shared GPUs among the workers and the trainer."""
    if config.engine.type != "vllm" or MEMORY_KEYS & set(config.engine.vllm):
        return None, None
    used = [name for names in places for name in names or ()]
    if not set(used) & set(trainer):
        crowd = max(map(used.count, used), default=1)
        return (round(MEMORY_OF_WORKERS / crowd, 3) if crowd > 1 else None), None
    both = shares(config) or UNPLANNED
    each = min(
        (both.workers if name in trainer else MEMORY_OF_WORKERS) / used.count(name)
        for name in set(used)
    )
    return round(each, 3), both


def _together(trainer: Names, places: Sequence[Names | None]) -> list[str]:
    used = [name for names in places for name in names or ()]
    both = sorted(set(used) & set(trainer))
    if both:
        return [
            f"trainer and workers share {_of(tuple(both))}: each is slower than with one of its own"
        ]
    if len(set(used)) < len(used):
        return ["several workers share a GPU: fewer of them are as fast and need less memory"]
    return []


def _none_wanted(launch: LaunchConfig, gpus: Sequence[str]) -> None:
    for option, text in (
        ("trainer-gpus", launch.trainer_gpus),
        ("inference-gpus", launch.inference_gpus),
        ("launch.mps", "true" if launch.mps else ""),
    ):
        if text not in ("", "0"):
            reason = (
                "training.device and engine say that the run needs none"
                if gpus
                else "no GPU can be used here (look at `nvidia-smi -L` and CUDA_VISIBLE_DEVICES; a torch "
                "whose version ends in +cpu uses none)"
            )
            raise UsageError(f"--{option} {text}: {reason}; leave it out to run on the CPU")


def _check_devices(config: RunConfig) -> None:
    for key, device in (
        ("training.device", config.training.device),
        ("engine.device", config.engine.device),
    ):
        if device.partition(":")[2] not in ("", "0"):
            raise UsageError(
                f"{key} is {device}, but every process sees its own GPUs only: set it to auto, and choose "
                "with --trainer-gpus and --inference-gpus"
            )


def _joined(names: Names) -> Names:
    """Return the names if one process may have all of them. Raises UsageError."""
    if len(names) > 1 and any(map(is_slice, names)):
        raise UsageError(
            f"CUDA does not join MIG slices ({', '.join(names)}): give the trainer one, and each worker "
            "one (engine.tp, pp and dp 1)"
        )
    return names


def _of(names: Names | None) -> str:
    if not names:
        return "CPU"
    return f"GPU{'s' if len(names) > 1 else ''} {','.join(names)}"


def _count(number: int) -> str:
    return f"{number} GPU{'' if number == 1 else 's'}"
