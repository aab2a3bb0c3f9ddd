"""Looks at this machine: what a node needs of it, and what to do where that is missing.

Nothing heavy is imported and CUDA is never started: whether torch and vLLM are there is read from their files.
Each check judges what it is given, so that tests give it; examine() asks.
"""

import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from . import gpu_memory
from .architectures import untrainable
from .config import NodeConfig
from .engines.vllm_features import check_release, installed_release
from .errors import EngineError
from .gpu_memory import GpuMemory
from .machine_memory import Memory as Memory
from .machine_memory import machine_memory as machine_memory
from .network import libp2p
from .planning.bill import GIB, MIB, gib

State = Literal["ok", "warning", "problem"]

OLDEST_PYTHON = (3, 11)
FILES_WANTED, FILES_NEEDED = 4096, 1024
"""Of a busy trainer: streams, chunks and the sockets of up to 256 peers."""
DISK_WANTED, DISK_NEEDED = 10 * GIB, 1 * GIB
SHARED_WANTED = 256 * MIB
BUSY = 1.5
"""Load by core from which others take the CPU."""
FREE_GPU = 0.85
"""Of a GPU: below this others are on it."""
LEAP_S = 3600.0
"""How far the clock may be behind a file before it is wrong."""


@dataclass(frozen=True)
class Check:
    """What was found of one thing, and what to do."""

    name: str
    state: State
    found: str
    advice: str = ""


def examine(config: NodeConfig, environ: Mapping[str, str], *, needed: int = 0) -> list[Check]:
    """Every check of this machine. `needed`: bytes of a state of the model that is asked about, if one is."""
    found = gpu_memory.visible(environ)
    home = config.data_dir or Path.home() / ".primerl"
    shared = Path("/dev/shm")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [
        check_python(sys.version_info[:3]),
        check_torch(torch_build(), gpus=len(found), wanted=config.engine.type != "scripted"),
        check_vllm(installed_release(), wanted=config.engine.type == "vllm"),
        check_libp2p(libp2p.is_installed(), wanted=config.network.libp2p),
        *check_gpus(found, environ.get("CUDA_VISIBLE_DEVICES")),
        check_cpu(len(os.sched_getaffinity(0)), os.getloadavg()[0]),
        check_memory(machine_memory()),
        check_shared_memory(shutil.disk_usage(shared).free if shared.is_dir() else 0, needed),
        check_disk(home, shutil.disk_usage(existing(home)).free, needed),
        check_open_files(soft),
        *check_ports(config),
        check_clock(time.time(), Path(__file__).stat().st_mtime),
    ]


# -- programs --------------------------------------------------------------------------------------


def check_python(version: Sequence[int]) -> Check:
    """This interpreter."""
    text = f"{'.'.join(map(str, version))} on {platform.system()} {platform.machine()}"
    if tuple(version[:2]) < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        return Check("Python", "problem", text, f"use {wanted} or newer")
    return Check("Python", "ok", text)


@dataclass(frozen=True)
class TorchBuild:
    """What torch's own files say of it."""

    version: str
    cuda: str
    """The CUDA that it was built with; empty for a CPU build."""


def torch_build() -> TorchBuild | None:
    """The torch that is installed here, without importing it."""
    found = importlib.util.find_spec("torch")
    for place in (found.submodule_search_locations or ()) if found else ():
        text = Path(place, "version.py").read_text(encoding="utf-8")
        version = re.search(r"^__version__ = '([^']+)'", text, re.M)
        cuda = re.search(r"^cuda: .*= '([^']+)'", text, re.M)
        return TorchBuild(version[1] if version else "?", cuda[1] if cuda else "")
    return None


def check_torch(build: TorchBuild | None, *, gpus: int, wanted: bool = True) -> Check:
    """Whether there is a torch, and whether it can use the GPUs."""
    if build is None:
        advice = "pip install 'primerl-node[run]': a trainer or a worker computes with it"
        return Check("torch", "problem" if wanted else "warning", "not installed", advice)
    text = f"{build.version}, " + (f"CUDA {build.cuda}" if build.cuda else "CPU only")
    if gpus and not build.cuda:
        advice = "install a CUDA build of torch, else the GPUs stay idle"
        return Check("torch", "problem", text, advice)
    return Check("torch", "ok", text)


def check_vllm(release: str, *, wanted: bool) -> Check:
    """Whether there is a vLLM that this package knows."""
    if not release:
        if not wanted:
            return Check("vLLM", "ok", "not installed, and not asked for")
        advice = "pip install 'primerl-node[vllm]', or use --engine hf"
        return Check("vLLM", "problem", "not installed", advice)
    try:
        check_release(release)
    except EngineError as error:
        return Check("vLLM", "problem" if wanted else "warning", release, str(error))
    return Check("vLLM", "ok", release)


def check_model(config: Mapping[str, Any], longest: int) -> Check:
    """Whether the trainer computes the model of this config.json exactly."""
    text = f"{config.get('model_type', 'no model_type')}, sequences of up to {longest} tokens"
    if reason := untrainable(config, longest):
        return Check("model", "problem", f"{text}: cannot be trained", reason)
    return Check("model", "ok", f"{text}: can be trained")


