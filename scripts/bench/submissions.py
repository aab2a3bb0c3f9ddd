"""Measure what a submission costs a trainer, and how long it waits for its verdict.

    python scripts/bench/submissions.py [--rate 900] [--submissions 200] [--clients N ...] [--hold S] [--quick]

A real trainer receives bundles of 8 groups of 16 rollouts over iroh on loopback, from workers in another
process that has replies at hand: alphabet-sort of one turn, prompts of some 60 tokens, replies of 96, 49,152 in
the vocabulary. All of the trainer's path is the product's: envelopes, ledger, checks, an environment's process
that plays each rollout again, the search for copies, audits by trust, verdicts, buffer, batches, kept rollouts,
publishing. The learner encodes its batches; the process that audits reads its items and finds them clean.

First the workers send as fast as they are leased, then --rate rollouts a second. With several --clients the
first part is measured with each number of workers: the rate, the trainer's memory, how long a request takes
that waits for no work, of which each client makes one every two seconds. These are timed by TIMERS of the
workers, which have a process of their own and ask more often: the others' process is busy itself. With --hold
they then go on for so many seconds, and memory, files and tasks of the trainer are watched.

Time from arrival to verdict begins where the bytes are whole, and ends where the signed verdict is in the
ledger. CPU is the process's own; where it goes is sampled every few milliseconds, by the CPU time of each
thread. It grows with other load on the machine: compare within one run.
"""

import argparse
import asyncio
import json
import logging
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from operator import itemgetter
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import msgspec
import numpy as np
import psutil  # pyright: ignore[reportMissingModuleSource]

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.counting_backend import CountingBackend
from support.swarm import Running, Swarm, make_model

from primerl.crypto.keys import SecretKey
from primerl.node.app.factories import Factories, MakeLedger, make_environment
from primerl.node.config.run import EngineConfig, EnvironmentConfig, NetworkConfig, RunConfig
from primerl.node.environments.chat import ChatFormat
from primerl.node.environments.verifiers import VerifiersEnvironment
from primerl.node.inference.fingerprint import pack
from primerl.node.p2p.connections import ConnectionPool
from primerl.node.p2p.iroh import IrohTransport
from primerl.node.p2p.limits import Pacer
from primerl.node.p2p.peers import PeerTable
from primerl.node.p2p.rpc import Refused
from primerl.node.p2p.transport import Transport, TransportError
from primerl.node.p2p.uploads import upload
from primerl.node.process.threads import share_python
from primerl.node.storage.ledger import HonestRollout, Ledger, LedgerView
from primerl.node.training.backend import StepMetrics, TrainBatch
from primerl.node.verification.audit_process import AuditSetUp
from primerl.node.verification.audit_process import main as serve_audits
from primerl.node.verification.auditor import AuditItem, Auditor, Measured, Reading, Unreadable
from primerl.node.verification.hf_auditor import HfAuditor
from primerl.node.weights.state import State
from primerl.protocol import tickets
from primerl.protocol.envelope import Purpose, seal, unseal
from primerl.protocol.errors import Reason
from primerl.protocol.leases import Lease
from primerl.protocol.manifests import PeerRecord, Ticket
from primerl.protocol.messages import Hello, LeaseReply, LeaseRequest, Welcome, WorkerStats
from primerl.protocol.rollouts import (
    BranchRecord,
    GroupRecord,
    RolloutRecord,
    Submission,
    Verdict,
)
from primerl.protocol.version import ALPN_BLOBS, ALPN_CONTROL, ALPN_PIPELINE, WIRE_VERSION
from primerl.scripts.bench.report import Goal, at_least, at_most, conclude, make_parser

