"""Find the code of a file that runs in every training step, and the loops that validate.

Nothing is run, so that this is inferred: from the calls that go backward or step an optimizer, the loops around them,
and the callers of the functions that contain them. Code in such a loop may still run rarely, as under
`if step % 100 == 0`; such conditions, and validation, are recognized by the names people usually give.
"""

from __future__ import annotations

import re
from functools import cached_property

import libcst as cst

from hasten.doctor.source.script import Script
from hasten.doctor.source.syntax import argument, dotted, last_name, names_in, receiver, statements_of, walk, walk_scope

Loop = cst.For | cst.While
_VALIDATES = re.compile(
    r"(^|_)(val|valid|validate|validation|eval|evaluate|evaluation|test|tester|infer|inference|predict)(_|\d|$)"
)
# Names in a condition that holds rarely: `if args.debug`, `if is_best`.
_RARE_NAME = re.compile(
    r"dry_?run|debug|verbose|should_(log|print|eval|save)|(^|[._])(is_last|last_batch|do_log|do_eval|log_now|save_now)|"
    r"profil|^first|best|sanity|smoke"
)
# Names of counters: `if step == last_step` holds once.
_COUNTER = re.compile(
    r"(^|[._])(i|j|k|n|it|iters?|iter_num|step|steps|idx|index|epoch|batch|n_iter|global_step)(_\w+)?$|(_idx|_i|_step|_num|_iter|_id)$"
)
# Names in a comparison of times: `if time.time() - t0 > 60`.
_TIME = re.compile(r"(^|[._])(time|elapsed|t0|last_log|now|tic|seconds?)(_|$)")
# Names of functions that are one training step, even if their caller is in another file.
_STEP_NAME = re.compile(r"step|batch|closure|optimi[sz]e_parameters|^update")


