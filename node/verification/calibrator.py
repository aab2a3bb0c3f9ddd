"""Calibration of one model: its honest noise, bounds for it, and whether cheats are outside of them.

What is measured is the run itself: its model, tasks, sampling and engines. Bounds are made of honest
rollouts alone; cheats only decide whether the bounds are worth something.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from ...protocol.manifests import RunManifest, Thresholds
from ...protocol.rollouts import Evidence
from ..config.run import EngineConfig, RunConfig
from ..environments.environment import Environment
from ..inference.engine import Engine, build_engine
from ..models import huggingface
from ..ops.errors import NodeError, UsageError
from ..weights.state import State
from .auditor import Auditor
from .bands import (
    FalsePositives,
    bands,
    column,
    d_prime,
    false_positives,
    other_scale,
    quantiles,
)
from .forging import (
    CLAIMED,
    COOL,
    CUT,
    Choose,
    ForgedReply,
    as_played,
    cooler,
    cut,
    device_name,
    edited,
    first_replies,
    foreign,
    forge,
    honestly,
    said_by,
)
from .honest import HonestPlayer, HonestRollout, Say, company, entropy_share, measure, trial_run
from .judge import Calibration
from .separation import VARIANTS, Separated, nudged, separate

if TYPE_CHECKING:
    from ..inference.model import LanguageModel

EngineName = Literal["hf", "vllm", "scripted"]

NEXT = CLAIMED + 1
"""A policy that is one step of the run's learning rate away from the claimed one."""
NEXT_NAME = "next version"
COMPUTED = "computed in"
DTYPES = ("float32", "bfloat16")
RANDOM_WEIGHTS = 0.85
"""Entropy over ln(vocabulary) above which a model knows next to nothing; trained ones are below 0.5."""
FEWEST_CHANGED = 8
"""A cheat that changes fewer of its rollouts than this gains nothing by it, and proves nothing."""


@dataclass(frozen=True)
class CalibrationRequest:
    """What to measure."""

    rollouts: int = 512
    """Honest ones of each engine."""
    cheats: int = 64
    """Of each cheat."""
    engines: tuple[EngineName, ...] = ()
    """What workers generate with; empty: engine.type."""
    cross_dtype: bool = False
    """Whether to look at workers that compute in the other dtype."""
    force: bool = False
    """Whether to go on with a model that knows nothing."""


class EngineNoise(msgspec.Struct, frozen=True):
    """Honest rollouts of one engine."""

    engine: str
    rollouts: int
    tokens: int
    quantiles: dict[str, list[float]]
    """Of each measure: bands.SHARES, then the largest."""


class CalibrationReport(msgspec.Struct, frozen=True):
    """All that was found."""

    model: str
    """Digest (hex) of its config.json."""
    name: str
    dtype: Literal["float32", "bfloat16"]
    device: str
    noise: list[EngineNoise]
    rollouts: int
    tokens: int
    entropy: float
    """Of the sampled distribution, over ln(vocabulary)."""
    reject: Thresholds
    suspect: Thresholds
    other_scale: float
    false_positives: FalsePositives
    separation: list[Separated]
    d_prime: dict[str, float]
    """Cheat -> standard deviations between its fingerprints and honest ones."""

    @property
    def inseparable(self) -> list[str]:
        """Cheats that the bounds let pass."""
        return [one.name for one in self.separation if one.required and not one.separates]

    def check(self) -> None:
        """Raise NodeError if the bounds are not worth writing."""
        if self.inseparable:
            raise NodeError(
                f"honest rollouts cannot be told from {', '.join(self.inseparable)}, so nothing was "
                "written: measure more rollouts or longer replies, take engine.dtype float32, or insist "
                "with --force"
            )

    def calibration(self, day: str) -> Calibration:
        """What goes into the run manifest; `day` is its date."""
        engines = "+".join(noise.engine for noise in self.noise)
        return Calibration(
            model=self.model,
            fingerprint="projection",
            dtype=self.dtype,
            reject=self.reject,
            suspect=self.suspect,
            other_scale=self.other_scale,
            honest_rollouts=self.rollouts,
            honest_tokens=self.tokens,
            source=f"{engines} against hf on {self.device}, {day}"[:200],
        )


