"""Rules on how a model is built."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import libcst as cst

from hasten.doctor.source.code import Code
from hasten.doctor.source.rule import Mend, Problem, Rule
from hasten.doctor.source.syntax import (
    argument,
    dotted,
    is_open,
    last_name,
    receiver,
    targets_of,
    walk,
    walk_scope,
    with_keyword,
)

# Where `bias` stands among the positional arguments.
_BIASED = {
    "Linear": 2, "Conv1d": 7, "Conv2d": 7, "Conv3d": 7,
    "ConvTranspose1d": 7, "ConvTranspose2d": 7, "ConvTranspose3d": 7,
}  # fmt: skip
_NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm")


def _layer(code: Code, node: cst.CSTNode | None, kinds: Iterable[str]) -> cst.Call | None:
    """The node, where it makes one of these layers of torch.nn."""
    if isinstance(node, cst.Call) and last_name(node.func) in kinds:
        return node if code.script.qualified(node.func).startswith(("torch.nn.", "nn.")) else None
    return None


def _has_bias(call: cst.Call) -> bool:
    given = argument(call, "bias", _BIASED[last_name(call.func)])
    return not is_open(call) and (given is None or dotted(given) == "True")


class BiasBeforeNorm(Rule):
    """BatchNorm takes the mean away, and with it the bias of the layer before: it costs memory and time for nothing."""

    name = "bias_before_norm"
    sources = ("PyTorch performance tuning guide: disable bias for convolutions directly followed by a batch norm",)
    may_change = "other random numbers are drawn without the bias; checkpoints from before hold a bias too many"

    @classmethod
    def problems(cls, code: Code) -> Iterable[Problem]:
        """Neighbours in a Sequential or in a list of layers; pairs that a forward calls one on the other."""
        seen: set[cst.CSTNode] = set()
        for layer, norm, sure in (*_neighbours(code), *_pairs(code)):
            if layer in seen or not _has_bias(layer):
                continue
            seen.add(layer)
            left = "" if sure else "it is not certain that nothing else uses the layer"
            if not left and code.script.mentions("load_state_dict", "load_state_dict_from_url", "model_zoo"):
                left = "the file loads checkpoints, which may hold the bias"
            if not left and any(
                isinstance(node, cst.Attribute) and node.attr.value == "bias" for node in code.script.nodes
            ):
                left = "the file reads biases, and this one would be None"
            yield Problem(
                layer,
                f"the bias of this {last_name(layer.func)} is taken away again by {last_name(norm.func)}",
                "give the layer bias=False",
                () if left else (Mend(layer, lambda now: with_keyword(now, "bias", cst.Name("False"))),),
                left,
            )


def _neighbours(code: Code) -> Iterator[tuple[cst.Call, cst.Call, bool]]:
    """Layers with the norm right behind them; whether they are surely called in that order."""
    for node in code.script.nodes:
        parts: list[cst.BaseExpression] = []
        sure = False
        if isinstance(node, cst.Call) and code.script.qualified(node.func) in ("torch.nn.Sequential", "nn.Sequential"):
            parts = [arg.value for arg in node.args]
            sure = True
        elif isinstance(node, cst.List) and not isinstance(code.script.parents[node], cst.Arg):
            parts = [element.value for element in node.elements]
            sure = _becomes_sequential(code, node)
        for one, other in pairwise(parts):
            layer, norm = _layer(code, one, _BIASED), _layer(code, other, _NORMS)
            if layer is not None and norm is not None:
                yield layer, norm, sure


def _becomes_sequential(code: Code, node: cst.List) -> bool:
    """Whether a list ends as `nn.Sequential(*layers)` in its function."""
    scope = code.script.scope(node)
    statement = code.script.statement(node)
    names = {dotted(below) for below in walk(statement) if isinstance(below, cst.Name)}
    return any(
        last_name(call.func) == "Sequential" and arg.star == "*" and dotted(arg.value) in names
        for call in code.script.calls
        if code.script.scope(call) is scope
        for arg in call.args
    )


def _pairs(code: Code) -> Iterator[tuple[cst.Call, cst.Call, bool]]:
    """`self.bn1(self.conv1(x))`, in one expression or two lines one after the other."""
    for owner in code.script.classes.values():
        made = {
            dotted(target.target): node.value
            for node in walk(owner)
            if isinstance(node, cst.Assign)
            for target in node.targets
            if dotted(target.target).startswith("self.")
        }
        layers = {name: call for name, value in made.items() if (call := _layer(code, value, _BIASED)) is not None}
        norms = {name: call for name, value in made.items() if (call := _layer(code, value, _NORMS)) is not None}
        uses: dict[str, list[str]] = {name: [] for name in layers}
        mentions = dict.fromkeys(layers, 0)
        for node in walk(owner) if layers and norms else ():
            name = dotted(node) if isinstance(node, cst.Attribute) else ""
            if name in mentions:
                mentions[name] += 1
            if isinstance(node, cst.Call) and dotted(node.func) in layers:
                uses[dotted(node.func)].append(_called_on(code, node))
        for name, after in uses.items():
            if after and all(norm in norms for norm in after):
                yield layers[name], norms[after[0]], mentions[name] == 1 + len(after) and len(set(after)) == 1


def _called_on(code: Code, call: cst.Call) -> str:
    """What is called on the result of a call, and on nothing else: "self.bn1"."""
    above = code.script.parents[call]
    if isinstance(above, cst.Arg):
        outer = code.script.parents[above]
        return dotted(outer.func) if isinstance(outer, cst.Call) else ""
    if not isinstance(above, cst.Assign) or len(above.targets) != 1:
        return ""
    name = dotted(above.targets[0].target)
    line = code.script.parents[above]
    body = getattr(code.script.parents[line], "body", ())
    at = list(body).index(line) if line in body else -1
    following = body[at + 1] if 0 <= at < len(body) - 1 else None
    if not name or following is None:
        return ""
    for node in walk(following):
        if isinstance(node, cst.Call) and node.args and dotted(node.args[0].value) == name:
            bound = code.script.parents[node]
            renamed = isinstance(bound, cst.Assign) and dotted(bound.targets[0].target) == name
            inner = isinstance(bound, cst.Arg)  # relu(bn(x)): the name is bound anew by the whole
            return dotted(node.func) if renamed or (inner and _binds(following, name)) else ""
    return ""


def _binds(statement: cst.CSTNode, name: str) -> bool:
    return any(isinstance(node, cst.AssignTarget) and dotted(node.target) == name for node in walk(statement))


class AttentionByHand(Rule):
    """softmax(q @ k.T) @ v writes the whole matrix of weights to memory; scaled_dot_product_attention does not."""

    name = "attention_by_hand"
    technique = "attention"
    sources = ("Dao et al., FlashAttention", "PyTorch: scaled_dot_product_attention")

    @classmethod
    def problems(cls, code: Code) -> Iterable[Problem]:
        """Functions that multiply, take a softmax and multiply again, and keep the weights to themselves."""
        for functions in code.script.functions.values():
            for function in functions:
                if not any(
                    last_name(n) == "scaled_dot_product_attention"
                    for n in walk(function)
                    if isinstance(n, cst.Attribute)
                ):
                    yield from _attention(code, function)


def _attention(code: Code, function: cst.FunctionDef) -> Iterator[Problem]:
    scores: set[str] = set()
    weights: set[str] = set()
    found: list[cst.Call] = []
    for node in walk_scope(function.body):
        if isinstance(node, cst.AugAssign) and dotted(node.target) in weights:
            return  # weights that are changed after the softmax
        if not isinstance(node, cst.Assign | cst.Return) or node.value is None:
            continue
        target = dotted(node.targets[0].target) if isinstance(node, cst.Assign) else ""
        of_scores = _mentions(node.value, scores) or any(_is_scores(code, below) for below in walk(node.value))
        softmax = next(
            (c for c in walk(node.value) if isinstance(c, cst.Call) and last_name(c.func) == "softmax"), None
        )
        product = any(_is_product(code, below, weights, found) for below in walk(node.value))
        if product and found:
            if not _returned(function, weights):
                yield Problem(
                    found[-1],
                    "attention is written by hand: its weights are written to memory and read again",
                    "use torch.nn.functional.scaled_dot_product_attention",
                )
            return
        if (of_scores or _mentions(node.value, weights)) and _mixes(code, node.value, scores | weights):
            return
        if softmax is not None and of_scores:
            found.append(softmax)
            weights.add(target)
        elif _mentions(node.value, weights):
            if any(isinstance(below, cst.BinaryOperation) for below in walk(node.value)):
                return
            weights.add(target)
        elif of_scores:
            scores.add(target)
        scores.discard("")
        weights.discard("")


def _mixes(code: Code, value: cst.BaseExpression, names: set[str]) -> bool:
    """Whether a module of the model's own works on the scores or weights: more than scaling, masking, dropping."""
    return any(
        isinstance(call, cst.Call)
        and dotted(call.func).startswith("self.")
        and not any(word in last_name(call.func).lower() for word in ("drop", "softmax", "mask"))
        and any(_mentions(arg.value, names) for arg in call.args)
        for call in walk(value)
    )


