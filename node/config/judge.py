"""The config of `primerl-node judge`: a frozen model whose replies come from workers, each proved."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from .engine import EngineConfig
from .run import ModelConfig, NodeConfig, ParentDir, Positive, RunName, VerificationConfig
from .serving import ApiConfig

MAX_PROMPT_TOKENS = 60_000
"""As in protocol/version.py, which is not imported for a --help."""


class JudgeEngineConfig(EngineConfig):
    """Engine of the audits: type, dtype, device, and the length of sequences."""

    max_model_len: Positive = 8192
    """Longest sequence, prompt and reply, tokens."""


class JudgeAuditConfig(VerificationConfig):
    """Checks of replies before they are given."""

    audit_rate: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of a proven worker's replies that is audited; of a new or suspect worker's all are. Below 1 some
    replies are given unchecked, also to the node that sent the judged rollout."""


class JudgeRunConfig(NodeConfig):
    """`primerl-node judge`."""

    name: RunName = "judge"
    """Directory under output_dir, for key, ledger, ticket and logs. A stopped judge resumes there."""
    output_dir: ParentDir = Path("outputs")
    """Parent of the run directories."""
    seed: int = 0
    """Seed of a model that is created here."""
    model: ModelConfig = ModelConfig()
    """The judge."""
    max_tokens: Positive = 1024
    """Most tokens of a reply."""
    engine: JudgeEngineConfig = JudgeEngineConfig()  # pyright: ignore[reportIncompatibleVariableOverride]
    verification: JudgeAuditConfig = JudgeAuditConfig()
    api: ApiConfig = ApiConfig()

    @property
    def run_dir(self) -> Path:
        """Where the judge writes."""
        return self.output_dir / self.name

    @model_validator(mode="after")
    def _knows_honest_noise(self) -> Self:
        verification = self.verification
        fixed = verification.bounds == "built-in" or verification.numerics == "exact"
        if self.engine.dtype == "float32" or fixed or verification.references:
            return self
        raise ValueError(
            "in bfloat16 a judge has to know honest noise, or a worker could turn a yes that is a little "
            "likelier than a no: set verification.references to the id of a worker of yours (`primerl-node id "
            "--data-dir D` shows it), or leave engine.dtype at float32"
        )

    @model_validator(mode="after")
    def _fits_a_lease(self) -> Self:
        longest = self.engine.max_model_len
        if longest > MAX_PROMPT_TOKENS:
            raise ValueError(
                f"engine.max_model_len is {longest}, and a lease holds a prompt of {MAX_PROMPT_TOKENS} tokens: "
                "lower it"
            )
        if self.max_tokens >= longest:
            raise ValueError(
                f"max_tokens is {self.max_tokens}, and prompt and reply together have engine.max_model_len, "
                f"{longest}: lower it"
            )
        return self
