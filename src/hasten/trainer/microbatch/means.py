"""Whether a loss is a mean over samples: only then do the gradients of microbatches add up."""

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
from hasten.trainer.microbatch.before import Before, versions
from hasten.trainer.microbatch.iterated import Iterated
from hasten.trainer.microbatch.same_draws import SameDraws
from hasten.trainer.microbatch.watched import Watched, compiles
from hasten.trainer.outputs import loss_of

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer

_ROUNDING = 2e-3  # of float32, TF32 included, as a share of the gradient
_ROUNDING_16 = 3e-2
_ROUNDING_64 = 1e-7
_RANDOM = 0.4  # what a step that draws numbers itself makes of its loss; a sum in place of a mean is off by half
_PARTS = 16  # of the largest size: more samples of a batch are not looked at
_SCALE_FP16 = 1024.0  # small gradients would be lost; all are off by as much, so it need not be taken out

Called = Callable[[Any, int], Any]
Gradients = list[torch.Tensor | None]


class Group(NamedTuple):
    """Samples that are computed together: makes them, how much their loss counts, and their places in the batch."""

    make: Callable[[], Any]
    share: float
    rows: Sequence[int]


class Look(NamedTuple):
    """What a look at some samples has shown.

    Attributes:
        wrong: What is wrong with the loss, or the step, that is to be computed in parts; "" if nothing is.
        gradients: Whether gradients were compared, rather than losses alone.
        fix: What to do, where more is known than that it does not add up.
    """

    wrong: str
    gradients: bool
    fix: str = ""


class _Side(NamedTuple):
    """What the step gave for some samples; None: no loss, or gradients that were not asked for.

    `norm` is that of the gradients, and `size` that of the loss: of several parts the mean of their sizes, which is
    what rounding, and chance, are measured by.
    """

    loss: float | None
    gradients: Gradients | None
    norm: float = 0.0
    size: float = 0.0


