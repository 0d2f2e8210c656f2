"""Which code of a file runs in every training step, and which loops validate."""

from __future__ import annotations

import re
from functools import cached_property

import libcst as cst

from hasten.doctor.source.script import Script
from hasten.doctor.source.syntax import argument, block, dotted, last_name, names_in, receiver, walk, walk_scope

Loop = cst.For | cst.While
_VALIDATES = re.compile(
    r"(^|_)(val|valid|validate|validation|eval|evaluate|evaluation|test|tester|infer|inference|predict)(_|\d|$)"
)
_RARE_NAME = re.compile(
    r"dry_?run|debug|verbose|should_(log|print|eval|save)|(^|[._])(is_last|last_batch|do_log|do_eval|log_now|save_now)|"
    r"profil|^first|best|sanity|smoke"
)
_COUNTER = re.compile(
    r"(^|[._])(i|j|k|n|it|iters?|iter_num|step|steps|idx|index|epoch|batch|n_iter|global_step)(_\w+)?$|(_idx|_i|_step|_num|_iter|_id)$"
)
_TIME = re.compile(r"(^|[._])(time|elapsed|t0|last_log|now|tic|seconds?)(_|$)")
_STEP_NAME = re.compile(r"step|batch|closure|optimi[sz]e_parameters|^update")


