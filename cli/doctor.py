"""`primerl-node doctor`: is this machine fit, and what fits into its memory."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .configured import arguments, environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..node.config import RunConfig
    from ..node.gpu_memory import GpuMemory
    from ..node.planning.shape import ModelShape
    from ..node.planning.whole import Asked

GpuGib = Annotated[
    float | None,
    typer.Option(
        "--gpu-memory", min=1, help="Plan for GPUs with so many GiB, not those of this machine."
    ),
]
Gpus = Annotated[
    int | None, typer.Option("--gpus", min=1, help="How many; else those of this machine.")
]
Cpu = Annotated[bool, typer.Option("--cpu", help="Plan for this machine's memory, without a GPU.")]
Shared = Annotated[bool, typer.Option("--shared", help="Trainer and worker use the same GPU.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON.")]


def run(
    ctx: typer.Context,
    gpu_memory: GpuGib = None,
    gpus: Gpus = None,
    cpu: Cpu = False,
    shared: Shared = False,
    as_json: AsJson = False,
) -> int:
    """Check this machine, and plan the memory of a worker and a trainer before anything is loaded.

    The plan needs the model's config.json only. It says how many sequences fit, and where they do not, which
    flags to give. Exit code 1 if something of the machine is a problem, or the worker does not fit.

    \b
    Examples:
      primerl-node doctor                                       this machine alone
      primerl-node doctor --model.name Qwen/Qwen3-4B --engine.max-model-len 8192
      primerl-node doctor @ run.toml --gpu-memory 24 --gpus 2   a machine that is elsewhere
      primerl-node doctor @ run.toml --shared                   trainer and worker on one GPU
    """
    from ..node import doctor
    from ..node.config import RunConfig
    from ..node.gpu_memory import visible
    from ..node.load import load

    variables = environment()
    config = load(RunConfig, arguments(ctx), variables)
    model, why_not = _model(config)
    shape, why_not = _shape(model) if model else (None, why_not)
    needed = 2 * shape.parameters if shape else 0
    checks = doctor.examine(config, variables, needed=needed)
    if model:
        checks.append(doctor.check_model(model, config.training.seq_len))
    asked = None
    if shape is not None:
        there = [] if cpu else visible(variables)
        asked = _asked(config, shape, there, gpu_memory, gpus, cpu=cpu, shared=shared)
    told, fits = _told(asked, why_not, as_json=as_json)
    if as_json:
        found = [asdict(check) for check in checks]
        typer.echo(json.dumps({"machine": found, "plan": told}, indent=2))
    else:
        from .doctor_tables import checks_table
        from .screen import write

        write(checks_table(checks))
        for part in told:
            write(part)
    return 0 if fits and all(check.state != "problem" for check in checks) else 1


def _told(asked: "Asked | None", why_not: str, *, as_json: bool) -> tuple[Any, bool]:
    """What to print of the plan, and whether the worker fits."""
    from ..node.planning.whole import as_json as plan_json
    from ..node.planning.whole import plan_whole

    if asked is None:
        return (None if as_json else ["", f"no plan: {why_not}"]), True
    whole = plan_whole(asked)
    if as_json:
        return plan_json(asked, whole), whole.worker.fits
    from .doctor_tables import plan_parts

    return [*plan_parts(asked, whole), *_headers(asked)], whole.worker.fits


def _asked(
    config: "RunConfig",
    shape: "ModelShape",
    there: "Sequence[GpuMemory]",
    gpu_memory: float | None,
    gpus: int | None,
    *,
    cpu: bool,
    shared: bool,
) -> "Asked":
    from ..node.doctor import machine_memory
    from ..node.planning.bill import GIB
    from ..node.planning.whole import Asked
    from ..node.planning.worker import Device

    if gpu_memory is not None and not cpu:
        device = Device("cuda", int(gpu_memory * GIB))
    elif there:
        smallest = min(there, key=lambda gpu: gpu.free)
        device = Device("cuda", smallest.total, smallest.total - smallest.free)
    else:
        memory = machine_memory()
        device = Device("cpu", memory.total, memory.total - memory.available)
    return Asked(config, shape, device, gpus=gpus or max(1, len(there)), shared=shared)


def _model(config: "RunConfig") -> "tuple[Mapping[str, Any], str]":
    """The config.json of the model that is asked about; empty, and why, if there is none."""
    from ..node.architectures import read_config
    from ..node.errors import EngineError

    if config.model.create is None and "name" not in config.model.model_fields_set:
        return {}, "give a model, --model.name DIR or a hub id, or @ a run's config"
    try:
        return read_config(config.model), ""
    except EngineError as error:
        return {}, str(error)


def _shape(model: "Mapping[str, Any]") -> "tuple[ModelShape | None, str]":
    """Its sizes, or why they cannot be told."""
    from ..node.errors import EngineError
    from ..node.planning.shape import read_shape

    try:
        return read_shape(model), ""
    except EngineError as error:
        return None, str(error)


def _headers(asked: "Asked") -> list[str]:
    """What the weights on disk say, where they say something else than config.json."""
    from pathlib import Path

    from ..node.planning.headers import stored

    directory = Path(asked.config.model.name).expanduser()
    found = stored(directory) if directory.is_dir() else None
    counted = asked.shape.parameters
    if found is None or found.elements in (counted, counted + asked.shape.embedding):
        return []
    return [
        f"note: the files in {directory} hold {found.elements / 1e6:,.1f} M elements, and config.json says "
        f"{counted / 1e6:,.1f} M: plan with what is more"
    ]
