"""Convert prime-rl configs to ours: a table of keys, and code for all that needs more.

Keys of other prime-rl layouts are renamed to that of 0.8 (OTHER_NAMES), then looked up in TABLE. Invariant:
no key is dropped without a note that names it.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_config import BaseConfig

from ..errors import UsageError, printable
from .evaluation import EvalConfig
from .loader import Tree, merge, model_in, nearest, nest, read_file, to_toml
from .run import OnlineSamplingConfig, RunConfig
from .serving import ServeConfig
from .sft import SftConfig

TABLE, OTHER_NAMES = (
    re.sub(r"^;.*\n", "", Path(__file__).with_name(name).read_text("utf-8"), flags=re.M)
    for name in ("prime_rl_keys.txt", "prime_rl_names.txt")
)
"""Keys of prime-rl's configs and ours; other names of prime-rl's keys."""

Component = Literal["rl", "trainer", "orchestrator", "inference", "sft", "evals"]
Kind = Literal["same", "differs", "needless", "missing"]
COMMANDS: Mapping[str, type[BaseConfig]] = {
    "rl": RunConfig,
    "train": RunConfig,
    "sft": SftConfig,
    "eval": EvalConfig,
    "inference": ServeConfig,
}
"""Command -> config class of the written file."""
MANY_STEPS = 1_000_000
"""max_steps of runs without one, which prime-rl users stop by hand."""
GPUS_PER_NODE = 8
"""prime-rl's default."""
MAX_NOTE = 400
"""Most characters of a note."""


# -- values ----------------------------------------------------------------------------------------


class Unconvertible(Exception):
    """A value that has no counterpart; the message says why, if the table's remark does not."""


class Several(dict[str, Any]):
    """Our keys that one key of prime-rl sets, unless they are set already.

    `_name` is for _finish_*().
    """


HINT = (
    "Here is an example of an expert response:\n<demonstration>\n{demonstration}\n</demonstration>"
)
"""Default `template` of prime-rl's opsd."""
ALGORITHMS: Mapping[str, dict[str, Any]] = {
    "grpo": {"training.advantage": "grpo"},
    "max_rl": {"training.advantage": "max_rl"},
    "opd": {"_loss": "reverse_kl"},
    "opsd": {"_loss": "reverse_kl", "training.loss.teacher": "policy", "_hint": HINT},
    "echo": {"training.advantage": "grpo", "training.loss.echo_alpha": 0.1},
    "rae": {"training.advantage": "rae"},
    "hierarchical_grpo": {"training.advantage": "hierarchical_grpo"},
}
OTHER_ALGORITHMS = {
    "sft": "trained as grpo: rollouts are the policy's own. Another model's: docs/sft.md, or training.sft",
}


LOSSES: Mapping[str, dict[str, Any]] = {
    "default": {"type": "dppo_kl"},
    "ipo": {"type": "ipo"},
    "icepop": {
        "type": "reinforce",
        "importance_max": 100.0,
        "rejection": "token",
        "rejection_low": 0.2,
        "rejection_high": 5.0,
        "kl_tau": 0.0,
    },
    "ppo": {"type": "grpo_two_sided", "clip_low": 0.2, "clip_high": 0.2, "clip_ratio_max": 1e4},
    "cispo": {"type": "reinforce", "importance_min": 0.0, "importance_max": 5.0, "kl_tau": 0.0},
    "custom": {"type": "custom"},
    "sft": {"type": "ce"},
}
"""Losses of prime-rl -> keys of [training.loss], with its defaults."""
RATIOS: Mapping[str, tuple[str, str]] = {
    "icepop": ("rejection_low", "rejection_high"),
    "ppo": ("clip_low", "clip_high"),
    "cispo": ("importance_min", "importance_max"),
}
"""Loss of prime-rl -> our keys for its ratio_low and ratio_high; those of ppo are distances from 1."""
NEWER_LOSS = {"type": "ipo", "ipo_threshold": 0.3, "kl_tau": 0.0}
"""Default loss of prime-rl after 0.8, in its latest state; before, ipo_threshold was 0.1."""
NEWER_TOP_K = 512
"""top_k of prime-rl after 0.8 where only top_p limits the tokens."""


def _algorithm(value: Any) -> Any:
    name = "grpo" if value in ("default", "rl") else str(value)
    if name not in ALGORITHMS:
        raise Unconvertible(OTHER_ALGORITHMS.get(name, "trained as grpo"))
    return Several(ALGORITHMS[name])


def _checkpointing(value: Any) -> str:
    if not _switch(value):
        return "none"
    mode = value.get("mode") if isinstance(value, Mapping) else None
    return "selective" if mode == "selective" else "full"


def _filters(value: Any) -> Any:
    filters = [cast(Tree, item) for item in _list(value) if isinstance(item, dict)]
    if [item for item in filters if item.get("type") != "zero_advantage"]:
        raise Unconvertible("")
    return Several(
        {"training.filter_zero_advantages": any(item.get("enforce") for item in filters)}
    )


def _gate(value: Any) -> Any:
    gates = value.get("gates", {})
    rest = [name for name, gate in gates.items() if gate.get("type") != "advantage_range"]
    if rest or set(value) - {"gates"}:
        raise Unconvertible("")
    return gates


def _head_chunk(value: Any) -> Any:
    if isinstance(value, int) and value > 0:
        return value
    raise Unconvertible("logits are always made in pieces")


def _lora_modules(value: Any) -> list[str]:
    names = [name for name in _list(value) if name != "experts"]
    if not names:
        raise Unconvertible("adapters are for linear layers, by the last part of their names")
    return names


def _only_one(value: Any) -> Any:
    items = _list(value)
    if len(items) != 1:
        raise Unconvertible("only one is supported: write the rows of others into files")
    return items[0]


def _norm(value: Any) -> Any:
    return 1e9 if value is None else value


def _weight_decay(value: Any) -> Any:
    return Several() if value == "auto" else value


def _switch(value: Any) -> bool:
    """Return whether an optional section is present and not false."""
    return value is not None and value is not False


CONVERTERS: Mapping[str, Callable[[Any], Any]] = {
    "algorithm": _algorithm,
    "checkpointing": _checkpointing,
    "filters": _filters,
    "gate": _gate,
    "gpu_names": lambda value: "".join(f"{name}," for name in _list(value)),
    "head_chunk": _head_chunk,
    "import_path": lambda value: ":".join(str(value).rpartition(".")[::2]),
    "lora_modules": _lora_modules,
    "norm": _norm,
    "only_one": _only_one,
    "resume_step": lambda value: Several({"resume": {}}) if value == -1 else value,
    "roles": lambda value: [role for role, learned in value.items() if learned],
    "section": lambda _: {},
    "switch": _switch,
    "top_k": lambda value: max(0, value or 0),
    "weight_decay": _weight_decay,
}


