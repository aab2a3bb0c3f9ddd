"""Check this machine for what a node needs, and plan the memory of a worker and a trainer on it.

Nothing heavy is imported and CUDA is never started: the builds of torch and vLLM are read from their files.
Only a key of config.json whose effect is not known makes training/parity.py compute a small model.
Each check judges its arguments, so that tests can pass them; examine() collects them from the machine.
"""

import os
import platform
import resource
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .. import gpus
from ..config.engine import EXACT_NEEDS_VLLM, EngineConfig
from ..config.evaluation import EvalConfig
from ..config.paths import expand_home, home_directory
from ..config.run import FINGERPRINT, JoinConfig, ModelConfig, NodeConfig, RunConfig
from ..config.serving import ApiConfig
from ..environments.allowed import find_package
from ..environments.sandbox import OWN_WORD, choose
from ..errors import EngineError, UsageError
from ..gpus import GpuMemory, HostMemory, TorchBuild, machine_memory, torch_build
from ..inference.numerics import engine_class
from ..inference.vllm_arguments import check_family, check_release, installed_release
from ..memory_plan.memory import (
    GIB,
    MIB,
    Device,
    EngineMemory,
    LearnerMemory,
    MemoryBreakdown,
    gib,
    plan_engine,
    plan_trainer,
    tensor_parallel_on,
    with_fitting_auditor,
    worker_share,
)
from ..memory_plan.shape import ModelShape
from ..models.architectures import keys_without_effect, read_config
from ..models.json_files import read_json
from ..models.text_models import reads_images
from ..p2p import libp2p
from ..training import parity

State = Literal["ok", "warning", "problem"]

OLDEST_PYTHON = (3, 11)
FILES_WANTED, FILES_NEEDED = 4096, 1024  # a busy trainer's streams, chunks and up to 256 peers
DISK_WANTED, DISK_NEEDED = 10 * GIB, 1 * GIB
SHARED_WANTED = 256 * MIB
BUSY_LOAD_PER_CORE = 1.5
FREE_GPU_SHARE = 0.85  # with less, other programs use the GPU
CLOCK_TOLERANCE_S = 3600.0  # before the installation of this file


@dataclass(frozen=True)
class MachineCheck:
    """The result of one check, and what to do about it."""

    name: str
    state: State
    found: str
    advice: str = ""


def examine(
    config: NodeConfig, environ: Mapping[str, str], *, needed: int = 0
) -> list[MachineCheck]:
    """Run every check of this machine. `needed`: bytes of a state of the model, if there is one."""
    devices = gpus.visible_memory(environ)
    home = config.data_dir or home_directory() / ".primerl"
    if isinstance(config, RunConfig) and config.model_fields_set and config.data_dir is None:
        home = config.run_dir
    shared = Path("/dev/shm")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [
        check_python(sys.version_info[:3]),
        check_torch(torch_build(), gpus=len(devices)),
        check_vllm(installed_release(), wanted=config.engine.type == "vllm"),
        *check_exact_numerics(config),
        *check_environments(config),
        *check_sandbox(config),
        check_libp2p(libp2p.is_installed(), wanted=config.network.libp2p),
        *check_gpus(devices, environ.get("CUDA_VISIBLE_DEVICES")),
        check_cpu(len(os.sched_getaffinity(0)), os.getloadavg()[0]),
        check_memory(machine_memory()),
        check_shared_memory(shutil.disk_usage(shared).free if shared.is_dir() else 0, needed),
        check_disk(home, shutil.disk_usage(existing(home)).free, needed),
        check_open_files(soft),
        *check_ports(config),
        check_clock(time.time(), Path(__file__).stat().st_mtime),
    ]


# -- programs --------------------------------------------------------------------------------------


def check_python(version: Sequence[int]) -> MachineCheck:
    """Check the version of this interpreter."""
    text = f"{'.'.join(map(str, version))} on {platform.system()} {platform.machine()}"
    if tuple(version[:2]) < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        return MachineCheck("Python", "problem", text, f"use {wanted} or newer")
    return MachineCheck("Python", "ok", text)


def check_torch(build: TorchBuild | None, *, gpus: int) -> MachineCheck:
    """Check that torch is installed and can use the GPUs."""
    if build is None:
        advice = "pip install 'primerl-node[run]': a trainer or a worker computes with it"
        return MachineCheck("torch", "problem", "not installed", advice)
    text = f"{build.version}, " + (f"CUDA {build.cuda}" if build.cuda else "CPU only")
    if gpus and not build.cuda:
        advice = "install a CUDA build of torch, else the GPUs stay idle"
        return MachineCheck("torch", "problem", text, advice)
    return MachineCheck("torch", "ok", text)


