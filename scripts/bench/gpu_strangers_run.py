"""Run a trainer whose workers it does not know: three honest kinds of engine, and one with 4-bit weights.

    bash scripts/bench/gpu.sh gpu_strangers_run [--model DIR] [--steps 40] [--minutes 4.5] [--group 128]
        [--sft-steps 20] [--temperature T] [--lr LR] [--reference] [--quick] [--json FILE] [--logs DIR]

The trainer names no references, so the envelope judges all of its workers: compiled vLLM, eager vLLM, the
embedded engine on the CPU in bf16, and a cheat, whose vLLM gets every version with the weights of its layers
rounded to 4 bits, --group of them to a scale. They are real nodes, share one GPU, and join by the run's ticket.
The run goes on until --steps are done, all three have been learned from and the cheat is banned, or until
--minutes are over. With --reference a run of one reference worker by `primerl-node rl` follows, with as much
time, whose reward over the last ten of --steps is the band.

With --model they learn alphabet-sort, one turn of two or three names, from that checkpoint, which is shown the
form of a reply before, in a few steps (--sft-steps; it earns nothing without); without it a new model of
gpu_run.toml is warmed up and learns to reverse text, in each run anew. --quick is for a machine
without a GPU: a tiny model, two embedded engines with one and two threads, and the same cheat.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from primerl.node.config.run import EngineConfig, JoinConfig
from primerl.node.errors import NodeError
from primerl.node.inference.build import build_engine
from primerl.node.inference.engine import Completion, Engine, EngineStats, GenerateRequest
from primerl.node.ops import control
from primerl.node.process.spawn import PARENT_VARIABLE, kill_group, leave_with_parent
from primerl.node.reports.explain import listed
from primerl.node.storage.rollouts import BRIEF, RolloutFiles
from primerl.node.weights.state import Changed, State, Tensor, floats
from primerl.scripts.bench.report import Goal, at_least, at_most, conclude, make_parser

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENDS = 10
"""Steps at either end whose rewards are compared."""
BAND = 0.1
"""Reward that a run of strangers may be below one of a reference."""
MOST_AUDITED = 64
"""Rollouts of the cheat that may be audited until it is banned."""
FIRST_S = 60.0
"""Time in which an engine that is ready has its first rollout accepted."""
ENOUGH = 32
"""Rollouts of each honest worker that are accepted before a run may end."""
STALL_S = 90.0
"""Time between two steps, once there was one, that is a hang."""
POLL_S = 0.3
LEAVE_S = 12.0
"""Time for a node to end in order."""
MOST_STEPS = 100_000
CHEAT = "4-bit weights"
UNMATCHED = ("embed", "lm_head")
"""Parts of the names of matrices that stay as they are."""
SHOWN = 512
"""Replies that a checkpoint may be shown."""
FAR = 1 << 20
"""Index of the first of their tasks, beyond all that are played."""
SFT_S = 120.0
"""Longest time to show them."""
SIMILARITY = 2
"""Exponent of the reward: a wrong order of two names is worth less than half."""
NAMES = {"min_turns": 1, "max_turns": 1, "min_names_per_turn": 2, "max_names_per_turn": 3}
Settings = dict[str, Any]


# -- the cheat -------------------------------------------------------------------------------------


def four_bits(state: State, group: int) -> State:
    """Round the matrices of the layers to 4 bits, symmetrically, with one scale for `group` inputs of a row."""
    return {
        name: tensor
        if len(tensor.shape) != 2 or any(part in name for part in UNMATCHED)
        else _rounded(tensor, group)
        for name, tensor in state.items()
    }


def _rounded(tensor: Tensor, group: int) -> Tensor:
    assert tensor.dtype == "BF16", "the run is one in bfloat16"
    rows, width = tensor.shape
    padded = np.pad(floats(tensor).reshape(rows, width), ((0, 0), (0, -width % group)))
    blocks = padded.reshape(rows, -1, group)
    scales = np.maximum(np.abs(blocks).max(2, keepdims=True), 1e-30) / 7
    found = (np.rint(blocks / scales) * scales).reshape(rows, -1)[:, :width]
    bits = np.ascontiguousarray(found, np.float32).reshape(-1).view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return Tensor("BF16", tensor.shape, nearest.astype("<u2"))


class RoundedEngine:
    """An Engine that computes and reports everything right, with weights of 4 bits."""

    def __init__(self, engine: Engine, group: int) -> None:
        self._engine, self._group = engine, group

    @property
    def policy_version(self) -> int:
        """See Engine."""
        return self._engine.policy_version

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """See Engine."""
        await self._engine.start(model_dir, fingerprint=fingerprint)

    async def load(self, version: int, state: State) -> None:
        """Load the rounded state."""
        await self._engine.load(version, await asyncio.to_thread(four_bits, state, self._group))

    async def update(self, version: int, state: State, changed: Changed) -> None:
        """Load it whole: one weight that changed can change its whole group."""
        await self.load(version, state)

    async def generate(self, request: GenerateRequest) -> Completion:
        """See Engine."""
        return await self._engine.generate(request)

    def stats(self) -> EngineStats:
        """See Engine."""
        return self._engine.stats()

    async def close(self) -> None:
        """See Engine."""
        await self._engine.close()


def be_cheat(options: argparse.Namespace) -> int:
    """Be the worker that cheats, until the run ends."""
    from primerl.node.app.daemon import load_key
    from primerl.node.app.factories import sandboxed
    from primerl.node.app.worker import WorkerNode
    from primerl.node.ops.logs import configure
    from primerl.node.process.threads import share_python

    leave_with_parent(os.environ)
    config = JoinConfig.model_validate(json.loads(options.settings))
    config = config.model_copy(update={"ticket": Path(options.ticket).read_text().strip()})
    directory = config.data_dir
    assert directory is not None, "the settings name it"

    def engine(one: EngineConfig) -> Engine:
        return RoundedEngine(build_engine(one), options.group)

    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        factories = replace(sandboxed(config), engine=engine)
        await WorkerNode(config, load_key(directory), directory, factories).run()

    configure(config.log, directory / "logs" / "worker.jsonl")
    share_python()
    with suppress(asyncio.CancelledError):
        asyncio.run(work())
    return 0


# -- settings --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of worker."""

    name: str
    engine: Settings
    leases: int = 0
    threads: int = 0
    """Threads of its computation; 0: as many as it takes."""
    on_gpu: bool = True
    cheats: bool = False


