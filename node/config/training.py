"""Configuration of a learner: optimizer, memory, parallelism, loss. Same rules as run.py.

Every option has a default that is right for one GPU and for a CPU; names are prime-rl's where it has one.
"""

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from .base import BaseConfig
from .chat_api import ChatApiConfig
from .paths import expand_home

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


class LossConfig(BaseConfig):
    """The loss of a step, by name; formulas and sources: training/losses.py."""

    type: Literal[
        "dppo_kl", "ipo", "grpo_two_sided", "gspo", "reinforce", "reverse_kl", "ce", "custom"
    ] = "dppo_kl"
    """`dppo_kl`: DPPO with a pull to the sampler; `ipo`: the same, with one bound both ways; `grpo_two_sided`:
    clipped on both sides; `gspo`: clipped by sequence; `reinforce`: policy gradient with bounded importance
    weights; `reverse_kl`: to a reference; `ce`: cross entropy; `custom`: a function of your own."""
    adv_tau: Annotated[float, Field(ge=0)] = 1.0
    """dppo_kl, ipo, reinforce: factor of the advantage."""
    kl_tau: Annotated[float, Field(ge=0)] = 1e-3
    """dppo_kl, ipo, reinforce, reverse_kl: factor of the squared log ratio, the pull towards the sampler."""
    dppo_mask_low: Annotated[float, Field(gt=0)] = 0.2
    """dppo_kl: how far a token's probability may fall before it is left out."""
    dppo_mask_high: Annotated[float, Field(gt=0)] = 0.2
    """dppo_kl: how far a token's probability may rise before it is left out."""
    ipo_threshold: Annotated[float, Field(gt=0)] = 0.1
    """ipo: how far a token's probability may move either way before it is left out."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] | None = None
    """grpo_two_sided, gspo: the ratio (with gspo the sequence's) is clipped below at 1 - clip_low. Default:
    0.2; for gspo 3e-3. The paper's 3e-4 and 4e-4 are for old logprobs that the trainer computed; here they are
    the sampler's, whose kernels alone move the ratio by mismatch_kl."""
    clip_high: Annotated[float, Field(gt=0)] | None = None
    """The same: it is clipped above at 1 + clip_high. Default: 0.2; for gspo 4e-3."""
    clip_ratio_max: Annotated[float, Field(gt=1)] = 4.0
    """grpo_two_sided, gspo: cap of the ratio where the advantage is negative (delta of INTELLECT-2)."""
    importance: Literal["none", "token", "sequence"] = "token"
    """reinforce: the ratio used as weight: the token's, or the sequence's (the product of its tokens'
    ratios)."""
    importance_min: Annotated[float, Field(ge=0)] = 0.0
    """reinforce: smaller weights are raised to this."""
    importance_max: Annotated[float, Field(gt=0)] = 2.0
    """reinforce: larger weights are cut to this."""
    rejection: Literal["none", "token", "sequence", "geometric", "second_moment"] = "none"
    """Any sampled loss: leave out tokens for which the ratio, the sequence's product, or the geometric mean
    of its ratios is outside the two bounds below; `second_moment`: the farthest of a batch (M2PO), which is
    read once more for that."""
    rejection_low: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Least ratio that is kept; `geometric` needs it close to 1, such as 0.99."""
    rejection_high: Annotated[float, Field(gt=1)] = 2.0
    """Largest ratio that is kept; `geometric` needs it close to 1, such as 1.01."""
    ref_kl_tau: Annotated[float, Field(ge=0)] = 0.0
    """Added to any loss but reverse_kl: factor of the reverse KL to the reference policy; with 0 none is
    needed."""
    reference: Annotated[Path, AfterValidator(expand_home)] | None = None
    """reverse_kl and its term: directory of the frozen model that it compares with, a teacher of the same
    tokens; default: the model that the run began with."""
    endpoint: ChatApiConfig | None = None
    """reverse_kl and its term: a teacher of the same tokens behind a server of vLLM, in place of
    `reference`."""
    teacher: Literal["reference", "policy"] = "reference"
    """reverse_kl and its term: the model that they compare with, `reference` or the policy itself as it is now,
    which reads `hint` before the conversation."""
    hint: Annotated[str, Field(max_length=4096)] = ""
    """reverse_kl and its term: a system message that the teacher alone reads before each conversation, with
    "{demonstration}" where the task's right reply belongs (OPSD)."""
    echo_alpha: Annotated[float, Field(ge=0)] = 0.0
    """Beside any loss: factor of the cross entropy of the environment's tokens after the first reply (ECHO), as
    tool output and further turns of the user. 0: these are only read; prime-rl's `alpha` is 0.1."""
    custom: str = ""
    """custom: "package.module:function" of an installed package (training/losses.py)."""
    custom_args: dict[str, Any] = Field(default_factory=dict[str, Any])
    """custom: keyword arguments of the function."""

    @property
    def clips(self) -> tuple[float, float]:
        """How far the ratio of grpo_two_sided and gspo may fall and rise before it is clipped."""
        low, high = (3e-3, 4e-3) if self.type == "gspo" else (0.2, 0.2)
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )

    @property
    def needs_reference(self) -> bool:
        """Whether tokens need the logprobs of a reference policy."""
        return self.type == "reverse_kl" or self.ref_kl_tau > 0

    @property
    def reference_key(self) -> tuple[object, ...] | None:
        """Key that is equal for losses with the same reference policy; None without a reference."""
        if not self.needs_reference:
            return None
        return self.reference, self.endpoint, self.teacher, self.hint

    @property
    def loads_reference(self) -> bool:
        """Whether a frozen model is kept for that."""
        return self.needs_reference and self.teacher == "reference" and self.endpoint is None

    @property
    def is_plain(self) -> bool:
        """Whether any node computes it from this section alone: no code of its own, and no other model."""
        return self.type != "custom" and not self.loads_reference

    @property
    def needs_sequences(self) -> bool:
        """Whether it may add up over all tokens of a sequence."""
        weighs = self.type == "reinforce" and self.importance == "sequence"
        rejects = self.rejection in ("sequence", "geometric")
        return self.type in ("gspo", "custom") or weighs or rejects or bool(self.hint)

    @property
    def reads_advantages(self) -> bool:
        """Whether a sample with advantage 0 only gives the pull."""
        return self.type not in ("reverse_kl", "ce")

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.type == "custom" and not IMPORT_PATH.fullmatch(self.custom):
            raise ValueError('type "custom" needs custom = "package.module:function"')
        if self.type != "custom" and (self.custom or self.custom_args):
            raise ValueError(
                'custom and custom_args need type = "custom": set it, or leave them out'
            )
        if self.importance_min > self.importance_max:
            raise ValueError("importance_min is above importance_max: lower it")
        if self.reference is not None and not self.needs_reference:
            raise ValueError(
                'reference needs type = "reverse_kl" or ref_kl_tau: set one of these, or leave it out'
            )
        if self.endpoint is not None and not self.needs_reference:
            raise ValueError(
                'endpoint needs type = "reverse_kl" or ref_kl_tau: set one of these, or leave it out'
            )
        if self.endpoint is not None and (self.reference or self.hint or self.teacher == "policy"):
            raise ValueError(
                "a run has one teacher: leave out endpoint, or reference, teacher and hint"
            )
        if (self.teacher == "policy" or self.hint) and not self.needs_reference:
            raise ValueError(
                'teacher and hint need type = "reverse_kl" or ref_kl_tau: set one of these, or leave them out'
            )
        if self.teacher == "policy" and (self.reference is not None or not self.hint):
            raise ValueError('teacher "policy" needs a hint, and no reference: set hint alone')
        if self.hint and "{demonstration}" not in self.hint:
            raise ValueError(
                'hint has no "{demonstration}" in it: say where the right reply belongs'
            )
        if self.type == "ce" and self.rejection != "none":
            raise ValueError('type "ce" reads no ratio: leave rejection out')
        if self.type == "reverse_kl" and self.ref_kl_tau:
            raise ValueError('type "reverse_kl" is the reference term itself: leave ref_kl_tau out')
        if self.clip_ratio_max <= 1 + self.clips[1]:
            raise ValueError("clip_ratio_max must be above 1 + clip_high")
        return self


