"""Decide if a worker may play an environment: a bundled one, or an installed package that its owner allowed.

Playing the environment of a manifest imports a module by a name that a stranger chose. So before any import a
worker finds the package of that name, compares its digest with the manifest's, and checks that the owner of
this machine allowed it. Nothing is ever fetched.
"""

import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Literal

from ...crypto.hashing import digest
from ...protocol.leases import LEASED_PROMPTS
from ...protocol.manifests import EnvironmentContract, SamplingContract
from ...protocol.version import MAX_NAME
from ..config.run import EnvironmentConfig, RunConfig, TrainedEnvironment
from ..ops.errors import StorageError, UsageError, file_error, one_line, printable
from ..storage.run_files import write_private

BUNDLED = {
    "reverse-text": "reverse_text",
    "arithmetic": "arithmetic",
    "math": "math",
    "alphabet-sort": "alphabet_sort",
    "word-game": "word_game",
    "calculator": "calculator",
    "reasoning-gym": "reasoning_gym",
    "math-env": "math_env",
    "hendrycks-math": "math_env",
    "intellect-math": "math_env",
    "deepscaler": "math_env",
    "simple-math": "math_env",
}
"""Environments that come with this package, and their modules in tasksets/."""
SCORED_BY = {"math": "math-verify", "math_env": "math-verify", "reasoning_gym": "reasoning-gym"}
"""Modules in tasksets/ -> the distribution whose release their tasks and rewards depend on."""
READS_DATA = "math_env"
"""The module in tasksets/ that reads a data set which the run names: it needs leave like a foreign package."""
LIBRARY = "verifiers"
LIBRARY_TASKSETS = ("v1", "tasksets")
"""Where the library has tasksets of its own; it looks there first."""
TASKSET = b"Taskset"
"""What a module names that exports an environment."""
_REQUIRES = re.compile(r"verifiers(?![\w.-])", re.IGNORECASE)
"""Begins a requirement of the library, as in verifiers>=0.4."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
REMEMBERED = "allowed_environments.json"
"""In a data directory: environment -> digest of the package that its owner always allows."""
SHOWN = 12


@dataclass(frozen=True)
class Package:
    """Installed code that an environment's name leads to."""

    environment: str
    label: str
    """Distribution and version, for people."""
    digest: bytes
    """Of the names and contents of its source files: equal wherever the same release is installed."""
    of_library: bool = False
    """Whether it is one of the library's own tasksets."""
    bundled: bool = False
    """Whether it scores a bundled taskset, which needs no leave; its release matters all the same."""

    def __str__(self) -> str:
        return f"package {self.label}, digest {self.digest.hex()[:SHOWN]}"


class EnvironmentNotAllowed(UsageError):
    """The owner of this machine has not allowed the environment of a run."""

    def __init__(self, package: Package) -> None:
        self.package = package
        why = ""
        if package.of_library:
            why = ", one of the library's own tasksets, which may fetch and run code of others"
        if package.environment in BUNDLED:
            why = ", bundled, which reads a data set that the run names"
        super().__init__(
            f"this run wants to run the environment {package.environment!r} ({package}{why}) on this machine: "
            f"if you trust it, allow it with --allow-environment {package.environment}, or this release for "
            f"good with `primerl-node env trust {package.environment}`"
        )


def find_package(environment: str) -> Package | None:
    """The package of an environment, without importing any of it; None for a bundled one that needs no other.

    Raises UsageError where the name leads to nothing that could be an environment, or to what is not installed.
    """
    if environment == LEASED_PROMPTS:
        return None
    if environment in BUNDLED:
        return _scoring_package(environment)
    if not NAME.fullmatch(environment):
        raise UsageError(
            f"no environment is named {environment[:80]!r}: it is a module name, such as reverse-text"
        )
    module = module_of(environment)
    if (own := _of_library(module)) is not None:
        label = f"{LIBRARY} {metadata.version(LIBRARY)}"
        return Package(environment, label, _digest([own]), of_library=True)
    if module in sys.stdlib_module_names or module in sys.builtin_module_names:
        raise UsageError(f"{environment!r} is a part of Python, no environment: refused")
    root = root_of(module)
    if root is None:
        raise UsageError(f"the environment {environment!r} is not installed here")
    names = distributions_by_module().get(module, [])
    if not names:
        return Package(environment, f"{module}, no distribution", _digest([root]))
    return Package(environment, *_distribution(names[0]))


