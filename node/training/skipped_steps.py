"""Count steps that changed nothing as their gradient was not finite, and end a run whose weights are ruined.

Invariant: a run whose last steps were all skipped does not end as if it had learned, and the newest checkpoint
from before them is kept. No torch.
"""

import logging
import math
from collections.abc import Mapping

from ..errors import RunFailed
from .backend import RUINED, SKIPPED
from .checkpoint import Checkpoints

logger = logging.getLogger(__name__)

MAX_SKIPPED = 5
"""Steps without a finite gradient, one after the other, that end a run. Nothing changes while steps are
skipped: if the weights are at fault, each one that follows is skipped, too. If single batches are, say one in
a hundred, 5 in a row are no accident: once in ten thousand million steps."""
MAX_SKIPPED_AT_END = 1
"""Skipped steps that a run may end with: no later step shows whether its weights are at fault."""
ADVICE = "lower training.lr or training.max_norm"


class SkippedSteps:
    """Counts the skipped steps of a run, in total and since the last step that learned."""

    def __init__(self, checkpoints: Checkpoints, *, advice: str = ADVICE) -> None:
        """`checkpoints` keep the newest good one while steps are skipped."""
        self._checkpoints = checkpoints
        self._advice = advice
        self.total = 0
        self.in_a_row = 0
        self._empty = 0
        """Batches without a learning signal since the first skipped step of the row."""
        self._learned = -1
        """Last step whose weights are known to be good: the one after it had a finite gradient."""

    def restore(self, step: int, total: int, in_a_row: int) -> None:
        """Go on after `step` of a run that has skipped that many steps."""
        self.total, self.in_a_row, self._empty = total, in_a_row, 0
        self._learned = step - 1 - (in_a_row + 1 if in_a_row else 0)
        self._checkpoints.protect(self._learned if in_a_row else None)

    def after(self, step: int, figures: Mapping[str, float]) -> RunFailed | None:
        """Count `step` by its metrics; return the error that ends the run, if it has to end."""
        if figures.get(RUINED):
            self._learned = step - 1
            return RunFailed(
                f"step {step} made weights that are not finite, so they are neither kept nor published: "
                f"{self._advice}, and {self._way_back()}"
            )
        if not figures.get(SKIPPED):
            self.in_a_row = self._empty = 0
            self._learned = step - 1
            self._checkpoints.protect(None)
            return None
        self.total += 1
        self.in_a_row += 1
        if self.in_a_row == 1:
            # the step before made the weights that are in doubt, so its checkpoint is, too
            self._learned = step - 2
            self._checkpoints.protect(self._learned)
            logger.warning(
                "step %d was skipped: its gradient is not finite (norm %g, loss %g), so no weight was changed; "
                "%d in a row end the run. %s if the next ones are skipped, too; see optim/grad_norm and "
                "optim/skipped in metrics.jsonl",
                step,
                figures.get("optim/grad_norm", math.nan),
                figures.get("loss/mean", math.nan),
                MAX_SKIPPED,
                self._advice[:1].upper() + self._advice[1:],
            )
        return self._ruined() if self._is_long() else None

    def empty(self) -> RunFailed | None:
        """Count a batch without a learning signal, as ruined weights play them; as after()."""
        if not self.in_a_row:
            return None
        self._empty += 1
        return self._ruined() if self._is_long() else None

    def at_end(self) -> None:
        """Raise RunFailed if the run's last steps were skipped: its weights are in doubt."""
        if self.in_a_row > MAX_SKIPPED_AT_END:
            raise self._ruined()
        if self.in_a_row:
            logger.warning(
                "the last step was skipped, so nothing shows that the weights are good: try them before use"
            )

    def note(self) -> str:
        """Describe the row for `status`; empty if the last step learned."""
        if not self.in_a_row:
            return ""
        which = (
            "the last step was" if self.in_a_row == 1 else f"the last {self.in_a_row} steps were"
        )
        return f"{which} skipped, as the gradient was not finite: {self._advice}"

    def _is_long(self) -> bool:
        return self.in_a_row + self._empty >= MAX_SKIPPED

    def _ruined(self) -> RunFailed:
        what = f"{self.in_a_row} steps in a row had no finite gradient"
        if self.in_a_row == 1:
            what = "a step had no finite gradient"
        if self._empty:
            what += f", and {self._empty} batches after that no signal"
        return RunFailed(
            f"{what}: the weights are probably ruined, and were not exported; {self._advice}, and "
            f"{self._way_back()}"
        )

    def _way_back(self) -> str:
        good = [step for step in self._checkpoints.steps() if step <= self._learned]
        if not good:
            return "begin again with --clean, as no checkpoint from before is left"
        return f"go back to the last good checkpoint with --resume.step {good[-1]}"
