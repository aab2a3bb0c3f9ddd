"""Compare output tokens/s of a whole worker with bare vLLM, and time a worker's start.

    python scripts/bench/worker.py [--sequences N ...] [--shape tiny|50m|0.6b] [--rounds N] [--window SECONDS]
        [--engine vllm|hf] [--quick] [--json FILE]

Full worker: a real `WorkerNode` over iroh that leases, generates with seeds and proofs, scores by the
reverse-text taskset, signs and uploads; a real trainer on this machine leases out, verifies, and publishes a
version per batch. The trainer trains nothing and audits nothing (worker_nodes.py): the engine has the GPU to
itself. Bare: AsyncLLM.generate on the worker's prompts, with the same lengths and concurrency
(engine_alone.py). Both engines are up all the time and work in turns. Random weights of the shape, made here;
byte tokens are made likely, so that there is text to score.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any

from primerl.node.errors import NetworkError
from primerl.node.ops import control
from primerl.scripts.bench.children import Child
from primerl.scripts.bench.models import SHAPES
from primerl.scripts.bench.report import Goal, at_least, conclude, make_parser

HERE = Path(__file__).parent
RUN = "w"
LIKELY = 10.0
"""Factor of the output rows of the tokenizer's own tokens."""
TOKENIZER = 288
"""Ids below this are the tokenizer's."""
BARE = "bare"
MODES = {BARE: "plain", "bare, logprobs": "logprobs"}
"""Rows of bare vLLM, and the output requested beside tokens."""
FULL = "full worker"
ON_GPU = 0.95
ON_CPU = 0.4
"""Goal by CPU time, of all processes of a worker against all of bare vLLM: on a shared machine wall-clock time
is meaningless, and everything around a tiny model is a large part."""
ACCEPTED = 0.98
"""Goal: accepted share of the judged rollouts."""
ASK_S = 0.5
"""Interval of status requests to a working node; they cost next to nothing."""
SAID = ("inflight", "cap", "running", "waiting", "kv_use")
START_S = 400.0
IDLE_S = 90.0
QUIET_S = 3.0
"""Seconds without another verdict after which none is awaited."""
FULL_S = 30.0
PHASES = {
    "begin of the process": "begun",
    "imports": "up",
    "join: transport, hello, model files": "joined",
    "engine (vLLM) starts": "engine",
    "weights fetched and proved": "fetched",
    "weights loaded": "loaded",
    "first lease": "leased",
    "first completion": "generated",
    "first group scored, packed, uploaded": "arrived",
    "first verdict: accepted": "accepted",
}


# -- settings -------------------------------------------------------------------------------------


def engine_settings(options: argparse.Namespace, sequences: int = 0) -> dict[str, Any]:
    """Return the engine's settings; a worker's engine computes `sequences` at once."""
    engine: dict[str, Any] = {
        "type": options.engine,
        "dtype": "bfloat16" if options.cuda else "float32",
        "max_batch": sequences or max(options.sequences),
        "max_model_len": options.length,
    }
    if options.cuda and options.engine == "vllm":
        engine["vllm"] = {"gpu_memory_utilization": options.memory}
        if options.graphs:
            engine["vllm"]["compilation_config"] = {"cudagraph_mode": options.graphs}
    return engine