RATE = 900.0
JUDGED_S = 0.3
CORES = 1.5
CLIENTS_SHARE, REQUEST_S = 0.9, 0.25
WORKERS = 4
REPLY = 96
VOCABULARY = 49_152
TASK_ARGS = {"min_turns": 1, "max_turns": 1, "min_names_per_turn": 2, "max_names_per_turn": 3}
ENVIRONMENT = {"id": "alphabet-sort", "args": TASK_ARGS}
ROLLOUTS = {
    "group_size": 16,
    "groups_per_batch": 32,
    "groups_per_lease": 8,
    "max_off_policy_steps": 5,
}
BUNDLE = 128
"""Rollouts of a submission."""
DEADLINE_S = 120.0
START_S = 600.0
END, AGAIN = "end\n", "again\n"
SAMPLE_S = 0.01
IDLE = frozenset(("select", "wait", "_worker", "get"))
"""Functions in which a thread waits."""
MOST_PEERS = 256
"""`network.max_peers` by default; newcomers may have half of the places, and a worker takes several."""
LEASES = 3
"""Leases that a worker holds at a time, beside the one that it submits."""
PROBE_S, TIMED_PROBE_S = 2.0, 0.1
"""Pause between a client's requests that wait for no work; of a client that times them."""
TIMERS = 2
HELD_S, GROWTH = 15.0, 0.03
"""Seconds between two looks at a trainer that is held; most growth of its memory."""
NATS = 0.9
"""Mean surprise of a token that a small model draws."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORK = {
    "iroh:IrohStream.read_exact": "receive bytes",
    "uploads:UploadReceiver.receive": "receive bytes",
    "submissions:SubmissionReceiver._check_bundle": "open the bundle at its arrival",
    "submissions:SubmissionReceiver._keep": "sign the receipt",
    "ledger:Ledger.receive": "write the bundle",
    "submissions:VerificationQueue.open": "open the bundle for its checks",
    "verifier:Verifier._check_tasks": "make the tasks again",
    "checks:check_submission": "check the form",
    "verifier:Verifier._score_all": "ask the environment's process",
    "child_process:ChildProcess._read": "read answers of processes",
    "child_process:ChildProcess._flush": "write to processes",
    "duplicates:CopyDetector.check": "look for copies",
    "verifier:Verifier._audit": "make and judge audits",
    "hf_auditor:HfAuditor.audit": "ask the process that audits",
    "verifier:Verifier._groups": "make groups",
    "submissions:SubmissionQueue.take": "use the groups",
    "submissions:VerificationQueue._judge": "sign and write the verdict",
    "kept_rollouts:RolloutKeeper._write": "write kept rollouts",
    "scheduler:LeaseScheduler.work_changed": "grant leases",
    "scheduler:LeaseScheduler.lease": "grant leases",
    "submissions:Learner.step": "encode the batch for the learner",
    "advantages:credit": "credit",
    "loop:TrainerRole._publish": "publish",
    "loop:TrainerRole.begin_checkpoint": "checkpoint",
    "loop:TrainerRole._step": "cut and note a step",
}
"""Functions, as FILE:NAME, and the work that CPU time below them counts as; the innermost one counts."""


# -- the model's files -----------------------------------------------------------------------------


def make_small_model(directory: Path) -> Path:
    """Make a model directory whose tokenizer needs some 40 tokens for a prompt."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    from primerl.node.environments.tasksets.alphabet_sort import (
        AlphabetSortConfig,
        AlphabetSortTaskset,
    )

    make_model(directory)
    taskset = AlphabetSortTaskset(AlphabetSortConfig(**TASK_ARGS))  # pyright: ignore[reportArgumentType]
    texts = [str(taskset.task_at(index).data.prompt) for index in range(2000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|im_start|>", "<|im_end|>"]
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=4096,
            special_tokens=specials,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "chat_template": TEMPLATE,
        },
    )
    shape = {"model_type": "qwen3", "vocab_size": VOCABULARY, "eos_token_id": 1}
    write_json(directory / "config.json", shape)
    return directory


def write_json(path: Path, value: object) -> None:
    """Write a JSON file."""
    path.write_bytes(msgspec.json.encode(value))


# -- the process that audits -------------------------------------------------------------------------


class CleanMeasurer:
    """A Measurer that finds every item clean, without a model."""

    def __init__(self, setup: AuditSetUp) -> None:
        del setup

    def measure(
        self, items: Sequence[AuditItem], states: Mapping[int, State]
    ) -> list[Measured | Unreadable]:
        """Return clean measures."""
        del states
        return [Measured(0, 0, len(item.logprobs), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0) for item in items]

    def read(
        self, items: Sequence[AuditItem], states: Mapping[int, State]
    ) -> list[Reading | Unreadable]:
        """Read nothing: the run's bounds are built in."""
        del states
        return [Unreadable("not read here", proof=False) for _ in items]

    def free_spare_memory(self) -> None:
        """Free nothing."""