def distributions_by_module() -> Mapping[str, Sequence[str]]:
    """Map top-level modules to the names of the distributions that installed them.

    Reading the metadata of all distributions takes a second; they are read again once one comes or goes.
    """
    return _read_distributions(tuple(map(_modified, sys.path)))


@lru_cache(1)
def _read_distributions(_: tuple[tuple[str, int], ...]) -> Mapping[str, Sequence[str]]:
    return metadata.packages_distributions()


def _modified(folder: str) -> tuple[str, int]:
    """Return a folder and the time of its last change, in ns, which each installation into it sets."""
    try:
        return folder, Path(folder).stat().st_mtime_ns
    except OSError:
        return folder, 0


def module_of(environment: str) -> str:
    """The module that `verifiers` imports for an environment's id."""
    return environment.replace("-", "_").lower()


def source_of(environment: str) -> Path | None:
    """Where the code of an environment lies; None for a bundled one, and if no import would find it."""
    known = environment in (*BUNDLED, LEASED_PROMPTS) or not NAME.fullmatch(environment)
    return None if known else root_of(module_of(environment))


def name_taken(environment: str) -> str:
    """Why a package of this name would never be played as an environment; empty if it would.

    Bundled environments, Python's modules and the library's tasksets come first.
    """
    module = module_of(environment)
    if module in map(module_of, (*BUNDLED, LEASED_PROMPTS)):
        return "a bundled environment has this name"
    if module in sys.stdlib_module_names or module in sys.builtin_module_names:
        return "a part of Python has this name"
    if _of_library(module) is not None:
        return f"a taskset of {LIBRARY} itself has this name"
    return ""


def installed() -> list[Package]:
    """The environments among the installed distributions, by name; none is imported.

    They are found by what they declare: a distribution that requires verifiers, and in it a module whose source
    names a Taskset.
    """
    modules: dict[str, list[str]] = {}
    for module, names in distributions_by_module().items():
        for name in set(names):
            modules.setdefault(name, []).append(module)
    found: dict[str, Package] = {}
    for one in metadata.distributions():
        if not any(_REQUIRES.match(it) and "extra" not in it for it in one.requires or ()):
            continue
        for module in modules.get(one.name, ()):
            environment = module.replace("_", "-")
            root = root_of(module)
            if root is not None and source_has(root, TASKSET) and not name_taken(environment):
                found[environment] = Package(environment, *_distribution(one.name))
    return [found[name] for name in sorted(found)]


def source_has(root: Path, text: bytes) -> bool:
    """Whether a module's Python source, a file or a directory, has this text in it."""
    return any(text in path.read_bytes() for _, path in _files(root) if path.suffix == ".py")


def _of_library(module: str) -> Path | None:
    """Where the library has a taskset of its own of this name; it is looked for there first."""
    library = root_of(LIBRARY)
    if library is None:
        return None
    own = library.joinpath(*LIBRARY_TASKSETS, module)
    own = own if own.is_dir() else own.with_suffix(".py")
    return own if own.exists() else None


def _scoring_package(environment: str) -> Package | None:
    """The distribution that scores a bundled environment; None where that is done by our own code."""
    module = BUNDLED[environment]
    if (name := SCORED_BY.get(module)) is None:
        return None
    try:
        label, held = _distribution(name)
    except metadata.PackageNotFoundError as error:
        raise UsageError(
            f"the environment {environment!r} needs {name}: pip install {name}, or primerl-node[{name}]"
        ) from error
    return Package(environment, label, held, bundled=module != READS_DATA)


def _distribution(name: str) -> tuple[str, bytes]:
    """Name with version, and digest, of an installed distribution. Raises PackageNotFoundError."""
    label = f"{name} {metadata.version(name)}"
    modules = sorted(module for module, names in distributions_by_module().items() if name in names)
    return label, _digest([root for module in modules if (root := root_of(module)) is not None])


def environment_contracts(config: RunConfig) -> tuple[EnvironmentContract, ...]:
    """The environments of the run that `config` would start, with the packages that are installed here.

    A package that cannot be found is left empty: what starts the environment says so.
    """
    library = f"{LIBRARY} {metadata.version(LIBRARY)}"
    return tuple(_contract(one, config, library) for one in config.mixture)


def _contract(one: TrainedEnvironment, config: RunConfig, library: str) -> EnvironmentContract:
    try:
        package = find_package(one.id)
    except UsageError:
        package = None
    return EnvironmentContract(
        name=one.name,
        id=one.id,
        config=_published(one),
        seed=config.seed,
        version=library,
        group_size=one.group_size,
        max_turns=one.max_turns,
        sampling=SamplingContract(**config.sampling_of(one).model_dump()),
        package=package.label if package else "",
        package_digest=package.digest if package else b"",
        rewards=_rewards(one),
    )


