"""Whether a loss is a mean over samples, without which its parts do not add up to it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from hasten.errors import is_out_of_memory
from hasten.trainer.microbatch.before import Before, versions
from hasten.trainer.outputs import loss_of

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer

_ROUNDING = 2e-3  # of float32, TF32 included, as a share of the gradient
_ROUNDING_16 = 3e-2
_ROUNDING_64 = 1e-7
_RANDOM = 0.4  # what a step that draws numbers itself makes of its loss; a sum in place of a mean is off by half
_SCALE_FP16 = 1024.0  # small gradients would be lost; all are off by as much, so it need not be taken out

Called = Callable[[Any, int], Any]
Gradients = list[torch.Tensor | None]


class Look(NamedTuple):
    """What a look at a few samples has shown.

    Attributes:
        wrong: What is wrong with the loss, or the step, that is to be computed in parts; "" if nothing is.
        gradients: Whether gradients were compared, rather than losses alone.
    """

    wrong: str
    gradients: bool


class _Side(NamedTuple):
    """What the step gave for some samples; None: no loss, or gradients that were not asked for."""

    loss: float | None
    gradients: Gradients | None


def look(
    trainer: Trainer, before: Before, step: Called, batch: Any, halves: list[tuple[Any, float]], gradients: bool
) -> Look:
    """Compare the loss of some samples, and its gradients, with those of their halves.

    Losses alone do not tell: before anything is learnt, each token costs nearly the same. Not with a backward of the
    module's own, nor with hooks of the Trainer. Whoever calls puts random states, buffers, gradients and metrics back.

    Args:
        trainer: Whose module it is.
        before: Has just kept what the step stands on.
        step: `(batch, batch_idx)` -> what training_step gives.
        batch: Some samples.
        halves: The same in two parts, and how much the loss of each counts.
        gradients: Whether to compare gradients.
    """
    module = trainer.model
    parameters = versions(module.parameters())
    buffers = {name: buffer._version for name, buffer in module.named_buffers()}
    scale = _SCALE_FP16 if trainer.config.precision == "16-mixed" else 1.0
    try:
        with _resting(module):
            whole = _side(before, step, batch, gradients, scale)
            draws = before.drawn()
            apart = []
            for half, _ in halves:
                before.draw_again()
                apart.append(_side(before, step, half, whole.gradients is not None, scale))
            found = _compared(trainer, before, whole, apart, [share for _, share in halves], scale, draws)
    except Exception as error:
        if is_out_of_memory(error):  # the parts will be smaller; how they add up is then not known
            return Look("", False)
        error.add_note(
            "hasten: raised where microbatch computes some samples of a batch; if it has not cut the batch into its"
            " samples, define split_batch(self, batch, size) and loss_terms(self, batch) in the module"
        )
        raise
    if versions(module.parameters()) != parameters:
        return Look("training_step changes weights itself, which it would do once for each part", False)
    changed = [name for name, buffer in module.named_buffers() if buffer._version != buffers.get(name)]
    if changed:
        trainer.say(f"microbatch: {', '.join(changed[:3])} change with each part, not once a batch", once=True)
    return found


def _side(before: Before, step: Called, batch: Any, gradients: bool, scale: float) -> _Side:
    """Compute some samples; without their gradients where the step draws random numbers, other ones for each part."""
    with torch.set_grad_enabled(gradients):
        loss = loss_of(step(batch, 0))
    if loss is None:
        return _Side(None, None)
    if not gradients or before.drawn() or not loss.requires_grad:
        return _Side(float(loss.detach()), None)
    before.drop_gradients()
    torch.autograd.backward(loss * scale)
    return _Side(float(loss.detach()), before.drop_gradients())


def _compared(
    trainer: Trainer, before: Before, whole: _Side, apart: list[_Side], shares: list[float], scale: float, draws: bool
) -> Look:
    """Compare the whole with the sum of its parts, each by how much it counts."""
    if whole.loss is None or any(side.loss is None for side in apart):
        return Look("", False)
    relative, unit = _rounding(trainer, before.parameters)
    summed = sum(side.loss * share for side, share in zip(apart, shares, strict=True) if side.loss is not None)
    allowed = _RANDOM if draws else max(relative, _ROUNDING)
    if abs(summed - whole.loss) > allowed * max(abs(summed), abs(whole.loss)) + 1e-6:
        return Look(f"the loss of a few samples is {whole.loss:.4g}, the mean over their halves {summed:.4g}", False)
    if whole.gradients is None or any(side.gradients is None for side in apart):
        return Look("", False)
    largest, difference = _norm(whole.gradients), whole.gradients
    for side, share in zip(apart, shares, strict=True):
        assert side.gradients is not None
        largest = max(largest, _norm(side.gradients))
        difference = [_minus(one, part, share) for one, part in zip(difference, side.gradients, strict=True)]
    off = _norm(difference)
    if not math.isfinite(off):
        return Look("", False)
    # Where little is left to learn, the gradient itself is what rounding makes of numbers as large as the loss.
    weights = _norm([one for one in before.parameters if one.requires_grad])
    left = 8 * unit * scale * max(1.0, abs(whole.loss)) / (weights or 1.0)
    if off <= relative * largest + left:
        return Look("", True)
    return Look(f"gradients of a few samples and of their halves are {100 * off / largest:.2g} % apart", True)


def _rounding(trainer: Trainer, parameters: list[Any]) -> tuple[float, float]:
    """Return what rounding may make of a gradient, as a share of it, and the unit of it in its formats."""
    kinds = {one.dtype for one in parameters if one.requires_grad}
    narrow = "16" in str(trainer.config.precision) or any(kind.itemsize < 4 for kind in kinds)
    if narrow or torch.get_float32_matmul_precision() == "medium":
        return _ROUNDING_16, 2.0**-8
    if kinds == {torch.float64}:
        return _ROUNDING_64, 2.0**-52
    return _ROUNDING, 2.0**-23


def _minus(whole: torch.Tensor | None, part: torch.Tensor | None, share: float) -> torch.Tensor | None:
    if part is None:
        return whole
    return part * -share if whole is None else whole - part * share


def _norm(tensors: Gradients | list[torch.Tensor]) -> float:
    """Return the norm of all numbers together."""
    total = 0.0
    for tensor in tensors:
        if tensor is not None:
            values = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
            total += float(torch.linalg.vector_norm(values.double() if values.itemsize < 4 else values)) ** 2
    return math.sqrt(total)


@contextlib.contextmanager
def _resting(module: torch.nn.Module) -> Iterator[None]:
    """Let BatchNorm and dropout rest, in which samples differ by who is beside them, and by chance.

    Dropout that is a number of a module (`nn.LSTM(dropout=0.1)`, `attention_dropout`, `drop_prob`) as well.
    """
    resting = [part for part in module.modules() if isinstance(part, _BatchNorm | _DropoutNd) and part.training]
    chances = [
        (vars(part), name, value)
        for part in module.modules()
        for name, value in vars(part).items()
        if "drop" in name and isinstance(value, float)
    ]
    for part in resting:
        part.training = False
    for owner, name, _ in chances:
        owner[name] = 0.0
    try:
        yield
    finally:
        for part in resting:
            part.training = True
        for owner, name, value in chances:
            owner[name] = value