# -- the workers, in another process -----------------------------------------------------------------


@dataclass
class AnsweredTask:
    """A task and a right reply to it."""

    prompt: list[int]
    reply: list[int]


class Replies:
    """Replies at hand: half of them right, all of REPLY tokens, no two alike."""

    def __init__(self, environment: VerifiersEnvironment, plain: Sequence[int], stop: int) -> None:
        """`plain` are tokens that mean nothing to the reward; `stop` ends a reply."""
        self._environment = environment
        self._plain = np.array(plain, np.uint32)
        self._stop = stop
        self._tasks: dict[int, AnsweredTask] = {}
        self._chance = np.random.default_rng(os.getpid())
        count = 64
        rows = self._chance.normal(size=(count * REPLY, 7)).astype(np.float32)
        self._proofs = [pack(part) for part in np.split(rows, count)]
        nats = self._chance.exponential(NATS, (count, REPLY))
        self._logprobs = [(-part).astype("<f4").tobytes() for part in nats]

    async def bundle(self, lease: Lease, version: int) -> tuple[GroupRecord, ...]:
        """Answer a lease with one policy version."""
        tasks = [await self._task(reference.index) for reference in lease.tasks]
        return tuple(
            GroupRecord(
                reference.index,
                reference.digest,
                tuple(self._rollout(task, at, version) for at in range(lease.group_size)),
            )
            for reference, task in zip(lease.tasks, tasks, strict=True)
        )

    async def _task(self, index: int) -> AnsweredTask:
        if index not in self._tasks:
            task = await self._environment.task(index)
            shown = await self._environment.demonstration(task)
            assert shown is not None
            ((prompt, reply),) = shown.turns()
            self._tasks[index] = AnsweredTask(prompt, reply[:-1])
        return self._tasks[index]

    def _rollout(self, task: AnsweredTask, at: int, version: int) -> RolloutRecord:
        right = at % 2 == 0
        begin = task.reply if right else []
        rest = self._chance.choice(self._plain, REPLY - 1 - len(begin))
        tokens = np.array([*task.prompt, *begin, *rest, self._stop], "<u4")
        record = BranchRecord(
            tokens.tobytes(),
            bytes(len(task.prompt)) + b"\1" * REPLY,
            self._logprobs[int(self._chance.integers(len(self._logprobs)))],
            version,
            version,
            "stop",
            proof=self._proofs[int(self._chance.integers(len(self._proofs)))],
        )
        return RolloutRecord((record,), float(right), "")


