"""Pipeline stages that compute hashes in place of a model, for tests without vLLM, and their auditor.

They use the product's frames, ports, RingClient and stage loop. A position's state after a layer is a hash of
its state before the layer and of the layer's weights; before the first layer it is a hash of all tokens so far.
So results do not depend on how the layers are split, any change of weights or states changes everything after
it, and an auditor with the policy can recompute it. Stages keep no state of a sequence.
"""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from support.counting_environment import STOP

from primerl.crypto.hashing import derive
from primerl.node.config.run import EngineConfig
from primerl.node.errors import EngineError, EngineLost
from primerl.node.inference.boundary_states import agrees, pack_projected, project
from primerl.node.inference.engine import Completion, EngineStats, GenerateRequest
from primerl.node.inference.fingerprint import Projection
from primerl.node.inference.place import StagePlace, layer_of
from primerl.node.pipeline import trails
from primerl.node.pipeline.activations import pack, rounded, unpack
from primerl.node.pipeline.frames import FINGERPRINT_BYTES, Array, Frame, FrameLimits, Kind
from primerl.node.pipeline.micro_batches import LaneStats, MicroBatches, RingClient
from primerl.node.pipeline.ports import Port, PortClosed, SocketPort
from primerl.node.pipeline.stage_loop import serve
from primerl.node.verification.auditor import AuditItem, Measured, Unreadable
from primerl.node.verification.measures import distances
from primerl.node.weights.state import Changed, State, digests, state_digest
from primerl.protocol.manifests import RunManifest
from primerl.protocol.pipelines import Encoding, PipelineShape, Stage

BEGIN_S = SWITCH_S = 20.0
STEP_S = 0.005
"""That a stage takes for a micro-batch at least: so that others are in flight when something happens."""
AGAIN_S = 0.05
"""Between two tries to connect to the node's process."""
WIDTH = 64
"""Of the states; hidden_size of the models that are cut."""

States = NDArray[np.float32]
Weights = dict[int, bytes]
"""Layer -> digest of its tensors; EMBEDDING: of the table before the first layer."""
EMBEDDING = -1
PROJECTION = Projection()


# -- the function ----------------------------------------------------------------------------------


def weights_of(state: State) -> Weights:
    """Digests of the layers of `state`, which may be one stage's share."""
    parts: dict[int, dict[str, Any]] = {}
    for name, tensor in state.items():
        layer = layer_of(name)
        parts.setdefault(EMBEDDING if layer is None else layer, {})[name] = tensor
    embedding = {name: state[name] for name in parts.pop(EMBEDDING, {}) if "embed" in name}
    found = {layer: state_digest(digests(part)) for layer, part in parts.items()}
    return found | {EMBEDDING: state_digest(digests(embedding))}


def embedded(weights: Weights, tokens: Sequence[int]) -> States:
    """The state [WIDTH] of the last of `tokens` before the first layer."""
    return _state(weights[EMBEDDING], repr(tuple(tokens)).encode())


def through(weights: Weights, stage: Stage, states: States) -> States:
    """Compute the states [rows, WIDTH] after a stage's layers."""
    for layer in range(stage.first, stage.end):
        rows = [_state(weights[layer], row.tobytes()) for row in states]
        states = np.stack(rows) if rows else states
    return states


def sample_token(state: States, seed: int, vocabulary: int) -> tuple[int, float]:
    """Return (token, logprob) for a position's last state; every fourth token ends a sequence."""
    name = derive("drawn", state.tobytes(), seed.to_bytes(8, "big"))
    token = STOP if name[0] % 4 == 0 else int.from_bytes(name[1:4], "big") % vocabulary
    return token, -1.0 - name[4] / 256


def crossed(states: States, encoding: Encoding) -> States:
    """Return `states` as the next stage decodes them."""
    return rounded(torch.from_numpy(states.copy()), encoding).numpy()