def check_vllm(release: str, *, wanted: bool) -> MachineCheck:
    """Check that vLLM is installed in a supported release."""
    if not release:
        if not wanted:
            return MachineCheck("vLLM", "ok", "not installed, and not asked for")
        advice = "pip install 'primerl-node[vllm]', or use --engine hf"
        return MachineCheck("vLLM", "problem", "not installed", advice)
    try:
        check_release(release)
    except EngineError as error:
        return MachineCheck("vLLM", "problem" if wanted else "warning", release, str(error))
    return MachineCheck("vLLM", "ok", release)


def check_exact_numerics(config: NodeConfig, release: str | None = None) -> Iterator[MachineCheck]:
    """Describe the engines that a run with exact numerics needs; nothing for another run.

    `release` of vLLM: by default the one that is installed here.
    """
    if not isinstance(config, RunConfig) or config.verification.numerics != "exact":
        return
    version = installed_release() if release is None else release
    if not version:
        yield MachineCheck("exact numerics", "problem", "no vLLM", EXACT_NEEDS_VLLM)
        return
    own = engine_class(config.engine, version)
    yield MachineCheck("exact numerics", "ok", f"every worker and validator has to be {own}")


def check_environments(config: NodeConfig) -> Iterator[MachineCheck]:
    """Check that each environment that a run trains on is installed; its code is not run."""
    for environment in config.mixture if isinstance(config, RunConfig) else ():
        name = f"environment {environment.name}"
        try:
            package = find_package(environment.id)
        except UsageError as error:
            yield MachineCheck(name, "problem", "not installed", str(error))
        else:
            yield MachineCheck(name, "ok", str(package) if package else "bundled")


def check_sandbox(config: NodeConfig | EvalConfig) -> Iterator[MachineCheck]:
    """Start the sandbox of environments, and report what it confines and its gaps."""
    if not isinstance(config, RunConfig | JoinConfig | EvalConfig):
        return
    try:
        sandbox = choose(config.sandbox)
    except UsageError as error:
        yield MachineCheck("sandbox", "problem", config.sandbox.type, str(error))
        return
    advice = (
        sandbox.missing
        and f"{sandbox.missing}; until then only bundled environments run, unless {OWN_WORD}"
    )
    yield MachineCheck("sandbox", "warning" if sandbox.missing else "ok", str(sandbox), advice)


def check_model(config: Mapping[str, Any], longest: int) -> MachineCheck:
    """Check that the trainer can train the model of this config.json."""
    text = f"{config.get('model_type', 'no model_type')}, sequences of up to {longest} tokens"
    if reason := parity.fault(config, longest):
        return MachineCheck("model", "problem", f"{text}: cannot be trained", reason)
    note = "".join(f"; {line}" for line in _without_effect(config))
    return MachineCheck("model", "ok", f"{text}: can be trained{note}")


def check_trainable(model: ModelConfig, longest: int) -> list[str]:
    """Check that a model can be trained exactly on sequences of up to `longest` tokens.

    Returns remarks, at most one line. Raises UsageError if it cannot, EngineError for an
    unreadable directory. If the hub does not answer, the check is skipped: it is repeated once the model is
    there.
    """
    if model.create is None and "name" not in model.model_fields_set:
        return []  # the config names no model
    directory = expand_home(model.name)
    try:
        config = read_config(model)
        given = model.create is None and directory.is_dir()
        reason = parity.fault(config, longest)
        if not reason and given and not reads_images(read_json(directory / "config.json")):
            reason = parity.checkpoint_fault(directory)
    except EngineError:
        if directory.is_dir():
            raise
        return []
    if reason:
        raise UsageError(f"model {model.name!r} cannot be trained: {reason}")
    return _without_effect(config)


def _without_effect(config: Mapping[str, Any]) -> list[str]:
    keys = keys_without_effect(config)
    return [f"config.json: transformers does not read {', '.join(keys)}"] if keys else []