class Training:
    """The training loops of a script.

    A step loop is one whose body, without the loops in it, goes backward or makes an optimizer step: itself, or
    through a function of the same file. An epoch loop has a step loop inside it, or calls a function that has one.

    Attributes:
        step_loops, epoch_loops: See above.
        step_functions: Functions that are part of a step: `training_step`, closures, helpers that go backward.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.step_loops: set[cst.CSTNode] = set()
        self.epoch_loops: set[cst.CSTNode] = set()
        self.step_functions: set[cst.CSTNode] = {
            function for function in script.functions.get("training_step", ()) if script.class_of(function) is not None
        }
        # Functions that have a step loop of their own.
        self.training_functions: set[cst.CSTNode] = set()
        steps = [call for call in script.calls if self.goes_backward(call) or self.steps(call)]
        for call in steps:
            self._place(call, 0)

    def _place(self, call: cst.CSTNode, depth: int) -> None:
        """Mark what a call that is part of a step stands in; where that is a function, what calls the function."""
        if depth > 4:
            return
        within = self.loops_around(call)
        if within:
            self.step_loops.add(within[0])
            self.epoch_loops.update(loop for loop in within[1:] if loop not in self.step_loops)
            self.epoch_loops -= self.step_loops
        scope = self.script.scope(call)
        if not isinstance(scope, cst.FunctionDef):
            return
        known = self.training_functions if within else self.step_functions
        if scope in known or scope.name.value in ("backward", "step", "main", "__call__"):
            return
        callers = self.callers(scope)
        if within:
            known.add(scope)
            for caller in callers:
                self.epoch_loops.update(loop for loop in self.loops_around(caller) if loop not in self.step_loops)
            return
        for caller in callers:
            self._place(caller, depth + 1)
        repeated = (
            self.step_loops.intersection(self.loops_around(c)) or self.script.scope(c) in known for c in callers
        )
        if _STEP_NAME.search(scope.name.value) or any(repeated):
            known.add(scope)

    def callers(self, function: cst.FunctionDef) -> list[cst.Call]:
        """The calls of a function of this file: by its name, as `self.name(...)`, or handed over (a closure)."""
        name = function.name.value
        return [
            call
            for call in self.script.calls
            if dotted(call.func) in (name, f"self.{name}")
            or (len(name) > 8 and "train" in name and last_name(call.func) == name)
            or (last_name(call.func) == "step" and any(dotted(arg.value) == name for arg in call.args))
        ]

    def goes_backward(self, call: cst.Call) -> bool:
        """Whether a call is `loss.backward()`, `accelerator.backward(loss)` or the like."""
        name = last_name(call.func)
        if name == "manual_backward":
            return True
        inner = receiver(call)
        return name == "backward" and inner is not None and dotted(inner) not in ("ctx", "super", "cls")

    def steps(self, call: cst.Call) -> bool:
        """Whether a call is `optimizer.step()`, or `scaler.step(optimizer)`."""
        inner = receiver(call)
        if last_name(call.func) != "step" or inner is None:
            return False
        first = dotted(call.args[0].value) if call.args else ""
        return self.script.names_optimizer(dotted(inner)) or bool(first and self.script.names_optimizer(first))

    def loops_around(self, node: cst.CSTNode) -> list[Loop]:
        """Loops of the same function whose body a node is in, inmost first."""
        found: list[Loop] = []
        below = node
        for above in self.script.ancestors(node):
            if isinstance(above, cst.FunctionDef | cst.Lambda | cst.ClassDef) and below is above.body:
                break
            if isinstance(above, Loop) and below is above.body:
                found.append(above)
            below = above
        return found

    @cached_property
    def losses(self) -> dict[cst.CSTNode, set[str]]:
        """By function: names that go backward there."""
        found: dict[cst.CSTNode, set[str]] = {}
        for call in self.script.calls:
            if self.goes_backward(call):
                inner = receiver(call)
                value: cst.CSTNode | None = inner
                if call.args and (
                    last_name(call.func) == "manual_backward"
                    or "accel" in dotted(inner or call)
                    or "fabric" in dotted(inner or call)
                ):
                    value = call.args[0].value
                while isinstance(value, cst.Call) and value.args:  # scaler.scale(loss)
                    value = value.args[0].value
                while isinstance(value, cst.BinaryOperation):
                    value = value.left
                if value is not None and dotted(value):
                    found.setdefault(self.script.scope(call), set()).add(dotted(value))
        return found

    @property
    def any(self) -> bool:
        """Whether this file trains."""
        return bool(self.step_loops or self.step_functions)

    def in_step(self, node: cst.CSTNode) -> bool:
        """Whether a node runs in every training step, and not only in some."""
        return self.step_of(node) is not None

    def step_of(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """The step loop or step function in which a node runs at every step; None where it does not."""
        below = node
        for above in self.script.ancestors(node):
            if isinstance(above, cst.FunctionDef | cst.Lambda) and below is above.body:
                return above if above in self.step_functions else None
            if isinstance(above, cst.ClassDef | cst.ExceptHandler):
                return None
            if isinstance(above, Loop) and below is above.body:
                if above in self.step_loops:
                    return above
                if self.validates_by_name(above):
                    return None
            if self._rarely(above, below):
                return None
            below = above
        return None

    def validates_by_name(self, loop: Loop) -> bool:
        """Whether a loop goes over data of a validation, by the names in its head."""
        return isinstance(loop, cst.For) and any(_VALIDATES.search(name) for name in names_in(loop.iter))

    def _rarely(self, above: cst.CSTNode, below: cst.CSTNode) -> bool:
        """Whether `above` lets `below` run only now and then."""
        if isinstance(above, cst.If | cst.IfExp):
            if below is above.body:
                return self.rare_test(above.test) or self._leaves(above.body)
            return False
        if isinstance(above, cst.IndentedBlock | cst.Module):
            for statement in above.body:
                if statement is below:
                    return False
                if isinstance(statement, cst.If) and self.rare_test(statement.test) and self._leaves(statement.body):
                    return True
        return False

    def rare_test(self, test: cst.BaseExpression) -> bool:
        """Whether a condition holds only now and then: `step % 100 == 0`, `i == last`, time passed, debugging."""
        for node in walk(test):
            if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Modulo):
                return True
            if isinstance(node, cst.Comparison):
                equal = isinstance(node.comparisons[0].operator, cst.Equal | cst.In)
                if equal and self._is_counter(node.left):
                    return True
                if any(_TIME.search(name) for name in names_in(node)):
                    return True
            name = dotted(node)
            if name and (_RARE_NAME.search(name) or name in self._rare_names):
                return True
        return False

    def _is_counter(self, node: cst.BaseExpression) -> bool:
        return any(_COUNTER.search(name) for name in names_in(node))

    @cached_property
    def _rare_names(self) -> set[str]:
        """Names that hold the answer of a rare test: `last_batch = batch_idx == last_idx`."""
        found: set[str] = set()
        for name, value, _ in self.script.assignments:
            for node in walk(value):
                if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Modulo):
                    if not isinstance(node.left, cst.SimpleString | cst.ConcatenatedString):
                        found.add(name)
                elif isinstance(node, cst.Comparison) and isinstance(node.comparisons[0].operator, cst.Equal):
                    if self._is_counter(node.left):
                        found.add(name)
        return found

    @staticmethod
    def _leaves(body: cst.CSTNode) -> bool:
        """Whether a block ends by leaving: it runs at most once, or skips the rest."""
        statements = block(body)
        if not statements:
            return False
        last = statements[-1]
        if isinstance(last, cst.SimpleStatementLine):
            last = last.body[-1]
        if isinstance(last, cst.Expr) and isinstance(last.value, cst.Call):
            return dotted(last.value.func) in ("exit", "quit", "sys.exit", "os._exit")
        return isinstance(last, cst.Break | cst.Return | cst.Raise | cst.Continue)

    # Validation.

    def calls_model(self, node: cst.CSTNode) -> list[cst.Call]:
        """The calls of a model below a node, in the same function."""
        return [
            call
            for call in walk_scope(node)
            if isinstance(call, cst.Call)
            and self.script.names_model(dotted(call.func) or "-")
            and not dotted(call.func).startswith(("F.", "nn.", "torch."))
            and dotted(call.func) not in self.script.functions
            and dotted(call.func) not in self.script.classes
        ]

    @cached_property
    def validation_loops(self) -> list[Loop]:
        """Outermost loops that call a model, never go backward, and are in a function or after a call that says so."""
        found: list[Loop] = []
        for loop in self.script.loops:
            if any(above in found for above in self.script.ancestors(loop)):
                continue
            if self._trains(loop) or not self.calls_model(loop.body):
                continue
            scope = self.script.scope(loop)
            named = isinstance(scope, cst.FunctionDef) and bool(_VALIDATES.search(scope.name.value))
            if named or self._after_eval(loop) or (self.any and self.validates_by_name(loop)):
                found.append(loop)
        return found

    def _trains(self, node: cst.CSTNode) -> bool:
        for call in walk(node):
            if not isinstance(call, cst.Call):
                continue
            if self.goes_backward(call) or self.steps(call) or last_name(call.func) == "zero_grad":
                return True
            if self.script.qualified(call.func) == "torch.autograd.grad" or argument(call, "create_graph") is not None:
                return True
            for function in self.script.functions.get(last_name(call.func), ()):
                if function in self.step_functions or function in self.training_functions:
                    return True
        return False

    def _after_eval(self, loop: Loop) -> bool:
        """Whether the last switch of mode before a loop, in its function, is `model.eval()`."""
        here, scope = self.script.line(loop), self.script.scope(loop)
        last = ""
        for call in self.script.calls:
            if (
                last_name(call.func) in ("eval", "train")
                and receiver(call) is not None
                and self.script.scope(call) is scope
            ):
                if self.script.line(call) < here and self.script.names_model(dotted(receiver(call) or call) or "-"):
                    off = bool(call.args) and dotted(call.args[0].value) == "False"
                    last = "eval" if off else last_name(call.func)
        return last == "eval"