def check_libp2p(installed: bool, *, wanted: bool) -> Check:
    """Whether there is a libp2p; a node works without it."""
    if installed:
        return Check("libp2p", "ok", "installed")
    if not wanted:
        return Check("libp2p", "ok", "not installed, and switched off")
    advice = f"{libp2p.INSTALL}: until then peers are found through the trainer alone"
    return Check("libp2p", "warning", "not installed", advice)


# -- machine ---------------------------------------------------------------------------------------


def check_gpus(found: Sequence[GpuMemory], listed: str | None) -> Iterator[Check]:
    """Each GPU that this process may use."""
    if not found:
        hidden = f" (CUDA_VISIBLE_DEVICES is {listed!r})" if listed is not None else ""
        yield Check("GPU", "ok", f"none{hidden}: everything runs on the CPU")
    for gpu in found:
        text = f"{gpu.name}, {gib(gpu.total)}, {gib(gpu.free)} free, driver {gpu.driver}"
        if gpu.free < FREE_GPU * gpu.total:
            advice = (
                "others use it: vLLM starts only if engine.vllm.gpu_memory_utilization is below "
                f"{int(100 * gpu.free / gpu.total) / 100:g}"
            )
            yield Check(f"GPU {gpu.number}", "warning", text, advice)
        else:
            yield Check(f"GPU {gpu.number}", "ok", text)


def check_cpu(cores: int, load: float) -> Check:
    """Cores that this process may use, and who else does."""
    text = f"{cores} cores, load {load:.1f}"
    if load > BUSY * cores:
        return Check("CPU", "warning", text, "others are busy here: what is measured will be slow")
    return Check("CPU", "ok", text)


def check_memory(memory: Memory) -> Check:
    """The host's memory."""
    text = f"{gib(memory.total)}, {gib(memory.available)} available"
    if memory.available < 2 * GIB:
        return Check("memory", "warning", text, "close what else runs: a node needs some GiB")
    return Check("memory", "ok", text)


def check_shared_memory(free: int, needed: int = 0) -> Check:
    """Where weights are handed from process to process; twice their size, or they go to the disk."""
    text = f"{gib(free)} free in /dev/shm"
    if free <= max(SHARED_WANTED, 2 * needed):
        wanted = gib(max(SHARED_WANTED, 2 * needed))
        advice = f"weights go through the disk: give a container --shm-size of {wanted} or more"
        return Check("shared memory", "warning", text, advice)
    return Check("shared memory", "ok", text)


def check_disk(home: Path, free: int, needed: int = 0) -> Check:
    """Room for chunks, anchors and checkpoints at data_dir."""
    text = f"{gib(free)} free at {home}"
    wanted = max(DISK_WANTED, 4 * needed)
    if free < max(DISK_NEEDED, needed):
        return Check(
            "disk", "problem", text, f"make room, {gib(wanted)}, or set --data-dir elsewhere"
        )
    if free < wanted:
        advice = f"a run keeps versions and checkpoints: {gib(wanted)} or more is comfortable"
        return Check("disk", "warning", text, advice)
    return Check("disk", "ok", text)


def existing(path: Path) -> Path:
    """`path`, or the nearest directory above it that is there."""
    return next(one for one in (path, *path.absolute().parents) if one.is_dir())


def check_open_files(soft: int) -> Check:
    """Files and sockets that a process may have open."""
    text = "no limit" if soft == resource.RLIM_INFINITY else str(soft)
    if soft != resource.RLIM_INFINITY and soft < FILES_WANTED:
        state: State = "problem" if soft < FILES_NEEDED else "warning"
        return Check("open files", state, text, f"ulimit -n {16 * FILES_WANTED}")
    return Check("open files", "ok", text)


def check_ports(config: NodeConfig) -> Iterator[Check]:
    """Whether the configured ports can be bound."""
    network = config.network
    wanted = [("UDP port", socket.SOCK_DGRAM, network.port, "--network.port")]
    if network.libp2p:
        wanted.append(
            ("TCP port", socket.SOCK_STREAM, network.libp2p_port, "--network.libp2p-port")
        )
    for name, kind, port, flag in wanted:
        text = f"{network.host}:{port or 'any'}"
        if fault := bind_fault(network.host, port, kind):
            advice = f"a node may run already; else choose another {flag}, or --network.host"
            yield Check(name, "problem", f"{text}: {fault}", advice)
        else:
            yield Check(name, "ok", f"{text} can be bound")


def bind_fault(host: str, port: int, kind: socket.SocketKind) -> str:
    """Why it cannot be bound; empty if it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, kind) as probe:
            if kind == socket.SOCK_STREAM:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


def check_clock(now: float, installed: float) -> Check:
    """Tickets, heads and leases carry times: a clock that is hours off has them refused."""
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < installed - LEAP_S:
        advice = "it is earlier than this program was installed: set it, or switch NTP on"
        return Check("clock", "problem", text, advice)
    return Check("clock", "ok", text)