def _mentions(node: cst.CSTNode, names: set[str]) -> bool:
    return any(dotted(below) in names for below in walk(node) if isinstance(below, cst.Name | cst.Attribute))


def _operands(code: Code, node: cst.CSTNode) -> list[cst.BaseExpression]:
    """The two sides of a product of matrices; empty where the node is none."""
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.MatrixMultiply):
        return [node.left, node.right]
    if isinstance(node, cst.Call) and last_name(node.func) in ("matmul", "bmm", "baddbmm"):
        inner = receiver(node)
        sides = [arg.value for arg in node.args]
        if inner is not None and dotted(inner) not in code.script.imports:
            sides = [inner, *sides]
        return sides[-2:]
    return []


def _is_scores(code: Code, node: cst.CSTNode) -> bool:
    sides = _operands(code, node)
    if len(sides) != 2:
        return False
    key = sides[1]
    turned = any(
        last_name(below) in ("transpose", "mT", "T", "permute", "swapaxes")
        for below in walk(key)
        if isinstance(below, cst.Attribute)
    )
    return turned or last_name(key) in ("k_t", "kt", "key_t", "kT")


def _is_product(code: Code, node: cst.CSTNode, weights: set[str], found: list[cst.Call]) -> bool:
    sides = _operands(code, node)
    return len(sides) == 2 and (_mentions(sides[0], weights) or any(call in set(walk(sides[0])) for call in found))


def _returned(function: cst.FunctionDef, weights: set[str]) -> bool:
    """Whether a function hands its weights out, or keeps them: then they are wanted as they are."""
    for node in walk(function.body):
        if isinstance(node, cst.Return) and node.value is not None:
            if any(dotted(part) in weights for part in targets_of(node.value)):
                return True
        elif isinstance(node, cst.Assign) and dotted(node.targets[0].target).startswith("self."):
            if _mentions(node.value, weights):
                return True
    return False