class Pace:
    """Turns of submissions: as fast as possible, or so many rollouts a second."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._next = 0.0

    async def turn(self) -> None:
        """Wait for a submission's time. Late ones follow at once, a second's worth at most."""
        if self.rate:
            now = time.monotonic()
            self._next = max(self._next, now - 1.0) + BUNDLE / self.rate
            await asyncio.sleep(self._next - now)


class Worker:
    """A key that takes leases and answers them with replies at hand."""

    def __init__(self, text: str, replies: Replies, pace: Pace, probe_s: float) -> None:
        self._probe_s = probe_s
        self._ticket: Ticket = tickets.read(text, now=int(time.time()))
        self._sealed_ticket = tickets.sealed_bytes(text)
        self._replies = replies
        self._pace = pace
        self._key = SecretKey.generate()
        self._transport = transport_of(self._key)
        peers = PeerTable()
        peers.hint(self._ticket.trainer, self._ticket.addresses)
        self._links = ConnectionPool(self._transport, peers, connect_timeout_s=DEADLINE_S)
        self.outcomes: Counter[str] = Counter()
        """Rollouts by outcome, of the verdicts that were received."""
        self.probes: deque[float] = deque(maxlen=4096)
        """Seconds that the latest requests took that wait for no work."""
        self.late: deque[float] = deque(maxlen=4096)
        """Seconds by which this process was late to make them: as much of their time may be its own."""

    async def run(self) -> None:
        """Work until cancelled."""
        await self._transport.start()
        await self._hello()
        async with asyncio.TaskGroup() as tasks:
            leases: asyncio.Queue[bytes] = asyncio.Queue(LEASES)
            tasks.create_task(self._take(leases))
            tasks.create_task(self._probe())
            for _ in range(LEASES):
                tasks.create_task(self._submit_all(leases))

    async def _hello(self) -> None:
        body = PeerRecord(
            self._key.node_id, "inference", "bench", self._transport.addresses(), (), True
        )
        expires = int(time.time()) + 3600
        record = seal(self._key, Purpose.PEER, self._ticket.run, body, expires=expires)
        hello = Hello(WIRE_VERSION, "inference", "bench", self._sealed_ticket, record)
        await self._ask(hello, Welcome, START_S)

    async def _ask(self, request: Any, kind: type[Any], within_s: float = DEADLINE_S) -> Any:
        """Ask until there is an answer: newcomers share a number of connections, and of requests a second."""
        until = time.monotonic() + within_s
        while True:
            try:
                return await self._links.request(
                    self._ticket.trainer, ALPN_CONTROL, request, kind, deadline=DEADLINE_S
                )
            except (TransportError, Refused):
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(0.5 + 5.0 * random.random())

    async def _take(self, leases: "asyncio.Queue[bytes]") -> None:
        """Take leases, and the verdicts that come with them."""
        while True:
            wanted = LEASES - leases.qsize()
            reply: LeaseReply = await self._ask(LeaseRequest(wanted, WorkerStats(0)), LeaseReply)
            for sealed in reply.verdicts:
                verdict = unseal(sealed, Purpose.VERDICT, Verdict, now=0).body
                self.outcomes["accepted"] += verdict.accepted
                self.outcomes.update(rejection.reason.value for rejection in verdict.rejections)
            for sealed in reply.leases:
                await leases.put(sealed)
            if not reply.leases:
                await asyncio.sleep(reply.retry_after_ms / 1000)

    async def _probe(self) -> None:
        """Time requests that wait for no work, as those of a proven worker that has enough of it."""
        while True:
            due = time.monotonic() + self._probe_s * (0.5 + random.random())
            await asyncio.sleep(due - time.monotonic())
            if not self.outcomes["accepted"]:
                continue
            began = time.monotonic()
            self.late.append(began - due)
            await self._ask(LeaseRequest(0, WorkerStats(0)), LeaseReply)
            self.probes.append(time.monotonic() - began)

    async def _submit_all(self, leases: "asyncio.Queue[bytes]") -> None:
        while True:
            sealed = await leases.get()
            lease = unseal(sealed, Purpose.LEASE, Lease, now=0).body
            body = Submission(sealed, await self._replies.bundle(lease, lease.min_version), "hf")
            bundle = seal(
                self._key,
                Purpose.SUBMISSION,
                self._ticket.run,
                body,
                recipient=self._ticket.trainer,
                sequence=lease.lease_id,
                expires=int(lease.deadline) + 3600,
            )
            await self._pace.turn()
            while True:
                try:
                    await upload(
                        self._links,
                        self._ticket.trainer,
                        bundle,
                        lease.lease_id,
                        deadline=DEADLINE_S,
                        pacer=Pacer(),
                    )
                    break
                except Refused as refusal:
                    if refusal.reason is not Reason.BUSY:
                        self.outcomes[f"refused: {refusal.reason.value}"] += BUNDLE
                        break
                    await asyncio.sleep(0.05)
                except TransportError:
                    await asyncio.sleep(0.5 + random.random())


async def work(ticket: str, model: Path, clients: int, probe_s: float) -> None:
    """Run the workers. Each line of standard input is a new rate, END, or AGAIN, from which on probes count.

    Prints the outcomes of rollouts, and the seconds of the latest probes, as JSON.
    """
    if probe_s == PROBE_S:
        os.nice(5)  # the trainer goes first: workers have machines of their own
    environment = VerifiersEnvironment(
        EnvironmentConfig.model_validate(ENVIRONMENT),
        model_dir=model,
        seed=0,
        max_tokens=REPLY,
        temperature=1.0,
    )
    await environment.start()
    chat = ChatFormat.load(model)
    plain = [token for token in range(8, 1000) if chat.text([token]).isalpha()]
    pace = Pace()
    replies = Replies(environment, plain, chat.stop_token_ids[0])
    workers = [Worker(ticket, replies, pace, probe_s) for _ in range(clients)]

    async def obey() -> None:
        while (line := await asyncio.to_thread(sys.stdin.readline)) and line != END:
            if line == AGAIN:
                for worker in workers:
                    worker.probes.clear()
                    worker.late.clear()
            else:
                pace.rate = float(line)
        outcomes = sum((worker.outcomes for worker in workers), Counter[str]())
        probes = [seconds for worker in workers for seconds in worker.probes]
        late = [seconds for worker in workers for seconds in worker.late]
        print(json.dumps({"outcomes": outcomes, "probes": probes, "late": late}), flush=True)
        os._exit(0)  # skips an orderly shutdown of the endpoints

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(obey())
        for worker in workers:
            tasks.create_task(worker.run())


def transport_of(key: SecretKey) -> IrohTransport:
    """Make an endpoint on loopback."""
    alpns = (ALPN_CONTROL, ALPN_BLOBS, ALPN_PIPELINE)
    return IrohTransport(key, host="127.0.0.1", port=0, alpns=alpns)


# -- the trainer --------------------------------------------------------------------------------------


class TimedLedger(Ledger):
    """A ledger that notes when submissions arrive and when they are judged."""

    arrived: ClassVar[dict[int, float]] = {}
    judged: ClassVar[dict[int, float]] = {}

    def receive(
        self, digest: bytes, lease_id: int, node: bytes, sealed: bytes, received: int
    ) -> int:
        """See Ledger."""
        now = time.monotonic()
        arrival = super().receive(digest, lease_id, node, sealed, received)
        self.arrived[arrival] = now
        return arrival

    def add_verdict(
        self,
        node: bytes,
        sealed: bytes,
        arrival: int | None = None,
        reputations: Mapping[bytes, bytes] | None = None,
        honest: Sequence[HonestRollout] = (),
        bounds: Mapping[bytes, bytes] | None = None,
        *,
        clean: bool = False,
    ) -> bool:
        """See Ledger."""
        new = super().add_verdict(node, sealed, arrival, reputations, honest, bounds, clean=clean)
        if arrival is not None:
            self.judged[arrival] = time.monotonic()
        return new


class Learner(CountingBackend):
    """A learner that encodes its batches, as for a process of its own, and keeps none."""

    async def step(self, batch: TrainBatch) -> StepMetrics:
        """See TrainBackend."""
        metrics = await super().step(batch)
        self.batches.clear()
        return metrics


class LoadedSwarm(Swarm):
    """A trainer over real QUIC, with a real environment's process and one that audits."""

    async def _transport(
        self, running: Running, network: NetworkConfig, key: SecretKey, port: int
    ) -> Transport:
        transport = transport_of(key)
        await transport.start()
        return transport

    def _factories(self, running: Running, ledger: MakeLedger | None = None) -> Factories:
        program = (sys.executable, __file__, "--audit")

        def auditor(config: EngineConfig, timeout_s: float) -> Auditor:
            return HfAuditor(config, timeout_s=timeout_s, program=program)

        def learner(config: RunConfig) -> Learner:
            return Learner()

        return replace(
            super()._factories(running, ledger),
            environment=make_environment,
            auditor=auditor,
            backend=learner,
        )


