"""`primerl-node service`: run a node at boot, by systemd or launchd.

A unit holds no secret: a passphrase comes by a credential, a ticket by a file. Nothing is installed before the
command that it runs was read and its config found to be valid.
"""

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from html import escape as escape_html
from pathlib import Path
from typing import Annotated

import typer

from .command import config_of, read_config

escape = partial(escape_html, quote=False)
COMMANDS = ("join", "inference", "train", "rl", "judge")
"""Commands that a service may run."""
NOT_AGAIN = "2 3 4 8 9"
"""Exit codes after which a restart would do the same again; see the epilog of --help."""
IN_ORDER = "129 130 143"
"""Exit codes of a node that a signal stopped in order."""
PROGRAM = (sys.executable, "-m", "primerl.cli.main")
PREFIX = "primerl-"
RESUME = 'if [ -e "$0"/trainer/ledger.db ]; then exec "$@" --resume; fi; exec "$@"'
"""Shell lines that begin a run at the first start, and go on with it at every other; $0 is its directory."""
MARK = "Made by `primerl-node service install`"
"""In every file that is written here; others are neither replaced nor removed."""
UNIT = """# Made by `primerl-node service install`; `primerl-node service uninstall` removes it.
[Unit]
Description=primerl-node {command}
Wants=network-online.target
After=network-online.target

[Service]
Type=notify
NotifyAccess=main
ExecStart={start}
WorkingDirectory={directory}
{extra}Environment=PYTHONUNBUFFERED=1
# Ready is the node that answers `primerl-node status`; its watchdog is the event loop.
TimeoutStartSec=15min
WatchdogSec=5min
# It hands its work back, or writes a checkpoint, before it ends; its child processes end with it.
KillMode=mixed
TimeoutStopSec=5min
SuccessExitStatus={in_order}
Restart=on-failure
RestartSec=10
RestartPreventExitStatus={not_again}
LimitNOFILE=65536
NoNewPrivileges=yes
ProtectSystem=full

[Install]
WantedBy={target}
"""
PLIST = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE plist PUBLIC "-//Apple//DTD PLIST 1.0//EN" "http://www.apple.com/DTDs/PropertyList-1.0.dtd">
<!-- Made by `primerl-node service install`; `primerl-node service uninstall` removes it. -->
<plist version="1.0">
<dict>
  <key>Label</key><string>{label}</string>
  <key>ProgramArguments</key>
  <array>
{arguments}
  </array>
  <key>WorkingDirectory</key><string>{directory}</string>
{extra}  <key>RunAtLoad</key><true/>
  <key>KeepAlive</key><dict><key>SuccessfulExit</key><false/></dict>
  <key>ThrottleInterval</key><integer>10</integer>
  <key>ExitTimeOut</key><integer>300</integer>
  <key>StandardErrorPath</key><string>{log}</string>
</dict>
</plist>
"""

Name = Annotated[
    str, typer.Option("--name", "-n", help="The service is primerl-NAME; by default the command.")
]
app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    help="""Run a node at boot: as a systemd service of this user, as root of the system; on a Mac by launchd.

\b
Examples:
  primerl-node service install join --ticket run.ticket --data-dir worker
  primerl-node service install --name big train @ run.toml
  primerl-node service status
  primerl-node service logs --follow
  primerl-node service uninstall
""",
)


@dataclass(frozen=True)
class Service:
    """A service to install."""

    name: str
    command: list[str]
    """Program and arguments."""
    about: str
    directory: Path
    """Where relative paths of the command begin."""
    user: str = ""
    """Whom a service of the system runs as."""
    system: bool = False
    passphrase: Path | None = None
    """File with the passphrase of the key."""
    home: Path = field(default_factory=Path.home)

    @property
    def unit(self) -> str:
        """The name of its systemd unit."""
        return f"{PREFIX}{self.name}.service"

    @property
    def unit_path(self) -> Path:
        """Where systemd looks for it."""
        if self.system:
            return Path("/etc/systemd/system") / self.unit
        return self.home / ".config/systemd/user" / self.unit

    @property
    def label(self) -> str:
        """Its name for launchd."""
        return f"org.primerl.{self.name}"

    @property
    def plist_path(self) -> Path:
        """Where launchd looks for it."""
        folder = (
            Path("/Library/LaunchDaemons") if self.system else self.home / "Library/LaunchAgents"
        )
        return folder / f"{self.label}.plist"

    def unit_text(self) -> str:
        """Write it for systemd."""
        extra = f"User={self.user}\n" if self.system else ""
        if self.passphrase is not None:
            extra += f"LoadCredential=passphrase:{_literal(str(self.passphrase))}\n"
            extra += "Environment=PRIMERL_PASSPHRASE_FILE=%d/passphrase\n"
        return UNIT.format(
            command=self.about,
            start=" ".join(_quoted(word) for word in self.command),
            directory=_literal(str(self.directory)),
            extra=extra,
            in_order=IN_ORDER,
            not_again=NOT_AGAIN,
            target="multi-user.target" if self.system else "default.target",
        )

    def plist_text(self) -> str:
        """Write it for launchd."""
        extra = (
            f"  <key>UserName</key><string>{escape(self.user)}</string>\n" if self.system else ""
        )
        return PLIST.format(
            label=escape(self.label),
            arguments="\n".join(f"    <string>{escape(word)}</string>" for word in self.command),
            directory=escape(str(self.directory)),
            extra=extra,
            log=escape(str(self.directory / f"{PREFIX}{self.name}.log")),
        )


def _literal(text: str) -> str:
    """Write a value of a unit file: % begins a specifier there."""
    return text.replace("%", "%%")


def _quoted(word: str) -> str:
    """Write a word of ExecStart so that systemd reads exactly it."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{_literal(escaped).replace("$", "$$")}"'


