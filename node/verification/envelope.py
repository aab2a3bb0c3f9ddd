"""The envelope: bounds of noise for workers of a class that nobody here runs.

Honest implementations that compute in bfloat16 with different kernels, batches and devices deviate from each
other, but all deviate from a computation in float32 by about the same amount (docs/proofs.md has the table). So
the trainer can measure honest noise alone: it reads texts in float32, as a worker would that rounds nothing,
and audits that reading as it audits a worker. The auditor's own noise is what it finds, and a worker whose
noise is as large, and independent of the auditor's, is off by sqrt(2) times as much.

Invariants:
- no number that a worker sends enters the envelope: only the texts are theirs, and texts that are rejected are
  not read;
- bounds are never narrower than the measurements by ROUNDING, nor wider than the provisional ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import hypot, sqrt
from pathlib import Path
from typing import Protocol

import numpy as np
from msgspec import structs

from ...protocol.manifests import ProofContract, RunManifest, Thresholds
from ...protocol.numerics import ENVELOPE, ClassBounds, MeanBounds
from ...protocol.reputation import WINDOW
from ...protocol.rollouts import MEASURES, Evidence, cut_support
from ..inference.fingerprint import TOKEN_BYTES
from ..weights.state import State
from .auditor import AuditItem, Auditor, Measured, Reading, SampledSpan, Unreadable
from .bounds import FEWEST, PROVISIONAL, Bands, bands
from .class_bounds import Reference, bounds_made_of, widening

ROUNDING = 1.5
"""Most noise of an honest implementation against float32, in units of the auditor's; up to 1.41 was seen, of
eager kernels where the auditor's are compiled (docs/proofs.md)."""
PAIR = sqrt(1 + ROUNDING**2)
"""Distance of such an implementation from the auditor, in units of the auditor's from float32."""
SQUARED = ("sampling",)
"""Measures that grow with the square of the noise: how often the best token changes, times by how much."""
LONGER = 2.0
"""Factor of the bound of evidence for another version: it grows with the length of replies."""
FIRST = FEWEST
"""Readings for the first bounds."""
KEPT = 256
"""Newest readings, of which the bounds are made."""
WINDOWS = 4
"""Windows of readings for bounds of means."""
MEANS_WIDER = 4.0
"""Bounds of signed means, in units of PAIR times the root mean square of those of the readings' windows."""
LEAST_MEAN = 0.003
"""Least bound of means of logprobs, nats: stated ones are rounded, and a KL of this size is no cheat."""
LEAST_SHIFT = 0.5
"""Part of the readings' mean distance that is added to the bound of shifted states: other kernels shift the
states of a model by up to 0.42 of it (4B, eager), however long the texts are."""
DISTANCE_WIDER = 1.12
"""Bound of the mean distance, in units of PAIR times that of the readings; an honest window in 700 reached
1.10 of it."""
RENEW = 8
"""New readings after which bounds are made anew, once there are ENOUGH."""
READ = 1 / 64
"""Share of audited rollouts that are read, once there are ENOUGH."""


class Reader(Protocol):
    """Reads texts in float32: HfAuditor, or a fake in tests."""

    async def start(self, model_dir: Path, run: RunManifest) -> None:
        """See Auditor."""
        ...

    async def read(
        self, items: Sequence[AuditItem], states: Mapping[int, State]
    ) -> list[Reading | Unreadable]:
        """See HfAuditor.read()."""
        ...

    async def rest(self) -> None:
        """See HfAuditor.rest()."""
        ...

    async def close(self) -> None:
        """See Auditor."""
        ...


