"""List every place that removes or replaces files, by reading the source: a new one has to be justified here.

A tree is removed by node/removal.py alone, whose rules tests/node/storage/test_run_files.py holds.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache

from support.repository import ROOT, dotted, walk

METHODS = {"rmtree", "rmdir", "unlink", "removedirs", "rename", "renames"}
"""Found as names of attributes, called or not: shutil.rmtree may be handed to a thread."""
FUNCTIONS = {
    *("os.remove", "os.replace", "os.truncate", "os.ftruncate"),
    *("shutil.move", "shutil.copytree", "shutil.copyfile", "shutil.copy", "shutil.copy2"),
}
TREES = {"rmtree", "rmdir", "removedirs", "move"}
"""What removes directories."""

KNOWN = {
    # -- the one place for trees
    ("node/removal.py", "rmdir"): (
        3,
        "directories that are empty once what is ours has gone",
    ),
    ("node/removal.py", "unlink"): (1, "files that the caller knows by name, never a link"),
    ("node/removal.py", "rename"): (1, "what is not ours is moved to a name that is free"),
    # -- files that are replaced by newer ones of the same name, in a directory that claim() marked or of a node
    ("node/storage/partial.py", "replace"): (1, "the file that was written whole beside its place"),
    ("node/storage/partial.py", "rename"): (2, "a directory of ours, whose foreign files are kept"),
    ("node/storage/partial.py", "unlink"): (2, "the half-written file, by its own hidden name"),
    ("node/reports/report.py", "replace"): (1, "reward.png of a marked run"),
    ("node/storage/chunk_store.py", "rename"): (1, "a chunk, named by its digest"),
    ("node/storage/chunk_store.py", "replace"): (1, "the same"),
    ("node/storage/chunk_store.py", "unlink"): (
        3,
        "chunks and temporary files, by names of our own form",
    ),
    ("node/training/resume_points.py", "unlink"): (2, "step_N.resume of earlier or void steps"),
    ("node/app/retirement.py", "replace"): (
        1,
        "key.pem by the key that takes its place, once a trainer knows it: the old one is ended for ever",
    ),
    ("node/app/startup.py", "unlink"): (
        2,
        "policy.safetensors, which it has just written, and the mark of a copy that a run goes on from",
    ),
    ("node/trainer/backups.py", "copyfile"): (
        2,
        "into a folder of backups, which it has just made",
    ),
    ("node/storage/rollouts.py", "unlink"): (1, "step_N.parquet that rollouts.keep says to drop"),
    ("node/training/rounds.py", "unlink"): (2, "the file by which masters came or went"),
    ("node/training/checkpoint.py", "rename"): (2, "checkpoints that are set aside or put back"),
    ("node/training/checkpoint.py", "unlink"): (
        1,
        "COMPLETE, before the rest of an old checkpoint",
    ),
    ("node/models/huggingface.py", "unlink"): (
        1,
        "config.json of a model that is made, where there was none, and cannot be written whole",
    ),
    ("node/launch/launcher.py", "unlink"): (1, "ticket.txt in a directory that claim() marked"),
    ("node/process/spawn.py", "copyfile"): (1, "a log of `rl`, put aside by size"),
    ("node/process/spawn.py", "replace"): (2, "the same"),
    ("node/process/spawn.py", "truncate"): (1, "the same"),
    ("node/process/spawn.py", "unlink"): (1, "the half-copied log"),
    # -- new directories: what is copied goes where nothing was
    ("node/models/model_files.py", "copyfile"): (1, "into a new directory that becomes the export"),
    ("node/training/lora.py", "copyfile"): (1, "the same"),
    ("node/models/text_models.py", "copyfile"): (1, "into a new directory in the user's cache"),
    ("node/models/text_models.py", "copytree"): (1, "into the same"),
    ("node/models/text_models.py", "rename"): (1, "of it, to a name with the digest of its source"),
    # -- sockets, registries, exchange between processes of one node
    ("node/process/unix_sockets.py", "unlink"): (1, "a socket; anything else is refused"),
    ("node/ops/control.py", "replace"): (1, "our own entry in the list of running nodes"),
    ("node/ops/control.py", "unlink"): (2, "entries of nodes that ended, by names of our own form"),
    ("node/training/snapshot.py", "ftruncate"): (
        1,
        "a policy that is being read, in a scratch directory",
    ),
    ("node/training/snapshot.py", "rename"): (1, "the same"),
    ("node/training/snapshot.py", "unlink"): (2, "the same"),
    ("node/inference/vllm_arguments.py", "replace"): (
        1,
        "config.json in vLLM's cache, by its digest",
    ),
    ("cli/service.py", "unlink"): (2, "the unit or plist that `service install` marked as its own"),
    ("crypto/keys.py", "unlink"): (
        1,
        "the key file that this call made a moment ago, half written",
    ),
    # -- benchmarks and tools: directories that they made
    ("scripts/bench/gpu_run.py", "copyfile"): (1, "the picture of a run into --out"),
    ("scripts/bench/models.py", "unlink"): (1, "weights in a temporary directory"),
    ("scripts/bench/pipeline.py", "rename"): (2, "files of the bench in its own directory"),
    ("scripts/bench/pipeline.py", "unlink"): (1, "whole-N.json of an earlier bench in --keep"),
    ("scripts/bench/promises.py", "copyfile"): (1, "a ledger into a temporary directory"),
    ("scripts/bench/soak.py", "copy"): (3, "logs of the nodes into --logs"),
    ("scripts/bench/soak.py", "copytree"): (1, "a node's directory into the bench's own"),
    ("scripts/bench/soak.py", "unlink"): (1, "what filled a disk of the bench"),
    ("scripts/bench/trained_model.py", "rename"): (1, "a temporary model to a name of its digest"),
    ("scripts/faults.py", "copytree"): (1, "the source into a temporary directory"),
}
"""(file, call) -> how often, and what it may remove or replace."""

SHELL = re.compile(
    r"(^|[;&|({]|\bthen|\bdo)\s*(sudo\s+)?(rm|rmdir|mv|unlink|rsync|shred|truncate)\s", re.M
)


def removals(tree: ast.AST) -> Iterator[str]:
    """The names of all calls that remove or replace files; of a name that was imported alone, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (node.attr in METHODS or dotted(node) in FUNCTIONS):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil"):
            for one in node.names:
                if one.name in METHODS or f"{node.module}.{one.name}" in FUNCTIONS:
                    yield one.name
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            # Path.replace() has one argument, str.replace() two, structs.replace() keywords
            if node.func.attr == "replace" and len(node.args) == 1 and not node.keywords:
                yield "replace"


