"""`primerl-node calibrate`: measure honest noise, and write the bounds that a run's manifest will hold."""

import asyncio
import datetime
import tempfile
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..node.config.paths import expand_home
from ..node.ops.strict_json import to_json
from .command import arguments, read_config, run_to_end

if TYPE_CHECKING:
    from rich.table import Table

    from ..node.config.run import RunConfig
    from ..node.verification.calibration import CalibrationReport, CalibrationRequest, EngineNoise


class EngineType(Enum):
    """Engines of workers."""

    hf = "hf"
    vllm = "vllm"


Out = Annotated[Path, typer.Option("--out", help="The file to write.")]
Against = Annotated[
    list[EngineType],
    typer.Option("--against", help="An engine that workers use; repeat it. Else engine.type."),
]
Rollouts = Annotated[
    int, typer.Option("--rollouts", min=16, help="Honest rollouts of each engine.")
]
Cheats = Annotated[int, typer.Option("--cheats", min=8, help="Rollouts of each cheat.")]
Tokens = Annotated[int, typer.Option("--tokens", min=0, help="Longest reply; 0: the run's.")]
Weights = Annotated[
    Path | None,
    typer.Option("--weights", help="Directory with trained safetensors of the run's model."),
]
CrossDtype = Annotated[
    bool, typer.Option("--cross-dtype", help="Look at workers of the other dtype, too.")
]
Quick = Annotated[bool, typer.Option("--quick", help="64 rollouts, 16 of each cheat.")]
Force = Annotated[bool, typer.Option("--force", help="Write bounds that do not separate, too.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


def run(
    ctx: typer.Context,
    out: Out,
    against: Against = [],  # noqa: B006 - typer reads it, nothing writes it
    rollouts: Rollouts = 512,
    cheats: Cheats = 64,
    tokens: Tokens = 0,
    weights: Weights = None,
    cross_dtype: CrossDtype = False,
    quick: Quick = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Measure what honest workers of a run differ by, and write it for verification.calibration.

    Plays the run's own tasks with the run's model and engine, audits them as the trainer would, and
    then cheats; writes nothing if the bounds do not tell cheats from honest workers.

    \b
    Examples:
      primerl-node calibrate @ run.toml --out calibration.json
      primerl-node calibrate @ run.toml --out c.json --against hf --against vllm
      primerl-node train @ run.toml --verification.calibration calibration.json
    """
    from ..node.config.run import RunConfig
    from ..node.verification.calibration import CalibrationRequest

    longest = {"sampling.max-tokens": str(tokens) if tokens else None}
    config = read_config(RunConfig, arguments(ctx, longest))
    if tokens:
        listed = [
            one.model_copy(
                update={"sampling": one.sampling.model_copy(update={"max_tokens": tokens})}
            )
            for one in config.environments
        ]
        config = config.model_copy(update={"environments": listed})
    wanted = CalibrationRequest(
        rollouts=64 if quick else rollouts,
        cheats=16 if quick else cheats,
        engines=tuple(engine.value for engine in against),
        cross_dtype=cross_dtype,
        force=force,
    )
    _check_out(expand_home(out))
    report = run_to_end(_measure(config, wanted, weights))
    _print(report, as_json=as_json)
    if not force:
        report.check()
    _write(report, expand_home(out))


async def _measure(
    config: "RunConfig", wanted: "CalibrationRequest", weights: Path | None
) -> "CalibrationReport":
    from ..node.app import rundir
    from ..node.app.daemon import check_auditor, check_present
    from ..node.app.factories import auditing, sandboxed
    from ..node.environments.environment import EnvironmentFailed
    from ..node.errors import UsageError
    from ..node.models import huggingface, tensors
    from ..node.verification.calibration import Calibrator

    check_auditor(config)
    for engine in wanted.engines or (config.engine.type,):
        check_present(config.engine.model_copy(update={"type": engine}))
    factories = sandboxed(config)
    with tempfile.TemporaryDirectory(prefix="primerl-") as directory:
        model_dir = await rundir.prepare_model(config, Path(directory))
        source = model_dir
        if weights is not None:
            source = huggingface.text_directory(expand_home(weights))
        found = await asyncio.to_thread(huggingface.read_state, source)
        state = tensors.bf16_state((name, tensors.to_torch(one)) for name, one in found.items())
        environments = factories.mixture(config, model_dir)
        try:
            await asyncio.gather(*(one.start() for one in environments))
            return await Calibrator(
                config,
                model_dir,
                state,
                environments,
                factories.auditor(auditing(config), factories.timeouts.audit_s),
                wanted,
                say=lambda line: typer.echo(line, err=True),
                make_engine=factories.engine,
            ).run()
        except EnvironmentFailed as error:
            raise UsageError(f"an environment failed: {error}") from error
        finally:
            for one in environments:
                await one.close()


def _print(report: "CalibrationReport", *, as_json: bool) -> None:
    import msgspec

    from .tables import write

    if as_json:
        values = msgspec.to_builtins(report) | {"inseparable": report.inseparable}
        typer.echo(to_json(values, indent=2))
        return
    for noise in report.noise:
        typer.echo(f"honest rollouts of {noise.engine}: {noise.rollouts}, {noise.tokens} tokens")
        write(_noise_table(report, noise))
    found = report.false_positives
    typer.echo(
        f"errors on {found.rollouts} rollouts that had no part in the bounds: {found.rejected} rejected "
        f"(at most {found.rejected_at_most:.2%}), {found.suspected} suspected "
        f"(at most {found.suspected_at_most:.2%}; 95 %)"
    )
    write(_cheats_table(report))
    apart = ", ".join(f"{cheat} {value:.1f}" for cheat, value in report.d_prime.items())
    typer.echo(f"standard deviations between fingerprints of honest and {apart}")


def _noise_table(report: "CalibrationReport", noise: "EngineNoise") -> "Table":
    from .tables import plain_table

    figures = ("50 %", "90 %", "99 %", "99.9 %", "largest", "suspect", "reject")
    table = plain_table("measure", *figures, right=figures)
    for name, values in noise.quantiles.items():
        bounds = (getattr(report.suspect, name), getattr(report.reject, name))
        table.add_row(name, *(f"{value:.3g}" for value in (*values, *bounds)))
    return table


def _cheats_table(report: "CalibrationReport") -> "Table":
    from .tables import plain_table

    figures = ("rollouts", "rejected", "suspected", "batches of 16 caught", "")
    table = plain_table("cheat", *figures, right=figures)
    for one in report.separation:
        verdict = "" if one.separates else ("NOT SEPARATED" if one.required else "not required")
        counts = (str(one.rollouts), str(one.rejected), str(one.suspected))
        table.add_row(one.name, *counts, f"{one.batches:.1%}", verdict)
    return table


def _check_out(path: Path) -> None:
    """Raise UsageError where --out is a file that no calibration wrote: it would be replaced."""
    from ..node.errors import UsageError
    from ..node.verification.bounds import read_calibration

    if not path.is_file() or not path.stat().st_size:
        return
    try:
        read_calibration(path)
    except UsageError as error:
        raise UsageError(
            f"{path} is there already and is no calibration: remove it, or give another --out"
        ) from error


def _write(report: "CalibrationReport", path: Path) -> None:
    import msgspec

    from ..node.errors import StorageError

    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    encoded = msgspec.json.format(msgspec.json.encode(report.calibration(day)), indent=2)
    try:
        path.write_bytes(encoded + b"\n")
    except OSError as error:
        raise StorageError(f"cannot write {path} ({error}): name another --out") from error
    typer.echo(f"wrote {path}; use it with --verification.calibration {path}", err=True)
