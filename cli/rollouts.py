"""`primerl-node rollouts`: the rollouts that a run kept."""

import sys
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..node.config.paths import expand_home
from .command import AsJson, find_node

if TYPE_CHECKING:
    from ..node.storage.rollouts import KeptRollout, RolloutFiles, RolloutFilter

SHORT = 10
PREVIEW = 60
"""Characters of a reply in the list."""
COLUMN = 36
"""Least width of a completion in --diff."""
RunDir = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN_DIR",
        help="Directory of the run; without it, the run of the trainer on this machine.",
    ),
]


def run(
    run_dir: RunDir = None,
    step: Annotated[
        str, typer.Option("--step", "-s", metavar="N|A-B", help="Only of this step, or of these.")
    ] = "",
    worker: Annotated[
        str, typer.Option("--worker", help="Only of this worker: its node id, or the first digits.")
    ] = "",
    environment: Annotated[
        str, typer.Option("--environment", help="Only of the environment with this id.")
    ] = "",
    verdict: Annotated[
        str,
        typer.Option(
            "--verdict", help="Only trained, unused (accepted, but not trained) or rejected ones."
        ),
    ] = "",
    reason: Annotated[
        str,
        typer.Option(
            "--reason",
            help="Only those not trained for this reason: bad_reward, stale, too_few ...",
        ),
    ] = "",
    reward_min: Annotated[float | None, typer.Option("--reward-min", help="Lowest reward.")] = None,
    reward_max: Annotated[
        float | None, typer.Option("--reward-max", help="Highest reward.")
    ] = None,
    last: Annotated[int, typer.Option("--last", min=1, help="List this many of the newest.")] = 40,
    show: Annotated[
        str,
        typer.Option(
            "--show",
            metavar="STEP/GROUP/ROLLOUT",
            help="Show one as the model saw it, with all tokens.",
        ),
    ] = "",
    diff: Annotated[
        str,
        typer.Option(
            "--diff",
            metavar="STEP/GROUP",
            help="Show the completions of a group beside each other.",
        ),
    ] = "",
    export: Annotated[
        str,
        typer.Option(
            "--export",
            metavar="FILE",
            help="Write the rollouts found to a file as JSON lines; - prints them.",
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Read the rollouts that a run kept: list them, show one, compare a group, export.

    A run keeps the rollouts of its newest steps in RUN_DIR/rollouts (rollouts.keep): trained ones with
    advantages, accepted ones that were not trained, and rejected ones, each with its reason. The reward
    of a rejected one is its worker's claim.

    \b
    Examples:
      primerl-node rollouts outputs/demo --step 152 --reward-max 0.2
      primerl-node rollouts outputs/demo --verdict rejected
      primerl-node rollouts outputs/demo --show 152/0/3
      primerl-node rollouts outputs/demo --diff 152/0
      primerl-node rollouts outputs/demo --step 150-160 --export samples.jsonl
    """
    import math

    from ..node.errors import UsageError
    from ..node.storage.rollouts import RolloutFilter

    if sum(map(bool, (show, diff, export))) > 1:
        raise UsageError("give one of --show, --diff and --export")
    files = open_files(run_dir)
    low = -math.inf if reward_min is None else reward_min
    high = math.inf if reward_max is None else reward_max
    wanted = RolloutFilter(_steps(step), worker.lower(), environment, verdict, reason, (low, high))
    if export:
        _export(files, wanted, export)
    elif show:
        _show(_found(files, show, 3), as_json=as_json)
    elif diff:
        _diff(_mates(files, diff), as_json=as_json)
    else:
        _list(files, wanted, last, as_json=as_json)


def open_files(run_dir: Path | None) -> "RolloutFiles":
    """Find the rollouts of a run. Raises UsageError where there are none."""
    from ..node.errors import NetworkError, UsageError
    from ..node.storage.rollouts import RolloutFiles
    from ..node.storage.run_files import ROLLOUTS

    try:
        directory = expand_home(run_dir) if run_dir is not None else find_node(None).parent
    except NetworkError as error:
        raise UsageError(
            "no trainer runs here: give the directory of a run, outputs/NAME"
        ) from error
    files = RolloutFiles(directory / ROLLOUTS)
    if not files.steps():
        raise UsageError(
            f"{directory} holds no rollouts: name the directory of a run (outputs/NAME) that has done a step "
            "with rollouts.keep.share above 0"
        )
    return files


def _steps(text: str) -> tuple[int, int] | None:
    """Read "12" or "10-20". Raises UsageError."""
    from ..node.errors import UsageError

    first, dash, end = text.partition("-")
    try:
        return (int(first), int(end if dash else first)) if text else None
    except ValueError as error:
        raise UsageError(f"--step is a number or two, as in 12 or 10-20, not {text!r}") from error


def _place(text: str, parts: int) -> list[int]:
    """Read STEP/GROUP or STEP/GROUP/ROLLOUT. Raises UsageError."""
    from ..node.errors import UsageError

    numbers = text.split("/")
    if len(numbers) != parts or not all(number.isdecimal() for number in numbers):
        form = "/".join(("STEP", "GROUP", "ROLLOUT")[:parts])
        raise UsageError(f"{text!r} is no {form}: the list shows them")
    return [int(number) for number in numbers]


def _found(files: "RolloutFiles", text: str, parts: int) -> "list[KeptRollout]":
    """Read the rollouts at a place. Raises UsageError, StorageError."""
    from ..node.errors import UsageError
    from ..node.storage.rollouts import RolloutFilter

    step, group, *rest = _place(text, parts)
    files.record(step)
    place = RolloutFilter((step, step), group=group, rollout=rest[0] if rest else None)
    rollouts = list(files.select(place))
    if not rollouts:
        raise UsageError(f"nothing is kept at {text}: list the kept ones with --step {step}")
    return rollouts


def _mates(files: "RolloutFiles", text: str) -> "list[KeptRollout]":
    """Read a group, with those of its rollouts that were rejected, or are in the file of another step."""
    from ..node.storage.rollouts import BRIEF, RolloutFilter

    group = _found(files, text, 2)
    lease, task = group[0].lease, group[0].task
    mates = [
        (rollout.step, rollout.group)
        for rollout in files.select(RolloutFilter(), BRIEF)
        if (rollout.lease, rollout.task) == (lease, task)
        and (rollout.step, rollout.group) != (group[0].step, group[0].group)
    ]
    for step, number in dict.fromkeys(mates):
        group += _found(files, f"{step}/{number}", 2)
    return group


def visible(text: str) -> str:
    """Escape everything but text, line ends and tabs: a reply may hold terminal control sequences."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text
    )


# -- output ----------------------------------------------------------------------------------------


def _list(files: "RolloutFiles", wanted: "RolloutFilter", last: int, *, as_json: bool) -> None:

    from ..node.storage.rollouts import BRIEF
    from .tables import NONE, fitted, write

    rollouts: list[KeptRollout] = []
    left = 0
    for step in reversed(files.steps()):
        if not wanted.takes_step(step):
            continue
        some = [
            rollout for rollout in files.read(step, (*BRIEF, "completion")) if wanted.takes(rollout)
        ]
        left += max(0, len(rollouts) + len(some) - last)
        rollouts = [*some, *rollouts][-last:]
        if len(rollouts) == last and left:
            break
    if as_json:
        _print_json(rollouts, ("completion",))
        return
    if not rollouts:
        steps = files.steps()
        kept = f" in steps {steps[0]} to {steps[-1]}, which are kept" if steps else ""
        write(f"no rollout is like that{kept}")
        return
    names = "ROLLOUT VERDICT REASON REWARD ADVANTAGE VERSIONS WORKER ENVIRONMENT REPLY".split()
    rows: list[Sequence[str]] = []
    for rollout in rollouts:
        first, newest = rollout.policy_first, rollout.policy_last
        cells = (
            rollout.place if not rollout.branch else f"{rollout.place}.{rollout.branch}",
            rollout.verdict,
            rollout.reason or NONE,
            f"{rollout.reward:.3g}",
            NONE if rollout.advantage is None else f"{rollout.advantage:+.3g}",
            str(first) if first == newest else f"{first}-{newest}",
            rollout.worker[:SHORT],
            rollout.environment,
            repr(rollout.completion[:PREVIEW]),
        )
        rows.append(cells)
    right = ("REWARD", "ADVANTAGE", "VERSIONS")
    drop = ("WORKER", "ENVIRONMENT", "VERSIONS", "ADVANTAGE")
    write(fitted(names, rows, right=right, elastic=("REPLY",), drop=drop))
    if left:
        write(f"and older ones: --last {2 * last}, or --step, show more")


def _show(branches: "Sequence[KeptRollout]", *, as_json: bool) -> None:
    from rich.console import Group
    from rich.text import Text

    from .tables import label_table, write

    if as_json:
        _print_json(branches, None)
        return
    plain = not sys.stdout.isatty()
    parts: list[Any] = []
    for branch in branches:
        body = Text()
        for text, trained in branch.parts():
            shown = visible(text)
            marked = f">>>{shown}<<<" if trained and plain else shown
            body.append(marked, style="bold green" if trained else "")
        parts += [label_table(_facts(branch)), "", body, ""]
    how = "between >>> and <<<" if plain else "bold and green"
    verb = "is trained" if branches[0].verdict == "trained" else "was drawn by the model"
    write(Group(*parts, Text(f"What {verb} is {how}.", style="dim")))


def _facts(rollout: "KeptRollout") -> list[tuple[str, str]]:
    tokens = sum(rollout.completion_mask)
    why = f": {rollout.reason}" if rollout.reason else ""
    why += f", {visible(rollout.detail)}" if rollout.detail else ""
    advantage = "" if rollout.advantage is None else f", advantage {rollout.advantage:+.6g}"
    claimed = " (claimed by its worker)" if rollout.verdict == "rejected" else ""
    sampled = [
        logprob
        for logprob, own in zip(rollout.completion_logprobs, rollout.completion_mask, strict=True)
        if own
    ]
    agent = f", agent {rollout.agent}" if rollout.agent else ""
    mean = f", mean logprob {sum(sampled) / tokens:.4g}" if tokens else ""
    return [
        ("rollout", f"{rollout.place}, branch {rollout.branch}, task {rollout.task[:SHORT]}"),
        ("verdict", f"{rollout.verdict}{why}"),
        ("reward", f"{rollout.reward:.6g}{claimed}{advantage}"),
        (
            "made by",
            f"worker {rollout.worker[:SHORT]}, lease {rollout.lease}, environment {rollout.environment}{agent}",
        ),
        ("policies", f"{rollout.policy_first} to {rollout.policy_last}"),
        (
            "tokens",
            f"{len(rollout.prompt_ids)} + {len(rollout.completion_ids)}, {tokens} drawn{mean}",
        ),
    ]


def _diff(group: "Sequence[KeptRollout]", *, as_json: bool) -> None:
    """Draw the completions in columns, as many as fit; their common beginning is dim."""
    from rich.table import Table
    from rich.text import Text

    from .tables import console

    if as_json:
        _print_json(group, None)
        return
    screen = console()
    replies = [visible(rollout.completion) for rollout in group]
    pairs = zip(min(replies), max(replies), strict=False)
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    screen.print(Text(visible(group[0].prompt), style="dim"), "")
    at_once = max(1, screen.width // COLUMN)
    for start in range(0, len(group), at_once):
        some = group[start : start + at_once]
        table = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0))
        for rollout in some:
            gain = "" if rollout.advantage is None else f" ({rollout.advantage:+.3g})"
            outcome = rollout.reason if rollout.verdict != "trained" else ""
            head = f"{rollout.place}  {rollout.reward:.3g}{gain}  {outcome}"
            table.add_column(Text(head.strip()), overflow="fold", width=screen.width // at_once - 2)
        cells = [Text(reply) for reply in replies[start : start + at_once]]
        for cell in cells:
            cell.stylize("dim", 0, same)
        table.add_row(*cells)
        screen.print(table)


def _export(files: "RolloutFiles", wanted: "RolloutFilter", target: str) -> None:
    """Write JSON lines. Raises StorageError."""
    from ..node.errors import UsageError, file_error
    from ..node.storage.rollouts import as_json

    lines = (as_json(rollout) + b"\n" for rollout in files.select(wanted))
    if target == "-":
        sys.stdout.buffer.writelines(lines)
        sys.stdout.flush()
        return
    if expand_home(target).is_file():
        raise UsageError(f"{target} is there already: remove it, or give another --export")
    count = 0
    try:
        with expand_home(target).open("wb") as file:
            for line in lines:
                file.write(line)
                count += 1
    except OSError as error:
        raise file_error(error, Path(target)) from error
    typer.echo(f"{count} rollouts are in {target}")


def _print_json(rollouts: "Iterable[KeptRollout]", texts: Sequence[str] | None) -> None:
    """Print an array; `texts` are the columns beside the small ones, None: all."""
    import msgspec

    from ..node.storage.rollouts import BRIEF, COLUMNS

    names = COLUMNS if texts is None else (*BRIEF, *texts)
    rows = [{name: getattr(rollout, name) for name in names} for rollout in rollouts]
    typer.echo(msgspec.json.format(msgspec.json.encode({"rollouts": rows})).decode())
