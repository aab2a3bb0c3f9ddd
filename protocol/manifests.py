"""Signed documents: the run, its policy versions, and its peers.

Small sealed heads name large content-addressed documents; a document is believed because a head names it.
"""

from typing import Annotated, Literal

import msgspec

from ..crypto.hashing import DIGEST_BYTES, Digest, digest
from ..crypto.keys import NodeId
from .errors import LocalProtocolError
from .version import MAX_ADDRESSES, MAX_CHUNK, MAX_MANIFEST, MAX_NAME

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Version = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Role = Literal["inference", "trainer", "validator", "server", "standby", "learner"]
UnixSeconds = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Bound = Annotated[float, msgspec.Meta(gt=0, le=1e30)]
"""Bound of a measure. Both ends are named, as everywhere here: NaN fails any of them, infinity only one."""
MAX_NODE_NAME = 32
"""Characters of the name that a node gives itself."""
MAX_ENVIRONMENTS = 64
"""Most environments of one run."""
GroupSize = Annotated[int, msgspec.Meta(ge=1, le=4096)]
MAX_RANK = 1024
"""Highest rank of adapters; higher ones save nothing."""
MAX_LEARNERS = 15
"""Most learners of a run beside its trainer."""
MAX_CONTRIBUTION = 32 * 1024
"""Bytes of a sealed Contribution, nearly all of them names of chunks."""
MAX_CONTRIBUTIONS = MAX_LEARNERS + 1
Addresses = Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_ADDRESSES)]


class ChunkRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A chunk by the hash of its bytes."""

    digest: Digest
    size: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNK)]


class FileRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One small file of the model contract (config, tokenizer, chat template)."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]
    """A plain file name: no separator, no leading dot, no newline at its end (which `$` would allow)."""
    chunk: ChunkRef


class ModelContract(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model of a run, by digest: a worker needs nothing but the ticket."""

    name: Name
    files: Annotated[tuple[FileRef, ...], msgspec.Meta(max_length=64)]
    base_state: Digest
    """State digest of the bf16 weights that the run started from."""
    vocab_size: Annotated[int, msgspec.Meta(ge=1, le=2**24)]
    stop_token_ids: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, le=2**24)], ...], msgspec.Meta(max_length=64)
    ]


class AdapterContract(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The adapters of a run that trains them: its policies hold these alone, and a base never changes.

    A layer W of the base then computes as W + alpha / rank x B A, rounded as node/weights/adapters.py does.
    """

    rank: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANK)]
    alpha: Annotated[float, msgspec.Meta(gt=0, le=2**16)]
    target_modules: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=64)]
    """Last parts of the names of the layers that have adapters."""
    base: ChunkRef
    """An encoded PolicyManifest of no run, with one snapshot: the base's tensors, and where they are. Its state
    is the model contract's base_state."""


class SamplingContract(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How every token is drawn: from softmax(logits / temperature), limited to its likeliest tokens.

    Logprobs are over the tokens that the limits leave, where a rollout states them (BranchRecord.support), else
    over all. Defaults, which limit nothing, are left out.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)]
    """0 takes the likeliest token; its logprob is that at temperature 1."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**24)]
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """Only the likeliest tokens that hold this probability together are drawn, of those that top_k leaves."""
    top_k: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = 0
    """Only this many likeliest tokens are drawn; 0: all."""
    stop: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=64)], ...],
        msgspec.Meta(max_length=8),
    ] = ()
    """Strings that end a reply, with the first token that completes one."""

    @property
    def truncates(self) -> bool:
        """Return whether tokens are drawn at random from fewer than all: rollouts then state their supports."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


class EnvironmentContract(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """An environment, so that every node makes the same tasks and plays them alike."""

    name: Name
    """Name in the run, where it is unique."""
    id: Name
    config: Annotated[bytes, msgspec.Meta(max_length=64 * 1024)]
    """EnvironmentConfig as JSON."""
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
    version: Name
    """Version of the library that runs it, shown when task digests disagree."""
    group_size: GroupSize
    """Rollouts per task."""
    max_turns: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    sampling: SamplingContract
    package: Name = ""
    """Distribution and version that the environment comes from; empty for one that is bundled."""
    package_digest: Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)] = b""
    """Digest of that package's files: a worker plays no other. Empty for an environment that is bundled."""
    rewards: Literal["recomputed", "sampled", "claimed"] = "recomputed"
    """Whether equal rollouts always earn equal rewards. If they are `sampled` (judges, randomness), the
    trainer's own score counts, and a different claim proves nothing. If they are `claimed`, the environment's
    tools are not deterministic and a rollout cannot be played again: a worker's tool results and rewards are
    believed, and only its replies are proved."""


