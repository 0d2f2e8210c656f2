"""A parsed Python file with the lookups that rules need: calls, names, surroundings of a node, values of constants."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from typing import cast

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

from hasten.doctor.source.names import (
    OPTIMIZERS,
    imports_of,
    sounds_like_action,
    sounds_like_model,
    sounds_like_optimizer,
)
from hasten.doctor.source.syntax import argument, children, dotted, is_name, last_name, receiver, targets_of

_NO_GRAD = ("torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad", "torch.autograd.inference_mode")
Scope = cst.FunctionDef | cst.Lambda | cst.Module


class Script:
    """A parsed file. "Nodes of code" are the tree's nodes without whitespace, commas and comments.

    Attributes:
        module: The tree.
        nodes: Every node of code, depth first: statements in the order of the source, parents before children.
        parents: Parent of every node of code except the module.
        imports: Name in this file -> full name: {"nn": "torch.nn", "DataLoader": "torch.utils.data.DataLoader"}.
    """

    def __init__(self, module: cst.Module) -> None:
        self.module = module
        self.nodes: list[cst.CSTNode] = []
        self.parents: dict[cst.CSTNode, cst.CSTNode] = {}
        pending: list[cst.CSTNode] = [module]
        while pending:
            node = pending.pop()
            self.nodes.append(node)
            child_nodes = list(children(node))
            self.parents.update(dict.fromkeys(child_nodes, node))
            pending.extend(reversed(child_nodes))
        self.imports = dict(imports_of(self.nodes))
        self._models: dict[str, bool] = {}

    @cached_property
    def positions(self) -> dict[cst.CSTNode, CodeRange]:
        """The range of every node in the source: lines from 1, columns from 0."""
        # Without a copy: a copied tree would give ranges for other nodes than those in `nodes`.
        ranges = MetadataWrapper(self.module, unsafe_skip_copy=True).resolve(PositionProvider)
        return cast("dict[cst.CSTNode, CodeRange]", dict(ranges))

    def line(self, node: cst.CSTNode) -> int:
        """Return the line on which a node begins."""
        return self.positions[node].start.line

    # -- contents -----------------------------------------------------------------------------------------

    @cached_property
    def calls(self) -> list[cst.Call]:
        """Every call, in the order of `nodes`."""
        return [node for node in self.nodes if isinstance(node, cst.Call)]

    @cached_property
    def called(self) -> frozenset[str]:
        """Names that are called anywhere, with dots: "self.model"."""
        return frozenset(dotted(call.func) for call in self.calls)

    @cached_property
    def loops(self) -> list[cst.For | cst.While]:
        """Every loop, in the order of `nodes`: an outer loop before the loops in it."""
        return [node for node in self.nodes if isinstance(node, cst.For | cst.While)]

    @cached_property
    def functions(self) -> dict[str, list[cst.FunctionDef]]:
        """Functions and methods by name."""
        by_name: dict[str, list[cst.FunctionDef]] = {}
        for node in self.nodes:
            if isinstance(node, cst.FunctionDef):
                by_name.setdefault(node.name.value, []).append(node)
        return by_name

    @cached_property
    def classes(self) -> dict[str, cst.ClassDef]:
        """Classes by name."""
        return {node.name.value: node for node in self.nodes if isinstance(node, cst.ClassDef)}

    @cached_property
    def assignments(self) -> list[tuple[str, cst.BaseExpression, cst.CSTNode]]:
        """Every `name = value` as (dotted name, value, statement); in `a, b = f()`, both names have the value `f()`."""
        assigned: list[tuple[str, cst.BaseExpression, cst.CSTNode]] = []
        for node in self.nodes:
            if isinstance(node, cst.Assign):
                for target in node.targets:
                    parts = list(targets_of(target.target))
                    values = list(targets_of(node.value))
                    matched = values if len(values) == len(parts) else [node.value] * len(parts)
                    assigned += [(dotted(part), value, node) for part, value in zip(parts, matched, strict=True)]
            elif isinstance(node, cst.AnnAssign | cst.NamedExpr) and node.value is not None:
                assigned.append((dotted(node.target), node.value, node))
        return [entry for entry in assigned if entry[0]]

    def assigned(self, name: str) -> list[cst.BaseExpression]:
        """Return all values that a name is assigned in this file."""
        return self._by_name.get(name, [])

    @cached_property
    def _by_name(self) -> dict[str, list[cst.BaseExpression]]:
        """Assigned values by dotted name."""
        values: dict[str, list[cst.BaseExpression]] = {}
        for name, value, _ in self.assignments:
            values.setdefault(name, []).append(value)
        return values

    # -- names --------------------------------------------------------------------------------------------

    def qualified(self, node: cst.CSTNode) -> str:
        """Return an expression's full name according to the file's imports: "torch.nn.Linear" for `nn.Linear`."""
        name = dotted(node)
        first, dot, attributes = name.partition(".")
        return f"{self.imports.get(first, first)}{dot}{attributes}"

    def is_optimizer(self, node: cst.CSTNode) -> bool:
        """Return whether a node is a call that creates one of torch's optimizers."""
        if not isinstance(node, cst.Call):
            return False
        full = self.qualified(node.func)
        return last_name(node.func) in OPTIMIZERS and (full.startswith("torch.optim") or ".optim." in f".{full}")

    @cached_property
    def optimizers(self) -> list[cst.Call]:
        """The calls that create torch's optimizers."""
        return [call for call in self.calls if self.is_optimizer(call)]

    def names_optimizer(self, name: str) -> bool:
        """Return whether a name holds an optimizer: by its own name, or by a value that it is assigned."""
        return sounds_like_optimizer(name) or any(map(self.is_optimizer, self.assigned(name)))

    def names_model(self, name: str) -> bool:
        """Return whether a name holds a model or a loss module, so that calling it makes a graph."""
        if name not in self._models:
            self._models[name] = False  # provisional: for `x = x.to(device)`, makes_module asks about `x` again
            is_model = sounds_like_model(name) or any(map(self.makes_module, self.assigned(name)))
            self._models[name] = is_model and not sounds_like_action(name)
        return self._models[name]

    def makes_module(self, value: cst.BaseExpression) -> bool:
        """Return whether an expression creates a module: `nn.X(...)`, a module class of the file, `….to(device)`."""
        if not isinstance(value, cst.Call):
            return False
        inner = receiver(value)
        if inner is not None and last_name(value.func) in ("to", "cuda", "train", "eval", "float", "half"):
            return self.makes_module(inner) or self.names_model(dotted(inner) or "-")
        name = last_name(value.func)
        full = self.qualified(value.func)
        if full.startswith("torch.nn.") and not full.startswith(("torch.nn.functional", "torch.nn.init")):
            return name[:1].isupper() and name not in ("Parameter", "Buffer")
        return name in self.classes and self.is_module_class(self.classes[name])

    def is_module_class(self, node: cst.ClassDef) -> bool:
        """Return whether a class is a module, by the names of its base classes, also through classes of this file."""
        for base in node.bases:
            name = last_name(base.value)
            if name in ("Module", "LightningModule") or name.endswith(("Module", "Model")):
                return True
            if name in self.classes and self.classes[name] is not node and self.is_module_class(self.classes[name]):
                return True
        return False

    # -- surroundings of a node ---------------------------------------------------------------------------

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield a node's ancestors, from its parent up to the module."""
        while (ancestor := self.parents.get(node)) is not None:
            yield ancestor
            node = ancestor

    def scope(self, node: cst.CSTNode) -> Scope:
        """Return the innermost function or lambda whose body contains a node, or the module.

        Decorators, defaults and parameters of a function belong to the scope around it.
        """
        child = node
        for ancestor in self.ancestors(node):
            if isinstance(ancestor, cst.FunctionDef | cst.Lambda) and child is ancestor.body:
                return ancestor
            child = ancestor
        return self.module

    def class_of(self, node: cst.CSTNode) -> cst.ClassDef | None:
        """Return the innermost class that contains a node; None outside of classes."""
        return next((above for above in self.ancestors(node) if isinstance(above, cst.ClassDef)), None)

    def statement(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the statement that contains a node, or the node if it is a statement."""
        statement_types = (cst.SimpleStatementLine, cst.BaseCompoundStatement, cst.SimpleStatementSuite)
        while not isinstance(node, statement_types):
            parent = self.parents.get(node)
            if parent is None:
                return node
            node = parent
        return node

    def under_no_grad(self, node: cst.CSTNode) -> bool:
        """Return whether a node runs without autograd.

        It does in `with torch.no_grad()`, in a function so decorated, and after a statement
        `torch.set_grad_enabled(False)` of the same function or of the module.
        """
        if not self.mentions("no_grad", "inference_mode", "set_grad_enabled"):
            return False
        for ancestor in self.ancestors(node):
            if isinstance(ancestor, cst.With) and any(self._no_grad(item.item) for item in ancestor.items):
                return True
            if isinstance(ancestor, cst.FunctionDef) and any(self._no_grad(d.decorator) for d in ancestor.decorators):
                return True
        # By line, not by control flow: a later set_grad_enabled(True) does not count.
        return any(
            self.line(call) <= self.line(node) and self.scope(call) in (self.scope(node), self.module)
            for call in self._switches_off
        )

    @cached_property
    def _switches_off(self) -> list[cst.Call]:
        """Statements that are `torch.set_grad_enabled(False)`."""
        calls = (call for call in self.calls if last_name(call.func) == "set_grad_enabled")
        return [call for call in calls if self._no_grad(call) and isinstance(self.parents[call], cst.Expr)]

    def _no_grad(self, node: cst.BaseExpression) -> bool:
        """Return whether an expression switches autograd off: `no_grad`, `inference_mode` or `set_grad_enabled`.

        `set_grad_enabled(training)` counts, as its argument may be False; only `set_grad_enabled(True)` does not.
        """
        call = node if isinstance(node, cst.Call) else None
        full = self.qualified(call.func if call else node)
        if last_name(call.func if call else node) == "set_grad_enabled":
            return call is not None and bool(call.args) and not is_name(call.args[0].value, "True")
        return full in _NO_GRAD or full.split(".")[-1] in ("no_grad", "inference_mode")

    # -- values -------------------------------------------------------------------------------------------

    def value_of(self, node: cst.BaseExpression | None) -> object:
        """Return the value of a literal, of a name that is assigned a single literal, or of an argparse default.

        Returns:
            `...` if the value cannot be read from the file.
        """
        if node is None:
            return ...
        name = dotted(node)
        if name in ("True", "False", "None"):
            return {"True": True, "False": False, "None": None}[name]
        if name:
            values = self.assigned(name)
            if len(values) == 1 and not dotted(values[0]) and not isinstance(values[0], cst.Call):
                return self.value_of(values[0])
            # `args.workers`: any attribute that is named like an option of argparse and never assigned.
            return self._defaults.get(name.rpartition(".")[2], ...) if "." in name and not values else ...
        try:
            return ast.literal_eval(self.module.code_for_node(node).strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return ...

    @cached_property
    def _defaults(self) -> dict[str, object]:
        """Defaults of the file's argparse options, by the attribute that holds the option."""
        defaults: dict[str, object] = {}
        for call in self.calls:
            if last_name(call.func) != "add_argument":
                continue
            flags = [self.value_of(arg.value) for arg in call.args if arg.keyword is None and not arg.star]
            longs = [flag for flag in flags if isinstance(flag, str) and flag.startswith("--")]
            destination = self.value_of(argument(call, "dest"))
            name = (
                destination if isinstance(destination, str) else longs[0].lstrip("-").replace("-", "_") if longs else ""
            )
            default = argument(call, "default")
            if name and default is not None and not dotted(default):
                defaults[name] = self.value_of(default)
        return defaults

    def mentions(self, *words: str) -> bool:
        """Return whether one of these names occurs in the code, comments and strings excluded."""
        return not self._names.isdisjoint(words)

    @cached_property
    def _names(self) -> frozenset[str]:
        """All names in the code, without dots, keywords of calls included."""
        keywords = {a.keyword.value for call in self.calls for a in call.args if a.keyword is not None}
        return frozenset(keywords | {node.value for node in self.nodes if isinstance(node, cst.Name)})

    @cached_property
    def strings(self) -> str:
        """All string literals of the file except f-strings, with their quotes, one per line."""
        return "\n".join(node.value for node in self.nodes if isinstance(node, cst.SimpleString))

    @cached_property
    def uses_cuda(self) -> bool:
        """Whether the script's own code may use a CUDA device: it has `cuda` as a name or at the start of a string."""
        begins = (node.parts[0] for node in self.nodes if isinstance(node, cst.FormattedString) and node.parts)
        return (
            self.mentions("cuda")
            or '"cuda' in self.strings
            or "'cuda" in self.strings
            or any(isinstance(part, cst.FormattedStringText) and part.value.startswith("cuda") for part in begins)
        )

    @cached_property
    def uses_accelerator(self) -> bool:
        """Whether tensors may be on a device, where reading one waits for the device."""
        return self.uses_cuda or self.mentions("device", "accelerator", "accelerate", "fabric", "Accelerator", "mps")

    def loop_targets(self, loop: cst.CSTNode) -> list[str]:
        """Return the names that a `for` loop binds; none for other nodes."""
        return [dotted(t) for t in targets_of(loop.target) if dotted(t)] if isinstance(loop, cst.For) else []