class LengthPenaltyConfig(BaseConfig):
    """advantage = "grpo_length": what rollouts of solved tasks lose for their size; prime-rl's defaults.

    Each is the share of the group's mean reward that its largest rollout loses (training/advantages.py).
    """

    num_output_tokens_weight: Fraction = 0.25
    """Tokens that the model drew."""
    num_input_tokens_weight: Fraction = 0.1
    """Tokens that the model read and did not draw: prompts, tool output."""
    num_turns_weight: Fraction = 0.1
    """Replies of the model."""


class OverlongConfig(BaseConfig):
    """Penalty of rollouts close to the longest reply, as in DAPO (training/advantages.py)."""

    max_tokens: Positive
    """Tokens that a rollout may draw: sampling.max_tokens, times its turns."""
    buffer_tokens: Positive
    """The penalty begins this many tokens before that."""
    penalty: Annotated[float, Field(gt=0)] = 1.0
    """Penalty of a rollout of max_tokens."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError("buffer_tokens is above max_tokens: lower it")
        return self


class DifficultyPoolConfig(BaseConfig):
    """Tasks of similar difficulty, by the mean reward of their newest group."""

    threshold: float
    """Largest mean reward of its tasks; the pool with the largest threshold takes all above it, too."""
    weight: Annotated[float, Field(ge=0, le=1e6)]
    """Weight of one of its tasks in the draw, relative to others; a task that was never played has 1."""


def _pools() -> dict[str, DifficultyPoolConfig]:
    return {
        "hard": DifficultyPoolConfig(threshold=0.25, weight=0.2),
        "normal": DifficultyPoolConfig(threshold=0.75, weight=1.0),
        "easy": DifficultyPoolConfig(threshold=1.0, weight=0.2),
    }


Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=64)]
"""A name in metrics."""


class SamplerConfig(BaseConfig):
    """The choice of the next task; names and pools are prime-rl's."""

    num_tasks: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """0: one task after the other. Else the next is drawn from the first num_tasks of the taskset, which may be
    endless, with weights by the rewards that a task earned last (difficulty pools)."""
    pools: dict[Label, DifficultyPoolConfig] = Field(default_factory=_pools)
    """Difficulty pools by name. Those given replace the three defaults: `hard`, `normal` and `easy`."""

    @model_validator(mode="after")
    def _has_tasks(self) -> Self:
        if self.pools != _pools() and not self.num_tasks:
            raise ValueError("pools choose among num_tasks: set it, or leave them out")
        thresholds = [pool.threshold for pool in self.pools.values()]
        if len(set(thresholds)) != len(thresholds) or not all(map(math.isfinite, thresholds)):
            raise ValueError("pools must have different thresholds, and finite ones")
        if not any(pool.weight for pool in self.pools.values()):
            raise ValueError("pools need a weight above 0: give one of them one")
        return self


