"""The launcher with small programs in the place of nodes: what is real here is the processes."""

import asyncio
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from primerl.node.app.daemon import load_key
from primerl.node.config.loader import load
from primerl.node.config.run import (
    EngineConfig,
    EnvironmentConfig,
    LaunchConfig,
    ModelConfig,
    ResumeConfig,
    RunConfig,
    TrainingConfig,
    VerificationConfig,
)
from primerl.node.errors import BusyError, EngineError, NodeError, StorageError, UsageError
from primerl.node.launch.launcher import (
    LauncherTimeouts,
    NodeCommands,
    launch,
    prepare,
    trainer_environment,
    worker_environment,
    write_worker_config,
)
from primerl.node.launch.placement import GpuPlacement
from primerl.node.ops.control import NodeState
from primerl.node.storage.run_files import MARK, claim, held

QUICK = LauncherTimeouts(poll=0.02, view=0.02, back_off=(0.01, 0.02, 0.03), leave=60.0, grace=1.0)

TICKET = "open(run + '/ticket.txt', 'w').write('T')\n"
UNTIL_DONE = "while not os.path.exists(run + '/done'): time.sleep(0.02)\n"
"""How a worker of these tests learns that the run ended."""


class Programs(NodeCommands):
    """Python one-liners as trainer and workers; `run` is the run's directory in them."""

    def __init__(self, trainer: str, worker: str = UNTIL_DONE) -> None:
        self._trainer, self._worker = trainer, worker

    def trainer(self, config: RunConfig, args: Sequence[str]) -> list[str]:
        return python(self._trainer, config.run_dir)

    def worker(self, config: RunConfig, name: str) -> list[str]:
        return python(self._worker, config.run_dir)


def python(body: str, run: Path) -> list[str]:
    head = f"import os, signal, sys, time\nrun = {str(run)!r}\n"
    note = "open(run + '/pids', 'a').write(f'{os.getpid()}\\n')\n"
    return [sys.executable, "-c", head + note + textwrap.dedent(body)]