class CpuSampler(threading.Thread):
    """Samples what the Python threads of this process do while they take CPU time.

    A thread that works for less than SAMPLE_S at a time is mostly seen waiting: its CPU time is divided by the
    samples that found it at work.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._samples = defaultdict[int, Counter[str]](Counter)
        """By thread."""
        self._began: dict[int, float] = {}
        self._clocks: dict[int, float] = {}
        self._ended = threading.Event()

    def run(self) -> None:
        """Sample until end()."""
        while not self._ended.wait(SAMPLE_S):
            for ident, frame in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage]
                try:
                    clock = time.clock_gettime(time.pthread_getcpuclockid(ident))
                except OSError:  # the thread has just ended
                    continue
                self._began.setdefault(ident, clock)
                if clock > self._clocks.get(ident, clock) and frame.f_code.co_name not in IDLE:
                    self._samples[ident][_work_of(frame)] += 1
                self._clocks[ident] = clock

    def end(self) -> dict[str, float]:
        """Stop sampling; return the CPU seconds by work."""
        self._ended.set()
        self.join()
        seconds = defaultdict[str, float](float)
        for ident, clock in self._clocks.items():
            samples, spent = self._samples[ident], clock - self._began[ident]
            if ident == self.ident or not samples:
                samples = Counter(("this sampler" if ident == self.ident else "other threads",))
            for work, count in samples.items():
                seconds[work] += spent * count / samples.total()
        return seconds


def _work_of(frame: FrameType | None) -> str:
    """Name the work of a stack: the innermost function of WORK, else the innermost one of ours."""
    inner = ""
    while frame is not None:
        code = frame.f_code
        name = f"{code.co_filename.rpartition('/')[2][:-3]}:{code.co_qualname}"
        if name in WORK:
            return WORK[name]
        if not inner and "/node/" in code.co_filename:
            inner = name
        frame = frame.f_back
    return inner or "event loop and libraries"


@dataclass
class Row:
    """One measurement."""

    name: str
    offered_per_s: float
    """Rollouts offered a second; 0: as many as leased."""
    accepted_per_s: float
    rejected: int
    submissions: int
    """Submissions judged that arrived in this time."""
    judged_s: float
    """Median time from arrival to verdict."""
    judged_95_s: float
    daemon_ms: float
    """CPU of the trainer's process for a rollout, like the next two."""
    environment_ms: float
    audit_ms: float
    daemon_cores: float
    audited: float
    """Share of the rollouts that was audited."""
    where: dict[str, float]
    """CPU of the trainer's process by work, ms a rollout."""
    memory_mb: float
    """Resident memory of the trainer's process at the end, and how much more than at the beginning."""
    grown_mb: float
    request_50_s: float = 0.0
    request_99_s: float = 0.0
    """Time of a request that waits for no work, median and 99 % of them, as the timing clients measure it."""
    late_99_s: float = 0.0
    """Time by which these clients were late themselves."""
    load: float = 0.0
    """Load of the machine at the end, over a minute."""
    reasons: Mapping[str, int] = field(default_factory=dict[str, int])
    """Rejected rollouts by reason."""
    held: Sequence["Look"] = ()


