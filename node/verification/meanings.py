"""What every reason in a verdict means, for the operator of the node that it is about.

Plain words, one entry a reason; docs/proofs.md has the long form. Nothing here decides anything.
"""

from dataclasses import dataclass

from ...protocol.errors import Reason


@dataclass(frozen=True)
class Meaning:
    """One check: what it looks at, what a failure shows and does not, where an honest operator looks."""

    check: str
    proves: str
    proves_not: str
    look_at: tuple[str, ...]


NUMERICS = (
    "engine.dtype and engine.device: the run's manifest says which dtype it is computed in",
    "the version of vLLM or torch and its attention kernels, against those of nodes that are accepted",
    "quantised weights or a quantised KV cache in --engine.vllm",
    "the hardware: an overclocked or overheated GPU, memory errors (nvidia-smi -q -d ECC)",
)
WEIGHTS = (
    "the log of this node: `policy N loaded` with the state digest that the trainer published",
    "whether an engine was kept running while its weights were replaced by anything but this program",
)
ENVIRONMENT = (
    "the versions of `verifiers` and of the taskset, against the trainer's",
    "changes made to the taskset on this machine",
)

MEANINGS: dict[Reason, Meaning] = {
    Reason.WRONG_MODEL: Meaning(
        "activation fingerprint: the proof, against the hidden states of a prefill of the same tokens",
        "the hidden states that were committed to are not those of the claimed policy on these tokens",
        "why: other weights, quantisation, an edited text and faulty hardware look alike",
        (*NUMERICS, *WEIGHTS),
    ),
    Reason.WRONG_POLICY: Meaning(
        "likelihood ratio of the proof under the claimed policy version and a neighbouring one",
        "another version than the claimed one made these rollouts",
        "intent: an engine that did not take the last update does the same",
        WEIGHTS,
    ),
    Reason.BAD_SAMPLING: Meaning(
        "seeded sampling: every token, against the one that the lease's seed draws from the same logits",
        "tokens were not drawn with the seed and temperature of the lease",
        "that the model was another: where a model is sure, every seed draws the same token",
        (
            "sampling options in --engine.vllm that are not the run's: top-k, top-p, penalties",
            "a proxy or a plugin that changes what the engine draws",
            *NUMERICS,
        ),
    ),
    Reason.BAD_LOGPROBS: Meaning(
        "log-probabilities: those claimed, against those of a prefill under the claimed policy",
        "the claimed log-probabilities are not those of the distribution that the run samples from",
        "that the tokens are wrong; honest engines of another dtype differ too, by less than the bound",
        ("logprobs of raw logits where the run asks for processed ones", *NUMERICS),
    ),
    Reason.BAD_PROOF: Meaning(
        "form of the proof: its size, its numbers, its claimed versions",
        "the bytes are no proof that this software makes: zero, constant, cut short or out of range",
        "who changed them: this node signed the bundle",
        (
            "the version of primerl-node on this machine",
            "changes made to the program or to its spool",
        ),
    ),
    Reason.AUDIT_FAILED: Meaning(
        "the audit itself",
        "nothing: the trainer could not measure this rollout and does not learn from it unmeasured",
        "anything about this node; it counts for nobody and against nobody",
        ("nothing here; the trainer's operator finds the cause in its log",),
    ),
    Reason.BAD_REWARD: Meaning(
        "reward: the trainer scores the same text again",
        "the claimed reward is not what the environment gives for this text",
        "intent: another version of the environment scores differently",
        ENVIRONMENT,
    ),
    Reason.BAD_PROMPT: Meaning(
        "prompt and environment turns, played again",
        "the text does not answer the leased task, or the environment's words in it are not its own",
        "intent: another version of the environment, of its chat template or tokenizer does the same",
        ENVIRONMENT,
    ),
    Reason.BAD_TERMINATION: Meaning(
        "ending: every reply ends by a stop token or by its full length",
        "a reply was cut short or goes on after its end",
        "who cut it: an engine with a smaller limit does the same",
        ("engine.max_model_len, and the limits in --engine.vllm, against the run's",),
    ),
    Reason.MISSING_INDEX: Meaning(
        "exact group: every index of every task of the lease",
        "a rollout of the lease is missing; it counts as failed, so that leaving some out gains nothing",
        "why it is missing",
        ("the log of this node around that lease",),
    ),
    Reason.DUPLICATE: Meaning(
        "copies: the same text as in a submission that was received earlier",
        "somebody sent this text before; whoever was received first is not blamed",
        "that it was copied: very short replies may coincide",
        ("whether two nodes run with copies of one data directory",),
    ),
    Reason.STALE: Meaning(
        "staleness: the oldest policy version that drew any of its tokens",
        "the rollout came too late to be learned from",
        "anything about honesty; it does not lower trust",
        (
            "the speed of this node against rollouts.lease_timeout_s; fewer leases at a time (--leases 1)",
            "how fast policy versions arrive here: `primerl-node status`",
        ),
    ),
    Reason.FUTURE_POLICY: Meaning(
        "claimed policy version, against the newest published one",
        "the claim is of a version that did not exist",
        "anything else",
        WEIGHTS,
    ),
    Reason.WRONG_ORDER: Meaning(
        "the order of a group's samples: each time the policy changed, no sample may have drawn more than one "
        "that began before it and still went on",
        "the samples of the group were not drawn in order by one engine, so their policy versions could be "
        "chosen one by one",
        "that they were: this program gives such samples up itself, so something else changed or made them",
        (
            "a proxy or a plugin between this program and its engine that keeps or reorders requests",
        ),
    ),
    Reason.TOKEN_OUT_OF_RANGE: Meaning(
        "token ids, against the vocabulary",
        "a token id that the model does not have",
        "anything about the weights",
        ("whether the engine pads the vocabulary and draws from the padding",),
    ),
    Reason.ENVIRONMENT_ERROR: Meaning(
        "the environment's own report",
        "the environment failed, here or when it was played again at the trainer",
        "anything about honesty; it does not lower trust",
        ENVIRONMENT,
    ),
    Reason.MALFORMED: Meaning(
        "form of the bundle",
        "arrays, masks or version spans do not fit each other",
        "who changed them: this node signed the bundle",
        ("the version of primerl-node on this machine",),
    ),
    Reason.WRONG_TASK: Meaning(
        "tasks, against those of the lease",
        "the bundle is of other tasks than the lease names",
        "intent: another version of the environment makes other tasks",
        ENVIRONMENT,
    ),
    Reason.TOO_LARGE: Meaning(
        "sizes, against the lease and the run's limits",
        "more tokens, turns or rollouts than were asked for",
        "anything about the weights",
        ("engine.max_model_len and the environment's max_turns, against the run's",),
    ),
}

UNKNOWN = Meaning(
    "the trainer's rules",
    "what the reason and its detail say",
    "anything else",
    ("the log of this node, and docs/proofs.md",),
)


def meaning(reason: Reason) -> Meaning:
    """What a reason means."""
    return MEANINGS.get(reason, UNKNOWN)
