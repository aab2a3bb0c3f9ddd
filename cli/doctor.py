"""`primerl-node doctor`: check this machine, and plan a run's memory on it."""

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..node.ops.strict_json import to_json
from .command import read_config

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..node.app.outlook import Outlook
    from ..node.config.run import RunConfig
    from ..node.memory_plan.memory import Device
    from ..node.memory_plan.shape import ModelShape
    from ..node.reports.doctor import MachineCheck, RunMemory

GpuGib = Annotated[
    float | None,
    typer.Option("--gpu-memory", min=1, help="Plan for GPUs of this many GiB, not this machine's."),
]
Gpus = Annotated[
    int | None, typer.Option("--gpus", min=1, help="Number of GPUs; default: this machine's.")
]
Cpu = Annotated[bool, typer.Option("--cpu", help="Plan for this machine's memory, without a GPU.")]
Ticket = Annotated[
    str | None,
    typer.Option(
        "--ticket",
        "-t",
        help="Look at the run of this ticket, file or https link too, without joining it.",
    ),
]
Shared = Annotated[bool, typer.Option("--shared", help="Trainer and worker use the same GPU.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON.")]
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def run(
    ctx: typer.Context,
    gpu_memory: GpuGib = None,
    gpus: Gpus = None,
    cpu: Cpu = False,
    shared: Shared = False,
    ticket: Ticket = None,
    as_json: AsJson = False,
) -> int:
    """Check this machine, and plan the memory of a worker and a trainer before anything is loaded.

    The plan needs the model's config.json only. It says whether both fit, and by how much. Exit code 1 if
    something of the machine is a problem, or the worker does not fit.

    With --ticket the trainer is asked as well, under a key that is thrown away: is it reached by UDP and TCP,
    where does it see this machine, do the clocks agree, how fast are chunks, would the ticket admit a node,
    does the run's model fit, and what traffic would work bring? Nobody is admitted, no use of a ticket spent.
    Exit code 0 if this machine can work for the run, 3 if the ticket admits nobody, 6 if the trainer is not
    reached, else 1.

    \b
    Examples:
      primerl-node doctor                       this machine alone
      primerl-node doctor --model.name Qwen/Qwen3-4B --engine.max-model-len 8192
      primerl-node doctor @ run.toml --shared   trainer and worker on one GPU
      primerl-node doctor @ run.toml --gpu-memory 24 --gpus 2
                                                a machine that is elsewhere
      primerl-node doctor --ticket run.ticket --engine vllm
                                                before joining a run with this machine
    """
    from ..node.config.run import RunConfig
    from ..node.gpus import torch_without_gpus
    from ..node.reports import doctor

    config = read_config(RunConfig, ctx.args)
    model, shape, why_not = _model(config)
    checks = doctor.examine(config, os.environ, needed=2 * shape.parameters if shape else 0)
    if model is not None:
        checks.append(doctor.check_model(model, config.training.seq_len))
        variables = [environment.chat_template_kwargs for environment in config.mixture]
        checks.extend(doctor.check_template(config.model.name, variables))
        if config.engine.type == "vllm":
            here = gpu_memory is None
            on_cpu = cpu or (here and torch_without_gpus())
            checks.append(doctor.check_served(config.worker_engine, model, cpu=on_cpu))
    plan = None
    if shape is not None:
        device, count = _device(gpu_memory, cpu=cpu)
        plan = doctor.plan_run(config, shape, device, gpus=gpus or count, shared=shared)
    outlook = None
    if ticket is not None:
        outlook = _look(ticket, config, *_device(gpu_memory, cpu=cpu), gpus)
    if as_json:
        figures = None
        if shape and plan:
            figures = {"parameters": shape.parameters, "shared": plan.share, **_figures(plan)}
        answer = {"machine": list(map(asdict, checks)), "plan": figures}
        typer.echo(to_json(answer | ({"run": outlook.figures()} if outlook else {}), indent=2))
    else:
        _show_checks(checks)
        if shape and plan:
            _show_plan(config, shape, plan)
        elif outlook is None:
            typer.echo(f"\nno plan: {why_not}")
        if outlook is not None:
            _show_outlook(outlook)
    if outlook is not None and outlook.exit_code:
        return outlook.exit_code
    fits = plan is None or plan.worker.fits
    return 0 if fits and all(check.state != "problem" for check in checks) else 1


def _look(
    given: str, config: "RunConfig", device: "Device", count: int, gpus: int | None
) -> "Outlook":
    """Look at the run of a ticket from outside. Raises TicketError, NetworkError."""
    import asyncio

    from ..node.app.outlook import judge
    from ..node.app.reach import last_pace, look
    from ..node.errors import NetworkError
    from ..node.p2p.transport import TransportError
    from .command import default_data_dir
    from .join import ticket_text

    try:
        outside = asyncio.run(look(ticket_text(given), config.network))
    except TransportError as error:
        raise NetworkError(str(error)) from error
    pace = last_pace(config.data_dir or default_data_dir())
    return judge(outside, config.engine, device, gpus or count, pace)


