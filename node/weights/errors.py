"""Why a weight artifact was refused.

    WeightsError
      CodecError        the payload is malformed, or was made for other tensors
      WrongBase         a delta for a state that is not the one held
      DigestMismatch    decoded, but the result is not what the manifest promised
      NoPath            no known artifacts lead from what is held to the wanted version

Hostile bytes end in one of these and in nothing else; whatever was held before stays held.
"""


class WeightsError(Exception):
    """Base of everything that makes a policy version unusable here."""


class CodecError(WeightsError):
    """The payload cannot be encoded or decoded; the message names the tensor and the reason."""


class WrongBase(WeightsError):
    """The delta belongs on another state; fetch an anchor or the missing deltas."""


class DigestMismatch(WeightsError):
    """A decoded tensor is not the one in the signed manifest."""


class NoPath(WeightsError):
    """Wait for an anchor, or ask another peer for older manifests."""
