"""Reads Lightning's test files and says of each test whether it uses only the public face, and if not, why not.

Nothing is imported or run: the files are read as syntax trees. What a test uses through a helper, class or
fixture, in its own file or in another file of `tests_pytorch`, counts as its own. `rules.py` holds the lists.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import rules


@dataclass(frozen=True)
class Verdict:
    """What kind of test this is.

    ``kind`` is one of: public; near (its only looks inside are those in `rules.NEAR`); internal (it looks inside
    Lightning); machines (it needs several processes); elsewhere
    (it needs hardware or a package that is out of scope); no_trainer (it constructs no Trainer).
    ``texts``: the test checks the wording of a message, a log line or printed output.
    """

    file: str
    name: str
    topic: str
    kind: str
    reason: str
    texts: bool


@dataclass
class Part:
    """What one top-level definition of a file does by itself."""

    reasons: list[str] = field(default_factory=list)
    near: list[str] = field(default_factory=list)
    machines: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    uses: set[tuple[str, str]] = field(default_factory=set)  # (file, name) of definitions it leans on
    trainer: bool = False
    texts: bool = False


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of a chain of attributes that begins with a name; otherwise an empty text."""
    words: list[str] = []
    while isinstance(node, ast.Attribute):
        words.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(words)]) if isinstance(node, ast.Name) else ""