class Notes:
    """A view that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.notes: set[tuple[str, str]] = set()

    def show(self, nodes: Mapping[str, NodeState]) -> None:
        self.notes |= {(state.name, state.note) for state in nodes.values()}

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def view() -> Notes:
    return Notes()


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(name="r", output_dir=tmp_path, launch=LaunchConfig(workers=2))


def pids(config: RunConfig) -> list[int]:
    return [int(line) for line in (config.run_dir / "pids").read_text().split()]


def alive(pid: int) -> bool:
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"
    return False


def wait_until(what: str, holds: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.02)


async def until(holds: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, "what the test waits for", holds)


async def test_a_run_ends_with_its_trainer_and_its_workers_leave(
    config: RunConfig, view: Notes
) -> None:
    trainer = TICKET + (
        "while len(open(run + '/pids').readlines()) < 3: time.sleep(0.02)\n"
        "open(run + '/done', 'w')\n"
    )
    directory = await launch(config, [], view=view, commands=Programs(trainer), pace=QUICK)
    assert directory == config.run_dir
    assert len(pids(config)) == 3
    assert not any(map(alive, pids(config)))
    assert view.said == []
    assert {log.name for log in (directory / "logs").iterdir()} == {
        *("trainer.log", "worker_1.log", "worker_2.log"),
    }


class Called(Programs):
    """Notes what the trainer is called with."""

    def __init__(self) -> None:
        super().__init__(TICKET + "open(run + '/done', 'w')\n")
        self.args: list[str] = []

    def trainer(self, config: RunConfig, args: Sequence[str]) -> list[str]:
        self.args = list(args)
        return super().trainer(config, args)

    def references(self) -> list[str]:
        """The workers that it vouches for."""
        return json.loads(self.args[self.args.index("--verification.references") + 1])


async def test_a_run_that_measures_its_noise_gets_the_ids_of_its_workers_before_they_start(
    config: RunConfig, view: Notes
) -> None:
    friend = "ab" * 32
    engine = EngineConfig(dtype="bfloat16")
    verification = VerificationConfig(references=[friend])
    measuring = config.model_copy(update={"engine": engine, "verification": verification})
    first, again = Called(), Called()
    await launch(measuring, [], view=view, commands=first, pace=QUICK)
    own = [load_key(config.run_dir / f"worker_{at}").node_id.hex() for at in (1, 2)]
    assert first.references() == [friend, *own]
    await launch(measuring, [], view=view, commands=again, pace=QUICK)
    assert again.references() == first.references(), "a worker keeps its key"


async def test_a_run_with_fixed_bounds_gets_no_ids_of_workers(
    config: RunConfig, view: Notes
) -> None:
    called = Called()
    await launch(config, [], view=view, commands=called, pace=QUICK)
    assert called.args == []


async def test_workers_start_with_the_trainer_and_are_given_its_ticket_once_it_is_there(
    config: RunConfig, view: Notes
) -> None:
    worker = "open(run + '/up', 'a').write('x')\nopen(run + '/given', 'a').write(sys.stdin.read())"
    claim(config.run_dir)
    (config.run_dir / "ticket.txt").write_text("OLD")
    trainer = (
        "def size(name): return os.path.exists(run + name) and os.path.getsize(run + name)\n"
        "while size('/up') < 2: time.sleep(0.02)\n"
        f"{TICKET}while size('/given') < 2: time.sleep(0.02)"
    )
    await launch(config, [], view=view, commands=Programs(trainer, worker), pace=QUICK)
    assert (config.run_dir / "given").read_text() == "TT"


async def test_workers_that_wait_for_a_ticket_end_with_a_trainer_that_makes_none(
    config: RunConfig, view: Notes
) -> None:
    worker = (
        "open(run + '/up', 'a').write('x')\n"
        "given = sys.stdin.read()\n"
        "open(run + '/given', 'a').write(given)"
    )
    trainer = (
        "up = run + '/up'\n"
        "while not os.path.exists(up) or os.path.getsize(up) < 2: time.sleep(0.02)"
    )
    await launch(config, [], view=view, commands=Programs(trainer, worker), pace=QUICK)
    assert not (config.run_dir / "given").exists()
    assert not any(map(alive, pids(config)))


async def test_a_failed_trainer_ends_everything_with_its_own_error(
    config: RunConfig, view: Notes
) -> None:
    trainer = TICKET + (
        "while len(open(run + '/pids').readlines()) < 3: time.sleep(0.02)\n"
        "print('log line'); print('primerl-node: error: port 1 is taken', file=sys.stderr)\n"
        "sys.exit(4)"
    )
    with pytest.raises(BusyError, match=r"^port 1 is taken$"):
        await launch(config, [], view=view, commands=Programs(trainer), pace=QUICK)
    assert not any(map(alive, pids(config)))


async def test_a_killed_trainer_is_reported_with_the_end_of_its_log(
    config: RunConfig, view: Notes
) -> None:
    trainer = "print('the last words', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(NodeError, match=r"signal 9: see .*trainer\.log; --resume goes on"):
        await launch(config, [], view=view, commands=Programs(trainer), pace=QUICK)
    assert any("the last words" in line for line in view.said)


async def test_a_worker_that_dies_is_started_again(config: RunConfig, view: Notes) -> None:
    worker = (
        "if not os.path.exists(run + '/died'):\n"
        "    open(run + '/died', 'w')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n" + UNTIL_DONE
    )
    one = config.model_copy(update={"launch": LaunchConfig(workers=1)})
    trainer = TICKET + (
        "while len(open(run + '/pids').readlines()) < 3: time.sleep(0.02)\nopen(run + '/done', 'w')"
    )
    await launch(one, [], view=view, commands=Programs(trainer, worker), pace=QUICK)
    [said] = view.said
    assert said.startswith("worker_1 was killed by signal 9")
    assert "starting it again" in said


async def test_a_worker_is_given_up_after_three_restarts_and_the_run_goes_on(
    config: RunConfig,
) -> None:
    worker = (
        "import fcntl\n"
        "lock = open(run + '/good', 'w')\n"
        "try: fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except OSError: open(run + '/lives', 'a').write('x'); sys.exit(7)\n" + UNTIL_DONE
    )
    trainer = TICKET + (
        "lives = run + '/lives'\n"
        "while not os.path.exists(lives) or os.path.getsize(lives) < 4: time.sleep(0.02)\n"
        "while not os.path.exists(run + '/told'): time.sleep(0.02)\n"
        "open(run + '/done', 'w')"
    )

    class Telling(Notes):
        def show(self, nodes: Mapping[str, NodeState]) -> None:
            super().show(nodes)
            if any(note == "failed" for _, note in self.notes):
                (config.run_dir / "told").touch()

    view = Telling()
    await launch(config, [], view=view, commands=Programs(trainer, worker), pace=QUICK)
    assert (config.run_dir / "lives").read_text() == "xxxx"
    assert sum("starting it again" in line for line in view.said) == 3
    assert "given up. 1 of 2 workers are left, and the run goes on" in view.said[-1]


@pytest.mark.parametrize(
    ("words", "restarts"),
    [
        ("less GPU memory is free than vLLM was told to take (3/139 GiB free)", 1),
        ("the engine is lost", 3),
    ],
)
async def test_a_worker_for_which_the_gpu_has_no_memory_is_started_again_once(
    config: RunConfig, view: Notes, words: str, restarts: int
) -> None:
    worker = f"print('primerl-node: error: {words}', flush=True); sys.exit(7)"
    with pytest.raises(EngineError, match="every worker failed"):
        await launch(
            config,
            [],
            view=view,
            commands=Programs(TICKET + UNTIL_DONE, worker),
            pace=QUICK,
        )
    again = [line for line in view.said if "starting it again" in line]
    assert len(again) == 2 * restarts
    assert all(words in line for line in again)


async def test_when_every_worker_fails_the_run_is_stopped(config: RunConfig, view: Notes) -> None:
    with pytest.raises(
        EngineError, match=r"every worker failed; the last: worker_\d ended with code 7 \(.*log"
    ):
        await launch(
            config,
            [],
            view=view,
            commands=Programs(TICKET + "time.sleep(60)", "sys.exit(7)"),
            pace=QUICK,
        )
    assert not any(map(alive, pids(config)))


async def test_a_trainer_without_a_ticket_is_not_waited_for_forever(
    config: RunConfig, view: Notes
) -> None:
    hasty = replace(QUICK, ticket=0.2)
    with pytest.raises(EngineError, match="no ticket in 0 s"):
        await launch(config, [], view=view, commands=Programs("time.sleep(60)"), pace=hasty)


async def test_cancelling_stops_all_even_what_ignores_sigterm(
    config: RunConfig, view: Notes
) -> None:
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)"
    running = asyncio.create_task(
        launch(config, [], view=view, commands=Programs(TICKET + stubborn, stubborn), pace=QUICK)
    )
    await until(lambda: (config.run_dir / "pids").exists() and len(pids(config)) == 3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not any(map(alive, pids(config)))


async def test_workers_that_do_not_leave_are_stopped(config: RunConfig, view: Notes) -> None:
    trainer = TICKET + "while len(open(run + '/pids').readlines()) < 3: time.sleep(0.02)"
    pace = LauncherTimeouts(poll=0.02, view=0.02, leave=0.2, grace=1.0)
    await launch(config, [], view=view, commands=Programs(trainer, "time.sleep(60)"), pace=pace)
    assert any("stopping them" in line for line in view.said)
    assert not any(map(alive, pids(config)))


def test_cleaning_removes_a_run_and_nothing_else(config: RunConfig, tmp_path: Path) -> None:
    cleaning = config.model_copy(update={"clean": True})
    config.run_dir.mkdir()
    (config.run_dir / "thesis.txt").write_text("ten years")
    with pytest.raises(UsageError, match="holds no run"):
        prepare(cleaning)
    claim(config.run_dir)
    (config.run_dir / "summary.json").write_text("{}")
    prepare(cleaning)
    assert {path.name for path in config.run_dir.iterdir()} == {MARK, "logs", "thesis.txt"}


def test_resuming_never_cleans(config: RunConfig) -> None:
    config.run_dir.mkdir()
    (config.run_dir / "metrics.jsonl").write_text("{}")
    prepare(config.model_copy(update={"clean": True, "resume": ResumeConfig()}))
    assert (config.run_dir / "metrics.jsonl").exists()


def test_the_trainer_gets_the_same_arguments_and_its_own_directory(config: RunConfig) -> None:
    command = NodeCommands().trainer(config, ["@", "demo", "--clean", "--seed", "3"])
    assert command[1:4] == ["-m", "primerl.cli.main", "train"]
    again = load(RunConfig, command[4:], {"PRIMERL_DATA_DIR": "elsewhere"})
    assert (again.seed, again.clean, again.name) == (3, False, "demo")
    assert again.data_dir == config.run_dir / "trainer"


def test_a_worker_may_play_all_environments_of_the_run(config: RunConfig) -> None:
    from primerl.node.config.run import JoinConfig

    environments = '[{"id": "sort-digits"}, {"id": "arithmetic", "name": "sums"}]'
    run = load(RunConfig, ["--environments", environments], {})
    path = write_worker_config(run, config.run_dir / "worker_1")
    assert load(JoinConfig, ["@", str(path)], {}).environments.allow == [
        "sort-digits",
        "arithmetic",
    ]


def test_a_worker_shares_the_settings_but_not_the_ports(config: RunConfig) -> None:
    from primerl.node.config.monitors import WandbConfig
    from primerl.node.config.run import JoinConfig

    flags = ["--network.port", "7000", "--network.host", "127.0.0.1", "--engine.type", "vllm"]
    flags += ["--network.seeds", '["https://seed.example.org/chunks"]']
    flags += ["--monitors.wandb.project", "p", "--monitors.wandb.name", "the trainer's"]
    run = load(RunConfig, [*flags, "--network.advertise", "me:7000"], {})
    path = write_worker_config(run, config.run_dir / "worker_1")
    joined = load(JoinConfig, ["@", str(path)], {})
    assert joined.engine == run.engine
    assert joined.network.host == "127.0.0.1"
    assert (joined.network.port, joined.network.advertise) == (0, [])
    assert joined.monitors.wandb == WandbConfig(project="p")
    trainer = run.run_dir.absolute() / "trainer" / "chunks"
    assert joined.network.seeds == [trainer.as_uri(), "https://seed.example.org/chunks"]
    run = load(RunConfig, [*flags, "--launch.share-chunks", "false"], {})
    path = write_worker_config(run, config.run_dir / "worker_1")
    assert load(JoinConfig, ["@", str(path)], {}).network.seeds == [
        "https://seed.example.org/chunks"
    ]


def test_the_environment_of_children() -> None:
    small = RunConfig(model=ModelConfig(create={}), training=TrainingConfig(threads=1))
    ours = {"PRIMERL_TRAINING__LR": "1", "PRIMERL_PASSPHRASE": "p", "PATH": "/bin"}
    trainer, worker = trainer_environment(small, ours), worker_environment(small, ours)
    assert trainer["PRIMERL_TRAINING__LR"] == "1"
    assert "PRIMERL_TRAINING__LR" not in worker
    for environment in (trainer, worker):
        assert environment["PRIMERL_PARENT_PID"] == str(os.getpid())
        assert environment["PRIMERL_PASSPHRASE"] == "p"
        assert environment["OMP_NUM_THREADS"] == "1"
        assert environment["HF_HUB_OFFLINE"] == "1"
    judge = {"url": "http://h/v1", "model": "m", "key_variable": "JUDGE_KEY"}
    judged = RunConfig.model_validate({"environment": {"id": "reverse-text", "judge": judge}})
    assert trainer_environment(judged, {"JUDGE_KEY": "k"})["JUDGE_KEY"] == "k"
    assert "JUDGE_KEY" not in worker_environment(judged, {"JUDGE_KEY": "k"})
    hub = RunConfig(model=ModelConfig(name="Qwen/Qwen3-0.6B"))
    assert "HF_HUB_OFFLINE" not in trainer_environment(hub, {})
    for name in ("math-env", "reverse-text-hub", "alphabet-sort-hub"):  # their data is the hub's
        reads = small.model_copy(update={"environment": EnvironmentConfig(id=name)})
        assert "HF_HUB_OFFLINE" not in trainer_environment(reads, {})
    assert trainer_environment(small, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


# -- GPUs, and several runs of one machine ---------------------------------------------------------

HASTY = LauncherTimeouts(poll=0.02, view=0.02, back_off=(0.01, 0.01), leave=60.0, grace=1.0)
CPU = GpuPlacement(None, (None,))
BODY = """
import os, sys, time
run, role = sys.argv[1:3]
seen = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
with open(f"{run}/seen", "a") as file:
    file.write(role + " " + seen + " " + " ".join(sys.argv[3:]) + "\\n")
