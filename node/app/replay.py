"""Recompute a finished run from its directory; compare every step with the published version.

- Nothing in the directory is written. Its files are trusted as far as digests and the trainer's signature go.
- A step is computed from the state before it, never from a published one. If that state is lost, so is the
  step, and replay goes on from the next checkpoint.
"""

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
from pydantic import ValidationError

from ...crypto.hashing import digest, short
from ...protocol.envelope import Purpose
from ...protocol.errors import RemoteProtocolError
from ...protocol.leaders import Leaders
from ...protocol.manifests import Artifact, PolicyHead, PolicyManifest
from ...protocol.session import decode
from ...protocol.trust import AdmittedHead, RunDocuments, leaders_of, read_documents
from ..config.loader import load
from ..config.run import RunConfig, TrainedEnvironment
from ..config.training import TrainingConfig
from ..errors import StorageError, UsageError
from ..gpus import is_on_gpu, usable
from ..storage.chunk_store import CHUNKS, chunk_path
from ..storage.ledger import LEADERS, MANIFEST, LedgerView
from ..storage.rollouts import KeptRollout, RolloutFiles, StepSettings
from ..storage.run_files import CHECKPOINTS, CONFIG, METRICS, ROLLOUTS, check_free
from ..trainer.kept_rollouts import kept_batch
from ..training.advantages import credit
from ..training.backend import Sample, TrainBackend, TrainBatch
from ..training.checkpoint import Checkpoints
from ..weights.chain import VersionChain
from ..weights.replica import EMPTY, Policy, WeightReplica, prove
from ..weights.state import CodecError, DigestMismatch, State, WeightsError, floats
from .factories import Factories
from .trainer import step_settings

GPU_TOLERANCE = 0.1
"""Share of what training moved by which a GPU may miss it: its sums have no fixed order."""

Outcome = Literal["equal", "close", "departs", "unchecked"]
"""`equal`: bit by bit; `close`: within the tolerance; `departs`: differs from the published version;
`unchecked`."""


@dataclass(frozen=True)
class ReplayedStep:
    """Result of replaying one step."""

    step: int
    outcome: Outcome
    note: str = ""
    """Why it departs or could not be checked."""
    samples: int = 0
    computed: str = ""
    """Digest of the state that was computed, hex."""
    published: str = ""
    """Digest in the signed head, hex."""
    weights: bool = False
    """Whether the published weights are still held, and are those that were signed."""
    largest: float | None = None
    """Largest difference of a weight, where digests differ and the published weights are held."""
    drift: float | None = None
    """Norm of all differences over that of the published way since the state that was loaded."""


def follows(steps: Sequence[ReplayedStep]) -> bool:
    """Return whether something could be checked, and all of it follows."""
    outcomes = {step.outcome for step in steps}
    return bool(outcomes & {"equal", "close"}) and "departs" not in outcomes


class _Lost(Exception):
    """Something that a step needs is not kept; the message names it."""


class _Departs(Exception):
    """The kept files contradict themselves or the signed heads; the message says where."""


@dataclass(frozen=True)
class _Batch:
    """Samples and options of one step."""

    samples: list[Sample]
    settings: StepSettings
    head: bytes
    note: str
    """Names an advantage that does not follow from its rewards."""


