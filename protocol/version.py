"""The wire version with its history, the ALPNs, and the size limits that are checked before allocation."""

WIRE_VERSION = 2
"""1 (2026-11): the first.

2 (2026-11): an envelope begins with its wire version, in the clear, so that one of another version is told from
a damaged one; hello and welcome say the sender's wire version and clock; tickets have an id, a label and a
number of uses, and as text leave out what follows from the rest; a reply without leases says why; a run's
environment has the name and the digest of its package, and says whether its rewards are recomputed, sampled or
claimed; samples of a group stand in the order in which they began; the end of a run says whether it finished,
failed or was stopped; a withdrawn sample has a reason of its own; workers say how they compute, and a run may
measure the bounds that judge each class of them; a run has several environments, each with a name, a group
size, a sampling contract and a limit of turns, a lease names one of them, and a worker says which it can play;
rollouts of a mixture of experts may bring their routes, and audits measure these; a lease may bring the prompts
of its tasks, and is then up to 256 KiB long; a run may take the likeliest token, which is said as temperature
0; its engines may quantize weights to FP8; an environment may draw from its likeliest tokens only, by top_p and
top_k, and end replies by strings; a key that is in use on another connection, or that its owner has retired, is
refused for a reason of its own, and a retirement is a signed fact; an inference server is a role of its own; an
environment's variables of the chat template may name the date that it writes, and its options what later turns
are shown of earlier reasoning; rollouts under top_p or top_k state the tokens that these left, and logprobs
over them; measurements of audits have signed means; a worker says that it is paused, and why.
"""

# The numbers in these names stay: endpoints that share no ALPN cannot talk at all, and a hello of another wire
# version has to arrive to be refused in words. What changes with WIRE_VERSION is checked at hello.
ALPN_CONTROL = b"primerl/control/1"
"""Requests and replies: hello, leases, submissions, heads, peers."""
ALPN_BLOBS = b"primerl/blobs/1"
"""Chunks by digest, on their own connection so that bulk never delays a lease."""
ALPN_PIPELINE = b"primerl/pipeline/1"
"""Between the stages of one model."""

KIB = 1024
MIB = 1024 * KIB

MAX_MESSAGE = 1 * MIB
"""One control message."""
MAX_GOSSIP = 4 * KIB
"""One gossiped fact."""
MAX_CHUNK = 16 * MIB
"""One chunk of a weight artifact."""
MAX_MANIFEST = 16 * MIB
"""One policy manifest: a 200,000-tensor model would still fit."""
MAX_SUBMISSION = 256 * MIB
"""One uploaded bundle; a lease's byte quota is the real, smaller bound."""
MAX_LEASE = 256 * KIB
"""One sealed lease."""
MAX_PROMPT_TOKENS = 60_000
"""All prompts of one lease together, if it brings its own."""
MAX_ADDRESSES = 16
MAX_NAME = 256
"""Characters of a tensor name, environment id, software version, refusal text."""

CLOCK_SKEW_S = 60
"""How far two honest clocks may differ."""