def lines():
    return open(f"{run}/seen").read().splitlines()
"""
WAITING_TRAINER = """
open(f"{run}/ticket.txt", "w").write("T")
while sum(line.startswith("worker") for line in lines()) < int(os.environ["WORKERS"]):
    time.sleep(0.02)
open(f"{run}/done", "w")
"""
WAITING_WORKER = """
while not os.path.exists(f"{run}/done"): time.sleep(0.02)
"""


class Watching(NodeCommands):
    """What each of these says it sees, goes to the file `seen` of the run."""

    def __init__(self, trainer: str = WAITING_TRAINER, worker: str = WAITING_WORKER) -> None:
        self._trainer, self._worker = trainer, worker

    def trainer(self, config: RunConfig, args: Sequence[str]) -> list[str]:
        return [sys.executable, "-c", BODY + self._trainer, str(config.run_dir), "trainer", *args]

    def worker(self, config: RunConfig, name: str) -> list[str]:
        share = str(config.engine.vllm.get("gpu_memory_utilization"))
        return [sys.executable, "-c", BODY + self._worker, str(config.run_dir), name, share]


async def run(
    config: RunConfig, placement: GpuPlacement, programs: Watching, pace: LauncherTimeouts = HASTY
) -> list[str]:
    """What was said; Placement.workers says how many of them the trainer waits for."""
    view = Notes()
    await launch(config, [], view=view, placement=placement, commands=programs, pace=pace)
    return view.said


def seen(config: RunConfig) -> list[str]:
    return sorted((config.run_dir / "seen").read_text().splitlines())


async def test_every_process_sees_its_own_gpus(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKERS", "2")
    placement = GpuPlacement(("4", "GPU-a"), (("1", "2"), ("7",)), ranks=2, memory=0.25)
    said = await run(config, placement, Watching())
    assert seen(config) == [
        "trainer 4,GPU-a --training.backend fsdp --training.fsdp.ranks 2",
        "worker_1 1,2 0.25",
        "worker_2 7 0.25",
    ]
    assert said == placement.lines()


@pytest.mark.parametrize("variable", [None, "", "3"])
async def test_without_gpus_the_variable_stays_as_it_is(
    variable: str | None, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKERS", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert await run(config, CPU, Watching()) == []
    now = "unset" if variable is None else variable
    assert seen(config) == [f"trainer {now} ", f"worker_1 {now} None"]


async def test_two_launchers_of_one_run_do_not_meet(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with --clean, and before a node of the first one answers."""
    monkeypatch.setenv("WORKERS", "2")  # one more than there will be: it waits for us
    first = asyncio.create_task(run(config, CPU, Watching()))
    await until((config.run_dir / "seen").exists)
    with pytest.raises(BusyError, match="another `primerl-node` works in"):
        await run(config.model_copy(update={"clean": True}), CPU, Watching())
    with (config.run_dir / "seen").open("a") as file:
        file.write("worker of nobody\n")
    await first
    with held(config.run_dir):
        pass


