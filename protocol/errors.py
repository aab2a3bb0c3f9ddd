"""Errors of the protocol, and the reason codes of every refusal.

    ProtocolError
      LocalProtocolError      our own bug: we would have said something wrong
      RemoteProtocolError     their fault; carries a Reason

A Reason travels in refusals and verdicts; its meaning never changes, new ones are added.
"""

from enum import StrEnum


class Reason(StrEnum):
    """Reason of a refusal. The value travels, and metrics are named after it."""

    MALFORMED = "malformed"
    TOO_LARGE = "too_large"
    WRONG_VERSION = "wrong_version"
    WRONG_CLOCK = "wrong_clock"
    BAD_SIGNATURE = "bad_signature"
    WRONG_SIGNER = "wrong_signer"
    WRONG_RUN = "wrong_run"
    WRONG_RECIPIENT = "wrong_recipient"
    WRONG_PURPOSE = "wrong_purpose"
    EXPIRED = "expired"
    REPLAYED = "replayed"
    ROLLBACK = "rollback"
    EQUIVOCATION = "equivocation"
    WRONG_BASE = "wrong_base"
    WRONG_DIGEST = "wrong_digest"
    NOT_ADMITTED = "not_admitted"
    BANNED = "banned"
    RATE_LIMITED = "rate_limited"
    NOT_FOUND = "not_found"
    BUSY = "busy"
    NOT_YET = "not_yet"
    DISK_FULL = "disk_full"
    UNKNOWN_LEASE = "unknown_lease"
    LEASE_EXPIRED = "lease_expired"
    LEASE_DONE = "lease_done"
    WRONG_TASK = "wrong_task"
    MISSING_INDEX = "missing_index"
    DUPLICATE = "duplicate"
    STALE = "stale"
    FUTURE_POLICY = "future_policy"
    TOKEN_OUT_OF_RANGE = "token_out_of_range"
    BAD_PROMPT = "bad_prompt"
    BAD_TERMINATION = "bad_termination"
    BAD_REWARD = "bad_reward"
    BAD_LOGPROBS = "bad_logprobs"
    BAD_PROOF = "bad_proof"
    WRONG_MODEL = "wrong_model"
    WRONG_POLICY = "wrong_policy"
    WRONG_ORDER = "wrong_order"
    BAD_SAMPLING = "bad_sampling"
    BAD_ROUTES = "bad_routes"
    AUDIT_FAILED = "audit_failed"
    UNCALIBRATED = "uncalibrated"
    ENVIRONMENT_ERROR = "environment_error"
    WITHDRAWN = "withdrawn"
    RUN_ENDED = "run_ended"
    KEY_IN_USE = "key_in_use"
    KEY_RETIRED = "key_retired"
    BAD_CONTRIBUTION = "bad_contribution"
    WRONG_MERGE = "wrong_merge"


class ProtocolError(Exception):
    """A message that the protocol does not allow."""


class LocalProtocolError(ProtocolError):
    """We tried to say something that the protocol does not allow."""


class RemoteProtocolError(ProtocolError):
    """A peer said something that the protocol does not allow."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason.value}: {detail}" if detail else reason.value)
        self.reason = reason
        self.detail = detail
