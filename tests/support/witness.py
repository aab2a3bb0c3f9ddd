"""Fakes that agree on the output of every state: an engine, an auditor and a backend.

Every logprob tells which version and which exact state drew its token, so that what was trained can be
checked without asking those who trained it.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from support.counting_backend import CountingBackend
from support.counting_environment import STOP

from primerl.crypto.hashing import derive
from primerl.node.errors import EngineError
from primerl.node.inference.engine import Completion, EngineStats, GenerateRequest
from primerl.node.inference.fingerprint import Hidden, Projection
from primerl.node.training.backend import Example, StepMetrics, TrainBatch
from primerl.node.verification.auditor import AuditItem, Measured, SampledSpan, Unreadable
from primerl.node.weights.state import Changed, State, Tensor, digests, state_digest
from primerl.protocol.manifests import RunManifest

Said = Callable[[GenerateRequest], Sequence[int]]


def witness_logprob(
    state: bytes, version: int, temperature: float, before: Sequence[int], token: int
) -> float:
    """Return a token's logprob under the state with this digest: -(version + 1) and a fraction."""
    name = derive("witness", state, repr((version, temperature, *before, token)).encode())
    return -(version + 1.0) - name[0] / 512


def felt(state: bytes, before: Sequence[int]) -> Hidden:
    """Return the hidden state [32] after `before` under the state with this digest."""
    name = derive("witness hidden", state, repr(tuple(before)).encode())
    return np.frombuffer(name, np.int8).astype(np.float32)


def version_of(logprob: float) -> int:
    """Return the version that is encoded in a logprob."""
    return math.floor(-logprob) - 1


def now_and_then(request: GenerateRequest) -> list[int]:
    """Right for half of the seeds, else long and wrong; the environment wants the next number."""
    number = request.prompt[-1]
    return [number + 1, STOP] if request.seed % 2 else [number, number, number, STOP]


def never_right(request: GenerateRequest) -> list[int]:
    """Always reply wrongly, so that there is nothing to learn."""
    return [request.prompt[-1], STOP]


async def computing() -> None:
    """Pause as before a token: a test that waits for a deadline leaves the machine to others meanwhile."""
    await asyncio.sleep(0.02)


@dataclass
class Event:
    """A recorded call of an engine."""

    name: str
    """Of the node."""
    kind: Literal["load", "generate"]
    version: int
    state: bytes
    """Digest of what was loaded, computed here; of an update, from what it says that changed."""
    prompt: tuple[int, ...] = ()
    """What a completion was asked for."""
    in_place: bool = False
    """Of a load: it came by update()."""


@dataclass
class Fakes:
    """State shared by all fakes of a swarm."""

    reply: Said = now_and_then
    pause: Callable[[], Awaitable[None]] = computing
    words: int = 0
    """More bf16 elements of the policy, so that weights weigh something."""
    last_step: int = 2**31
    """No backend learns a later one before `go`: a test that crashes a trainer says at which step."""
    go: asyncio.Event = field(default_factory=asyncio.Event)
    events: list[Event] = field(default_factory=list[Event])
    named: Callable[[State], bytes] = lambda state: state_digest(digests(state))
    """Names a state in logprobs."""

    def loads(self, name: str) -> list[Event]:
        """Return the loads and updates of one node's engine, in order."""
        return [event for event in self.events if (event.name, event.kind) == (name, "load")]

    def newest(self, name: str) -> int:
        """Return the last version loaded into one node's engine; -1 before the first."""
        return max((event.version for event in self.loads(name)[-1:]), default=-1)

    def prompts(self, name: str) -> set[tuple[int, ...]]:
        """Return the prompts sent to one node's engine."""
        return {event.prompt for event in self.events if event.name == name and event.prompt}


def written(old: Tensor, positions: NDArray[np.int64] | None, new: Tensor) -> Tensor:
    """A copy of `old` with the elements at `positions`, or all, taken from `new`."""
    data = old.data.copy()
    where = slice(None) if positions is None else positions
    data[where] = new.data[where]
    return Tensor(old.dtype, old.shape, data)