class Calibrator:
    """Measures one model; the environment is started, and belongs to the caller."""

    def __init__(
        self,
        config: RunConfig,
        model_dir: Path,
        state: State,
        environment: Environment,
        wanted: CalibrationRequest,
        *,
        make_auditor: Callable[[EngineConfig], Auditor],
        seed: int,
        say: Say,
        make_engine: Callable[[EngineConfig], Engine] = build_engine,
    ) -> None:
        """`state` is the policy to measure, in bf16; `seed` decides everything that is drawn."""
        self._config = config
        self._model_dir = model_dir
        self._environment = environment
        self._wanted = wanted
        self._make_auditor = make_auditor
        self._make_engine = make_engine
        self._seed = seed
        self._say = say
        self._states = {CLAIMED: state, NEXT: nudged(state, config.training.lr, seed)}
        self._vocab_size = huggingface.vocab_size(model_dir)
        self._stops = huggingface.stop_token_ids(model_dir)

    async def run(self) -> CalibrationReport:
        """Measure. Raises UsageError and EngineError with what is in the way."""
        config, run = self._config, self._trial()
        played = {
            name: await self._play(name, run, self._wanted.rollouts) for name in self._engines
        }
        entropy = self._look(next(iter(played.values())))
        async with self._auditing(run) as auditor:
            honest = {name: await self._measure(auditor, one) for name, one in played.items()}
            everyone = [one for found in honest.values() for one in found]
            bound = bands(everyone)
            # each engine rounds in its own way: what holds for all together need not for one
            each = [other_scale(column(found, "other_policy")) for found in honest.values()]
            bound = replace(bound, other_scale=min(bound.other_scale, *each))
            self._warn(bound.other_scale)
            contract = bound.contract(run.proofs)
            first = next(iter(played.values()))
            cheats = await self._cheat(run, auditor, first, self._wanted.cheats)
            if self._wanted.cross_dtype:
                cheats |= await self._cross(run, auditor)
        chance = random.Random(self._seed)
        separation = [
            separate(name, found, contract, chance=chance, required=self._required(name, found))
            for name, found in cheats.items()
        ]
        return CalibrationReport(
            model=run.model.base_state.hex(),
            name=config.model.name,
            dtype=config.engine.dtype,
            device=device_name(config.engine.device),
            noise=[_noise(name, found) for name, found in honest.items()],
            rollouts=len(everyone),
            tokens=sum(one.tokens for one in everyone),
            entropy=entropy,
            reject=bound.reject,
            suspect=bound.suspect,
            other_scale=bound.other_scale,
            false_positives=false_positives(everyone, run.proofs),
            separation=separation,
            d_prime={name: d_prime(everyone, cheats[name]) for name in VARIANTS},
        )

    @property
    def _engines(self) -> tuple[EngineName, ...]:
        return self._wanted.engines or (self._config.engine.type,)

    def _trial(self) -> RunManifest:
        return trial_run(
            self._config,
            config_file=(self._model_dir / "config.json").read_bytes(),
            vocab_size=self._vocab_size,
            stop_token_ids=self._stops,
        )

    @asynccontextmanager
    async def _auditing(self, run: RunManifest) -> AsyncGenerator[Auditor]:
        auditor = self._make_auditor(self._config.engine)
        await auditor.start(self._model_dir, run)
        try:
            yield auditor
        finally:
            await auditor.close()

    async def _play(
        self, name: EngineName, run: RunManifest, rollouts: int, dtype: str = ""
    ) -> list[HonestRollout]:
        """Honest rollouts of one engine, in every company. Raises UsageError if most of them fail."""
        update = {"type": name, "dtype": dtype or self._config.engine.dtype}
        config = self._config.engine.model_copy(update=update)
        engine = self._make_engine(config)
        player = HonestPlayer(run, self._environment, seed=self._seed)
        played: list[HonestRollout] = []
        try:
            await engine.start(self._model_dir, fingerprint=run.proofs.fingerprint)
            await engine.load(CLAIMED, self._states[CLAIMED])
            for count, at_once in company(rollouts, config.max_batch):
                played += await player.play(engine, count, at_once)
                self._say(f"{name}: {len(played)} of {rollouts} rollouts, {at_once} at once")
        finally:
            await engine.close()
        if len(played) < rollouts / 2:
            raise UsageError(
                f"only {len(played)} of {rollouts} rollouts came to an end: check environment and "
                "sampling.max_tokens"
            )
        return played

    def _look(self, played: Sequence[HonestRollout]) -> float:
        """Entropy over its largest. Raises UsageError for a model that draws nearly evenly."""
        share = entropy_share(played, self._vocab_size)
        if share > RANDOM_WEIGHTS:
            message = (
                f"the model draws almost evenly (entropy {share:.0%} of ln(vocabulary)): random weights "
                "hide what rounding and cheats do"
            )
            if not self._wanted.force:
                raise UsageError(f"{message}; train it first and name it by --weights, or --force")
            self._say(f"warning: {message}")
        return share

    def _warn(self, scale: float) -> None:
        """Of honest rollouts that look like another policy's: the auditor rounds otherwise than they do."""
        if scale < 0.05:
            self._say(
                "warning: honest rollouts look like those of a neighbouring version here, so a worker that "
                "stays on the last version is found only where it differs by much"
            )

    async def _measure(self, auditor: Auditor, played: Sequence[HonestRollout]) -> list[Evidence]:
        return await measure(auditor, played, self._states, {CLAIMED: [NEXT]}, self._say)

    # -- cheats ------------------------------------------------------------------------------------

    async def _cheat(
        self, run: RunManifest, auditor: Auditor, honest: Sequence[HonestRollout], count: int
    ) -> dict[str, list[Evidence]]:
        """Every cheat's rollouts; of who runs the right model, those that differ from honest ones."""
        replies = first_replies(honest, count)
        lines = [line for line, _ in replies]
        found = await self._other_models(run, auditor, lines)
        network = await self._network(self._states[CLAIMED])
        said = [reply for _, reply in replies]
        plans: dict[str, tuple[Sequence[ForgedReply], Choose]] = {
            f"temperature x {COOL}": (lines, cooler),
            f"top-k {CUT}": (lines, cut),
            "foreign text": (foreign(replies), honestly),
            "one token edited": (edited(replies, self._stops), honestly),
        }
        for name, (planned, choose) in plans.items():
            forged = await asyncio.to_thread(forge, network, planned, run, choose)
            changed = [
                one for one, reply in zip(forged, said, strict=True) if said_by(one) != reply
            ]
            found[name] = await self._measure(auditor, as_played(changed))
        return found

    async def _other_models(
        self, run: RunManifest, auditor: Auditor, lines: Sequence[ForgedReply]
    ) -> dict[str, list[Evidence]]:
        claimed = self._states[CLAIMED]
        states = {name: variant(claimed) for name, variant in VARIANTS.items()}
        found: dict[str, list[Evidence]] = {}
        for name, state in {**states, NEXT_NAME: self._states[NEXT]}.items():
            network = await self._network(state)
            forged = await asyncio.to_thread(forge, network, lines, run)
            found[name] = await self._measure(auditor, as_played(forged))
            self._say(f"{name}: {len(forged)} rollouts")
        return found

    async def _network(self, state: State) -> "LanguageModel":
        from ..inference.model import build_network

        engine = self._config.engine
        return await asyncio.to_thread(
            build_network, self._model_dir, state, dtype=engine.dtype, device=engine.device
        )

    async def _cross(self, run: RunManifest, auditor: Auditor) -> dict[str, list[Evidence]]:
        """Honest rollouts that were computed in the other dtype."""
        other = next(name for name in DTYPES if name != self._config.engine.dtype)
        played = await self._play(self._engines[0], run, self._wanted.cheats, other)
        return {f"{COMPUTED} {other}": await self._measure(auditor, played)}

    def _required(self, name: str, found: Sequence[Evidence]) -> bool:
        optional = name == NEXT_NAME or name.startswith(COMPUTED)
        return not optional and len(found) >= FEWEST_CHANGED


def _noise(engine: str, found: Sequence[Evidence]) -> EngineNoise:
    return EngineNoise(engine, len(found), sum(one.tokens for one in found), quantiles(found))
