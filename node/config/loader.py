"""Read a config from TOML files, environment and flags, and write one as TOML.

Errors name the key. Layers in increasing priority: defaults < `@ file`s (left to right) < `PRIMERL_A__B` <
`--a.b`. They are merged first and validated once, so that a flag can correct a file's invalid value.
"""

import difflib
import json
import logging
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_config import BaseConfig, ConfigFileError, cli
from pydantic_core import ErrorDetails

from ..errors import BETWEEN_PROBLEMS, UsageError
from .evaluation import EvalConfig
from .judge import JudgeRunConfig
from .paths import expand_home
from .removed import drop_defaults, rename, replacement
from .run import JoinConfig, RunConfig
from .serving import ServeConfig
from .sft import SftConfig

logger = logging.getLogger(__name__)

PREFIX = "PRIMERL_"
NOT_CONFIG = frozenset({"PRIMERL_PARENT_PID", "PRIMERL_PASSPHRASE", "PRIMERL_PASSPHRASE_FILE"})
"""PRIMERL_ variables that are not config keys."""
COMMANDS: tuple[type[BaseConfig], ...] = (
    RunConfig,
    JoinConfig,
    SftConfig,
    EvalConfig,
    ServeConfig,
    JudgeRunConfig,
)
"""All commands' configs: a variable that one command does not know may be another's setting."""
OF_PRIME_RL = frozenset({"ckpt", "deployment", "inference", "orchestrator", "slurm", "trainer"})
"""Sections of prime-rl's files that are not ours."""
SWITCHES = frozenset({"resume"})
"""Sections that a flag without a value enables."""
TICKET = "primerl"
"""Prefix of a ticket."""
RECIPE = "reverse_text/laptop"
BUNDLED = Path(__file__).resolve().parents[2] / "configs"

Config = TypeVar("Config", bound=BaseConfig)
Section = TypeVar("Section", bound=BaseModel)
Tree = dict[str, Any]


class _Lower(BaseModel):
    """The lower layers as pydantic_config's `default`, with any keys, not validated."""

    model_config = ConfigDict(extra="allow")


@dataclass(frozen=True)
class _Layer:
    name: str
    tree: Tree


def load(cls: type[Config], args: Sequence[str], environ: Mapping[str, str]) -> Config:
    """Resolve the config that `args` (`@ file`, `--a.b value`) and `environ` describe.

    Raises:
        UsageError: unreadable file, unknown keys (all of them, each with the nearest valid key), bad value.
    """
    flags, switches = _switches(_split_equals(args))
    flags, layers = _files(cls, _named_types(cls, flags))
    layers.append(_Layer("in the environment", _environment(cls, environ)))
    flags, loose = _structured(cls, _joined(cls, flags))
    layers.append(_Layer("on the command line", merge(loose, switches)))
    lower: Tree = {}
    for layer in layers:
        lower = merge(lower, layer.tree)
    try:
        # pydantic_config only calls its model_dump(), so any model works as `default`.
        default = cast(Config, _Lower.model_validate(lower))
        config = cli(cls, args=flags, default=default)
    except ConfigFileError as error:
        raise UsageError(_explain(cls, error, layers, flags)) from error
    except json.JSONDecodeError as error:  # from a flag for an optional table
        raise UsageError(f"not valid JSON on the command line: {error}") from error
    return _expand_home(config)


def merge(base: Tree, over: Mapping[str, Any]) -> Tree:
    """Merge `over` into a copy of `base`, table by table.

    If `over` has another `id`, the `args` of `base` are dropped, as they belong to another environment. If it
    names another model, `create` of `base` is dropped, too. A key with `_` in `over` also matches the same key
    with `-` in `base`, since flags and variables cannot spell that one.
    """
    result = dict(base)
    if "name" in over and "create" in base and over["name"] != base.get("name"):
        result.pop("create")
    if "id" in over and "id" in base and over["id"] != base["id"]:
        result.pop("args", None)
    dashed = {key.replace("-", "_"): key for key in result if "-" in key}
    for name, value in over.items():
        key = name if name in result else dashed.get(name, name)
        below = result.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        result[key] = merge(cast(Tree, below), cast(Tree, value)) if both else value
    return result


