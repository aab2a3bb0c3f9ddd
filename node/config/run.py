"""Configuration: defaults < TOML files (`@ a.toml @ b.toml`) < environment (`PRIMERL_`) < flags.

Closed (an unknown key is an error), constrained by type, units in the names. `train` and `rl` read
RunConfig, `join` reads JoinConfig; both hold NodeConfig's sections. Learner: training.py; engine: engine.py.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from ...protocol.manifests import MAX_LEARNERS, MAX_NODE_NAME
from .base import BaseConfig
from .chat_api import JudgeConfig
from .engine import (
    EXACT_NEEDS_VLLM,
    KEPT_NEEDS_VLLM,
    PIPELINES_NEED_VLLM,
    STAGES_WITHOUT_ROUTES,
)
from .engine import EngineConfig as EngineConfig
from .engine import PipelineConfig as PipelineConfig
from .limits import LimitsConfig, RateLimitsConfig
from .monitors import MonitorsConfig
from .paths import check_component, expand_home
from .sandbox import SandboxConfig, WorkerSandboxConfig
from .training import (
    Advantage,
    ComputeConfig,
    LengthPenaltyConfig,
    LossConfig,
    OverlongConfig,
    Positive,
    TrainingConfig,
)


class CheckpointConfig(BaseConfig):
    """Exact checkpoints of the trainer."""

    interval: Positive = 20
    """Steps between checkpoints. After a crash --resume goes on at the newest version, with the optimizer's
    moments of the newest checkpoint; with 1 these are of that version, too, which waits for its checkpoint."""
    keep_last: Positive = 2
    """Number of newest checkpoints that are kept: if the last is damaged, the one before is used."""
    keep_interval: Annotated[int, Field(ge=0)] = 0
    """Keep those whose step is a multiple of this as well; 0 keeps none of them."""
    keep_first: bool = False
    """Keep the first one, too: `primerl-node replay` recomputes a run from there."""
    weights_interval: Annotated[int, Field(ge=0)] = 0
    """Steps between exports of the weights to weights/step_N, for `eval` and others; 0: the last step only."""
    root: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    """Id of the key, kept off the network, that certifies which standbys may lead the run if this trainer is
    lost (`primerl-node root init`); empty: this trainer's own key does. A run keeps the one it began with."""


class ResumeConfig(BaseConfig):
    """Go on from a checkpoint; --resume alone takes the newest one of this run."""

    step: Annotated[int, Field(ge=0)] | None = None
    """The checkpoint of this step. Later steps of this run are void: newer checkpoints are set aside."""
    dir: Annotated[Path, AfterValidator(expand_home)] | None = None
    """Directory of another run: begin a new run with its weights, optimizer, step and place in the data."""


def _resume(value: object) -> object:
    """`resume = true` and `PRIMERL_RESUME=1` in place of an empty section."""
    word = str(value).lower() if isinstance(value, bool | int | str) else ""
    if word in ("true", "1", "yes", "on"):
        return {}
    return None if word in ("false", "0", "no", "off", "none") else value


Resume = Annotated[ResumeConfig | None, BeforeValidator(_resume)]


RunName = Annotated[str, AfterValidator(check_component)]
ParentDir = Annotated[Path, AfterValidator(expand_home)]


class OwnRunConfig(BaseConfig):
    """The run's directory, its length, and the checkpoint to go on from."""

    name: RunName = "run"
    """Run directory under output_dir: one name, without /."""
    output_dir: ParentDir = Path("outputs")
    """Parent of the run directories."""
    seed: int = 0
    """Seed of weights that are made here, of the order of tasks and of the held-out split."""
    max_steps: Positive = 200
    """Optimizer steps of the run."""
    resume: Resume = None
    clean: bool = False
    """Delete the files that an earlier run of this name wrote; other files in its directory stay."""
    monitors: MonitorsConfig = MonitorsConfig()

    @property
    def run_dir(self) -> Path:
        """Directory of the run: logs, metrics, checkpoints, weights, summary."""
        return self.output_dir / self.name

    @property
    def goes_on(self) -> bool:
        """Whether the run in `run_dir` is continued; a fork begins a new one."""
        return self.resume is not None and self.resume.dir is None


def _check_seed(text: str) -> str:
    """A seed's base URL, as aiohttp is given it. Raises ValueError."""
    try:
        url = urlsplit(text)
        web = url.scheme in ("http", "https") and url.hostname and not url.fragment
        named = web and (url.port is None or url.port > 0)
        folder = url.scheme == "file" and not url.netloc and url.path.startswith("/")
        named = named or (folder and not url.query and not url.fragment)
    except ValueError:
        named = False
    if not named or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError(
            "a seed is http://HOST/PATH, https://HOST/PATH or file:///PATH, percent-encoded"
        )
    return text