def check_template(
    model: str, variables: Iterable[Mapping[str, bool | int | float | str]] = ({},)
) -> Iterator[MachineCheck]:
    """Render every part of a conversation by the chat template of a model's directory, with each `variables`.

    A hub id, or a directory without a tokenizer, is not checked.
    """
    directory = expand_home(model)
    if not (directory / "tokenizer.json").is_file():
        return
    from ..environments.chat import ChatFormat, dated
    from ..environments.environment import EnvironmentFailed
    from ..storage.run_files import today

    checks: list[MachineCheck] = []
    for given in variables:
        try:
            chat = ChatFormat.load(directory, defaults=dated(given, directory, today()))
            lost = chat.left_out()
        except EnvironmentFailed as error:
            checks.append(MachineCheck("chat template", "problem", "unusable", str(error)))
            continue
        calls = chat.call_form and f", tool calls as {chat.call_form}"
        shown = f"leaves out or refuses {', '.join(lost)}" if lost else "shows all parts"
        checks.append(MachineCheck("chat template", "ok", shown + calls))
    yield from dict.fromkeys(checks)


def check_served(engine: EngineConfig, model: Mapping[str, Any], *, cpu: bool) -> MachineCheck:
    """Check that vLLM, configured as `engine`, serves the model of this config.json."""
    text = str(model.get("model_type", "no model_type"))
    try:
        check_family(engine, model, cpu=cpu)
    except EngineError as error:
        return MachineCheck("engine", "problem", f"{text}: not served by vLLM here", str(error))
    return MachineCheck("engine", "ok", f"{text}: served by vLLM")


def check_libp2p(installed: bool, *, wanted: bool) -> MachineCheck:
    """Check that libp2p is installed; a node works without it."""
    if installed:
        return MachineCheck("libp2p", "ok", "installed")
    if not wanted:
        return MachineCheck("libp2p", "ok", "not installed, and switched off")
    advice = f"{libp2p.INSTALL}: until then peers are found through the trainer alone"
    return MachineCheck("libp2p", "warning", "not installed", advice)


# -- machine ---------------------------------------------------------------------------------------


def check_gpus(devices: Sequence[GpuMemory], listed: str | None) -> Iterator[MachineCheck]:
    """Check each GPU that this process may use for other users."""
    if not devices:
        hidden = f" (CUDA_VISIBLE_DEVICES is {listed!r})" if listed is not None else ""
        yield MachineCheck("GPU", "ok", f"none{hidden}: everything runs on the CPU")
    for gpu in devices:
        text = f"{gpu.name}, {gib(gpu.total)}, {gib(gpu.free)} free, driver {gpu.driver}"
        if gpu.free < FREE_GPU_SHARE * gpu.total:
            advice = (
                "other programs use it: vLLM starts only if engine.vllm.gpu_memory_utilization is below "
                f"{int(100 * gpu.free / gpu.total) / 100:g}"
            )
            yield MachineCheck(f"GPU {gpu.number}", "warning", text, advice)
        else:
            yield MachineCheck(f"GPU {gpu.number}", "ok", text)


def check_cpu(cores: int, load: float) -> MachineCheck:
    """Check that the cores are not busy with other programs."""
    text = f"{cores} cores, load {load:.1f}"
    if load > BUSY_LOAD_PER_CORE * cores:
        return MachineCheck(
            "CPU", "warning", text, "other programs are busy here: measurements will be slow"
        )
    return MachineCheck("CPU", "ok", text)


def check_memory(memory: HostMemory) -> MachineCheck:
    """Check the available memory of the machine."""
    text = f"{gib(memory.total)}, {gib(memory.available)} available"
    if memory.available < 2 * GIB:
        return MachineCheck(
            "memory", "warning", text, "close what else runs: a node needs some GiB"
        )
    return MachineCheck("memory", "ok", text)


def check_shared_memory(free: int, needed: int = 0) -> MachineCheck:
    """Check that /dev/shm has room for twice the weights, which are passed on there."""
    text = f"{gib(free)} free in /dev/shm"
    if free <= max(SHARED_WANTED, 2 * needed):
        wanted = gib(max(SHARED_WANTED, 2 * needed))
        advice = f"weights go through the disk: give a container --shm-size of {wanted} or more"
        return MachineCheck("shared memory", "warning", text, advice)
    return MachineCheck("shared memory", "ok", text)