class PublishedVersions:
    """The signed versions that a run's directory still names, and their weights where the chunks are held."""

    def __init__(self, leaders: Leaders, chunks: Path) -> None:
        self._leaders = leaders
        self._chunks = chunks
        self._heads: dict[int, AdmittedHead] = {}
        self._chain = VersionChain()
        self._epoch = 0

    def open(self, sealed: bytes) -> AdmittedHead:
        """Check a head's signature. Raises RemoteProtocolError."""
        opened = self._leaders.unseal(sealed, Purpose.HEAD, PolicyHead)
        return AdmittedHead(opened.body, digest(opened.payload), sealed, opened.signer)

    def add(self, sealed: bytes, document: bytes) -> None:
        """Learn of a head and its manifest; those of later epochs come later. Raises RemoteProtocolError."""
        opened = self.open(sealed)
        head = opened.head
        if head.term > self._epoch:
            self._epoch = head.term
            self._chain.rewind(head.version)
            self._heads = {
                v: known_head for v, known_head in self._heads.items() if v < head.version
            }
        self._heads[head.version] = opened
        if digest(document) == head.manifest:
            manifest = decode(document, PolicyManifest)
            if manifest.state == head.state and manifest.version == head.version:
                self._chain.add(manifest)

    def digest_of(self, version: int) -> bytes | None:
        """Return the digest of the state that was signed for a version; None if it is not known."""
        known = self._heads.get(version)
        return known.head.state if known else None

    def check(self, step: int, sealed: bytes) -> PolicyHead | None:
        """Open the head that a step made, and check it against the others; None for none. Raises _Departs."""
        if not sealed:
            return self._heads[step].head if step in self._heads else None
        try:
            opened = self.open(sealed)
        except RemoteProtocolError as error:
            raise _Departs(f"its head is not signed by the run's trainer ({error})") from error
        head, known = opened.head, self._heads.get(step)
        before = self._heads.get(step - 1)
        if head.version != step:
            raise _Departs(f"its head is that of version {head.version}")
        if known is not None and known.digest != opened.digest:
            raise _Departs("two heads of this version are signed")
        if before and before.head.term == head.term and head.previous != before.digest:
            raise _Departs(f"its head does not follow that of version {step - 1}")
        self._heads[step] = opened
        return head

    def weights(self, version: int, base: Policy) -> Policy | None:
        """Read the published weights of a version, from `base` or a snapshot on; None if they are not held.

        Raises _Departs if the held weights are not the signed ones.
        """
        replica = WeightReplica(base)
        try:
            for reached, artifact in self._chain.plan(base.version, base.digest, version):
                manifest = self._chain.get(reached)
                assert manifest is not None
                payload = self._payload(reached, artifact)
                if payload is None:
                    return None
                replica.commit(replica.prepare(manifest, artifact, payload))
        except (CodecError, DigestMismatch) as error:
            raise _Departs(f"its published weights are not the signed ones: {error}") from error
        except WeightsError:
            return None  # nothing that is held leads there
        return replica.policy

    def _payload(self, version: int, artifact: Artifact) -> list[bytes] | None:
        chunks: list[bytes] = []
        for chunk in artifact.chunks:
            try:
                chunks.append(chunk_path(self._chunks, chunk.digest).read_bytes())
            except OSError:
                return None
            if digest(chunks[-1]) != chunk.digest:
                raise _Departs(
                    f"chunk {short(chunk.digest)} of the {artifact.kind} to version {version} was altered"
                )
        return chunks


@dataclass(frozen=True)
class KeptRun:
    """The kept files of a run, opened read-only."""

    directory: Path
    config: RunConfig
    documents: RunDocuments
    data_dir: Path
    """The trainer's."""
    steps: list[int]
    """All that the run trained, as far as anything tells."""
    files: RolloutFiles
    checkpoints: Checkpoints
    published: PublishedVersions

    @classmethod
    def open(cls, directory: Path) -> "KeptRun":
        """Open a run that no node works on. Raises UsageError, BusyError, StorageError."""
        if not (directory / CONFIG).is_file():
            raise UsageError(f"{directory} holds no run of `train` or `rl`: name outputs/NAME")
        check_free(directory)
        config = load(RunConfig, ["@", str(directory / CONFIG)], {})
        data_dir = config.data_dir or directory / "trainer"
        documents, published = _read_ledger(data_dir)
        files = RolloutFiles(directory / ROLLOUTS)
        trained = [step for step in files.steps() if _is_trained(files, step)]
        return cls(
            directory,
            config,
            documents,
            data_dir,
            sorted({*trained, *_measured(directory / METRICS)}),
            files,
            Checkpoints(directory / CHECKPOINTS, keep_last=1),
            published,
        )

    def batch(self, step: int) -> _Batch:
        """Make the batch of a step again, advantages from rewards. Raises _Lost."""
        try:
            record, rollouts = self.files.record(step), self.files.read(step)
            if not record.whole:
                raise _Lost(
                    f"{record.kept} of its {record.groups} groups were kept (rollouts.keep.share)"
                )
            settings = record.settings or step_settings(self.config)
            training = TrainingConfig.model_validate(settings.training)
            own = {
                name: TrainingConfig.model_validate(options)
                for name, options in settings.own.items()
            }
            if training.sft is not None:
                raise _Lost("its demonstrations are not kept (training.sft)")
            if any(
                settings_of.loss.endpoint is not None for settings_of in (training, *own.values())
            ):
                raise _Lost("its teacher's logprobs are not kept (training.loss.endpoint)")
            if training.loss.hint:
                raise _Lost("its hints are not kept (training.loss.hint)")
            samples = credit(
                kept_batch(rollouts, record.groups), training, own, record.baselines
            ).samples
        except StorageError as error:
            there = self.files.path(step).exists()
            raise _Lost(
                str(error) if there else "its rollouts are not kept (rollouts.keep)"
            ) from error
        except ValidationError as error:
            raise _Lost(f"it was trained with options that are not known here: {error}") from error
        except (TypeError, ValueError, IndexError) as error:
            raise _Lost(f"its rollouts are damaged ({error})") from error
        return _Batch(samples, settings, record.head, _altered(rollouts, samples))