def _reader(how: str, ours: str) -> Callable[[Any], Any] | None:
    """Return the converter for a third column of TABLE.

    `raw NAME` stores the value for _finish_*(), `each` sets all our keys, `map A=B ..` translates (with `*`
    other values stay unchanged), `off V ..` drops the value if it is one of these (JSON); other words are
    CONVERTERS. A leading `table`: a table or None is one value of this key.
    """
    word, _, rest = how.partition(" ")
    if word == "raw":
        return lambda value: Several({f"_{rest}": value})
    if word == "each":
        return lambda value: Several(dict.fromkeys(ours.split(", "), value))
    if word == "map":
        pairs = dict(pair.split("=") for pair in rest.split() if "=" in pair)
        return _one_of(pairs, others=rest.endswith("*"))
    if word == "off":
        neutral = [json.loads(text) for text in rest.split()]
        return _one_of({json.dumps(value): Several() for value in neutral}, key=json.dumps)
    return CONVERTERS[word] if word else None


def _one_of(
    choices: Mapping[str, Any], *, key: Callable[[Any], str] = str, others: bool = False
) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if key(value) in choices:
            return choices[key(value)]
        if others:
            return value
        raise Unconvertible("")

    return convert


# -- the table -------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """One key's line of TABLE."""

    key: str
    kind: Kind
    ours: str
    remark: str
    convert: Callable[[Any], Any] | None
    whole: bool


