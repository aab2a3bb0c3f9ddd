"""The rules of the house, held by reading the source: who may import whom, and what is forbidden.

A rule is changed here and in the design in one commit, or not at all.
"""

import ast
import re
import subprocess
import sys
import tomllib

import pytest
from support.house import (
    ROOMS,
    ROOT,
    TEXT,
    House,
    Source,
    calls,
    reachable,
    sources,
    switches,
    walk,
)

PACKAGE = [*sources(*ROOMS), Source("__init__.py", (ROOT / "__init__.py").read_text())]
HOUSE = House(PACKAGE)
EVERYTHING = sources()

# Layers from the bottom up; the modules of one layer's lists do not import those of another list of it.
OPERATING = "doctor explain summary"
LOW_PIPELINE = """boundaries frame frame_codec layers outbox packets place planner port shaper socket_port
    stage_loop
    together"""
LAYERS: list[list[list[str]]] = [
    [["crypto"]],
    [["protocol"]],
    [["node.ops", "node.config", "node.process", "node.storage"]],
    [["node.weights"], ["node.p2p"]],
    [
        ["node.weights.retention"],
        ["node.models"],
        ["node.inference.fingerprint"],
        [f"node.pipeline.{name}" for name in LOW_PIPELINE.split()],
    ],
    [["node.memory_plan"]],
    [["node.inference", "node.pipeline.vllm_place"]],
    [["node.environments"], ["node.training"], ["node.pipeline"]],
    [["node.api"], ["node.sft"], ["node.verification"]],
    [["node.evaluation"]],
    [["node.trainer"], ["node.worker"]],
    [["node.validator"]],
    [["node.app", "node.launch", *(f"node.ops.{name}" for name in OPERATING.split())]],
    [["cli"]],
]
FREE = {"__init__", "node", "configs"}
"""Names and versions only: whoever likes may import them."""


def within(module: str, *rooms: str) -> bool:
    """Whether a module is one of these, or inside one of these folders."""
    return any(module == room or module.startswith(room + ".") for room in rooms)


def place(module: str) -> tuple[int, int] | None:
    """(layer, list in it) of a module: a module that is named itself goes before its folder."""
    found = [
        (len(name), layer, number)
        for layer, lists in enumerate(LAYERS)
        for number, names in enumerate(lists)
        for name in names
        if within(module, name)
    ]
    return max(found)[1:] if found else None


def arrows_between(left: tuple[str, ...], right: tuple[str, ...]) -> list[str]:
    """Imports from one part of the house to another, also those for types only."""
    return [
        f"{HOUSE.files[name].path}:{one.line} imports {target}"
        for name, target, one in HOUSE.arrows(checking=True)
        if within(name, *left) and within(target, *right)
    ]


def outside(module: str) -> set[str]:
    """Top-level packages that a file imports at any time, types apart."""
    return {
        one.module.partition(".")[0]
        for one in HOUSE.files[module].imports
        if not one.relative and not one.checking
    }


def test_the_house_was_found() -> None:
    assert len(HOUSE.files) > 100
    assert {"crypto.keys", "protocol.leases", "node.trainer.loop", "cli.main"} <= set(HOUSE.files)
    assert len(list(HOUSE.arrows())) > 400


def test_every_module_has_its_place() -> None:
    lost = [name for name in HOUSE.files if place(name) is None and name not in FREE]
    assert lost == [], "give each a layer in LAYERS"
    named = [name for layer in LAYERS for names in layer for name in names]
    assert [name for name in named if not any(within(one, name) for one in HOUSE.files)] == []


def test_imports_point_down_only() -> None:
    wrong: list[str] = []
    for name, target, one in HOUSE.arrows(checking=True):
        here, there = place(name), place(target)
        if here and there and here != there and there[0] >= here[0]:
            wrong.append(f"{HOUSE.files[name].path}:{one.line} imports {target}")
    assert wrong == []


def test_what_is_free_knows_nothing_of_ours() -> None:
    assert [arrow for arrow in HOUSE.arrows(checking=True) if arrow[0] in FREE] == []


def test_no_import_goes_in_a_circle() -> None:
    """Lazy imports count: a circle that is only walked later is still a circle."""
    graph = {name: set[str]() for name in HOUSE.files}
    for name, target, _ in HOUSE.arrows():
        graph[name].add(target)
    circles = [
        f"{name} <-> {target}"
        for name in graph
        for target in graph[name]
        if name in reachable(graph, target)
    ]
    assert circles == []


RUNNING = ("asyncio", "threading", "socket", "multiprocessing", "subprocess", "trio", "time")
NUMBERS = ("torch", "numpy", "safetensors", "transformers", "random", "secrets")


def test_the_protocol_does_nothing_by_itself() -> None:
    """No I/O, no clock, no randomness, no event loop, no arrays."""
    for name in HOUSE.files:
        if within(name, "protocol"):
            assert outside(name).isdisjoint({*RUNNING, *NUMBERS, "os", "io", "pathlib"}), name