class Thresholds(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Bounds of the measures of an audited rollout (protocol/rollouts.py: Evidence). Above is guilty.

    Defaults, which bound nothing, are left out.
    """

    fingerprint: Bound
    sampling: Bound
    sampling_max: Bound
    logprob: Bound
    logprob_max: Bound
    other_policy: Bound
    routing: Bound = 1.0
    routing_max: Bound = 1e9


KV_BLOCK = 32
"""Tokens of a block of keys and values that is kept when the weights change."""


class ProofContract(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The proofs that a worker gives, and the honest noise that is allowed for. Defaults are left out."""

    fingerprint: Literal["projection"]
    dtype: Literal["float32", "bfloat16"]
    """Numerics class: every engine of the run computes in it."""
    reject: Thresholds
    """A rollout above one of these is not learned from, and counts as fraud."""
    suspect: Thresholds
    """One in a hundred honest rollouts is above one of these; only many of them tell against a worker."""
    other_scale: Annotated[float, msgspec.Meta(ge=0, le=1)]
    """Factor on other_policy in the sequential test: 1 where it is a log-likelihood ratio, less where rounding
    is common to auditor and workers, 0 where it says nothing."""
    audit_rate: Annotated[float, msgspec.Meta(ge=0, le=1)]
    """Share of the rollouts of a proven worker that is audited; of a new or suspect one all are."""
    false_bans: Annotated[float, msgspec.Meta(gt=0, lt=1)]
    """Probability, over the whole run and all workers, that the sequential test bans an honest one."""
    honest_rollouts: Count
    """Sample size behind the thresholds."""
    honest_tokens: Count
    source: Name
    """Origin of the thresholds."""
    numerics: Literal["calibrated", "exact"] = "calibrated"
    """`exact`: workers and auditors run the same kernels, batch-invariant ones, so honest noise is that of the
    measures themselves; see docs/proofs.md."""
    engine_class: Name = ""
    """Class of the engines under exact numerics: release, device and settings that all of them have."""
    quantization: Literal["none", "fp8"] = "none"
    """Rounding of the proved bf16 weights in every engine of the run, auditors' included; `fp8` is that of
    node/inference/quantization.py."""
    kv_cache: Literal["recomputed", "kept"] = "recomputed"
    """Keys and values of a sequence's earlier tokens when the weights change while it is drawn. `recomputed`:
    all are computed anew. `kept`: whole blocks of KV_BLOCK tokens stay as they were computed, and the tokens
    after them are computed anew."""
    bounds: Literal["fixed", "measured"] = "fixed"
    """`fixed`: the thresholds above apply to every node. `measured`: they are provisional, and the run measures
    those of each class of workers (protocol/numerics.py) by workers that its operator named."""

    @property
    def vllm_alone(self) -> bool:
        """Whether no other engine than vLLM computes as the workers do, rounding apart."""
        return self.numerics == "exact" or self.kv_cache == "kept"


class RouteShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Routes of a mixture of experts: which of its experts read a token, layer by layer."""

    layers: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    """Layers that have experts."""
    experts: Annotated[int, msgspec.Meta(ge=1, le=2**15)]
    """Experts of each of these layers."""
    top_k: Annotated[int, msgspec.Meta(ge=1, le=64)]
    """Experts that read a token in each layer."""

    @property
    def dtype(self) -> str:
        """Type of an expert's number on the wire, by numpy's name."""
        return "<u1" if self.experts <= 2**8 else "<u2"

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's route."""
        return self.layers * self.top_k * (1 if self.experts <= 2**8 else 2)


class RunLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds that every node knows beforehand."""

    max_off_policy_steps: Count
    max_model_len: Annotated[int, msgspec.Meta(ge=2, le=2**24)]


class LearnersContract(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The nodes that train a run together with its trainer, and how what they learned becomes a version."""

    nodes: Annotated[tuple[NodeId, ...], msgspec.Meta(min_length=1, max_length=MAX_LEARNERS)]
    inner_steps: Annotated[int, msgspec.Meta(ge=1, le=64)]
    """Optimizer steps of each learner from one version to the next."""
    outer_lr: Annotated[float, msgspec.Meta(gt=0, le=10)]
    outer_momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)]
    """Nesterov's, of the outer step: m <- momentum m + g, masters <- masters - lr (g + momentum m)."""


class RunManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The definition of a run. Its digest is the run id, so nothing in it can change.

    Defaults are left out: a run that uses nothing new has the bytes that it always had.
    """

    name: Name
    created: UnixSeconds
    software: Name
    trainer: NodeId
    """The first leader: heads, leases, receipts and verdicts count if it, or a leader certified by the root,
    signed them (protocol/leaders.py)."""
    model: ModelContract
    environments: Annotated[
        tuple[EnvironmentContract, ...], msgspec.Meta(min_length=1, max_length=MAX_ENVIRONMENTS)
    ]
    """Those that the run trains on; leases name them by their place here."""
    limits: RunLimits
    proofs: ProofContract
    max_steps: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    """Of the run as it began: a trainer that is resumed with more says itself when the run ends."""
    nonce: Digest
    """Random: two runs of one config are two runs."""
    adapters: AdapterContract | None = None
    """None: all weights are trained, and travel."""
    routes: RouteShape | None = None
    """Shape of the routes, if the trainer replays those of its workers (mixtures of experts); None: they send
    none."""
    root: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    """The key that certifies leaders, kept off the network; empty: the trainer's own does."""
    learners: LearnersContract | None = None
    """None: the trainer alone trains."""


