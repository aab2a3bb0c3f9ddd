"""Compose `primerl-node eval`: every environment with every model; no node, no run.

Models that differ in nothing but their weights share an engine, which starts only if a cell has to be measured.
"""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..config.engine import EngineConfig
from ..config.evaluation import EndpointConfig, EvalConfig, EvalSamplingConfig
from ..config.run import EnvironmentConfig, EvaluatedEnvironment
from ..environments.chat import ChatFormat, dated
from ..environments.chat_api import read_key
from ..environments.environment import Environment
from ..environments.hosted import HostedEnvironment
from ..environments.judge_model import Judges
from ..environments.sandbox import Sandbox, choose
from ..errors import UsageError
from ..evaluation.candidates import (
    Candidate,
    candidates,
    contract,
    identity,
    read,
    run_config,
)
from ..evaluation.endpoint import open_endpoint
from ..evaluation.eval_suite import Cell, CellStore, EvalModel, EvalSuite, Watch, cell_key
from ..evaluation.evaluator import EnginePolicy, EvalSampling, PolicyClient
from ..inference.build import build_engine
from ..inference.engine import Engine
from ..ops.logs import configure
from ..storage.run_files import CONFIG, begun_on, claim, held, write
from .factories import make_environment

MAX_TOKENS = 512
MAX_CHARACTERS = 1 << 22
"""Longest reply that is accepted from an API, which itself counts tokens."""
BATCHES = 2
"""Rollouts in flight, in batches of the engine: the next one waits while one is generated."""


def make_text_environment(
    config: EnvironmentConfig,
    seed: int,
    temperature: float,
    *,
    sandbox: Sandbox | None = None,
    judges: Judges | None = None,
) -> Environment:
    """Make an environment for models that take and give text, not started."""
    return HostedEnvironment(
        config,
        model_dir=None,
        seed=seed,
        max_tokens=MAX_CHARACTERS,
        temperature=temperature,
        sandbox=sandbox,
        judges=judges,
    )


@dataclass(frozen=True)
class EvalFactories:
    """Factories of the computing parts: the real ones by default, fakes in tests."""

    engine: Callable[[EngineConfig], Engine] = build_engine
    environment: Callable[[EnvironmentConfig, Path, int, int, float], Environment] = (
        make_environment
    )
    text_environment: Callable[[EnvironmentConfig, int, float], Environment] = make_text_environment

    @classmethod
    def sandboxed(cls, config: EvalConfig, environ: Mapping[str, str]) -> "EvalFactories":
        """Make the real factories; environments run in the sandbox of `config`. Judges keep answers beside
        the results; `environ` holds their keys. Raises UsageError."""
        sandbox = choose(config.sandbox)
        judges = Judges(config.environments, config.directory, environ)
        return cls(
            environment=partial(make_environment, sandbox=sandbox, judges=judges),
            text_environment=partial(make_text_environment, sandbox=sandbox, judges=judges),
        )