@dataclass
class Look:
    """What a trainer holds at a time."""

    at_s: float
    memory_mb: float
    files: int
    tasks: int
    accepted: int
    """Rollouts so far."""


class Processes:
    """CPU seconds of the trainer's process and of its children."""

    def __init__(self, *workers: int) -> None:
        """`workers` are the processes of the workers, which do not count."""
        self._workers = workers

    def spent(self) -> dict[str, float]:
        """Return the CPU seconds so far of daemon, environment and audit."""
        own = psutil.Process()
        seconds = {"daemon": _cpu_s(own), "environment": 0.0, "audit": 0.0}
        for child in own.children(recursive=True):
            if child.pid not in self._workers:
                with suppress(psutil.NoSuchProcess):
                    command = " ".join(child.cmdline())
                    seconds["audit" if "--audit" in command else "environment"] += _cpu_s(child)
        return seconds


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def measure(
    swarm: LoadedSwarm, name: str, rate: float, submissions: int, processes: Processes
) -> Row:
    """Measure the run until so many submissions are judged."""
    sampler, memory = CpuSampler(), psutil.Process().memory_info().rss
    before, spent, began = await swarm.trainer.status(), processes.spent(), time.monotonic()
    sampler.start()
    judged = len(TimedLedger.judged) + submissions
    while len(TimedLedger.judged) < judged:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    seconds = sampler.end()
    after, ended = await swarm.trainer.status(), time.monotonic()
    took, used = ended - began, processes.spent()
    await asyncio.sleep(2.0)  # the last ones are judged
    times = sorted(
        TimedLedger.judged[arrival] - at
        for arrival, at in TimedLedger.arrived.items()
        if began <= at <= ended and arrival in TimedLedger.judged
    )
    accepted = after["accepted"] - before["accepted"]
    each = 1000 / max(1, accepted)
    cpu = {part: used[part] - spent[part] for part in ("daemon", "environment", "audit")}
    where = {
        work: spent * each
        for work, spent in sorted(seconds.items(), key=itemgetter(1), reverse=True)
    }
    where["native threads"] = each * (cpu["daemon"] - sum(seconds.values()))
    return Row(
        name,
        rate,
        accepted / took,
        sum(after["rejected"].values()) - sum(before["rejected"].values()),
        len(times),
        statistics.median(times or [0.0]),
        times[int(0.95 * len(times))] if times else 0.0,
        cpu["daemon"] * each,
        cpu["environment"] * each,
        cpu["audit"] * each,
        cpu["daemon"] / took,
        audited_share(swarm.trainer.data_dir),
        where,
        psutil.Process().memory_info().rss / 1e6,
        (psutil.Process().memory_info().rss - memory) / 1e6,
        load=os.getloadavg()[0],
        reasons=dict(Counter(after["rejected"]) - Counter(before["rejected"])),
    )


