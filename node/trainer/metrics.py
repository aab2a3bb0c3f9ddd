"""Note what a step did: in the progress that `status` shows, in metrics.jsonl and in the log.

A step's metrics are made before its checkpoint, which holds them for a resume. They are written once its
version is published, with the seconds that saving and publishing took.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from statistics import median

from ..config.run import RunConfig
from ..ops.metrics import MetricsLog
from ..training.advantages import CreditedBatch
from ..training.buffer import RolloutGroup, StalenessStats
from .demonstrations import Demonstrations
from .publisher import Publisher
from .scheduler import LeaseScheduler
from .submissions import SubmissionQueue

logger = logging.getLogger(__name__)

FIRST_STEP = "first step"
"""The moment that ends a start."""

Line = dict[str, float | None]
"""The metrics of a step, by name."""


class RunMetrics:
    """The metrics of the run's steps."""

    def __init__(
        self,
        config: RunConfig,
        scheduler: LeaseScheduler,
        submissions: SubmissionQueue,
        publisher: Publisher,
        demonstrations: Demonstrations,
        log: MetricsLog,
    ) -> None:
        """`log` takes the lines; the others are the sources of the metrics."""
        self._environments = [environment.name for environment in config.mixture]
        self._scheduler = scheduler
        self._progress = submissions.progress
        self._curricula = submissions.curricula
        self._publisher = publisher
        self._demonstrations = demonstrations
        self.log = log
        self.saving_s = 0.0
        """Seconds that checkpoints delayed the current step."""
        self._phases: dict[str, float] = {}
        """Seconds by phase, up to the newest step."""
        self._is_first = False
        """Whether the newest step is the first since this program started."""

    def note(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        staleness: StalenessStats,
        figures: Mapping[str, float],
    ) -> None:
        """Note a trained step in the progress; `figures` are the learner's."""
        rewards = [rollout.reward for group in groups for rollout in group.rollouts]
        progress = self._progress
        progress.step = step
        self._is_first = FIRST_STEP not in progress.clock.moments
        progress.clock.reach(FIRST_STEP)
        progress.reward = sum(rewards) / len(rewards)
        progress.rewards |= mean_rewards(groups)
        progress.staleness = staleness.mean
        progress.staleness_max = max(progress.staleness_max, staleness.max)
        progress.history.append((step, progress.reward))
        progress.staleness_history.append((step, staleness.mean))
        mismatch = figures.get("mismatch_kl/all/mean", 0.0)
        if math.isfinite(mismatch):
            progress.mismatch_kl.append(mismatch)

    def line(
        self,
        batch: CreditedBatch,
        groups: Sequence[RolloutGroup],
        staleness_max: int,
        waited: float,
        figures: Mapping[str, float],
    ) -> Line:
        """Return the metrics of the step that was noted last, before it is saved and published."""
        progress, rewards = self._progress, mean_rewards(groups)
        names, times = self._environments, self._verdict_times()
        return {
            "time": round(time.time(), 3),
            "reward/mean": progress.reward,
            "off_policy/mean": progress.staleness,
            "off_policy/max": staleness_max,
            **figures,
            "batch/samples": len(batch.samples),
            "batch/groups": batch.groups,
            "batch/filtered": batch.filtered,
            "batch/zero_advantage": batch.zero_advantage,
            "time/wait_for_batch": round(waited, 4),
            **times,
            "rollouts/accepted": progress.accepted,
            "rollouts/rejected": sum(progress.rejected.values()),
            **{f"reward/{name}": rewards.get(name) for name in names},
            **{f"accepted/{name}": progress.accepted_of[name] for name in names},
            **{f"rejected/{name}": progress.rejected_of[name] for name in names},
            "leases/expired": self._scheduler.book.expired,
            "leases/passed_over": sum(supply.passed_over for supply in self._scheduler.tasks),
            **{
                name: value
                for curriculum in self._curricula.values()
                for name, value in curriculum.metrics().items()
            },
            **self._demonstrations.figures(),
            **(self._start() if self._is_first else {}),
        }

    def _verdict_times(self) -> Line:
        """Return where the time of audits, verdicts and publishing went since the step before, seconds."""
        progress, before = self._progress, self._phases
        self._phases = dict(progress.clock.seconds)
        spent = {name: s - before.get(name, 0.0) for name, s in self._phases.items()}
        verdicts = len(progress.verdict_s)
        times = {
            "time/audit": spent.get("audit", 0.0),
            "time/audit_loading": spent.get("audit loading", 0.0),
            "time/wait_for_publish": spent.get("publish", 0.0),
            "time/verdict": median(progress.verdict_s or [0.0]),
            **{
                f"time/{name}": seconds / max(1, verdicts)
                for name, seconds in spent.items()
                if name.startswith("verdict/")
            },
        }
        progress.verdict_s.clear()
        return {name: round(seconds, 4) for name, seconds in times.items()}

    def write(self, step: int, line: Line, snapshot_s: float, broadcasting_s: float) -> None:
        """Write the metrics of a step whose snapshot was waited for, and which took so long to publish."""
        progress = self._progress
        published = {
            "time": round(time.time(), 3),
            "time/save_ckpt": round(self.saving_s, 4),
            "time/broadcast_weights": round(broadcasting_s, 4),
            "time/broadcast_weights/snapshot": round(snapshot_s, 4),
            **{
                f"time/broadcast_weights/{phase}": round(seconds, 4)
                for phase, seconds in self._publisher.phases.items()
            },
            "weights/delta_bytes": self._publisher.last_delta_bytes,
        }
        self.saving_s = 0.0
        self.log.write(step, line | published)
        logger.info(
            "step %d | reward %.3f | staleness %.2f | mismatch KL %.2g | %.0f tokens/s | waited %.2fs",
            step,
            progress.reward or 0.0,
            progress.staleness or 0.0,
            line.get("mismatch_kl/all/mean") or 0.0,
            line.get("perf/throughput") or 0.0,
            line["time/wait_for_batch"],
        )

    def _start(self) -> Line:
        """Log how long the start took; return the same as metrics of the first step after it."""
        moments = {name: round(at, 1) for name, at in self._progress.clock.moments.items()}
        first_step = moments.pop(FIRST_STEP)
        parts = ", ".join(f"{name} {at:g}" for name, at in moments.items())
        logger.info(
            "the first step is trained, %g s after the start (%s: seconds after it)",
            first_step,
            parts,
        )
        moments[FIRST_STEP] = first_step
        return {f"start/{name.replace(' ', '_')}": at for name, at in moments.items()}


def mean_rewards(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return the mean reward of each environment's rollouts, for environments in `groups`."""
    rewards: dict[str, list[float]] = {}
    for group in groups:
        rewards.setdefault(group.environment, []).extend(
            rollout.reward for rollout in group.rollouts
        )
    return {name: sum(each) / len(each) for name, each in rewards.items()}
