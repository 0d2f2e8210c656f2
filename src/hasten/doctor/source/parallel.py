"""Rules on training with many devices."""

from __future__ import annotations

import re
from collections.abc import Iterable

import libcst as cst

from hasten.doctor.source.code import Code
from hasten.doctor.source.rule import Problem, Rule
from hasten.doctor.source.syntax import argument, is_word, last_name, walk

_WRAPS = re.compile(r"^(DDP|DistributedDataParallel)|Strategy$")
_DDP = ("DistributedDataParallel", "DDP")


def _ddp(code: Code) -> list[cst.Call]:
    return [call for call in code.script.calls if last_name(call.func) in _DDP and call.args]


class DataParallel(Rule):
    """DataParallel copies the model to every GPU in every step, in one process; DistributedDataParallel does not."""

    name = "data_parallel"
    sources = ("PyTorch: use DistributedDataParallel instead of DataParallel", "Lin, tip 17")

    @classmethod
    def problems(cls, code: Code) -> Iterable[Problem]:
        """Models that are wrapped in it."""
        for call in code.script.calls:
            full = code.script.qualified(call.func)
            if full in (
                "torch.nn.DataParallel",
                "torch.nn.parallel.DataParallel",
                "torch.nn.parallel.data_parallel.DataParallel",
            ):
                yield Problem(
                    call,
                    "DataParallel copies the model to every GPU in every step",
                    "start one process a GPU with torchrun, and use DistributedDataParallel",
                )


class UnusedParameters(Rule):
    """`find_unused_parameters=True` walks the whole graph in every step."""

    name = "unused_parameters"
    sources = ("PyTorch: DistributedDataParallel, find_unused_parameters",)

    @classmethod
    def problems(cls, code: Code) -> Iterable[Problem]:
        """Where it is asked for."""
        for call in code.script.calls:
            if not _WRAPS.search(last_name(call.func)):
                continue
            if is_word(argument(call, "find_unused_parameters"), "True"):
                yield Problem(
                    call,
                    "DDP looks for unused parameters in every step",
                    "remove find_unused_parameters=True if every parameter gets a gradient, or use static_graph=True",
                )


class AccumulationSyncs(Rule):
    """DDP adds the gradients of all processes up in every backward, also in those that only accumulate."""

    name = "accumulation_syncs"
    sources = ("PyTorch: DistributedDataParallel.no_sync",)

    @classmethod
    def problems(cls, code: Code) -> Iterable[Problem]:
        """Optimizer steps only every n steps, under DDP, without no_sync."""
        if not _ddp(code) or code.script.mentions(
            "no_sync", "require_backward_grad_sync", "accumulate", "set_requires_gradient_sync"
        ):
            return
        for call in code.script.calls:
            by_rest = code.training.steps(call) and _every_nth(code, call)
            if by_rest or (code.training.goes_backward(call) and _in_parts(code, call)):
                yield Problem(
                    call,
                    "every backward sums gradients over all processes, though the optimizer steps only every n",
                    "put the backward passes that only accumulate under `with model.no_sync():`",
                )
                return


def _every_nth(code: Code, step: cst.Call) -> bool:
    """Whether an optimizer's step is taken every n rounds of its loop, by a remainder."""
    loop = next(iter(code.training.loops_around(step)), None)
    for above in code.script.ancestors(step):
        if above is loop:
            return False
        if loop is not None and isinstance(above, cst.If):
            for node in walk(above.test):
                if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Modulo):
                    return True
    return False


def _in_parts(code: Code, backward: cst.Call) -> bool:
    """Whether a backward is in a loop of its own inside that of the optimizer's step."""
    loops = code.training.loops_around(backward)
    stepping = [
        code.training.loops_around(call)[0]
        for call in code.script.calls
        if code.training.steps(call) and code.training.loops_around(call)
    ]
    return len(loops) > 1 and loops[0] not in stepping and loops[1] in stepping
