"""Judge what was seen of a run from outside: can this machine work for it, and what does that cost?

Every figure is computed from one that was measured or signed; where one is missing the result says so.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...protocol.manifests import EnvironmentContract
from ..config.run import FINGERPRINT, EngineConfig
from ..environments.allowed import find_package
from ..errors import EngineError, NetworkError, NodeError, TicketError, UsageError
from ..memory_plan.memory import Device, EngineMemory, plan_engine, tensor_parallel_on
from ..memory_plan.shape import read_shape
from ..models.architectures import text_config
from ..reports.doctor import MachineCheck
from .reach import TOKEN_BYTES, Outside, Reach, Speed

HOURS = 24


@dataclass(frozen=True)
class Outlook:
    """Checks of a run, and what work for it takes. Figures that are not known are None."""

    reach: Reach
    checks: Sequence[MachineCheck]
    memory: EngineMemory | None
    tokens_per_s: float | None
    """Of the last work of a node in this data directory."""
    rollouts_per_hour: float | None
    """At that pace, of the length that is usual in the run, or the longest where that is not known; without a
    pace, that of the median worker of the run."""
    link_rollouts_per_hour: float | None
    """Longest rollouts that the way to the trainer carries, at least."""
    down_bytes_per_day: float | None
    """Weights, for a worker that fetches every version."""
    up_bytes_per_day: float | None
    """Generated tokens of these rollouts, at most; prompts and chunks for other workers come on top."""
    exit_code: int
    """0 if this machine can work for the run, by all that is known; else as of the command that would fail."""

    def figures(self) -> dict[str, Any]:
        """Return all of it in plain types."""
        reach = asdict(self.reach)
        for name in ("download", "upload"):
            speed: Speed | None = getattr(self.reach, name)
            reach[f"{name}_bytes_per_s"] = speed.per_second if speed else None
        memory = None
        if self.memory is not None:
            memory = {"fits": self.memory.fits, "sequences_at_once": self.memory.at_once}
        return {
            "can_work": self.exit_code == 0,
            **reach,
            "memory": memory,
            "tokens_per_s": self.tokens_per_s,
            "rollouts_per_hour": self.rollouts_per_hour,
            "link_rollouts_per_hour": self.link_rollouts_per_hour,
            "down_bytes_per_day": self.down_bytes_per_day,
            "up_bytes_per_day": self.up_bytes_per_day,
            "checks": [asdict(check) for check in self.checks],
        }


def judge(
    outside: Outside,
    engine: EngineConfig,
    device: Device,
    gpus: int,
    tokens_per_s: float | None = None,
) -> Outlook:
    """Judge a look at a run; the worker would run `engine` on `gpus` devices like `device`."""
    reach, run = outside.reach, outside.manifest
    memory, memory_check = _plan(outside, engine, device, gpus)
    own = list(_environments(run.environments)) if run is not None else []
    checks = [*_ways(reach), *own, memory_check]
    up = reach.upload.per_second if reach.upload else None
    rollouts, link = reach.worker_rollouts_per_hour, None
    length = reach.rollout_tokens
    if run is not None and length is None:
        longest = max(environment.sampling.max_tokens for environment in run.environments)
        length = min(longest, run.limits.max_model_len)
    if tokens_per_s is not None:
        rollouts = tokens_per_s * 3600 / length if length else None
    if up is not None and reach.rollout_bytes:
        link = up * 3600 / reach.rollout_bytes
    down = None
    if reach.versions_per_hour is not None and reach.version_bytes is not None:
        down = HOURS * reach.versions_per_hour * reach.version_bytes
    sent = None
    if rollouts is not None and length:
        sent = HOURS * rollouts * length * TOKEN_BYTES
    return Outlook(
        reach,
        checks,
        memory,
        tokens_per_s,
        rollouts,
        link,
        down,
        sent,
        _exit_code(reach, checks),
    )


def _exit_code(reach: Reach, checks: Sequence[MachineCheck]) -> int:
    if reach.may_join is False:
        return TicketError.exit_code
    if not reach.udp.answers or reach.busy:
        return NetworkError.exit_code
    return NodeError.exit_code if any(check.state == "problem" for check in checks) else 0


def _ways(reach: Reach) -> Iterator[MachineCheck]:
    """Check the ticket, the ways to the trainer, and the clock."""
    admits = "problem" if reach.may_join is False else "ok" if reach.may_join else "warning"
    ask = "ask the trainer's operator for another" if reach.may_join is False else ""
    yield MachineCheck("ticket", admits, reach.ticket, ask)
    if reach.udp.answers:
        how = "over a relay" if reach.path == "relayed" else "directly"
        rest = f"; then: {reach.udp.why}" if reach.udp.why else ""
        text = f"the trainer answers in {reach.udp.rtt_ms or 0:.1f} ms, {how}{rest}"
        yield MachineCheck("UDP", "warning" if rest else "ok", text)
    else:
        advice = (
            "is it running? Leases need UDP: open it outwards, or ask its operator for a relay and name that "
            "in --network.relay-urls"
        )
        yield MachineCheck("UDP", "problem", f"no answer: {reach.udp.why}", advice)
    if reach.tcp.answers:
        text = f"the trainer answers in {reach.tcp.rtt_ms or 0:.1f} ms"
        yield MachineCheck("TCP", "ok", text)
    else:
        yield MachineCheck("TCP", "warning", reach.tcp.why, "only chunks go over TCP, if UDP fails")
    if not reach.udp.answers:
        return
    yield MachineCheck("seen from", "ok", reach.seen_from or "not known")
    yield MachineCheck("NAT", "ok", reach.nat)
    yield _relay(reach)
    size = f"packets of {reach.mtu} bytes" if reach.mtu else "not known"
    yield MachineCheck("path MTU", "ok", size)
    yield _clock(reach)
    yield MachineCheck(
        "speed", "ok", f"down {_speed(reach.download)}, up at least {_speed(reach.upload)}"
    )


def _relay(reach: Reach) -> MachineCheck:
    if not reach.relays:
        return MachineCheck("relay", "ok", "none is configured")
    if reach.relay:
        return MachineCheck("relay", "ok", f"{reach.relay} answers")
    advice = "check network.relay_urls: a node that is reached only by a relay is not reached"
    return MachineCheck("relay", "warning", "none of those configured answers", advice)


def _clock(reach: Reach) -> MachineCheck:
    ahead, limit = reach.clock_ahead_s, reach.clock_limit_s
    if ahead is None:
        return MachineCheck("clock", "warning", "that of the trainer is not known")
    side = "ahead of" if ahead >= 0 else "behind"
    text = f"{abs(ahead)} s {side} the trainer's, {limit} s are allowed"
    if abs(ahead) > limit:
        return MachineCheck(
            "clock", "problem", text, "set the clock of this machine, or tell the operator"
        )
    return MachineCheck("clock", "ok", text)


def _speed(speed: Speed | None) -> str:
    if speed is None:
        return "not measured"
    return (
        f"{speed.per_second / 1e6:.2f} MB/s ({speed.nbytes / 1e6:.1f} MB in {speed.seconds:.2f} s)"
    )


def _environments(environments: Sequence[EnvironmentContract]) -> Iterator[MachineCheck]:
    """Check that a worker here could play one environment of the run, at least; code is not run."""
    playable = 0
    missing: list[MachineCheck] = []
    for environment in environments:
        name = f"environment {environment.name}"
        try:
            package = find_package(environment.id)
        except UsageError as error:
            missing.append(MachineCheck(name, "warning", "not installed", str(error)))
            continue
        if package is not None and package.digest != environment.package_digest:
            text = f"{package}, the run has {environment.package or 'another'}"
            missing.append(MachineCheck(name, "warning", text, "install the release of the run"))
            continue
        playable += 1
        allow = f"join it with --allow-environment {environment.id}"
        bundled = package is None or package.bundled
        yield MachineCheck(
            name, "ok", "bundled" if bundled else str(package), "" if bundled else allow
        )
    for check in missing:
        state = "warning" if playable else "problem"
        yield MachineCheck(check.name, state, check.found, check.advice)


def _plan(
    outside: Outside, engine: EngineConfig, device: Device, gpus: int
) -> tuple[EngineMemory | None, MachineCheck]:
    """Plan the memory of a worker of the run."""
    run, model = outside.manifest, outside.model
    if run is None or model is None:
        return None, MachineCheck("memory", "warning", "not planned: the model is not known")
    changes = {
        "dtype": run.proofs.dtype,
        "quantization": run.proofs.quantization,
        "max_model_len": run.limits.max_model_len,
        "tp": tensor_parallel_on(engine, gpus if device.kind == "cuda" else 1),
    }
    try:
        shape = read_shape(text_config(model))
        memory = plan_engine(
            engine.model_copy(update=changes), shape, device, fingerprint=FINGERPRINT
        )
    except EngineError as error:
        return None, MachineCheck("memory", "warning", f"not planned: {error}")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # it is the run's
        text = "not planned: the model's config.json makes no sense"
        return None, MachineCheck("memory", "warning", text)
    text = f"{engine.type} on the {'GPU' if device.kind == 'cuda' else 'CPU'}: {memory.verdict}"
    if memory.fits:
        return memory, MachineCheck("memory", "ok", text)
    advice = "more memory, another --engine, or together with other nodes (docs/pipeline.md)"
    return memory, MachineCheck("memory", "problem", text, advice)


def sentences(outlook: Outlook) -> Iterator[str]:
    """Say whether this machine can work for the run, how much, and what traffic that is."""
    reach = outlook.reach
    problems = [check for check in outlook.checks if check.state == "problem"]
    if outlook.exit_code:
        why = "; ".join(f"{check.name}: {check.found}" for check in problems) or reach.ticket
        yield f"You cannot work for this run as it is: {why}."
    else:
        known = "" if reach.may_join else ", as far as can be told from here"
        yield f"You can work for this run{f' ({reach.run_name})' if reach.run_name else ''}{known}."
    yield _rollouts(outlook)
    if outlook.link_rollouts_per_hour is not None:
        yield f"The way up carries at least {outlook.link_rollouts_per_hour:,.0f} of the longest an hour."
    if reach.first_bytes is not None:
        yield f"To begin: {_size(reach.first_bytes)} to fetch{_takes(reach)}."
    if outlook.down_bytes_per_day is not None:
        yield (
            f"Down: about {_size(outlook.down_bytes_per_day)} a day, for {reach.versions_per_hour:,.1f} "
            f"versions an hour of {_size(reach.version_bytes or 0)} each, from the trainer and other workers."
        )
    else:
        yield "Down, a day: not known, as the run has published too few versions."
    if outlook.up_bytes_per_day is not None:
        yield (
            f"Up: at most {_size(outlook.up_bytes_per_day)} a day for the replies at that pace; prompts and "
            "chunks for other workers come on top."
        )
    elif reach.rollout_bytes is not None:
        yield (
            f"Up: at most {_size(reach.rollout_bytes)} a rollout, and chunks for other workers "
            "(limits.upload bounds both)."
        )


def _rollouts(outlook: Outlook) -> str:
    """Say how many rollouts an hour to expect, and from what that is known; or why it is not."""
    reach, hourly, pace = outlook.reach, outlook.rollouts_per_hour, outlook.tokens_per_s
    length = reach.rollout_tokens
    if hourly is not None and pace is not None:
        of = "of the longest replies; more where they are shorter"
        of = f"of {length:,.0f} tokens each, as the run's are lately" if length else of
        return f"Rollouts: about {hourly:,.0f} an hour at the {pace:,.0f} tokens/s of the last work here, {of}."
    if hourly is not None:
        who = f"the {reach.workers} workers" if reach.workers != 1 else "the one worker"
        of = f", of {length:,.0f} tokens each" if length else ""
        return (
            f"Rollouts: about {hourly:,.0f} an hour{of}, if this machine is as fast as {who} of the run (their "
            "median); its own speed is measured by its first leases."
        )
    if reach.workers == 0:
        return (
            "Rollouts an hour: not known, as nobody works for the run now, and no work was done in this data "
            "directory; the first leases measure it."
        )
    return "Rollouts an hour: not known, as the trainer does not say how fast its workers are."


def _takes(reach: Reach) -> str:
    if reach.download is None or reach.first_bytes is None:
        return ""
    return f", {reach.first_bytes / reach.download.per_second:,.0f} s at this speed"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
