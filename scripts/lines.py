"""Print files and lines of each folder and its tests, beside a budget, and the number of config keys.

python scripts/lines.py
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGET = {
    "crypto": 0.2,
    "protocol": 2.3,
    "node/app": 1.5,
    "node/config": 1.1,
    "node/trainer": 1.9,
    "node/worker": 1.3,
    "node/validator": 0.5,
    "node/training": 5.0,
    "node/inference": 4.2,
    "node/pipeline": 6.0,
    "node/weights": 1.8,
    "node/p2p": 4.2,
    "node/verification": 3.4,
    "node/environments": 1.6,
    "node/api": 0.5,
    "node/evaluation": None,
    "node/sft": None,
    "node/launch": 2.7,
    "node/process": 0.6,
    "node/storage": 1.3,
    "node/ops": 2.0,
    "cli": 1.6,
}
"""Thousands of lines by folder; None if the folder shares the budget of the next folder with one."""


def size(folder: Path) -> tuple[int, int]:
    """Count the Python files with code below a folder, and their lines."""
    texts = [path.read_text() for path in folder.rglob("*.py") if "__pycache__" not in path.parts]
    return sum(len(text.splitlines()) > 1 for text in texts), sum(
        len(text.splitlines()) for text in texts
    )


def folders() -> list[str]:
    """List the product's folders: with a budget first, then others that exist."""
    found = {f"node/{path.parent.name}" for path in (ROOT / "node").glob("*/__init__.py")}
    return [*BUDGET, *sorted({*found, "configs"} - {*BUDGET})]


def config_keys() -> int:
    """Count the keys that the classes of node/config declare, sections too; an override counts again."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "node/config").glob("*.py")]
    classes = [part for tree in trees for part in tree.body if isinstance(part, ast.ClassDef)]
    sections = {"BaseConfig"}  # and all that derive from one of them, directly or not
    while True:
        derived = {
            part.name
            for part in classes
            if any(isinstance(base, ast.Name) and base.id in sections for base in part.bases)
        }
        if derived <= sections:
            break
        sections |= derived
    declared = (part.body for part in classes if part.name in sections)
    return sum(isinstance(line, ast.AnnAssign) for body in declared for line in body)


def main() -> None:
    """Print a row for each folder, then rows for folders without their own tests."""
    line = "{:<22}{:>7}{:>9}{:>10}{:>12}{:>9}".format
    print(line("folder", "files", "lines", "budget", "test files", "lines"))
    total = [0, 0, 0, 0]
    for name in folders():
        counts = *size(ROOT / name), *size(ROOT / "tests" / name)
        total = [one + other for one, other in zip(total, counts, strict=True)]
        budget = BUDGET.get(name)
        print(line(name, counts[0], counts[1], f"{budget:.1f}k" if budget else "", *counts[2:]))
    budget = sum(one for one in BUDGET.values() if one)
    print(line("product", total[0], total[1], f"{budget:.1f}k", total[2], total[3]))
    other = sorted(path for path in (ROOT / "tests").iterdir() if path.is_dir())
    for path in other:
        if path.name not in {"node", "cli", "crypto", "protocol", "__pycache__"}:
            print(line(f"tests/{path.name}", "", "", "", *size(path)))
    print(line("tests, all", "", "", "32.0k", *size(ROOT / "tests")))
    print(line("scripts", *size(ROOT / "scripts"), "", "", ""))
    print(line("config keys", "", config_keys(), "", "", ""))


if __name__ == "__main__":
    main()