def _read_ledger(data_dir: Path) -> tuple[RunDocuments, PublishedVersions]:
    """Read the run's manifest and heads. Raises StorageError."""
    view = LedgerView(data_dir / "ledger.db")
    try:
        sealed = view.get(MANIFEST)
        if sealed is None:
            raise StorageError(f"the ledger in {data_dir} names no run: it was never started")
        documents = read_documents(sealed, now=int(time.time()))
        leaders = leaders_of(documents, view.get(LEADERS) or b"")
        published = PublishedVersions(leaders, data_dir / CHUNKS)
        for head, document in view.heads():
            published.add(head, document)
    except (RemoteProtocolError, WeightsError) as error:
        raise StorageError(f"the ledger in {data_dir} is not genuine: {error}") from error
    finally:
        view.close()
    return documents, published


def _is_trained(files: RolloutFiles, step: int) -> bool:
    """Return whether a file holds the batch of a step, not the rollouts left when the run ended."""
    try:
        return files.record(step).groups > 0
    except StorageError:
        return True  # it will be reported when its turn comes


def _measured(path: Path) -> list[int]:
    """List the steps that metrics.jsonl has a line of."""
    try:
        lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        return [int(line["step"]) for line in lines if "batch/samples" in line]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # it only lists the steps


def _altered(rollouts: Sequence[KeptRollout], samples: Sequence[Sample]) -> str:
    """Name the first rollout whose kept advantage does not follow from its group's rewards."""
    trained = [rollout for rollout in rollouts if rollout.verdict == "trained"]
    if len(trained) != len(samples):
        return f"{len(trained)} sequences were trained, the kept rewards give {len(samples)}"
    for rollout, sample in zip(trained, samples, strict=True):
        if rollout.advantage != sample.advantage:
            return f"rollout {rollout.place}: its kept reward does not give the advantage that was trained"
    return ""


class RunReplay:
    """Computes the steps of a run again, in order; a context that holds the learner."""

    def __init__(
        self, run: KeptRun, *, tolerance: float | None = None, factories: Factories | None = None
    ) -> None:
        """`tolerance` is of `drift`; None: none on CPUs, 0.1 where the run or the replay is on a GPU."""
        self._run = run
        self._tolerance = tolerance
        self._factories = factories or Factories()
        self._backend: TrainBackend | None = None
        self._settings: StepSettings | None = None
        self._at: int | None = None
        """The version that the learner is; None: it is of no use."""
        self._untouched = False
        """Whether the learner is still the model that it was made of."""
        self._start: State = {}
        """The state that was loaded last."""
        self._known = EMPTY
        """The newest published policy that is known from there on."""

    async def __aenter__(self) -> "RunReplay":
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._backend is not None:
            await self._backend.close()

    async def steps(self) -> AsyncGenerator[ReplayedStep]:
        """Replay every step of the run. Raises EngineError where the learner fails."""
        for step in self._run.steps:
            try:
                replayed = await self._replay(step)
            except _Lost as error:
                replayed = ReplayedStep(step, "unchecked", str(error))
            except _Departs as error:
                replayed = ReplayedStep(step, "departs", str(error))
            self._at = step if replayed.computed and replayed.outcome != "departs" else None
            yield replayed

    async def _replay(self, step: int) -> ReplayedStep:
        """Compute a step, compare it with the signed head. Raises _Lost, _Departs."""
        batch = await asyncio.to_thread(self._run.batch, step)
        head = self._run.published.check(step, batch.head)
        backend = await self._come_to(step - 1, batch.settings)
        self._untouched = False
        await backend.step(TrainBatch(step, batch.samples))
        policy = await asyncio.to_thread(prove, step, await backend.state())
        signed = head.state.hex() if head else ""
        count, digits = len(batch.samples), policy.digest.hex()
        replayed = ReplayedStep(step, "unchecked", batch.note, count, digits, signed)
        if head is None:
            return _with(replayed, "unchecked", "its signed head was not kept")
        return await asyncio.to_thread(self._compare, replayed, policy, head, batch.settings)

    def _compare(
        self, replayed: ReplayedStep, policy: Policy, head: PolicyHead, settings: StepSettings
    ) -> ReplayedStep:
        """Compare the state that was computed with the published one."""
        try:
            published = self._run.published.weights(replayed.step, self._known)
        except _Departs as error:
            return _with(replayed, "departs", str(error))
        if policy.digest == head.state:
            self._known = policy
            return replace(replayed, outcome="equal", weights=published is not None)
        allowed = self._allowed(settings)
        if published is None and allowed:
            return _with(replayed, "unchecked", "bits differ, and its weights are no longer held")
        if published is not None:
            largest, drift = difference(policy.state, published.state, self._start)
            self._known = published
            replayed = replace(replayed, weights=True, largest=largest, drift=drift)
            if drift <= allowed and not replayed.note:  # advantages are exact anywhere
                return replace(replayed, outcome="close")
        return _with(replayed, "departs", "the state is another than the published one")

    def _allowed(self, settings: StepSettings) -> float:
        if self._tolerance is not None:
            return self._tolerance
        gpu = settings.gpu or is_on_gpu(str(settings.training.get("device", "auto")), usable)
        return GPU_TOLERANCE if gpu else 0.0

    async def _come_to(self, version: int, settings: StepSettings) -> TrainBackend:
        """Make the learner that version, set up as the step after it was trained. Raises _Lost, _Departs."""
        backend = self._backend
        if backend is None or settings != self._settings:
            backend = await self._set_up(settings)
        if self._at == version:
            return backend
        run = self._run
        if version in await asyncio.to_thread(run.checkpoints.steps):
            try:
                await run.checkpoints.read(version)
            except StorageError as error:
                raise _Lost(str(error)) from error
            await backend.load(run.checkpoints.backend_directory(version))
        elif version or not self._untouched or run.config.warmup is not None:
            raise _Lost(
                "no checkpoint of the step before is kept (checkpoint.keep_first, keep_interval)"
            )
        self._untouched = False
        state = await backend.state()
        policy = await asyncio.to_thread(prove, version, state)
        signed = run.published.digest_of(version)
        manifest = run.documents.manifest
        if not version and run.config.warmup is None and not manifest.adapters:
            signed = signed or manifest.model.base_state
        if signed is not None and signed != policy.digest:
            raise _Departs(f"the kept state of step {version} is not version {version}")
        self._start, self._known = state, policy if signed else EMPTY
        return backend

    async def _set_up(self, settings: StepSettings) -> TrainBackend:
        """Start a learner with these settings; it goes on where the one before was. Raises EngineError."""
        config = self._run.config
        training = TrainingConfig.model_validate(settings.training)
        sampling = config.sampling.model_copy(update={"temperature": settings.temperature})
        config = config.model_copy(
            update={
                "training": training,
                "sampling": sampling,
                "max_steps": settings.max_steps,
                "environments": [_settled(environment, settings) for environment in config.mixture],
            }
        )
        with TemporaryDirectory(prefix="primerl-replay-") as directory:
            learner, before = Path(directory) / "learner", self._backend
            if before is not None:
                await before.save(learner)
                await before.close()
            backend = self._backend = self._factories.backend(config)
            await backend.start(await asyncio.to_thread(_model, self._run))
            if before is not None:
                await backend.load(learner)
        self._untouched = before is None
        self._settings = settings
        return backend