def _rewards(one: TrainedEnvironment) -> Literal["recomputed", "sampled", "claimed"]:
    if not one.deterministic_tools:
        return "claimed"
    return "recomputed" if one.deterministic_rewards and one.judge is None else "sampled"


def _published(one: TrainedEnvironment) -> bytes:
    """The options that the manifest has, in JSON. Without a judge they are the bytes from before there were
    judges, so that a run from then goes on."""
    told = one.published()
    return told.model_dump_json(exclude=None if told.judge else {"judge"}).encode()


def options_of(contract: EnvironmentContract) -> EnvironmentConfig:
    """The options that a manifest has for its environment; a way to a judge is not taken from there.

    Raises UsageError if this version does not know them, or if they name another environment than the manifest:
    the import uses their name, the permission the manifest's.
    """
    try:
        options = EnvironmentConfig.model_validate(json.loads(contract.config))
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"this run's environment needs another version of us: {one_line(error)}"
        ) from error
    if options.id != contract.id:
        raise UsageError(
            f"this run's environment is {printable(contract.id)!r}, and its options are of "
            f"{printable(options.id)!r}: refused"
        )
    return options.published()


def check_allowed(contract: EnvironmentContract, allow: list[str], data_dir: Path) -> None:
    """Raise UsageError unless a worker may play this environment: EnvironmentNotAllowed where its owner may
    say so, StorageError where what the owner always allows cannot be read."""
    options_of(contract)
    try:
        package = find_package(contract.id)
    except UsageError as error:
        if not contract.package:
            raise
        raise UsageError(f"{error}; the run has {printable(contract.package, MAX_NAME)}") from error
    if package is None:
        return
    if package.digest != contract.package_digest:
        theirs = printable(contract.package, MAX_NAME) or "of no known package"
        raise UsageError(
            f"the run's environment {contract.id!r} is {theirs}, "
            f"digest {contract.package_digest.hex()[:SHOWN] or 'none'}, and here it is {package}: install the "
            "release that the run has"
        )
    if package.bundled or _plain(contract.id) in {_plain(name) for name in allow}:
        return
    if not is_remembered(package, data_dir):
        raise EnvironmentNotAllowed(package)


def remembered(data_dir: Path) -> Mapping[str, str]:
    """What the owner of a data directory always allows: environment -> digest. Raises StorageError."""
    path = data_dir / REMEMBERED
    try:
        held = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} cannot be read ({error}): remove it") from error
    if not isinstance(held, dict):
        raise StorageError(f"{path} does not hold a JSON object: remove it")
    return {str(name): str(value) for name, value in held.items()}


def is_remembered(package: Package, data_dir: Path) -> bool:
    """Whether the owner of a data directory always allows this very package. Raises StorageError."""
    return remembered(data_dir).get(_plain(package.environment)) == package.digest.hex()


def remember(package: Package, data_dir: Path) -> None:
    """Allow this very package from now on. Raises StorageError."""
    held = {**remembered(data_dir), _plain(package.environment): package.digest.hex()}
    _write(held, data_dir)


def forget(environment: str, data_dir: Path) -> bool:
    """Allow no package of this name any more; returns whether one was. Raises StorageError."""
    held = dict(remembered(data_dir))
    if held.pop(_plain(environment), None) is None:
        return False
    _write(held, data_dir)
    return True


def _write(held: Mapping[str, str], data_dir: Path) -> None:
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise file_error(error, data_dir) from error
    write_private(data_dir / REMEMBERED, json.dumps(held, indent=2) + "\n")


def _plain(name: str) -> str:
    return name.replace("_", "-").lower()


def root_of(module: str) -> Path | None:
    """The directory of a top-level package, or the file of a module, that an import would take."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    for directory in spec.submodule_search_locations or ():
        return Path(directory)
    return Path(spec.origin) if spec.origin and Path(spec.origin).is_file() else None


def _digest(roots: list[Path]) -> bytes:
    """One digest of all source and data files in these directories, by name and content."""
    parts: list[bytes] = []
    for root in roots:
        for name, path in _files(root):
            parts += [digest(name.encode()), digest(path.read_bytes())]
    return digest(b"".join(parts))


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    """Name and path of what belongs to a module, sorted; nothing that Python itself wrote."""
    if root.is_file():
        yield root.name, root
        return
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root.parent)
        if path.is_file() and path.suffix != ".pyc" and "__pycache__" not in name.parts:
            yield name.as_posix(), path
