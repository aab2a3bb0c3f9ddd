"""Which process of a run computes on which GPUs of this machine: decided before anything starts.

A pure function of the config and the names of the visible GPUs; what cannot be done is refused with what to
say instead. Without GPUs nothing is decided and nothing of the environment changed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..config.run import LaunchConfig, RunConfig
from ..ops.errors import UsageError
from ..ops.gpus import is_slice
from .gpu_choice import Choice, Names

CPU_WORKERS = 2
MEMORY_BESIDE_TRAINER = 0.4
"""Of a GPU's memory, for all vLLM workers that share it with a trainer, where nothing is known of the model."""
MEMORY_OF_WORKERS = 0.9
"""For all that share one with each other; vLLM's own default for one."""
MEMORY_KEYS = frozenset({"gpu_memory_utilization", "kv_cache_memory_bytes"})


@dataclass(frozen=True)
class Placement:
    """Who gets which GPUs, by the names that CUDA_VISIBLE_DEVICES takes."""

    trainer: Names | None
    """None: there are no GPUs, and every process sees what this one sees."""
    workers: tuple[Names | None, ...]
    ranks: int = 0
    """Of the trainer, which then is training.backend "fsdp"; 0 leaves its config as it is."""
    memory: float | None = None
    """Share of a GPU's memory for each vLLM worker, where it has to share one."""
    notes: tuple[str, ...] = ()
    """What a person should know."""

    def applied(self, config: RunConfig) -> RunConfig:
        """The config that the processes get."""
        training, engine = config.training, config.engine
        if self.ranks:
            fsdp = training.fsdp.model_copy(update={"ranks": self.ranks})
            training = training.model_copy(update={"backend": "fsdp", "fsdp": fsdp})
        if self.memory is not None:
            vllm = {**engine.vllm, "gpu_memory_utilization": self.memory}
            engine = engine.model_copy(update={"vllm": vllm})
        return config.model_copy(update={"training": training, "engine": engine})

    def lines(self) -> list[str]:
        """In words, one line for each process, and the notes."""
        shown = [f"trainer: {_of(self.trainer)}"]
        if changed := self.trainer_arguments():
            shown[0] += f" ({' '.join(changed)})"
        for index, names in enumerate(self.workers, start=1):
            shown.append(f"worker_{index}: {_of(names)}")
        if self.memory is not None:
            shown.append(f"engine.vllm.gpu_memory_utilization of each worker: {self.memory:g}")
        return [*shown, *self.notes]

    def trainer_arguments(self) -> list[str]:
        """What it changes, as flags of `train`."""
        if not self.ranks:
            return []
        return ["--training.backend", "fsdp", "--training.fsdp.ranks", str(self.ranks)]


def place(
    config: RunConfig, gpus: Sequence[str], share: Callable[[RunConfig], float | None]
) -> Placement:
    """Placement of a run on the visible `gpus`, in torch's order.

    `share` is asked only where vLLM has to share a GPU with the trainer: how much of its memory is for the
    workers, None if nobody knows.

    Raises UsageError: too few, unknown or doubly used GPUs, or a trainer that is configured for others.
    """
    launch = config.launch
    learns = config.training.device != "cpu"
    generates = config.engine.device != "cpu" and config.engine.type != "scripted"
    if not gpus or not (learns or generates):
        _none_wanted(launch, gpus)
        workers = CPU_WORKERS if launch.workers is None else launch.workers
        return Placement(None, (None,) * workers)
    _check_devices(config)
    trainer, inference = Choice(config, tuple(gpus), learns, generates).make()
    places, notes = _places(config, inference) if generates else _cpu_workers(config)
    return Placement(
        trainer=trainer,
        workers=places,
        ranks=_ranks(config, trainer),
        memory=_memory(config, trainer, places, share),
        notes=(*notes, *_together(trainer, places)),
    )


def _places(config: RunConfig, inference: Names) -> tuple[tuple[Names | None, ...], list[str]]:
    """The GPUs of each worker, and what is to be said about it."""
    wanted = config.launch.workers
    if wanted == 0:
        return (), []
    size = engine_size(config, len(inference), wanted or 1)
    parts = [inference[at : at + size] for at in range(0, len(inference) - size + 1, size)]
    asked, idle = bool(config.launch.inference_gpus), len(inference) % size
    if not parts:
        raise UsageError(
            f"an engine of {size} GPUs (engine.tp x pp x dp) does not fit {_count(len(inference))} for "
            "inference: lower engine.tp, or give more with --inference-gpus"
        )
    if wanted is not None and wanted < len(parts):
        idle += (len(parts) - wanted) * size
        parts = parts[:wanted]
    if idle and asked:
        raise UsageError(
            f"{_count(len(inference))} for inference in engines of {size} leave {idle} idle: ask for "
            f"--inference-gpus {len(parts) * size}, or change engine.tp, engine.dp or launch.workers"
        )
    workers = wanted or len(parts)
    why = "launch.workers asks for no more" if wanted else f"no engine of {size} fits there"
    notes = [f"idle: {_count(idle)}, {why}"] if idle else []
    return tuple(_joined(parts[index % len(parts)]) for index in range(workers)), notes


def engine_size(config: RunConfig, available: int, workers: int) -> int:
    """GPUs of one worker. `auto` divides what is `available` among the workers."""
    engine = config.engine
    if engine.type != "vllm":
        return 1
    others = engine.pp * engine.dp
    if engine.tp != "auto":
        return engine.tp * others
    return max(1, available // workers // others) * others


def _cpu_workers(config: RunConfig) -> tuple[tuple[Names | None, ...], list[str]]:
    count = CPU_WORKERS if config.launch.workers is None else config.launch.workers
    return ((),) * count, []


def _ranks(config: RunConfig, trainer: Names) -> int:
    """Ranks for a trainer with these GPUs; 0: it needs none. Raises UsageError if configured otherwise."""
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
    share: Callable[[RunConfig], float | None],
) -> float | None:
    if config.engine.type != "vllm" or MEMORY_KEYS & set(config.engine.vllm):
        return None
    used = [name for names in places for name in names or ()]
    if len(set(used)) == len(used) and not set(used) & set(trainer):
        return None
    beside = share(config) or MEMORY_BESIDE_TRAINER if set(used) & set(trainer) else 0.0
    shares = [
        (beside if name in trainer else MEMORY_OF_WORKERS) / used.count(name) for name in set(used)
    ]
    return round(min(shares), 3)


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
    """The names, if one process may have all of them. Raises UsageError."""
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