def _lines(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each key of a table with the other columns of its line; headings have no columns."""
    section = ""
    for line in re.sub(r"\n +", " ", text.strip()).splitlines():
        keys, *columns = [cell.strip() for cell in line.split("|")]
        if line.startswith("# "):
            section = f"{columns[0]}." if columns else ""
            yield keys[2:], []
            continue
        before = ""
        for key in keys.split(", "):
            key = before.rpartition(".")[0] + key if key.startswith(".") else key
            last = key.rpartition(".")[2]
            yield section + key, [re.sub(r"(^|[. ])=$", rf"\1{last}", columns[0]), *columns[1:]]
            before = key


def _sections() -> dict[str, list[Rule]]:
    """Parse TABLE to heading -> rules."""
    sections: dict[str, list[Rule]] = {}
    rules: list[Rule] = []
    kinds: Mapping[str, Kind] = {"-": "missing", ".": "needless", "~": "differs"}
    for key, columns in _lines(TABLE):
        if not columns:
            rules = sections.setdefault(key, [])
            continue
        ours, how, remark = [*columns, "", ""][:3]
        kind: Kind = kinds.get(ours[:1], "same")
        ours = ours if kind == "same" else ours[1:].strip()
        convert = _reader(how.removeprefix("table").strip(), ours)
        rules.append(Rule(key, kind, ours, remark, convert, how.startswith("table")))
    return sections


SECTIONS = _sections()
RULES: Mapping[str, Rule] = {rule.key: rule for rules in SECTIONS.values() for rule in rules}
RENAMED = [(old, columns[0]) for old, columns in _lines(OTHER_NAMES)]


def key_table() -> str:
    """Format all keys as Markdown, for the documentation."""
    marks = {"needless": "not needed: ", "differs": "not the same: ", "missing": "", "same": ""}
    lines: list[str] = []
    for title, rules in SECTIONS.items():
        lines += [f"### {title}", "", "| prime-rl | here | |", "|---|---|---|"]
        for rule in rules:
            ours = ", ".join(f"`{key}`" for key in rule.ours.split(", ") if key)
            ours = "-" if rule.kind == "missing" else ours
            lines.append(f"| `{rule.key}` | {ours} | {marks[rule.kind]}{rule.remark} |")
        lines.append("")
    lines += ["### Other names", "", "| other | above |", "|---|---|"]
    lines += [f"| `{old}` | `{new}` |" for old, new in RENAMED]
    return "\n".join(lines) + "\n"


def _rule(name: str) -> Rule | None:
    """Return the rule of a key: its own, else the longest matching `.*`."""
    covering = (rule for key, rule in RULES.items() if key[-1] == "*" and name.startswith(key[:-1]))
    return RULES.get(name) or max(covering, key=lambda rule: len(rule.key), default=None)


def _renamed(name: str) -> str:
    """Return the newest name of a key."""
    for old, new in RENAMED:
        if name == old:
            return new
        if old.endswith("*") and name.startswith(old[:-1]):
            return _renamed(new[:-1] + name[len(old) - 1 :])
    return name


# -- component of a file ---------------------------------------------------------------------------

SHARED = frozenset(
    """clean clean_output_dir ckpt dashboard deployment dry_run env_vars heartbeat log max_concurrent_runs
    max_steps metrics_server monitors output_dir resume rollout_transport run seed slurm tokenizer wandb
    weight_broadcast""".split()
)
"""Sections and keys that every component may have, but a run has once."""
SHARED_MODEL = ("model.name", "model.vlm", "model.trust_remote_code")
LEARNER = frozenset(
    """dist_timeout_seconds enable_token_export gc loss matmul_precision memory_profiler_path model optim
    scheduler trace_path""".split()
)
"""Sections of sft.toml that belong to the trainer."""
SIGNS: Sequence[tuple[Component, str]] = (
    ("rl", "trainer orchestrator"),
    ("orchestrator", "train buffer max_off_policy_steps"),
    ("evals", "num_examples source select"),
    ("orchestrator", "batch_size group_size rollouts_per_example"),
    ("evals", "source env[] client eval.client"),
)
"""(component, keys): a file belongs to the first component that has one of its keys."""
NEWER = re.compile(
    r"orchestrator\.(train\.(algo|group_size|select)|eval\.select|constant_trainer_batch_size)\b"
    r"|trainer\.(loss\.(eps|ratio_low|ratio_high|max_importance_ratio|score_centering)"
    r"|model\.(moe|fusions))\b"
)
OLDER = re.compile(
    r"orchestrator\.(algo|group_size|rollouts_per_example|sampling|advantage|token_batch_size|eval\.num_examples"
    r"|train\.filter_zero_advantages)\b"
    r"|trainer\.(loss\.(dppo_mask_low|dppo_mask_high|kl_tau|ipo_threshold)|model\.impl)\b"
)
"""Keys that prime-rl has only after 0.8, and only up to it: its defaults changed in between."""
NEWER_OF_SOURCE = frozenset({"select", "sampler", "min_abs_advantage"})
OLDER_OF_SOURCE = frozenset({"num_examples", "curriculum", "rollouts_per_example"})
"""The same for an environment."""
LATER_SIGNS: Sequence[tuple[Component, str]] = (
    ("orchestrator", "max_async_level+sampling"),
    (
        "trainer",
        """optim scheduler loss data max_concurrent_runs dist_timeout_seconds model.seq_len model.ac
        model.lora model.compile""",
    ),
    ("rl", "inference"),
)
"""More such pairs, checked after sft."""


def component(tree: Tree, stem: str) -> Component | None:
    """Return the component that a file configures, by its keys, else by its name.

    None if unknown.
    """
    keys = set(tree)
    signs = {f"{name}.{key}" for name in tree for key in _table(tree, name)}
    signs |= keys | {f"{name}[]" for name in tree if isinstance(tree[name], list)}

    def first(table: Sequence[tuple[Component, str]]) -> Component | None:
        return next((kind for kind, some in table if signs & set(some.split())), None)

    if kind := first(SIGNS):
        return kind
    if isinstance(tree.get("model"), str):
        return "evals"
    if "sft" in stem or (_table(tree, "data") and "data.fake" not in signs):
        return "sft"
    if kind := first(LATER_SIGNS):
        return kind
    if keys and ("train" in stem or keys <= SHARED):
        return "rl"
    known = {name.split(".")[1] for name in [*RULES, *dict(RENAMED)] if name[:10] == "inference."}
    return "inference" if keys & {*known, "model"} else None


def _canonical(kind: Component, path: str) -> str:
    """Convert a key of one component's file to a key of the newest rl.toml."""
    head = path.partition(".")[0]
    if kind == "sft" and head in LEARNER:
        path = f"trainer.{path}"
    elif kind not in ("rl", "sft"):
        path = f"{kind}.{path}"
    path = _renamed(path)
    owner, _, rest = path.partition(".")
    if owner in ("trainer", "orchestrator", "inference", "evals") and path not in RULES:
        if owner == "inference" and rest.startswith("deployment"):
            return path
        shared = rest.partition(".")[0] in SHARED
        if shared or any(f"{rest}.".startswith(f"{prefix}.") for prefix in SHARED_MODEL):
            return _renamed(rest)
    return path


def _command(kinds: set[Component]) -> str:
    """Return our command for these components. Raises UsageError if they do not belong together."""
    sets: tuple[tuple[set[Component], str], ...] = (
        ({"inference"}, "inference"),
        ({"rl", "trainer", "orchestrator", "inference"}, "rl"),
        ({"sft"}, "sft"),
        ({"evals", "inference"}, "eval"),
    )
    for group, command in sets:
        if kinds <= group:
            return command
    raise UsageError(
        f"files of {' and '.join(sorted(kinds))} are not one run: convert them one by one"
    )


# -- result ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImportNote:
    """A key that was not simply converted, and why."""

    key: str
    value: Any
    reason: str

    def __str__(self) -> str:
        shown = "" if self.value is None else f" = {_short(self.value)}"
        return printable(f"{self.key}{shown}: {self.reason}", MAX_NOTE)


@dataclass
class ImportedConfig:
    """The converted config, and notes on keys that were not simply converted."""

    command: str
    """Command that reads the config."""
    values: Tree = field(default_factory=dict[str, Any])
    missing: list[ImportNote] = field(default_factory=list[ImportNote])
    """Keys without a counterpart."""
    differs: list[ImportNote] = field(default_factory=list[ImportNote])
    """Keys whose counterpart behaves differently, and defaults of prime-rl that were replaced."""
    needless: list[ImportNote] = field(default_factory=list[ImportNote])

    def toml(self, sources: Sequence[str], path: str) -> str:
        """Format the config file, with the report as comments at its end."""
        head = [
            f"# Converted from prime-rl's {printable(', '.join(sources), MAX_NOTE)} by `primerl-node import`.",
            f"# primerl-node {self.command} @ {printable(path, MAX_NOTE)}",
            "",
        ]
        tail = [f"# {line}" for line in self.report()]
        return "\n".join([*head, to_toml(self.values), *tail]).rstrip() + "\n"

    def report(self) -> list[str]:
        """List the keys that were not simply converted, line by line."""
        lines: list[str] = []
        for title, notes in (
            ("No counterpart:", self.missing),
            ("Converted, but not the same:", self.differs),
        ):
            if notes:
                lines += [title, *(f"  {note}" for note in notes)]
        if self.needless:
            keys = ", ".join(printable(note.key, MAX_NOTE) for note in self.needless)
            lines.append(f"Not needed here: {keys}")
        return lines


def read_configs(paths: Sequence[Path]) -> ImportedConfig:
    """Convert the files of one run of prime-rl, later ones over earlier ones.

    Raises UsageError: unreadable, not a config of prime-rl, or files of different programs.
    """
    trees: dict[Component, Tree] = {}
    for path in paths:
        if not path.is_file():
            raise UsageError(f"no such file: {path}")
        tree = read_file(path)
        kind = component(tree, path.stem)
        if kind == "rl" and set(tree) <= SHARED and trees:
            kind = next(iter(trees))  # laid over whichever file came before
        if kind is None:
            raise UsageError(
                f"{path} is not a config of prime-rl's rl, sft, trainer, orchestrator, inference or evals"
            )
        trees[kind] = merge(trees.get(kind, {}), tree)
    try:
        return _Conversion(trees, _title(paths[0])).result()
    except RecursionError as error:
        raise UsageError(f"{paths[-1]} has too deeply nested tables: correct it") from error


def _title(path: Path) -> str:
    """Make a name for the run: the file's, or its directory's if the file's is generic."""
    plain = path.stem.lower() in ("rl", "sft", "start", "resume", "train", "orch", "infer")
    name = path.resolve().parent.name if plain else path.stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "imported"


# -- conversion ------------------------------------------------------------------------------------

_ROWS = ("dataset_name", "dataset_subset", "dataset_split", "dataset_revision")
ENVIRONMENTS: Mapping[str, tuple[str, frozenset[str]]] = {
    "reverse-text": ("reverse-text-hub", frozenset(_ROWS)),
    "alphabet-sort": (
        "alphabet-sort-hub",
        frozenset(_ROWS)
        | set(
            """seed min_turns max_turns min_names_per_turn max_names_per_turn
            task.similarity_power task.power_per_turn""".split()
        ),
    ),
    "math-env": (
        "math-env",
        frozenset(_ROWS)
        | set(
            """seed dataset_shuffle dataset_seed question_key answer_key difficulty_key min_avg_reward
            max_avg_reward instruction_prompt len_reward""".split()
        ),
    ),
}
"""Environment of prime-rl -> the bundled one with its prompts and rewards, and the options that it has here.
Older releases had the options of `task` beside the others."""
RENAMED_OPTIONS = {"split": "dataset_split"}
"""Option of an environment's latest release -> the same one here."""
NEAREST = {"wordle": "word-game", "gsm8k": "math-env with dataset_name openai/gsm8k"}
"""Environments of prime-rl -> similar bundled ones."""
OF_ENVIRONMENT = frozenset({"taskset", "timeout", "retries", "interception"})
"""Tables of a source's `env` that are no agents."""


class _Source:
    """One environment of a prime-rl config, in any of its three layouts."""

    def __init__(self, path: str, values: Tree) -> None:
        self.path = path
        values = {
            key: value for key, value in values.items() if key not in ("num_workers", "serve")
        }
        self.agents: dict[str, Tree] = {}
        if isinstance(env := values.pop("env", None), dict):
            inside = cast(Tree, env)
            taskset: Any = inside.get("taskset")
            agents = {name: value for name, value in inside.items() if name not in OF_ENVIRONMENT}
            values |= {"env": {name: inside[name] for name in inside.keys() & OF_ENVIRONMENT}}
            values["env"].pop("taskset", None)
            self.agents = {
                f"env.{k}": value for k, value in agents.items() if isinstance(value, dict)
            }
        elif "taskset" in values:
            taskset = values.pop("taskset")
            harness = _table(values, "harness")
            agent = {"harness": {k: value for k, value in harness.items() if k != "runtime"}}
            self.agents["env"] = agent | {
                "timeout": values.pop("timeout", {}),
                "runtime": harness.get("runtime", {}),
            }
            values.pop("harness", None)
        else:
            taskset = {"id": values.pop("id", "reverse-text"), **_table(values, "args")}
            values.pop("args", None)
        self.args: Tree = dict(cast(Tree, taskset)) if isinstance(taskset, dict) else {}
        self.given = str(self.args.pop("id", ""))
        self.id = self.given.rpartition("/")[2]
        self.plain = re.sub(r"[-_]v1$", "", self.id).replace("_", "-")
        self.values = values


class _Conversion:
    """One conversion: collects our keys and notes."""

    def __init__(self, trees: Mapping[Component, Tree], title: str) -> None:
        self._config = ImportedConfig(_command(set(trees)))
        if "evals" in trees:  # an inference.toml beside it names the model
            tree = merge(trees.get("inference", {}), trees["evals"])
            inner = _table(tree, "eval")
            trees = {"evals": {key: tree[key] for key in tree if key != "eval"} | inner}
        self._trees = trees
        self._ours: dict[str, Any] = {}
        self._raw: dict[str, Any] = {}
        self._origin: dict[str, str] = {}
        self._own: list[tuple[_Source, Tree, Tree]] = []
        """Environments with an algorithm of their own: source, ours, and [training] as if it were the run's."""
        self._rl_loss: dict[str, Any] = {}
        """Our keys of [trainer.loss] in a run that distils: its loss is fixed, whatever they say."""
        self._title = title
        self._era: Literal["newer", "older", ""] = ""
        """Whether a run has prime-rl's defaults after 0.8, or those up to it; empty if no key shows."""

    def result(self) -> ImportedConfig:
        """Convert all keys. Raises UsageError."""
        flat = [row for kind, tree in self._trees.items() for row in self._flatten(kind, tree)]
        # the trainer's own keys have priority over shared ones, and those over an engine's
        first = {"trainer": 0, "orchestrator": 1, "inference": 3}
        for _, shown, name, value in sorted(flat, key=lambda row: first.get(row[0], 2)):
            self._key(shown, name, value)
        if self._config.command != "inference":
            self._default("name", self._title)
        {
            "rl": self._finish_run,
            "sft": self._finish_sft,
            "eval": self._finish_eval,
            "inference": self._finish_inference,
        }[self._config.command]()
        self._validate()
        return self._config

    # -- keys --------------------------------------------------------------------------------------

    def _flatten(
        self, kind: Component, tree: Mapping[str, Any], path: str = ""
    ) -> Iterator[tuple[str, str, str, Any]]:
        """Yield (component, key as written, newest name, value) of all keys except the sources'."""
        for key, value in tree.items():
            shown = f"{path}{key}"
            owner = shown.partition(".")[0] if kind == "rl" else kind
            plain = shown.replace("-", "_")
            name = _canonical(kind, plain)
            shared = name in SHARED_ENV and isinstance(value, dict)
            written = plain if kind in ("rl", "sft") else f"{kind}.{plain}"
            if shared or NEWER.match(written):
                self._era = "newer"
            elif OLDER.match(written) or name in OLDER_SOURCES:
                self._era = self._era or "older"
            if name in SOURCES and not shared:
                continue
            if kind == "rl" and name == "output_dir" != shown and name in self._trees["rl"]:
                self._note("needless", shown, value, "a run is in output_dir/name")
                continue
            rule = RULES.get(name)
            if isinstance(value, dict) and not (rule and (rule.whole or not value)):
                inside = cast(Tree, value)
                if not inside and not any(rule_key.startswith(f"{name}.") for rule_key in RULES):
                    yield owner, shown, name, value
                yield from self._flatten(kind, inside, f"{shown}.")
            else:
                yield owner, shown, name, None if value == "None" else value

    def _key(self, shown: str, name: str, value: Any) -> None:
        rule = _rule(name)
        if rule is None and value is None and any(key.startswith(f"{name}.") for key in RULES):
            return  # a section that is not there
        if rule is None:
            program = name.removesuffix(shown)  # before the keys of a file of one program
            known = [key.removeprefix(program) for key in RULES if key.startswith(program)]
            guess = nearest(shown, [key for key in known if key[-1] != "*"])
            hint = f": did you mean {guess}?" if guess else ""
            self._note("missing", shown, value, f"not a known key of prime-rl{hint}")
        elif value is not None or rule.whole:
            self._apply(rule, shown, name, value)

    def _apply(self, rule: Rule, shown: str, name: str, value: Any) -> None:
        ours = rule.ours
        if ours.endswith("*"):
            ours = ours[:-1] + name[len(rule.key) - 1 :]
        try:
            converted = rule.convert(value) if rule.convert else value
        except Unconvertible as error:
            self._note("missing", shown, value, str(error) or rule.remark)
            return
        except (AttributeError, TypeError, ValueError) as error:
            raise UsageError(
                f"{shown} = {_short(value)} is not a valid value in prime-rl: correct it"
            ) from error
        if isinstance(converted, Several):
            self._set_several(shown, converted)
            if rule.kind == "differs" and value not in (None, False):
                self._note("differs", shown, value, rule.remark)
        elif rule.kind in ("needless", "missing"):
            self._note(rule.kind, shown, value, rule.remark)
        elif not has_key(COMMANDS[self._config.command], ours):
            elsewhere = f"`primerl-node {self._config.command}` has no {ours}"
            self._note("missing", shown, value, rule.remark or elsewhere)
        elif self._ours.get(ours, converted) != converted:
            self._note("missing", shown, value, f"{self._origin[ours]} has another value")
        else:
            self._set_several(shown, {ours: converted})
            if rule.kind == "differs":
                self._note("differs", shown, value, f"{ours}: {rule.remark}")

    def _set_several(self, shown: str, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            if key.startswith("_"):
                self._raw.setdefault(key[1:], value)
            elif key not in self._ours:
                self._ours[key] = value
                self._origin[key] = shown

    def _default(self, ours: str, value: Any) -> None:
        """Set a key to prime-rl's default, unless it is set."""
        self._ours.setdefault(ours, value)

    def _note(
        self, kind: Literal["missing", "differs", "needless"], key: str, value: Any, reason: str
    ) -> None:
        note, notes = ImportNote(key, value, reason), getattr(self._config, kind)
        if note not in notes:  # several files may say the same
            notes.append(note)

    def _drop(self, ours: str, reason: str) -> None:
        self._note("missing", self._origin.get(ours, ours), self._ours.pop(ours), reason)

    # -- environments ------------------------------------------------------------------------------

    def _sources(self, *places: str) -> list[_Source]:
        """Read the environments at these keys of SOURCES."""
        sources: list[_Source] = []
        for kind, tree in self._trees.items():
            for place in places:
                owner, _, path = place.partition(".")
                if kind not in ("rl", owner):
                    continue
                *sections, key = (path := place if kind == "rl" else path).split(".")
                inner = tree
                for section in sections:
                    inner = _table(inner, section)
                listed = inner.get(key, [])
                if place in SHARED_ENV and isinstance(listed, dict):
                    continue
                tables = _tables(path, listed)
                keys = {key for table in tables for key in table}
                if keys & NEWER_OF_SOURCE:
                    self._era = "newer"
                elif keys & OLDER_OF_SOURCE:
                    self._era = self._era or "older"
                sources += [_Source(f"{path}[{i}]", table) for i, table in enumerate(tables)]
        return sources

    def _environments(self) -> None:
        """Convert a run's environments: to [environment], or [[environments]] if there are several."""
        sources = self._sources(*TRAINED)
        if len(sources) == 1 and _table(sources[0].values, "algo"):
            shared = [key for key, shown in self._origin.items() if ".algo." in f".{shown}"]
            self._ours = {key: value for key, value in self._ours.items() if key not in shared}
            for name in ("hint", "length_penalty", "loss"):
                self._raw.pop(name, None)
            self._algorithm_keys(sources[0])
        if len(sources) > 1:
            self._ours["environments"] = [
                self._environment(source, "name", "ratio", "group_size", place="environments[]")
                for source in sources
            ]
            for source, environment in zip(sources, self._ours["environments"], strict=True):
                if own := self._algorithm(source):
                    tree = _nested({key.removeprefix("training."): own[key] for key in own})
                    self._own.append((source, environment, tree))
        elif sources:
            environment = self._environment(sources[0], place="environments[]")
            sampling = environment.pop("sampling", {})
            if "max_tokens" in sampling:
                self._raw["max_tokens"] = sampling.pop("max_tokens")
            self._ours |= {f"sampling.{key}": value for key, value in sampling.items()}
            for key, value in environment.items():
                self._ours[f"environment.{key}"] = value
            if "group_size" in sources[0].values:
                self._default("rollouts.group_size", sources[0].values["group_size"])
        elif "environment.id" not in self._ours:
            self._note("differs", "environment", None, "no environment is named: reverse-text")
        if played := self._sources(*EVALUATED):
            self._default("evaluation.interval", 100)
            self._ours["evaluation.environments"] = [
                self._played(source, "interval") for source in played
            ]

    def _played(self, source: _Source, *keys: str) -> Tree:
        """Convert one environment of an evaluation."""
        environment = self._environment(source, "name", *keys, place="evaluation.environments[]")
        if environment.get("name") == environment["id"]:
            del environment["name"]
        if self._config.command != "eval":
            sampling = {
                name: self._raw.get(f"eval_{name}") for name in OnlineSamplingConfig.model_fields
            }
            sampling = {name: value for name, value in sampling.items() if value not in (None, -1)}
            if sampling := sampling | environment.get("sampling", {}):
                environment["sampling"] = sampling
            if "temperature" not in sampling:
                why = "the run's temperature and max_tokens; there the engine's (generation_config.json)"
                self._note("differs", "eval.sampling", None, why)
        elif "sampling.temperature" not in self._ours:
            why = "temperature 1.0; there the engine's default (generation_config.json)"
            self._note("differs", "eval.sampling", None, why)
        values = source.values
        old = values.get("rollouts_per_example", self._raw.get("samples", 1))
        environment["samples"] = values.get("group_size", old)
        prompts = values.get("num_examples", _table(values, "select").get("limit"))
        prompts = self._raw.get("prompts") if prompts is None else prompts
        return environment | {"prompts": -1 if prompts is None else prompts}

    def _environment(self, source: _Source, *keys: str, place: str) -> Tree:
        """Convert a taskset's id, its options, the source's `keys`, and the sampling keys that `place` has."""
        environment: Tree = {"id": source.id}
        if not source.id:
            raise UsageError(f"{source.path} names no environment: give env.taskset.id")
        if source.plain in ENVIRONMENTS:
            environment["id"] = ENVIRONMENTS[source.plain][0]
            if environment["id"] != source.plain:
                why = (
                    f"{environment['id']}, which has its prompts, tags and rewards on the same data set "
                    f"(a worker allows it by name); {source.plain} here is another task"
                )
                self._note("differs", source.path, source.given, why)
        else:
            near = NEAREST.get(source.plain)
            why = "not bundled: install its package on every node (docs/environments.md)"
            why += f"; bundled: {near}" if near else ""
            self._note("differs", source.path, source.given, why)
        if args := self._environment_args(source):
            environment["args"] = args
        if own_sampling := self._source_sampling(source, f"{place}.sampling"):
            environment["sampling"] = own_sampling
        prefix = "eval_" if place.startswith("eval") else ""
        sampling = _table(source.values, "sampling")
        own = sampling | _table(sampling, "extra_body")
        runs = self._raw.get(f"{prefix}chat_template_kwargs") or {}
        if variables := runs | _table(own, "chat_template_kwargs"):
            environment["chat_template_kwargs"] = variables
        if stop := _list(own.get("stop") or self._raw.get(f"{prefix}stop") or []):
            environment["stop"] = stop
        environment |= {key: source.values[key] for key in keys if source.values.get(key)}
        for key, value in _source_leaves(source.values):
            rule = RULES.get(f"source.{key}") or _rule(f"source.{key}") or RULES["source.*"]
            if key == "select.limit":
                if prefix:
                    continue  # _played() reads it
                rule = RULES["source.select.*"]
            self._apply(rule, f"{source.path}.{key}", f"source.{key}", value)
        if len(source.agents) > 1:
            agents = ", ".join(source.agents)
            self._note("missing", f"{source.path}.env", agents, "a rollout has one agent")
        for agent, options in source.agents.items():
            for path, value in _leaves(options):
                rule = _rule(f"source.env.AGENT.{path}")
                if rule is not None and value not in (None, "None"):
                    self._apply(rule, f"{source.path}.{agent}.{path}", rule.key, value)
        return environment

    def _algorithm(self, source: _Source) -> dict[str, Any]:
        """Convert a source's own algorithm to our keys, as if it were the run's."""
        run_keys = self._ours, self._raw, self._origin
        self._ours, self._raw, self._origin = {}, {}, {}
        self._algorithm_keys(source)
        self._credit()
        own = self._ours
        self._ours, self._raw, self._origin = run_keys
        return own

    def _algorithm_keys(self, source: _Source) -> None:
        algo = _table(source.values, "algo")
        if "type" not in algo:  # after 0.8 a source's parameters are of the algorithm that all have
            tree = self._trees.get("rl", {}).get("orchestrator") or self._trees.get(
                "orchestrator", {}
            )
            algo = merge(_table(_table(tree, "train"), "algo"), algo)
        for path, value in _leaves(algo):
            self._key(f"{source.path}.algo.{path}", f"orchestrator.algo.{path}", value)

    def _own_training(self) -> None:
        """Give environments their own advantages and losses; a run holds one model as a teacher."""
        training = _nested({key: self._ours[key] for key in self._ours if key[:9] == "training."})
        common = _table(training.get("training", {}), "loss")
        holds_teacher = common.get("type") == "reverse_kl" and "endpoint" not in common
        rl = {key.removeprefix("training.loss."): value for key, value in self._rl_loss.items()}
        reads_rl = False
        for source, environment, own in self._own:
            loss = own.pop("loss", {})
            for key in ("advantage", "length_penalty"):
                if key in own:
                    environment[key] = own.pop(key)
            for key, value in own.items():
                self._note("missing", f"{source.path}.algo", value, f"training.{key} is the run's")
            if loss.get("type") == "reverse_kl":
                if loss != common and (holds_teacher or "endpoint" not in loss):
                    why = "a run holds one teacher; others have a base_url"
                    self._note("missing", f"{source.path}.algo", loss, why)
                elif loss != common:
                    environment["loss"] = loss
            elif common.get("type") == "reverse_kl":
                environment["loss"], reads_rl = {"type": "dppo_kl", **rl, **loss}, True
            elif loss.get("echo_alpha", 0.0) != common.get("echo_alpha", 0.0):
                environment["loss"] = {**common, "echo_alpha": 0.0, **loss}
        for key in self._rl_loss.keys() & self._origin.keys() if not reads_rl else ():
            why = "opd and opsd have a fixed loss"
            self._note("needless", self._origin[key], self._rl_loss[key], why)

    def _source_sampling(self, source: _Source, place: str) -> Tree:
        """Convert a source's own sampling values, by the names of `place`."""
        sampling: Tree = {}
        for key, value in _leaves(_table(source.values, "sampling")):
            name = "max_tokens" if key == "max_completion_tokens" else key
            name = name.removeprefix("extra_body.")
            if name == "stop" or name.startswith("chat_template_kwargs."):
                continue  # of the environment
            if value in (None, "None"):
                continue
            if not has_key(COMMANDS[self._config.command], f"{place}.{name}"):
                rule = _rule(f"source.sampling.{key}") or RULES["source.sampling.*"]
                self._apply(rule, f"{source.path}.sampling.{key}", rule.key, value)
            elif value != -1:  # no top_k
                sampling[name] = value
        return sampling

    def _environment_args(self, source: _Source) -> Tree:
        """Return the options of a taskset; of a bundled one, those that exist here."""
        if source.plain not in ENVIRONMENTS:
            return source.args
        _, known = ENVIRONMENTS[source.plain]
        options: Tree = {}
        task = {f"task.{key}": value for key, value in _table(source.args, "task").items()}
        args = {key: value for key, value in source.args.items() if key != "task"}
        for key, value in (task | args).items():
            key = RENAMED_OPTIONS.get(key, key)
            key = f"task.{key}" if f"task.{key}" in known else key
            if value in (None, "None", [], {}):
                continue
            if key in known:
                options = merge(options, nest(key.split("."), value))
            else:
                why = f"{source.plain} has no such option here"
                self._note("missing", f"{source.path}.{key}", value, why)
        return options

    # -- conversions of several keys ---------------------------------------------------------------

    def _finish_run(self) -> None:
        """Convert environments, batches, lengths, schedules and GPUs of a run."""
        self._environments()
        self._default("engine.type", "vllm")
        self._default("engine.dtype", "bfloat16")
        self._default("evaluation.prompts", 0)  # before and after, which prime-rl does not
        self._checkpoints()
        self._batch()
        self._lengths()
        self._learner()
        self._gpus()
        self._loss()
        self._credit()
        self._own_training()
        self._defaults_of_its_era()

    def _checkpoints(self) -> None:
        """Keep all checkpoints, as prime-rl does where none of its keep_ keys is given, and their weights."""
        interval = self._ours.get("checkpoint.interval")
        if (
            interval
            and not {"checkpoint.keep_last", "checkpoint.keep_interval"} & self._ours.keys()
        ):
            for key in ("keep_interval", "weights_interval"):
                self._set_several(
                    self._origin["checkpoint.interval"], {f"checkpoint.{key}": interval}
                )

    def _loss(self) -> None:
        """Convert [trainer.loss], whose bounds mean another of our keys in each loss."""
        name = self._raw.get("loss_type")
        name = None if name is None else str(name)
        if name is not None and name not in LOSSES:
            self._note("missing", "loss.type", name, "losses are those of docs/algorithms.md")
            name = None
        newer = self._era == "newer"
        keys = dict(NEWER_LOSS if newer and name in (None, "ipo") else LOSSES.get(name or "", {}))
        for raw, key in zip(("ratio_low", "ratio_high"), RATIOS.get(name or "", ()), strict=False):
            if raw in self._raw:
                bound = _number(self._raw[raw], f"loss.{raw}")
                keys[key] = round(abs(bound - 1), 12) if name == "ppo" else bound
        if name == "ppo" and "ratio_max" in self._raw:
            keys["clip_ratio_max"] = _number(self._raw["ratio_max"], "loss.max_importance_ratio")
        if name == "ppo" and self._ours.get("training.loss.adv_tau", 1.0) != 1.0:
            self._drop("training.loss.adv_tau", "grpo_two_sided has none: training.lr")
        for key, value in keys.items():
            if name is not None:
                self._set_several("trainer.loss.type", {f"training.loss.{key}": value})
            elif "loss" in self._raw:
                self._rl_loss.setdefault(f"training.loss.{key}", value)
            else:
                self._default(f"training.loss.{key}", value)
        if (alpha := self._raw.get("echo_alpha")) is not None:
            self._ours["training.loss.echo_alpha"] = alpha

    def _defaults_of_its_era(self) -> None:
        """Set the defaults that prime-rl changed after 0.8, or note that the files do not show which."""
        if self._era == "newer":
            self._default("training.weight_decay", 0.0)
            if "constant_batch" not in self._raw:
                self._raw["constant_batch"] = True
                key = "orchestrator.constant_trainer_batch_size"
                self._note("differs", key, None, RULES[key].remark)
            shared = self._ours.get("sampling.top_k")
            for environment in self._ours.get("environments", []):
                sampling = environment.get("sampling", {})
                nucleus = _number(sampling.get("top_p", 1.0), "top_p") < 1
                if nucleus and not sampling.get("top_k", shared):
                    sampling["top_k"] = NEWER_TOP_K
            if not shared and _number(self._ours.get("sampling.top_p", 1.0), "top_p") < 1:
                self._ours["sampling.top_k"] = NEWER_TOP_K
        elif not self._era and not {"loss_type", "loss"} & self._raw.keys():
            why = (
                "dppo_kl and weight_decay 0.01, the defaults up to prime-rl 0.8; after it ipo with "
                "ipo_threshold 0.3 (before 0.1), kl_tau 0 and weight_decay 0"
            )
            self._note("differs", "trainer.loss", None, why)
        compares = self._ours.get("training.advantage") != "rae" and "loss" not in self._raw
        if self._raw.get("constant_batch") and compares:
            gates = "training.curriculum.gates"
            self._ours[gates] = {
                "no_signal": {"type": "advantage_range"},
                **self._ours.get(gates, {}),
            }

    def _credit(self) -> None:
        """Finish an algorithm: its loss, its advantage, its teacher and its hint."""
        if "loss" in self._raw:
            written = [key for key in self._ours if ".loss." in f".{self._origin.get(key, '')}"]
            self._rl_loss |= {key: self._ours.pop(key) for key in written}
            self._ours["training.loss.type"] = self._raw["loss"]
        if self._raw.get("length_penalty"):
            self._ours["training.advantage"] = "grpo_length"
        self._teacher()
        if "hint" in self._raw:
            self._default("training.loss.hint", self._raw["hint"])
        elif "training.loss.hint" in self._ours:
            self._drop("training.loss.hint", "only opsd has a template")

    def _teacher(self) -> None:
        """Leave one teacher, that of a run that distils."""
        url, model = (f"training.loss.endpoint.{key}" for key in ("url", "model"))
        if self._ours.get("training.loss.type") != "reverse_kl":
            for key in (url, model):
                if key in self._ours:
                    self._drop(key, "only opd has a teacher")
        elif model in self._ours and url not in self._ours:
            name = self._ours.pop(model)
            self._ours["training.loss.reference"] = name
            why = "training.loss.reference: download it: without base_url a teacher is a local directory"
            self._note("differs", self._origin[model], name, why)

    def _batch(self) -> None:
        batch = self._count("batch_size", 128)
        group = _whole(self._ours.get("rollouts.group_size", 1), "group_size")
        if group == 1:
            group = min(2 if "loss" in self._raw else 8, batch)  # opd compares nothing
            why = f"rollouts.group_size = {group}: a group of one is not trained here"
            self._note("differs", "group_size", 1, why)
        groups = math.ceil(batch / group)
        if groups * group != batch:
            why = f"{groups} groups of {group} are {groups * group} rollouts"
            self._note("differs", "batch_size", batch, why)
        self._ours |= {"rollouts.group_size": group, "rollouts.groups_per_batch": groups}
        if groups < 4:
            self._ours["rollouts.groups_per_lease"] = groups

    def _lengths(self) -> None:
        self._default("training.seq_len", 2048)
        row = _whole(self._ours["training.seq_len"], "seq_len")
        longest = [self._ours.get("engine.max_model_len"), self._raw.get("max_model_len"), row]
        most = min(_whole(length, "max_model_len") for length in longest if length is not None)
        self._ours["engine.max_model_len"] = most
        max_tokens = self._raw.get("max_tokens")
        reply = most - 1 if max_tokens is None else _whole(max_tokens, "max_completion_tokens")
        if reply >= most:
            reply = most - 1
            why = f"sampling.max_tokens = {reply}: a prompt has a token at least"
            self._note("differs", "max_completion_tokens", max_tokens, why)
        self._ours["sampling.max_tokens"] = reply
        for environment in self._ours.get("environments", []):
            sampling = environment.get("sampling", {})
            if sampling.get("max_tokens", 0) >= most:
                why = f"sampling.max_tokens = {reply}: it is cut to fit engine.max_model_len"
                self._note("differs", "max_completion_tokens", sampling["max_tokens"], why)
                sampling["max_tokens"] = reply

    def _learner(self) -> None:
        """Convert the learning rate schedule, betas and max_steps of a run or of sft."""
        if _switch(self._raw.get("full_offload")):
            self._ours["training.optimizer_offload"] = True
        if "max_steps" not in self._ours:
            self._ours["max_steps"] = MANY_STEPS
            self._note("differs", "max_steps", None, f"{MANY_STEPS}: stop the run by hand")
        if self._ours.get("training.scheduler") == "linear":
            self._decay()
        if self._ours.get("training.scheduler", "constant") != "constant":
            self._default("training.warmup_steps", 10)
            least, rate = self._raw.get("min_lr", 0.0), self._ours.get("training.lr", 1e-6)
            if not isinstance(least, int | float) or not isinstance(rate, int | float):
                raise UsageError(
                    f"min_lr and lr must be numbers, not {_short(least)}, {_short(rate)}"
                )
            self._ours["training.min_lr_ratio"] = least / rate if rate else 0.0
        elif "min_lr" in self._raw:
            self._note("needless", "scheduler.min_lr", self._raw["min_lr"], "the rate is constant")
        muon = self._ours.get("training.optimizer") == "muon"
        if muon or "beta1" in self._raw or "beta2" in self._raw:
            second = self._raw.get("beta2", 0.95 if muon else 0.999)
            self._ours["training.betas"] = [self._raw.get("beta1", 0.9), second]

    def _decay(self) -> None:
        """Convert a linear schedule, which in prime-rl stays constant until its last decay_steps."""
        warm = _number(self._ours.setdefault("training.warmup_steps", 10), "warmup_steps")
        decay = _number(self._raw.get("decay_steps", 10), "decay_steps")
        if decay == 0:
            self._ours["training.scheduler"] = "constant"
        elif warm + decay != self._ours["max_steps"]:
            why = "the rate falls from the warm-up to max_steps, and not in the last decay_steps alone"
            self._note("differs", "scheduler.decay_steps", int(decay), why)

    def _gpus(self) -> None:
        learns, generates = self._count("train_gpus", 1), self._raw.get("infer_gpus", 1)
        if self._raw.get("deployment") == "multi_node" or "train_nodes" in self._raw:
            self._config.command = "train"
            ranks, nodes = (
                self._count("gpus_per_node", GPUS_PER_NODE),
                self._count("train_nodes", 1),
            )
            self._fsdp(ranks, nodes)
            if "nodes_per_group" in self._raw:
                parts = max(1, nodes // self._count("nodes_per_group", 1))
                self._ours["training.fsdp.replicas"] = parts
            learns = ranks * nodes
        elif (learns, generates) != (1, 1):
            self._default("launch.trainer_gpus", str(learns))
            self._default("launch.inference_gpus", str(generates))
        self._experts(learns)
        if self._ours.get("training.optimizer") == "muon" and learns > 1:
            self._drop("training.optimizer", "muon needs whole matrices, on one rank: adamw")

    def _fsdp(self, ranks: int, nodes: int) -> None:
        if ranks * nodes > 1:
            self._ours |= {"training.backend": "fsdp", "training.fsdp.ranks": ranks}
        if nodes > 1:
            self._ours["training.fsdp.nodes"] = nodes

    def _count(self, name: str, default: int) -> int:
        return _whole(self._raw.get(name, default), name)

    def _experts(self, ranks: int) -> None:
        """Convert expert parallelism, which here spans all ranks or none."""
        degree = self._raw.get("ep", 1)
        if degree in (1, "auto"):
            return
        self._ours["training.expert_parallel"] = ranks
        if degree != ranks:
            why = f"training.expert_parallel = {ranks}: all ranks share the experts, or none"
            self._note("differs", "model.ep", degree, why)

    def _finish_sft(self) -> None:
        """Set the defaults of prime-rl's sft, and convert its GPUs."""
        self._checkpoints()
        self._default("batch_size", 128)
        self._default("training.seq_len", 128)
        self._default("training.lr", 1e-6)
        self._default("training.scheduler", "constant")
        name = self._ours.pop("data.hub", "PrimeIntellect/Reverse-Text-SFT")
        local = str(name).startswith(("/", "./", "../", "~")) or Path(str(name)).suffix
        self._ours["data.files" if local else "data.hub"] = [name] if local else name
        self._learner()
        ranks, nodes = self._count("train_gpus", 1), self._count("train_nodes", 1)
        if nodes > 1:
            ranks = self._count("gpus_per_node", GPUS_PER_NODE)
        self._fsdp(ranks, nodes)
        self._experts(ranks * nodes)

    def _finish_inference(self) -> None:
        """Set the defaults of prime-rl's inference server."""
        self._default("engine.type", "vllm")
        self._default("engine.dtype", "bfloat16")
        self._default("model.name", "Qwen/Qwen3-0.6B")
        if (longest := self._raw.get("max_model_len")) is not None:
            self._ours["engine.max_model_len"] = longest

    def _finish_eval(self) -> None:
        """Convert a standalone evaluation: a model behind an API, and environments."""
        urls = _list(self._raw.get("urls", [])) or ["http://localhost:8000/v1"]
        if len(urls) > 1:
            self._note("missing", "client.base_url", urls, "an endpoint has one address")
        endpoint: Tree = {"url": urls[0], "model": "Qwen/Qwen3-0.6B"}
        for key in [key for key in self._ours if key.startswith("endpoints[].")]:
            given = nest(key.split(".")[1:], self._ours.pop(key))
            endpoint = merge(endpoint, given)
        self._ours["endpoints"] = [endpoint]
        sources = self._sources("evals.source", "evals.env")
        if not sources:
            raise UsageError(
                "no environment is named: also give the file that has [[source]] or [[env]]"
            )
        self._ours["environments"] = [self._played(source) for source in sources]

    def _validate(self) -> None:
        """Drop values that our config does not allow, with a note each.

        Raises UsageError for others.
        """
        cls = COMMANDS[self._config.command]
        while True:
            values = _nested(self._ours)
            try:
                cls.model_validate(values)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                place = ".".join(str(part) for part in first["loc"])
                key = max(
                    (key for key in self._ours if f"{place}.".startswith(f"{key}.")),
                    key=len,
                    default="",
                )
                reason = str(first["msg"]).removeprefix("Value error, ")
                reason = reason.replace("Input should", "should", 1)
                shown = self._origin.get(key, key or place)
                mistake = first["type"].endswith(("_type", "_parsing", "from_float"))
                if not key or mistake:
                    message = f"{shown}: {reason}" if shown else reason
                    raise UsageError(f"{message}: correct it") from error
                self._drop(key, f"{key}: {reason}")
                continue
            self._config.values = _ordered(cls, values)
            return


TRAINED = ("orchestrator.env", "orchestrator.train.env", "orchestrator.train.source")
EVALUATED = ("orchestrator.eval.env", "orchestrator.eval.source")
SOURCES = frozenset({*TRAINED, *EVALUATED, "evals.env", "evals.source"})
"""Keys of lists of environments, which _sources() reads."""
OLDER_SOURCES = frozenset({"orchestrator.env", "orchestrator.train.env", "orchestrator.eval.env"})
SHARED_ENV = OLDER_SOURCES - {"orchestrator.env"}
"""Lists of environments up to 0.8; after it a table of what all of them share."""
USED = frozenset(
    {
        *("name", "num_examples", "rollouts_per_example", "group_size", "ratio", "interval"),
        *("sampling", "algo"),
    }
)
"""Keys of a source that _environments() reads."""


def _source_leaves(values: Tree) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a source that only the table's rules read, tables without a rule key by key."""
    for key, value in values.items():
        if key in USED or value in (None, "None"):
            continue
        if isinstance(value, dict) and f"source.{key}" not in RULES:
            yield from ((path, leaf) for path, leaf in _leaves({key: value}) if leaf is not None)
        else:
            yield key, value


def has_key(cls: type[BaseConfig], key: str) -> bool:
    """Return whether a config has this key, or it is in a free table.

    `[]` is an element of a list.
    """
    section: Any = cls
    for part in key.replace("[]", "").split("."):
        if section is None:
            return True
        if part not in section.model_fields:
            return False
        annotation = section.model_fields[part].annotation
        section = None if get_origin(annotation) is dict else model_in(annotation)
    return True


def _ordered(cls: type[BaseModel], values: Tree) -> Tree:
    """Sort sections and keys in the order of the config class."""
    tree: Tree = {}
    for key in [name for name in cls.model_fields if name in values]:
        annotation, value = cls.model_fields[key].annotation, values[key]
        section = None if get_origin(annotation) is dict else model_in(annotation)
        tree[key] = _ordered(section, value) if section and isinstance(value, dict) else value
    return tree


def _table(tree: Mapping[str, Any], name: str) -> Tree:
    value = tree.get(name)
    return cast(Tree, value) if isinstance(value, dict) else {}


def _tables(path: str, value: Any) -> list[Tree]:
    """Check that `value` is a list of tables and return it. Raises UsageError."""
    items = _list(value)
    if not all(isinstance(item, dict) for item in items):
        raise UsageError(f"{path} must be a list of tables, [[{path}]]")
    return items


def _list(value: Any) -> list[Any]:
    return list(cast(Sequence[Any], value)) if isinstance(value, list | tuple) else [value]


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(cast(Mapping[str, Any], value), f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _nested(keys: Mapping[str, Any]) -> Tree:
    """Return the sections of keys with dots."""
    tree: Tree = {}
    for key, value in keys.items():
        tree = merge(tree, nest(key.split("."), value))
    return tree


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{key} must be a number, not {_short(value)}")
    return float(value)


def _whole(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{key} must be an integer of at least 1, not {_short(value)}")
    return value