def _show_outlook(outlook: "Outlook") -> None:
    from ..node.app.outlook import sentences

    typer.echo()
    _show_checks(outlook.checks, "RUN")
    typer.echo()
    for sentence in sentences(outlook):
        typer.echo(sentence)


def _model(config: "RunConfig") -> "tuple[Mapping[str, Any] | None, ModelShape | None, str]":
    """Read the config.json of the configured model, and its shape; or say why one of them is missing."""
    from ..node.errors import EngineError
    from ..node.memory_plan.shape import read_shape
    from ..node.models.architectures import read_config

    if config.model.create is None and "name" not in config.model.model_fields_set:
        return None, None, "give a model, --model.name DIR or a hub id, or @ a run's config"
    model = None
    try:
        model = read_config(config.model)
        return model, read_shape(model), ""
    except EngineError as error:
        return model, None, str(error)


def _device(gpu_memory: float | None, *, cpu: bool) -> "tuple[Device, int]":
    """Choose the GPU with the least free memory, or this machine's memory; and count the GPUs."""
    from ..node.gpus import machine_memory, visible_memory
    from ..node.memory_plan.memory import GIB, Device

    there = [] if cpu else visible_memory(os.environ)
    count = max(1, len(there))
    if gpu_memory is not None and not cpu:
        return Device("cuda", int(gpu_memory * GIB)), count
    if there:
        smallest = min(there, key=lambda gpu: gpu.free)
        return Device("cuda", smallest.total, smallest.total - smallest.free), count
    memory = machine_memory()
    return Device("cpu", memory.total, memory.total - memory.available), count


def _figures(plan: "RunMemory") -> dict[str, dict[str, Any]]:
    """Say whether worker and trainer fit, with the bytes that decide it."""
    worker, learner = plan.worker, plan.learner
    return {
        "worker": {
            "fits": worker.fits,
            "before_cache": worker.engine.total,
            "cache": worker.cache,
            "sequence": worker.sequence,
            "may_take": worker.budget,
            "sequences_at_once": worker.at_once,
            "device": asdict(worker.device),
        },
        "trainer": {
            "fits": learner.total <= plan.room,
            "needs": learner.total,
            "beside": plan.beside.total,
            "may_take": plan.room,
        },
    }


def _show_checks(checks: "Sequence[MachineCheck]", of: str = "MACHINE") -> None:
    from rich.markup import escape

    from .tables import plain_table, write

    table = plain_table("", of, "", "WHAT TO DO")
    for column in table.columns:
        column.no_wrap = False
    for check in checks:
        state = f"[{STYLES[check.state]}]{check.state}[/]"
        table.add_row(state, check.name, escape(check.found), escape(check.advice))
    write(table)


def _show_plan(config: "RunConfig", shape: "ModelShape", plan: "RunMemory") -> None:
    """Print the memory of the worker and the trainer, and whether they fit."""
    from ..node.memory_plan.memory import gib, smaller_learner

    sort = f"{shape.experts} experts" if shape.experts else "dense"
    known = "" if shape.exact else ", a family that is not known here: counted as a llama"
    typer.echo(
        f"\nmodel: {shape.family}, {shape.parameters / 1e6:,.1f} M parameters "
        f"({gib(2 * shape.parameters)} in bfloat16), {shape.layers} layers, {sort}{known}"
    )
    engine, worker, training = plan.engine, plan.worker, config.training
    figures = _figures(plan)
    of = "" if worker.utilization is None else f" (gpu_memory_utilization {worker.utilization:g})"
    where = "the CPU"
    if worker.device.kind == "cuda":
        where = "each of the GPUs" if engine.pp * int(engine.tp) > 1 else "the GPU"
    typer.echo(
        f"worker: {engine.type}, {engine.dtype}, on {where}: {gib(worker.engine.total)} before its cache, "
        f"{gib(worker.cache)} for its cache ({gib(worker.sequence)} a sequence), may take {gib(worker.budget)} "
        f"of {gib(worker.device.nbytes)}{of}\n  {worker.verdict}"
    )
    trainer = figures["trainer"]
    left = trainer["may_take"] - trainer["needs"]
    smaller = smaller_learner(training, shape, gpu=worker.device.kind == "cuda")
    verdict = (
        f"fits, {gib(left)} left" if left >= 0 else f"does not fit: {gib(-left)} short: {smaller}"
    )
    typer.echo(
        f"trainer: {training.seq_len} tokens a row, recompute {training.activation_checkpointing}: "
        f"{gib(trainer['needs'])} at its worst moment, {gib(trainer['beside'])} beside it, may take "
        f"{gib(trainer['may_take'])}\n  {verdict}"
    )
    if plan.share is not None:
        rest = f"{plan.share:.0%} of it" if plan.share else "nothing"
        typer.echo(f"on one GPU: the trainer leaves {rest} to the worker")
