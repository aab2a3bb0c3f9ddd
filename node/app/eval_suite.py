"""Open the environments that a run is evaluated on beside training."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from ..config.run import RunConfig
from ..environments.environment import Environment, EnvironmentFailed
from ..evaluation.evaluator import EvalTask, Evaluator
from ..evaluation.online import EvaluationLog, OnlineEvaluation
from ..ops.errors import UsageError
from ..ops.metrics import MetricsLog
from .factories import Parts

FILE = "evaluations.jsonl"


async def open_eval_tasks(
    config: RunConfig,
    parts: Parts,
    own: Environment,
    model_dir: Path,
    open_things: AsyncExitStack,
) -> list[EvalTask]:
    """Start the environments of [evaluation], closed with `open_things`; `own` is the run's, started.

    Raises UsageError.
    """
    told, sampling = config.evaluation, config.sampling
    if not told.interval:
        return []
    if not told.environments:
        return [EvalTask(own.name, own, told.prompts, told.samples)]
    found: list[EvalTask] = []
    for one in told.environments:
        environment = parts.environment(
            one, model_dir, config.seed, sampling.max_tokens, sampling.temperature
        )
        open_things.push_async_callback(environment.close)
        try:
            await environment.start()
        except EnvironmentFailed as error:
            raise UsageError(
                f"environment {one.title!r} of [evaluation] does not start: {error}"
            ) from error
        found.append(EvalTask(one.title, environment, one.prompts, one.samples, one.success))
    return found


def online_evaluation(
    config: RunConfig, evaluator: Evaluator, tasks: Sequence[EvalTask], metrics: MetricsLog
) -> OnlineEvaluation:
    """Make the evaluation beside the training of `config`."""
    return OnlineEvaluation(
        evaluator,
        tasks,
        EvaluationLog(config.run_dir / FILE),
        metrics,
        interval=config.evaluation.interval,
        last=config.max_steps,
        seed=config.seed,
    )