class WitnessEngine:
    """An Engine that samples token by token and records its calls."""

    def __init__(self, fakes: Fakes, name: str, pause: Callable[[], Awaitable[None]] | None = None):
        self._fakes = fakes
        self._name = name
        self._pause = pause or fakes.pause
        self._version = -1
        self._state = b""
        self._weights: dict[str, Tensor] = {}
        self._fingerprint = ""
        self.waiting = 0
        """Completions under way."""

    @property
    def policy_version(self) -> int:
        """See Engine."""
        return self._version

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """See Engine."""
        self._fingerprint = fingerprint

    async def load(self, version: int, state: State) -> None:
        """See Engine."""
        self._version, self._state = version, state_digest(digests(state))
        self._weights = {name: written(tensor, None, tensor) for name, tensor in state.items()}
        self._note("load")

    async def update(self, version: int, state: State, changed: Changed) -> None:
        """See Engine. Believes `changed` alone: what it leaves out would be found in every logprob."""
        if self._version < 0:
            await self.load(version, state)
            return
        for name, positions in changed.items():
            self._weights[name] = written(self._weights[name], positions, state[name])
        self._version, self._state = version, state_digest(digests(self._weights))
        if self._state != state_digest(digests(state)):
            raise EngineError(f"what is said to have changed does not make version {version}")
        self._note("load", in_place=True)

    async def generate(self, request: GenerateRequest) -> Completion:
        """See Engine. A load in the middle shows from the next token on."""
        self._note("generate", request.prompt)
        assert request.temperature > 0  # what every lease promises, and audits draw again
        assert (request.top_k, request.top_p) == (0, 1.0)
        if self._version < 0:
            raise EngineError("the engine holds no weights: load a policy version first")
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        rows: list[Hidden] = []
        self.waiting += 1
        try:
            for token in self._fakes.reply(request):
                await self._pause()
                before = (*request.prompt, *tokens)
                versions.append(self._version)
                rows.append(felt(self._state, before))
                logprobs.append(
                    witness_logprob(self._state, self._version, request.temperature, before, token)
                )
                tokens.append(token)
        finally:
            self.waiting -= 1
        finish = "stop" if tokens[-1] in request.stop_token_ids else "length"
        spans = [i for i, one in enumerate(versions) if i == 0 or one != versions[i - 1]]
        return Completion(
            tokens,
            logprobs,
            finish,
            versions[0],
            versions[-1],
            spans=tuple((i, versions[i]) for i in spans) if len(spans) > 1 else (),
            proof=Projection().make(np.stack(rows)) if self._fingerprint else b"",
        )

    def stats(self) -> EngineStats:
        """See Engine."""
        return EngineStats(running=self.waiting)

    async def close(self) -> None:
        """See Engine."""
        self._version = -1

    def _note(
        self,
        kind: Literal["load", "generate"],
        prompt: tuple[int, ...] = (),
        in_place: bool = False,
    ) -> None:
        event = Event(self._name, kind, self._version, self._state, prompt, in_place)
        self._fakes.events.append(event)


class WitnessAuditor:
    """An Auditor for WitnessEngine: it can compute the output of every state and seed."""

    loading_s = 0.0

    def __init__(self, fakes: Fakes) -> None:
        self._fakes = fakes
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
        names = {version: self._fakes.named(state) for version, state in states.items()}
        return [self._measure(item, names) for item in items]

    async def close(self) -> None:
        """See Auditor."""

    def _measure(self, item: AuditItem, names: dict[int, bytes]) -> Measured:
        assert self._run is not None
        tokens, places = (
            list(item.token_ids),
            [p for r in item.replies for p in range(r.start, r.end)],
        )
        temperature = item.temperature
        apart = [
            abs(
                claim
                - witness_logprob(names[version], version, temperature, tokens[:at], tokens[at])
            )
            for claim, version, at in zip(item.logprobs, item.versions, places, strict=True)
        ]
        rows = [
            felt(names[version], tokens[:at])
            for version, at in zip(item.versions, places, strict=True)
        ]
        margins = [gap for reply in item.replies for gap in self._margins(item, tokens, reply)]
        return Measured(
            group=0,
            rollout=0,
            tokens=len(places),
            fingerprint=self._distance(item, rows),
            sampling=sum(min(gap, 1.0) for gap in margins) / max(len(margins), 64),
            sampling_max=max(margins),
            logprob=sum(apart) / max(len(apart), 64),
            logprob_max=max(apart),
            other_policy=0.0,
        )

    def _margins(self, item: AuditItem, tokens: list[int], reply: SampledSpan) -> list[float]:
        """No gap where the seed says the same, a large one where it does not."""
        assert self._run is not None
        stops = self._run.model.stop_token_ids
        longest = max(one.sampling.max_tokens for one in self._run.environments)
        request = GenerateRequest(
            tuple(tokens[: reply.start]),
            longest,
            item.temperature,
            reply.seed,
            stops,
        )
        drawn = list(self._fakes.reply(request))[:longest]
        said = tokens[reply.start : reply.end]
        return [0.0 if drawn[i : i + 1] == [token] else 10.0 for i, token in enumerate(said)]

    def _distance(self, item: AuditItem, rows: list[Hidden]) -> float:
        assert self._run is not None
        fingerprint = Projection()
        worst, done, read = 0.0, 0, 0
        for reply in item.replies:
            count = reply.end - reply.start
            size = fingerprint.size(count)
            part, own = item.proof[read : read + size], np.stack(rows[done : done + count])
            worst = max(worst, fingerprint.compare(part, own).distance)
            done, read = done + count, read + size
        return worst


class WitnessBackend(CountingBackend):
    """A CountingBackend with `fakes.words` more elements, all of which change at every step."""

    def __init__(self, fakes: Fakes) -> None:
        super().__init__()
        self._fakes = fakes

    async def step(self, batch: TrainBatch) -> StepMetrics:
        """See TrainBackend; waits where the test says so."""
        if batch.step > self._fakes.last_step:
            await self._fakes.go.wait()
        return await super().step(batch)

    async def supervised_step(self, examples: Sequence[Example], lr: float) -> float:
        """A warm-up that begins, and waits for `go`."""
        del examples, lr
        await self._fakes.go.wait()
        return 0.0

    async def end_supervised(self) -> None:
        """There is no optimizer."""

    def policy(self) -> State:
        """The policy."""
        state = dict(super().policy())
        if self._fakes.words:
            seed = int.from_bytes(state["history.weight"].data.tobytes(), "little")
            bits = np.random.default_rng(seed).integers(0, 2**16, self._fakes.words, dtype="<u2")
            state["more.weight"] = Tensor("BF16", (self._fakes.words,), bits)
        return state


def trained_ages(batch: TrainBatch) -> set[int]:
    """Return the staleness of a batch's tokens, as encoded in their logprobs."""
    return {
        batch.step - 1 - version_of(logprob)
        for sample in batch.samples
        for flag, logprob in zip(sample.mask, sample.logprobs, strict=True)
        if flag
    }
