"""Which GPUs are the trainer's and which the workers', by launch.trainer_gpus and launch.inference_gpus.

Named ones are given first; then numbers of them are counted off from what is left, the trainer's before the
workers'.
"""

from ..config.run import RunConfig
from ..ops.errors import UsageError

Names = tuple[str, ...]


class Choice:
    """The GPUs of the trainer and of the workers: named ones first, counted ones from what is left."""

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
        """Raises UsageError."""
        if self._trainer is None:
            self._trainer = self._trainer_count()
        parts = [one for one in (self._trainer, self._inference) if isinstance(one, tuple)]
        named = {name for part in parts for name in part}
        free = [name for name in self._gpus if name not in named]
        others = self._inference if isinstance(self._inference, tuple) else ()
        trainer = self._take("trainer-gpus", self._trainer, free, others)
        free = [name for name in free if name not in trainer]
        if self._inference is None:
            inference = tuple(free) or self._shared(trainer)
        else:
            inference = self._take("inference-gpus", self._inference, free, trainer)
        if both := set(trainer) & set(inference):
            self._may_share(sorted(both))
        return trainer, inference

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
        taken = self._inference if isinstance(self._inference, int) else len(self._inference)
        return max(1, len(self._gpus) - taken)

    def _take(self, option: str, asked: "int | Names", free: list[str], other: Names) -> Names:
        if isinstance(asked, tuple):
            return asked
        if asked > len(free) and self._launch.share_gpus:
            free = [*free, *reversed(other)]
        if asked > len(free):
            raise UsageError(
                f"--{option} {asked}: {len(self._gpus)} visible, {len(free)} of them free: ask for "
                "fewer, show more in CUDA_VISIBLE_DEVICES, or say --launch.share-gpus to let trainer and "
                "workers have the same ones"
            )
        return tuple(free[:asked])

    def _shared(self, trainer: Names) -> Names:
        if len(self._gpus) > 1 and not self._launch.share_gpus:
            raise UsageError(
                f"the trainer takes all {len(self._gpus)} visible GPUs and leaves none to the workers: "
                "lower --trainer-gpus, or say --launch.share-gpus"
            )
        return trainer

    def _may_share(self, both: list[str]) -> None:
        alone = len(self._gpus) == 1 and not self._launch.inference_gpus
        if not alone and not self._launch.share_gpus:
            raise UsageError(
                f"GPU {','.join(both)} is given to the trainer and to the workers: name others, or say "
                "--launch.share-gpus if that is meant"
            )


def _ask(option: str, text: str, gpus: Names) -> "int | Names | None":
    """What an option asks for: a number, names of visible GPUs, or nothing. Raises UsageError."""
    if not text:
        return None
    if text.isdigit():
        return int(text)
    names = [name for name in text.split(",") if name]
    found = tuple(_find(option, name, gpus) for name in names)
    if len(set(found)) < len(found):
        raise UsageError(f"--{option} {text} names a GPU twice: name each once")
    return found


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