def test_crypto_imports_nothing_of_ours() -> None:
    assert arrows_between(("crypto",), ("protocol", "node", "cli", "configs", "__init__")) == []


HEAVY = {
    "aiohttp": {"node.p2p.seeds", "node.api"},
    "openai": {"node.evaluation.endpoint"},
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
        "node.inference.vllm_worker",
        "node.pipeline.vllm_head_executor",
        "node.pipeline.vllm_rank",
        "node.pipeline.vllm_stage",
        "node.pipeline.vllm_stage_worker",
    },
    "transformers": {"node.models.huggingface"},
    "huggingface_hub": {"node.models.huggingface"},
    "datasets": {"node.sft.data"},
    "renderers": {"node.sft.renderers"},
    "uvicorn": {"node.inference.vllm_api"},
    "verifiers": {"node.environments.playing", "node.environments.tasksets"},
    "jinja2": {"node.environments.chat"},
    "tokenizers": {"node.environments.chat", "node.models.huggingface"},
    "matplotlib": {"node.ops.report"},
    "plotext": {"node.ops.report"},
    "zstandard": {"node.weights.streams"},
    "typer": {"cli"},
    "rich": {"cli"},
    "blake3": {"crypto.hashing"},
    "cryptography": {"crypto.keys"},
}
"""A foreign library and the few files that know it."""


@pytest.mark.parametrize("library", HEAVY)
def test_a_foreign_library_is_known_by_few_files(library: str) -> None:
    users = {name for name in HOUSE.files if library in outside(name)}
    assert users, "nobody imports it: take it from the table and from pyproject.toml"
    assert {name for name in users if not within(name, *HEAVY[library])} == set()


def test_torch_is_where_models_are() -> None:
    users = {name for name in HOUSE.files if "torch" in outside(name)}
    folders = ("node.models", "node.inference", "node.training", "node.pipeline")
    audits = ("node.verification.replay", "node.verification.crossings")
    allowed = (*folders, *audits, "node.verification.forging")
    assert {name for name in users if not within(name, *allowed)} == set()


LOADED_LAZILY = {
    "torch": """node.inference.placement node.verification.crossings node.verification.replay
        node.inference.boundary_states
        node.inference.kernels node.inference.device
        node.inference.model node.inference.model node.inference.decoding node.inference.model
        node.inference.sampler node.inference.kernels node.inference.model node.inference.qwen3
        node.inference.vllm_worker node.inference.qwen3 node.inference.kernels node.inference.sampler
        node.inference.device node.inference.vllm_sampling
        node.inference.vllm_sampling node.inference.vllm_worker node.training.export
        node.training.export node.training.gather node.training.learner
        node.training.losses node.training.losses node.training.losses
        node.training.meter node.training.attention node.training.experts
        node.training.experts node.training.model node.training.attention
        node.training.lora
        node.training.model node.training.model node.training.optimizer
        node.training.rank node.training.ranks.share node.training.ranks.wire
        node.training.learner_state node.training.learner_state node.training.learner_state
        node.training.learner_state node.training.world node.pipeline.vllm_head_executor
        node.pipeline.vllm_rank node.pipeline.vllm_recorders
        node.pipeline.vllm_stage_worker node.pipeline.vllm_runner
        node.pipeline.activations""",
    "triton": "node.inference.kernels node.inference.kernels node.inference.kernels",
    "verifiers": "node.environments.playing node.environments.tasksets",
    "vllm": """node.pipeline.vllm_head_executor node.pipeline.vllm_rank
        node.pipeline.vllm_stage_worker""",
}
"""The files that may load a heavy library when they are imported: they are imported lazily themselves."""
LIGHT = {"typer", "rich", "blake3", "cryptography", "zstandard"}
HEAVIEST = {*HEAVY, *LOADED_LAZILY} - LIGHT


@pytest.mark.parametrize("library", sorted(HEAVIEST))
def test_a_heavy_library_is_loaded_by_nobodys_import(library: str) -> None:
    """Whoever is imported at the top of anything must not bring it along, by however many steps."""
    allowed = LOADED_LAZILY.get(library, "").split()
    loaders = {name for name in HOUSE.files if library in HOUSE.eager(name)}
    assert {name for name in loaders if not within(name, *allowed)} == set()
    assert all(any(within(name, one) for name in loaders) for one in allowed), "the table is stale"


def test_the_command_line_and_the_lower_floors_load_no_numbers() -> None:
    for name in HOUSE.files:
        if within(name, "cli", "crypto", "protocol", "node.p2p") or name in FREE:
            assert HOUSE.eager(name).isdisjoint({"numpy", "torch", "safetensors"}), name


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (("node.training", "node.inference", "node.verification", "node.api"), ("node.p2p",)),
        (("node.environments",), ("node.p2p", "node.weights", "node.training")),
        (("node.trainer",), ("node.worker", "node.validator")),
        (("node.worker",), ("node.trainer", "node.validator")),
        (("node.validator",), ("node.worker.loop", "node.trainer.loop", "node.trainer.scheduler")),
        (("node.worker.weight_sync", "node.evaluation"), ("node.worker.loop",)),
        (("node.trainer.scheduler", "node.trainer.publisher"), ("node.trainer.loop",)),
        (("cli",), ("node.trainer", "node.worker", "node.training", "node.inference")),
    ],
    ids=str,
)
def test_these_do_not_import_each_other(left: tuple[str, ...], right: tuple[str, ...]) -> None:
    for side in (left, right):
        for folder in side:
            assert any(within(name, folder) for name in HOUSE.files), f"{folder} has moved"
    assert arrows_between(left, right) == []


