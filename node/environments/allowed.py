"""Decide if a worker may play an environment: a bundled one, or a package its owner allowed.

Playing the environment of a manifest imports a module by a name that a stranger chose. So before any import a
worker finds the package of that name, compares its digest with the manifest's, and checks that the owner of
this machine allowed it. No package is ever downloaded.
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

from ... import __version__
from ...crypto.hashing import digest
from ...protocol.leases import LEASED_PROMPTS
from ...protocol.manifests import EnvironmentContract, SamplingContract
from ...protocol.version import MAX_NAME
from ..config.run import EnvironmentConfig, RunConfig, TrainedEnvironment
from ..errors import BAD_FILE, StorageError, UsageError, file_error, one_line, printable
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
    "reverse-text-hub": "reverse_text_hub",
    "alphabet-sort-hub": "alphabet_sort_hub",
}
"""Environments that come with this package, and their modules in tasksets/."""
SCORED_BY = {"math": "math-verify", "math_env": "math-verify", "reasoning_gym": "reasoning-gym"}
"""Modules in tasksets/ -> the distribution whose release their tasks and rewards depend on."""
READS_DATA = frozenset({"math_env", "reverse_text_hub", "alphabet_sort_hub"})
"""Modules in tasksets/ that read a data set named by the run; they need permission, like a package."""
LIBRARY = "verifiers"
LIBRARY_TASKSETS = ("v1", "tasksets")
"""Subpackage of the library's own tasksets, which it searches first."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
REMEMBERED = "allowed_environments.json"
"""File of the packages that the owner always allows, in a data directory: environment -> digest."""
SHOWN = 12


@dataclass(frozen=True)
class Package:
    """Installed code of an environment."""

    environment: str
    label: str
    """Distribution and version, for display."""
    digest: bytes
    """Digest of the files' names and contents; equal wherever the same release is installed."""
    of_library: bool = False
    """Whether it is one of the library's own tasksets."""
    bundled: bool = False
    """Whether it scores a bundled taskset, which needs no permission; its release still matters."""

    def __str__(self) -> str:
        return f"package {self.label}, digest {self.digest.hex()[:SHOWN]}"


class EnvironmentNotAllowed(UsageError):
    """The owner of this machine has not allowed the environment of a run."""

    def __init__(self, package: Package, data_dir: Path) -> None:
        """`data_dir` is that of the worker which would run the code."""
        self.package = package
        why = ""
        if package.of_library:
            why = ", one of the library's own tasksets, which may fetch and run code of others"
        if package.environment in BUNDLED:
            why = ", bundled, which reads a data set that the run names"
        super().__init__(
            f"this run wants to run the environment {package.environment!r} ({package}{why}) on this machine: "
            f"if you trust it, allow it with --allow-environment {package.environment}, or this release for "
            f"good with `primerl-node env trust {package.environment} --data-dir {data_dir}`"
        )


def find_package(environment: str) -> Package | None:
    """Find the package of an environment without importing it; None if a bundled one needs none.

    Raises UsageError if the name cannot be an environment's, or the package is not installed.
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
        raise UsageError(
            f"the environment {environment!r} is not installed here: `pip install` its wheel or directory "
            "into the Python of this program"
        )
    names = distributions_by_module().get(module, [])
    if not names:
        return Package(environment, f"{module}, no distribution", _digest([root]))
    return Package(environment, *_distribution(names[0]))


def distributions_by_module() -> Mapping[str, Sequence[str]]:
    """Map top-level modules to the names of the distributions that installed them.

    Reading the metadata of a folder of many takes a second; it is repeated after an installation or removal.
    """
    packages: dict[str, list[str]] = {}
    for folder in dict.fromkeys(sys.path):
        for module, names in _read_folder(folder, _modified(folder)).items():
            packages.setdefault(module, []).extend(names)
    return packages


@lru_cache(64)
def _read_folder(folder: str, _: int) -> Mapping[str, Sequence[str]]:
    """Do what metadata.packages_distributions() does for all of sys.path."""
    packages: dict[str, list[str]] = {}
    for distribution in metadata.distributions(path=[folder]):
        modules = set((distribution.read_text("top_level.txt") or "").split()) or {
            file.parts[0] if len(file.parts) > 1 else file.stem
            for file in distribution.files or ()
            if file.suffix == ".py"
        }
        for module in modules:
            packages.setdefault(module, []).append(distribution.metadata["Name"])
    return packages


def _modified(folder: str) -> int:
    """Return a folder's modification time, ns, which each installation into it sets."""
    try:
        return Path(folder).stat().st_mtime_ns
    except OSError:
        return 0


def module_of(environment: str) -> str:
    """Return the module that `verifiers` imports for an environment's id."""
    return environment.replace("-", "_").lower()


def source_of(environment: str) -> Path | None:
    """Return the path of an environment's code; None for a bundled one, or if not found."""
    known = environment in (*BUNDLED, LEASED_PROMPTS) or not NAME.fullmatch(environment)
    return None if known else root_of(module_of(environment))


def _of_library(module: str) -> Path | None:
    """Return the path of the library's own taskset of this name, which has priority; else None."""
    library = root_of(LIBRARY)
    if library is None:
        return None
    own = library.joinpath(*LIBRARY_TASKSETS, module)
    own = own if own.is_dir() else own.with_suffix(".py")
    return own if own.exists() else None