def keys(cls: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """List the dotted keys of a config class; NAME is a placeholder in tables of named sections."""
    for name, field in cls.model_fields.items():
        inner = model_in(field.annotation)
        if inner is None:
            yield prefix + name
        else:
            named = ".NAME" if get_origin(field.annotation) is dict else ""
            yield from keys(inner, f"{prefix}{name}{named}.")


def find_file(name: str) -> Path:
    """Find a config by path, or a bundled one by name. Raises UsageError."""
    path = expand_home(name)
    if path.is_file():
        return path
    if path.is_dir():
        raise UsageError(f"{name} is a directory: name a config file in it")
    inside = path.relative_to("configs") if path.is_relative_to("configs") else path
    names = bundled()
    if (known := str(inside.with_suffix(""))) in names:
        return BUNDLED / f"{known}.toml"
    if close := difflib.get_close_matches(str(inside.with_suffix("")), names, n=1, cutoff=0.75):
        raise UsageError(f"no config file {name}: did you mean {close[0]}?")
    raise UsageError(
        f"no config file {name}: give a path, or a bundled one, such as demo or {RECIPE} ({len(names)} are in "
        f"{BUNDLED})"
    )


def bundled() -> list[str]:
    """List the names of the bundled configs, as `@ NAME` takes them."""
    return sorted(
        str(file.relative_to(BUNDLED).with_suffix("")) for file in BUNDLED.rglob("*.toml")
    )


def _split_equals(args: Sequence[str]) -> list[str]:
    """Split `--a=b` into `--a b`: pydantic_config takes lists and JSON only in the second form."""
    result: list[str] = []
    for arg in args:
        flag, equals, value = arg.partition("=")
        result.extend([flag, value] if equals and flag.startswith("--") else [arg])
    return result


def _switches(args: Sequence[str]) -> tuple[list[str], Tree]:
    """Extract `--resume`, `--resume true` and `--no-resume`, which enable or disable a section.

    An `@ file` after one of them is then a file for the whole config.
    """
    flags: list[str] = []
    tree: Tree = {}
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        name = arg.removeprefix("--no-").removeprefix("--")
        if name not in SWITCHES or not arg.startswith("--"):
            flags.append(arg)
            continue
        on = not arg.startswith("--no-")
        if rest and rest[0].lower() in ("true", "false"):
            on = on == (rest.pop(0).lower() == "true")
        tree[name] = {} if on else None
    return flags, tree


def _named_types(cls: type[BaseModel], args: Sequence[str]) -> list[str]:
    """Expand `--engine vllm` to `--engine.type vllm`, for sections with a `type`."""
    result: list[str] = []
    for arg, value in zip(args, [*args[1:], "--"], strict=False):
        path = arg.removeprefix("--").replace("-", "_").split(".")
        annotation, rest = _field(cls, path) if arg.startswith("--") else (None, path)
        section = model_in(annotation) if not rest else None
        typed = section is not None and "type" in section.model_fields
        result.append(f"{arg}.type" if typed and not value.startswith(("--", "@", "{")) else arg)
    return result


def _files(cls: type[BaseModel], args: list[str]) -> tuple[list[str], list[_Layer]]:
    """Extract `@ file` and `--a.b @ file` from the arguments."""
    flags: list[str] = []
    layers: list[_Layer] = []
    rest = iter(args)
    for arg in rest:
        if not arg.startswith("@"):
            flags.append(arg)
            continue
        name = arg[1:] or next(rest, "")
        if not name:
            raise UsageError("@ must be followed by a config file")
        tree = read_file(find_file(name))
        path = flags[-1][2:].replace("-", "_").split(".") if flags else []
        annotation, rest_of_path = _field(cls, path)
        if path and not rest_of_path and model_in(annotation):
            tree = nest(path, tree)
            flags.pop()
        drop_defaults(tree)
        for line in rename(tree):
            logger.warning("config key in %s: %s", name, line)
        layers.append(_Layer(f"in {name}", tree))
    return flags, layers


def read_file(path: Path) -> Tree:
    """Read a TOML file, or a JSON one by its name. Raises UsageError."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} is not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {error}"
        ) from error
    if not isinstance(tree, dict):
        raise UsageError(f"{path} must hold a table of keys")
    return cast(Tree, tree)


def _environment(cls: type[BaseModel], environ: Mapping[str, str]) -> Tree:
    tree: Tree = {}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable in NOT_CONFIG:
            continue
        path = variable[len(PREFIX) :].lower().split("__")
        if not _knows(cls, path):
            if any(_knows(other, path) for other in COMMANDS):
                continue
            if instead := replacement(".".join(path)):
                raise UsageError(f"config key {variable} in the environment was removed: {instead}")
            guess = nearest(".".join(path), [key for command in COMMANDS for key in keys(command)])
            named = PREFIX + guess.upper().replace(".", "__")
            hint = f": did you mean {named}?" if guess else ""
            raise UsageError(f"unknown config key in the environment, {variable}{hint}")
        tree = merge(tree, nest(path, _from_text(cls, path, environ[variable])))
    return tree


def nest(path: Sequence[str], value: Any) -> Tree:
    """Return `value` inside a table for each part of `path`."""
    for part in reversed(path):
        value = {part: value}
    return cast(Tree, value)


def _from_text(cls: type[BaseModel], path: Sequence[str], text: str) -> Any:
    """Parse the value of a variable or flag; scalars stay text, for the field's type to convert."""
    if _inside_dict(cls, path):
        return _scalar(text)
    if not text.startswith(("[", "{")):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"{'.'.join(path)} is not valid JSON: {error}") from error