MAX_SEEDS = 16
MAX_ENVIRONMENTS = 64
"""See protocol/manifests.py, which is not imported for a --help."""
MAX_BRANCHES = 64
"""See protocol/rollouts.py."""
Port = Annotated[int, Field(ge=0, le=65535)]
DashboardPort = Port | Literal["off"]
Seconds = Annotated[float, Field(gt=0)]
SeedUrl = Annotated[str, AfterValidator(_check_seed)]
EnvironmentSeconds = Annotated[float, Field(ge=0.1, le=86400)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class NetworkConfig(BaseConfig):
    """Addresses, peers and limits of this node's network."""

    host: str = "0.0.0.0"
    """Address to listen on; 127.0.0.1 keeps everything on this machine."""
    port: Port = 0
    """UDP port of iroh, and TCP port of libp2p; 0 takes those of the last start, or free ones."""
    advertise: list[str] = []
    """host:port hints put into tickets and peer records in place of the bound addresses."""
    name: Annotated[str, Field(max_length=MAX_NODE_NAME, pattern=r"^[\w .@-]*$")] = ""
    """Name of this node that `peers` of others shows beside its id: letters, digits, blanks and . @ _ -"""
    share_address: bool = True
    """Whether admitted peers of the run may learn our addresses. If not, a node that joined connects to nodes
    that lead its run and to its seeds alone: it fetches each version from the trainer, without libp2p."""
    relay_urls: list[str] = []
    """iroh relays of your own; public relays are never used unless listed here."""
    libp2p: bool = True
    """Peer discovery and gossip by libp2p; everything works, a little slower, without."""
    max_peers: Positive = 256
    """Most peers connected at a time; further ones are turned away."""
    seeds: Annotated[list[SeedUrl], Field(max_length=MAX_SEEDS)] = []
    """Base URLs of copies of a node's `chunks` folder, on any static web server (http, https) or a disk of this
    machine (file), for chunks that no peer serves. Their answers are verified like a peer's."""


class ModelConfig(BaseConfig):
    """The model that a run trains."""

    name: str = "tiny-qwen3"
    """A local directory or a hub id; with `create` it is only a label."""
    create: dict[str, Any] | None = None
    """Make a Qwen3 with random weights and a byte-level tokenizer here instead of loading one: fields of its
    transformers config (`hidden_size = 96`, `num_hidden_layers = 2`), others are those of a tiny model. With
    `num_experts` it is a Qwen3-MoE."""


StopString = Annotated[str, Field(min_length=1, max_length=64)]


class EnvironmentConfig(BaseConfig):
    """One `verifiers` v1 taskset."""

    id: str = "reverse-text"
    """Module name of the taskset, as `verifiers` spells it; docs/environments.md lists the bundled ones."""
    args: dict[str, Any] = {}
    """The taskset's own options."""
    max_turns: Positive = 8
    """Most replies of the model in one rollout."""
    timeout_s: EnvironmentSeconds = 60.0
    """Longest time of a rollout's own code (hooks, rewards) between two turns, without waiting for a judge; a
    rollout that takes longer is ended and lost."""
    start_timeout_s: EnvironmentSeconds = 600.0
    """Longest time for the taskset to be imported and loaded, or to give its next task."""
    deterministic_rewards: bool = True
    """Whether equal replies always earn equal rewards, so that a worker's claim can be checked against the
    trainer's own score. Set false for random rewards: then only the trainer's score counts."""
    judge: JudgeConfig | None = None
    """The model that rewards ask by a Judge of `verifiers`. With it all rewards are the trainer's: workers play
    and do not score."""
    tool_call_parser: str = "auto"
    """Form of the model's tool calls, by vLLM's name of the parser that reads it (`hermes`, `qwen3_coder`,
    `glm45`, `deepseek_v3`); `auto` finds it by the chat template. For environments with tools."""
    chat_template_kwargs: dict[str, bool | int | float | str] = {}
    """Variables of the model's chat template, as `enable_thinking = false`; every prompt is made with them. A
    template that writes the date writes that of `strftime_now`, by default the day on which the run began."""
    earlier_reasoning: Literal["keep", "drop", "branch"] = "keep"
    """The reasoning of earlier turns that later ones see. `keep`: all of it, as it was sampled; the
    conversation is one sample. `drop`: none, as with a chat server; each turn is a sample. `branch`: all of it
    until the next message of a user, and a new sample begins there."""
    stop: Annotated[list[StopString], Field(max_length=8)] = []
    """Strings that end a reply: with the first token that completes one, which stays in the reply."""
    deterministic_tools: bool = True
    """Whether equal tool calls always have equal results, so that a rollout can be played again to check it.
    Set false for tools that search, draw or look at a clock: then such a rollout cannot be checked, and a
    worker's tool results and rewards are believed."""

    @model_validator(mode="after")
    def _has_few_samples(self) -> Self:
        if self.earlier_reasoning != "keep" and self.max_turns > MAX_BRANCHES:
            raise ValueError(
                f"max_turns: a rollout has {MAX_BRANCHES} samples at most, and earlier_reasoning = "
                f"'{self.earlier_reasoning}' may make one of each turn; lower it to {MAX_BRANCHES}"
            )
        return self

    @model_validator(mode="after")
    def _can_find_stops(self) -> Self:
        if self.stop and not self.deterministic_tools:
            raise ValueError(
                "stop: where replies end is checked by playing a rollout again, and with deterministic_tools = "
                "false it cannot be; leave stop out"
            )
        return self

    def options(self) -> "EnvironmentConfig":
        """Return the part that decides how tasks are made and scored."""
        return EnvironmentConfig(
            **{name: getattr(self, name) for name in EnvironmentConfig.model_fields}
        )

    def published(self) -> "EnvironmentConfig":
        """Return the options for the manifest: all of them, but not how to reach the judge."""
        judge = None if self.judge is None else self.judge.published()
        return self.options().model_copy(update={"judge": judge})


UNPROVED = frozenset(
    "min_p min_tokens stop_token_ids logit_bias presence_penalty "
    "frequency_penalty repetition_penalty".split()
)
"""Sampling options of engines that a lease cannot set."""


class ProvedSamplingConfig(BaseConfig):
    """Sampling that audits can repeat; what `extra_body` holds counts as if it stood beside it."""

    @model_validator(mode="before")
    @classmethod
    def _can_be_proved(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        given = cast("dict[str, Any]", value)
        if isinstance(extra := given.get("extra_body"), dict):
            given = given | cast("dict[str, Any]", extra)
            del given["extra_body"]
        if of_text := sorted({"chat_template_kwargs", "stop"}.intersection(given)):
            raise ValueError(
                f"{' and '.join(of_text)} depend on the text: give them in [environment] or [[environments]], "
                "where evaluations take them, too"
            )
        if refused := sorted(UNPROVED.intersection(given)):
            raise ValueError(
                f"{' and '.join(refused)} cannot be set in training: audits repeat temperature, top_p and "
                "top_k, and a reply ends at the model's stop tokens; leave it out"
            )
        return given


class OwnSamplingConfig(ProvedSamplingConfig):
    """[environments.sampling]: an environment's own values of [sampling]."""

    temperature: Annotated[float, Field(gt=0, le=2)] | None = None
    """Logits are divided by this before a token is drawn; default: sampling.temperature."""
    max_tokens: Annotated[int, Field(ge=0)] = 0
    """Most tokens of one reply; 0: sampling.max_tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Draw from the likeliest tokens that hold this probability together; default: sampling.top_p."""
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Draw from this many likeliest tokens, 0 is all; default: sampling.top_k."""


OWN_TRAINING = ("advantage", "overlong", "length_penalty", "loss")
"""Keys of [training] that an environment may have of its own."""


class TrainedEnvironment(EnvironmentConfig):
    """One of the environments that a run trains on."""

    name: Annotated[str, Field(max_length=64)] = ""
    """Name in metrics, status and kept rollouts; else the id."""
    ratio: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Weight: the environment's share of the leased groups is this over the sum of all ratios."""
    group_size: Annotated[int, Field(ge=0, le=4096)] = 0
    """Rollouts per task; 0: rollouts.group_size."""
    sampling: OwnSamplingConfig = OwnSamplingConfig()
    advantage: Advantage | None = None
    """Default: training.advantage."""
    overlong: OverlongConfig | None = None
    """Default: training.overlong."""
    length_penalty: LengthPenaltyConfig | None = None
    """Default: training.length_penalty."""
    loss: LossConfig | None = None
    """Default: training.loss. A teacher is the one that training.loss names, or an endpoint of its own."""

    @property
    def title(self) -> str:
        """Name, or the id."""
        return self.name or self.id


class SamplingConfig(ProvedSamplingConfig):
    """The sampling contract: every worker samples like this."""

    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Logits are divided by this before a token is drawn."""
    max_tokens: Positive = 16
    """Most tokens of one reply."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens that hold this probability together, of those that top_k leaves. Rollouts
    state which tokens are left, and logprobs, also those of the loss, are over these."""
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Draw from this many likeliest tokens; 0 is all."""

    @property
    def truncates(self) -> bool:
        """Whether top_p or top_k limit the tokens that are sampled."""
        return self.top_k > 0 or self.top_p < 1


class KeepConfig(BaseConfig):
    """Rollouts that are kept to be read: a Parquet file for each step in RUN_DIR/rollouts."""

    share: Fraction = 1.0
    """Share of the groups that is kept; 0 keeps nothing."""
    steps: Annotated[int, Field(ge=0)] = 50
    """Newest steps whose rollouts are kept; 0 keeps all."""
    max_gib: Annotated[float, Field(gt=0)] = 4.0
    """Most disk space for them: older ones make room for new ones."""


class RolloutsConfig(BaseConfig):
    """Leases, batches and the limit of staleness."""

    group_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """Rollouts per task, unless an environment sets its own; training needs 2 or more."""
    groups_per_batch: Positive = 16
    """Tasks per optimizer step; batch size = groups_per_batch x group_size."""
    groups_per_lease: Annotated[int, Field(ge=1, le=512)] = 4
    """Tasks per lease."""
    max_off_policy_steps: Annotated[int, Field(ge=0)] = 8
    """Hard bound: version being trained minus the oldest version that generated any token. 0 = synchronous.
    Rollouts are seldom that old: leases run ahead only as far as generation needs."""
    lease_timeout_s: Seconds = 60.0
    """Time after which a lease goes to another worker."""
    leases_per_worker: Positive = 16
    """Most leases that a worker may hold at a time; a newcomer gets one, a slow worker only as many as it
    finishes in half of lease_timeout_s."""
    batch_timeout_s: Seconds = 600.0
    """Time that the trainer waits for a batch before it counts an empty one."""
    max_peer_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Largest share of a batch that one worker supplies, where there are enough workers."""
    max_empty_batches: Positive = 10
    """Empty or signal-free batches in a row that stop the run."""
    keep: KeepConfig = KeepConfig()


class WarmupConfig(BaseConfig):
    """Supervised warm-up on the environment's own demonstrations before RL."""

    lr: Annotated[float, Field(gt=0)] = 3e-3
    """Learning rate of the warm-up."""
    batch_size: Positive = 128
    """Demonstrations per optimizer step."""
    max_steps: Positive = 200
    """Stop after this many steps, target reached or not."""
    target: Fraction = 0.28
    """Stop when sampled exact match on training prompts reaches this."""
    eval_interval: Positive = 5
    """Steps between measurements of the target."""
    eval_prompts: Positive = 256
    """Training prompts per measurement."""


NodeIdText = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class LearnersConfig(BaseConfig):
    """Other nodes that train the run together with its trainer: `join --role learner` on each."""

    nodes: Annotated[list[NodeIdText], Field(max_length=MAX_LEARNERS)] = []
    """Their ids, which `primerl-node id` prints; fixed for the run. The trainer itself always trains, too."""
    inner_steps: Annotated[int, Field(ge=1, le=64)] = 4
    """Optimizer steps of each learner from one version to the next. A batch is divided among all of them; the
    staleness that rollouts.max_off_policy_steps bounds counts them."""
    quorum: Positive = 1
    """Contributions, the trainer's among them, that a version waits for."""
    grace_s: Seconds = 60.0
    """Longest time to wait, with a quorum, for a learner that is late: then this version is made without it."""
    outer_lr: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Learning rate of the outer step (Nesterov) on what all learners contributed; 1 without momentum takes
    their mean."""
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Its momentum; 0.9 multiplies what all agree on by ten."""


class WeightsConfig(BaseConfig):
    """Transfer and storage of policy versions."""

    keep_versions: Positive = 16
    """Newest versions that can always be fetched."""
    max_disk_gib: Annotated[float, Field(gt=0)] = 64.0
    """Most disk space for chunks; more are refused."""


FINGERPRINT = "projection"
"""What workers commit to while they generate, 8 bytes per token; there is only this one."""


class VerificationConfig(BaseConfig):
    """Checks of rollouts before they are learned from."""

    auditor: Literal["auto", "hf", "vllm"] = "auto"
    """Engine that audits. `auto` is that of the workers where rounding matters: `vllm` in bfloat16 or with
    exact numerics; else, and where the trainer has no vLLM or no room for another one, it is `hf`. `vllm`
    audits every model that it serves and shares the prompts of a group. It cannot measure states at the
    boundaries of a pipeline between nodes: rollouts of a pipeline are audited by `hf` beside it."""
    numerics: Literal["calibrated", "exact"] = "calibrated"
    """`exact`: workers and auditors run vLLM with batch-invariant kernels, in one release on devices of one
    family, and a rollout by any other weights or temperature is rejected; shown on CPUs and, at 0.6B and 4B,
    on an H100, see docs/proofs.md."""
    bounds: Literal["auto", "built-in"] = "auto"
    """`auto` measures them in bfloat16, during the run, by the workers of `references`, and takes the built-in
    ones in float32; `built-in` takes these in bfloat16, too, where they are unfair to models of 4B."""
    references: list[str] = []
    """Node ids (hex) of workers of yours: honest noise is measured by their rollouts. Give one for each kind of
    engine and GPU that joins. `primerl-node rl` adds the workers that it starts."""
    audit_rate: Fraction = 0.1
    """Share of a proven worker's rollouts that is audited; of a new or suspect worker's all are, of a worker's
    in `references` a quarter as many, if that is enough to renew the bounds of noise every eight steps."""
    validators: list[str] = []
    """Node ids (hex) whose signed audit reports count; the trainer audits the other rollouts itself."""


class EvaluatedEnvironment(EnvironmentConfig):
    """An environment whose held-out tasks are played to measure a model."""

    name: str = ""
    """Name in the results; else the id."""
    prompts: Annotated[int, Field(ge=-1)] = 64
    """Number of tasks, fewer if the environment has fewer; -1: all."""
    samples: Positive = 4
    """Rollouts per task: the k of avg@k and the largest j of pass@j."""
    success: float = 1.0
    """A rollout with at least this reward solves its task."""

    @field_validator("prompts")
    @classmethod
    def _check_prompts(cls, value: int) -> int:
        if not value:
            raise ValueError("should be at least 1, or -1 for all tasks")
        return value

    @property
    def title(self) -> str:
        """The name in the results."""
        return self.name or self.id


class OnlineSamplingConfig(BaseConfig):
    """[evaluation.environments.sampling]: an evaluation is not proved, so it may leave tokens out."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 takes the likeliest token; default: sampling.temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens that hold this probability together."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Draw from this many likeliest tokens; 0 is all."""
    max_tokens: Annotated[int, Field(ge=0)] = 0
    """Most tokens of one reply; 0: sampling.max_tokens."""


class OnlineEnvironment(EvaluatedEnvironment):
    """An environment that is evaluated beside training."""

    interval: Annotated[int, Field(ge=0)] = 0
    """Steps between two evaluations on it; 0: evaluation.interval."""
    sampling: OnlineSamplingConfig = OnlineSamplingConfig()


def check_judges(environments: Sequence[EnvironmentConfig]) -> None:
    """Refuse judges that cannot be reached. Raises ValueError."""
    for environment in environments:
        if environment.judge is not None and not environment.judge.url:
            raise ValueError(
                f"the judge of {environment.id!r} has no url: set environment.judge.url to http(s)://HOST/v1"
            )


def check_names(what: str, names: list[str]) -> None:
    """Refuse empty and duplicate names. Raises ValueError."""
    for name in names:
        if names.count(name) > 1 or not name or not name.isprintable():
            raise ValueError(
                f"{what} must have different names: {name!r} is there twice, or no name"
            )


class EvaluationConfig(BaseConfig):
    """Evaluation on held-out prompts: before and after, and beside training."""

    prompts: Annotated[int, Field(ge=-1)] = 256
    """Prompts before and after, one rollout each; 0 switches that off, -1: all that are held out."""
    interval: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations beside training, of the first version and the last, too; 0: none."""
    samples: Positive = 4
    """Beside training: rollouts of each of the run's own prompts."""
    environments: list[OnlineEnvironment] = []
    """Environments evaluated beside training; if none is named, `prompts` tasks of each of the run's own."""

    @property
    def is_online(self) -> bool:
        """Whether anything is evaluated beside training."""
        return bool(self.interval or any(environment.interval for environment in self.environments))

    @model_validator(mode="after")
    def _has_prompts(self) -> Self:
        if self.interval and not (self.prompts or self.environments):
            raise ValueError("interval needs evaluation.prompts, or [[evaluation.environments]]")
        check_names(
            "evaluation.environments", [environment.title for environment in self.environments]
        )
        return self


class LogConfig(BaseConfig):
    """Logging."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""
    json_lines: bool = False
    """Structured log lines on stderr (the log file is always structured)."""


GPU_NAME = re.compile(r"\d+|(GPU|MIG)-[\w/-]+", re.ASCII)


def _gpus(value: object) -> object:
    """Convert a number or a list of a TOML file to the text of the flag."""
    if isinstance(value, list | tuple):
        return "".join(f"{name}," for name in value) or "0"
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _check_gpus(text: str) -> str:
    """Check a number of GPUs or their names; a comma makes a single number a name. Raises ValueError."""
    names = [name.strip() for name in text.split(",")]
    inner = names[:-1] if len(names) > 1 and not names[-1] else names
    if text and not all(GPU_NAME.fullmatch(name) for name in inner):
        raise ValueError(
            'GPUs are a number of them ("2"), or which ones ("0,1"; "0," is the first)'
        )
    return ",".join(names)


Gpus = Annotated[str, BeforeValidator(_gpus), AfterValidator(_check_gpus)]


def default_auditor(engine: EngineConfig, *, exact: bool) -> Literal["hf", "vllm"]:
    """Choose the engine that audits: the workers' vLLM where the two would round differently."""
    rounds = exact or engine.dtype == "bfloat16" or engine.keep_kv_cache
    return "vllm" if engine.type == "vllm" and rounds else "hf"


class LaunchConfig(BaseConfig):
    """Processes of `primerl-node rl`, and their GPUs on this machine."""

    workers: Annotated[int, Field(ge=0)] | None = None
    """Number of workers. Default: one for each engine that fits the inference GPUs; 2 without a GPU."""
    trainer_gpus: Gpus = ""
    """How many GPUs the trainer has ("2"), or which: "0,1" as torch counts those that are visible, or UUIDs as
    CUDA_VISIBLE_DEVICES has them; "0," is the first one. Default: training.fsdp.ranks, else one."""
    inference_gpus: Gpus = ""
    """GPUs of all workers together, as above. Default: those that the trainer leaves. A GPU that both name is
    shared."""
    mps: bool = False
    """Processes that share a GPU compute at the same time (NVIDIA MPS) in place of taking turns: faster, but an
    error of one on the GPU, or killing it, can end the others there, too."""
    share_chunks: bool = True
    """Let workers read the trainer's chunks from its disk instead of fetching them over the network."""


class DashboardConfig(BaseConfig):
    """The node's page in the browser, and its /metrics for Prometheus."""

    port: DashboardPort = "off"
    """TCP port on 127.0.0.1; 0 takes a free one. On for `train` and `rl`; `primerl-node dashboard` prints the
    link."""


class NodeConfig(BaseConfig):
    """Settings of every node."""

    data_dir: Path | None = None
    """Key, ledger, chunks and control socket of this node. Default: ~/.primerl for a worker, the directory
    `trainer` inside the run's own for a trainer."""
    fsync: bool = True
    """Flush to disk before anything is acknowledged. Without it a node still survives kill -9, but a power
    failure may cost it its last seconds."""
    network: NetworkConfig = NetworkConfig()
    limits: RateLimitsConfig = RateLimitsConfig()
    engine: EngineConfig = EngineConfig()
    weights: WeightsConfig = WeightsConfig()
    dashboard: DashboardConfig = DashboardConfig()
    log: LogConfig = LogConfig()


class AllowedConfig(BaseConfig):
    """The environments whose code a worker may run for a run that it joined."""

    allow: list[str] = []
    """Environments that may be played here, beside the bundled ones: a run names a module, and a worker imports
    it. Also --allow-environment NAME."""


class JoinConfig(NodeConfig):
    """`primerl-node join`."""

    role: Literal["inference", "validator", "standby", "learner"] = "inference"
    """`inference` generates rollouts; `validator` audits those of others; `standby` keeps a copy of the run,
    and leads it if its trainer is lost; `learner` trains it together with its trainer."""
    ticket: str = ""
    """The join ticket that the trainer printed, or a file or an https link that holds it; these are read again
    while the trainer is not heard, for its new address."""
    limits: LimitsConfig = LimitsConfig()  # pyright: ignore[reportIncompatibleVariableOverride] - only read
    environments: AllowedConfig = AllowedConfig()
    sandbox: WorkerSandboxConfig = WorkerSandboxConfig()
    monitors: MonitorsConfig = MonitorsConfig()
    wait: bool = False
    """Wait for a trainer that was stopped to come back; without it a worker leaves when the trainer says so."""
    wait_for_trainer_s: Annotated[float, Field(ge=0)] = 3600.0
    """Time to wait for a trainer that does not answer (60 s at least), or that was stopped (see wait), before
    leaving; inf: for ever."""
    takeover_config: Annotated[Path, AfterValidator(expand_home)] | None = None
    """File with what differs on this standby's machine from the trainer's config, if it has to lead the run:
    devices, paths."""
    pp: PipelineConfig = PipelineConfig()
    training: ComputeConfig = ComputeConfig()
    """Of a learner: where it computes; how it trains is the run's."""

    @model_validator(mode="after")
    def _hides_its_address(self) -> "JoinConfig":
        if self.network.share_address:
            return self
        if self.network.relay_urls:
            raise ValueError(
                "network.share_address = false and network.relay_urls exclude each other: whoever knows this "
                "node's id would reach it by the relay, where iroh names its addresses to find a direct path"
            )
        if self.pp.wanted:
            raise ValueError(
                "a pipeline's stages connect to each other: remove pp, or network.share_address = false"
            )
        return self

    @model_validator(mode="after")
    def _is_one_kind_of_many(self) -> "JoinConfig":
        if self.pp.wanted and self.engine.type != "vllm":
            raise ValueError(PIPELINES_NEED_VLLM)
        if self.pp.wanted and self.engine.replicas > 1:
            raise ValueError(
                "engine.dp and pp cannot be combined: start one node per pipeline, each with its own pp"
            )
        if self.pp.wanted and self.engine.pp > 1:
            raise ValueError(
                "engine.pp splits layers over this host's GPUs, pp over nodes: use one of them"
            )
        return self


class RunConfig(NodeConfig, OwnRunConfig):
    """`primerl-node train` and `primerl-node rl`."""

    model: ModelConfig = ModelConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    """The environment to train on; for several use [[environments]] instead."""
    environments: Annotated[list[TrainedEnvironment], Field(max_length=MAX_ENVIRONMENTS)] = []
    """Environments to train on together, each with its share of every batch."""
    sandbox: SandboxConfig = SandboxConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    training: TrainingConfig = TrainingConfig()
    warmup: WarmupConfig | None = None
    verification: VerificationConfig = VerificationConfig()
    learners: LearnersConfig = LearnersConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    launch: LaunchConfig = LaunchConfig()
    dashboard: DashboardConfig = DashboardConfig(port=0)

    @property
    def evaluates(self) -> bool:
        """Whether the trainer generates by itself: to evaluate, or to see how far a warm-up has come."""
        evaluation = self.evaluation
        return bool(evaluation.prompts) or evaluation.is_online or self.warmup is not None

    @property
    def mixture(self) -> tuple[TrainedEnvironment, ...]:
        """The environments that are trained on; settings that they omit are the run's."""
        given = self.environments or [TrainedEnvironment(**self.environment.model_dump())]
        return tuple(self._completed(environment) for environment in given)

    def _completed(self, environment: TrainedEnvironment) -> TrainedEnvironment:
        training = self.training
        update = {
            "name": environment.title,
            "group_size": environment.group_size or self.rollouts.group_size,
            "sampling": environment.sampling.model_copy(
                update=self.sampling_of(environment).model_dump()
            ),
            **{
                name: getattr(environment, name) or getattr(training, name) for name in OWN_TRAINING
            },
        }
        return environment.model_copy(update=update)

    def sampling_of(self, environment: TrainedEnvironment) -> SamplingConfig:
        """The sampling of an environment; settings that it omits are the run's."""
        settings = environment.sampling.model_dump() | {
            "max_tokens": environment.sampling.max_tokens or None
        }
        given = {key: value for key, value in settings.items() if value is not None}
        return self.sampling.model_copy(update=given)

    def training_on(self) -> dict[str, TrainingConfig]:
        """Map each environment's name to the training section with its own advantage and loss."""
        return {
            environment.name: self.training.model_copy(
                update={name: getattr(environment, name) for name in OWN_TRAINING}
            )
            for environment in self.mixture
        }

    @property
    def worker_engine(self) -> EngineConfig:
        """The `engine` section as a worker of this run uses it: exact numerics need batch-invariant kernels."""
        exact = self.verification.numerics == "exact"
        return self.engine.model_copy(update={"batch_invariant": True}) if exact else self.engine

    @property
    def may_replace_auditor(self) -> bool:
        """Whether `hf` may audit where vLLM cannot: it was not named, and computes alike but for rounding."""
        alike = self.verification.numerics != "exact" and self.engine.quantization == "none"
        alike = alike and not self.engine.keep_kv_cache
        return self.verification.auditor == "auto" and alike

    @property
    def auditor(self) -> Literal["hf", "vllm"]:
        """The engine that audits, where it is installed."""
        if self.verification.auditor != "auto":
            return self.verification.auditor
        return default_auditor(self.engine, exact=self.verification.numerics == "exact")

    def _check_own_training(self) -> None:
        """Refuse an advantage or a loss of an environment that the rest of [training] forbids."""
        sampled = {environment.name: self.sampling_of(environment) for environment in self.mixture}
        for name, own in self.training_on().items():
            try:
                TrainingConfig.model_validate(own.model_dump())
            except ValidationError as error:
                message = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise ValueError(f"the environment {name!r}: {message}") from error
            sampling = sampled[name]
            if own.loss.endpoint is not None and sampling.truncates:
                raise ValueError(
                    "training.loss.endpoint: a server gives logprobs over all tokens, and the "
                    f"environment {name!r} samples from fewer by top_p or top_k: set top_p = 1 and top_k = 0, "
                    "or a reference"
                )
            if own.loss.endpoint is not None and sampling.temperature != 1.0:
                raise ValueError(
                    "training.loss.endpoint: a vLLM server gives logprobs at temperature 1, and the "
                    f"environment {name!r} samples at {sampling.temperature:g}: set sampling.temperature = 1, "
                    "or a reference"
                )
            if own.loss.needs_reference and not self._has_teacher(own.loss):
                raise ValueError(
                    f"the loss of the environment {name!r} compares with a reference that is not "
                    "training.loss's: set reference, teacher and hint there, too, as a run holds one teacher, "
                    "or give each loss that has one an endpoint of its own"
                )

    def _has_teacher(self, loss: LossConfig) -> bool:
        """Whether a run with this [training] has the teacher of an environment's loss."""
        common = self.training.loss
        holds_teacher = common.needs_reference and common.endpoint is None
        endpoints = loss.endpoint is not None and not holds_teacher
        return endpoints or loss.reference_key == common.reference_key

    @property
    def optimizer_steps(self) -> int:
        """Steps of an optimizer that the run has: several a version where there are learners."""
        return self.max_steps * (self.learners.inner_steps if self.learners.nodes else 1)

    def in_versions(self) -> "RunConfig":
        """Return this config with the bound of staleness in versions, each of which is several inner steps."""
        if not self.learners.nodes:
            return self
        versions = (self.rollouts.max_off_policy_steps + 1) // self.learners.inner_steps - 1
        update = {"max_off_policy_steps": versions}
        return self.model_copy(update={"rollouts": self.rollouts.model_copy(update=update)})

    @model_validator(mode="after")
    def _check_learners(self) -> "RunConfig":
        learners, rollouts = self.learners, self.rollouts
        if not learners.nodes:
            return self
        parts = learners.inner_steps * (1 + len(learners.nodes))
        if len(set(learners.nodes)) < len(learners.nodes):
            raise ValueError("learners.nodes names a node twice")
        if learners.quorum > 1 + len(learners.nodes):
            raise ValueError(
                "learners.quorum is above the number of learners, the trainer among them"
            )
        if rollouts.groups_per_batch < parts:
            raise ValueError(
                f"{parts} inner steps of all learners share a batch: set rollouts.groups_per_batch to at least "
                "that"
            )
        if rollouts.max_off_policy_steps < learners.inner_steps - 1:
            raise ValueError(
                "the last of the inner steps would be beyond rollouts.max_off_policy_steps: set that to at "
                f"least {learners.inner_steps - 1}, or lower learners.inner_steps"
            )
        if self.checkpoint.interval > 1:
            raise ValueError(
                "what learners contributed is resumed from checkpoints alone: set checkpoint.interval to 1"
            )
        losses = [own.loss for own in self.training_on().values()]
        if not all(loss.is_plain for loss in losses):
            raise ValueError(
                "a loss of your own, or one with a reference model, is not for runs with learners"
            )
        return self

    @model_validator(mode="after")
    def _check_lengths(self) -> "RunConfig":
        if self.resume is not None and self.resume.dir is not None:
            home, other = self.run_dir.absolute(), self.resume.dir.absolute()
            if home == other or home in other.parents:
                raise ValueError("resume.dir is of another run: go back in this one by resume.step")
        # a config that was printed has the section with its defaults, too
        if self.environments and self.environment != EnvironmentConfig():
            raise ValueError(
                "[environment] is for one environment alone: name all of them in [[environments]]"
            )
        check_names("environments", [environment.name for environment in self.mixture])
        check_judges([*self.mixture, *self.evaluation.environments])
        if any(
            "/" in environment.name or environment.name == "mean" for environment in self.mixture
        ):
            raise ValueError('the name of an environment has no "/" in it, and is not "mean"')
        if any(
            environment.sampling.max_tokens >= self.training.seq_len for environment in self.mixture
        ):
            raise ValueError("sampling.max_tokens must be below training.seq_len")
        self._check_own_training()
        if self.engine.keep_kv_cache:
            if self.engine.type != "vllm" or self.verification.auditor == "hf":
                raise ValueError(KEPT_NEEDS_VLLM)
            if self.verification.numerics == "exact":
                raise ValueError(
                    "engine.keep_kv_cache was never tried with exact numerics: remove it, or set "
                    "verification.numerics to calibrated"
                )
        if self.verification.numerics == "exact":
            if self.engine.type != "vllm" or self.verification.auditor == "hf":
                raise ValueError(EXACT_NEEDS_VLLM)
            if self.engine.quantization != "none":
                raise ValueError(
                    "FP8 products may depend on the batch: leave engine.quantization out, or set "
                    "verification.numerics to calibrated"
                )
            if self.engine.draft_head is not None:
                raise ValueError(
                    "drafts of an MTP head were not tried with exact numerics: remove "
                    "engine.vllm.speculative_config, or set verification.numerics to calibrated"
                )
        staged = self.engine.type == "vllm" and self.engine.pp > 1
        if self.training.enable_router_replay and staged:
            raise ValueError(
                f"{STAGES_WITHOUT_ROUTES}: set engine.pp to 1, or leave training.enable_router_replay out"
            )
        if self.rollouts.groups_per_lease > self.rollouts.groups_per_batch:
            raise ValueError("rollouts.groups_per_lease must not exceed rollouts.groups_per_batch")
        return self
