"""Compare a whole run with its parts: trained tokens/s, engine occupancy, trainer waits.

    python scripts/bench/run.py [--shape tiny|50m|0.6b|4b] [--engine vllm|hf] [--gpus 0|1|2|4|8] [--steps N]
        [--mean TOKENS] [--most TOKENS] [--groups N] [--group-size N] [--inflight N] [--bound N]
        [--adapters RANK] [--recompute] [--synchronous N] [--quick] [--json FILE]

Random weights; replies end with probability 1 / mean, so their lengths have a long tail; rewards are hashes of
replies, so every group has a signal (run_taskset.py); lr 1e-6. In sequence, 1 and 2 at
the same time where they have separate GPUs:

    1. the engine alone: bare vLLM (or the hf engine), no logprobs, as many sequences in flight;
    2. the trainer alone: the same learner on samples of the same lengths, a snapshot per step;
    3. the whole: `primerl-node rl`, a trainer and one worker, which take turns on a shared device; with four
       GPUs or more a trainer of two ranks and a worker on each other GPU, compared with as many engines alone;
    4. with --synchronous N: the whole again with max_off_policy_steps = 0, N steps, for its mismatch KL.

The whole is compared with the slower part, on a shared GPU with the rate of taking turns: 1 / (1 / engine + 1 /
trainer). On CPUs each part has a separate thread.
"""

import argparse
import asyncio
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from primerl.scripts.bench.children import Child, tail
from primerl.scripts.bench.models import SHAPES, fake_batch, random_policy
from primerl.scripts.bench.report import (
    Goal,
    at_least,
    at_most,
    conclude,
    make_parser,
    show_figures,
)

HERE = Path(__file__).parent
RUN = "run"
LIKELY = 32.0
"""Logit margin of the drawn tokens over all others that the constant alone would give."""
CONSTANT = 3.0
"""The constant in every embedding, in units of the root of the width; wider models' layers add more to a
state."""
OTHERS = 10.0
"""Factor of an embedding's other elements."""
WARM_STEPS = 3
"""Uncounted first steps: engines compile, and nothing is in flight yet."""
LOOK_S = 0.5
START_S = 400.0
QUICK = {
    **{"shape": "tiny", "engine": "hf", "gpus": 0, "steps": 40, "mean": 60, "most": 240},
    **{"groups": 8, "group_size": 8, "inflight": 64, "synchronous": 6, "lr": 1e-6, "limit": 120.0},
}


def main() -> int:
    """Measure, print, and return exit code 0 if every goal was met."""
    options = parse()
    signal.signal(signal.SIGTERM, end)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        directory = Path(name)
        make_model(directory / "model", options)
        engine, trainer = asyncio.run(parts_alone(directory, options))
        whole = run_whole(directory / "whole", directory / "model", options, options.bound)
        synchronous = (
            run_whole(directory / "sync", directory / "model", options, 0)
            if options.synchronous
            else {}
        )
        found = compare(whole, engine, trainer, synchronous, options)
        show_figures(found)
        print()
        code = conclude(found, judge(found, options), options.json)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # removing checkpoints of 50 GB takes a while
    return code


class OutOfTime(Exception):
    """SIGTERM: the figures of the steps so far are printed, and no process stays."""


def end(signum: int, frame: object) -> None:
    """Raise OutOfTime."""
    raise OutOfTime