async def evaluate(
    config: EvalConfig,
    *,
    watch: Watch,
    factories: EvalFactories | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[Cell]:
    """Measure every cell, or find it on disk; results.json and the rollouts are in config.directory.

    `environ` holds the keys of endpoints. Raises NodeError; finished cells are kept.
    """
    variables = os.environ if environ is None else environ
    keys = [read_key(endpoint, variables) for endpoint in config.endpoints]
    config = completed(config)
    local = await asyncio.to_thread(candidates, config)
    with held(config.directory):
        _begin(config)
        cells = CellStore(config.directory)
        run = run_config(config.weights_dir) if config.weights_dir else {}
        shown = (run.get("data") or {}).get("environment")  # of `sft`
        trained = [str(own.get("id")) for own in (*trained_on(run), shown or {})]
        suite = EvalSuite(config, cells, watch, len(local) + len(keys), trained)
        evaluation = _Evaluation(
            config,
            suite,
            factories or EvalFactories.sandboxed(config, variables),
        )
        await evaluation.local(local)
        for endpoint, key in zip(config.endpoints, keys, strict=True):
            await evaluation.endpoint(endpoint, key)
        return suite.found


def trained_on(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List the environments in a run's config."""
    return [own for own in run.get("environments") or [run.get("environment")] if own]


def completed(config: EvalConfig) -> EvalConfig:
    """Fill what `config` leaves out from the run of weights_dir. Raises UsageError."""
    run = run_config(config.weights_dir) if config.weights_dir else {}
    environments = config.environments
    if not environments:
        own = trained_on(run)
        if not own:
            raise UsageError(
                f"{config.weights_dir} is of no run that names an environment: add [[environments]]"
            )
        fields = ("name", *EnvironmentConfig.model_fields)
        environments = [
            EvaluatedEnvironment.model_validate(
                {name: options[name] for name in fields if name in options}
            )
            for options in own
        ]
    sampled = run.get("sampling") or {}
    length = config.sampling.max_tokens or sampled.get("max_tokens") or MAX_TOKENS
    sampling = config.sampling.model_copy(update={"max_tokens": int(length)})
    return config.model_copy(update={"environments": environments, "sampling": sampling})


def _begin(config: EvalConfig) -> None:
    directory = config.directory
    claim(directory)
    write(directory / CONFIG, config.model_dump_json(indent=2))
    configure(config.log, directory / "logs" / "eval.jsonl")


class _Evaluation:
    """Opens models and endpoints, and measures them."""

    def __init__(self, config: EvalConfig, suite: EvalSuite, factories: EvalFactories) -> None:
        self._config = config
        self._suite = suite
        self._factories = factories

    async def local(self, huggingface: Sequence[Candidate]) -> None:
        """Measure local models: those that differ in weights alone share an engine."""
        groups: dict[str, list[Candidate]] = {}
        for candidate in huggingface:
            groups.setdefault(await asyncio.to_thread(contract, candidate), []).append(candidate)
        for group in groups.values():
            async with AsyncExitStack() as open_things:
                loader = PolicyLoader(
                    self._config.engine,
                    self._config.sampling,
                    group[0].model_dir,
                    open_things,
                    self._factories.engine,
                )
                environments = StartedEnvironments(
                    self._environment(group[0].model_dir), open_things
                )
                for candidate in group:
                    await self._suite.measure(await self._model(candidate, loader, environments))

    async def _model(
        self, candidate: Candidate, loader: "PolicyLoader", environments: "StartedEnvironments"
    ) -> EvalModel:
        engine = self._config.engine
        date = await asyncio.to_thread(
            dated, {}, candidate.model_dir, begun_on(self._config.directory)
        )
        return EvalModel(
            name=candidate.name,
            kind="local",
            identity=await asyncio.to_thread(identity, candidate),
            how={
                **engine.model_dump(
                    mode="json", include={"type", "dtype", "max_model_len", "vllm"}
                ),
                **date,
            },
            at_once=BATCHES * engine.max_batch * engine.replicas,
            policy=lambda: loader.policy(candidate),
            environment=environments.get,
            step=candidate.step,
        )

    def _environment(self, model_dir: Path) -> Callable[[EvaluatedEnvironment], Environment]:
        sampling, make = self._config.sampling, self._factories.environment
        limits = (self._config.seed, sampling.max_tokens, sampling.temperature)
        begun = begun_on(self._config.directory)

        def make_dated(evaluated: EvaluatedEnvironment) -> Environment:
            variables = dated(evaluated.chat_template_kwargs, model_dir, begun)
            own = evaluated.model_copy(update={"chat_template_kwargs": variables})
            return make(own, model_dir, *limits)

        return make_dated

    async def endpoint(self, endpoint: EndpointConfig, key: str) -> None:
        """Measure a model behind an API."""
        config, make = self._config, self._factories.text_environment
        sampling = config.sampling
        fields = {"url", "model", "max_tokens_field", "send_seed", "options"}
        how = endpoint.model_dump(mode="json", include=fields)
        async with AsyncExitStack() as open_things:
            opened = await open_things.enter_async_context(
                open_endpoint(endpoint, sampling, sampling.max_tokens, key)
            )

            async def policy() -> PolicyClient:
                return opened

            environments = StartedEnvironments(
                lambda evaluated: make(evaluated, config.seed, sampling.temperature), open_things
            )
            model = EvalModel(
                name=endpoint.name or endpoint.model,
                kind="api",
                identity=cell_key(endpoint=how),
                how=how,
                at_once=endpoint.concurrency,
                policy=policy,
                environment=environments.get,
            )
            await self._suite.measure(model)


class StartedEnvironments:
    """Environments, started when first needed, open until the block ends."""

    def __init__(
        self, make: Callable[[EvaluatedEnvironment], Environment], open_things: AsyncExitStack
    ) -> None:
        self._make = make
        self._open_things = open_things
        self._held: dict[str, Environment] = {}

    async def get(self, config: EvaluatedEnvironment) -> Environment:
        """Start the environment of that title, or return it. Raises EnvironmentFailed."""
        if config.title not in self._held:
            environment = self._make(config)
            self._open_things.push_async_callback(environment.close)
            await environment.start()
            self._held[config.title] = environment
        return self._held[config.title]


class PolicyLoader:
    """One engine that holds the weights of several models in turn."""

    def __init__(
        self,
        engine: EngineConfig,
        sampling: EvalSamplingConfig,
        model_dir: Path,
        open_things: AsyncExitStack,
        make_engine: Callable[[EngineConfig], Engine] = build_engine,
    ) -> None:
        """`model_dir` has the tokenizer; the engine is closed with `open_things`."""
        self._config = engine
        self._sampling = sampling
        self._model_dir = model_dir
        self._open_things = open_things
        self._make_engine = make_engine
        self._engine: Engine | None = None
        self._policy: tuple[Candidate, PolicyClient] | None = None
        self._loads = 0

    async def policy(self, candidate: Candidate) -> PolicyClient:
        """Load the weights of `candidate`, unless they are the last loaded. Raises EngineError."""
        if self._policy is None or self._policy[0] != candidate:
            self._policy = (candidate, await self._load(candidate))
        return self._policy[1]

    async def _load(self, candidate: Candidate) -> PolicyClient:
        from ..models import huggingface

        engine = self._engine or await self._start()
        self._loads += 1
        await engine.load(self._loads, await asyncio.to_thread(read, candidate))
        sampling = self._sampling
        stops = await asyncio.to_thread(huggingface.stop_token_ids, self._model_dir)
        return EnginePolicy(
            engine,
            self._loads,
            EvalSampling(
                sampling.max_tokens, sampling.temperature, stops, sampling.top_p, sampling.top_k
            ),
            max_model_len=self._config.max_model_len,
            decode=(await asyncio.to_thread(ChatFormat.load, self._model_dir)).text,
        )

    async def _start(self) -> Engine:
        engine = self._make_engine(self._config)
        self._open_things.push_async_callback(engine.close)
        await engine.start(self._model_dir)
        self._engine = engine
        return engine