class GateConfig(BaseConfig):
    """Groups that are not trained but replaced."""

    type: Literal["advantage_range"] = "advantage_range"
    """`advantage_range`: refuses groups with all advantages within the two bounds, which are 0 for groups of
    equal rewards. Advantages are compared before reinforce_plus_plus scales them."""
    reject_min: float = 0.0
    """Lower bound, included."""
    reject_max: float = 0.0
    """Upper bound, included."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if not -math.inf < self.reject_min <= self.reject_max < math.inf:
            raise ValueError("reject_min must not be above reject_max, and both must be finite")
        return self


class CurriculumConfig(BaseConfig):
    """The choice of tasks, and of the groups that are worth a place in a batch (training/curriculum.py)."""

    sampler: SamplerConfig = SamplerConfig()
    gates: dict[Label, GateConfig] = {}
    """Gates by name; a group is trained if all of them admit it. A refused group costs its generation: its
    place is leased again."""


Role = Literal["assistant", "user", "system", "tool"]
DatasetId = Annotated[str, Field(pattern=r"^([\w.-]+/)?[\w.-]*$", max_length=200)]


class RowsConfig(BaseConfig):
    """Rows of demonstrations, and which parts of them are learned."""

    files: list[str] = Field(default_factory=list[str])
    """.jsonl, .json, either with .gz, and .parquet files, or directories of them."""
    hub: DatasetId = ""
    """A data set of the Hugging Face hub, as the `datasets` library reads it; its code is never run."""
    subset: str = ""
    """Configuration of `hub`, where the data set has several."""
    revision: str = "main"
    """Branch, tag or commit of `hub`."""
    split: str = "train"
    """Split of `hub`, by the data set's name."""
    strings: Literal["chat", "raw"] = "chat"
    """Form of prompt and completion if they are text: a user's message and the reply to it, or tokens as they
    stand, without the chat template."""
    renderer: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$", max_length=40)] = "template"
    """`template`: the model's own chat template, the tokens that `train` makes of a conversation; a name of the
    `renderers` package (`qwen3`); `auto`: its renderer for model.name, else the template."""
    loss_roles: Annotated[tuple[Role, ...], Field(min_length=1)] = ("assistant",)
    """Roles whose messages are trained: the assistant's with everything that it would generate, the stop
    token included; others with their text alone."""
    too_long: Literal["drop", "truncate"] = "drop"
    """Treatment of a row of more than training.seq_len tokens."""
    shuffle: bool = True
    """Shuffle anew every epoch, by `seed`."""


