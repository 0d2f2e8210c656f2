"""A layer has a bias that the normalisation after it cancels.

## Why it is slow

BatchNorm subtracts the mean, and with it any constant that was added before. The bias is added in the forward, summed
over the batch in the backward and updated by the optimizer for nothing.

## How it is known

From the layers in the order in which they are called. The worth is measured after the run, where time allows, by
timing such a layer with and without its bias.

## Example

```python
net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU())
```

## Use instead

```python
net = nn.Sequential(nn.Conv2d(3, 64, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU())
```

## When the repair is safe

Safe for a new training. A checkpoint saved with the bias no longer fits the model. Layers initialised after this one
get other random weights, since no random numbers are drawn for the bias any more.

## Source

- PyTorch performance tuning guide
- Kuhn
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import libcst as cst

from hasten.doctor.figures import norm_of
from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.problem import Edit, Problem
from hasten.doctor.source.syntax import argument, dotted, has_star_arguments, last_name, walk, with_keyword
from hasten.evidence import Evidence, Finding, HowKnown, severity_of
from hasten.evidence.weigh import LEAST, saved, size_of

# Position of `bias` among the positional arguments.
_BIASED = {
    "Linear": 2, "Conv1d": 7, "Conv2d": 7, "Conv3d": 7,
    "ConvTranspose1d": 7, "ConvTranspose2d": 7, "ConvTranspose3d": 7,
}  # fmt: skip
_NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm")


class BiasBeforeNorm(Rule):
    may_change = "other random numbers are drawn without the bias; checkpoints from before hold a bias too many"

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return one finding for all such layers; its worth is known only if one was measured faster without bias."""
        layers = [
            layer
            for layer in evidence.layers
            if layer.bias and norm_of(evidence, layer) and layer.kind.startswith(("Conv", "Linear"))
        ]
        if not layers:
            return None
        worth = saved(evidence, [trial for trial in evidence.measured_for(cls.name) if trial.saved > 0])
        known_worth = worth if worth >= LEAST else None
        others = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
        # A run shows where a layer is called, not where it is built: the finding from the source has that line.
        return cls.finding(
            f"{layers[0].path}{others}: a bias right before {norm_of(evidence, layers[0])} is taken away again",
            "build it with bias=False",
            severity_of(known_worth), known_worth, HowKnown.MEASURED if known_worth else HowKnown.READ,
            where=layers[0].path,
            details=tuple(f"{layer.path}: {size_of(layer)}" for layer in layers),
        )  # fmt: skip

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Find neighbours in a Sequential or a list of layers, and pairs that a forward calls one on the other."""
        reported: set[cst.CSTNode] = set()
        for layer, norm, sure in (*_neighbours(code), *_pairs(code)):
            if layer in reported or not _has_bias(layer):
                continue
            reported.add(layer)
            unfixed_reason = "" if sure else "it is not certain that nothing else uses the layer"
            if not unfixed_reason and code.script.mentions("load_state_dict", "load_state_dict_from_url", "model_zoo"):
                unfixed_reason = "the file loads checkpoints, which may hold the bias"
            if not unfixed_reason and any(
                isinstance(node, cst.Attribute) and node.attr.value == "bias" for node in code.script.nodes
            ):
                unfixed_reason = "the file reads biases, and this one would be None"
            yield Problem(
                layer,
                f"the bias of this {last_name(layer.func)} is taken away again by {last_name(norm.func)}",
                "give the layer bias=False",
                () if unfixed_reason else (Edit(layer, lambda now: with_keyword(now, "bias", cst.Name("False"))),),
                unfixed_reason,
            )


def _layer(code: Code, node: cst.CSTNode | None, layer_names: Iterable[str]) -> cst.Call | None:
    """Return the node as a call if it builds one of these torch.nn layers, else None."""
    if isinstance(node, cst.Call) and last_name(node.func) in layer_names:
        return node if code.script.qualified(node.func).startswith(("torch.nn.", "nn.")) else None
    return None


def _has_bias(call: cst.Call) -> bool:
    """Return whether a layer surely has a bias: by default or as `bias=True`, and without `*args` or `**kwargs`."""
    bias = argument(call, "bias", _BIASED[last_name(call.func)])
    return not has_star_arguments(call) and (bias is None or dotted(bias) == "True")


def _neighbours(code: Code) -> Iterator[tuple[cst.Call, cst.Call, bool]]:
    """Yield each layer with the norm right after it, and whether they are surely called in that order."""
    for node in code.script.nodes:
        elements: list[cst.BaseExpression] = []
        sure = False
        if isinstance(node, cst.Call) and code.script.qualified(node.func) in ("torch.nn.Sequential", "nn.Sequential"):
            elements = [arg.value for arg in node.args]
            sure = True
        elif isinstance(node, cst.List) and not isinstance(code.script.parents[node], cst.Arg):
            elements = [element.value for element in node.elements]
            sure = _becomes_sequential(code, node)
        for layer_node, norm_node in pairwise(elements):
            layer, norm = _layer(code, layer_node, _BIASED), _layer(code, norm_node, _NORMS)
            if layer is not None and norm is not None:
                yield layer, norm, sure


def _becomes_sequential(code: Code, node: cst.List) -> bool:
    """Return whether a list becomes an `nn.Sequential(*layers)` in the same function."""
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
    """Yield layer and norm of each `self.bn1(self.conv1(x))`, in one expression or in two consecutive lines.

    The third value is True if the class uses the layer only there, always before the same norm.
    """
    for owner in code.script.classes.values():
        attributes = {
            dotted(target.target): node.value
            for node in walk(owner)
            if isinstance(node, cst.Assign)
            for target in node.targets
            if dotted(target.target).startswith("self.")
        }
        layers = {
            name: call for name, value in attributes.items() if (call := _layer(code, value, _BIASED)) is not None
        }
        norms = {name: call for name, value in attributes.items() if (call := _layer(code, value, _NORMS)) is not None}
        uses: dict[str, list[str]] = {name: [] for name in layers}
        mentions = dict.fromkeys(layers, 0)
        for node in walk(owner) if layers and norms else ():
            name = dotted(node) if isinstance(node, cst.Attribute) else ""
            if name in mentions:
                mentions[name] += 1
            if isinstance(node, cst.Call) and dotted(node.func) in layers:
                uses[dotted(node.func)].append(_called_on(code, node))
        for name, following_norms in uses.items():
            if following_norms and all(norm in norms for norm in following_norms):
                # One mention is the assignment; any other than a call (a weight that is tied) makes it unsure.
                yield (
                    layers[name],
                    norms[following_norms[0]],
                    mentions[name] == 1 + len(following_norms) and len(set(following_norms)) == 1,
                )


def _called_on(code: Code, call: cst.Call) -> str:
    """Return the name of the module called on the result of a call, as in "self.bn1"; "" if other code may use it."""
    parent = code.script.parents[call]
    if isinstance(parent, cst.Arg):
        outer_call = code.script.parents[parent]
        return dotted(outer_call.func) if isinstance(outer_call, cst.Call) else ""
    if not isinstance(parent, cst.Assign) or len(parent.targets) != 1:
        return ""
    name = dotted(parent.targets[0].target)
    line = code.script.parents[parent]
    body = getattr(code.script.parents[line], "body", ())
    position = list(body).index(line) if line in body else -1
    following = body[position + 1] if 0 <= position < len(body) - 1 else None
    if not name or following is None:
        return ""
    for node in walk(following):
        if isinstance(node, cst.Call) and node.args and dotted(node.args[0].value) == name:
            bound = code.script.parents[node]
            renamed = isinstance(bound, cst.Assign) and dotted(bound.targets[0].target) == name
            inner = isinstance(bound, cst.Arg)  # x = relu(bn(x)): the whole expression rebinds the name
            return dotted(node.func) if renamed or (inner and _binds(following, name)) else ""
    return ""


def _binds(statement: cst.CSTNode, name: str) -> bool:
    """Return whether a statement assigns to a name."""
    return any(isinstance(node, cst.AssignTarget) and dotted(node.target) == name for node in walk(statement))