def check_disk(home: Path, free: int, needed: int = 0) -> MachineCheck:
    """Check the room for chunks, snapshots and checkpoints at data_dir."""
    text = f"{gib(free)} free at {home}"
    wanted = max(DISK_WANTED, 4 * needed)
    if free < max(DISK_NEEDED, needed):
        return MachineCheck(
            "disk", "problem", text, f"make room, {gib(wanted)}, or set --data-dir elsewhere"
        )
    if free < wanted:
        advice = f"a run keeps versions and checkpoints: {gib(wanted)} or more is comfortable"
        return MachineCheck("disk", "warning", text, advice)
    return MachineCheck("disk", "ok", text)


def existing(path: Path) -> Path:
    """Return `path`, or the nearest directory above it that exists."""
    return next(directory for directory in (path, *path.absolute().parents) if directory.is_dir())


def check_open_files(soft: int) -> MachineCheck:
    """Check the limit of open files and sockets."""
    text = "no limit" if soft == resource.RLIM_INFINITY else str(soft)
    if soft != resource.RLIM_INFINITY and soft < FILES_WANTED:
        state: State = "problem" if soft < FILES_NEEDED else "warning"
        return MachineCheck("open files", state, text, f"ulimit -n {16 * FILES_WANTED}")
    return MachineCheck("open files", "ok", text)


def check_ports(config: NodeConfig) -> Iterator[MachineCheck]:
    """Check that the configured ports can be bound."""
    network = config.network
    wanted = [("UDP port", socket.SOCK_DGRAM)]
    if network.libp2p:
        wanted.append(("TCP port", socket.SOCK_STREAM))
    for name, kind in wanted:
        text = f"{network.host}:{network.port or 'any'}"
        if fault := bind_fault(network.host, network.port, kind):
            advice = "a node may run already; else choose another --network.port, or --network.host"
            yield MachineCheck(name, "problem", f"{text}: {fault}", advice)
        else:
            yield MachineCheck(name, "ok", f"{text} can be bound")


def check_api_port(api: ApiConfig) -> MachineCheck:
    """Check that the port of an HTTP server can be bound."""
    text = f"{api.host}:{api.port or 'any'}"
    if fault := bind_fault(api.host, api.port, socket.SOCK_STREAM):
        return MachineCheck(
            "API port", "problem", f"{text}: {fault}", "choose another --api.port or --api.host"
        )
    return MachineCheck("API port", "ok", f"{text} can be bound")


def bind_fault(host: str, port: int, kind: socket.SocketKind) -> str:
    """Try to bind a port; return the reason if that fails, else ""."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, kind) as probe:
            if kind == socket.SOCK_STREAM:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


def check_clock(now: float, installed: float) -> MachineCheck:
    """Check the clock: with hours of error, tickets and leases are refused."""
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < installed - CLOCK_TOLERANCE_S:
        advice = "it is earlier than this program was installed: set it, or switch NTP on"
        return MachineCheck("clock", "problem", text, advice)
    return MachineCheck("clock", "ok", text)


# -- memory ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunMemory:
    """The memory of a run's worker and trainer on one machine."""

    engine: EngineConfig
    """With a number in place of tp = "auto"."""
    worker: EngineMemory
    learner: LearnerMemory
    beside: MemoryBreakdown
    """Other memory of the trainer, on its first device."""
    room: int
    """Bytes that the learner may take."""
    share: float | None
    """gpu_memory_utilization that the trainer leaves to a worker on its GPU; 0.0: nothing."""


def plan_run(
    config: RunConfig, shape: ModelShape, device: Device, *, gpus: int = 1, shared: bool = False
) -> RunMemory:
    """Plan a run on `gpus` devices; `shared`: trainer and worker use the same one.

    Raises UsageError for an engine that these GPUs cannot have.
    """
    gpu = device.kind == "cuda"
    tp = tensor_parallel_on(config.engine, gpus if gpu else 1)
    if shape.heads % tp:
        raise UsageError(
            f"{shape.heads} attention heads cannot be shared by {tp} GPUs: set --engine.tp to a divisor"
        )
    engine = config.engine.model_copy(update={"tp": tp})
    if shared and gpu:
        config = with_fitting_auditor(config, shape, device.nbytes)
    learner, beside = plan_trainer(config, shape, gpu=gpu)
    used = device.taken + (learner.total + beside.total if shared else 0)
    left = Device(device.kind, device.nbytes, used)
    return RunMemory(
        engine=engine,
        worker=plan_engine(engine, shape, left, fingerprint=FINGERPRINT),
        learner=learner,
        beside=beside,
        room=device.nbytes - device.taken - beside.total,
        share=worker_share(config, shape, device.nbytes) if shared and gpu else None,
    )