@app.command(
    "install",
    short_help="Install and start a service that runs a command.",
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    },
)
def install(
    ctx: typer.Context,
    name: Name = "",
    run_as: Annotated[
        str, typer.Option("--run-as", help="As root: the user that the node runs as.")
    ] = "",
    passphrase_file: Annotated[
        Path | None,
        typer.Option(help="File with the passphrase of the node's key, which systemd hands over."),
    ] = None,
    show: Annotated[
        bool, typer.Option("--print", help="Print the unit (on a Mac the plist), install nothing.")
    ] = False,
) -> None:
    """Install a service that runs `primerl-node COMMAND ...`, start it now and at every boot.

    COMMAND is join, inference, train, rl or judge, with its arguments; relative paths begin in this directory.
    A run of train or rl is begun at the first start and resumed at the others. As root it is a service of the
    system and needs --run-as; else one of this user, which ends at logout unless `loginctl enable-linger` was
    run. It is started again after a crash, but not after exit codes 2, 3, 4 and 8.

    \b
    Examples:
      primerl-node service install join --ticket run.ticket --data-dir worker
      sudo primerl-node service install --run-as primerl train @ run.toml
    """
    from ..node.errors import NodeError
    from ..node.storage.run_files import write

    service = _service(ctx.args, name, run_as, passphrase_file)
    mac = sys.platform == "darwin"
    text = service.plist_text() if mac else service.unit_text()
    if show:
        typer.echo(text, nl=False)
        return
    path = service.plist_path if mac else service.unit_path
    if not mac:
        _systemctl()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NodeError(f"cannot make {path.parent}: {error.strerror}") from error
    _check_ours(path)
    write(path, text, mode=0o644)
    typer.echo(f"wrote {path}")
    if mac:
        _run("launchctl", "load", "-w", str(path))
        return
    _run(*_systemctl(), "daemon-reload")
    _run(*_systemctl(), "enable", "--now", service.unit)
    if not service.system and not Path("/var/lib/systemd/linger", _me()).exists():
        typer.echo(f"it ends when you log out, unless you run: loginctl enable-linger {_me()}")


def _service(args: list[str], name: str, run_as: str, passphrase_file: Path | None) -> Service:
    """Check the command of a service, and make the service. Raises UsageError and TicketError."""
    from ..node.errors import UsageError

    command = args[0] if args else ""
    if command not in COMMANDS:
        raise UsageError(
            f"a service runs {', '.join(COMMANDS[:-1])} or {COMMANDS[-1]}: name one first"
        )
    name = name or command
    if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
        raise UsageError(f"--name: letters, digits, - and _ alone, not {name[:40]!r}")
    system = os.geteuid() == 0
    user = run_as or os.environ.get("SUDO_USER", "")
    if system and not user:
        raise UsageError(
            "a service of the system needs a user: --run-as NAME (root, if you mean it)"
        )
    if run_as and not system:
        raise UsageError("--run-as is for services of the system: run this as root")
    secret = None if passphrase_file is None else passphrase_file.absolute()
    if secret is not None and not secret.is_file():
        raise UsageError(f"--passphrase-file: {secret} is no file")
    if secret is not None and sys.platform == "darwin":
        raise UsageError("launchd hands over no passphrase: use a key without one")
    start = [*PROGRAM, *args]
    if command in ("train", "rl") and "--resume" not in args:
        start = ["/bin/sh", "-c", RESUME, str(_run_directory(args)), *start]
    else:
        _check(args)
    return Service(
        name=name,
        command=start,
        about=" ".join(shlex.quote(word) for word in args[:1]),
        directory=Path.cwd(),
        user=user,
        system=system,
        passphrase=secret,
    )


