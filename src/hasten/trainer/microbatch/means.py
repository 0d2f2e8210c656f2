"""Check that a loss is a mean over samples: only then do the gradients of microbatches add up.

`groupings` groups some samples of a batch in several ways. `look` computes loss and gradients for each grouping, as a
step in parts would, and compares them: they agree if the parts add up. Whatever else differs between the groupings must
be removed first: BatchNorm and dropout are switched off, random numbers are drawn per sample, state is restored before
each part. The tolerance is that of rounding, or wide where a step draws numbers in another way.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from hasten.errors import is_out_of_memory
from hasten.trainer.microbatch.attributes import Attributes
from hasten.trainer.microbatch.before import StepSnapshot, versions
from hasten.trainer.microbatch.iterated import SpectralVectors
from hasten.trainer.microbatch.same_draws import SameDraws
from hasten.trainer.microbatch.watched import WatchedLosses, compiles
from hasten.trainer.outputs import loss_of

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer

_ROUNDING = 2e-3  # tolerance for float32, TF32 included, as a share of the gradient
_ROUNDING_16 = 3e-2
_ROUNDING_64 = 1e-7
_RANDOM = 0.4  # tolerance for the loss of a step that draws numbers; a sum instead of a mean is off by half
_PARTS = 16  # at most this many parts of the largest size are checked, of a larger batch
_SCALE_FP16 = 1024.0  # keeps small fp16 gradients from underflow; not removed again, since all are compared with it

Called = Callable[[Any, int], Any]
Gradients = list[torch.Tensor | None]


class Group(NamedTuple):
    """Samples computed together: a function that makes them, their loss's weight, and their indices in the batch."""

    make: Callable[[], Any]
    share: float
    rows: Sequence[int]


class PartsInspection(NamedTuple):
    """The result of a check on some samples.

    Attributes:
        wrong: What is wrong with the loss, or the step, that is to be computed in parts; "" if nothing is.
        gradients: Whether gradients were compared, rather than losses alone.
        fix: What to do, where more is known than that the parts do not add up.
    """

    wrong: str
    gradients: bool
    fix: str = ""


class _Side(NamedTuple):
    """The results of a step for some samples; None: no loss, or gradients that were not asked for.

    `norm` is the gradients' norm and `size` the loss's absolute value; over several parts, the weighted means of
    theirs. Tolerances for rounding and chance are relative to them.
    """

    loss: float | None
    gradients: Gradients | None
    norm: float = 0.0
    size: float = 0.0