def encode(document: msgspec.Struct) -> bytes:
    """Encode a document; its digest is taken over exactly these bytes."""
    return msgspec.msgpack.encode(document)


def run_id(manifest: bytes) -> bytes:
    """Compute the run id of an encoded RunManifest."""
    return digest(manifest)


class TensorInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Name, safetensors dtype, shape and digest of one tensor."""

    name: Name
    dtype: Annotated[str, msgspec.Meta(max_length=8)]
    shape: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, le=2**40)], ...], msgspec.Meta(max_length=8)
    ]
    digest: Digest


class Artifact(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One way to reach a version: a full snapshot, or a delta on a named base."""

    kind: Literal["anchor", "delta"]
    base_version: Annotated[int, msgspec.Meta(ge=-1, le=2**53)]
    """-1 for a snapshot."""
    base_state: Digest
    """State digest that the delta must be applied to; zeros for a snapshot."""
    codec: Name
    size: Annotated[int, msgspec.Meta(ge=0, le=2**48)]
    chunks: Annotated[tuple[ChunkRef, ...], msgspec.Meta(max_length=2**20)]
    offsets: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, le=2**48)], ...], msgspec.Meta(max_length=2**18)
    ] = ()
    """Bytes of the payload before the first block of each tensor, by name: a node that needs some tensors
    fetches only the chunks that hold them. Empty: not stated."""
    version: Annotated[int, msgspec.Meta(ge=-1, le=2**53)] = -1
    """Earlier version that a snapshot makes, which was encoded while later ones were published; -1: the
    manifest's own version."""

    def reaches(self, version: int) -> int:
        """Return the version that it makes, as part of the manifest of `version`."""
        return version if self.version < 0 else self.version


class WeighedContribution(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A contribution, as its learner sealed it, and its weight in an outer step."""

    sealed: Annotated[bytes, msgspec.Meta(max_length=MAX_CONTRIBUTION)]
    weight: Annotated[float, msgspec.Meta(ge=0, le=1)]
    """Its share of the tokens of the outer step; less where it was clipped."""


class OuterStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the fp32 state of a version was made: anybody who has the state before can compute it again.

    The outer state is the masters and their momentum; node/training/outer.py makes the step.
    """

    term: Version
    version: Version
    before: Digest
    """Digest of the outer state before; that of `after` where nothing was merged, as at the start."""
    after: Digest
    contributions: Annotated[
        tuple[WeighedContribution, ...], msgspec.Meta(max_length=MAX_CONTRIBUTIONS)
    ] = ()
    """In the order of their sum."""


class PolicyManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything about one policy version; named by the digest in its head."""

    run: Digest
    version: Version
    state: Digest
    tensors: Annotated[tuple[TensorInfo, ...], msgspec.Meta(max_length=2**18)]
    artifacts: Annotated[tuple[Artifact, ...], msgspec.Meta(min_length=1, max_length=16)]
    outer: OuterStep | msgspec.UnsetType = msgspec.UNSET
    """Set in runs with learners."""


class PolicyHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The small signed fact that a version exists: it fits a gossip message."""

    term: Version
    """The epoch: raised when a resumed trainer had to go back; (term, version) never decreases."""
    version: Version
    previous: Digest
    """Digest of the previous head's payload; zeros at version 0 and where an epoch begins."""
    state: Digest
    manifest: Digest
    manifest_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_MANIFEST)]
    created: UnixSeconds
    expires: UnixSeconds


class PeerRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The identity of a node and how to reach it, signed by itself."""

    node: NodeId
    role: Role
    software: Name
    addresses: Addresses
    """host:port hints of iroh."""
    discovery: Addresses
    """libp2p multiaddrs."""
    share_address: bool
    """Whether the trainer may show this record to other admitted peers."""
    name: Annotated[str, msgspec.Meta(max_length=MAX_NODE_NAME)] = ""
    """What the node's operator calls it, to be shown beside its id; anybody may call himself so."""


class Holding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The weights that a node has or is about to have, signed by itself: a hint, never a proof."""

    node: NodeId
    term: Version
    version: Version
    complete: bool
    """False: it wants the version, and will soon have parts of it."""


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The means to join: enough to check everything else offline."""

    run: Digest
    trainer: NodeId
    addresses: Addresses
    discovery: Addresses
    issued: UnixSeconds
    expires: UnixSeconds
    id: Annotated[bytes, msgspec.Meta(max_length=16)] = b""
    """Random: the name under which the trainer keeps account of it, and revokes it."""
    label: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """The name that the trainer's operator gave it; readable in the ticket."""
    uses: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 0
    """How many nodes it may admit; 0: any number."""


def check_sizes(document: bytes, limit: int) -> bytes:
    """`document`, or LocalProtocolError if peers would refuse it as too large."""
    if len(document) > limit:
        raise LocalProtocolError(f"document of {len(document)} bytes exceeds {limit}")
    return document
