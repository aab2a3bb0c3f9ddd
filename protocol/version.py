"""The wire versions that this release speaks, their history, the ALPNs, and limits checked before allocation.

A release speaks a range of versions, and a hello states it: two nodes whose ranges meet work together, in the
highest version of both. A document is sealed in the oldest version that can say it, so that all who may be
there read it, and is read in any version of the range. Signatures and digests are over bytes as they came.

How a version may differ from the one before it, so that a release can speak both:

- A document or message gains a field at its end, in a Struct that leaves defaults out (omit_defaults); its
  default means what its absence meant. Who does not use it writes the bytes of before. Structs that are arrays
  gain none.
- Unknown fields are refused: a limit that a reader passes over binds nobody. So a field is used only where
  every reader knows it: if the run's manifest switches it on, or towards a node whose hello states the version.
  seal(version=...) then names that version. In Hello, Welcome and Refusal, which find the version that both
  speak, unknown fields are passed over.
- New reason codes, purposes, roles and messages are as new fields.
- Whatever else changes raises OLDEST_WIRE_VERSION, and ends the talk with nodes of before.
"""

from typing import NamedTuple

WIRE_VERSION = 2
"""The newest that this release speaks.

1 (2026-11): the first.

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
over them; measurements of audits have signed means; a hello says which versions its sender speaks, or may be a
trial that admits nobody; a peer record may have a name; a retired key may have a successor; a worker says that
it is paused, and why; a standby is a role of its own, and fetches backups of the run; a run may name a root
key, which certifies the nodes that lead it after its trainer, and heads travel with that list; a run may have
learners, whose contributions the manifests of its versions list; the answer to a trial hello has the pace of
the workers and the length of rollouts.
"""
OLDEST_WIRE_VERSION = 2
"""The oldest that this release speaks. It follows WIRE_VERSION by one release, as UPGRADING.md promises."""


class WireRange(NamedTuple):
    """Wire versions that a node speaks, both ends included."""

    oldest: int
    newest: int

    def speaks(self, version: int) -> bool:
        """Return whether a version is in the range."""
        return self.oldest <= version <= self.newest

    def common(self, other: "WireRange") -> int | None:
        """Return the highest version of both ranges; None where they do not meet."""
        newest = min(self.newest, other.newest)
        return newest if self.speaks(newest) and other.speaks(newest) else None

    def stated_oldest(self) -> int:
        """Return the older end as a hello states it: 0 where it is the newer one, too."""
        return 0 if self.oldest == self.newest else self.oldest

    def __str__(self) -> str:
        """Write the range as errors name it."""
        return f"{self.newest}" if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


SPOKEN = WireRange(OLDEST_WIRE_VERSION, WIRE_VERSION)

# The numbers in these names stay: endpoints that share no ALPN cannot talk at all, and a hello of another wire
# version has to arrive to be refused in words. Versions are compared at hello.
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