class Training:
    """The training loops of a script.

    A step loop calls `backward` or an optimizer's `step` in its body, outside of the loops in it, or calls a function
    of the same file that does. An epoch loop contains a step loop, or calls a function that contains one.

    Attributes:
        step_loops: See above.
        epoch_loops: See above.
        step_functions: Functions that are part of a step: `training_step`, closures, helpers that go backward.
        training_functions: Functions that contain a step loop.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.step_loops: set[cst.CSTNode] = set()
        self.epoch_loops: set[cst.CSTNode] = set()
        self.step_functions: set[cst.CSTNode] = {
            function for function in script.functions.get("training_step", ()) if script.class_of(function) is not None
        }
        self.training_functions: set[cst.CSTNode] = set()
        steps = [call for call in script.calls if self.goes_backward(call) or self.is_optimizer_step(call)]
        for call in steps:
            self._mark_step(call, 0)

    def _mark_step(self, call: cst.CSTNode, depth: int) -> None:
        """Mark the loops and the function around a call that is part of a step, and around the function's callers.

        Args:
            call: A call that goes backward or steps an optimizer, or that calls a function which does.
            depth: The number of calls between this call and the one that goes backward or steps.
        """
        if depth > 4:  # functions that call each other would never end
            return
        loops = self.loops_around(call)
        if loops:
            self.step_loops.add(loops[0])
            self.epoch_loops.update(loop for loop in loops[1:] if loop not in self.step_loops)
            # With micro-batches, the inner loop goes backward and the loop around it steps the optimizer. The latter
            # was marked as an epoch loop when `backward` was marked, and turns out to be a step loop now.
            self.epoch_loops -= self.step_loops
        scope = self.script.scope(call)
        if not isinstance(scope, cst.FunctionDef):
            return
        marked = self.training_functions if loops else self.step_functions
        # These names are too common to tell from a call which function it reaches, or no step calls them (`main`).
        if scope in marked or scope.name.value in ("backward", "step", "main", "__call__"):
            return
        callers = self.callers(scope)
        if loops:
            marked.add(scope)
            for caller in callers:
                self.epoch_loops.update(loop for loop in self.loops_around(caller) if loop not in self.step_loops)
            return
        for caller in callers:
            self._mark_step(caller, depth + 1)
        repeated = (
            self.step_loops.intersection(self.loops_around(caller)) or self.script.scope(caller) in marked
            for caller in callers
        )
        if _STEP_NAME.search(scope.name.value) or any(repeated):
            marked.add(scope)

    def callers(self, function: cst.FunctionDef) -> list[cst.Call]:
        """Return the calls of a function of this file.

        They are `name(...)`, `self.name(...)`, `optimizer.step(name)` for a closure, and `trainer.name(...)` of any
        object if the name is long and has "train" in it; shorter ones, as in `model.train()`, may be other methods.
        """
        name = function.name.value
        return [
            call
            for call in self.script.calls
            if dotted(call.func) in (name, f"self.{name}")
            or (len(name) > 8 and "train" in name and last_name(call.func) == name)
            or (last_name(call.func) == "step" and any(dotted(arg.value) == name for arg in call.args))
        ]

    def goes_backward(self, call: cst.Call) -> bool:
        """Return whether a call is `loss.backward()`, `accelerator.backward(loss)`, `self.manual_backward(loss)`."""
        name = last_name(call.func)
        if name == "manual_backward":
            return True
        inner = receiver(call)
        return name == "backward" and inner is not None and dotted(inner) not in ("ctx", "super", "cls")

    def is_optimizer_step(self, call: cst.Call) -> bool:
        """Return whether a call is `optimizer.step()` or `scaler.step(optimizer)`."""
        inner = receiver(call)
        if last_name(call.func) != "step" or inner is None:
            return False
        first = dotted(call.args[0].value) if call.args else ""
        return self.script.names_optimizer(dotted(inner)) or bool(first and self.script.names_optimizer(first))

    def loops_around(self, node: cst.CSTNode) -> list[Loop]:
        """Return the loops of the same function whose bodies contain a node, innermost first."""
        loops: list[Loop] = []
        child = node
        for ancestor in self.script.ancestors(node):
            if isinstance(ancestor, cst.FunctionDef | cst.Lambda | cst.ClassDef) and child is ancestor.body:
                break
            if isinstance(ancestor, Loop) and child is ancestor.body:
                loops.append(ancestor)
            child = ancestor
        return loops

    @cached_property
    def losses(self) -> dict[cst.CSTNode, set[str]]:
        """Names of the values that go backward, by the function (or module) in which they do."""
        names_by_scope: dict[cst.CSTNode, set[str]] = {}
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
                while isinstance(value, cst.BinaryOperation):  # (loss / steps).backward()
                    value = value.left
                if value is not None and dotted(value):
                    names_by_scope.setdefault(self.script.scope(call), set()).add(dotted(value))
        return names_by_scope

    @property
    def trains(self) -> bool:
        """Whether the file trains."""
        return bool(self.step_loops or self.step_functions)

    def in_step(self, node: cst.CSTNode) -> bool:
        """Return whether a node runs in every training step, not only in some."""
        return self.step_of(node) is not None

    def step_of(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Return the step loop or step function in which a node runs at every step; None if it does not."""
        child = node
        for ancestor in self.script.ancestors(node):
            if isinstance(ancestor, cst.FunctionDef | cst.Lambda) and child is ancestor.body:
                return ancestor if ancestor in self.step_functions else None
            if isinstance(ancestor, cst.ClassDef | cst.ExceptHandler):
                return None
            if isinstance(ancestor, Loop) and child is ancestor.body:
                if ancestor in self.step_loops:
                    return ancestor
                if self.validates_by_name(ancestor):
                    return None
            if self._rarely(ancestor, child):
                return None
            child = ancestor
        return None

    def validates_by_name(self, loop: Loop) -> bool:
        """Return whether a loop iterates over validation data, by the names in its header: `for x in val_loader`."""
        return isinstance(loop, cst.For) and any(_VALIDATES.search(name) for name in names_in(loop.iter))

    def _rarely(self, parent: cst.CSTNode, child: cst.CSTNode) -> bool:
        """Return whether `child` runs only in some steps because of its parent `parent`.

        It does in the body of an `if` with a rare test or that leaves the step, and after `if step % 10: continue`.
        The `else` of a rare test runs in most steps.
        """
        if isinstance(parent, cst.If | cst.IfExp):
            if child is parent.body:
                return self.rare_test(parent.test) or self._exits(parent.body)
            return False
        if isinstance(parent, cst.IndentedBlock | cst.Module):
            for statement in parent.body:
                if statement is child:
                    return False
                if isinstance(statement, cst.If) and self.rare_test(statement.test) and self._exits(statement.body):
                    return True
        return False

    def rare_test(self, test: cst.BaseExpression) -> bool:
        """Return whether a condition holds only in some steps: `step % 100 == 0`, `i == last`, time passed, `debug`."""
        for node in walk(test):
            if _is_remainder(node):
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
        """Return whether an expression contains a name that people give to counters."""
        return any(_COUNTER.search(name) for name in names_in(node))

    @cached_property
    def _rare_names(self) -> set[str]:
        """Names that hold the result of a rare test: `last_batch = batch_idx == last_idx`."""
        names: set[str] = set()
        for name, value, _ in self.script.assignments:
            for node in walk(value):
                if _is_remainder(node):
                    names.add(name)
                elif isinstance(node, cst.Comparison) and isinstance(node.comparisons[0].operator, cst.Equal):
                    if self._is_counter(node.left):
                        names.add(name)
        return names

    @staticmethod
    def _exits(body: cst.CSTNode) -> bool:
        """Return whether a block ends with break, return, raise, continue or exit."""
        statements = statements_of(body)
        if not statements:
            return False
        last = statements[-1]
        if isinstance(last, cst.SimpleStatementLine):
            last = last.body[-1]
        if isinstance(last, cst.Expr) and isinstance(last.value, cst.Call):
            return dotted(last.value.func) in ("exit", "quit", "sys.exit", "os._exit")
        return isinstance(last, cst.Break | cst.Return | cst.Raise | cst.Continue)

    # -- validation ---------------------------------------------------------------------------------------

    def calls_model(self, node: cst.CSTNode) -> list[cst.Call]:
        """Return the calls of a model below a node, without those in nested functions."""
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
        """Outermost loops that call a model, do not train, and are recognized as validation.

        A loop is recognized by the name of its function (`validate`), by `model.eval()` before it in its function, or,
        if the file trains, by the name of its data (`val_loader`).
        """
        loops: list[Loop] = []
        for loop in self.script.loops:
            if any(above in loops for above in self.script.ancestors(loop)):
                continue
            if self._contains_training(loop) or not self.calls_model(loop.body):
                continue
            scope = self.script.scope(loop)
            named = isinstance(scope, cst.FunctionDef) and bool(_VALIDATES.search(scope.name.value))
            if named or self._after_eval(loop) or (self.trains and self.validates_by_name(loop)):
                loops.append(loop)
        return loops

    def _contains_training(self, node: cst.CSTNode) -> bool:
        """Return whether a node contains a part of a training step, or calls a function of the file that does."""
        for call in walk(node):
            if not isinstance(call, cst.Call):
                continue
            if self.goes_backward(call) or self.is_optimizer_step(call) or last_name(call.func) == "zero_grad":
                return True
            if self.script.qualified(call.func) == "torch.autograd.grad" or argument(call, "create_graph") is not None:
                return True
            for function in self.script.functions.get(last_name(call.func), ()):
                if function in self.step_functions or function in self.training_functions:
                    return True
        return False

    def _after_eval(self, loop: Loop) -> bool:
        """Return whether the last call before a loop that sets a model's mode, in the same function, sets eval mode."""
        loop_line, scope = self.script.line(loop), self.script.scope(loop)
        last_mode = ""
        for call in self.script.calls:
            if (
                last_name(call.func) in ("eval", "train")
                and receiver(call) is not None
                and self.script.scope(call) is scope
            ):
                if self.script.line(call) < loop_line and self.script.names_model(
                    dotted(receiver(call) or call) or "-"
                ):
                    turned_off = bool(call.args) and dotted(call.args[0].value) == "False"
                    last_mode = "eval" if turned_off else last_name(call.func)
        return last_mode == "eval"


def _is_remainder(node: cst.CSTNode) -> bool:
    """Return whether an expression is `step % 10`, and not the formatting of a string: `"%d" % step`."""
    return (
        isinstance(node, cst.BinaryOperation)
        and isinstance(node.operator, cst.Modulo)
        and not isinstance(node.left, cst.SimpleString | cst.ConcatenatedString | cst.FormattedString)
    )