class MixedSftConfig(RowsConfig):
    """Demonstrations that every step learns from beside its rollouts (training/losses.py: sft)."""

    weight: Annotated[float, Field(gt=0)] = 0.1
    """Factor of the mean cross entropy of their tokens. Rollouts keep the weight 1."""
    share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Their share of the tokens that a step reads, prompts included; at least one row a step."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if bool(self.files) == bool(self.hub):
            raise ValueError("give one of training.sft.files and training.sft.hub")
        return self


class LoraConfig(BaseConfig):
    """Low-rank adapters (Hu et al. 2021): only these are trained and sent."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rank of B A, the update of a layer's weights."""
    alpha: Annotated[float, Field(gt=0, le=2**16)] = 32.0
    """The update is alpha / rank x B A."""
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Last part of the names of the linear layers that get adapters."""
    export_merged: bool = False
    """Write the merged model, too, into `merged` beside the exported adapters."""


START_S = 600.0


class FsdpConfig(BaseConfig):
    """`training.backend = "fsdp"`: the ranks that share a model."""

    ranks: Annotated[int, Field(ge=0)] = 0
    """Processes on this machine; 0 is one for each GPU, or two where there is none."""
    nodes: Positive = 1
    """Machines; the others run the command that the daemon prints."""
    rendezvous: str = ""
    """host:port of this machine that the ranks of other machines reach; needed with more than one. Any
    program that reaches it could join: keep it inside a network of your own."""
    replicas: Positive = 1
    """HSDP: copies of the model, each sharded over ranks x nodes / replicas."""
    reshard_after_forward: bool = True
    """Gather a layer's weights again in backward; false keeps them whole in between: faster, and 2 bytes a
    parameter more."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Deadline of a collective: a rank that is silent for this long counts as dead. A step may take twice this,
    and 10 ms for each token; what reads or writes the whole model three times. All ranks have this long, and at
    least 600 s, to connect, and again to load the model."""

    @property
    def start_s(self) -> float:
        """Time for all ranks to meet, and again for the model to be loaded."""
        return max(START_S, self.timeout_s)


Advantage = Literal[
    "grpo",
    "grpo_std",
    "grpo_length",
    "max_rl",
    "rloo",
    "reinforce_plus_plus",
    "rae",
    "hierarchical_grpo",
]


class ComputeConfig(BaseConfig):
    """Where and how a learner computes, which changes nothing of what it learns."""

    backend: Literal["auto", "local", "fsdp"] = "auto"
    """`auto`: on a GPU one rank in a process of its own, else `local`; `local`: in a thread of the daemon, on a
    CPU or one GPU; `fsdp`: torchrun ranks that share the model, or, with fsdp.ranks 1, one alone."""
    fsdp: FsdpConfig = FsdpConfig()
    threads: Annotated[int, Field(ge=0)] = 0
    """torch threads; 0: torch's default. 1 is best for small models."""
    device: str = "auto"
    """`auto`: cuda if available, else cpu."""
    compile: bool | None = None
    """torch.compile of each layer; default: on a GPU."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """`selective` keeps attention's output and recomputes the rest of a layer; `full` recomputes all of it."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Largest share of each GPU's memory that the learner takes; it frees its reuse cache before that."""
    optimizer_offload: bool = False
    """Keep the optimizer's moments in the host's memory between steps."""
    head_chunk: Positive = 8192
    """Tokens with logits in memory at a time."""
    context_parallel: Positive = 1
    """Ranks that share one sequence; key-value heads are divided among them."""
    expert_parallel: Positive = 1
    """Ranks that divide the experts of a mixture among them, all or 1; tokens are sent instead of weights."""


class TrainingConfig(ComputeConfig):
    """Settings of training."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for the matrices between embeddings and head, AdamW for the rest; steps are of the same size
    at the same lr. One rank only."""
    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Learning rate, before the scheduler."""
    muon_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Muon's decay of its momentum."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay of its first and second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decay of the weights, times lr."""
    max_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this norm."""
    scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate, after its warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises from 0."""
    min_lr_ratio: Fraction = 0.1
    """`linear` and `cosine` decay to lr x this at max_steps."""
    seq_len: Positive = 2048
    """Longest sample, tokens. A row of training holds as many, and on a GPU more where its memory allows it."""
    advantage: Advantage = "grpo"
    """`grpo`: reward minus group mean; `grpo_std`: divided by the group's standard deviation too;
    `max_rl`: by its mean; `grpo_length`: grpo on rewards that length_penalty was taken from; `rloo`: reward
    minus the mean of the others; `reinforce_plus_plus`: grpo divided by the batch's standard deviation;
    `rae`: reward minus a moving average of the agent's rewards; `hierarchical_grpo`: grpo, for the agents that
    `episode_agents` names within each episode. With several agents, each is compared only with itself."""
    rae_decay: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """rae: share of an agent's baseline that remains when its next reward comes in."""
    episode_agents: tuple[str, ...] = ()
    """hierarchical_grpo: agents that play an episode several times, as the solvers of one proposed problem."""
    overlong: OverlongConfig | None = None
    """Take from the rewards of rollouts that come close to the longest reply."""
    length_penalty: LengthPenaltyConfig = LengthPenaltyConfig()
    filter_zero_advantages: bool = True
    """Leave out groups whose advantages are all 0; else they are trained, and only the pull and the reference
    term act on them. A loss that reads no advantage trains on all groups."""
    curriculum: CurriculumConfig = CurriculumConfig()
    loss: LossConfig = LossConfig()
    sft: MixedSftConfig | None = None
    """Learn from demonstrations beside the rollouts."""
    freeze_router: bool = False
    """Leave the router of a mixture of experts as it was."""
    enable_router_replay: bool = False
    """Mixtures of experts: workers send the experts that led to each token that they drew, and in training
    the same ones read it (R3, arXiv 2510.11370). Fixed for the run; a token costs layers x experts per token
    bytes."""
    lora: LoraConfig | None = None
    """Train adapters of this shape in place of all weights."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of forward and backward; masters and optimizer are always fp32. `auto` is bfloat16 on a GPU."""
    deterministic: bool = False
    """Use only kernels that give the same bits every time; slower on a GPU."""

    @model_validator(mode="after")
    def _keeps_matrices_whole(self) -> Self:
        if self.optimizer == "muon" and self.fsdp.ranks * self.fsdp.nodes > 1:
            raise ValueError(
                'optimizer "muon" needs whole matrices: set fsdp.ranks to 1, or optimizer to "adamw"'
            )
        return self

    @model_validator(mode="after")
    def _can_compare(self) -> Self:
        if self.advantage == "hierarchical_grpo" and not self.episode_agents:
            raise ValueError(
                'advantage "hierarchical_grpo" needs episode_agents, as ["solver"]: name them, or take "grpo"'
            )
        if self.advantage == "rae" and self.curriculum.gates:
            raise ValueError(
                'advantage "rae" compares no groups: leave curriculum.gates out, or take another'
            )
        return self

    @model_validator(mode="after")
    def _keeps_sequences_whole(self) -> Self:
        if self.loss.needs_sequences and self.context_parallel > 1:
            raise ValueError(
                f"loss.type {self.loss.type!r} with rejection {self.loss.rejection!r} needs whole sequences: "
                "set context_parallel to 1, or another loss"
            )
        return self