QUICK_MODEL = {
    "create": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
    }
}


def kinds(*, quick: bool) -> list[Kind]:
    """The workers of the run, the cheat last."""
    slow = {"type": "hf", "device": "cpu", "dtype": "bfloat16"}
    if quick:
        return [
            Kind("hf, one thread", slow, 1, 1, on_gpu=False),
            Kind("hf, two threads", slow | {"max_batch": 7}, 1, 2, on_gpu=False),
            Kind(CHEAT, slow, 1, 1, on_gpu=False, cheats=True),
        ]

    def vllm(**more: Any) -> Settings:
        # a cache in bytes: vLLM would take the memory of others that start now for its own
        memory = {"gpu_memory_utilization": 0.01, "kv_cache_memory_bytes": 2 << 30}
        return {
            "type": "vllm",
            "dtype": "bfloat16",
            "max_batch": 128,
            "vllm": memory | more,
        }

    return [
        Kind("vLLM, compiled", vllm()),
        Kind("vLLM, eager", vllm(enforce_eager=True)),
        Kind("hf on the CPU", slow | {"max_batch": 32}, 1, 6, on_gpu=False),
        Kind(CHEAT, vllm(enforce_eager=True), cheats=True),
    ]


def run_settings(options: argparse.Namespace) -> Settings:
    """Return what both runs have beside gpu_run.toml."""
    found: Settings = {
        "fsync": False,
        "network": {"host": "127.0.0.1", "libp2p": False},
        "checkpoint": {"interval": 50},
        "evaluation": {"prompts": 0},
    }
    if options.quick:
        return found | {
            "model": QUICK_MODEL,
            "environment": {"id": "early_letters"},
            "engine": {"dtype": "bfloat16", "device": "cpu"},
            "sampling": {"max_tokens": 24},
            "rollouts": {
                "group_size": 4,
                "groups_per_batch": 4,
                "groups_per_lease": 2,
                "lease_timeout_s": 60.0,
            },
            "training": {"lr": options.lr or 1e-5, "threads": 1, "device": "cpu"},
        }
    # a slow worker's rollouts are some steps old
    found["rollouts"] = {
        "group_size": 8,
        "groups_per_batch": 32,
        "groups_per_lease": 4,
        "max_off_policy_steps": 12,
    }
    found["verification"] = {"auditor": "vllm"}
    # the reference's run has no more steps, and both have to have the same rate at each
    found["training"] = {"scheduler": "constant", "gpu_memory_utilization": 0.4}
    if options.lr:
        found["training"]["lr"] = options.lr
    if options.model is None:
        args = {"min_len": 5, "max_len": 8}
        return found | {"environment": {"id": "reverse-text", "args": args}}
    return found | {
        "model": {"name": str(options.model)},
        "environment": {
            "id": "alphabet-sort",
            "args": NAMES | {"task": {"similarity_power": SIMILARITY}},
        },
        "engine": {"type": "vllm", "dtype": "bfloat16", "max_batch": 128, "max_model_len": 256},
        "sampling": {"max_tokens": 64, "temperature": options.temperature},
        "training": found["training"]
        | {
            "lr": options.lr or 2e-5,
            "betas": [0.9, 0.99],
            "weight_decay": 0.0,
            "warmup_steps": 5,
            "seq_len": 4096,
            "advantage": "grpo_std",
        },
    }


