"""Name the files that a run leaves in its directory, and remove them for `--clean`.

Invariants: a run begins only in a directory that is its own or holds nothing by a name that a run writes;
`--clean` removes only files of these names, in a directory that carries the mark of a run, and nothing while a
node runs in it.
"""

import fcntl
import json
import logging
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from ..errors import BusyError, StorageError, UsageError, file_error
from ..process.unix_sockets import answers
from ..removal import remove_tree, some
from .partial import whole_file

logger = logging.getLogger(__name__)

TICKET, SUMMARY, PICTURE, METRICS, LOGS = (
    "ticket.txt",
    "summary.json",
    "reward.png",
    "metrics.jsonl",
    "logs",
)
CHECKPOINTS = "checkpoints"
ROLLOUTS = "rollouts"
EVALUATIONS = "evaluations.jsonl"
CONFIG = "config.json"
MARK = ".primerl-run"
"""File that a run writes into its directory before anything else."""
MARK_TEXT = "primerl-node wrote the files of a run here; --clean removes those, and nothing else.\n"
COPY_MARK = ".primerl-copy"
"""File in a standby's copy of a run: its trainer may have published versions since, which nobody here knows."""
BEGUN = re.compile(r"begun (\d{4}-\d\d-\d\d)")
CONTROL_SOCKET = "control.sock"
IN_CONFIG = {"name", "output_dir", "seed"}
"""Keys that every config.json of a run has: the mark of directories from before there was one."""
MAX_CONFIG = 1 << 20
"""Most bytes of a config.json that is looked into."""
WORKER = re.compile(r"worker_\d+")
SETTINGS = "join.toml"
"""What `rl` writes into the data directory of each worker that it starts."""

# -- what a run writes: regular expressions of paths below its directory, compiled when used ------

_STEP = r"step_\d+(\.partial|\.replaced)?"
_CHECKPOINT = (
    r"(COMPLETE|parts/[a-z0-9][a-z0-9_.-]{0,63}|backend(\.partial)?/[\w.-]+\.(json|safetensors))"
)
_MODEL = (
    r"((config|generation_config|tokenizer[^/]*|special_tokens_map|added_tokens|vocab|adapter_config)\.json"
    r"|tokenizer\.model|chat_template[^/]*|(vocab|merges)\.txt|spiece\.model|[^/]+\.tiktoken"
    r"|(adapter_)?model[\w-]*\.safetensors(\.index\.json)?)"
)
_LOG = r"logs/(\w+\.(log|jsonl)(\.\d+)?|\.\w+\.log\.partial)"
_DATABASE = r"(-wal|-shm|-journal)?"
_WANDB = r"wandb/.+"
_CHUNKS = r"chunks/([0-9a-f]{2}/[0-9a-f]{2}/([0-9a-f]{64}|\.tmp-[0-9a-f]{16})|\.tmp-[0-9a-f]{16})"
_LEDGER = rf"ledger\.(db{_DATABASE}|lock)"
_BACKUP = (
    r"\.primerl-(run|copy)|config\.json|metrics\.jsonl|evaluations\.jsonl|trainer/ledger\.db"
    rf"|model/{_MODEL}|checkpoints/(step_\d+/{_CHECKPOINT}|step_\d+\.resume)|trainer/{_CHUNKS}"
)
_NODE = "|".join(
    (
        r"key\.pem|control\.sock|stage\.sock|\.?(allowed_environments|last_status|limits)\.json(\.partial)?",
        rf"\.?join\.toml(\.partial)?|{_LEDGER}|{_CHUNKS}|model/\.?{_MODEL}(\.partial)?|{_LOG}|{_WANDB}",
        rf"runs/[0-9a-f]{{16}}/({_LEDGER}|{_CHUNKS}|[\w.-]+/.+|[\w.-]+\.(json|sock))",
    )
)
_RUN = "|".join(
    (
        r"\.?(config\.json|ticket\.txt|metrics\.jsonl|summary\.json|evaluations\.jsonl)(\.partial)?",
        rf"\.primerl-copy|reward\.png|\.reward\.png\.tmp|judge\.db{_DATABASE}|{_LOG}|{_WANDB}",
        rf"checkpoints/(void_\d+/)?{_STEP}/{_CHECKPOINT}",
        r"checkpoints/(\.?step_\d+\.resume(\.partial)?|(policy|masters)\.safetensors)",
        rf"weights/{_STEP}/(merged(\.partial)?/)?{_MODEL}",
        rf"model/\.?{_MODEL}(\.partial)?",
        r"rollouts/(step_\d{6,}\.parquet|\.step_\d{6,}\.parquet\.partial)",
        r"data/.+",
        rf"(trainer|worker_\d+)/({_NODE})|trainer/backup/\d+/({_BACKUP})",
    )
)
_FETCHED = rf"{_CHUNKS}|model/\.?{_MODEL}(\.partial)?"
_WEIGHTS = rf"(merged(\.partial)?/)?{_MODEL}"
_FOLDERS = {
    LOGS,
    CHECKPOINTS,
    ROLLOUTS,
    "weights",
    "model",
    "data",
    "trainer",
    "wandb",
}
_FILES = {CONFIG, TICKET, METRICS, SUMMARY, PICTURE, "evaluations.jsonl", "judge.db"}


