"""The fingerprint seam: hidden states in, a few bytes per token out, and a comparison with other hidden states.

A hidden state is what feeds the language-model head, one vector per sampled token: that which led to it.
A proof is foreign bytes: its size is checked against the number of tokens before anything is read.
numpy only: who compares needs no torch. Implementations: projection.py, toploc.py.
Suite: tests/conformance/test_fingerprint.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Hidden = NDArray[np.float32]
"""Hidden states [tokens, width]."""


class BadProof(Exception):
    """The bytes are no proof of so many tokens."""


class ProofFailed(Exception):
    """No proof can be made of these hidden states (they are not finite)."""


@dataclass(frozen=True)
class Compared:
    """One reply's proof against the hidden states of a validator."""

    distance: float
    """Relative, 0 is equal, about 1 or more is unrelated."""
    samples: int
    """How many committed numbers were compared."""
    own: float
    """Sum of squared relative differences between what is committed and the own hidden states, over `samples`,
    weighed so that no few tokens drown the rest (residuals.py). 0 if `samples` is."""
    others: tuple[float, ...]
    """The same against the hidden states of other policies, in order, over the same samples."""


class Fingerprint(Protocol):
    """How a proof is made and compared. Stateless; safe in any thread."""

    @property
    def name(self) -> str:
        """As in the run manifest."""
        ...

    def size(self, tokens: int) -> int:
        """Bytes of the proof of a reply of `tokens` > 0 tokens."""
        ...

    def make(self, hidden: Hidden) -> bytes:
        """The proof of one reply. Raises ProofFailed."""
        ...

    def check(self, proof: bytes, tokens: int) -> None:
        """Raise BadProof unless `proof` can be that of a reply of `tokens` tokens."""
        ...

    def compare(self, proof: bytes, hidden: Hidden, others: Sequence[Hidden] = ()) -> Compared:
        """Compare a reply's proof with the validator's own hidden states of it.

        `others` are those of the same tokens under other policies. Raises BadProof; ProofFailed if own or
        other hidden states are not finite, which is not the sender's fault.
        """
        ...