def groupings(count: int, size: int) -> list[list[list[int]]]:
    """Return places of a batch's samples in parts of up to `size`: as they are run, first with last, smaller ones.

    Samples beside each other may be of one class, or one length: then any loss adds up. Those of a large batch are
    taken from across it.
    """
    size = min(count, size)
    used = min(count, _PARTS * size)
    rows = [place * count // used for place in range(used)]
    mixed = [rows[place // 2] if place % 2 == 0 else rows[-1 - place // 2] for place in range(used)]
    short = max(min(2, size // 2), size // 3)  # one sample alone, for which a step may not be written, if need be
    smaller: list[list[int]] = []
    start = 0
    while start < used:
        width = size - short if len(smaller) % 2 else short
        smaller.append(rows[start : start + width])
        start += width
    if len(smaller) > 1 and len(smaller[-1]) == 1 < short:
        last = smaller.pop()
        smaller[-1] += last
    found = [[order[start : start + size] for start in range(0, used, size)] for order in (rows, mixed)]
    return [*(found if used > size else found[:1]), smaller]


def look(
    trainer: Trainer, before: Before, step: Called, groups: list[list[Group]], gradients: bool, by_samples: bool
) -> Look:
    """Compare the loss of some samples, and its gradients, in parts with those of the same samples in other parts.

    Losses alone do not tell: before anything is learnt, each token costs nearly the same. Not with a backward of the
    module's own, nor with hooks of the Trainer. Whoever calls puts random states, buffers, gradients and metrics back.

    Args:
        trainer: Whose module it is.
        before: Has just kept what the step stands on.
        step: `(batch, batch_idx)` -> what training_step gives.
        groups: The same samples, grouped in several ways.
        gradients: Whether to compare gradients.
        by_samples: Whether parts count by samples, so that a mean over anything else is wrong.
    """
    module = trainer.model
    parameters = versions(module.parameters())
    buffers = {name: buffer._version for name, buffer in module.named_buffers()}
    scale = _SCALE_FP16 if trainer.config.precision == "16-mixed" else 1.0
    watched = Watched(module)
    iterated = Iterated(module)
    found = Look("", False)
    try:
        with _resting(module), watched:
            parts = _Parts(before, step, scale, watched, module, iterated, gradients)
            first, *others = [parts.summed(grouping) for grouping in groups]
            parts.begin()  # as it was
        for other in others:
            found = _compared(trainer, before, first, other, scale, parts.by_chance)
            if found.wrong:
                break
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
    if by_samples and (seen := watched.wrong()):
        return Look(seen[0], found.gradients, seen[1])
    now = {name: buffer for name, buffer in module.named_buffers() if name not in iterated.names}
    changed = [name for name, buffer in now.items() if buffer._version != buffers.get(name)]
    changed += sorted(parts.attributes.changed)
    if changed:
        trainer.say(f"microbatch: with each part, not once a batch, a step changes {', '.join(changed[:3])}", once=True)
    return found


class _Parts:
    """Computes parts of a batch, as a step in parts does.

    Args:
        before: What the step stands on.
        step: `(batch, batch_idx)` -> what training_step gives.
        scale: Of what is differentiated.
        watched: Sees losses of torch's.
        module: Whose step it is.
        iterated: Its spectral norms.
        gradients: Whether to differentiate.

    Attributes:
        attributes: Of the module: what the step changes in them.
        by_chance: Random numbers were drawn that were not a sample's own, so that parts have others.
    """

    def __init__(
        self,
        before: Before,
        step: Called,
        scale: float,
        watched: Watched,
        module: torch.nn.Module,
        iterated: Iterated,
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
        """Have a part find what the first one found."""
        self._before.draw_again()
        self._iterated.put_back()
        self.attributes.put_back()

    def summed(self, groups: list[Group]) -> _Side:
        """Compute parts one after the other; what is kept of each is its share of the loss and the gradient."""
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
            before_it = none if total is None else total
            total = [_minus(one, part, -group.share) for one, part in zip(before_it, side.gradients, strict=True)]
        return _Side(loss, total, norm, size)

    def _side(self, group: Group) -> _Side:
        """Compute some samples; without their gradients where numbers were drawn that are others in each part."""
        batch = group.make()
        loss = self._loss(batch, group)
        if loss is None:
            return _Side(None, None)
        self.by_chance = self.by_chance or self._before.drawn()
        if not self._gradients or self.by_chance or not loss.requires_grad:
            return _Side(float(loss.detach()), None)
        self._before.drop_gradients()
        with self._draws:  # what is computed again in the backward draws again
            torch.autograd.backward(loss * self._scale)
        found = self._before.drop_gradients()
        return _Side(float(loss.detach()), found, _norm(found))

    def _loss(self, batch: Any, group: Group) -> Any:
        """Return a part's loss: with a graph where gradients are wanted, or the step itself wants one."""
        try:
            return self._forward(batch, group)
        except RuntimeError as error:
            if self._graph or is_out_of_memory(error):
                raise
            self._graph = True  # it differentiates within the step: a gradient penalty
            return self._forward(batch, group)

    def _forward(self, batch: Any, group: Group) -> Any:
        self.begin()
        self._draws.begin_part(group.rows)
        with torch.set_grad_enabled(self._graph), self._draws:
            return loss_of(self._step(batch, 0))


def _compared(trainer: Trainer, before: Before, one: _Side, other: _Side, scale: float, draws: bool) -> Look:
    """Compare what the same samples come to in two ways."""
    if one.loss is None or other.loss is None:
        return Look("", False)
    relative, unit = _rounding(trainer, before.parameters)
    allowed = _RANDOM if draws else max(relative, _ROUNDING)
    finite = math.isfinite(one.loss)
    if finite != math.isfinite(other.loss) or (
        finite and abs(other.loss - one.loss) > allowed * max(other.size, one.size) + 1e-6
    ):
        return Look(
            f"the loss of some samples is {one.loss:.4g}, and {other.loss:.4g} when they are parted otherwise", False
        )
    if one.gradients is None or other.gradients is None:
        return Look("", False)
    norms = _norm(one.gradients), _norm(other.gradients)
    off = _norm([_minus(left, right, 1.0) for left, right in zip(one.gradients, other.gradients, strict=True)])
    if not math.isfinite(off):
        # Single samples have larger gradients than their mean: fp16 may hold the one and not the other.
        if scale == 1.0 and math.isfinite(norms[0]) != math.isfinite(norms[1]):
            return Look("gradients of some samples are finite, and not when they are parted otherwise", True)
        return Look("", False)
    largest = max(one.norm, other.norm)
    # Where little is left to learn, the gradient itself is what rounding makes of numbers as large as the loss.
    weights = _norm([part for part in before.parameters if part.requires_grad])
    left = 8 * unit * scale * max(1.0, abs(one.loss)) / (weights or 1.0)
    if off <= relative * largest + left:
        return Look("", True)
    return Look(f"gradients of some samples, parted in two ways, are {100 * off / largest:.2g} % apart", True)


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