def written_by_run(path: str) -> bool:
    """Return whether a run writes this file, a path below its directory; of a folder: "/" at its end."""
    if path.endswith("/"):
        return _is_folder(path.partition("/")[0])
    return re.fullmatch(_RUN, path) is not None


def is_copy(run_dir: Path) -> bool:
    """Return whether `run_dir` is a standby's copy of a run that has not gone on from it yet."""
    return (run_dir / COPY_MARK).exists()


def backed_up(path: str) -> bool:
    """Return whether a standby copies this file of a run, a path below its directory; of a folder: "/" at its
    end.
    """
    if path.endswith("/"):
        return _is_folder(path.partition("/")[0])
    return re.fullmatch(_BACKUP, path) is not None


def written_to_checkpoint(path: str) -> bool:
    """Return whether a checkpoint has this file, a path below its directory; of a folder: "/" at its end."""
    return path in ("parts/", "backend/", "backend.partial/") or bool(
        re.fullmatch(_CHECKPOINT, path)
    )


def written_by_learner(path: str) -> bool:
    """Return whether the backend's part of a checkpoint has this file, a path below it."""
    return written_to_checkpoint(f"backend/{path}")


def written_to_model(path: str) -> bool:
    """Return whether exported weights have this file, as written_to_checkpoint()."""
    return path in ("merged/", "merged.partial/") or bool(re.fullmatch(_WEIGHTS, path))


def fetched_for_run(path: str) -> bool:
    """Return whether a node that joined a run fetched this file, a path below runs/ID, and can do so again."""
    folder = path.partition("/")[0] in ("chunks", "model")
    return folder if path.endswith("/") else bool(re.fullmatch(_FETCHED, path))


def _is_folder(name: str) -> bool:
    return name in _FOLDERS or WORKER.fullmatch(name) is not None


def holds_run(directory: Path) -> bool:
    """Return whether a run was begun in `directory`, so that --resume may go on with it."""
    return any((directory / name).exists() for name in ("trainer/ledger.db", METRICS, CHECKPOINTS))


def resume_hint(directory: Path) -> str:
    """Say how to go on with a run that was stopped in `directory`."""
    if any((directory / CHECKPOINTS).glob("step_*")):
        return f"stopped; go on with --resume: {directory}"
    return f"stopped before the first version; --resume begins the warm-up again: {directory}"