class NoiseEnvelope:
    """Measures the run's auditor against readings in float32."""

    def __init__(self, auditor: Auditor, reader: Reader) -> None:
        self._auditor = auditor
        self._reader = reader

    async def measure(
        self, items: Sequence[AuditItem], states: Mapping[int, State]
    ) -> list[Measured | Unreadable]:
        """Return how far the auditor is from a reading of each item, in order.

        `states` holds every version that an item wants. Raises EngineError.
        """
        items = [first_version(item) for item in items]
        readings = await self._reader.read(items, states)
        claims = [
            replace(
                item,
                drawn=reading.drawn,
                logprobs=reading.logprobs,
                proof=reading.proof,
                support=reading.support,
            )
            for item, reading in zip(items, readings, strict=True)
            if isinstance(reading, Reading)
        ]
        measured = iter(await self._auditor.audit(claims, states) if claims else [])
        return [
            reading if isinstance(reading, Unreadable) else next(measured) for reading in readings
        ]

    async def rest(self) -> None:
        """Free the reader's memory until the next reading."""
        await self._reader.rest()


def first_version(item: AuditItem) -> AuditItem:
    """Return the start of a branch that its first policy version drew, without routes and boundaries."""
    version = item.versions[0]
    left = count = list(item.versions).count(version)
    replies: list[SampledSpan] = []
    for reply in item.replies:
        if left:
            end = min(reply.end, reply.start + left)
            replies.append(replace(reply, end=end))
            left -= end - reply.start
    return replace(
        item,
        token_ids=item.token_ids[: replies[-1].end],
        replies=replies,
        logprobs=item.logprobs[:count],
        versions=item.versions[:count],
        proof=item.proof[: TOKEN_BYTES * count],
        boundaries=(),
        routes=b"",
        support=cut_support(item.support, len(item.versions), count),
        others=[other for other in item.others if other != version],
    )


def envelope_bounds(
    readings: Sequence[Reference], contract: ProofContract, *, number: int = 1, term: int = 0
) -> ClassBounds:
    """Make the bounds of honest strangers from at least FIRST readings, no wider than provisional ones."""
    measured = [reading.evidence for reading in readings]
    band = bands(measured)
    rejects = widening(len(measured))
    apart = {name: PAIR**2 if name in SQUARED else PAIR for name in MEASURES}
    reject = {name: rejects * apart[name] * getattr(band.reject, name) for name in MEASURES}
    suspect = {name: apart[name] * getattr(band.suspect, name) for name in MEASURES}
    # those of the first version are compared with none
    compared = [evidence for evidence in measured if evidence.other_policy]
    suspect["other_policy"] = reject["other_policy"] = PROVISIONAL.other_policy
    if len(compared) >= FIRST:
        suspect["other_policy"] = LONGER * bands(compared).suspect.other_policy
    for name in ("routing", "routing_max"):  # readings state no routes
        reject[name] = suspect[name] = getattr(PROVISIONAL, name)
    # strangers scatter otherwise than readings: the test for another policy counts suspects alone
    bounds = Bands(Thresholds(**reject), Thresholds(**suspect), 0.0)
    bounds_of_readings = bounds_made_of(
        readings, bounds, ENVELOPE, contract, number=number, term=term
    )
    return structs.replace(bounds_of_readings, means=mean_bounds(measured))


def mean_bounds(measured: Sequence[Evidence]) -> MeanBounds | None:
    """Make the bounds of a worker's means from those of the readings; None for fewer than WINDOWS windows.

    They are of windows, not of single readings: what the auditor's kernels leave in a mean, others may, too.
    """
    rows = np.array(
        [(*evidence.means, evidence.fingerprint) for evidence in measured if evidence.means],
        np.float64,
    )
    count = len(rows) // WINDOW
    if count < WINDOWS:
        return None
    windows = rows[-count * WINDOW :].reshape(count, WINDOW, -1).mean(axis=1)
    shift, trend, *apart = np.sqrt((windows[:, :-1] ** 2).mean(axis=0)).tolist()
    distance = float(windows[:, -1].mean())
    return MeanBounds(
        logprob_shift=PAIR * MEANS_WIDER * shift + LEAST_MEAN,
        logprob_trend=PAIR * MEANS_WIDER * trend + LEAST_MEAN,
        fingerprint_shift=PAIR * MEANS_WIDER * hypot(*apart) + LEAST_SHIFT * distance,
        fingerprint=DISTANCE_WIDER * PAIR * distance,
    )
