"""The whole plan of a config on one machine: worker, trainer, and both where they share a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import RunConfig
from ..engine_config import EngineConfig
from ..errors import UsageError
from .bill import Bill, gib
from .fit import Advice, advise
from .shape import ModelShape
from .shared import fsdp_ranks, plan_trainer, worker_share
from .trainer import LearnerPlan
from .trainer_fit import LearnerWay, learner_ways
from .worker import UTILIZATION, Device, WorkerPlan, plan_worker, token_bytes

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
"""Of the table of what else fits."""


@dataclass(frozen=True)
class Asked:
    """What is planned, and for which machine."""

    config: RunConfig
    shape: ModelShape
    device: Device
    """Each of the GPUs, or the machine's memory."""
    gpus: int = 1
    shared: bool = False
    """Trainer and worker use the same GPU."""


@dataclass(frozen=True)
class Grid:
    """Sequences of full length at once, by dtype (rows) and length (columns)."""

    lengths: Sequence[int]
    rows: dict[str, list[int]]


@dataclass(frozen=True)
class Whole:
    """Everything that is told."""

    engine: EngineConfig
    """With numbers in place of `auto`."""
    worker: WorkerPlan
    advice: Advice
    token: int
    """Bytes of the cache for one token."""
    grid: Grid
    learner: LearnerPlan
    companions: Bill
    """What else the trainer keeps on its first device."""
    learner_room: int
    """Bytes that the learner may take."""
    ranks: int
    learner_ways: tuple[LearnerWay, ...] = ()
    share: float | None = None
    """gpu_memory_utilization for a worker beside the trainer; 0.0: nothing is left."""
    notes: tuple[str, ...] = field(default=())

    @property
    def must_be_told(self) -> float | None:
        """The gpu_memory_utilization that the plan needs and that nobody set; None if it is vLLM's own."""
        said = "gpu_memory_utilization" in self.engine.vllm
        found = self.worker.utilization
        return None if said or found in (None, UTILIZATION) else found

    @property
    def learner_fits(self) -> bool:
        """Whether the trainer's side fits its GPUs."""
        return self.learner.total <= self.learner_room


def plan_whole(asked: Asked) -> Whole:
    """The plan. Raises UsageError for a shape of engine that these GPUs cannot have."""
    config, shape, device = asked.config, asked.shape, asked.device
    gpu = device.kind == "cuda"
    engine, notes = _resolved(asked)
    config = config.model_copy(update={"engine": engine})
    learner, companions = plan_trainer(config, shape, gpu=gpu)
    share = None
    worker_device = device
    if asked.shared:
        taken = learner.total + companions.total
        worker_device = Device(device.kind, device.nbytes, device.taken + taken)
        share = worker_share(config, shape, device.nbytes) if gpu else None
    proof = config.verification.fingerprint
    room = device.nbytes - device.taken - companions.total
    fits = learner.total <= room
    return Whole(
        engine=engine,
        worker=plan_worker(engine, shape, worker_device, fingerprint=proof),
        advice=advise(engine, shape, worker_device, fingerprint=proof),
        token=token_bytes(engine, shape),
        grid=_grid(engine, shape, worker_device, proof),
        learner=learner,
        companions=companions,
        learner_room=room,
        ranks=fsdp_ranks(config),
        learner_ways=() if fits else tuple(learner_ways(config.training, shape, room, gpu=gpu)),
        share=share,
        notes=tuple(notes),
    )


def as_json(asked: Asked, whole: Whole) -> dict[str, Any]:
    """For programs."""
    worker, learner, shape = whole.worker, whole.learner, asked.shape
    return {
        "model": {
            "family": shape.family,
            "parameters": shape.parameters,
            "exact": shape.exact,
            "cache_bytes_per_token": whole.token,
        },
        "device": {"kind": asked.device.kind, "bytes": asked.device.nbytes, "gpus": asked.gpus},
        "worker": {
            "engine": whole.engine.model_dump(mode="json"),
            "fits": worker.fits,
            "holds_all": worker.holds_all,
            "verdict": whole.advice.verdict,
            "bytes": _lines(worker.engine),
            "beside": _lines(worker.beside),
            "budget": worker.budget,
            "gpu_memory_utilization": worker.utilization,
            "cache_room": worker.room,
            "sequence_bytes": worker.sequence,
            "sequences_at_once": worker.at_once,
            "missing": worker.missing,
            "instead": [
                {"flags": way.flags, "gpus": way.gpus, "sequences_at_once": way.plan.at_once}
                for way in whole.advice.ways
            ],
        },
        "trainer": {
            "fits": whole.learner_fits,
            "ranks": whole.ranks,
            "bytes": _lines(learner.peak),
            "beside": _lines(whole.companions),
            "total": learner.total + whole.companions.total,
            "instead": [
                {"flags": way.flags, "gpus": way.gpus, "total": way.plan.total}
                for way in whole.learner_ways
            ],
        },
        "shared": None if not asked.shared else {"gpu_memory_utilization": whole.share},
        "notes": list(whole.notes),
    }


def _lines(bill: Bill) -> dict[str, int]:
    return {line.name: line.nbytes for line in bill}


def _resolved(asked: Asked) -> tuple[EngineConfig, list[str]]:
    """The engine as it will be on these GPUs, and what was decided for the operator."""
    engine, gpu = asked.config.engine, asked.device.kind == "cuda"
    notes: list[str] = []
    if gpu and engine.type == "hf":
        notes.append("this is the embedded engine: on a GPU --engine vllm is many times as fast")
    if gpu and engine.dtype == "float32":
        notes.append("--engine.dtype bfloat16 takes half of it: it is what a GPU wants")
    tp = engine.tp
    if not isinstance(tp, int):
        tp = max(1, asked.gpus // (engine.dp * engine.pp)) if gpu else 1
        notes.append(f"--engine.tp auto is {tp} here")
    wanted = tp * engine.pp * engine.dp
    if gpu and wanted > asked.gpus:
        notes.append(f"tp x pp x dp is {wanted}, and here are {asked.gpus} GPUs: this needs more")
    if asked.shape.heads % tp:
        raise UsageError(
            f"{asked.shape.heads} attention heads cannot be shared by {tp} GPUs: set --engine.tp to a divisor"
        )
    longest = asked.shape.longest
    if longest and engine.max_model_len > longest:
        notes.append(
            f"engine.max_model_len {engine.max_model_len} is beyond the model's own {longest} positions"
        )
    return engine.model_copy(update={"tp": tp}), notes


def _grid(engine: EngineConfig, shape: ModelShape, device: Device, proof: str) -> Grid:
    longest = shape.longest or LENGTHS[-1]
    lengths = [one for one in LENGTHS if one <= longest] or [longest]
    rows: dict[str, list[int]] = {}
    for dtype in ("bfloat16", "float32"):
        plans = [
            plan_worker(
                engine.model_copy(update={"dtype": dtype, "max_model_len": length}),
                shape,
                device,
                fingerprint=proof,
            )
            for length in lengths
        ]
        rows[dtype] = [plan.at_once if plan.fits else 0 for plan in plans]
    return Grid(lengths, rows)


def describe(shape: ModelShape) -> str:
    """A model in a line."""
    sort = f"{shape.experts} experts" if shape.experts else "dense"
    exact = "" if shape.exact else ", a family that is not known here: counted as a llama"
    return (
        f"{shape.family}, {shape.parameters / 1e6:,.1f} M parameters ({gib(2 * shape.parameters)} in "
        f"bfloat16), {shape.layers} layers, {sort}{exact}"
    )