def groupings(count: int, size: int) -> list[list[list[int]]]:
    """Return indices of a batch's samples in parts of up to `size`: in order, first with last, and in smaller parts.

    Neighbouring samples may have the same class, or the same length: then any loss adds up. So the second grouping
    pairs samples from both ends, and the samples of a large batch are taken from all over it.
    """
    size = min(count, size)
    used = min(count, _PARTS * size)
    rows = [index * count // used for index in range(used)]
    mixed = [rows[index // 2] if index % 2 == 0 else rows[-1 - index // 2] for index in range(used)]
    small = max(min(2, size // 2), size // 3)  # two samples if possible: a step may not be written for one
    smaller: list[list[int]] = []
    start = 0
    while start < used:
        width = size - small if len(smaller) % 2 else small
        smaller.append(rows[start : start + width])
        start += width
    if len(smaller) > 1 and len(smaller[-1]) == 1 < small:
        last = smaller.pop()
        smaller[-1] += last
    orders = [[order[start : start + size] for start in range(0, used, size)] for order in (rows, mixed)]
    return [*(orders if used > size else orders[:1]), smaller]


def look(
    trainer: Trainer, before: StepSnapshot, step: Called, groups: list[list[Group]], gradients: bool, by_samples: bool
) -> PartsInspection:
    """Compare the loss of some samples, and its gradients, between parts that group them in different ways.

    Losses alone are not enough: before anything is learnt, each token costs nearly the same. Runs without the module's
    own backward and the Trainer's hooks. The caller restores random states, buffers, gradients and metrics.

    Args:
        trainer: The Trainer whose module it is.
        before: The state that was just saved, from before the step.
        step: `(batch, batch_idx)` -> the output of training_step.
        groups: The same samples, grouped in several ways.
        gradients: Whether to compare gradients.
        by_samples: Whether parts are weighted by their samples, so that a mean over anything else is wrong.
    """
    module = trainer.model
    parameters = versions(module.parameters())
    buffers = {name: buffer._version for name, buffer in module.named_buffers()}
    scale = _SCALE_FP16 if trainer.config.precision == "16-mixed" else 1.0
    watched = WatchedLosses(module)
    iterated = SpectralVectors(module)
    result = PartsInspection("", False)
    try:
        with _resting(module), watched:
            parts = _Parts(before, step, scale, watched, module, iterated, gradients)
            first, *other_groupings = [parts.summed(grouping) for grouping in groups]
            parts.begin()  # restore the state
        for regrouped in other_groupings:
            result = _compared(trainer, before, first, regrouped, scale, parts.by_chance)
            if result.wrong:
                break
    except Exception as error:
        if is_out_of_memory(error):  # the check needs too much memory: its result stays unknown
            return PartsInspection("", False)
        error.add_note(
            "hasten: raised where microbatch computes some samples of a batch; if it has not cut the batch into its"
            " samples, define split_batch(self, batch, size) and loss_terms(self, batch) in the module"
        )
        raise
    if versions(module.parameters()) != parameters:
        return PartsInspection("training_step changes weights itself, which it would do once for each part", False)
    if by_samples and (problem := watched.wrong()):
        return PartsInspection(problem[0], result.gradients, problem[1])
    now = {name: buffer for name, buffer in module.named_buffers() if name not in iterated.names}
    changed = [name for name, buffer in now.items() if buffer._version != buffers.get(name)]
    changed += sorted(parts.attributes.changed)
    if changed:
        trainer.say(f"microbatch: with each part, not once a batch, a step changes {', '.join(changed[:3])}", once=True)
    return result


class _Parts:
    """Computes parts of a batch, as a step in parts does.

    Args:
        before: The state from before the step.
        step: `(batch, batch_idx)` -> the output of training_step.
        scale: Factor of the loss before the backward.
        watched: Watches torch's losses.
        module: The trained module.
        iterated: Its spectral norms.
        gradients: Whether to compute gradients.

    Attributes:
        attributes: The module's plain attributes, and which of them the step changes.
        by_chance: Whether random numbers were drawn that do not belong to a sample, so that parts differ in them.
    """

    def __init__(
        self,
        before: StepSnapshot,
        step: Called,
        scale: float,
        watched: WatchedLosses,
        module: torch.nn.Module,
        iterated: SpectralVectors,
        gradients: bool,
    ) -> None:
        self._before, self._step, self._scale = before, step, scale
        self._watched, self._draws, self._iterated = watched, SameDraws(compiles(module)), iterated
        self.attributes = Attributes(module)
        self._iterated.take()
        self._gradients = gradients
        self._graph = gradients
        self.by_chance = False

    def begin(self) -> None:
        """Restore the state, so that each part starts from the same."""
        self._before.draw_again()
        self._iterated.put_back()
        self.attributes.put_back()

    def summed(self, groups: list[Group]) -> _Side:
        """Compute parts one after the other, and return the weighted sum of their losses and gradients."""
        loss, size, norm = 0.0, 0.0, 0.0
        total: Gradients | None = None
        for group in groups:
            side = self._side(group)
            self._watched.part(len(group.rows))
            if side.loss is None:
                return side
            loss, size = loss + side.loss * group.share, size + abs(side.loss) * group.share
            if not self._gradients or side.gradients is None:
                self._gradients, total = False, None
                continue
            norm += side.norm * group.share
            none: Gradients = [None] * len(side.gradients)
            so_far = none if total is None else total
            total = [_minus(partial, part, -group.share) for partial, part in zip(so_far, side.gradients, strict=True)]
        return _Side(loss, total, norm, size)

    def _side(self, group: Group) -> _Side:
        """Compute some samples; without gradients if random numbers were drawn that differ between parts."""
        batch = group.make()
        loss = self._loss(batch, group)
        if loss is None:
            return _Side(None, None)
        self.by_chance = self.by_chance or self._before.drawn()
        if not self._gradients or self.by_chance or not loss.requires_grad:
            return _Side(float(loss.detach()), None)
        self._before.drop_gradients()
        with self._draws:  # activation checkpointing draws again in the backward
            torch.autograd.backward(loss * self._scale)
        gradients = self._before.drop_gradients()
        return _Side(float(loss.detach()), gradients, _norm(gradients))

    def _loss(self, batch: Any, group: Group) -> Any:
        """Return a part's loss, with a graph if gradients are wanted or the step itself needs one."""
        try:
            return self._forward(batch, group)
        except RuntimeError as error:
            if self._graph or is_out_of_memory(error):
                raise
            self._graph = True  # the step itself differentiates: a gradient penalty
            return self._forward(batch, group)

    def _forward(self, batch: Any, group: Group) -> Any:
        """Run the step on a part."""
        self.begin()
        self._draws.begin_part(group.rows)
        with torch.set_grad_enabled(self._graph), self._draws:
            return loss_of(self._step(batch, 0))


def _compared(trainer: Trainer, before: StepSnapshot, a: _Side, b: _Side, scale: float, draws: bool) -> PartsInspection:
    """Compare the results of the same samples grouped in two ways, by loss and then by gradients."""
    if a.loss is None or b.loss is None:
        return PartsInspection("", False)
    tolerance, unit = _rounding(trainer, before.parameters)
    allowed = _RANDOM if draws else max(tolerance, _ROUNDING)
    finite = math.isfinite(a.loss)
    if finite != math.isfinite(b.loss) or (finite and abs(b.loss - a.loss) > allowed * max(b.size, a.size) + 1e-6):
        return PartsInspection(
            f"the loss of some samples is {a.loss:.4g}, and {b.loss:.4g} when they are parted otherwise", False
        )
    if a.gradients is None or b.gradients is None:
        return PartsInspection("", False)
    norms = _norm(a.gradients), _norm(b.gradients)
    distance = _norm([_minus(left, right, 1.0) for left, right in zip(a.gradients, b.gradients, strict=True)])
    if not math.isfinite(distance):
        # A single sample may have larger gradients than a mean: in fp16 the one may overflow, and the other not.
        if scale == 1.0 and math.isfinite(norms[0]) != math.isfinite(norms[1]):
            return PartsInspection("gradients of some samples are finite, and not when they are parted otherwise", True)
        return PartsInspection("", False)
    largest = max(a.norm, b.norm)
    # Where little is left to learn, the gradient itself consists of rounding errors of numbers as large as the loss.
    weights = _norm([part for part in before.parameters if part.requires_grad])
    noise_floor = 8 * unit * scale * max(1.0, abs(a.loss)) / (weights or 1.0)
    if distance <= tolerance * largest + noise_floor:
        return PartsInspection("", True)
    return PartsInspection(
        f"gradients of some samples, parted in two ways, are {100 * distance / largest:.2g} % apart", True
    )


def _rounding(trainer: Trainer, parameters: list[Any]) -> tuple[float, float]:
    """Return the tolerance for gradients, as a share of them, and the unit roundoff of the formats in use."""
    kinds = {parameter.dtype for parameter in parameters if parameter.requires_grad}
    narrow = "16" in str(trainer.config.precision) or any(kind.itemsize < 4 for kind in kinds)
    if narrow or torch.get_float32_matmul_precision() == "medium":
        return _ROUNDING_16, 2.0**-8
    if kinds == {torch.float64}:
        return _ROUNDING_64, 2.0**-52
    return _ROUNDING, 2.0**-23


def _minus(total: torch.Tensor | None, part: torch.Tensor | None, share: float) -> torch.Tensor | None:
    """Return `total - share * part`, where None is zero."""
    if part is None:
        return total
    return part * -share if total is None else total - part * share


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
    """Switch BatchNorm and dropout off within the block: they make samples depend on their neighbours, or on chance.

    Also dropout that is a plain number of a module (`nn.LSTM(dropout=0.1)`, `attention_dropout`, `drop_prob`).
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