def worker_settings(options: argparse.Namespace, kind: Kind, directory: Path) -> Settings:
    """Return what a stranger is started with."""
    found: Settings = {
        "data_dir": str(directory),
        "network": {"host": "127.0.0.1", "libp2p": False},
        "engine": kind.engine,
        "fsync": False,
    }
    if kind.leases:
        found["leases"] = kind.leases
    if options.quick:
        found["environments"] = {"allow": ["early_letters"]}
    return found


def flags(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield settings as flags; dictionaries that are values themselves as JSON."""
    for name, value in settings.items():
        key = f"{prefix}{name.replace('_', '-')}"
        if isinstance(value, dict) and name not in ("args", "vllm"):
            yield from flags(value, f"{key}.")
        else:
            yield f"--{key}"
            yield value if isinstance(value, str) else json.dumps(value)


# -- processes -------------------------------------------------------------------------------------


class Nodes:
    """The processes of a run, each the leader of a group; none is left at the end."""

    def __init__(self, directory: Path, *, quick: bool) -> None:
        self.directory, self._quick = directory, quick
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str], kind: Kind | None = None) -> None:
        """Start a program with its output in NAME.log."""
        environment = {
            **os.environ,
            PARENT_VARIABLE: str(os.getpid()),
            "PYTHONFAULTHANDLER": "1",
            "XDG_RUNTIME_DIR": str(self.directory),
        }
        if self._quick:
            paths = [str(ROOT / "tests/scenarios/tasksets"), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        if kind and not kind.on_gpu:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        if kind and kind.threads:
            environment["OMP_NUM_THREADS"] = str(kind.threads)
        with self.log(name).open("ab") as log:
            self._started[name] = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def log(self, name: str) -> Path:
        """Return the path of a program's output."""
        return self.directory / f"{name.replace(' ', '-').replace(',', '')}.log"

    def ended(self, name: str) -> int | None:
        """Return a program's exit code; None while it runs."""
        return self._started[name].poll()

    def close(self) -> None:
        """End all of them: in order if they do so in time."""
        running = [one for one in self._started.values() if one.poll() is None]
        for one in running:
            one.terminate()
        deadline = time.monotonic() + LEAVE_S
        for one in running:
            with suppress(subprocess.TimeoutExpired):
                one.wait(max(0.1, deadline - time.monotonic()))
        for one in self._started.values():
            kill_group(one.pid)
            one.wait()

    def tails(self, length: int = 2500) -> str:
        """Return the ends of all logs."""
        logs = [*sorted(self.directory.glob("*.log")), *self.directory.glob("out/*/logs/*.log")]
        return "\n".join(
            f"== {one.name}\n{one.read_text(errors='replace')[-length:]}" for one in logs
        )


# -- watching --------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What the trainer said of a worker so far; times are of the wall clock."""

    kind: Kind
    began: float
    id: str = ""
    numerics: str = ""
    joined: float = 0.0
    ready: float = 0.0
    """It holds a policy and asks for work."""
    accepted_at: float = 0.0
    learned_at: float = 0.0
    accepted: int = 0
    rejected: int = 0
    reasons: Counter[str] = field(default_factory=Counter[str])
    audited: int = 0
    refused: list[str] = field(default_factory=list[str])
    """All that was said."""
    banned_after: int = 0
    """Rollouts that were audited when the ban was seen."""
    banned_at: float = 0.0

    def look(self, row: Mapping[str, Any], now: float) -> None:
        """Take a row of `peers`."""
        self.joined = self.joined or now
        self.numerics = row["numerics"] or self.numerics
        if row["version"] >= 0:
            self.ready = self.ready or now
        if row["accepted"]:
            self.accepted_at = self.accepted_at or now
        self.accepted, self.rejected = row["accepted"], row["rejected"]
        self.audited = row["audited"]
        if row["refused"] and row["refused"] not in self.refused:
            self.refused.append(row["refused"])
        if "banned" in row["refused"] and not self.banned_at:
            # what was sent at once is audited together: the ban says how many of them it took
            taken = re.search(r"after (\d+) audited", row["refused"])
            self.banned_at, self.banned_after = now, int(taken[1]) if taken else row["audited"]

    def after_joining(self, moment: float) -> float | None:
        """Return seconds between joining and a moment; None if it never came."""
        return round(moment - self.joined, 1) if moment and self.joined else None

    def row(self) -> Settings:
        """Return the figures."""
        return {
            "worker": self.kind.name,
            "numerics": self.numerics,
            "accepted": self.accepted,
            "rejected": self.rejected,
            "reasons": dict(self.reasons),
            "audited": self.audited,
            "refused": self.refused,
            "banned_after": self.banned_after if self.banned_at else None,
            "join_s": round(self.joined - self.began, 1) if self.joined else None,
            "ready_s": self.after_joining(self.ready),
            "accepted_s": self.after_joining(self.accepted_at),
            "learned_s": self.after_joining(self.learned_at),
            "banned_s": self.after_joining(self.banned_at),
        }


@dataclass
class Ran:
    """A run that is over."""

    rewards: list[float]
    """By step."""
    seconds: float
    stepping_s: float
    """From the first step to the last."""
    fault: str = ""
    workers: list[Seen] = field(default_factory=list[Seen])
    warnings: list[str] = field(default_factory=list[str])
    bounds: list[Settings] = field(default_factory=list[Settings])

    def ends(self, steps: int) -> tuple[float, float]:
        """Return the mean reward of the first and of the last ten of `steps`."""
        found = self.rewards[:steps] or [float("nan")]
        return fmean(found[:ENDS]), fmean(found[-ENDS:])


def ask(directory: Path, command: str) -> Any:
    """Ask a node; None while it does not answer."""
    try:
        return control.ask(directory, command)
    except (NodeError, ValueError):
        return None


class Run:
    """A run below `directory`, from its first process to its end."""

    def __init__(self, options: argparse.Namespace, name: str, directory: Path) -> None:
        self._options, self._name = options, name
        self._directory = directory / name
        self._directory.mkdir(parents=True)
        self._run_dir = self._directory / "out" / name
        self._trainer = self._run_dir / "trainer"
        self._nodes = Nodes(self._directory, quick=options.quick)
        self._began = time.time()
        self._deadline = self._began + 60 * options.minutes
        self._workers: list[Seen] = []
        self._warnings: list[str] = []
        self._bounds: list[Settings] = []
        self._lines: list[Settings] = []
        """Those of metrics.jsonl."""
        self._read = 0

    def strangers(self) -> Ran:
        """Run a trainer, and strangers by its ticket."""
        settings = {"max_steps": MOST_STEPS}
        fault = ""
        try:
            self._nodes.start("trainer", self._command("train", settings))
            fault = self._until(lambda: (self._run_dir / "ticket.txt").is_file())
            if not fault:
                for kind in kinds(quick=self._options.quick):
                    self._join(kind)
                fault = self._until(self._is_complete)
        finally:
            self._nodes.close()
        return self._over(fault)

    def reference(self) -> Ran:
        """Run `primerl-node rl` with one worker, which it names as a reference."""
        settings = {"max_steps": self._options.steps, "launch": {"workers": 1}}
        fault = ""
        try:
            self._nodes.start("trainer", self._command("rl", settings))
            fault = self._until(lambda: len(self._lines) >= self._options.steps)
        finally:
            self._nodes.close()
        return self._over(fault)

    def _command(self, command: str, more: Settings) -> list[str]:
        found = ["-m", "primerl.cli.main", command]
        if self._options.model is None and not self._options.quick:
            found += ["@", str(HERE / "gpu_run.toml")]
        own = {"name": self._name, "output_dir": str(self._directory / "out")}
        return [*found, *flags(own | run_settings(self._options) | more)]

    def _join(self, kind: Kind) -> None:
        directory = self._directory / f"worker-{len(self._workers) + 1}"
        settings = worker_settings(self._options, kind, directory)
        ticket = str(self._run_dir / "ticket.txt")
        if kind.cheats:
            command = [str(HERE / Path(__file__).name), "--as", "cheat", "--ticket", ticket]
            command += ["--settings", json.dumps(settings), "--group", str(self._options.group)]
        else:
            command = ["-m", "primerl.cli.main", "join", "--ticket", ticket]
            command += flags({k: v for k, v in settings.items() if k != "environments"})
            for name in settings.get("environments", {}).get("allow", ()):
                command += ["--allow-environment", name]
        self._nodes.start(kind.name, command, kind)
        self._workers.append(Seen(kind, time.time()))

    # -- meanwhile

    def _until(self, over: Any) -> str:
        """Look at the run until `over()`; return why it was given up, or empty."""
        moved, seen = time.time(), 0
        while not over():
            time.sleep(POLL_S)
            self._look()
            now = time.time()
            if len(self._lines) != seen:
                moved, seen = now, len(self._lines)
            if (code := self._nodes.ended("trainer")) is not None:
                return "" if over() else f"the trainer ended with {code}"
            if seen and now - moved > STALL_S:
                return f"no step for {STALL_S:.0f} s"
            if now > self._deadline:
                return f"not over within {self._options.minutes:g} minutes"
        return ""

    def _look(self) -> None:
        path = self._run_dir / "metrics.jsonl"
        if path.is_file():
            whole = path.read_bytes()[self._read :].rpartition(b"\n")
            self._read += len(whole[0]) + len(whole[1])
            self._lines += [json.loads(line) for line in whole[0].splitlines()]
        if status := ask(self._trainer, "status"):
            self._warnings += [one for one in status["warnings"] if one not in self._warnings]
            self._bounds = status["bounds"]
        rows = {row["id"]: row for row in ask(self._trainer, "peers") or ()}
        for number, one in enumerate(self._workers, start=1):
            own = None if one.id else ask(self._directory / f"worker-{number}", "status")
            one.id = one.id or (own["id"] if own else "")
            if one.id in rows:
                one.look(rows[one.id], time.time())

    def _is_complete(self) -> bool:
        honest = [one for one in self._workers if not one.kind.cheats]
        cheats = [one for one in self._workers if one.kind.cheats]
        return (
            len(self._lines) >= self._options.steps
            and all(one.accepted >= ENOUGH for one in honest)
            and all(one.banned_at for one in cheats)
        )

    # -- afterwards

    def _over(self, fault: str) -> Ran:
        if fault:
            print(f"{self._name}: {fault}\n{self._nodes.tails()}", flush=True)
        for one in self._workers:
            if one.id and (code := self._nodes.ended(one.kind.name)) not in (0, None, 143):
                print(f"{self._name}: {one.kind.name} ended with {code}", flush=True)
            self._read_verdicts(one)
        self._find_steps()
        times = [line["time"] for line in self._lines]
        return Ran(
            [line["reward/mean"] for line in self._lines],
            time.time() - self._began,
            times[-1] - times[0] if times else 0.0,
            fault,
            self._workers,
            self._warnings,
            self._bounds,
        )

    def _read_verdicts(self, one: Seen) -> None:
        """Count reasons by the trainer's ledger, which also has what came after the last look."""
        if not one.id:
            return
        try:
            lines = listed(self._trainer, 1_000_000, one.id)
        except NodeError as error:
            print(f"the trainer's ledger cannot be read: {error}")
            return
        one.accepted = max(one.accepted, sum(line.accepted for line in lines))
        one.rejected = max(one.rejected, sum(line.rejected for line in lines))
        for line in lines:
            if line.rejected:
                one.reasons[line.reason or "?"] += line.rejected

    def _find_steps(self) -> None:
        """Find the first step that learned from each worker."""
        files = RolloutFiles(self._run_dir / "rollouts")
        when = {line["step"]: line["time"] for line in self._lines}
        for step in files.steps():
            rows = [one for one in files.read(step, BRIEF) if one.verdict == "trained"]
            trained = {row.worker for row in rows}
            for one in self._workers:
                if one.id in trained and not one.learned_at and step in when:
                    one.learned_at = when[step]


def demonstrations(path: Path) -> None:
    """Write right replies to tasks of alphabet-sort, for `primerl-node sft`."""
    from primerl.node.environments.tasksets.alphabet_sort import (
        AlphabetSortConfig,
        AlphabetSortTaskset,
    )

    taskset = AlphabetSortTaskset(
        AlphabetSortConfig.model_validate({"id": "alphabet-sort", **NAMES})
    )
    with path.open("w") as file:
        for index in range(FAR, FAR + SHOWN):
            data = taskset.task_at(index).data
            said = (("user", data.prompt), ("assistant", data.replies[0]))
            messages = [{"role": role, "content": content} for role, content in said]
            file.write(json.dumps({"messages": messages}) + "\n")


def show_the_form(options: argparse.Namespace, directory: Path) -> Path:
    """Show the checkpoint of --model what a reply looks like; return the directory of its new weights."""
    began, rows = time.monotonic(), directory / "shown.jsonl"
    demonstrations(rows)
    settings: Settings = {
        "name": "form",
        "output_dir": str(directory / "out"),
        "max_steps": options.sft_steps,
        "batch_size": 16,
        "fsync": False,
        "model": {"name": str(options.model)},
        "data": {"files": [str(rows)]},
        "training": {"lr": 3e-5, "warmup_steps": 2, "weight_decay": 0.0, "seq_len": 2048},
    }
    nodes = Nodes(directory, quick=False)
    try:
        nodes.start("sft", ["-m", "primerl.cli.main", "sft", *flags(settings)])
        while (code := nodes.ended("sft")) is None and time.monotonic() - began < SFT_S:
            time.sleep(POLL_S)
    finally:
        nodes.close()
    made = directory / "out" / "form" / "weights" / f"step_{options.sft_steps}"
    if code or not made.is_dir():
        raise SystemExit(f"sft ended with {code}:\n{nodes.tails()}")
    print(f"{options.sft_steps} steps of the form of a reply: {time.monotonic() - began:.0f} s")
    return made


# -- figures ---------------------------------------------------------------------------------------


def shown(value: float | None) -> str:
    """Show seconds, or that there are none."""
    return "-" if value is None else f"{value:.1f}"


def show(found: Ran, band: Ran | None, steps: int) -> None:
    """Print the tables."""
    heads = "worker,accepted,rejected,audited,join s,ready s,accepted s,learned s".split(",")
    print(f"{heads[0]:18}" + "".join(f"{head:>12}" for head in heads[1:]))
    for one in found.workers:
        row = one.row()
        numbers = [row["accepted"], row["rejected"], row["audited"]]
        times = [shown(row[f"{name}_s"]) for name in ("join", "ready", "accepted", "learned")]
        print(f"{one.kind.name:18}" + "".join(f"{value:>12}" for value in (*numbers, *times)))
    print("join: seconds from its start; others: from joining, by the trainer's answers")
    for one in found.workers:
        print(f"{one.kind.name}: {one.numerics or 'no class'}")
        if one.reasons:
            print(f"    rejected: {', '.join(f'{k} {v}' for k, v in one.reasons.items())}")
        for text in one.refused:
            print(f"    refused: {text}")
        if one.banned_at:
            after = shown(one.after_joining(one.banned_at))
            print(f"    banned after {one.banned_after} audited rollouts, {after} s")
    for one in found.bounds:
        print(f"bounds {one['number']} of {one['numerics']}: {one['rollouts']} rollouts")
    for text in found.warnings:
        print(f"warning: {text}")
    for name, ran in (("strangers", found), ("reference", band)):
        if ran is not None:
            first, last = ran.ends(steps)
            print(
                f"{name}: {len(ran.rewards)} steps in {ran.stepping_s:.0f} s, {ran.seconds:.0f} s in all; "
                f"reward of the first and last ten of {steps}: {first:.3f} -> {last:.3f}"
            )
            size = max(1, len(ran.rewards) // 15)
            parts = [ran.rewards[at : at + size] for at in range(0, len(ran.rewards), size)]
            print(f"    {' '.join(f'{fmean(part):.2f}' for part in parts)}")


def judge(found: Ran, band: Ran | None, steps: int) -> list[Goal]:
    """Return the goals."""
    goals = [at_least("steps of the strangers' run", len(found.rewards), steps)]
    for one in found.workers:
        name = one.kind.name
        if one.kind.cheats:
            goals.append(at_least(f"{name}: banned", float(bool(one.banned_at)), 1))
            audited = one.banned_after if one.banned_at else one.audited
            goals.append(at_most(f"{name}: audited until its ban", audited, MOST_AUDITED))
            continue
        judged = one.rejected - one.reasons["stale"]
        waited = one.accepted_at - one.ready if one.accepted_at else float("inf")
        goals += [
            at_least(f"{name}: accepted", one.accepted, 1),
            at_least(f"{name}: learned from", float(bool(one.learned_at)), 1),
            at_most(f"{name}: banned or refused work", len(one.refused), 0),
            at_most(f"{name}: rejected, not stale", judged, (one.accepted + judged) // 1000),
            at_most(f"{name}: ready until first accepted", waited, FIRST_S, "s"),
        ]
    if band is not None:
        goals.append(at_least("steps of the reference's run", len(band.rewards), steps))
        goal = band.ends(steps)[1] - BAND
        goals.append(at_least("reward of the last ten steps", found.ends(steps)[1], round(goal, 4)))
    return goals


def stop(number: int, frame: object) -> None:
    """Exit as by an error, so that no process stays."""
    sys.exit(128 + number)


def main() -> int:
    """Run, print, and return exit code 0 if every goal was met."""
    parser = make_parser(__doc__, "a tiny model on the CPU")
    parser.add_argument("--model", type=Path, help="a checkpoint that learns alphabet-sort")
    parser.add_argument("--steps", type=int, help="default: 40; 12 with --quick")
    parser.add_argument("--minutes", type=float, default=4.5, help="longest time of each run")
    parser.add_argument(
        "--group", type=int, help="weights to a scale; default: 128, 32 with --quick"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="with --model")
    parser.add_argument("--sft-steps", type=int, default=20, help="with --model; 0: none")
    parser.add_argument("--lr", type=float, default=0.0, help="default: as the settings say")
    parser.add_argument("--reference", action="store_true", help="also run with a reference")
    parser.add_argument("--logs", type=Path, help="keep the logs there")
    for name in ("--as", "--ticket", "--settings"):
        parser.add_argument(name, dest={"--as": "role"}.get(name, name[2:]), help="internal")
    options = parser.parse_args()
    options.group = options.group or (32 if options.quick else 128)
    options.steps = options.steps or (12 if options.quick else 40)
    if options.role == "cheat":
        return be_cheat(options)
    signal.signal(signal.SIGTERM, stop)
    if options.model is not None:
        options.model = options.model.resolve()
    with tempfile.TemporaryDirectory(prefix="strangers-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        try:
            if options.model is not None and options.sft_steps:
                options.model = show_the_form(options, directory)
            found = Run(options, "strangers", directory).strangers()
            band = Run(options, "reference", directory).reference() if options.reference else None
        finally:
            if options.logs:
                keep(directory, options.logs)
    show(found, band, options.steps)
    rows = [one.row() for one in found.workers]
    runs = {
        name: {
            "rewards": ran.rewards,
            "ends": ran.ends(options.steps),
            "seconds": ran.seconds,
            "fault": ran.fault,
            "warnings": ran.warnings,
            "bounds": ran.bounds,
        }
        for name, ran in (("strangers", found), ("reference", band))
        if ran is not None
    }
    return conclude(rows, judge(found, band, options.steps), options.json, runs=runs)


def keep(directory: Path, logs: Path) -> None:
    """Copy the logs of all nodes."""
    for log in (*directory.rglob("*.log"), *directory.rglob("metrics.jsonl")):
        target = logs / log.relative_to(directory)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(log.read_bytes())


if __name__ == "__main__":
    sys.exit(main())