def write(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Replace the file at `path` by one that holds `text`, whole or not at all. Raises StorageError."""
    with whole_file(path) as partial:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)


def write_private(path: Path, text: str) -> None:
    """Write a file, as write(), that only its owner can read."""
    write(path, text, mode=0o600)


def weights_dir(run_dir: Path, step: int) -> Path:
    """Return the directory of a step's exported weights."""
    return run_dir / "weights" / f"step_{step}"


def make_directory(path: Path) -> None:
    """Make a directory, where it is not there yet. Raises StorageError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise file_error(error, path) from error


def check_kinds(run_dir: Path) -> None:
    """Raise StorageError where a directory lies in the place of a run's file, or a file in that of a directory.

    Some of them are written only when a run has worked for hours.
    """
    for name in (CONFIG, TICKET, METRICS, SUMMARY):
        if (run_dir / name).is_dir():
            raise StorageError(
                f"{run_dir / name} is a directory, and a file has to be written there: move it away"
            )
    for path in (
        run_dir,
        *(run_dir / name for name in (LOGS, CHECKPOINTS, ROLLOUTS, "trainer", "weights")),
    ):
        if (path.exists() or path.is_symlink()) and not path.is_dir():
            raise StorageError(
                f"{path} is no directory, and one has to be made there: move it away"
            )


@contextmanager
def held(run_dir: Path) -> Generator[None]:
    """Hold the lock of a run's directory, from before it is made or emptied until the end.

    Raises BusyError, StorageError. The lock is a file beside the directory, which --clean removes; the system
    lets go of it when its holder dies.
    """
    whole = run_dir.resolve()  # by whichever links it is named
    path = whole.parent / f".{whole.name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("a")
    except OSError as error:
        raise StorageError(f"cannot write {error.filename}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BusyError(
                f"another `primerl-node` works in {run_dir}: wait for it, or choose another --name"
            ) from error
        yield


def is_run(run_dir: Path) -> bool:
    """Return whether a directory carries the mark of a run, or the config.json of one from before the mark."""
    mark = run_dir / MARK
    if mark.is_file() and not mark.is_symlink():
        return True
    try:
        with (run_dir / CONFIG).open("rb") as file:
            content: Any = json.loads(file.read(MAX_CONFIG))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and cast("dict[str, Any]", content).keys() >= IN_CONFIG


def claim(run_dir: Path, *, goes_on: bool = False) -> None:
    """Make a run's directory and mark it, before anything is written there.

    Raises UsageError where it is none of a run and holds something by a name that a run writes: that would be
    overwritten, or removed by --clean one day. With `goes_on` its owner says that a run is there. Raises
    StorageError.
    """
    make_directory(run_dir)
    if not goes_on and not is_run(run_dir):
        names = sorted(path.name for path in run_dir.iterdir())
        foreign = [name for name in names if name in _FILES or _is_folder(name)]
        if foreign:
            raise UsageError(
                f"{run_dir} is no directory of a run (it has no {MARK}) and holds {some(foreign)}, which a run "
                "would write over: move that away, or choose another --name or --output-dir"
            )
    if not (run_dir / MARK).is_file():
        _mark(run_dir)


def _mark(run_dir: Path) -> None:
    write(run_dir / MARK, f"{MARK_TEXT}begun {today()}\n")


def today() -> str:
    """Return the date of today in UTC, as 2026-11-29."""
    return datetime.now(UTC).date().isoformat()


def begun_on(run_dir: Path) -> str:
    """Return the date on which the run of a directory began, as 2026-11-29: it is written in its mark.

    Today's where there is none. Raises StorageError.
    """
    try:
        text = (run_dir / MARK).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return today()
    except OSError as error:
        raise file_error(error, run_dir / MARK) from error
    begun = BEGUN.search(text)
    if begun is None:
        logger.warning("%s is damaged: the day on which the run began is today", run_dir / MARK)
    return begun[1] if begun else today()


def clean(run_dir: Path) -> None:
    """Remove the files of an earlier run; what a run does not write stays, and a warning names it.

    Raises:
        UsageError: the directory holds things, but no run; or a link is where a run has a directory.
        BusyError: a node runs in it.
        StorageError: it cannot be removed.
    """
    if not os.path.lexists(run_dir):
        return
    if run_dir.is_symlink() or not run_dir.is_dir():
        raise UsageError(
            f"{run_dir} is a link or no directory, and --clean follows none: choose another --name or "
            "--output-dir"
        )
    names = [path.name for path in run_dir.iterdir()]
    if not names:
        return
    if not is_run(run_dir):
        raise UsageError(
            f"{run_dir} holds no run (no {MARK}, no config.json of one), so --clean does not empty it: choose "
            "another --name"
        )
    check_free(run_dir)
    links = [name for name in names if _is_folder(name) and (run_dir / name).is_symlink()]
    if links:
        raise UsageError(
            f"{some(links)} in {run_dir} is a link, and --clean follows none: remove the link yourself"
        )
    foreign = [
        name for name in names if WORKER.fullmatch(name) and not _is_own_worker(run_dir / name)
    ]

    def known(path: str) -> bool:
        return path.partition("/")[0] not in foreign and written_by_run(path)

    try:
        if not (run_dir / MARK).is_file():
            _mark(run_dir)  # so that it is still known if this is interrupted
        stays = remove_tree(run_dir, known, keep_root=True)
        _mark(run_dir)
    except OSError as error:
        raise StorageError(f"cannot remove {error.filename}: {error.strerror}") from error
    if others := [path for path in stays if path != MARK]:
        logger.warning("--clean left what no run writes in %s: %s", run_dir, some(others))


def _is_own_worker(data_dir: Path) -> bool:
    """Return whether `rl` started a worker there; other nodes' data and keys may have such a name, too."""
    return (data_dir / SETTINGS).is_file()


def socket_path(data_dir: Path) -> Path:
    """Return the path of a data directory's control socket."""
    return data_dir / CONTROL_SOCKET


def check_free(run_dir: Path) -> None:
    """Check that no node answers in a run's directory or right below it. Raises BusyError."""
    for data_dir in (run_dir, *run_dir.iterdir()):
        if answers(socket_path(data_dir)):
            raise BusyError(
                f"a node still runs in {data_dir}: `primerl-node stop --data-dir {data_dir}` ends it"
            )