async def hold(swarm: LoadedSwarm, seconds: float) -> list[Look]:
    """Let the run go on for so long, and look at the trainer's process meanwhile."""
    process, began, looks = psutil.Process(), time.monotonic(), list[Look]()
    while not looks or looks[-1].at_s < seconds:
        await asyncio.sleep(HELD_S if looks else 0.0)
        accepted = (await swarm.trainer.status())["accepted"]
        looks.append(
            Look(
                time.monotonic() - began,
                process.memory_info().rss / 1e6,
                process.num_fds(),
                len(asyncio.all_tasks()),
                accepted,
            )
        )
    return looks


def audited_share(data_dir: Path) -> float:
    """Return the share of rollouts that was audited in the newest verdicts."""
    view = LedgerView(data_dir / "ledger.db")
    try:
        verdicts = [
            unseal(kept.sealed, Purpose.VERDICT, Verdict, now=0).body
            for kept in islice(view.verdicts(), 32)
        ]
    finally:
        view.close()
    rollouts = sum(verdict.accepted + verdict.rejected for verdict in verdicts)
    return sum(verdict.audited for verdict in verdicts) / max(1, rollouts)


async def run(directory: Path, options: argparse.Namespace, clients: int) -> list[Row]:
    """Return a row as fast as workers are leased; with one number of clients also one at --rate."""
    model = make_small_model(directory / "model")
    settings: dict[str, Any] = {
        "environment": ENVIRONMENT,
        "sampling": {"max_tokens": REPLY},
        "rollouts": ROLLOUTS,
        "training": {"seq_len": 4096, "filter_zero_advantages": False},
        "verification": {"audit_rate": 0.1},
        "checkpoint": {"interval": 20},
    }
    async with LoadedSwarm(
        directory, model, max_steps=10**6, trainer_ledger=TimedLedger, **settings
    ) as swarm:
        await swarm.start_trainer(network={"max_peers": max(MOST_PEERS, 4 * clients)})
        timing = await start_workers(swarm.ticket, model, TIMERS, TIMED_PROBE_S)
        others = await start_workers(swarm.ticket, model, clients - TIMERS, PROBE_S)
        processes = Processes(timing.pid, others.pid)
        async with asyncio.timeout(START_S):
            while (await swarm.trainer.status())["version"] < options.warm:  # noqa: ASYNC110
                await asyncio.sleep(2.0)  # a status of hundreds of workers takes a while
        tell(AGAIN, timing)
        name = f"{clients} clients, as leased"
        rows = [await measure(swarm, name, 0.0, options.submissions, processes)]
        answer = json.loads((await timing.communicate(END.encode()))[0])
        rows[0] = replace(
            rows[0],
            request_50_s=share_of(answer["probes"], 0.5),
            request_99_s=share_of(answer["probes"], 0.99),
            late_99_s=share_of(answer["late"], 0.99),
            held=await hold(swarm, options.hold) if options.hold else (),
        )
        if len(options.clients) == 1 and not options.hold:
            tell(f"{options.rate}\n", others)
            await asyncio.sleep(5.0)  # what waited is judged
            rows.append(await measure(swarm, "paced", options.rate, options.submissions, processes))
        printed, _ = await others.communicate(END.encode())
        print(f"verdicts that workers read: {json.loads(printed)['outcomes']}")
    return rows


