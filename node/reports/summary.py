"""The summary of a run: `summary.json` and the picture. Its keys are documented in docs/summary.md."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ...crypto.hashing import short
from ...protocol.reputation import Reputation
from ...protocol.trust import RunDocuments
from ..config.run import RunConfig
from ..evaluation.evaluator import EvalResult
from ..evaluation.online import Evaluated
from ..ops.strict_json import to_json
from ..storage import run_files
from ..trainer.state import Progress
from ..trainer.workers import WorkerState
from . import report

STALE = "stale"
KL_WINDOW = 20
"""Number of last steps that `mismatch_kl` averages."""


def write(
    config: RunConfig,
    documents: RunDocuments,
    *,
    progress: Progress,
    before: EvalResult,
    after: EvalResult,
    evaluations: Sequence[Evaluated] = (),
    delta_bytes: int,
    full_bytes: int,
    workers: Mapping[bytes, WorkerState],
    reputations: Mapping[bytes, Reputation],
    weights: Path,
    seconds: Mapping[str, float],
) -> None:
    """Write summary.json and reward.png into the run directory."""
    window = progress.mismatch_kl[-KL_WINDOW:]
    worked = {
        node: worker for node, worker in workers.items() if _worked(worker, reputations.get(node))
    }
    was_evaluated = before.prompts > 0 or after.prompts == 0
    picture = config.run_dir / "reward.png"
    document = {
        "run": config.name,
        "run_id": documents.run_id.hex(),
        "seed": config.seed,
        "steps": progress.step,
        "policy_version": progress.step,
        "skipped_steps": progress.skipped,
        "exact_match_before": before.exact if was_evaluated else None,
        "exact_match_after": after.exact,
        "reward_before": before.reward if was_evaluated else None,
        "reward_after": after.reward,
        "eval_prompts": after.prompts,
        "environments": _environments(config, progress, before, after),
        "evaluations": _evaluations(evaluations),
        "mismatch_kl": sum(window) / len(window) if window else None,
        "staleness_max": progress.staleness_max,
        "accepted": progress.accepted,
        "rejected": dict(progress.rejected),
        "stale_fraction": progress.rejected[STALE] / max(progress.received, 1),
        "delta_bytes": delta_bytes,
        "full_bytes": full_bytes,
        "chunk_bytes_by_source": {
            short(node): dict(worker.stats.chunk_bytes) for node, worker in worked.items()
        },
        "workers": {
            short(node): _worker(worker, reputations.get(node)) for node, worker in worked.items()
        },
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "reward_curve": [[step, round(reward, 4)] for step, reward in progress.history],
        "staleness_curve": [[step, round(value, 3)] for step, value in progress.staleness_history],
        "weights": str(weights),
        "picture": str(picture),
    }
    run_files.write(config.run_dir / run_files.SUMMARY, to_json(document, indent=2) + "\n")
    report.write_picture(document, picture)


def _environments(
    config: RunConfig, progress: Progress, before: EvalResult, after: EvalResult
) -> dict[str, dict[str, float]]:
    """Map each environment that was trained on to its results before and after, and its rollouts."""
    figures: dict[str, dict[str, float]] = {}
    for environment in config.mixture:
        figures[environment.name] = {
            "accepted": progress.accepted_of[environment.name],
            "rejected": progress.rejected_of[environment.name],
        }
        for when, result in (("before", before), ("after", after)):
            if (own := result.environments.get(environment.name)) is not None:
                figures[environment.name] |= {
                    f"reward_{when}": own.reward,
                    f"exact_match_{when}": own.exact,
                }
    return figures


def _evaluations(evaluated: Sequence[Evaluated]) -> dict[str, list[dict[str, float]]]:
    """Map environments to the figures of each version, oldest first."""
    evaluations: dict[str, list[dict[str, float]]] = {}
    for evaluation in evaluated:
        for name, figures in evaluation.environments.items():
            evaluations.setdefault(name, []).append(
                {"version": evaluation.version, **figures.flat()}
            )
    return evaluations


def _worked(worker: WorkerState, reputation: Reputation | None) -> bool:
    """Return whether a node did more than connect: it held a policy, or its work was judged."""
    judged = reputation is not None and (reputation.accepted or reputation.rejected)
    return worker.stats.version >= 0 or bool(judged)


def _worker(worker: WorkerState, reputation: Reputation | None) -> dict[str, float]:
    known = reputation or Reputation()
    return {
        "accepted": known.accepted,
        "rejected": sum(known.rejected.values()),
        "working_s": round(worker.stats.working_s, 2),
        "generating_s": round(worker.stats.generating_s, 2),
    }


def write_result(result: EvalResult) -> bytes:
    """Encode an evaluation for the ledger."""
    return msgspec.json.encode(result)


def read_result(data: bytes | None) -> EvalResult:
    """Decode an evaluation; zeros where none was kept."""
    return msgspec.json.decode(data, type=EvalResult) if data else EvalResult(0, 0.0, 0.0)