def _joined(cls: type[BaseModel], args: Sequence[str]) -> list[str]:
    """Join the values of a list's flag that is given more than once; pydantic_config keeps the last alone."""
    given: dict[str, list[Any]] = {}
    counts: dict[str, int] = {}
    values: list[Any] | None = None
    path: list[str] = []
    for arg in args:
        if arg.startswith("--"):
            name = arg.replace("-", "_")
            path = _path(arg)
            values = given.setdefault(name, []) if _is_list(cls, path) else None
            counts[name] = counts.get(name, 0) + 1
        elif values is not None:
            parsed = _from_text(cls, path, arg)
            values.extend(cast(list[Any], parsed) if isinstance(parsed, list) else [parsed])
    again = {name for name in given if counts[name] > 1}
    result: list[str] = []
    skipping = False
    for arg in args:
        if arg.startswith("--"):
            name = arg.replace("-", "_")
            skipping = name in again
            if skipping and name in given:
                result.extend([arg, json.dumps(given.pop(name))])
        if not skipping:
            result.append(arg)
    return result


def _path(arg: str) -> list[str]:
    """Split a flag into the parts of its key."""
    return arg[2:].replace("-", "_").split(".")


def _structured(cls: type[BaseModel], args: list[str]) -> tuple[list[str], Tree]:
    """Extract flags for free tables, ids and JSON values.

    Examples: `--environment.args.min-len 5`, `--environment.id math`, `--training.betas [0.9,0.99]`.

    merge() must see ids, as another id drops `args`. pydantic_config guesses the type of a table's value only
    if no file set a neighbouring key, and accepts JSON for lists but not for tuples. A model's name drops
    `create`, unless flags describe that, too.
    """
    shaped = any(arg.startswith("--model.create") for arg in args)
    flags: list[str] = []
    tree: Tree = {}
    rest = iter(args)
    for arg in rest:
        path = _path(arg) if arg.startswith("--") else []
        drops = path[-1:] == ["id"] or (path == ["model", "name"] and not shaped)
        inside = _inside_dict(cls, path) or (drops and _field(cls, path) == (str, []))
        if not inside and not _is_container(cls, path):
            flags.append(arg)
            continue
        value = next(rest, None)
        if value is None:
            raise UsageError(f"{arg} needs a value")
        if inside or value.startswith(("[", "{")):
            tree = merge(tree, nest(path, _from_text(cls, path, value)))
        else:
            flags.extend([arg, value])
    return flags, tree


def _scalar(text: str) -> Any:
    """Parse a TOML value, or a JSON object; other text is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        pass
    try:
        return json.loads(text) if text.startswith("{") else text
    except ValueError:
        return text


def _field(cls: type[BaseModel], path: Sequence[str]) -> tuple[Any, Sequence[str]]:
    """Return the annotation of the deepest field on `path` (root: None), and the rest of it."""
    annotation: Any = None
    while path:
        field = cls.model_fields.get(path[0])
        if field is None:
            return annotation, path
        annotation, path = field.annotation, path[1:]
        inner = model_in(annotation)
        if inner is None:
            return annotation, path
        cls = inner
    return annotation, path


def _knows(cls: type[BaseModel], path: Sequence[str]) -> bool:
    return not _field(cls, path)[1] or _inside_dict(cls, path)


def _inside_dict(cls: type[BaseModel], path: Sequence[str]) -> bool:
    annotation, rest = _field(cls, path)
    return bool(rest) and _origin_of(annotation) is dict


def _is_container(cls: type[BaseModel], path: Sequence[str]) -> bool:
    annotation, rest = _field(cls, path)
    return not rest and _origin_of(annotation) in (dict, list, tuple)


def _origin_of(annotation: Any) -> Any:
    """Return the kind of a container's annotation, also if it is optional; None for others."""
    origins = [get_origin(candidate) for candidate in (annotation, *get_args(annotation))]
    return next((origin for origin in origins if origin in (dict, list, tuple)), None)