def _check(args: list[str]) -> None:
    """Raise UsageError or TicketError for what the command would refuse at its start."""
    from ..node.errors import UsageError

    if "-" in args:
        raise UsageError(
            "a service has no standard input: write the ticket to a file, and name that"
        )
    program = [*PROGRAM, *args, "--dry-run"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        line = (done.stderr.strip().splitlines() or ["it fails"])[-1]
        raise UsageError(line.removeprefix("primerl-node: error: "))


def _run_directory(args: list[str]) -> Path:
    """Check the command of a run, and return the run's directory."""
    from ..node.config.run import RunConfig

    _check(args)
    assert issubclass(config_of(args[0]), RunConfig)
    own = {"--trainer-gpus": "--launch.trainer-gpus", "--inference-gpus": "--launch.inference-gpus"}
    own |= {f"--{short}": f"--engine.{short}" for short in ("tp", "pp", "dp")}
    return read_config(RunConfig, [own.get(word, word) for word in args[1:]]).run_dir.absolute()


def _check_ours(path: Path) -> None:
    """Raise UsageError for a file that somebody else wrote."""
    from ..node.errors import UsageError

    if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        raise UsageError(
            f"{path} was not made by `service install`: choose another --name, or move it away"
        )


def _systemctl(program: str = "systemctl") -> list[str]:
    """Return the program that speaks with systemd for this user. Raises NodeError."""
    from ..node.errors import NodeError

    if shutil.which(program) is None:
        raise NodeError(
            f"there is no {program} here: `primerl-node service install --print` shows the unit for "
            "another machine"
        )
    return [program] if os.geteuid() == 0 else [program, "--user"]


def _run(*command: str) -> None:
    """Run a command of the service manager, whose output is shown. Raises NodeError where it fails."""
    from ..node.errors import NodeError

    if code := subprocess.run(command, check=False).returncode:
        raise NodeError(f"`{shlex.join(command)}` failed with code {code}")


def _me() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without a name
        return str(os.getuid())


def _installed(name: str) -> Service:
    """Find an installed service: by its name, else the only one. Raises UsageError."""
    from ..node.errors import UsageError

    some = Service(name or "x", [], "", Path.cwd(), system=os.geteuid() == 0)
    mac = sys.platform == "darwin"
    path, pattern = (
        (some.plist_path, "org.primerl.*") if mac else (some.unit_path, f"{PREFIX}*.service")
    )
    head = "org.primerl." if mac else PREFIX
    known = sorted(file.name[len(head) :].rsplit(".", 1)[0] for file in path.parent.glob(pattern))
    if not name and len(known) == 1:
        name = known[0]
    if name not in known:
        there = f"--name {' or '.join(known)}" if known else "none is installed"
        raise UsageError(f"which service: {there} (in {path.parent})")
    service = Service(name, [], "", Path.cwd(), system=some.system)
    _check_ours(service.plist_path if mac else service.unit_path)
    return service


@app.command("status", short_help="Show whether a service runs.")
def status(name: Name = "") -> None:
    """Show what the service manager knows of a service. `primerl-node status` shows the node itself."""
    service = _installed(name)
    if sys.platform == "darwin":
        _run("launchctl", "list", service.label)
        return
    subprocess.run([*_systemctl(), "status", "--no-pager", service.unit], check=False)


@app.command("logs", short_help="Show the log of a service.")
def logs(
    name: Name = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", help="The newest lines.", min=1)] = 100,
) -> None:
    """Show what a service wrote, from the journal."""
    service = _installed(name)
    if sys.platform == "darwin":
        log = service.plist_path.read_text(encoding="utf-8").partition(
            "StandardErrorPath</key><string>"
        )
        _run("tail", *(["-f"] if follow else []), "-n", str(lines), log[2].partition("<")[0])
        return
    _run(
        *_systemctl("journalctl"),
        *("--no-pager", "--unit" if service.system else "--user-unit", service.unit),
        *("--lines", str(lines), *(["--follow"] if follow else [])),
    )


@app.command("uninstall", short_help="Stop a service and remove it.")
def uninstall(name: Name = "") -> None:
    """Stop a service in order, and remove its unit. Keys, runs and data stay."""
    service = _installed(name)
    if sys.platform == "darwin":
        _run("launchctl", "unload", "-w", str(service.plist_path))
        service.plist_path.unlink()
    else:
        _run(*_systemctl(), "disable", "--now", service.unit)
        service.unit_path.unlink()
        _run(*_systemctl(), "daemon-reload")
    typer.echo(f"removed {service.plist_path if sys.platform == 'darwin' else service.unit_path}")
