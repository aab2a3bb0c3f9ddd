"""`primerl-node doctor`: check this machine, and plan a run's memory on it."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .configured import arguments, environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from ..node.config.run import RunConfig
    from ..node.memory_plan.memory import Device, MemoryBreakdown
    from ..node.memory_plan.shape import ModelShape
    from ..node.ops.doctor import Check, RunMemory

GpuGib = Annotated[
    float | None,
    typer.Option("--gpu-memory", min=1, help="Plan for GPUs of this many GiB, not this machine's."),
]
Gpus = Annotated[int | None, typer.Option("--gpus", min=1, help="How many; else this machine's.")]
Cpu = Annotated[bool, typer.Option("--cpu", help="Plan for this machine's memory, without a GPU.")]
Shared = Annotated[bool, typer.Option("--shared", help="Trainer and worker use the same GPU.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON.")]
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def run(
    ctx: typer.Context,
    gpu_memory: GpuGib = None,
    gpus: Gpus = None,
    cpu: Cpu = False,
    shared: Shared = False,
    as_json: AsJson = False,
) -> int:
    """Check this machine, and plan the memory of a worker and a trainer before anything is loaded.

    The plan needs the model's config.json only. It says whether both fit, by how much, and where they do not,
    which flag helps. Exit code 1 if something of the machine is a problem, or the worker does not fit.

    \b
    Examples:
      primerl-node doctor                                       this machine alone
      primerl-node doctor --model.name Qwen/Qwen3-4B --engine.max-model-len 8192
      primerl-node doctor @ run.toml --gpu-memory 24 --gpus 2   a machine that is elsewhere
      primerl-node doctor @ run.toml --shared                   trainer and worker on one GPU
    """
    from ..node.config.loader import load
    from ..node.config.run import RunConfig
    from ..node.ops import doctor

    variables = environment()
    config = load(RunConfig, arguments(ctx), variables)
    model, shape, why_not = _model(config)
    checks = doctor.examine(config, variables, needed=2 * shape.parameters if shape else 0)
    if model is not None:
        checks.append(doctor.check_model(model, config.training.seq_len))
    plan = None
    if shape is not None:
        device, count = _device(variables, gpu_memory, cpu=cpu)
        plan = doctor.plan_run(config, shape, device, gpus=gpus or count, shared=shared)
    if as_json:
        told = _plan_json(shape, plan) if shape and plan else None
        typer.echo(json.dumps({"machine": list(map(asdict, checks)), "plan": told}, indent=2))
    else:
        _show_checks(checks)
        if shape and plan:
            _show_plan(config, shape, plan)
        else:
            typer.echo(f"\nno plan: {why_not}")
    fits = plan is None or plan.worker.fits
    return 0 if fits and all(check.state != "problem" for check in checks) else 1


def _model(config: "RunConfig") -> "tuple[Mapping[str, Any] | None, ModelShape | None, str]":
    """The config.json of the configured model, its shape, and why one of them is missing."""
    from ..node.memory_plan.shape import read_shape
    from ..node.models.architectures import read_config
    from ..node.ops.errors import EngineError

    if config.model.create is None and "name" not in config.model.model_fields_set:
        return None, None, "give a model, --model.name DIR or a hub id, or @ a run's config"
    model = None
    try:
        model = read_config(config.model)
        return model, read_shape(model), ""
    except EngineError as error:
        return model, None, str(error)


def _device(
    variables: "Mapping[str, str]", gpu_memory: float | None, *, cpu: bool
) -> "tuple[Device, int]":
    """The GPU with the least free memory, or this machine's memory; and how many GPUs there are."""
    from ..node.memory_plan.memory import GIB, Device
    from ..node.ops.gpus import machine_memory, visible_memory

    there = [] if cpu else visible_memory(variables)
    count = max(1, len(there))
    if gpu_memory is not None and not cpu:
        return Device("cuda", int(gpu_memory * GIB)), count
    if there:
        smallest = min(there, key=lambda gpu: gpu.free)
        return Device("cuda", smallest.total, smallest.total - smallest.free), count
    memory = machine_memory()
    return Device("cpu", memory.total, memory.total - memory.available), count