def without_annotations(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes under ``node``, but not type annotations, which use a name without touching it."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from without_annotations(child)


class SourceFile:
    """One file of `tests_pytorch`: its imports, and its top-level definitions."""

    def __init__(self, tests: Path, file: str) -> None:
        self.tests, self.file = tests, file
        self.tree = ast.parse((tests / file).read_text())
        self.imports = self.find_imports()
        self.definitions: dict[str, ast.AST] = {}
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.definitions[node.name] = node
            elif isinstance(node, ast.Assign):
                self.definitions |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
        self.own_private = self.find_own_private()
        self.parts: dict[str, Part] = {}

    def find_imports(self) -> dict[str, str]:
        """Local name -> the dotted name it stands for, also for imports inside functions."""
        found: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.split(".")[0]
                    found[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        return found

    def find_own_private(self) -> set[str]:
        """Private names that the test file itself sets or defines: they are not Lightning's."""
        names = {node.name for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef) and node.args.args}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) == "self":
                names.add(node.attr)
        return names

    def origin(self, name: str) -> str:
        """The full dotted name behind a local one: ``pl.Trainer`` -> ``lightning.pytorch.Trainer``."""
        first, _, rest = name.partition(".")
        full = self.imports.get(first, "")
        return f"{full}.{rest}" if full and rest else full

    def part(self, name: str) -> Part:
        """What the definition ``name`` does by itself (worked out once)."""
        if name not in self.parts:
            self.parts[name] = self.look(self.definitions[name])
        return self.parts[name]

    def look(self, root: ast.AST) -> Part:
        part = Part()
        inner = {id(node.value): node.attr for node in ast.walk(root) if isinstance(node, ast.Attribute)}
        cases = self.nodes_of_cases(root)
        for node in without_annotations(root):
            if isinstance(node, ast.Name | ast.Attribute) and id(node) not in inner:
                self.look_at_name(node, part)
            if isinstance(node, ast.Attribute):
                self.look_at_attribute(node, inner.get(id(node), ""), part)
            elif isinstance(node, ast.Call) and id(node) not in cases:
                self.look_at_call(node, part)
            elif isinstance(node, ast.Dict) and id(node) not in cases:
                self.look_at_options(zip(node.keys, node.values, strict=True), part)
            elif isinstance(node, ast.ClassDef):
                part.trainer |= any(self.is_trainer(base) for base in node.bases)
            elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                if node.slice.value in rules.LOOP_STATE:
                    part.reasons.append(f'reads loop state in a checkpoint: ["{node.slice.value}"]')
            elif isinstance(node, ast.arg):
                self.look_at_argument(node.arg, part)
        return part

    def nodes_of_cases(self, root: ast.AST) -> set[int]:
        """What stands in `pytest.param(..., marks=RunIf(...))`: it concerns one case, which skips itself."""
        calls = [n for n in ast.walk(root) if isinstance(n, ast.Call) and dotted(n.func) == "pytest.param"]
        marked = [call for call in calls if any(keyword.arg == "marks" for keyword in call.keywords)]
        return {id(node) for call in marked for node in ast.walk(call)}

    def look_at_name(self, node: ast.Name | ast.Attribute, part: Part) -> None:
        """An imported name, or one that is defined elsewhere in the file."""
        name = dotted(node)
        full = self.origin(name) if name else ""
        if full.startswith("tests_pytorch."):
            self.lean_on(full, part)
        elif rules.is_lightning(full):
            if not rules.is_public(full):
                part.reasons.append(f"uses {full}")
        elif name and not full and name.split(".")[0] in self.definitions:
            part.uses.add((self.file, name.split(".")[0]))

    def lean_on(self, full: str, part: Part) -> None:
        """A helper of another test file."""
        words = full.split(".")
        for cut in range(len(words) - 1, 0, -1):
            file = "/".join(words[:cut]) + ".py"
            if (self.tests / file).exists():
                part.uses.add((file, words[cut]))
                return

    def look_at_argument(self, name: str, part: Part) -> None:
        """A parameter: perhaps a fixture of this file or of a conftest."""
        if name in self.definitions:
            part.uses.add((self.file, name))
        elif name in ("caplog", "capsys", "capfd"):
            part.texts = True
        elif name not in rules.HARMLESS_FIXTURES:
            folder = Path(self.file).parent
            while folder != Path("."):
                file = str(folder / "conftest.py")
                if (self.tests / file).exists() and name in open_file(self.tests, file).definitions:
                    part.uses.add((file, name))
                    return
                folder = folder.parent

    def look_at_attribute(self, node: ast.Attribute, after: str, part: Part) -> None:
        """One attribute; ``after`` is the attribute that is taken of it in turn, or empty."""
        base = dotted(node.value)
        full = self.origin(base) if base else ""
        foreign = bool(full) and not rules.is_lightning(full) and not full.startswith("tests_pytorch.")
        text = ast.unparse(node)
        if node.attr in rules.INTERNAL_ATTRIBUTES:
            kind = part.near if f"{node.attr}.{after}" in rules.NEAR else part.reasons
            kind.append(f"looks at .{node.attr}.{after}".rstrip("."))
        elif node.attr in rules.INTERNAL_ON_TRAINER and ast.unparse(node.value).lower().endswith("trainer"):
            kind = part.near if f"{node.attr}.{after}" in rules.NEAR else part.reasons
            kind.append(f"looks at trainer.{node.attr}.{after}".rstrip("."))
        elif rules.is_private(node.attr) and base not in ("self", "cls") and not foreign and not full:
            outside = text.startswith("super()") or node.attr in self.own_private or "experiment" in text
            outside |= node.attr in rules.NOT_LIGHTNINGS
            if not outside:
                part.reasons.append(f"touches the private .{node.attr}")

    def look_at_call(self, node: ast.Call, part: Part) -> None:
        name = dotted(node.func)
        full = self.origin(name) or name
        if full in rules.TRAINERS or (full.endswith("partial") and node.args and self.is_trainer(node.args[0])):
            part.trainer = True
            self.look_at_flags(node, part)
        last = full.rpartition(".")[2]
        if last in ("patch", "setattr", "delattr", "object", "spy") and node.args:
            self.look_at_patch(node, last, part)
        if last in ("raises", "warns", "no_warning_call", "deprecated_call"):
            part.texts |= any(keyword.arg == "match" for keyword in node.keywords)
        if last == "RunIf":
            for keyword in node.keywords:
                if keyword.arg in rules.HARDWARE:
                    part.elsewhere.append(f"needs {keyword.arg}")
                elif keyword.arg == "standalone":
                    part.machines.append("their `standalone` group: several processes")
        if last == "dict" or full == "dict":  # options kept for a later Trainer(**options)
            self.look_at_flags(node, part)

    def is_trainer(self, node: ast.AST) -> bool:
        return self.origin(dotted(node)) in rules.TRAINERS

    def look_at_flags(self, node: ast.Call, part: Part) -> None:
        """The flags in ``Trainer(...)`` or ``dict(...)``."""
        self.look_at_options(((ast.Constant(k.arg), k.value) for k in node.keywords if k.arg), part)

    def look_at_options(self, options: Iterable[tuple[ast.AST | None, ast.AST]], part: Part) -> None:
        """Flags of the Trainer that ask for several processes or other hardware."""
        for key, node in options:
            if not isinstance(key, ast.Constant) or not isinstance(node, ast.Constant):
                continue
            flag, value = key.value, node.value
            if flag == "strategy" and isinstance(value, str) and value.startswith("ddp"):
                part.machines.append(f'strategy="{value}"')
            elif flag in ("devices", "num_nodes") and isinstance(value, int) and value > 1:
                part.machines.append(f"{flag}={value}")
            elif flag in ("strategy", "accelerator", "precision") and isinstance(value, str):
                if rules.ELSEWHERE.match(value):
                    part.elsewhere.append(f'{flag}="{value}"')

    def look_at_patch(self, node: ast.Call, last: str, part: Part) -> None:
        """`mock.patch("a.b.c")`, `monkeypatch.setattr("a.b.c", ...)`, `mock.patch.object(thing, "name")`."""
        first = node.args[0]
        target = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
        if isinstance(first, ast.JoinedStr):
            target = ast.unparse(first)[2:-1]
        elif not target and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            name, base = str(node.args[1].value), dotted(first)
            full = self.origin(base)
            if full:
                target = f"{full}.{name}"
            elif rules.is_private(name) and last != "patch" and name not in self.own_private:
                part.reasons.append(f"replaces the private .{name}")
        if rules.is_lightning(target) and not rules.may_patch(target):
            part.reasons.append(f"replaces {target}")


