"""Many honest rollouts: how many of them an auditor rejects by the bounds of a run (`gpu_audit.py --honest N`).

The bounds are measured on --rollouts of them, as a run does; those that are judged by them are drawn later, in
portions that differ in prompts and seeds. What each portion has shown is printed when it is judged, so that
nothing is lost of a bench that is stopped.
"""

import time
from collections.abc import Sequence

from audit_bench import HONEST, Bench, calibrate, evidences, honest_row, say  # pyright: ignore
from support.exact_cases import play

from primerl.node.verification.auditor import MEASURES, AuditItem, Measured
from primerl.node.verification.bounds import SUSPECT
from primerl.node.verification.judge import judge

JUDGED = "honest rollouts judged"
SUSPECTED = "honest rollouts that are suspect"
PORTION = 512
SLACK = 2.0
"""Times SUSPECT: bounds of few rollouts are extrapolated."""
CLOSING_S = 10.0
"""To end both engines."""


class Tally:
    """What was seen of the rollouts that were judged."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.judged = self.rejected = self.suspect = 0
        self.nearest = dict.fromkeys(MEASURES, 0.0)
        """Of each measure, the largest over its bound to reject."""

    def add(self, found: Sequence[Measured]) -> None:
        """Judge these."""
        contract = self._bench.contract
        for one in evidences(found):
            verdict = judge(one, contract)
            self.judged += 1
            self.rejected += verdict.reason is not None
            self.suspect += verdict.suspect
            if verdict.reason is not None:
                say(f"an honest rollout is rejected: {verdict.reason}: {verdict.detail}")
            for name in MEASURES:
                ratio = getattr(one, name) / max(getattr(contract.reject, name), 1e-12)
                self.nearest[name] = max(self.nearest[name], ratio)

    def row(self) -> str:
        """The counts so far, and the measure that came nearest to its bound."""
        name = max(self.nearest, key=self.nearest.__getitem__)
        return (
            f"{self.judged} honest rollouts judged: {self.rejected} rejected, {self.suspect} suspect; "
            f"nearest to its bound: {name}, {self.nearest[name]:.2f} of it"
        )


async def judge_honest(
    bench: Bench, items: Sequence[AuditItem], numerics: str
) -> tuple[dict[str, float], list[Measured]]:
    """Rows, and what was measured of `items`, of which the bounds are made."""
    references = await bench.audit(items)
    if numerics != "exact":
        calibrate(bench, references)
    say(f"{numerics}: {len(items)} references, mean/largest: {honest_row(references)}")
    tally, portion, longest = Tally(bench), 0, 0.0
    while tally.judged < bench.options.honest:
        if bench.left_s < 1.5 * longest + CLOSING_S:
            say(f"{numerics}: left out: {bench.options.honest - tally.judged} honest rollouts")
            break
        began, portion = time.monotonic(), portion + 1
        wanted = bench.requests(min(PORTION, bench.options.honest - tally.judged), portion)
        drawn = await play(bench.engine, wanted)
        generated = time.monotonic()
        found = await bench.audit(drawn)
        ended = time.monotonic()
        tally.add(found)
        longest = max(longest, ended - began)
        say(
            f"{numerics}: {tally.row()}; {nats(drawn):.2f} nats a token, rollouts with equal bits "
            f"{sum(one.fingerprint == 0 for one in found) / len(found):.0%}, {generated - began:.1f} s to "
            f"generate, {ended - generated:.1f} s to audit"
        )
    rows = {
        JUDGED: float(tally.judged),
        HONEST: float(tally.rejected),
        SUSPECTED: float(tally.suspect),
        **{f"largest {name} over its bound": value for name, value in tally.nearest.items()},
    }
    return rows, references


def nats(items: Sequence[AuditItem]) -> float:
    """Mean of a drawn token's -logprob: small where distributions are peaked."""
    drawn = [value for one in items for value in one.logprobs]
    return -sum(drawn) / len(drawn)


def honest_goals(wanted: int, rows: dict[str, float]) -> list[tuple[str, float, bool]]:
    """As many judged as were wanted, nobody rejected, and few suspect: a sequential test expects some."""
    return [
        (JUDGED, float(wanted), True),
        (HONEST, 0.0, False),
        (SUSPECTED, SLACK * SUSPECT * rows[JUDGED], False),
    ]
