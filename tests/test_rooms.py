"""What the import contract cannot say: where a name may stand, which imports are for a type only, how long code is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hasten

SOURCE = Path(hasten.__file__).parent
LIGHTNING = SOURCE / "trainer" / "lightning"
NAMES_LIGHTNING = {
    "lightning.py": "the public door to trainer/lightning/loading.py",
    "trainer/__init__.py": "hands the adapter to the Trainer",
    "doctor/source/script.py": "reads scripts, of which some are Lightning's",
    "doctor/source/read.py": "reads scripts, of which some are Lightning's",
    "doctor/findings/device_prefetch.py": "names its source",
    "doctor/findings/frequent_validation.py": "names its source",
    "techniques/transfer/device_prefetch.py": "names its source",
    "data/elastic.py": "a comment: who else shares out loaders",
}


def test_lightning_is_named_only_in_its_adapter() -> None:
    naming = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if LIGHTNING not in path.parents and "lightning" in path.read_text().lower()
    }
    assert naming == set(NAMES_LIGHTNING)


def test_the_trainers_parts_import_the_trainer_for_its_type_only() -> None:
    """They get it as an argument: an import of it when they run would be a circle."""
    allowed = SOURCE / "trainer" / "__init__.py"
    running = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in (SOURCE / "trainer").rglob("*.py")
        if path != allowed
        for line in _imports_that_run(ast.parse(path.read_text()), "hasten.trainer.trainer")
    ]
    assert not running


def test_no_file_is_longer_than_400_lines_and_no_function_than_60() -> None:
    """Long ones are split by subject, not by size. A signature does not count: a command's options are its page."""
    long = []
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        if text.count("\n") > 400:
            long.append(str(path.relative_to(SOURCE)))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if (node.end_lineno or 0) - node.body[0].lineno >= 60:
                    long.append(f"{path.relative_to(SOURCE)}:{node.lineno} {node.name}")
    assert not long


def test_no_file_of_tests_or_benchmarks_is_longer_than_400_lines() -> None:
    root = Path(__file__).parents[1]
    files = [path for room in ("tests", "benchmarks", "examples") for path in (root / room).rglob("*.py")]
    assert not [str(path.relative_to(root)) for path in files if path.read_text().count("\n") > 400]


def _imports_that_run(node: ast.AST, wanted: str) -> Iterator[int]:
    """Yield the lines that import a module, but for those that only type checkers read."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.ImportFrom):
        names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    else:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if wanted in names:
        yield node.lineno  # type: ignore[attr-defined]
    for child in ast.iter_child_nodes(node):
        yield from _imports_that_run(child, wanted)