def _with(replayed: ReplayedStep, outcome: Outcome, note: str) -> ReplayedStep:
    notes = [text for text in (note, replayed.note) if text]
    return replace(replayed, outcome=outcome, note="; ".join(notes))


def _settled(environment: TrainedEnvironment, settings: StepSettings) -> TrainedEnvironment:
    """Return an environment with the loss and the temperature that a step was computed with."""
    training = TrainingConfig.model_validate(settings.own.get(environment.name, settings.training))
    temperature = settings.temperatures.get(environment.name, settings.temperature)
    sampling = environment.sampling.model_copy(update={"temperature": temperature})
    return environment.model_copy(update={"loss": training.loss, "sampling": sampling})


def _model(run: KeptRun) -> Path:
    """Find the directory of the model that the trainer loaded. Raises StorageError, UsageError."""
    from ..models import huggingface

    config = run.config
    if run.documents.manifest.adapters is not None:
        directory = run.data_dir / "model"
    elif config.model.create is not None:
        directory = run.directory / "model"
    else:
        return huggingface.resolve(config.model.name)
    if not (directory / "config.json").is_file():
        raise StorageError(f"{directory} is gone: the model that the run began with was there")
    return directory


def difference(computed: State, published: State, start: State) -> tuple[float, float]:
    """Measure (largest difference of a weight, norm of all of them / norm of `published` - `start`).

    Both are infinite where the states have not the same tensors.
    """
    if computed.keys() != published.keys() or computed.keys() != start.keys():
        return math.inf, math.inf
    largest = missed = moved = 0.0
    for name, tensor in published.items():
        with np.errstate(over="ignore", invalid="ignore"):  # a wrong state may hold any bits
            theirs = floats(tensor).astype(np.float64)
            miss = np.abs(floats(computed[name]) - theirs)
            largest = max(largest, float(miss.max(initial=0.0)))
            missed += float(np.square(miss).sum())
            moved += float(np.square(theirs - floats(start[name])).sum())
    return largest, math.sqrt(missed / moved) if moved else math.inf