async def test_two_runs_of_different_names_do_not_disturb_each_other(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKERS", "1")
    other = config.model_copy(update={"name": "other"})
    await asyncio.gather(run(config, CPU, Watching()), run(other, CPU, Watching()))
    assert len(seen(config)) == len(seen(other)) == 2


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot write"), held(tmp_path / "file" / "run"):
        pass


async def test_the_last_words_of_a_worker_are_passed_on(config: RunConfig) -> None:
    dying = "print('primerl-node: error: no memory left', file=sys.stderr); sys.exit(7)"
    with pytest.raises(EngineError, match=r"the last: worker_1 ended with code 7: no memory left"):
        await run(
            config,
            CPU,
            Watching("open(f'{run}/ticket.txt', 'w').write('T')\n" + WAITING_WORKER, dying),
        )


async def test_a_worker_that_is_called_wrongly_is_not_started_again(config: RunConfig) -> None:
    wrong = "print('primerl-node: error: unknown option', file=sys.stderr); sys.exit(2)"
    with pytest.raises(EngineError, match="unknown option"):
        await run(
            config,
            CPU,
            Watching("open(f'{run}/ticket.txt', 'w').write('T')\n" + WAITING_WORKER, wrong),
        )
    assert [line.split()[0] for line in seen(config)] == ["trainer", "worker_1"]


async def test_a_process_that_ran_well_for_long_has_all_restarts_again(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKERS", "5")
    dying = "if len(lines()) < 6: sys.exit(7)\n" + WAITING_WORKER
    once = LauncherTimeouts(poll=0.02, view=0.02, back_off=(0.01,), well=0.0, leave=60.0, grace=1.0)
    said = await run(config, CPU, Watching(WAITING_TRAINER, dying), once)
    assert len(said) == 4
    assert all("starting it again" in line for line in said)