def _is_list(cls: type[BaseModel], path: Sequence[str]) -> bool:
    """Return whether a field holds any number of values of one kind."""
    annotation, rest = _field(cls, path)
    if rest:
        return False
    return get_origin(annotation) is list or get_args(annotation)[1:] == (...,)


def model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section class of a field, also if it is optional; None for other fields."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _explain(
    cls: type[BaseModel], error: ConfigFileError, layers: Sequence[_Layer], flags: Sequence[str]
) -> str:
    cause = error.__cause__
    if not isinstance(cause, ValidationError):
        message = " ".join(error.message.split())
        for word in message.removeprefix("Unrecognized arguments: ").split():
            if hint := _of_word(cls, word, flags):
                return f"{word[:40]!r} is not understood here: {hint}"
        return message[:1].lower() + message[1:]
    problems = cause.errors(include_url=False)
    known = list(keys(cls))
    unknown = [
        [str(part) for part in problem["loc"]]
        for problem in problems
        if problem["type"] == "extra_forbidden"
    ]
    origins = [_origin(path, layers, flags) for path in unknown]
    files = {
        origin
        for path, origin in zip(unknown, origins, strict=True)
        if path[0] in OF_PRIME_RL and origin.endswith((".toml", ".json"))
    }
    lines = [_of_prime_rl(origin.removeprefix("in ")) for origin in sorted(files)]
    for path, origin in zip(unknown, origins, strict=True):
        if origin in files:
            continue  # converted with the rest of the file
        name = ".".join(path)
        if path[0] in OF_PRIME_RL:
            hint = ": prime-rl's; `primerl-node import --keys` lists its keys beside ours"
        elif instead := replacement(name):
            lines.append(f"config key {name} {origin} was removed: {instead}")
            continue
        elif guess := nearest(name, known):
            hint = f": did you mean {guess}?"
        else:
            hint = ": --help-all lists the keys"
        lines.append(f"unknown config key {name} {origin}{hint}")
    bad = [problem for problem in problems if problem["type"] != "extra_forbidden"]
    if bad:
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        lines.append(_bad_value(bad[0], layers, flags) + more)
    return (
        lines[0] if len(lines) == 1 else BETWEEN_PROBLEMS.join([f"{len(lines)} problems:", *lines])
    )


def _of_word(cls: type[BaseModel], word: str, flags: Sequence[str]) -> str:
    """Say what an argument that is no flag was probably meant to be; "" if nothing is known."""
    at = flags.index(word) if word in flags else 0
    before = flags[at - 1] if at else ""
    if before.startswith("--"):
        annotation, rest = _field(cls, _path(before))
        if annotation is bool and not rest:
            return f"{before} is true or false"
    if word.endswith((".toml", ".json")):
        return f"a config file follows an @, as in `@ {word}`"
    if "ticket" in cls.model_fields and _may_be_ticket(word):
        return f"did you mean `--ticket {word if len(word) <= 40 else f'{word[:9]}..'}`?"
    if word.startswith("-") and not word.startswith("--") and len(word) > 2:
        return f"a flag has two dashes, as in -{word}"
    if (path := expand_home(word)).is_dir():
        return _of_directory(cls, path)
    try:
        find_file(word)
    except UsageError:
        return ""
    return f"did you mean `@ {word}`?"


def _of_directory(cls: type[BaseModel], path: Path) -> str:
    """Say which flag takes a directory of weights or of a model; "" if none does."""
    if "weights_dir" in cls.model_fields:
        weights = path / "weights" if (path / "weights").is_dir() else path
        flag = "models" if (path / "config.json").is_file() and weights == path else "weights-dir"
        return f"did you mean `--{flag} {weights}`?"
    holds_model = "model" in cls.model_fields and (path / "tokenizer.json").is_file()
    return f"did you mean `--model.name {path}`?" if holds_model else ""


