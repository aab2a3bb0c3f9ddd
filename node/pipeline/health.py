"""What a ring tells of itself: whether it is whole, why not, and how busy it is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """Why a ring is not whole."""

    rank: int | None
    """Of the stage that is lost or failed, as far as whoever noticed knows; None where nobody does."""
    words: str


@dataclass(frozen=True)
class RingStats:
    """For status rows; bytes and frames of activations and everything else, over all lines so far."""

    epoch: int
    whole: bool
    bytes_out: int
    bytes_in: int
    frames_out: int
    frames_in: int
    rtt_ms: float | None
    """To the next stage and back."""
    round_ms: float | None
    """Once round the ring, through every stage's queue; only stage 0 knows."""
    busy_s: float
    idle_s: float
    """Of our own stage within chains, where it is not stage 0."""
    stall_share: float
    breaks: int
    waiting: int
    """Frames that have not left yet."""