async def start_workers(
    ticket: str, model: Path, clients: int, probe_s: float
) -> asyncio.subprocess.Process:
    """Start a process of workers."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--work", ticket, str(model), str(clients), str(probe_s)),
        stdin=pipe,
        stdout=pipe,
    )


def tell(line: str, workers: asyncio.subprocess.Process) -> None:
    """Give workers a line; see work()."""
    assert workers.stdin is not None
    workers.stdin.write(line.encode())


def share_of(seconds: Sequence[float], share: float) -> float:
    """Return the time that a share of the times does not exceed; infinite without any."""
    return sorted(seconds)[int(share * len(seconds))] if seconds else math.inf


def show(rows: Sequence[Row]) -> None:
    """Print the tables."""
    for row in rows:
        print(
            f"{row.name}: {row.accepted_per_s:.0f} rollouts/s accepted (offered "
            f"{row.offered_per_s or math.inf:.0f}), {row.rejected} rejected {dict(row.reasons)}, "
            f"{row.audited:.0%} audited, "
            f"{row.submissions} submissions, verdict after {row.judged_s:.3f} s (95 %: {row.judged_95_s:.3f})\n"
            f"  CPU ms a rollout: daemon {row.daemon_ms:.3f}, environment {row.environment_ms:.3f}, audit "
            f"{row.audit_ms:.3f}; daemon {row.daemon_cores:.2f} cores, {row.memory_mb:.0f} MB "
            f"({row.grown_mb:+.0f})"
        )
        if row.request_99_s:
            print(
                f"  requests that wait for no work took {row.request_50_s:.3f} s, 99 % of them "
                f"{row.request_99_s:.3f} s at most; who timed them was late by {row.late_99_s:.3f} s; load "
                f"{row.load:.1f}"
            )
        for look in row.held:
            print(
                f"  after {look.at_s:.0f} s: {look.memory_mb:.0f} MB, {look.files} files, {look.tasks} tasks, "
                f"{look.accepted} rollouts"
            )
        for work, ms in row.where.items():
            if ms >= 0.01:
                print(f"    {ms:7.3f}  {work}")


def judge(rows: Sequence[Row], rate: float) -> list[Goal]:
    """Compare with the goals."""
    rejected = at_most("rollouts that were rejected", float(sum(row.rejected for row in rows)), 0.0)
    fast, *others = rows
    if fast.held:
        first, last = fast.held[0], fast.held[-1]
        return [
            at_most("growth of the memory", last.memory_mb / first.memory_mb - 1.0, GROWTH),
            at_most("growth of open files", float(last.files - first.files), TIMERS),
            rejected,
        ]
    if others[-1:] and others[-1].offered_per_s == 0:
        most = others[-1]
        share = most.accepted_per_s / fast.accepted_per_s
        return [
            at_least(f"rate of {most.name} / {fast.name}", share, CLIENTS_SHARE),
            at_most(f"99 % of requests, {most.name}", most.request_99_s, REQUEST_S, "s"),
            rejected,
        ]
    (paced,) = others
    return [
        at_least("rollouts judged as fast as they are leased", fast.accepted_per_s, rate, "/s"),
        at_most(
            f"median time to a verdict at {rate:.0f} rollouts/s", paced.judged_s, JUDGED_S, "s"
        ),
        at_most(
            f"cores of the daemon at {rate:.0f} rollouts/s", rate * paced.daemon_ms / 1000, CORES
        ),
        rejected,
    ]


def main() -> int:
    """Measure, print, and return exit code 0 if every goal was met."""
    parser = make_parser(__doc__, "16 submissions each, at 200 rollouts/s")
    parser.add_argument("--rate", type=float, default=RATE, help="rollouts offered a second")
    parser.add_argument("--submissions", type=int, default=200, help="of each measurement")
    parser.add_argument("--warm", type=int, default=30, help="steps before the first measurement")
    parser.add_argument("--clients", type=int, nargs="+", default=[WORKERS], metavar="N")
    parser.add_argument("--hold", type=float, default=0.0, metavar="S", help="seconds to go on")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--audit", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.audit:
        serve_audits(CleanMeasurer)
    logging.basicConfig(level=logging.ERROR)
    if options.work:
        ticket, model, clients, probe_s = options.work
        asyncio.run(work(ticket, Path(model), int(clients), float(probe_s)))
    if options.quick:
        options.submissions, options.rate, options.warm = 16, 200.0, 4
    share_python()
    rows: list[Row] = []
    for clients in options.clients:
        TimedLedger.arrived.clear()
        TimedLedger.judged.clear()
        with tempfile.TemporaryDirectory() as directory:
            os.environ["XDG_RUNTIME_DIR"] = directory  # not in the user's list of running nodes
            rows += (made := asyncio.run(run(Path(directory), options, clients)))
        show(made)
    return conclude([asdict(row) for row in rows], judge(rows, options.rate), options.json)


if __name__ == "__main__":
    sys.exit(main())