def run_settings(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Return the trainer's settings.

    Batches have four times the groups in flight, so that there is always work.
    """
    group = options.group
    return {
        "name": RUN,
        "output_dir": str(directory),
        "max_steps": 1_000_000,
        "fsync": False,
        "network": {"host": "127.0.0.1", "libp2p": False},
        "model": {"name": str(directory / "model")},
        "engine": engine_settings(options) | {"vllm": {}},
        "environment": {
            "id": "reverse-text",
            "args": {"min_len": options.prompt // 2, "max_len": options.prompt},
        },
        "sampling": {"max_tokens": options.tokens},
        "rollouts": {
            "group_size": group,
            "groups_per_batch": 4 * max(options.sequences) // group,
            "groups_per_lease": options.lease,
            "max_off_policy_steps": 16,
            "lease_timeout_s": 600.0,
            "leases_per_worker": 64,
        },
        # rewards of random weights are all 0: every batch makes a version nevertheless
        "training": {"seq_len": options.length, "filter_zero_advantages": False},
        "verification": {"audit_rate": 0.0, "bounds": "built-in"},
        "checkpoint": {"interval": 1_000_000},
        "evaluation": {"prompts": 0},
    }


def join_settings(
    options: argparse.Namespace, data_dir: Path, ticket: str, sequences: int
) -> dict[str, Any]:
    """Return the worker's settings: defaults, except for the number of sequences."""
    return {
        "ticket": ticket,
        "data_dir": str(data_dir),
        "fsync": False,
        "network": {"host": "127.0.0.1", "libp2p": False},
        "engine": engine_settings(options, sequences),
    }


def make_model(directory: Path, shape: str, length: int, tokens: int) -> None:
    """Make random weights in which the tokenizer's own tokens are likely.

    For longer replies further tokens are likely, too. Some of them end a completion, so that lengths differ as
    in a run: otherwise all completions that begin together would end together, and every pause between two
    completions would be the engine's.
    """
    import torch
    from safetensors.torch import load_file, save_file

    from primerl.node.models import huggingface

    changes: dict[str, Any] = {"head_dim": 32} if shape == "tiny" else {}
    # a separate head: a tied one would repeat the last token, the more the larger its rows
    changes |= {"tie_word_embeddings": False, "max_position_embeddings": length}
    config = {**SHAPES[shape], **changes}
    huggingface.create(directory, config, seed=0)
    path = directory / "model.safetensors"
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}
    tensors["lm_head.weight"][: max(TOKENIZER, tokens)] *= LIKELY
    save_file(tensors, path, metadata={"format": "pt"})
    generation = directory / "generation_config.json"
    settings = json.loads(generation.read_text())
    settings["eos_token_id"] = [settings["eos_token_id"], *range(max(1, TOKENIZER // tokens))]
    generation.write_text(json.dumps(settings))


# -- measuring ------------------------------------------------------------------------------------


class Bench:
    """All processes of one benchmark."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self.options, self.directory = options, directory
        self.children: list[Child] = []
        self.rounds: list[dict[str, Any]] = []
        self.starts: list[dict[str, Any]] = []
        self.ends: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.bare: Child | None = None
        self.trainer = Child("trainer", directory / "trainer.log")
        self.worker = Child("worker", directory / "worker.log")

    async def run(self) -> None:
        """Run everything, and end all processes in any case."""
        try:
            if self.options.engine == "vllm":
                self.bare = await self.start_bare()
            ticket = await self.start_trainer()
            for sequences in self.options.sequences:
                await self.measure(sequences, ticket)
        finally:
            for child in reversed(self.children):
                await child.end()

    # -- processes -------------------------------------------------------------------------------

    async def start_bare(self) -> Child:
        """Start bare vLLM."""
        child = await self.child(
            "bare",
            "engine_alone.py",
            "vllm",
            str(self.directory / "model"),
            json.dumps(engine_settings(self.options)),
        )
        ready = await child.event("ready", START_S)
        self.notes.append(f"bare vLLM was ready after {ready['at'] - child.begun:.1f} s")
        return child

    async def start_trainer(self) -> str:
        """Start the trainer; return its ticket once version 0 is published."""
        settings = json.dumps(run_settings(self.options, self.directory))
        self.trainer = await self.child("trainer", "worker_nodes.py", "trainer", settings)
        ticket = await self.trainer.event("ticket", START_S)
        await self.until(lambda: self.status("trainer").get("version", -1) >= 0, START_S, "version")
        return ticket["ticket"]

    async def start_worker(self, sequences: int, ticket: str) -> None:
        """Start a worker, wait for its first accepted rollout, and record the phases of its start."""
        before = self.status("trainer").get("accepted", 0)
        home = self.directory / f"worker{sequences}"
        settings = json.dumps(join_settings(self.options, home, ticket, sequences))
        self.worker = await self.child(f"worker{sequences}", "worker_nodes.py", "worker", settings)
        await self.worker.event("leased", START_S)
        accepted = lambda: self.status("trainer").get("accepted", 0) > before  # noqa: E731
        await self.until(accepted, START_S, "first accepted rollout", every_s=0.02)
        self.starts.append(self.breakdown(sequences, time.time()))

    async def child(self, name: str, script: str, *arguments: str) -> Child:
        """Start a process that ends with this one."""
        child = Child(name, self.directory / f"{name}.log")
        self.children.append(child)
        await child.start(sys.executable, str(HERE / script), *arguments)
        return child

    # -- measuring -------------------------------------------------------------------------------

    async def measure(self, sequences: int, ticket: str) -> None:
        """Measure rounds of the full worker and bare vLLM in turns."""
        await self.start_worker(sequences, ticket)
        for number in range(self.options.rounds):
            await self.full_round(sequences, number)
            await self.worker.ask("hold")
            await self.idle()
            await self.bare_rounds(sequences, number)
            await self.worker.ask("go")
        await self.worker.ask("hold")
        await self.idle()
        await self.end_worker(sequences)

    async def full_round(self, sequences: int, number: int) -> None:
        """Measure one window of the worker while it is full."""
        await asyncio.sleep(self.options.warm)
        await self.full(sequences)
        before = [await child.ask("where") for child in (self.worker, self.trainer)]
        first = await self.worker.ask("count")
        said = await follow(lambda: self.status(self.worker.name), self.options.window)
        last = await self.worker.ask("count")
        seconds = last["clock"] - first["clock"]
        found = {
            name: last[name] - first[name] for name in ("tokens", "completions", "updates", "cpu")
        }
        self.add(FULL, sequences, number, seconds, found)
        self.rounds[-1] |= {
            "versions": found["updates"],
            "inflight": (last["filled"] - first["filled"]) / seconds,
            "worker_cpu": (last["own_cpu"] - first["own_cpu"]) / seconds,
            "said": said,
        }
        for child, then in zip((self.worker, self.trainer), before, strict=True):
            now = await child.ask("where")
            taken = cores(then["processes"], now["processes"], seconds)
            name = "trainer" if child is self.trainer else "worker"
            self.rounds[-1] |= {f"{name}_does": now["does"], f"{name}_cores": taken}
        show_where(self.rounds[-1])

    async def bare_rounds(self, sequences: int, number: int) -> None:
        """Measure the same for every kind of bare vLLM."""
        if self.bare is None:
            return
        asked = await self.worker.ask("asked")
        command = {name: asked[name] for name in ("max_tokens", "temperature", "stop_token_ids")}
        command |= {
            "sequences": sequences,
            "group": self.options.group,
            "prompts": asked["prompts"],
        }
        command |= {"warm_s": self.options.warm, "warm_completions": 0}
        command |= {"window_s": self.options.window}
        for row, mode in MODES.items():
            found = await self.bare.ask("measure", START_S, mode=mode, **command)
            self.add(row, sequences, number, found["seconds"], found)

    def add(
        self, row: str, sequences: int, number: int, seconds: float, found: dict[str, Any]
    ) -> None:
        """Store a round and print it."""
        one = {
            "row": row,
            "sequences": sequences,
            "round": number,
            "tokens_per_s": found["tokens"] / seconds,
            "completions_per_s": found["completions"] / seconds,
            "cpu_ms_per_token": 1e3 * found["cpu"] / max(1, found["tokens"]),
        }
        self.rounds.append(one)
        print(
            f"  round {number + 1} | {sequences:4} | {row:26} | {one['tokens_per_s']:10,.0f} tokens/s",
            flush=True,
        )

    async def full(self, sequences: int) -> None:
        """Wait until 90 % of the sequences are in flight: a newcomer is given few leases at first."""
        deadline = time.monotonic() + FULL_S
        while (await self.worker.ask("count"))["inflight"] < 0.9 * sequences:
            if time.monotonic() > deadline:
                self.notes.append(f"{sequences} sequences: never more than 90 % of them in flight")
                return
            await asyncio.sleep(0.2)

    async def idle(self) -> None:
        """Wait until the engine of a held worker is idle."""
        deadline = time.monotonic() + IDLE_S
        quiet = 0
        while quiet < 3:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the worker is not idle after {IDLE_S:.0f} s")
            await asyncio.sleep(0.3)
            quiet = quiet + 1 if not (await self.worker.ask("count"))["inflight"] else 0

    async def end_worker(self, sequences: int) -> None:
        """Record the verdicts on the worker's rollouts, once the trainer has judged everything.

        Groups that were held when some of their replies had ended are never submitted.
        """
        made = (await self.worker.ask("count"))["completions"]
        name = self.worker.name
        looked, before = -1, -2
        while looked != before:
            await asyncio.sleep(QUIET_S)
            looked, before = judged(self.status(name)), looked
        status = self.status(name)
        self.ends.append(
            {
                "sequences": sequences,
                "generated": made,
                "accepted": status.get("accepted", 0) / max(1, judged(status)),
                "rejected": status.get("rejected", {}),
                "lag": status.get("event_loop_lag", {}),
            }
        )
        await self.worker.end()

    def breakdown(self, sequences: int, accepted: float) -> dict[str, Any]:
        """Return the seconds of each phase, from process start to the first accepted rollout."""
        at = {one["event"]: one["at"] for one in reversed(self.worker.events)}
        arrived = [one["at"] for one in self.trainer.events if one["event"] == "arrived"]
        at |= {"begun": self.worker.begun, "accepted": accepted}
        if arrived and arrived[0] >= self.worker.begun:
            at["arrived"] = arrived[0]
        found: dict[str, Any] = {"sequences": sequences, "total": accepted - self.worker.begun}
        last = self.worker.begun
        for phase, event in PHASES.items():
            if event in at:
                found[phase] = at[event] - last
                last = at[event]
        return found

    async def until(self, true: Any, timeout_s: float, what: str, every_s: float = 0.1) -> None:
        """Wait until `true` returns True."""
        deadline = time.monotonic() + timeout_s
        while not await asyncio.to_thread(true):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {what} within {timeout_s:.0f} s:\n{self.trainer.tail()}")
            await asyncio.sleep(every_s)

    def status(self, name: str) -> dict[str, Any]:
        """Return a node's status; empty while it does not answer."""
        where = self.directory / RUN / "trainer" if name == "trainer" else self.directory / name
        try:
            return control.ask(where, "status")
        except NetworkError:
            return {}


def judged(status: dict[str, Any]) -> int:
    """Return the number of a worker's rollouts with a verdict, by its status."""
    return status.get("accepted", 0) + sum(status.get("rejected", {}).values())


def cores(before: dict[str, float], after: dict[str, float], seconds: float) -> dict[str, float]:
    """Return the cores used by each process; those with hardly any load are left out."""
    used = {name: (after[name] - before.get(name, 0.0)) / seconds for name in after}
    return {name: round(one, 2) for name, one in sorted(used.items()) if one >= 0.02}


async def follow(status: Callable[[], dict[str, Any]], seconds: float) -> dict[str, float]:
    """Return means of a node's engine and event-loop status over `seconds`."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    seen: list[dict[str, Any]] = []
    while (left := end - loop.time()) > 0:
        seen.append(await asyncio.to_thread(status))
        await asyncio.sleep(max(0.0, min(ASK_S, left, end - loop.time())))
    rows: list[dict[str, Any]] = [one["engine"] for one in seen if one.get("engine")]
    found = {name: round(fmean(row[name] for row in rows), 3) for name in SAID if rows}
    found |= {
        name: rows[-1][name] - rows[0][name] for name in ("preemptions", "taken_back") if rows
    }
    leases = [one["leases"] for one in seen if "leases" in one]
    late = [one["event_loop_lag"] for one in seen if one.get("event_loop_lag")]
    if leases:
        found["leases"] = round(fmean(leases), 2)
    if late:
        found |= {f"lag_{name}": value for name, value in late[-1].items()}
    return found


# -- tables and goals -----------------------------------------------------------------------------


def rates(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per kind and number of sequences: the median of its rounds, tokens/s."""
    rows: list[dict[str, Any]] = []
    for row, sequences in dict.fromkeys((one["row"], one["sequences"]) for one in rounds):
        found = [one for one in rounds if (one["row"], one["sequences"]) == (row, sequences)]
        rows.append(
            {
                "row": row,
                "sequences": sequences,
                "tokens_per_s": median(one["tokens_per_s"] for one in found),
                "lowest": min(one["tokens_per_s"] for one in found),
                "highest": max(one["tokens_per_s"] for one in found),
                "completions_per_s": median(one["completions_per_s"] for one in found),
                "cpu_ms_per_token": median(one["cpu_ms_per_token"] for one in found),
                "rounds": len(found),
            }
        )
    return rows


def judge(rows: list[dict[str, Any]], ends: list[dict[str, Any]], *, cuda: bool) -> list[Goal]:
    """Return the goals that these rows allow to judge."""
    by = {(one["row"], one["sequences"]): one for one in rows if "skipped" not in one}
    goals: list[Goal] = []
    for (row, sequences), full in by.items():
        bare = by.get((BARE, sequences))
        if row != FULL or not bare:
            continue
        name = f"full worker / {BARE}, {sequences}"
        if cuda:
            goals.append(at_least(name, full["tokens_per_s"] / bare["tokens_per_s"], ON_GPU, "x"))
        else:
            ratio = bare["cpu_ms_per_token"] / full["cpu_ms_per_token"]
            goals.append(at_least(f"{name}, by CPU time", ratio, ON_CPU, "x"))
    return goals + [
        at_least(f"accepted of what was judged, {end['sequences']}", end["accepted"], ACCEPTED)
        for end in ends
    ]


def show_where(one: dict[str, Any]) -> None:
    """Print where the time of a full-worker round went, at once in case the run is cut short."""
    print(
        f"    {one['versions']} versions, {one['inflight']:.1f} in flight, "
        f"the node's own process took {one['worker_cpu']:.2f} cores"
    )
    for name in ("said", "worker_cores", "worker_does", "trainer_cores", "trainer_does"):
        found = ", ".join(f"{key} {value}" for key, value in one[name].items())
        print(f"    {name:14} {found}", flush=True)


def show(rows: list[dict[str, Any]], bench: Bench) -> None:
    """Print the tables."""
    print(
        f"\n{'row':28} {'sequences':>9} {'tokens/s':>10} {'lowest':>10} {'highest':>10} {'CPU ms/token':>13}"
    )
    for row in rows:
        if "skipped" in row:
            print(f"{row['row']:28} skipped ({row['skipped']})")
            continue
        print(
            f"{row['row']:28} {row['sequences']:9} {row['tokens_per_s']:10,.0f} {row['lowest']:10,.0f}"
            f" {row['highest']:10,.0f} {row['cpu_ms_per_token']:13.3f}"
        )
    for start in bench.starts:
        print(f"\ncold start to the first accepted rollout, {start['sequences']} sequences")
        for phase, seconds in start.items():
            if phase != "sequences":
                print(f"  {phase:40} {seconds:7.2f} s")
    for end in bench.ends:
        lag = {name: round(value, 4) for name, value in end["lag"].items()}
        print(
            f"\n{end['sequences']} sequences: {end['generated']} completions, {end['accepted']:.1%} accepted, "
            f"rejected {end['rejected'] or 'none'}, event loop late by {lag} s"
        )
    for note in bench.notes:
        print(note)


def parse() -> argparse.Namespace:
    """Parse the options; defaults depend on this machine's hardware."""
    import torch

    cuda = torch.cuda.is_available()
    parser = make_parser(__doc__, "two short rounds")
    parser.add_argument("--sequences", type=int, nargs="+", default=[256, 512] if cuda else [16])
    parser.add_argument("--shape", default="0.6b" if cuda else "tiny", choices=list(SHAPES))
    parser.add_argument("--engine", default="", choices=["", "vllm", "hf"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window", type=float, default=8.0, help="seconds of a measurement")
    parser.add_argument("--warm", type=float, default=3.0, help="seconds before each")
    parser.add_argument(
        "--tokens", type=int, default=128 if cuda else 32, help="of a completion, at most"
    )
    parser.add_argument(
        "--prompt", type=int, default=64 if cuda else 24, help="letters of a prompt"
    )
    parser.add_argument(
        "--group", type=int, default=16 if cuda else 4, help="completions of a prompt"
    )
    parser.add_argument("--lease", type=int, default=4 if cuda else 2, help="groups of a lease")
    parser.add_argument(
        "--length", type=int, default=1024 if cuda else 256, help="engine.max_model_len"
    )
    parser.add_argument("--memory", type=float, default=0.35, help="of the GPU, for each engine")
    parser.add_argument("--graphs", metavar="MODE", help="vLLM's cudagraph_mode, of both engines")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work there and leave the logs")
    options = parser.parse_args()
    options.cuda = cuda
    options.engine = options.engine or ("vllm" if find_spec("vllm") else "hf")
    if options.quick:
        options.rounds, options.window = min(options.rounds, 2), min(options.window, 4.0)
        options.warm = min(options.warm, 2.0)
    return options


def main() -> int:
    """Measure, print, and return exit code 0 if every goal was met."""
    options = parse()
    if not options.cuda:
        os.environ["OMP_NUM_THREADS"] = "1"  # the other core is for everything beside vLLM
    with tempfile.TemporaryDirectory() as name:
        directory = (options.keep or Path(name)).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        bench = Bench(options, directory)
        make_model(directory / "model", options.shape, options.length, options.tokens)
        print(
            f"shape {options.shape}, engine {options.engine} on {'cuda' if options.cuda else 'the CPU'}, "
            f"completions of {options.tokens} tokens at most",
            flush=True,
        )
        asyncio.run(bench.run())
    rows = rates(bench.rounds)
    if bench.bare is None:
        why = "the engine is hf" if find_spec("vllm") else "vLLM is not installed"
        rows += [{"row": row, "skipped": why} for row in MODES]
    goals = judge(rows, bench.ends, cuda=options.cuda)
    show(rows, bench)
    found = {"rounds": bench.rounds, "starts": bench.starts, "ends": bench.ends}
    return conclude(rows, goals, options.json, notes=bench.notes, **found)


if __name__ == "__main__":
    sys.exit(main())