def _scoring_package(environment: str) -> Package | None:
    """Find what a bundled environment's tasks and scores depend on; None if it needs no permission.

    That is the distribution that scores it, or the bundled tasksets where it reads a data set.
    """
    module = BUNDLED[environment]
    if (name := SCORED_BY.get(module)) is None:
        if module not in READS_DATA:
            return None
        folder = Path(__file__).parent / "tasksets"
        return Package(environment, f"primerl-node {__version__}", _digest([folder]))
    try:
        label, digest = _distribution(name)
    except metadata.PackageNotFoundError as error:
        raise UsageError(
            f"the environment {environment!r} needs {name}: pip install {name}, or primerl-node[{name}]"
        ) from error
    return Package(environment, label, digest, bundled=module not in READS_DATA)


def _distribution(name: str) -> tuple[str, bytes]:
    """Return (name and version, digest) of an installed distribution.

    Raises PackageNotFoundError.
    """
    label = f"{name} {metadata.version(name)}"
    modules = sorted(module for module, names in distributions_by_module().items() if name in names)
    return label, _digest([root for module in modules if (root := root_of(module)) is not None])


def environment_contracts(config: RunConfig) -> tuple[EnvironmentContract, ...]:
    """Make the contracts of the environments of `config`, with the packages installed here.

    A package that cannot be found is left empty: the start of the environment reports it.
    """
    library = f"{LIBRARY} {metadata.version(LIBRARY)}"
    return tuple(_contract(environment, config, library) for environment in config.mixture)


def _contract(
    environment: TrainedEnvironment, config: RunConfig, library: str
) -> EnvironmentContract:
    try:
        package = find_package(environment.id)
    except UsageError:
        package = None
    return EnvironmentContract(
        name=environment.name,
        id=environment.id,
        config=_published(environment),
        seed=config.seed,
        version=library,
        group_size=environment.group_size,
        max_turns=environment.max_turns,
        sampling=SamplingContract(
            **config.sampling_of(environment).model_dump(), stop=tuple(environment.stop)
        ),
        package=package.label if package else "",
        package_digest=package.digest if package else b"",
        rewards=_rewards(environment),
    )


def _rewards(environment: TrainedEnvironment) -> Literal["recomputed", "sampled", "claimed"]:
    if not environment.deterministic_tools:
        return "claimed"
    return (
        "recomputed"
        if environment.deterministic_rewards and environment.judge is None
        else "sampled"
    )


def _published(environment: TrainedEnvironment) -> bytes:
    """Encode the options for the manifest as JSON.

    Defaults of options that came later are left out: they are the bytes of releases before these, so that runs
    of those releases go on.
    """
    published, default = environment.published(), EnvironmentConfig()
    names = ("judge", "chat_template_kwargs", "earlier_reasoning")
    later = {name for name in names if getattr(published, name) == getattr(default, name)}
    later.add("stop")  # in the contract's sampling
    return published.model_dump_json(exclude=later).encode()


def options_of(contract: EnvironmentContract) -> EnvironmentConfig:
    """Decode the options of a manifest's environment, without the judge's URL and key.

    Raises UsageError if this version does not know them, or if they name another environment than the manifest:
    the import uses the options' name, the permission the manifest's.
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
    options = options.model_copy(update={"stop": list(contract.sampling.stop)})
    return options.published()


def check_allowed(contract: EnvironmentContract, allow: list[str], data_dir: Path) -> None:
    """Raise UsageError unless a worker may play this environment.

    Raises EnvironmentNotAllowed if its owner can allow it, StorageError if the owner's list of allowed packages
    cannot be read.
    """
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
        raise EnvironmentNotAllowed(package, data_dir)


def remembered(data_dir: Path) -> Mapping[str, str]:
    """Read the packages that the owner always allows: environment -> digest. Raises StorageError."""
    path = data_dir / REMEMBERED
    try:
        packages = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except BAD_FILE as error:
        raise StorageError(f"{path} cannot be read ({error}): remove it") from error
    if not isinstance(packages, dict):
        raise StorageError(f"{path} does not hold a JSON object: remove it")
    return {str(name): str(value) for name, value in packages.items()}


def is_remembered(package: Package, data_dir: Path) -> bool:
    """Return whether the owner always allows exactly this package. Raises StorageError."""
    return remembered(data_dir).get(_plain(package.environment)) == package.digest.hex()


def remember(package: Package, data_dir: Path) -> None:
    """Always allow exactly this package from now on. Raises StorageError."""
    packages = {**remembered(data_dir), _plain(package.environment): package.digest.hex()}
    _write(packages, data_dir)


def forget(environment: str, data_dir: Path) -> bool:
    """Stop allowing packages of this name; return whether one was allowed.

    Raises StorageError.
    """
    packages = dict(remembered(data_dir))
    if packages.pop(_plain(environment), None) is None:
        return False
    _write(packages, data_dir)
    return True


def _write(packages: Mapping[str, str], data_dir: Path) -> None:
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise file_error(error, data_dir) from error
    write_private(data_dir / REMEMBERED, json.dumps(packages, indent=2) + "\n")


def _plain(name: str) -> str:
    return name.replace("_", "-").lower()


def root_of(module: str) -> Path | None:
    """Return the directory or file that an import of a top-level module would use; else None."""
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
    """Hash all source and data files in these directories, by name and content."""
    parts: list[bytes] = []
    for root in roots:
        for name, path in _files(root):
            parts += [digest(name.encode()), digest(path.read_bytes())]
    return digest(b"".join(parts))


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of a module's files, sorted; caches of Python are left out."""
    if root.is_file():
        yield root.name, root
        return
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root.parent)
        if path.is_file() and path.suffix != ".pyc" and "__pycache__" not in name.parts:
            yield name.as_posix(), path