@cache
def open_file(tests: Path, file: str) -> SourceFile:
    """Each file is parsed once."""
    return SourceFile(tests, file)


def all_parts(tests: Path, file: str, name: str) -> list[Part]:
    """The test and everything it leans on, in this file and in others, the test itself first."""
    seen: dict[tuple[str, str], Part] = {}
    todo = [(file, name)]
    while todo:
        place = todo.pop(0)
        source = open_file(tests, place[0])
        if place in seen or place[1] not in source.definitions:
            continue
        if place[0].endswith("runif.py"):
            continue  # it only decides about skipping; `look_at_call` reads its arguments
        seen[place] = source.part(place[1])
        todo += sorted(seen[place].uses)
    return list(seen.values())


def topic_of(file: str) -> str:
    """The folder under `tests_pytorch`."""
    return str(Path(file).relative_to("tests_pytorch").parent)


def judge(tests: Path, file: str, name: str) -> Verdict:
    """The verdict on one test function (``test_x`` or, in a class, the class's name)."""
    parts = all_parts(tests, file, name)

    def first(lists: list[list[str]]) -> str:
        return next((reasons[0] for reasons in lists if reasons), "")

    reason = first([part.reasons for part in parts])
    elsewhere = first([part.elsewhere for part in parts[:1]])
    machines = first([part.machines for part in parts])
    near = first([part.near for part in parts])
    if not any(part.trainer for part in parts):
        kind, reason = "no_trainer", "constructs no Trainer"
    elif reason:
        kind = "internal"
    elif elsewhere:
        kind, reason = "elsewhere", elsewhere
    elif machines:
        kind, reason = "machines", machines
    elif near:
        kind, reason = "near", near
    else:
        kind = "public"
    return Verdict(file, name, topic_of(file), kind, reason, any(part.texts for part in parts))


def judge_file(tests: Path, file: str) -> dict[str, Verdict]:
    """Verdicts on all tests of a file; a test in a class is judged with its class."""
    found = {}
    for name, node in open_file(tests, file).definitions.items():
        function = isinstance(node, ast.FunctionDef) and name.startswith("test")
        methods = [getattr(child, "name", "") for child in node.body] if isinstance(node, ast.ClassDef) else []
        if function or (name.startswith("Test") and any(method.startswith("test") for method in methods)):
            found[name] = judge(tests, file, name)
    return found


def files_in_scope(tests: Path) -> list[str]:
    """All test files that are looked at, relative to ``tests``."""
    root = tests / "tests_pytorch"
    names = sorted(str(path.relative_to(root)) for path in root.rglob("test_*.py"))
    return [f"tests_pytorch/{name}" for name in names if not name.startswith(rules.OUT_OF_SCOPE)]


def case_kind(verdict: Verdict, case: str) -> tuple[str, str]:
    """(kind, reason) of one parametrized case: its parameters may ask for more than the function does.

    Args:
        verdict: The verdict on the function.
        case: What stands in the brackets of the test's id, such as ``ddp_spawn-2``; may be empty.
    """
    if verdict.kind in ("public", "near"):
        for word in case.split("-"):
            if word.startswith("ddp"):
                return "machines", f"case {word}"
            if rules.ELSEWHERE.match(word):
                return "elsewhere", f"case {word}"
    return verdict.kind, verdict.reason