def _plan_json(shape: "ModelShape", plan: "RunMemory") -> dict[str, Any]:
    worker, learner = plan.worker, plan.learner
    names = ("fits", "holds_all", "at_once", "missing", "verdict")
    return {
        "model": {**asdict(shape), "parameters": shape.parameters, "exact": shape.exact},
        "engine": plan.engine.model_dump(mode="json"),
        "worker": {
            **asdict(worker),
            **{name: getattr(worker, name) for name in names},
            "change": plan.worker_flag,
        },
        "trainer": {
            "fits": learner.total <= plan.room,
            "peak": asdict(learner.peak)["items"],
            "beside": asdict(plan.beside)["items"],
            "total": learner.total + plan.beside.total,
            "change": plan.learner_flag,
        },
        "shared": None if plan.share is None else {"gpu_memory_utilization": plan.share},
        "notes": list(plan.notes),
    }


# -- tables ----------------------------------------------------------------------------------------


def _show_checks(checks: "Sequence[Check]") -> None:
    from rich.markup import escape

    from .screen import write

    table = _table("", "MACHINE", "", "WHAT TO DO")
    for check in checks:
        state = f"[{STYLES[check.state]}]{check.state}[/]"
        table.add_row(state, check.name, escape(check.found), escape(check.advice))
    write(table)


def _show_plan(config: "RunConfig", shape: "ModelShape", plan: "RunMemory") -> None:
    """Print what the worker and the trainer take, and whether they fit."""
    from ..node.memory_plan.memory import gib
    from .screen import write

    sort = f"{shape.experts} experts" if shape.experts else "dense"
    known = "" if shape.exact else ", a family that is not known here: counted as a llama"
    typer.echo(
        f"\nmodel: {shape.family}, {shape.parameters / 1e6:,.1f} M parameters "
        f"({gib(2 * shape.parameters)} in bfloat16), {shape.layers} layers, {sort}{known}"
    )
    for note in plan.notes:
        typer.echo(f"note: {note}")
    engine, worker, training = plan.engine, plan.worker, config.training
    several = engine.pp * int(engine.tp) > 1
    on = f"{'each of the GPUs' if several else 'the GPU'}, " * (worker.device.kind == "cuda")
    title = f"WORKER: {engine.type}, {engine.dtype}, on {on}{gib(worker.device.nbytes)}"
    share = "" if worker.utilization is None else f"gpu_memory_utilization {worker.utilization:g}"
    table = _table(f"\n{title}", "MEMORY", "")
    _add(table, worker.engine)
    _add_total(table, "before its cache", worker.engine.total)
    _add_total(table, "others", worker.device.taken)
    _add_total(table, "may take", worker.budget, share)
    each = f"{_amount(worker.sequence)} a sequence of {worker.length} tokens"
    _add_total(table, "left for its cache", worker.cache, each)
    _add(table, worker.beside, "beside: ")
    write(table)
    _show_verdict(worker.verdict, plan.worker_flag)
    how = f"{training.seq_len} tokens a row, recompute {training.activation_checkpointing}"
    table = _table(f"\nTRAINER: {how}", "MEMORY", "")
    _add(table, plan.learner.peak)
    _add(table, plan.beside, "beside: ")
    _add_total(table, "at its worst moment", plan.learner.total + plan.beside.total)
    write(table)
    left = plan.room - plan.learner.total
    fits = f"fits, {gib(left)} left" if left >= 0 else f"does not fit: {gib(-left)} short"
    _show_verdict(fits, plan.learner_flag)
    if plan.share is not None:
        rest = (
            f"leaves {plan.share:.0%} of it to the worker"
            if plan.share
            else "leaves nothing for a worker"
        )
        write(f"\n[bold]on one GPU:[/] the trainer {rest}")


def _show_verdict(verdict: str, flag: str) -> None:
    from .screen import write

    write(f"[bold]{verdict}[/]" + (f"\n  {flag}" if flag else ""))


def _add(table: "Table", items: "MemoryBreakdown", prefix: str = "") -> None:
    from rich.markup import escape

    for item in items:
        words = (item.detail, "estimate" if item.estimate else "")
        detail = ", ".join(filter(None, words))
        table.add_row(escape(prefix + item.name), _amount(item.nbytes), escape(detail))


def _add_total(table: "Table", name: str, nbytes: int, detail: str = "") -> None:
    if nbytes:
        table.add_row(f"[bold]{name}[/]", _amount(nbytes), detail)


def _amount(nbytes: int) -> str:
    from ..node.memory_plan.memory import GIB, gib

    return f"{nbytes / GIB:.2f} GiB" if abs(nbytes) >= GIB // 10 else gib(nbytes)


def _table(first: str, *others: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in (first, *others):
        table.add_column(name, justify="right" if name == "MEMORY" else "left")
    return table
