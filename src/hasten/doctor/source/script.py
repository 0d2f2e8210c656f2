"""One file of Python as the rules see it: its tree, its names, what surrounds a node, what a constant is worth."""

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
from hasten.doctor.source.syntax import argument, children, dotted, is_word, last_name, receiver, targets_of

_NO_GRAD = ("torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad", "torch.autograd.inference_mode")
Scope = cst.FunctionDef | cst.Lambda | cst.Module


class Script:
    """A parsed file.

    Attributes:
        module: The tree.
        nodes: Every node of code, in order.
        parents: Of every node of code but the module.
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
            below = list(children(node))
            self.parents.update(dict.fromkeys(below, node))
            pending.extend(reversed(below))
        self.imports = dict(imports_of(self.nodes))
        self._models: dict[str, bool] = {}

    @cached_property
    def positions(self) -> dict[cst.CSTNode, CodeRange]:
        """Lines from 1, columns from 0."""
        found = MetadataWrapper(self.module, unsafe_skip_copy=True).resolve(PositionProvider)
        return cast("dict[cst.CSTNode, CodeRange]", dict(found))

    def line(self, node: cst.CSTNode) -> int:
        """The line on which a node begins."""
        return self.positions[node].start.line

    # What is there.

    @cached_property
    def calls(self) -> list[cst.Call]:
        """Every call, in order."""
        return [node for node in self.nodes if isinstance(node, cst.Call)]

    @cached_property
    def called(self) -> frozenset[str]:
        """Names that are called."""
        return frozenset(dotted(call.func) for call in self.calls)

    @cached_property
    def loops(self) -> list[cst.For | cst.While]:
        """Every loop, in order."""
        return [node for node in self.nodes if isinstance(node, cst.For | cst.While)]

    @cached_property
    def functions(self) -> dict[str, list[cst.FunctionDef]]:
        """Functions and methods by name."""
        found: dict[str, list[cst.FunctionDef]] = {}
        for node in self.nodes:
            if isinstance(node, cst.FunctionDef):
                found.setdefault(node.name.value, []).append(node)
        return found

    @cached_property
    def classes(self) -> dict[str, cst.ClassDef]:
        """Classes by name."""
        return {node.name.value: node for node in self.nodes if isinstance(node, cst.ClassDef)}

    @cached_property
    def assignments(self) -> list[tuple[str, cst.BaseExpression, cst.CSTNode]]:
        """Every `name = value` as (name with dots, value, statement); of `a, b = f()` both have the whole value."""
        found: list[tuple[str, cst.BaseExpression, cst.CSTNode]] = []
        for node in self.nodes:
            if isinstance(node, cst.Assign):
                for target in node.targets:
                    parts = list(targets_of(target.target))
                    values = list(targets_of(node.value))
                    matched = values if len(values) == len(parts) else [node.value] * len(parts)
                    found += [(dotted(part), value, node) for part, value in zip(parts, matched, strict=True)]
            elif isinstance(node, cst.AnnAssign | cst.NamedExpr) and node.value is not None:
                found.append((dotted(node.target), node.value, node))
        return [entry for entry in found if entry[0]]

    def assigned(self, name: str) -> list[cst.BaseExpression]:
        """Return what a name is assigned in this file."""
        return self._by_name.get(name, [])

    @cached_property
    def _by_name(self) -> dict[str, list[cst.BaseExpression]]:
        found: dict[str, list[cst.BaseExpression]] = {}
        for name, value, _ in self.assignments:
            found.setdefault(name, []).append(value)
        return found

    # Names.

    def qualified(self, node: cst.CSTNode) -> str:
        """The full name of an expression, by the imports of this file: `nn.Linear` -> "torch.nn.Linear"."""
        name = dotted(node)
        first, dot, rest = name.partition(".")
        return f"{self.imports.get(first, first)}{dot}{rest}"

    def is_optimizer(self, node: cst.CSTNode) -> bool:
        """Whether a call makes one of torch's optimizers."""
        if not isinstance(node, cst.Call):
            return False
        full = self.qualified(node.func)
        return last_name(node.func) in OPTIMIZERS and (full.startswith("torch.optim") or ".optim." in f".{full}")

    @cached_property
    def optimizers(self) -> list[cst.Call]:
        """Where torch's optimizers are made."""
        return [call for call in self.calls if self.is_optimizer(call)]

    def names_optimizer(self, name: str) -> bool:
        """Whether a name stands for an optimizer."""
        return sounds_like_optimizer(name) or any(map(self.is_optimizer, self.assigned(name)))

    def names_model(self, name: str) -> bool:
        """Whether a name stands for a model or a loss module, so that calling it makes a graph."""
        if name not in self._models:
            self._models[name] = False  # `x = x.to(device)` asks for itself
            made = sounds_like_model(name) or any(map(self.makes_module, self.assigned(name)))
            self._models[name] = made and not sounds_like_action(name)
        return self._models[name]

    def makes_module(self, value: cst.BaseExpression) -> bool:
        """Whether an expression makes a module: `nn.X(...)`, a class of this file, either moved to a device."""
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
        """Whether a class is a module, by its bases."""
        for base in node.bases:
            name = last_name(base.value)
            if name in ("Module", "LightningModule") or name.endswith(("Module", "Model")):
                return True
            if name in self.classes and self.classes[name] is not node and self.is_module_class(self.classes[name]):
                return True
        return False

    # Surroundings.

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """From the parent up to the module."""
        while (above := self.parents.get(node)) is not None:
            yield above
            node = above

    def scope(self, node: cst.CSTNode) -> Scope:
        """The function (or the module) whose code a node is."""
        below = node
        for above in self.ancestors(node):
            if isinstance(above, cst.FunctionDef | cst.Lambda) and below is above.body:
                return above
            below = above
        return self.module

    def class_of(self, node: cst.CSTNode) -> cst.ClassDef | None:
        """The class a node stands in."""
        return next((above for above in self.ancestors(node) if isinstance(above, cst.ClassDef)), None)

    def statement(self, node: cst.CSTNode) -> cst.CSTNode:
        """The statement a node is part of; the node itself where it is one."""
        kinds = (cst.SimpleStatementLine, cst.BaseCompoundStatement, cst.SimpleStatementSuite)
        while not isinstance(node, kinds):
            above = self.parents.get(node)
            if above is None:
                return node
            node = above
        return node

    def under_no_grad(self, node: cst.CSTNode) -> bool:
        """Whether a node runs where no graph is made: in a `with`, in a decorated function, after switching it off."""
        if not self.mentions("no_grad", "inference_mode", "set_grad_enabled"):
            return False
        for above in self.ancestors(node):
            if isinstance(above, cst.With) and any(self._no_grad(item.item) for item in above.items):
                return True
            if isinstance(above, cst.FunctionDef) and any(self._no_grad(d.decorator) for d in above.decorators):
                return True
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
        call = node if isinstance(node, cst.Call) else None
        full = self.qualified(call.func if call else node)
        if last_name(call.func if call else node) == "set_grad_enabled":
            return call is not None and bool(call.args) and not is_word(call.args[0].value, "True")
        return full in _NO_GRAD or full.split(".")[-1] in ("no_grad", "inference_mode")

    # Values.

    def value_of(self, node: cst.BaseExpression | None) -> object:
        """The value of a literal, of a name that is assigned one literal, or of an argparse option's default.

        `...` where it cannot be read.
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
            return self._defaults.get(name.rpartition(".")[2], ...) if "." in name and not values else ...
        try:
            return ast.literal_eval(self.module.code_for_node(node).strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return ...

    @cached_property
    def _defaults(self) -> dict[str, object]:
        """Defaults of argparse's options."""
        found: dict[str, object] = {}
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
                found[name] = self.value_of(default)
        return found

    def mentions(self, *words: str) -> bool:
        """Whether code (not comments or strings) has one of these names."""
        return not self._names.isdisjoint(words)

    @cached_property
    def _names(self) -> frozenset[str]:
        keywords = {a.keyword.value for call in self.calls for a in call.args if a.keyword is not None}
        return frozenset(keywords | {node.value for node in self.nodes if isinstance(node, cst.Name)})

    @cached_property
    def strings(self) -> str:
        """All plain strings of the file, joined."""
        return "\n".join(node.value for node in self.nodes if isinstance(node, cst.SimpleString))

    @cached_property
    def uses_cuda(self) -> bool:
        """Whether the script may put its model on a GPU by itself."""
        return self.mentions("cuda") or '"cuda' in self.strings or "'cuda" in self.strings

    @cached_property
    def uses_accelerator(self) -> bool:
        """Whether tensors may live on a device: then reading them waits."""
        return self.uses_cuda or self.mentions("device", "accelerator", "accelerate", "fabric", "Accelerator", "mps")

    def loop_targets(self, loop: cst.CSTNode) -> list[str]:
        """Names that a `for` binds."""
        return [dotted(t) for t in targets_of(loop.target) if dotted(t)] if isinstance(loop, cst.For) else []
