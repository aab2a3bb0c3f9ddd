"""The numerics class of a worker, and the bounds of noise that a run measured for each class.

Honest logits differ with kernels, device, batch and parallelism, so bounds of noise hold for one class of
workers. A class is a claim: it decides which measured bounds judge a worker, and these judge all that it sends.
"""

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec.structs import astuple

from .manifests import ProofContract, Thresholds, Version

MAX_LABEL = 64
Label = Annotated[str, msgspec.Meta(pattern=rf"^[ -~]{{0,{MAX_LABEL}}}\Z")]
"""Printable ASCII: it is shown to operators."""
MAX_CLASSES = 16
"""Classes of one run that have bounds: each takes a worker that the operator named."""
Limit = Annotated[float, msgspec.Meta(ge=0, le=1000)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class NumericsClass(
    msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A class of workers with the same honest noise. Without any field: unknown."""

    engine: Label = ""
    """`hf` or `vllm`; `vllm pipeline` where several nodes hold the model."""
    release: Label = ""
    """Release of the library whose kernels compute: vLLM's, else torch's."""
    device: Label = ""
    """Family of the device: `H100`, `RTX 4090`, `cpu`."""
    tp: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    """Devices that share each layer: partial sums are rounded."""
    dtype: Label = ""

    def __str__(self) -> str:
        if self == NumericsClass():
            return "unknown class"
        if self == ENVELOPE:
            return "any other class"
        return f"{self.engine} {self.release} on {self.device}, tp {self.tp}, {self.dtype}"


ENVELOPE = NumericsClass(engine="envelope")
"""Stands for all workers of a class without bounds of its own: no worker is of it."""


class MeanBounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of the means over WINDOW rollouts of one worker (reputation.py), see Evidence.means.

    Noise that scatters about 0 from rollout to rollout averages out of them; what a cheat does does not.
    """

    logprob_shift: Limit
    """Nats."""
    logprob_trend: Limit
    fingerprint_shift: Limit
    """Length of the mean vector."""
    fingerprint: Limit
    """Mean of Evidence.fingerprint."""

    def first_above(self, means: Sequence[float]) -> str:
        """Describe the first mean above its bound; "" if none is. `means`: Evidence.means, then fingerprint."""
        shift, trend, *apart, distance = means
        distances = (abs(shift), abs(trend), math.hypot(*apart), distance)
        for name, value, bound in zip(
            self.__struct_fields__, distances, astuple(self), strict=True
        ):
            if not value <= bound:
                return f"{name} {value:.3g}, at most {bound:.3g} is allowed"
        return ""


class ClassBounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds that judge the workers of a class, signed by the trainer as a fact of its run."""

    numerics: NumericsClass
    number: Version
    """0 while they are provisional; rises each time that the class's bounds are made anew."""
    reject: Thresholds
    suspect: Thresholds
    other_scale: Share
    """See the manifest's ProofContract."""
    rollouts: Version
    """Rollouts of reference workers behind the bounds; 0 while they are provisional."""
    tokens: Version
    term: Version = 0
    """Epoch of the chain in which they were made."""
    first_version: Version = 0
    """Policy versions that drew those rollouts, from the first ..."""
    last_version: Version = 0
    """... to the last."""
    rejected_at_most: Share = 1.0
    """95 % upper bound of the share of honest rollouts that `reject` costs, each half of them judged by bounds
    made of the other; 1 where nothing was measured."""
    suspected_at_most: Share = 1.0
    means: MeanBounds | None = None
    """Of the envelope alone, once there are enough readings."""

    @property
    def provisional(self) -> bool:
        """Whether nothing was measured: then a rollout is rejected only if no noise explains it."""
        return self.rollouts == 0

    def applied(self, contract: ProofContract) -> ProofContract:
        """Return the run's contract with these bounds."""
        return msgspec.structs.replace(
            contract, reject=self.reject, suspect=self.suspect, other_scale=self.other_scale
        )
