"""An Auditor with vLLM, the workers' engine: most of the rounding is equal on both sides.

vLLM holds one set of weights at a time. An audit visits each version that its items need once, in order, from
the end nearer to the held one; between two versions it hands over the differences (inference/handover.py), and
under each it reads the items that need it, portion by portion. Of a small model vLLM keeps copies of the last
versions on its device.
Claimed text is read as a prompt without its last token, whose successor is not needed; rollouts of a group
share their prompt in vLLM's prefix cache. The process with vLLM is replaced if it hangs or dies.

Where engines keep keys and values across versions (ProofContract.kv_cache), a reply of several versions is read
as it was drawn: under each version in order, after the blocks that the versions before have left in the cache.

States at the boundaries of a pipeline cannot be measured: vLLM only exposes the output of its last layer.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import time
import weakref
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from ...protocol.manifests import KV_BLOCK, RouteShape, RunManifest
from ..config.engine import SPECULATIVE
from ..config.run import EngineConfig
from ..errors import EngineError, EngineLost, NodeError, first_cause
from ..inference.engine_replica import PROGRAM, EngineChild, EngineTimeouts
from ..inference.handover import AdapterBase, HostedPolicy, read_adapter_base
from ..inference.host_messages import EngineSetUp
from ..inference.hosted import AUDITOR, environments_of, take_ahead
from ..inference.numerics import check_exact, config_for_run, kernel_options
from ..inference.prefill import (
    COLUMNS,
    LOGPROB,
    MARGIN,
    PROJECTED,
    ROUTING,
    Claims,
    Numbers,
    PrefillRequest,
    join_claims,
    make_claims,
    not_computed,
    read_rows,
    with_support,
)
from ..inference.vllm_arguments import (
    NO_AUDITOR,
    check_installed,
    head_size,
    is_installed,
    kv_heads,
    read_shape,
    resolve_parallel,
    visible_gpus,
)
from ..memory_plan.memory import ELEMENT, UNCHECKED
from ..models.model_files import layer_count, vocab_size
from ..models.support import unpack_support
from ..weights.adapters import changes
from ..weights.state import Changed, State, memory_threads
from ..weights.state_history import HeldState, between, known_changes, layout
from .auditor import (
    AuditItem,
    Measured,
    SameState,
    Unreadable,
    check_model_routes,
    check_versions,
)
from .local_audits import AuditFailed, Portions
from .measures import check_items, compare_replies, routing, split_proof, summarize

logger = logging.getLogger(__name__)

NO_BOUNDARIES = (
    "vLLM cannot measure states at the boundaries of a pipeline: set verification.auditor to hf"
)
STEP_TOKENS = {"cpu": 2**12, "cuda": 2**15}
"""Tokens of a forward pass; launching one takes the host tens of milliseconds at any length."""
SEQUENCES = 256
"""Texts in a batch."""
PART_TOKENS = 2**14
"""Tokens of the texts in one request to the engine."""
PORTION_TOKENS = 2**20
"""Most tokens of a portion: between two of them the engine has nothing to read."""
MOST_STEPS = 4
"""Most versions that are gone through one by one, by their differences; one further off is written whole."""

T = TypeVar("T")
Rows = NDArray[np.float32]
_Prefix = tuple[tuple[float, int, float], *tuple[int, ...]]
"""((temperature, top_k, top_p), *tokens)."""


def audit_engine(config: EngineConfig, run: RunManifest, shape: Mapping[str, Any]) -> EngineConfig:
    """Make the config of an engine that audits `run`, from the config for generation on this machine.

    `shape` is the model's config.json. Kernels are those of a worker: dtype, tp and the kernel options of
    `engine.vllm`. Memory is sized for audits: keys and values of the longest text and of two steps, as one is
    scheduled while the other is computed; no CUDA graphs. If numerics are exact, steps and graphs are a
    worker's, too, as the compiled code depends on both. Raises UsageError for an engine that does not fit these
    GPUs.
    """
    gpus = visible_gpus(config)
    parts: dict[str, Any] = {"tp": config.tp, "pp": config.pp}
    exact = run.proofs.numerics == "exact"
    if not exact and isinstance(config.tp, int) and 0 < gpus < config.tp * config.pp:
        parts = {"tp": 1, "pp": 1}  # the workers have more GPUs than this machine
    config = config.model_copy(
        update={
            **parts,
            "type": "vllm",
            "dp": 1,
            "dtype": run.proofs.dtype,
            "max_batch": config.max_batch if exact else SEQUENCES,
            "max_model_len": run.limits.max_model_len,
            "sleep_after_s": config.sleep_after_s if gpus else 0.0,
        }
    )
    config = config_for_run(resolve_parallel(config, dict(shape), gpus), run)
    step = STEP_TOKENS["cuda" if gpus else "cpu"]
    vllm = kernel_options(config.vllm)
    step = max(step, vllm.get("max_num_batched_tokens") or 0)
    tokens = 2 * step + run.limits.max_model_len
    vllm |= {
        "kv_cache_memory_bytes": tokens * _token_bytes(config, shape),
        "enable_prefix_caching": True,
    }
    if not exact:
        vllm["max_num_batched_tokens"] = step
        vllm.pop(SPECULATIVE, None)  # a prefill has no drafts
    if gpus:
        vllm["gpu_memory_utilization"] = UNCHECKED
    if gpus and not exact:
        vllm["compilation_config"] = {
            **(vllm.get("compilation_config") or {}),
            "cudagraph_mode": "NONE",
        }
    return config.model_copy(update={"vllm": vllm})


def _token_bytes(config: EngineConfig, shape: Mapping[str, Any]) -> int:
    """Return the bytes of one token's keys and values on one rank."""
    layers = -(-int(shape["num_hidden_layers"]) // config.pp)
    heads = -(-kv_heads(shape) // int(config.tp))
    return 2 * layers * heads * head_size(shape) * ELEMENT[config.dtype]


# -- the engine ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Held:
    """Policy that an engine holds."""

    version: int
    same: SameState
    state: Callable[[], State | None]
    """Getter of the policy's state; returns None once the history has dropped it."""

    def is_of(self, version: int, state: State) -> bool:
        """Return whether it is this policy."""
        return self.version == version and self.same.matches(state)

    def is_near(self, state: State) -> bool:
        """Return whether `state` is the same or a neighbour of it in one history."""
        own = self.state()
        return own is not None and known_changes(own, state) is not None

    @classmethod
    def of(cls, version: int, state: State) -> "_Held":
        """Describe an engine that was given this state."""
        weak = weakref.ref(state) if isinstance(state, HeldState) else None
        return cls(version, SameState(state), weak or (lambda: state))


class AuditingEngine:
    """One process with vLLM, and the policy that it holds."""

    def __init__(
        self,
        config: EngineConfig,
        program: Sequence[str],
        timeouts: EngineTimeouts,
        base: AdapterBase | None = None,
        child: EngineChild | None = None,
    ) -> None:
        """Make the process, not started, unless it is `child`; `base` is that of a run whose states are
        adapters."""
        environment = environments_of(config, os.environ)[0]
        self._config = config
        self.child = child or EngineChild(AUDITOR, "vLLM", environment, program, timeouts)
        self._policy = HostedPolicy(
            renews=False
        )  # a lost engine is replaced, and given the next state
        self._policy.base = base
        self._held: _Held | None = None
        self._copies: dict[int, _Held] = {}
        """Copies of weights that the engine keeps, by key."""
        self._keys = itertools.count()
        self._copying = True
        """Whether it may have room for a copy."""
        self.is_unsure = False
        """Whether the weights are unknown: during an update, and after one was interrupted."""

    @property
    def is_empty(self) -> bool:
        """Whether it was given no policy yet, or its weights are unknown."""
        return self._held is None

    def holds(self, version: int, state: State) -> bool:
        """Return whether the engine computes with this policy now."""
        return self._held is not None and self._held.is_of(version, state)

    def order_of(self, versions: Collection[int]) -> list[int]:
        """Sort `versions`, beginning at the end that is nearer to the held one."""
        order = sorted(versions)
        current = -1 if self._held is None else self._held.version
        return order[::-1] if abs(current - order[-1]) < abs(current - order[0]) else order

    async def start(self, model_dir: Path) -> None:
        """Start vLLM, without weights. Raises EngineError, UsageError."""
        config = self._config.model_dump_json().encode()
        await self.child.start(EngineSetUp(config, str(model_dir), fingerprint=""))

    async def hold(self, version: int, state: State) -> None:
        """Switch to this policy, by a copy of it or of its neighbour if the engine keeps one.

        Else positions that differ from the held one are written in place. Raises EngineError for a state that
        does not fit, EngineLost.
        """
        if self.holds(version, state):
            return
        if (key := self._useful_copy(version, state)) is not None:
            await self._recall(key)
        if not self.holds(version, state):
            for number, step in self._steps(version, state):
                await self._switch(number, step)
                await self._keep_copy()

    def _useful_copy(self, version: int, state: State) -> int | None:
        """Return the key of a copy of this policy; of a neighbour, if the held one is none."""
        copies = self._copies.items()
        exact = (key for key, copy in copies if copy.is_of(version, state))
        near = (key for key, copy in copies if copy.is_near(state))
        if self._held is not None and self._held.is_near(state):
            return next(exact, None)
        return next(itertools.chain(exact, near), None)

    async def _recall(self, key: int) -> None:
        """Write a copy again; without effect if the engine has it no longer. Raises EngineLost."""
        before, self._held, self.is_unsure = self._held, None, True
        copy = self._copies[key]
        try:
            await self.child.recall(copy.version, key)
        except EngineLost:
            raise
        except EngineError:  # it has slept
            del self._copies[key]
            copy = before
        self._held, self.is_unsure = copy, False

    async def _keep_copy(self) -> None:
        """Have the engine copy the weights that it holds now, if it has room. Raises EngineLost."""
        if not self._copying or self._held is None:
            return
        key = next(self._keys)
        copies = {**self._copies, key: self._held}
        keys = await self.child.keep(key)
        self._copies = {key: copies[key] for key in keys if key in copies}
        self._copying = bool(keys)

    def _steps(self, version: int, state: State) -> list[tuple[int, State]]:
        """Return the versions to switch to in turn: the differences of neighbours in a history are known."""
        old = None if self._held is None or self._policy.base else self._held.state()
        if old is None:
            return [(version, state)]
        assert self._held is not None
        later = between(old, state)[1:] or [state]
        if len(later) > MOST_STEPS:
            return [(version, state)]
        step = 1 if version > self._held.version else -1
        first = version - step * (len(later) - 1)
        return [(first + step * place, next_state) for place, next_state in enumerate(later)]

    async def _switch(self, version: int, state: State) -> None:
        before = self._held
        target, changed = await asyncio.to_thread(self._prepare, before, version, state)
        self._held, self.is_unsure = None, True
        try:
            if changed is None:
                await self._policy.load([self.child], version, state)
            else:
                await self._policy.update([self.child], version, state, changed)
        except EngineLost:
            raise
        except EngineError:
            self._held, self.is_unsure = before, False  # it does not fit: nothing was written
            raise
        self._held, self.is_unsure = target, False

    async def read(self, requests: Sequence[PrefillRequest], timeout_s: float) -> list[Rows]:
        """Measure texts under the held policy. Raises the errors of EngineChild.prefill()."""
        return [read_rows(answer) for answer in await self.child.prefill(requests, timeout_s)]

    def _prepare(
        self, before: _Held | None, version: int, state: State
    ) -> tuple[_Held, Changed | None]:
        """Return the policy to hold, and its differences from the held one; None: everywhere."""
        target = _Held.of(version, state)
        # adapters are merged anew without a search for changes: there is no generation to interrupt
        if self._policy.base or before is None:
            return target, None
        old = before.state()
        if old is None or layout(old) != layout(state):
            return target, None
        known = known_changes(old, state)
        if known is None and len(between(old, state)) > 2:
            return target, None  # far apart: written whole
        if known is None:
            known = changes(old, state, threads=memory_threads())
        return target, known


# -- items -----------------------------------------------------------------------------------------


@dataclass
class _Text:
    """One checked item, and the measurements of its S sampled tokens.

    What is derived from the item is made when it is first needed: the engine begins while the rest is made.
    """

    item: AuditItem
    route_bytes: int
    """Bytes of a token's routes in its run."""
    keeps: bool
    """Whether keys and values are kept across versions."""
    rows: dict[int, Rows] = field(default_factory=dict[int, Rows])
    """version -> measurements under it [S, COLUMNS], of a text that is read from its start."""
    kept: Rows | None = None
    """Measurements of `parts` [S, COLUMNS]; zeros elsewhere."""
    parts_read: int = 0
    """Number of `parts` that were measured."""
    fault: Unreadable | None = None
    """Reason why the item cannot be measured under one of the versions."""
    sums: "_Sum | None" = None
    """Summary, once the item was read under all versions."""

    @cached_property
    def counts(self) -> list[int]:
        """Numbers of tokens of the replies."""
        return [reply.end - reply.start for reply in self.item.replies]

    @cached_property
    def places(self) -> Numbers:
        """Positions of the sampled tokens [S]."""
        return np.concatenate([np.arange(reply.start, reply.end) for reply in self.item.replies])

    @cached_property
    def claims(self) -> Claims:
        """Claims of the sampled tokens [S]."""
        item, places = self.item, self.places
        seeds = np.repeat(np.array([reply.seed for reply in item.replies], np.int64), self.counts)
        text = np.array(item.token_ids, np.int64)[places]
        tokens = np.array(item.drawn, np.int64) if item.drawn else text
        routes = np.frombuffer(item.routes or bytes(len(places) * self.route_bytes), np.uint8)
        claims = make_claims(places, seeds, tokens, routes.reshape(len(places), self.route_bytes))
        claims["routed"] = bool(item.routes)
        return claims

    @cached_property
    def versions(self) -> Numbers:
        """Version that each sampled token claims [S]."""
        claimed = sorted(self.item.claimed)
        return np.repeat(claimed, [self.item.versions.count(version) for version in claimed])

    @cached_property
    def parts(self) -> "list[_KeptPart]":
        """Parts of the replies whose keys and values were kept across versions, in order."""
        return _kept_parts(self.versions, self.counts) if self.keeps else []

    @cached_property
    def anew(self) -> NDArray[np.bool_]:
        """Sampled tokens [S] in none of `parts`: they are measured in a text that is read from its start."""
        anew = np.ones(len(self.versions), np.bool_)
        for part in self.parts:
            anew[part.tokens] = False
        return anew

    @cached_property
    def wanted(self) -> list[int]:
        """Versions under which the item is read from its start."""
        if not self.parts:
            return self.item.wanted
        return sorted({*self.versions[self.anew].tolist(), *self.item.others})

    @property
    def is_read(self) -> bool:
        """Whether all was measured."""
        return len(self.rows) == len(self.wanted) and self.parts_read == len(self.parts)

    @property
    def cost(self) -> int:
        """Tokens to prefill."""
        return len(self.item.token_ids) * (len(self.wanted) + bool(self.parts))

    def asked(self, version: int, chosen: Numbers | slice) -> Claims:
        """Return the claims `chosen` of all S; those of another version ask for states only."""
        claims = self.stating(chosen)
        own = (self.versions[chosen] == version) & self.anew[chosen]
        claims["drawn"] &= own
        claims["routed"] &= own
        return claims

    def stating(self, chosen: Numbers | slice) -> Claims:
        """Copy the claims `chosen` of all S, with their supports.

        These are unpacked for a request alone: one wide support makes all claims of its text as wide.
        """
        claims = self.claims[chosen].copy()
        if not self.item.support:
            return claims
        return with_support(
            claims, unpack_support(self.item.support, self.claims["tokens"])[chosen]
        )

    def reach(self, version: int) -> int:
        """Count the sampled tokens up to the last that is measured under `version`."""
        item = self.item
        if version in item.others or (len(item.claimed) == 1 and not self.parts):
            return len(item.versions)
        own = (self.versions == version) & self.anew
        return int(own.nonzero()[0][-1]) + 1

    def keep(self, version: int, rows: Rows) -> None:
        """Keep the measurements of the first reach() tokens."""
        self.rows[version] = np.zeros((len(self.places), rows.shape[1]), rows.dtype)
        self.rows[version][: len(rows)] = rows

    def prefix(self, place: int) -> "_Prefix":
        """Return how the text was drawn, and the tokens before a position."""
        item = self.item
        return (item.temperature, item.top_k, item.top_p), *self.lead(place)

    def request(self, lead: list[int], claims: Claims, salt: str = "") -> PrefillRequest:
        """Make the request for measurements of `claims`, which follow the tokens `lead`."""
        item, width = self.item, claims["support"].shape[1]
        return PrefillRequest(
            lead, claims.tobytes(), item.temperature, salt, item.top_k, item.top_p, width
        )

    def request_kept(self, part: "_KeptPart", salt: str) -> PrefillRequest:
        """Make the request for a part's measurements, after the token's before it, if its block was kept.

        That token must not be computed again: it is in the cache.
        """
        claims, places = self.stating(part.tokens), self.places[part.tokens]
        start = 0 if part.is_first else (int(places[0]) - 1) // KV_BLOCK * KV_BLOCK
        if start:
            before = claims[:1].copy()
            before["places"], before["drawn"], before["routed"] = start, False, False
            claims = np.concatenate([before, claims])
        return self.request(self.lead(int(places[-1])), claims, salt)

    def lead(self, place: int) -> list[int]:
        """Return the tokens before a position."""
        return list(self.item.token_ids[:place])

    def own(self) -> Rows:
        """Return the measurements of each token under the version that it claims."""
        merged = self.kept
        for version in sorted(self.item.claimed & self.rows.keys()):
            rows, own = self.rows[version], (self.versions == version) & self.anew
            merged = rows if merged is None else np.where(own[:, None], rows, merged)
        assert merged is not None  # it is_read
        return merged


class _KeptPart(NamedTuple):
    """Tokens of a reply that were drawn under one of its several versions."""

    version: int
    tokens: slice
    """Their indices among all sampled tokens of the text."""
    is_first: bool
    """Whether the reply begins with it, so that nothing was kept before."""


class _KeptRead(NamedTuple):
    """A part to read, and the salt by which its reply's blocks are found."""

    text: _Text
    part: _KeptPart
    salt: str


def _kept_parts(versions: Numbers, counts: Sequence[int]) -> list[_KeptPart]:
    """List the parts of the replies with several versions; `counts` are the tokens of each reply."""
    parts: list[_KeptPart] = []
    end = 0
    for count in counts:
        start, end = end, end + count
        edges = [start, *(start + 1 + np.flatnonzero(np.diff(versions[start:end]))), end]
        if len(edges) > 2:
            parts += [
                _KeptPart(int(versions[first]), slice(int(first), int(last)), first == start)
                for first, last in pairwise(edges)
            ]
    return parts


@dataclass(frozen=True)
class _Sum:
    """Entry of one text in the summaries of several."""

    sums: "asyncio.Future[list[Measured]]"
    number: int

    async def found(self) -> Measured:
        return (await self.sums)[self.number]


def _unsummed(texts: Sequence[_Text]) -> list[_Text]:
    """Return the texts without a sum. A thread may be reading the others: they must not change."""
    return [text for text in texts if text.sums is None]


def sum_up(texts: Sequence[_Text]) -> list[Measured]:
    """Summarize texts that were read."""
    own = [text.own() for text in texts]
    compared = compare_replies(
        [split_proof(text.item) for text in texts],
        [rows[:, PROJECTED:] for rows in own],
        [[text.rows[version][:, PROJECTED:] for version in text.item.others] for text in texts],
    )
    measured = summarize(
        [rows[:, MARGIN] for rows in own],
        [text.item.logprobs for text in texts],
        [rows[:, LOGPROB] for rows in own],
        compared,
    )
    routes = [routing(rows[:, ROUTING:PROJECTED]) for rows in own]
    return [
        structs.replace(branch, routing=share, routing_max=margin)
        for branch, (share, margin) in zip(measured, routes, strict=True)
    ]


def shared_heads(texts: Sequence[_Text], ends: Sequence[int]) -> dict[int, list[int]]:
    """Group texts of equal sampling and prefix: number of the first text -> numbers of the others.

    The prefix is all that comes before the first claimed position. vLLM computes it for the first text, and
    takes it from its cache for the others. `ends` counts the claimed positions that are read of each text; a
    text with only one of them takes no other's prefix.
    """
    first: dict[_Prefix, int] = {}
    followers: dict[int, list[int]] = {}
    for number, text in enumerate(texts):
        leader = first.setdefault(text.prefix(text.item.replies[0].start), number)
        if leader != number and ends[number] > 1:
            followers.setdefault(leader, []).append(number)
    return followers


def _by_tokens(items: Iterable[T], tokens: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Split `items` in order into parts of up to `most` tokens, or of a single item.

    `tokens` counts the tokens of an item.
    """
    part: list[T] = []
    sum_of_part = 0
    for item in items:
        if part and sum_of_part + tokens(item) > most:
            yield part
            part, sum_of_part = [], 0
        part.append(item)
        sum_of_part += tokens(item)
    if part:
        yield part


class VllmAuditor:
    """An Auditor with one vLLM engine in its own process."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        timeout_s: float,
        program: Sequence[str] = PROGRAM,
        ahead: EngineChild | None = None,
    ) -> None:
        """Take the config of an engine that generates here.

        `timeout_s` is for a portion under one version; `ahead` is a process of begun_ahead(), which is used if
        it fits. Raises EngineError if vLLM is missing or too old.
        """
        if program is PROGRAM and not is_installed():
            raise EngineError(NO_AUDITOR)
        check_installed()
        self._config = config
        self._timeout_s = timeout_s
        self._program = program
        self._ahead = ahead
        self._timeouts = EngineTimeouts(load_s=timeout_s)
        self._run: RunManifest | None = None
        self._model_dir = Path()
        self._vocabulary = self._layers = self._room = 0
        self._base: AdapterBase | None = None
        self._engine: AuditingEngine | None = None
        self._busy = asyncio.Lock()
        self._portions = Portions(timeout_s, PORTION_TOKENS)
        self._salts = itertools.count(1)
        self._summing = ThreadPoolExecutor(1, "audit sums")  # several would wait for each other
        self._warming: asyncio.Task[None] | None = None
        self._closed = False
        self.loading_s = 0.0
        """See Auditor."""

    @property
    def pid(self) -> int | None:
        """Id of the audit process; None while there is none."""
        return self._engine.child.pid if self._engine else None

    async def start(self, model_dir: Path, run: RunManifest) -> None:
        """See Auditor. vLLM starts in the background, 15 s or more; the first audit waits for it."""
        if self._run is not None:
            raise EngineError("the auditor was started before: make another one")
        check_exact(self._config, run)
        await check_model_routes(model_dir, run)
        self._vocabulary = await asyncio.to_thread(vocab_size, model_dir)
        self._layers = await asyncio.to_thread(layer_count, model_dir)
        shape = await asyncio.to_thread(read_shape, model_dir)
        self._config = audit_engine(self._config, run, shape)
        self._room = int(self._config.vllm.get("max_num_batched_tokens") or STEP_TOKENS["cpu"])
        self._base = await asyncio.to_thread(read_adapter_base, model_dir, run)
        self._model_dir, self._run = model_dir, run
        self._warming = asyncio.create_task(self._warm_up(), name="auditor start")

    async def audit(
        self,
        items: Sequence[AuditItem],
        states: Mapping[int, State],
    ) -> list[Measured | Unreadable]:
        """See Auditor. One audit runs at a time, the others wait."""
        run = self._require_started()
        shape, keeps = run.routes, run.proofs.kv_cache == "kept"
        check_versions(items, states)
        faults = await asyncio.to_thread(self._faults, items, shape)
        size = 0 if shape is None else shape.token_bytes
        sound = [item for item, fault in zip(items, faults, strict=True) if fault is None]
        texts = [_Text(item, size, keeps) for item in sound]
        async with self._busy:
            await self._measure(texts, states)
        measured = iter([await self._found(text) for text in texts])
        return [fault or next(measured) for fault in faults]

    @staticmethod
    async def _found(text: _Text) -> Measured | Unreadable:
        if text.fault is not None:
            return text.fault
        assert text.sums is not None  # it was read under all versions
        return await text.sums.found()

    async def close(self) -> None:
        """See Auditor. A running audit ends with an EngineError."""
        self._closed = True
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.wait([self._warming])
        if self._engine is not None:
            await self._engine.child.kill()
        async with self._busy:
            await self._drop()
        self._summing.shutdown(wait=False)

    def _require_started(self) -> RunManifest:
        if self._run is None or self._closed:
            raise EngineError("the auditor is not running: start() it, and do not close it before")
        return self._run

    def _faults(
        self, items: Sequence[AuditItem], routes: RouteShape | None
    ) -> list[Unreadable | None]:
        """Explain why items cannot be measured; None for each that can."""
        faults = check_items(items, self._vocabulary, self._layers, routes)
        return [fault or self._fault(item) for item, fault in zip(items, faults, strict=True)]

    def _fault(self, item: AuditItem) -> Unreadable | None:
        """Explain why this auditor cannot take a sound item; None if it can."""
        longest = self._config.max_model_len
        if len(item.token_ids) > longest:
            detail = f"{len(item.token_ids)} tokens, where this run has {longest} at most"
            return Unreadable(detail, proof=False)
        if item.boundaries:
            return Unreadable(NO_BOUNDARIES, proof=False)
        return None

    # -- one audit ---------------------------------------------------------------------------------

    async def _measure(self, texts: Sequence[_Text], states: Mapping[int, State]) -> None:
        """Read texts under all versions that they need, and summarize them."""
        if not texts:
            return  # without waiting for vLLM
        if any(text.parts for text in texts):
            faults = await self._portions.measure(
                texts, [text.cost for text in texts], functools.partial(self._attempt_all, states)
            )
            for text, fault in zip(texts, faults, strict=True):
                text.fault = fault
            return
        engine = await self._started()
        for version in engine.order_of({version for text in texts for version in text.wanted}):
            chosen = [text for text in texts if version in text.wanted and text.fault is None]
            faults = await self._portions.measure(
                chosen,
                [len(text.item.token_ids) for text in chosen],
                functools.partial(self._attempt, version, states[version]),
                works=any(text.rows for text in texts),
            )
            for text, fault in zip(chosen, faults, strict=True):
                text.fault = fault

    async def _attempt(self, version: int, state: State, texts: Sequence[_Text]) -> list[None]:
        """Read texts at once under one version."""
        if left := _unsummed(texts):
            async with self._working() as engine:
                await self._hold(engine, version, state)
                await self._read(engine, version, left)
            self._sum_up(left)
        return [None] * len(texts)

    async def _attempt_all(self, states: Mapping[int, State], texts: Sequence[_Text]) -> list[None]:
        """Read texts under all of their versions: kept keys and values are of one attempt."""
        if left := _unsummed(texts):
            async with self._working() as engine:
                for some in _by_tokens(left, lambda text: len(text.item.token_ids), self._room):
                    await self._read_all(engine, states, some)
            self._sum_up(left)
        return [None] * len(texts)

    def _sum_up(self, texts: Sequence[_Text]) -> None:
        """Begin to summarize the texts that were read, while the next ones are being read."""
        if done := [text for text in _unsummed(texts) if text.is_read]:
            sums = asyncio.get_running_loop().run_in_executor(self._summing, sum_up, done)
            for number, text in enumerate(done):
                text.sums = _Sum(sums, number)

    async def _hold(self, engine: AuditingEngine, version: int, state: State) -> None:
        """Have the engine hold this policy; count the time if it held another. Raises the errors of hold()."""
        is_first, began = engine.is_empty, time.monotonic()
        try:
            await engine.hold(version, state)
        finally:
            self.loading_s += 0.0 if is_first else time.monotonic() - began

    @contextlib.asynccontextmanager
    async def _working(self) -> AsyncGenerator[AuditingEngine]:
        """Give a started engine to an attempt; afterwards end one that is lost or whose weights are unknown."""
        engine = await self._started()
        try:
            yield engine
        except BaseException as error:  # also when cancelled
            if engine.is_unsure or engine.child.lost.is_set():
                await self._drop()
            if self._closed:
                raise EngineError("the auditor was closed while it audited") from None
            if isinstance(error, EngineLost | _Refused):
                raise AuditFailed(str(error)) from error
            raise

    async def _read_all(
        self, engine: AuditingEngine, states: Mapping[int, State], texts: Sequence[_Text]
    ) -> None:
        """Visit all versions of texts in rising order: parts of kept replies first, which find their blocks.

        Raises AuditFailed if the cache has lost some of them.
        """
        work: dict[int, list[_KeptRead]] = {}
        salt = ""
        for text in texts:
            text.kept = np.zeros((len(text.places), COLUMNS), np.float32) if text.parts else None
            text.parts_read = 0
            for part in text.parts:
                if part.is_first:
                    salt = f"kept {next(self._salts)}"
                work.setdefault(part.version, []).append(_KeptRead(text, part, salt))
        for version in sorted(work.keys() | {wanted for text in texts for wanted in text.wanted}):
            await self._hold(engine, version, states[version])
            if version in work:
                await self._read_kept(engine, work[version])
            if whole := [text for text in texts if version in text.wanted]:
                await self._read(engine, version, whole)

    async def _read_kept(self, engine: AuditingEngine, reads: Sequence[_KeptRead]) -> None:
        """Measure parts of replies under the held version, each after the blocks that are kept.

        Raises AuditFailed if the cache has lost some of them.
        """
        answers: list[Rows] = []
        requests = (text.request_kept(part, salt) for text, part, salt in reads)
        await self._ask(engine, requests, answers.extend)
        for (text, part, _), rows in zip(reads, answers, strict=True):
            before, own = np.split(rows, [len(rows) - len(text.places[part.tokens])])
            if not_computed(own).any() or not not_computed(before).all():
                raise AuditFailed("the auditor's cache has lost keys and values that are kept")
            assert text.kept is not None  # it has parts
            text.kept[part.tokens] = own
            text.parts_read += 1

    async def _read(self, engine: AuditingEngine, version: int, texts: Sequence[_Text]) -> None:
        """Measure texts under the held version; read positions again that came from the cache.

        A text is read up to its last position of that version, or whole if it is compared with the version.
        """
        ends = [text.reach(version) for text in texts]
        heads = shared_heads(texts, ends)
        followers = {number for numbers in heads.values() for number in numbers}
        answers: list[Rows] = []
        heads_of: dict[int, Rows] = {}
        prefixes: dict[_Prefix, list[int]] = {}

        def request(number: int) -> PrefillRequest:
            """Ask for a text, and for the first position of those that share its prefix."""
            text, end = texts[number], ends[number]
            own = text.asked(version, slice(1 if number in followers else 0, end))
            shared = [
                texts[follower].asked(version, slice(1)) for follower in heads.get(number, ())
            ]
            lead = text.lead(int(text.places[end - 1]))
            return text.request(lead, join_claims([own, *shared]) if shared else own)

        def take(part: Sequence[Rows]) -> None:
            """Store the rows of the next texts; note the positions that came from the cache."""
            first = len(answers)
            for number, rows in enumerate(part, start=first):
                rows, extra = np.split(rows, [ends[number] - (number in followers)])
                heads_of.update(zip(heads.get(number, ()), extra[:, None], strict=True))
                if number in followers:
                    rows = np.concatenate([heads_of.pop(number), rows])
                answers.append(rows)
                missing = not_computed(rows)
                if missing.any():
                    last = int(texts[number].places[: len(rows)][missing].max())
                    prefixes.setdefault(texts[number].prefix(last), []).append(number)
                else:
                    texts[number].keep(version, rows)
            self._sum_up(texts[first : len(answers)])

        await self._ask(engine, map(request, range(len(texts))), take)
        if prefixes:
            await self._read_again(engine, version, texts, answers, prefixes)
            for number in itertools.chain(*prefixes.values()):
                texts[number].keep(version, answers[number])

    async def _read_again(
        self,
        engine: AuditingEngine,
        version: int,
        texts: Sequence[_Text],
        answers: list[Rows],
        prefixes: Mapping["_Prefix", Sequence[int]],
    ) -> None:
        """Complete `answers`: read each prefix once, for all texts (by number) that begin with it."""
        requests: list[PrefillRequest] = []
        for (_, *lead), numbers in prefixes.items():
            parts = [
                texts[number].asked(version, not_computed(answers[number]).nonzero()[0])
                for number in numbers
            ]
            salt = f"{next(self._salts)}"
            requests.append(texts[numbers[0]].request(lead, join_claims(parts), salt))
        reread: list[Rows] = []
        await self._ask(engine, requests, reread.extend)
        for numbers, rows in zip(prefixes.values(), reread, strict=True):
            start = 0
            for number in numbers:
                missing = not_computed(answers[number])
                end = start + int(missing.sum())
                answers[number] = answers[number].copy()
                answers[number][missing] = rows[start:end]
                start = end

    async def _ask(
        self,
        engine: AuditingEngine,
        requests: Iterable[PrefillRequest],
        take: Callable[[Sequence[Rows]], None],
    ) -> None:
        """Read texts in parts: the engine begins while the rest is made. `take` gets the rows, in order."""
        try:
            async with asyncio.TaskGroup() as tasks:
                reading: list[tuple[asyncio.Task[list[Rows]], int]] = []
                for part in _by_tokens(
                    requests, lambda request: len(request.token_ids), PART_TOKENS
                ):
                    answer = tasks.create_task(engine.read(part, self._timeout_s))
                    reading.append((answer, len(part)))
                    await asyncio.sleep(0)  # it is sent
                for answer, count in reading:
                    rows = await answer
                    if len(rows) != count:
                        raise _Refused(f"vLLM does not answer {count} texts")
                    take(rows)
        except BaseExceptionGroup as group:
            error = first_cause(group)
            if isinstance(error, EngineLost) or not isinstance(error, EngineError | ValueError):
                raise error from None
            raise _Refused(f"vLLM does not read these items ({error})") from error

    # -- the process -------------------------------------------------------------------------------

    async def _warm_up(self) -> None:
        """Start vLLM ahead of the first audit, which tries again if that fails."""
        try:
            async with self._busy:
                await self._started()
        except NodeError as error:
            logger.warning("vLLM, which audits, does not start: %s", error)

    async def _started(self) -> AuditingEngine:
        """Return a started engine. Raises EngineError if there can be none."""
        self._require_started()
        if self._engine is not None and self._engine.child.lost.is_set():
            fault = self._engine.child.fault
            logger.warning("vLLM, which audits, has ended (%s): it is started again", fault)
            await self._drop()
        if self._engine is None:
            child, self._ahead = await take_ahead(self._ahead, self._config), None
            engine = self._engine = AuditingEngine(
                self._config, self._program, self._timeouts, self._base, child
            )
            try:
                await engine.start(self._model_dir)
            except BaseException:  # also when cancelled: a half-started engine is of no use
                await self._drop()
                raise
        return self._engine

    async def _drop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.child.kill()


class _Refused(Exception):
    """The engine works, but does not read these items."""
