"""Check the structure that DESIGN.md section 1 fixes, by reading the source: imports, names, forbidden calls.

A rule is changed here and in the design in one commit.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from support.repository import ROOT, dotted, walk

from primerl.scripts.faults import FAULTS, find

TOP = ("cli", "configs", "crypto", "node", "protocol")
FREE = {"__init__", "node", "configs"}
"""Names and versions only; every module may import them."""

# Layers from the bottom up; the lists of one layer do not import each other.
LAYERS: list[list[list[str]]] = [
    [["crypto"]],
    [["protocol"]],
    [["node.errors", "node.gpus", "node.removal", "node.tasks"]],
    [["node.config"], ["node.process"]],
    [["node.storage"]],
    [["node.ops"]],
    [["node.weights"], ["node.p2p"]],
    [["node.models"]],
    [["node.memory_plan"]],
    [["node.inference"]],
    [["node.environments"], ["node.training"], ["node.pipeline"]],
    [["node.api"], ["node.sft"], ["node.verification"]],
    [["node.evaluation"]],
    [["node.trainer"], ["node.worker"], ["node.standby"], ["node.learner"]],
    [["node.validator"]],
    [["node.reports"]],
    [["node.app", "node.launch"]],
    [["cli"]],
]

APART: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("node.training", "node.inference", "node.verification", "node.api"), ("node.p2p",)),
    (("node.environments",), ("node.p2p", "node.weights", "node.training")),
    (("node.trainer",), ("node.worker", "node.validator")),
    (("node.worker",), ("node.trainer", "node.validator")),
    (("node.validator",), ("node.worker.loop", "node.trainer.loop", "node.trainer.scheduler")),
    (("node.worker.weight_sync", "node.evaluation"), ("node.worker.loop",)),
    (("node.trainer.scheduler", "node.trainer.publisher"), ("node.trainer.loop",)),
    (("cli",), ("node.trainer", "node.worker", "node.training", "node.inference")),
]
"""Modules that do not import each other although the layers allow it."""

HEAVY = {
    "aiohttp": {"node.p2p.seeds", "node.api", "node.ops.dashboard"},
    "prometheus_client": {"node.ops.prometheus"},
    "openai": {"node.environments.chat_api"},
    "iroh": {"node.p2p.iroh"},
    "libp2p": {"node.p2p.libp2p"},
    "multiaddr": {"node.p2p.libp2p"},
    "trio": {
        "node.p2p.libp2p",
        "node.p2p.trio_bridge",
    },
    "triton": {
        "node.inference.kernels",
    },
    "vllm": {
        "node.inference.vllm",
        "node.inference.vllm_api",
        "node.inference.vllm_fp8",
        "node.inference.vllm_scheduler",
        "node.inference.vllm_worker",
        "node.pipeline.vllm_head_executor",
        "node.pipeline.vllm_rank",
        "node.pipeline.vllm_processes",
        "node.pipeline.vllm_stage_worker",
    },
    "transformers": {"node.models.huggingface"},
    "gguf": {"node.models.conversion"},
    "huggingface_hub": {"node.models.huggingface"},
    "datasets": {"node.sft.data", "node.environments.tasksets.hub_rows"},
    "pyarrow": {"node.storage.rollouts", "node.environments.tasksets.hub_rows"},
    "math_verify": {"node.environments.tasksets.math"},
    "reasoning_gym": {"node.environments.tasksets.reasoning_gym"},
    "renderers": {"node.environments.tools", "node.sft.tokens"},
    "mcp": {"node.environments.tools"},
    "uvicorn": {"node.inference.vllm_api"},
    "verifiers": {
        "node.environments.playing",
        "node.environments.tasksets",
        "node.environments.tools",
    },
    "jinja2": {"node.environments.chat"},
    "tokenizers": {"node.environments.chat", "node.models.huggingface"},
    "matplotlib": {"node.reports.report"},
    "plotext": {"node.reports.report"},
    "wandb": {"node.ops.monitors"},
    "opentelemetry": {"node.ops.tracing"},
    "packaging": {"node.app.peer_node"},
    "pynvml": {"node.gpus"},
    "zstandard": {"node.weights.streams"},
    "typer": {"cli"},
    "rich": {"cli"},
    "textual": {"cli.top"},
    "blake3": {"crypto.hashing"},
    "cryptography": {"crypto.keys"},
}
"""Each foreign library and the modules that may import it."""
LIGHT = {"typer", "rich", "blake3", "cryptography", "zstandard"}
COMPUTING = ("node.models", "node.inference", "node.training", "node.pipeline", "node.verification")
"""The folders that may import torch; they alone may load torch or triton when they are imported."""
LOADED_AT_IMPORT = {
    "textual": ("cli.top",),
    "renderers": ("node.environments.tools",),
    "mcp": ("node.environments.tools",),
    "verifiers": (
        "node.environments.playing",
        "node.environments.tasksets",
        "node.environments.tools",
    ),
    "vllm": (
        "node.inference.vllm_fp8",
        "node.pipeline.vllm_head_executor",
        "node.pipeline.vllm_rank",
        "node.pipeline.vllm_stage_worker",
    ),
}
"""Modules that load a heavy library when they are imported, and are themselves imported lazily."""

FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "np.load",
    "numpy.load",
    "os.system",
}
BROAD = {"Exception", "BaseException"}


@dataclass(frozen=True)
class Import:
    """One import: the module, from the root if it is relative, and when it is executed."""

    module: str
    relative: bool
    line: int
    lazy: bool
    """Inside a function."""
    checking: bool
    """Under TYPE_CHECKING."""


@dataclass(frozen=True)
class Source:
    """One Python file."""

    path: str
    text: str

    @property
    def module(self) -> str:
        """Dotted name without `primerl.`; the folder's for an __init__."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return ast.parse(self.text, self.path)

    @cached_property
    def imports(self) -> list[Import]:
        """Every import of the file."""
        return list(self._find(self.tree, lazy=False, checking=False))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree."""
        return list(ast.walk(self.tree))

    def calls(self) -> Iterator[tuple[str, ast.Call]]:
        """Every call, with the dotted name of the function."""
        for node in self.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                yield dotted(node.func), node

    def values(self, name: str) -> Iterator[ast.expr]:
        """Every value given to an argument, dictionary key or variable of this name."""
        for node in self.nodes:
            if isinstance(node, ast.keyword) and node.arg == name:
                yield node.value
            elif isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == name:
                        yield value
            elif isinstance(node, ast.Assign):
                if any(dotted(one).rpartition(".")[2] == name for one in node.targets):
                    yield node.value

    def _find(self, node: ast.AST, *, lazy: bool, checking: bool) -> Iterator[Import]:
        package = self.path.split("/")[:-1]
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, False, child.lineno, lazy, checking)
            elif isinstance(child, ast.ImportFrom) and not child.level:
                yield Import(child.module or "", False, child.lineno, lazy, checking)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1]
                base += child.module.split(".") if child.module else []
                for alias in child.names:  # each may be a module
                    yield Import(".".join([*base, alias.name]), True, child.lineno, lazy, checking)
            elif isinstance(child, ast.If) and dotted(child.test) == "TYPE_CHECKING":
                yield from self._find(child, lazy=lazy, checking=True)
            elif not isinstance(child, ast.expr):  # an import is a statement
                inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                yield from self._find(child, lazy=lazy or inside, checking=checking)


ALL = [Source(path.relative_to(ROOT).as_posix(), path.read_text()) for path in walk(".py")]
SHIPPED = [one for one in ALL if not one.path.startswith("tests/")]
PACKAGE = {one.module: one for one in ALL if one.path.split("/")[0] in {*TOP, "__init__.py"}}


def within(module: str, *folders: str) -> bool:
    """Whether a module is one of these or inside one of these folders."""
    return any(module == folder or module.startswith(folder + ".") for folder in folders)


@cache
def layer(module: str) -> tuple[int, int] | None:
    """(layer, list in it) of a module by its longest match."""
    found = [
        (len(name), number, place)
        for number, lists in enumerate(LAYERS)
        for place, names in enumerate(lists)
        for name in names
        if within(module, name)
    ]
    return max(found)[1:] if found else None


def edges(*, lazy: bool = True, checking: bool = False) -> Iterator[tuple[str, str, int]]:
    """(importer, imported, line) within the package."""
    for name, source in PACKAGE.items():
        for one in source.imports:
            if one.relative and (lazy or not one.lazy) and (checking or not one.checking):
                target = one.module
                while target and target not in PACKAGE:
                    target = target.rpartition(".")[0]
                if target and target != name:
                    yield name, target, one.line


def reachable(*, lazy: bool) -> dict[str, set[str]]:
    """The modules that each module imports, directly or not, and itself."""
    graph = {name: set[str]() for name in PACKAGE}
    for name, target, _ in edges(lazy=lazy):
        graph[name].add(target)
    found: dict[str, set[str]] = {}
    for name in graph:
        seen, left = set[str](), [name]
        while left:
            if (one := left.pop()) not in seen:
                seen.add(one)
                left.extend(graph[one])
        found[name] = seen
    return found


def libraries(module: str, *, lazy: bool = True) -> set[str]:
    """Foreign top-level packages that a module imports, types apart."""
    return {
        one.module.partition(".")[0]
        for one in PACKAGE[module].imports
        if not one.relative and not one.checking and (lazy or not one.lazy)
    }


def test_every_module_has_a_layer_and_imports_point_down() -> None:
    assert len(PACKAGE) > 100
    assert [name for name in PACKAGE if layer(name) is None and name not in FREE] == []
    named = [name for lists in LAYERS for names in lists for name in names]
    assert [name for name in named if not any(within(one, name) for one in PACKAGE)] == []
    wrong = [
        f"{name}:{line} imports {target}"
        for name, target, line in edges(checking=True)
        if (here := layer(name)) and (there := layer(target)) and here != there
        if there[0] >= here[0]
    ]
    # the types of the library's names, which __init__ loads when they are used, may be named there
    wrong += [f"{name} imports {target}" for name, target, _ in edges() if name in FREE]
    assert wrong == []


def test_imports_form_no_circle() -> None:
    """Lazy imports count."""
    closure = reachable(lazy=True)
    assert [(name, to) for name, to, _ in edges() if name in closure[to]] == []


def test_no_two_folders_import_each_other() -> None:
    """Lazy imports and those of types count."""
    folders = {
        (name.rpartition(".")[0], target.rpartition(".")[0])
        for name, target, _ in edges(checking=True)
        if name not in FREE and target not in FREE
    }
    assert [pair for pair in sorted(folders) if pair[0] < pair[1] and pair[::-1] in folders] == []


def test_these_do_not_import_each_other() -> None:
    for left, right in APART:
        assert all(any(within(name, one) for name in PACKAGE) for one in (*left, *right)), left
        for name, target, line in edges(checking=True):
            assert not (within(name, *left) and within(target, *right)), f"{name}:{line} {target}"


def test_only_app_composes_roles() -> None:
    roles = ("node.trainer", "node.worker", "node.validator", "node.standby")
    users = {name for name, target, _ in edges() if within(target, *roles)}
    assert [
        one for one in users if not within(one, *roles, "node.app", "node.reports.summary")
    ] == []


def test_the_protocol_and_the_lease_book_do_no_io() -> None:
    """No I/O, clock, randomness, event loop or arrays; nor do they import a module of node/ that may."""
    running = "asyncio threading socket multiprocessing subprocess trio time os io pathlib".split()
    numbers = "torch numpy safetensors transformers random secrets".split()
    pure = ("protocol", "node.trainer.lease_book")
    for name in PACKAGE:
        if within(name, *pure):
            assert libraries(name).isdisjoint({*running, *numbers}), name
    imported = {target for name, target, _ in edges() if within(name, *pure)}
    assert [name for name in imported if not within(name, "crypto", "protocol")] == []


def test_each_foreign_library_is_imported_by_few_modules() -> None:
    for library, allowed in HEAVY.items():
        users = {name for name in PACKAGE if library in libraries(name)}
        assert users, f"{library}: remove it from the table and from pyproject.toml"
        assert [name for name in users if not within(name, *allowed)] == [], library
    torch = {name for name in PACKAGE if "torch" in libraries(name)}
    assert [name for name in torch if not within(name, *COMPUTING)] == []


def test_heavy_libraries_load_lazily() -> None:
    for name, modules in reachable(lazy=False).items():
        loaded = set[str]().union(*(libraries(one, lazy=False) for one in modules))
        heavy = loaded & {*HEAVY, "torch"} - LIGHT
        if within(name, *COMPUTING):
            heavy -= {"torch", "triton"}
        heavy -= {one for one, users in LOADED_AT_IMPORT.items() if within(name, *users)}
        assert heavy == set(), f"importing {name} loads {heavy}"
        light = ("cli", "crypto", "protocol", "node.p2p", "node.environments.host")
        if within(name, *light) or name in FREE:
            assert loaded.isdisjoint({"numpy", "torch", "safetensors"}), name


def test_help_loads_no_heavy_library() -> None:
    program = (
        "import sys\nfrom primerl.cli.main import main\nsys.argv = ['primerl-node', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "print(*sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert "Usage: primerl-node" in done.stdout
    assert {"primerl", "typer"} <= loaded
    heavy = {*HEAVY, "torch", "numpy", "safetensors", "pydantic", "zstandard"}
    assert loaded & heavy - (LIGHT - {"zstandard"}) == set()


def test_folders_are_packages_and_no_module_is_loose() -> None:
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]
    ground = ["__init__.py", "errors.py", "gpus.py", "removal.py", "tasks.py"]
    assert sorted(path.name for path in (ROOT / "node").glob("*.py")) == ground
    said = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {one.path.rpartition("/")[0] for one in PACKAGE.values()}
    assert sorted(said) == sorted(f"primerl.{one}".replace("/", ".").rstrip(".") for one in folders)
    assert [one for one in folders if not (ROOT / one / "__init__.py").is_file()] == []


def test_imports_inside_the_package_are_relative() -> None:
    for source in PACKAGE.values():
        for one in source.imports:
            absolute = not one.relative and one.module.partition(".")[0] in {"primerl", *TOP}
            assert not absolute, f"{source.path}:{one.line}"


def public_classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """(module, class) of every public class at the top of a module."""
    for name, source in PACKAGE.items():
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield name, node


def test_no_public_class_name_is_used_twice() -> None:
    users: dict[str, list[str]] = {}
    for name, node in public_classes():
        users.setdefault(node.name, []).append(name)
    twice = {name: files for name, files in users.items() if len(files) > 1}
    assert twice == {}


def test_no_constructor_has_more_than_eight_arguments() -> None:
    found = {
        node.name
        for _, node in public_classes()
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        if len(method.args.args) - 1 + len(method.args.kwonlyargs) > 8
    }
    assert found == set()


def test_foreign_bytes_are_never_run() -> None:
    """Neither pickles, nor code of a model, nor shell commands."""
    assert len(SHIPPED) > 100
    for source in SHIPPED:
        imported = {one.module.partition(".")[0] for one in source.imports}
        assert imported.isdisjoint(FORBIDDEN_MODULES), source.path
        for name, call in source.calls():
            assert name not in FORBIDDEN_CALLS, f"{source.path}:{call.lineno} calls {name}"
        for name in ("trust_remote_code", "shell"):
            for value in source.values(name):
                fixed = isinstance(value, ast.Constant) and value.value in (False, None)
                assert fixed, f"{source.path}:{value.lineno} {name}"


def test_homes_are_expanded_by_the_helper_that_survives_an_unknown_user() -> None:
    found = {
        source.path
        for source in SHIPPED
        for node in source.nodes
        if isinstance(node, ast.Attribute) and node.attr == "expanduser"
        if dotted(node) != "os.path.expanduser"
    }
    assert not found, "use node/config/paths.py: expand_home()"


def explained(source: Source, handler: ast.ExceptHandler) -> bool:
    """Whether a broad handler has a comment with its reason, which is not that of another handler."""
    end = handler.body[0].end_lineno or handler.lineno
    lines = source.text.splitlines()[handler.lineno - 1 : end]
    return any(re.search(r"#\s*(?!as above)\w", line) for line in lines)


def test_broad_handlers_have_a_reason() -> None:
    handlers = 0
    for source in SHIPPED:
        for node in source.nodes:
            if isinstance(node, ast.ExceptHandler):
                kind = node.type
                kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind] if kind else []
                if not kinds or any(dotted(one) in BROAD for one in kinds):
                    handlers += 1
                    assert explained(source, node), f"{source.path}:{node.lineno}"
        for name, call in source.calls():
            if name.rpartition(".")[2] == "suppress":
                caught = {dotted(argument) for argument in call.args}
                assert caught.isdisjoint(BROAD), f"{source.path}:{call.lineno}"
    assert handlers  # else nothing was checked


def test_every_file_has_a_docstring_and_the_package_is_ascii() -> None:
    assert [one.path for one in SHIPPED if not ast.get_docstring(one.tree)] == []
    assert [one.path for one in PACKAGE.values() if not one.text.isascii()] == []


def test_no_file_names_a_path_of_one_machine() -> None:
    path = re.compile(r"(?<![\w.-])/(?:work|opt|root)(?:/|\b(?![\w-]))")
    for file in walk(".py", ".toml", ".md", ".txt", ".sh", ".json", ".cfg", ".yaml", ".yml"):
        if file != Path(__file__):
            assert not path.search(file.read_text()), file


def test_what_the_security_page_names_is_there() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    tests = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page)
    assert len(tests) > 50
    gone = [
        f"{path}::{name}"
        for path, name in tests
        if not (ROOT / path).is_file() or (name and f"def {name}(" not in (ROOT / path).read_text())
    ]
    files = re.findall(r"`((?:node|protocol|crypto|cli|scripts)/[\w./]+)`", page)
    assert gone + [path for path in files if not (ROOT / path).exists()] == []


def test_every_fault_can_be_planted_and_names_tests_that_exist() -> None:
    places = {fault.name: find(fault, ROOT) for fault in FAULTS}
    assert len(places) == len(FAULTS)
    tests = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    named = {name for fault in FAULTS for name in fault.tests}
    assert {name for name in named if f"def {name}(" not in tests} == set()


def test_json_for_users_has_one_writer() -> None:
    named = [*(ROOT / "cli").glob("*.py"), *(ROOT / "node/app").glob("*.py")]
    named.append(ROOT / "node/reports/summary.py")
    texts = {path.name: path.read_text(encoding="utf-8") for path in named}
    assert [name for name, text in texts.items() if re.search(r"\bjson\.dumps?\(", text)] == []