def departing(states: States, shape: PipelineShape) -> tuple[tuple[Array, ...], bytes]:
    """Return a frame's tensors, and their fingerprints."""
    own = torch.from_numpy(crossed(states, shape.encoding))
    packed = pack(torch.from_numpy(states.copy()), shape.encoding)
    return packed, pack_projected(project(own)) if shape.fingerprint else b""


def _state(weights: bytes, before: bytes) -> States:
    parts = [derive("layer", weights, before, bytes([number])) for number in range(WIDTH // 32)]
    return np.frombuffer(b"".join(parts), np.int8).astype(np.float32)


class ScriptedStep(msgspec.Struct, frozen=True, array_like=True):
    """The body of a micro-batch: one row per sequence, each of which samples a token."""

    seeds: tuple[int, ...]
    vocabulary: int


class ScriptedDrawn(msgspec.Struct, frozen=True, array_like=True):
    """The body of an answer."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    proofs: bytes


# -- later stages ----------------------------------------------------------------------------------


class ScriptedStage:
    """Implements Engine as a later stage does, and StageCompute for its own loop."""

    def __init__(
        self,
        config: EngineConfig,
        place: StagePlace,
        *,
        open_port: Callable[[], Port] | None = None,
        lie: Callable[[States], States] = lambda states: states,
    ) -> None:
        """`lie`: states -> states to send in their place; fingerprints stay those of the first."""
        self.place = place
        self.policy_version = -1
        self._open_port = open_port or (lambda: socket_port(place))
        self._lie = lie
        self._weights: Weights = {}
        self._ready: dict[int, Weights] = {}
        self._chained = False
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._port: Port | None = None
        self._thread: threading.Thread | None = None

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """See Engine."""
        self._thread = threading.Thread(target=self._serve, name="scripted stage", daemon=True)
        self._thread.start()

    async def load(self, version: int, state: State) -> None:
        """See HostedStage."""
        with self._lock:
            self._ready[version] = weights_of(state)
            if not self._chained:
                self._write(version)

    async def update(self, version: int, state: State, changed: Changed) -> None:
        """See HostedStage."""
        await self.load(version, state)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Raise EngineError."""
        raise EngineError("only stage 0 of a pipeline generates: send the request there")

    def stats(self) -> EngineStats:
        """See Engine."""
        return EngineStats()

    async def close(self) -> None:
        """See Engine."""
        self._closing.set()
        if self._port is not None:
            await asyncio.to_thread(self._port.close)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, BEGIN_S)

    def reset(self) -> None:
        """See StageCompute."""
        with self._lock:
            self._chained = True

    def switch(self, version: int) -> None:
        """See StageCompute."""
        with self._lock:
            if version != self.policy_version:
                self._write(version)

    def step(self, frame: Frame) -> Frame:
        """See StageCompute."""
        step = msgspec.msgpack.decode(frame.body, type=ScriptedStep)
        time.sleep(STEP_S)
        states = self._received(frame, len(step.seeds))
        states = through(self._weights, self.place.stage, states)
        if self.place.last:
            return self._drawn(frame, step, states)
        _, own = departing(states, self.place.shape)
        tensors, _ = departing(self._lie(states), self.place.shape)
        return replace(frame, tensors=tensors, trail=trails.append(frame.trail, own))

    def _received(self, frame: Frame, rows: int) -> States:
        shape, rank = self.place.shape, self.place.rank
        cpu = torch.device("cpu")
        found = unpack(
            frame.tensors, shape.encoding, dtype=torch.float32, device=cpu, width=shape.hidden_size
        )
        if len(found) != rows:
            raise EngineError("the previous stage sent other states than the step has sequences")
        if not shape.fingerprint:
            return found.numpy()
        try:
            claimed = trails.latest(frame.trail, rows, rank)
        except trails.BadTrail as error:
            raise EngineError(f"stage {rank - 1} sent no trail of this plan ({error})") from error
        if not agrees(claimed, project(found).numpy()):
            raise EngineError(f"stage {rank - 1} sent other states than it signed for")
        return found.numpy()

    def _drawn(self, frame: Frame, step: ScriptedStep, states: States) -> Frame:
        pairs = [
            sample_token(state, seed, step.vocabulary)
            for state, seed in zip(states, step.seeds, strict=True)
        ]
        tokens, logprobs = zip(*pairs, strict=True)
        proofs = PROJECTION.make(states) if self.place.shape.fingerprint else b""
        body = msgspec.msgpack.encode(ScriptedDrawn(tokens, logprobs, proofs))
        return Frame(Kind.DRAWN, frame.epoch, frame.number, body, (), frame.trail)

    def _write(self, version: int) -> None:
        if version not in self._ready:
            raise EngineError(f"policy {version} is not here: prepare it")
        self._weights, self.policy_version = self._ready[version], version
        self._ready = {one: ready for one, ready in self._ready.items() if one >= version}

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                self._port = port = self._open_port()
            except PortClosed:
                self._closing.wait(AGAIN_S)
                continue
            if self._closing.is_set():
                port.close()
            serve(port, self, rank=self.place.rank)


def socket_port(place: StagePlace) -> Port:
    """Open the port to the node's process."""
    return SocketPort(place.socket, FrameLimits.of(place.shape))


# -- stage 0 ---------------------------------------------------------------------------------------


@dataclass
class Drawing:
    """A request, and the tokens sampled for it so far."""

    request: GenerateRequest
    done: "Future[None]" = field(default_factory=Future)
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    proofs: list[bytes] = field(default_factory=list[bytes])
    crossed: list[bytes] = field(default_factory=list[bytes])
    """Of each token, what every stage but the last says of its state."""

    def __post_init__(self) -> None:
        self.done.set_running_or_notify_cancel()  # a caller that gives up does not cancel it

    @property
    def finish(self) -> str:
        """Return the finish reason; "" while unfinished."""
        if self.tokens and self.tokens[-1] in self.request.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.request.max_tokens else ""

    def completion(self) -> Completion:
        """Return the tokens so far as a completion."""
        versions = self.versions
        changes = [i for i, one in enumerate(versions) if i == 0 or one != versions[i - 1]]
        size, count = FINGERPRINT_BYTES, len(self.crossed[0]) // FINGERPRINT_BYTES
        return Completion(
            self.tokens,
            self.logprobs,
            "stop" if self.finish == "stop" else "length",
            versions[0],
            versions[-1],
            spans=tuple((i, versions[i]) for i in changes) if len(changes) > 1 else (),
            proof=b"".join(self.proofs),
            boundaries=tuple(
                b"".join(one[size * at : size * (at + 1)] for one in self.crossed)
                for at in range(count)
            ),
        )


class ScriptedHead:
    """Implements HeadEngine: schedules micro-batches as they return, in a thread."""

    def __init__(
        self,
        config: EngineConfig,
        place: StagePlace,
        *,
        open_port: Callable[[], Port] | None = None,
    ) -> None:
        self.place = place
        self.policy_version = -1
        self.generated = 0
        self._weights: Weights = {}
        self._vocabulary = 0
        self._open_port = open_port or (lambda: socket_port(place))
        self._port: Port | None = None
        shape = place.shape
        batches = MicroBatches(shape.micro_batches, stages=len(place.plan.stages))
        self._chain = RingClient(self._connect, batches)
        self._begun = self._closing = False
        self._order = threading.Lock()
        """Held while something is sent: frames leave in the order in which they were numbered."""
        self._news = threading.Condition()
        self._ready: list[Drawing] = []
        self._flying = 0
        """Micro-batches."""
        self._thread = threading.Thread(target=self._schedule, name="scripted head", daemon=True)

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """See Engine."""
        config = json.loads((model_dir / "config.json").read_text())
        self._vocabulary = config["vocab_size"]
        await asyncio.to_thread(self._chain.open)
        self._thread.start()

    async def load(self, version: int, state: State) -> None:
        """See HeadEngine."""
        await asyncio.to_thread(self._write, version, weights_of(state))

    async def update(self, version: int, state: State, changed: Changed) -> None:
        """See HeadEngine."""
        await self.load(version, state)

    async def rejoin(self, epoch: int) -> None:
        """See HeadEngine."""
        await asyncio.to_thread(self._begin, epoch)

    async def generate(self, request: GenerateRequest) -> Completion:
        """See HeadEngine."""
        one = Drawing(request)
        with self._news:
            if self._closing:
                raise EngineError("the engine is closed: start another one")
            self._ready.append(one)
            self._news.notify_all()
        await asyncio.wrap_future(one.done)
        return one.completion()

    def stats(self) -> EngineStats:
        """See Engine."""
        return EngineStats(generated_tokens=self.generated)

    def lanes(self) -> LaneStats:
        """See HeadEngine."""
        return self._chain.lane_stats

    async def close(self) -> None:
        """See Engine."""
        with self._news:
            self._closing = True
            waiting, self._ready = self._ready, []
            self._news.notify_all()
        await asyncio.to_thread(self._chain.close)
        for one in waiting:
            one.done.set_exception(EngineLost("the engine was closed"))
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, BEGIN_S)

    def _connect(self) -> Port:
        self._port = self._open_port()
        return self._port

    def _write(self, version: int, weights: Weights) -> None:
        with self._order:
            wait = self._chain.switch(version) if self._begun else None
            self._weights, self.policy_version = weights, version
        if wait is not None:
            wait(SWITCH_S)

    def _begin(self, epoch: int) -> None:
        with self._order:
            if self.policy_version < 0:
                raise EngineError("stage 0 has no weights yet: load a policy first")
            self._begun = True
            self._chain.begin(epoch, self.policy_version, BEGIN_S)
        with self._news:
            self._news.notify_all()

    # -- the thread --------------------------------------------------------------------------------

    def _schedule(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(self._may_send, timeout=1.0)
                if self._closing:
                    return
                if not self._may_send():
                    continue
                lanes = self._chain.lanes(len(self._ready))
                size = -(-len(self._ready) // lanes)
                rows, self._ready = self._ready[:size], self._ready[size:]
                self._flying += 1
            self._send(rows)

    def _may_send(self) -> bool:
        free = self._flying < self.place.shape.micro_batches
        return self._closing or bool(self._ready and free and self._chain.healthy)

    def _send(self, rows: list[Drawing]) -> None:
        with self._order:
            began, version = time.monotonic(), self.policy_version
            time.sleep(STEP_S)
            states = np.stack(
                [embedded(self._weights, [*one.request.prompt, *one.tokens]) for one in rows]
            )
            states = through(self._weights, self.place.stage, states)
            tensors, trail = departing(states, self.place.shape)
            step = ScriptedStep(tuple(one.request.seed for one in rows), self._vocabulary)
            frame, answer = self._chain.submit(msgspec.msgpack.encode(step), len(rows))
            if frame is not None and self._port is not None:
                busy = int((time.monotonic() - began) * 1e6)
                with contextlib.suppress(PortClosed):  # the chain sees it too
                    self._port.send(
                        replace(frame, tensors=tensors, trail=trail, busy_us=max(1, busy))
                    )
        answer.add_done_callback(lambda found: self._back(rows, version, found.result()))

    def _back(self, rows: list[Drawing], version: int, frame: Frame | None) -> None:
        """Called where the chain hears of it; without a frame nothing came, and all is computed again."""
        if frame is not None:
            try:
                self._take(rows, version, frame)
            except (EngineError, msgspec.DecodeError, trails.BadTrail, ValueError) as error:
                self._chain.fail(f"the last stage sent no answer to the step: {error}")
        over = [one for one in rows if one.finish]
        with self._news:
            self._flying -= 1
            lost = [one for one in rows if not one.finish]
            if not self._closing:
                self._ready, lost = [*self._ready, *lost], []
            self._news.notify_all()
        for one in over:
            one.done.set_result(None)
        for one in lost:
            one.done.set_exception(EngineLost("the engine was closed"))

    def _take(self, rows: list[Drawing], version: int, frame: Frame) -> None:
        said = msgspec.msgpack.decode(frame.body, type=ScriptedDrawn)
        shape, last = self.place.shape, len(self.place.plan.stages) - 1
        if not len(said.tokens) == len(said.logprobs) == len(rows):
            raise EngineError("it is for other sequences")
        count = last if shape.fingerprint else 0
        trails.check(frame.trail, len(rows), count)
        trail = np.frombuffer(frame.trail, np.uint8).reshape(count, len(rows), FINGERPRINT_BYTES)
        size = len(said.proofs) // len(rows)
        for at, one in enumerate(rows):
            one.tokens.append(said.tokens[at])
            one.logprobs.append(said.logprobs[at])
            one.versions.append(version)
            one.proofs.append(said.proofs[size * at : size * (at + 1)])
            one.crossed.append(trail[:, at].tobytes())
        self.generated += len(rows)


# -- audits ----------------------------------------------------------------------------------------


class ScriptedAuditor:
    """Implements Auditor for rollouts of ScriptedHead's pipelines."""

    loading_s = 0.0

    def __init__(self) -> None:
        self._run: RunManifest | None = None

    async def start(self, model_dir: Path, run: RunManifest) -> None:
        """See Auditor."""
        self._run = run

    async def audit(
        self,
        items: Sequence[AuditItem],
        states: Mapping[int, State],
    ) -> list[Measured | Unreadable]:
        """See Auditor."""
        weights = {version: weights_of(state) for version, state in states.items()}
        return [self._measure(item, weights) for item in items]

    async def close(self) -> None:
        """See Auditor."""

    def _measure(self, item: AuditItem, weights: dict[int, Weights]) -> Measured:
        assert self._run is not None
        tokens = list(item.token_ids)
        seeds = {at: one.seed for one in item.replies for at in range(one.start, one.end)}
        layers = max(weights[item.versions[0]]) + 1
        own: list[States] = []
        margins: list[float] = []
        apart: list[float] = []
        ends: list[States] = []
        for claimed, version, at in zip(item.logprobs, item.versions, seeds, strict=True):
            row, first = embedded(weights[version], tokens[:at])[None], 0
            for one in item.boundaries:
                row = through(weights[version], Stage(bytes(32), first, one.layers), row)
                row, first = crossed(row, one.encoding), one.layers
                own.append(row[0])
            row = through(weights[version], Stage(bytes(32), first, layers), row)
            token, logprob = sample_token(row[0], seeds[at], self._run.model.vocab_size)
            ends.append(row[0])
            margins.append(0.0 if token == tokens[at] else 10.0)
            apart.append(abs(claimed - logprob))
        states = np.zeros((len(seeds), 0, 8), np.float32)
        if item.boundaries:
            states = _compared(np.stack(own)).reshape(len(seeds), len(item.boundaries), 8)
        return Measured(
            group=0,
            rollout=0,
            tokens=len(seeds),
            fingerprint=PROJECTION.compare(item.proof, np.stack(ends)).distance,
            sampling=sum(min(gap, 1.0) for gap in margins) / max(len(margins), 64),
            sampling_max=max(margins),
            logprob=sum(apart) / max(len(apart), 64),
            logprob_max=max(apart),
            other_policy=0.0,
            boundaries=distances(item, states),
        )


def _compared(states: States) -> NDArray[np.float32]:
    """What a fingerprint of each state [rows, WIDTH] is compared with: projected, and its length [rows, 8]."""
    found = torch.from_numpy(states)
    length = found.square().mean(1, keepdim=True).sqrt()
    return torch.cat([project(found), length], 1).numpy()