@cache
def count_removals() -> dict[tuple[str, str], int]:
    counted: Counter[tuple[str, str]] = Counter()
    for path in walk(".py"):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith("tests/"):
            counted.update((name, call) for call in removals(ast.parse(path.read_text())))
    return dict(counted)


def test_every_place_that_removes_or_replaces_files_is_listed_with_its_reason() -> None:
    assert count_removals() == {place: count for place, (count, _) in KNOWN.items()}


def test_one_file_alone_removes_trees() -> None:
    assert {file for file, call in count_removals() if call in TREES} == {"node/removal.py"}


def test_the_ways_to_remove_a_tree_are_all_seen() -> None:
    program = """
import os, shutil
from shutil import rmtree, move
from os import remove
shutil.rmtree(a)
asyncio.to_thread(shutil.rmtree, a)
a.unlink(missing_ok=True)
os.remove(a)
a.replace(b)
a.rename(b)
text.replace("a", "b")
structs.replace(a, b=1)
items.remove(a)
"""
    expected = ["move", "remove", "remove", "rename", "replace", *["rmtree"] * 3, "unlink"]
    assert sorted(removals(ast.parse(program))) == expected


def test_no_shell_script_removes_anything() -> None:
    scripts = [*walk(".sh", ".sbatch")]
    assert len(scripts) > 5
    assert [path.name for path in scripts if SHELL.search(path.read_text())] == []
    for line in ("rm -rf $x", "  rm -f a", "cd a && rm b", "then mv a b", "(rmdir a)"):
        assert SHELL.search(line), line
    assert not SHELL.search("# a form\nconfirm -a")