def _may_be_ticket(word: str) -> bool:
    """Return whether a word is a ticket, or a link or a file that may hold one."""
    return word.startswith((TICKET, "https://")) or word.endswith((".ticket", ".txt"))


def _of_prime_rl(file: str) -> str:
    return f"{file} is a config of prime-rl's: `primerl-node import {file} --output mine.toml` converts it"


def _bad_value(first: ErrorDetails, layers: Sequence[_Layer], flags: Sequence[str]) -> str:
    path = [str(part) for part in first["loc"]]
    if not path:
        return str(first["msg"]).removeprefix("Value error, ")
    value = first["input"]
    got = "" if isinstance(value, dict | list) else f", not {value!r}"
    where = _origin(path, layers, flags)
    return f"{'.'.join(path)} {where}: {_lower(str(first['msg']))}{got}"


def _lower(message: str) -> str:
    return message.removeprefix("Value error, ").replace("Input should", "should", 1)


def _origin(path: Sequence[str], layers: Sequence[_Layer], flags: Sequence[str]) -> str:
    """Name the source that set `path` last: a flag, else the highest layer that has it."""
    name = ".".join(path)
    for layer in reversed(layers):
        given = (flag.removeprefix("--").replace("-", "_") for flag in flags)
        if any(name == flag or name.startswith(f"{flag}.") for flag in given):
            break
        node: Any = layer.tree
        for part in path:
            if isinstance(node, list):
                node = node[int(part)] if part.isdigit() and int(part) < len(node) else None
            else:
                node = node.get(part) if isinstance(node, dict) else None
        if node is not None:
            return layer.name
    return "on the command line"


def nearest(name: str, known: Sequence[str]) -> str:
    """Return the key or section among `known` dotted keys that `name` was probably meant to be, or ""."""
    name = name.replace("-", "_")
    section, _, last = name.rpartition(".")
    if last in known:  # max_steps, for training.max_steps
        return last
    inside = {
        key.removeprefix(f"{section}."): key for key in known if key.startswith(f"{section}.")
    }
    siblings = [key for key in inside if "." not in key] if section else []
    if close := difflib.get_close_matches(last, siblings, n=1):
        return inside[close[0]]
    sections = {key[: dot.start()] for key in known for dot in re.finditer(r"\.", key)}
    if close := difflib.get_close_matches(name, [*known, *sorted(sections)], n=1, cutoff=0.75):
        return close[0]
    leaves: dict[str, str] = {}
    for key in [*known, *sorted(sections)]:
        leaves.setdefault(key.rpartition(".")[2], key)
    initials = "".join(part[:1] for part in last.split("_"))  # learning_rate: lr
    if initials in leaves and len(initials) > 1:
        return leaves[initials]
    close = difflib.get_close_matches(last, list(leaves), n=1, cutoff=0.75)
    return leaves[close[0]] if close else ""


def _expand_home(config: Section) -> Section:
    """Replace `~` in all paths, those of sections too."""
    new: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, Path):
            new[name] = expand_home(value)
        elif isinstance(value, BaseModel) and (section := _expand_home(value)) is not value:
            new[name] = section
    return config.model_copy(update=new) if new else config


_BARE = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(values: Mapping[str, Any]) -> str:
    """Format `values` as TOML that loads as the same config; keys that are None become comments.

    Raises TypeError for values that TOML cannot represent.
    """
    lines: list[str] = []
    _table(lines, (), values)
    return "\n".join(lines).strip() + "\n"


def _table(lines: list[str], path: tuple[str, ...], values: Mapping[str, Any]) -> None:
    plain = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    nested = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    if path and (plain or not nested):
        lines.extend(["", f"[{'.'.join(map(_key, path))}]"])
    for key, value in plain.items():
        unset = value is None
        lines.append(f"# {_key(key)} is not set" if unset else f"{_key(key)} = {_value(value)}")
    for key, value in nested.items():
        _table(lines, (*path, key), value)


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _string(name)


def _string(text: str) -> str:
    # JSON's escapes are valid in TOML, which requires DEL to be escaped, too.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, Mapping):  # a table inside a list
        items = [f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None]
        return "{ " + ", ".join(items) + " }"
    raise TypeError(f"TOML cannot represent a {type(value).__name__}")