def parse() -> argparse.Namespace:
    """Parse the options; --quick overrides those in QUICK."""
    parser = make_parser(__doc__, "tiny, with the hf engine on the CPU")
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--engine", choices=["vllm", "hf"], default="vllm")
    parser.add_argument(
        "--gpus", type=int, default=1, help="0: CPU; 1: shared; 2: one each; more: two train"
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--mean", type=int, default=400, help="tokens of a reply")
    parser.add_argument("--most", type=int, default=1024, help="most tokens of a reply")
    parser.add_argument("--groups", type=int, default=32, help="groups of a batch")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--inflight", type=int, default=512)
    parser.add_argument("--bound", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--adapters", type=int, default=0, metavar="RANK", help="train these only")
    parser.add_argument("--recompute", action="store_true", help="activations, for less memory")
    parser.add_argument("--synchronous", type=int, default=0, help="steps of the synchronous run")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds of a whole run")
    parser.add_argument("--logs", type=Path, help="folder for the logs of the whole")
    parser.add_argument("--window", type=float, default=20.0, help="seconds of the engine alone")
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"))
    parser.add_argument("--learn", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.learn:
        job = json.loads(options.learn.read_text())
        speed = asyncio.run(learn(job))
        Path(job["answer"]).write_text(json.dumps({"tokens_per_s": speed}))
        sys.exit(0)
    if options.quick:
        vars(options).update(QUICK, window=6.0)
    return options


def make_model(directory: Path, options: argparse.Namespace) -> None:
    """Make random weights that draw about `mean` tokens evenly, one of which ends a reply.

    Random states favour some tokens over others, differently everywhere. So one dimension of the embeddings
    exceeds all others of a state together, and layers neither read nor write it; in the output head it
    separates the drawn tokens from the others. All other weights have the usual size, so an update changes as
    many of them.
    """
    from safetensors.torch import save_file

    from primerl.node.models.tensors import to_torch

    state = random_policy(
        directory, options.shape, tie_word_embeddings=False, max_position_embeddings=length(options)
    )
    tensors = {name: to_torch(tensor) for name, tensor in state.items()}
    ends = json.loads((directory / "generation_config.json").read_text())["eos_token_id"]
    embeddings, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    vocabulary, width = embeddings.shape
    drawn = [one for one in range(vocabulary) if one != ends][: options.mean - 1]
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0
        elif name.endswith("_proj.weight"):
            tensor[:, 0] = 0
    embeddings *= OTHERS
    embeddings[:, 0] = CONSTANT * max(1, width / 1024) ** 2 * math.sqrt(width)
    head[:, 0], head[ends] = 0, 0
    # a normed state is as long as the root of the width, mostly in that dimension
    head[[ends, *drawn], 0] = LIKELY / math.sqrt(width)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def length(options: argparse.Namespace) -> int:
    """Return the longest sequence: a prompt of a few bytes and a reply."""
    return 64 + options.most


def steps(options: argparse.Namespace, bound: int) -> int:
    """Return the number of steps of a run."""
    return options.steps if bound else options.synchronous


def settings(
    directory: Path, model: Path, options: argparse.Namespace, bound: int
) -> dict[str, Any]:
    """Return the config of the run."""
    cuda = options.gpus > 0
    engine: dict[str, Any] = {
        **{"type": options.engine, "dtype": "bfloat16" if cuda else "float32"},
        **{"max_batch": options.inflight, "max_model_len": length(options)},
    }
    # groups are leased until as many steps ahead, and run_whole() stops before there is nothing left to draw
    last = steps(options, bound) + bound
    return {
        **{"name": RUN, "output_dir": str(directory), "max_steps": last, "fsync": False},
        "network": {"host": "127.0.0.1", "libp2p": False},
        "model": {"name": str(model)},
        "engine": engine,
        "environment": {"id": "run_taskset"},
        "sampling": {"max_tokens": options.most},
        "rollouts": {
            **{"group_size": options.group_size, "groups_per_batch": options.groups},
            **{"groups_per_lease": max(1, options.groups // 8), "max_off_policy_steps": bound},
            **{"leases_per_worker": 64, "lease_timeout_s": 300.0},
        },
        "training": {
            **{"lr": options.lr, "seq_len": max(length(options), 16384 if cuda else 0)},
            **({"lora": {"rank": options.adapters}} if options.adapters else {}),
            **({"activation_checkpointing": "full"} if options.recompute else {}),
            **({} if cuda else {"threads": 1}),
            **({"backend": "fsdp", "fsdp": {"ranks": 2}} if options.gpus > 2 else {}),
        },
        "checkpoint": {"interval": 1000},
        "evaluation": {"prompts": 0},
    }


def run_whole(
    directory: Path, model: Path, options: argparse.Namespace, bound: int
) -> dict[str, Any]:
    """Run one `rl` for as many steps as asked for.

    Returns its metrics, and its workers' engine status twice a second.
    """
    from primerl.node.config import loader

    directory.mkdir(parents=True)
    config = directory / "config.toml"
    config.write_text(loader.to_toml(settings(directory, model, options, bound)))
    command = [sys.executable, "-m", "primerl.cli.main", "rl", "@", str(config)]
    command += [part for key, value in options.set for part in (f"--{key}", value)]
    workers = engines(options)
    if options.gpus > 1:
        trainers = options.gpus - workers
        command += ["--trainer-gpus", str(trainers), "--inference-gpus", str(workers)]
    command += ["--launch.workers", str(workers)]
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    if options.gpus == 0:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    log = directory / "rl.log"
    looks: list[Look] = []
    trainer: list[dict[str, Any]] = []
    metrics = directory / RUN / "metrics.jsonl"
    lines: list[dict[str, Any]] = []
    wanted = steps(options, bound)
    began = time.time()
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        try:
            while (
                process.poll() is None
                and time.time() - began < options.limit
                and len(lines) < wanted
            ):
                for number in range(1, workers + 1):
                    looks += look(directory / RUN / f"worker_{number}", number)
                if options.logs:
                    trainer.append({"at": time.time(), **ask(directory / RUN / "trainer")})
                shown, lines = len(lines), read_lines(metrics)
                for line in lines[shown:]:
                    print(
                        f"{directory.name}: step {line['step']} after {line['time'] - began:.0f} s, "
                        f"{line['tokens']:.0f} tokens",
                        flush=True,
                    )
                time.sleep(LOOK_S)
        except OutOfTime:
            print(f"{directory.name}: out of time", flush=True)
        finally:
            process.terminate()
            process.wait()
            if options.logs:
                options.logs.mkdir(parents=True, exist_ok=True)
                (options.logs / f"{directory.name}.log").write_text(tail(directory, 200_000))
                seen = {"workers": [one._asdict() for one in looks], "trainer": trainer}
                (options.logs / f"{directory.name}.status.json").write_text(json.dumps(seen))
    loaded = [
        float(found)
        for log in directory.glob("run/logs/*.log")
        for found in re.findall(
            r"policy [1-9]\d* loaded in ([\d.]+)s", log.read_text(errors="replace")
        )
    ]
    lines = read_lines(metrics)[:wanted]
    if len(lines) < (WARM_STEPS + 3 if bound else 2):
        raise RuntimeError(f"the run came to step {len(lines)} only\n{tail(directory, 3000)}")
    print(f"{directory.name}: {len(lines)} steps in {time.time() - began:.0f} s", flush=True)
    return {"began": began, "lines": lines, "looks": looks, "loaded": loaded}


class Look(NamedTuple):
    """A worker's status at a time (Unix seconds)."""

    at: float
    worker: int
    engine: dict[str, Any]
    leases: int
    lag: dict[str, float]
    """Event-loop lag, seconds."""


def engines(options: argparse.Namespace) -> int:
    """Return the number of workers, each with a separate engine."""
    return options.gpus - 2 if options.gpus > 2 else 1


def read_lines(metrics: Path) -> list[dict[str, Any]]:
    """Return the metrics of the steps so far."""
    if not metrics.exists():
        return []
    return [json.loads(line) for line in metrics.read_text().split("\n")[:-1]]


def ask(data_dir: Path) -> dict[str, Any]:
    """Return the status of a node now, without its long lists; empty before it answers."""
    from primerl.node.errors import NetworkError
    from primerl.node.ops import control

    try:
        status = control.ask(data_dir, "status")
    except (NetworkError, OSError):
        return {}
    return {key: value for key, value in status.items() if key not in ("history", "bounds")}


def look(data_dir: Path, worker: int) -> list[Look]:
    """Return a worker's status now; empty before it has an engine."""
    status = ask(data_dir)
    if not status.get("engine"):
        return []
    lag = status.get("event_loop_lag") or {}
    return [Look(time.time(), worker, status["engine"], status.get("leases", 0), lag)]


async def parts_alone(
    directory: Path, options: argparse.Namespace
) -> tuple[dict[str, float], dict[str, float]]:
    """Measure the engine and the trainer alone, at once where they have separate GPUs."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(options.gpus)))
    names = given.split(",")
    trainers = max(1, options.gpus - engines(options))

    async def engine() -> dict[str, float]:
        found = await engine_alone(directory, options, names[-1])
        print(
            f"engine alone: {found['tokens_per_s']:.0f} tokens/s, {found['mean']:.0f} a reply",
            flush=True,
        )
        return found

    async def trainer() -> dict[str, float]:
        visible = ",".join(names[:trainers])
        found = await asyncio.to_thread(trainer_alone, directory, options, visible)
        print(f"trainer alone: {found['tokens_per_s']:.0f} tokens/s", flush=True)
        return found

    if options.gpus < 2:
        return await engine(), await trainer()
    both = await asyncio.gather(engine(), trainer())
    return both[0], both[1]


async def engine_alone(
    directory: Path, options: argparse.Namespace, visible: str
) -> dict[str, float]:
    """Return tokens/s of the engine with no other load, with as many sequences in flight.

    `visible` is its CUDA_VISIBLE_DEVICES.
    """
    config = settings(directory, directory / "model", options, options.bound)["engine"]
    generation = json.loads((directory / "model" / "generation_config.json").read_text())
    child = Child("engine", directory / "engine.log")
    arguments = (options.engine, str(directory / "model"), json.dumps(config))
    gpu = {"CUDA_VISIBLE_DEVICES": visible} if options.gpus else {}
    await child.start(
        sys.executable, str(HERE / "engine_alone.py"), *arguments, env={**os.environ, **gpu}
    )
    try:
        await child.event("ready", START_S)
        answer = await child.ask(
            "measure",
            timeout_s=options.window * 4 + 2 * START_S,
            **{"sequences": options.inflight, "mode": "bare", "group": options.group_size},
            **{"prompts": [[1, 2, 3, 4, 5, 6, 7, n % 250] for n in range(512)]},
            **{"max_tokens": options.most, "temperature": 1.0},
            **{"stop_token_ids": [generation["eos_token_id"]]},
            **{"warm_s": options.window / 2, "warm_completions": 2 * options.inflight},
            window_s=options.window,
        )
    finally:
        await child.end()
    if not answer["tokens"]:
        raise RuntimeError(f"no reply ended within {options.window:.0f} s: set a larger --window")
    return {
        "tokens_per_s": answer["tokens"] / answer["seconds"],
        "mean": answer["tokens"] / max(answer["completions"], 1),
    }


def trainer_alone(directory: Path, options: argparse.Namespace, visible: str) -> dict[str, float]:
    """Return tokens/s of the learner with no other load; `visible`: its CUDA_VISIBLE_DEVICES."""
    config = settings(directory, directory / "model", options, options.bound)
    rng = random.Random(0)
    replies = [
        [
            min(options.most, 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / options.mean)))
            for _ in range(options.groups * options.group_size)
        ]
        for _ in range(WARM_STEPS + 3)
    ]
    request, answer = directory / "learn.json", directory / "learned.json"
    job = {"model": str(directory / "model"), "config": config, "replies": replies}
    request.write_text(json.dumps({**job, "answer": str(answer)}))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible if options.gpus else ""}
    if options.gpus == 0:
        environment |= {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--learn", str(request)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the trainer alone failed\n{done.stderr[-3000:]}")
    return json.loads(answer.read_text())


async def learn(job: dict[str, Any]) -> float:
    """Return tokens/s of a step and a snapshot per batch, after the first ones.

    Runs in the process of trainer_alone().
    """
    from primerl.node.app.factories import make_backend
    from primerl.node.config.run import RunConfig
    from primerl.node.training.backend import TrainBatch

    backend = make_backend(RunConfig.model_validate(job["config"]))
    found: list[float] = []
    try:
        await backend.start(Path(job["model"]))
        for step, lengths in enumerate(job["replies"], start=1):
            batch = TrainBatch(step, fake_batch([8 + one for one in lengths], 256, seed=step))
            began = time.perf_counter()
            await backend.step(batch)
            await backend.snapshot()
            found.append(sum(lengths) / (time.perf_counter() - began))
    finally:
        await backend.close()
    return median(found[WARM_STEPS:])


def compare(
    whole: dict[str, Any],
    engine: dict[str, float],
    trainer: dict[str, float],
    synchronous: dict[str, Any],
    options: argparse.Namespace,
) -> dict[str, float]:
    """Return all figures by name."""
    lines = whole["lines"][WARM_STEPS:]
    first, last = whole["lines"][WARM_STEPS - 1]["time"], lines[-1]["time"]
    seconds = last - first
    tokens = sum(line["tokens"] for line in lines)
    looks: list[Look] = [one for one in whole["looks"] if first <= one.at <= last]
    inside = [one.engine for one in looks]
    fast, slow = engine["tokens_per_s"] * engines(options), trainer["tokens_per_s"]
    alone = 1 / (1 / fast + 1 / slow) if options.gpus == 1 else min(fast, slow)
    trained = tokens / seconds
    # replies drawn before the first step are trained, too: a short run would look faster than it is, unless
    # the trainer is the limit, where the engines draw less for as long
    drawn = generated(looks) if options.gpus else trained
    reached = trained if options.gpus > 1 and slow < fast else min(trained, drawn)
    found = {
        "whole, trained tokens/s": trained,
        "engine alone, tokens/s": fast,
        "trainer alone, tokens/s": slow,
        "whole / parts": reached / alone,
        **({"generated by the workers, tokens/s": drawn} if options.gpus else {}),
        "engine at least half full, share of time": share_full(inside),
        "sequences in flight of an engine, mean": fmean(row["inflight"] for row in inside)
        if inside
        else 0.0,
        "trainer waits for a batch, share of time": sum(
            line["time/wait_for_batch"] for line in lines
        )
        / seconds,
        "an audit runs, share of time": sum(line["time/audit"] for line in lines)
        / (seconds * max(1, options.gpus)),
        "seconds per step": fmean(b["time"] - a["time"] for a, b in pairwise(whole["lines"][2:])),
        "of which in the learner": fmean(line["time/step"] for line in lines),
        "publish, s": median(line["time/broadcast_weights"] for line in lines),
        "a version is in the engine after, s": median(whole["loaded"] or [math.nan]),
        "staleness, mean": fmean(line["off_policy/mean"] for line in lines),
        "staleness, most": max(line["off_policy/max"] for line in lines),
        "rejected": float(lines[-1]["rollouts/rejected"]),
        "mismatch KL": fmean(line["mismatch_kl/all/mean"] for line in lines),
        "first step after, s": whole["lines"][0]["time"] - whole["began"],
        **{
            f"from the start to {key[6:]}, s": value
            for key, value in whole["lines"][0].items()
            if key.startswith("start/")
        },
        "reply, mean tokens": tokens / sum(line["batch/samples"] for line in lines),
    }
    if synchronous:
        found["mismatch KL, synchronous"] = fmean(
            line["mismatch_kl/all/mean"] for line in synchronous["lines"][1:]
        )
    return found


def generated(looks: Sequence[Look]) -> float:
    """Return tokens per second drawn by the workers' engines, used or not."""
    drawn = 0.0
    for worker in {one.worker for one in looks}:
        own = [one for one in looks if one.worker == worker]
        tokens = own[-1].engine["generated_tokens"] - own[0].engine["generated_tokens"]
        drawn += tokens / max(own[-1].at - own[0].at, LOOK_S)
    return drawn


def share_full(rows: Sequence[dict[str, Any]]) -> float:
    """Return the share of samples with at least half of the allowed sequences in flight."""
    return fmean(row["inflight"] >= row["cap"] / 2 for row in rows) if rows else 0.0


def judge(found: dict[str, float], options: argparse.Namespace) -> list[Goal]:
    """Return the goals of this device."""
    # on two cores audits, environments and the network take time from both parts
    least = {0: 0.4, 1: 0.85}.get(options.gpus, 0.90)
    goals = [
        at_least("whole / parts", found["whole / parts"], least),
        at_most("staleness, most", found["staleness, most"], options.bound),
        at_most("rejected", found["rejected"], 0),
    ]
    if options.gpus > 1 and found["engine alone, tokens/s"] < found["trainer alone, tokens/s"]:
        name = "engine at least half full, share of time"
        goals.append(at_least(name, found[name], 0.95))
    if options.gpus:
        name = "a version is in the engine after, s"
        goals.append(at_most(name, found[name], 3.0))
    if options.gpus and "mismatch KL, synchronous" in found:
        most = 1.5 * found["mismatch KL, synchronous"]
        goals.append(at_most("mismatch KL", found["mismatch KL"], most))
    return goals


if __name__ == "__main__":
    sys.exit(main())