def test_only_the_composition_imports_roles() -> None:
    roles = ("node.trainer", "node.worker", "node.validator")
    users = {name for name, target, _ in HOUSE.arrows() if within(target, *roles)}
    assert {
        name for name in users if not within(name, *roles, "node.app", "node.ops.summary")
    } == set()


def test_no_module_lies_loose_in_node() -> None:
    assert [path.name for path in (ROOT / "node").glob("*.py")] == ["__init__.py"]


def test_imports_inside_the_package_are_relative() -> None:
    wrong = [
        f"{source.path}:{one.line}"
        for source in PACKAGE
        for one in source.imports
        if not one.relative and one.module.partition(".")[0] in {"primerl", *ROOMS}
    ]
    assert wrong == []


def test_the_packages_that_ship_are_the_folders() -> None:
    said = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {source.path.rpartition("/")[0] for source in PACKAGE}
    assert sorted(said) == sorted(
        "primerl." + name.replace("/", ".") if name else "primerl" for name in folders
    )
    for folder in folders:
        assert (ROOT / folder / "__init__.py").is_file(), folder


def test_no_other_python_file_lies_in_the_root() -> None:
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]


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
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "np.load", "numpy.load"}
SHIPPED = [source for source in EVERYTHING if not source.path.startswith("tests/")]


@pytest.mark.parametrize("source", SHIPPED, ids=lambda source: source.path)
def test_foreign_bytes_are_never_run(source: Source) -> None:
    imported = {one.module.partition(".")[0] for one in source.imports}
    assert imported.isdisjoint(FORBIDDEN_MODULES)
    for name, call in calls(source):
        assert name not in FORBIDDEN_CALLS, f"{source.path}:{call.lineno} calls {name}"
    for where, value in switches(source, "trust_remote_code"):
        assert isinstance(value, ast.Constant), f"{source.path}:{where} runs a model's code"
        assert value.value is not True, f"{source.path}:{where} runs a model's code"


def test_a_shell_is_never_asked() -> None:
    for source in SHIPPED:
        assert "os.system" not in {name for name, _ in calls(source)}, source.path
        for line, value in switches(source, "shell"):
            assert isinstance(value, ast.Constant), f"{source.path}:{line}"
            assert value.value is False, f"{source.path}:{line}"


BROAD = {"Exception", "BaseException"}


def broad(handler: ast.ExceptHandler) -> bool:
    """Whether a handler catches whatever comes."""
    if handler.type is None:
        return True
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(ast.unparse(one) in BROAD for one in caught)


def explained(source: Source, handler: ast.ExceptHandler) -> bool:
    """Whether a comment says why, or it only cleans up and passes the error on."""
    last = handler.body[-1]
    if isinstance(last, ast.Raise) and last.exc is None:
        return True
    end = handler.body[0].end_lineno or handler.lineno
    lines = source.text.splitlines()[handler.lineno - 1 : end]
    return any(re.search(r"#\s*\w", line) for line in lines)


def test_whoever_catches_everything_says_why() -> None:
    handlers = [
        (source, node)
        for source in SHIPPED
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ExceptHandler) and broad(node)
    ]
    assert handlers  # else nothing was looked at
    assert [f"{s.path}:{h.lineno}" for s, h in handlers if not explained(s, h)] == []


def test_nothing_is_suppressed_wholesale() -> None:
    for source in SHIPPED:
        for name, call in calls(source):
            if name.rpartition(".")[2] == "suppress":
                caught = {ast.unparse(argument) for argument in call.args}
                assert caught.isdisjoint(BROAD), f"{source.path}:{call.lineno}"


def test_every_file_says_what_it_is_for() -> None:
    assert [source.path for source in SHIPPED if not ast.get_docstring(source.tree)] == []


def test_the_package_is_ascii() -> None:
    assert [source.path for source in PACKAGE if not source.text.isascii()] == []


def test_nobody_writes_a_machines_own_paths() -> None:
    path = re.compile(r"(?<![\w.-])/(?:work|opt|root)(?:/|\b(?![\w-]))")
    wrong = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in walk(*TEXT)
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if file.name != "test_house.py" and path.search(line)
    ]
    assert wrong == []


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


HELP_LOADS_NONE_OF = {*HEAVIEST, "numpy", "safetensors", "pydantic", "zstandard"}


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from primerl.cli.main import main\n"
        "sys.argv = ['primerl-node', '--help']\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "print(*sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert "Usage: primerl-node" in done.stdout
    assert {"primerl", "typer"} <= loaded
    assert loaded & HELP_LOADS_NONE_OF == set()
