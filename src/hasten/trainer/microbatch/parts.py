"""Run the forward and backward of a batch in parts; with "auto", in smaller parts when memory runs out.

`_Parts` splits a batch, runs each part with its share of the loss, and merges outputs and logged values. With a number,
that is all. With "auto", `_Tried` runs a batch with the size that has worked so far, restores the state when memory
runs out, and tries again with half the size. On several ranks, all ranks repeat an attempt if one must.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hasten.check.noise import without_noise
from hasten.errors import HastenError, is_out_of_memory
from hasten.trainer.batches import tensors
from hasten.trainer.errors import misconfigured
from hasten.trainer.logged import LoggedValues
from hasten.trainer.microbatch.before import StepSnapshot, free_memory, versions
from hasten.trainer.microbatch.iterated import SpectralVectors
from hasten.trainer.microbatch.joined import JoinedLog, output_of, without_graph
from hasten.trainer.microbatch.means import Group, PartsInspection, groupings, look
from hasten.trainer.microbatch.refusals import refuse
from hasten.trainer.microbatch.splitting import chosen, labels_differ, samples_in, split
from hasten.trainer.outputs import loss_of

if TYPE_CHECKING:
    from hasten.trainer.hooks import Hooks
    from hasten.trainer.trainer import Trainer

Called = Callable[..., Any]

_FINISHED = 1 << 40  # proposal of a rank that is done with its batch: larger than any size, so smaller proposals win


def in_parts(trainer: Trainer, hooks: Hooks, training_step: Called, clear: Called, backward: Called) -> Called:
    """Return `(batch, batch_idx, first)` -> the output of training_step for the whole batch. Leaves its gradients.

    Args:
        trainer: Its flag `microbatch` sets the size.
        hooks: Its hooks, among them the module's `split_batch` and `loss_terms`.
        training_step: `(batch, batch_idx)` -> a loss that is a mean over the batch.
        clear: `(batch_idx)`; clears gradients at the start of an accumulation window.
        backward: `(loss)`; computes gradients.

    Raises:
        HastenError: The parts' gradients would not add up to that of the whole.
    """
    refuse(trainer)
    for name in ("backward", "on_after_backward"):
        if hooks.of_module(name) is not None:
            trainer.say(
                f"microbatch: {name} is called for each part of a batch: what it does to the loss or to gradients it"
                " does to a part's (clip and change gradients in on_before_optimizer_step, which comes once a step)",
                once=True,
            )
    parts = _Parts(trainer, hooks, training_step, clear, backward)
    return _Tried(trainer, parts) if parts.tries else parts.fixed


class _Part(NamedTuple):
    """A part of a batch, the weight of its loss (weights of all parts add up to 1), and its number of samples."""

    batch: Any
    share: float
    samples: int


class _Parts:
    """Runs a batch in parts.

    Args:
        As for `in_parts`.
    """

    def __init__(self, trainer: Trainer, hooks: Hooks, training_step: Called, clear: Called, backward: Called) -> None:
        self.tries = trainer.config.microbatch == "auto"  # then gradients are exchanged only when all ranks are done
        self.exchange = trainer.engine.strategy.exchange(self.tries)
        self.clear = clear
        self.step = training_step
        self._trainer, self._backward = trainer, backward
        own_split, own_terms = hooks.of_module("split_batch"), hooks.of_module("loss_terms")
        if own_split is not None and own_terms is None:
            raise HastenError(
                "microbatch: the module has a split_batch of its own and no loss_terms, so nobody knows how much each"
                " part counts",
                "def loss_terms(self, batch): return the number of samples (or tokens) that the loss is a mean over",
            )
        divide = own_split or split
        self._split: Called = lambda batch, size: list(divide(batch, size))
        self._terms: Called | None = own_terms  # None: a mean over samples
        self._counts_terms = own_split is not None
        self._iterated = SpectralVectors(trainer.model)
        self._before = StepSnapshot(
            trainer.model, trainer.engine.optimizing.optimizers[0], trainer.engine.run.techniques
        )
        self._looked = 0  # accumulation windows whose first batch was split
        self._differed = False  # whether a batch with different labels was checked

    def fixed(self, batch: Any, batch_idx: int, first: bool) -> Any:
        """Run a batch in parts of the size that the flag gives."""
        parts = self.of(batch, self._size())
        self._begin(batch_idx, first)
        if len(parts) > 1 and first:
            self.look(batch)
        if self.exchange is not None:
            self.exchange.begin()
        if len(parts) == 1:
            return self.run(parts, batch_idx)
        with JoinedLog(self.board) as log:
            output = self.run(parts, batch_idx, log)
        log.log_merged()
        return output

    @property
    def board(self) -> LoggedValues:
        """The board that values are logged to."""
        board = self._trainer.engine.board
        assert board is not None
        return board

    def count(self, batch: Any) -> int:
        """Return the number of samples in a batch; at most that many if only its own `split_batch` can tell."""
        return samples_in(batch) or (int(self._terms(batch)) if self._counts_terms and self._terms else 0)

    def of(self, batch: Any, size: int) -> list[_Part]:
        """Return the parts of a batch, without those whose weight is 0."""
        parts = list(self._split(batch, size))
        if len(parts) == 1:
            return [_Part(batch, 1.0, 0)]
        counts = self._counts(parts, batch, size)
        together = zip(parts, self._shares(parts, counts), counts, strict=True)
        return [_Part(part, share, count) for part, share, count in together if share]

    def _counts(self, parts: list[Any], batch: Any, size: int) -> list[int]:
        """Return the samples of each part, from the cuts: a list of one entry may look like something else."""
        if self._counts_terms:
            return [samples_in(part) for part in parts]
        samples = samples_in(batch)
        return [min(size, samples - start) for start in range(0, samples, size)][: len(parts)]

    def _begin(self, batch_idx: int, first: bool) -> None:
        """Clear gradients at the start of an accumulation window."""
        if first and not self._trainer.engine.optimizing.skips_backward:
            self.clear(batch_idx)

    def keep(self, batch_idx: int, first: bool) -> StepSnapshot:
        """Begin a batch, and return the saved state from before it."""
        self._begin(batch_idx, first)
        self._before.take()
        return self._before

    def run(self, parts: list[_Part], batch_idx: int, log: JoinedLog | None = None) -> Any:
        """Run the parts one after the other; return what training_step would return for the whole batch."""
        outputs = []
        if len(parts) > 1:
            self._iterated.take()
        for place, (part, share, _) in enumerate(parts):
            if place:
                self._iterated.put_back()
            if log is not None:
                log.begin_part(share)
            if self.exchange is not None and place == len(parts) - 1 and not self.tries:
                self.exchange.last()
            output = self._differentiate(part, share, batch_idx)
            if len(parts) == 1:
                return output
            outputs.append(without_graph(output))
        losses = [loss_of(output) for output in outputs]
        if all(loss is None for loss in losses):
            self._trainer.say(
                "microbatch: training_step gave None for each part of a batch, so nothing is learnt from it; if it goes"
                " by the number of samples (a last, smaller batch), leave that batch out in the loader: drop_last=True",
                once=True,
            )
            return None
        if any(loss is None for loss in losses):
            raise misconfigured(
                "training_step gave None for some parts of a batch and a loss for others: microbatch cannot tell what"
                " the whole batch would have given",
                "return None for a whole batch only, in on_train_batch_start or the loader",
            )
        return output_of(outputs, [part.samples for part in parts], [part.share for part in parts])

    def _differentiate(self, part: Any, share: float, batch_idx: int) -> Any:
        """Run training_step on a part, and the backward of its weighted loss; return the step's output."""
        trainer = self._trainer
        trainer.model.__dict__["_current_fx_name"] = "training_step"
        output = self.step(part, batch_idx)
        loss = loss_of(output)
        if loss is None or trainer.engine.optimizing.skips_backward:
            return output
        every = trainer.config.accumulate_grad_batches
        loss = loss if every == 1 else loss / every
        self._backward(loss if share == 1.0 else loss * share)
        return output

    def _shares(self, parts: list[Any], counts: list[int]) -> list[float]:
        """Return the weight of each part's loss: by the terms that it is a mean over, or by its samples."""
        return _shares_of(counts if self._terms is None else [float(self._terms(part)) for part in parts])

    def look(self, batch: Any) -> None:
        """Check that parts add up, at the first batch that is split and, ever more rarely, at later ones.

        At the 4th, the 16th and so on, since sentences of the first batch may all have the same length; and at the
        first batch whose labels differ. Call it at the beginning of an accumulation window, when no gradients must be
        kept.
        """
        self._looked += 1
        differ = not self._differed and not self._counts_terms and labels_differ(batch)
        self._differed |= differ
        if differ or (self._looked & (self._looked - 1) == 0 and self._looked.bit_length() % 2):
            self.check(batch)

    def check(self, batch: Any, gradients: bool = True) -> None:
        """Compare samples in parts with the same samples in other parts: the loss, and its gradients.

        Args:
            batch: The batch to take samples from.
            gradients: Whether to compare gradients. Losses alone need less memory, which may just have run out.

        Raises:
            HastenError: The parts do not add up.
        """
        with (
            without_noise()
        ):  # off during the check: `hasten check` runs a training with added noise to learn its rounding
            result = self._inspected(batch, gradients and not self._trainer.engine.optimizing.skips_backward)
        if result.wrong:
            over = "samples" if self._terms is None else "what loss_terms counts"
            raise misconfigured(
                f"microbatch: {result.wrong}: training_step does not return a mean over {over}",
                result.fix
                or "return a mean over the samples; over something else (tokens that are not padding), define"
                " loss_terms(self, batch) in the module: how many terms the mean of this batch is over. A loss that"
                " compares the samples of a batch (contrastive) cannot be computed in parts",
            )
        if gradients and not result.gradients and self._terms is None:
            self._trainer.say(
                "microbatch: parts count by their samples, and whether their gradients add up could not be seen (random"
                " numbers, or memory); a loss that is a mean over tokens, or anything else, needs loss_terms(self,"
                " batch) in the module",
                once=True,
            )

    def _inspected(self, batch: Any, gradients: bool) -> PartsInspection:
        """Return the result of a check, and restore the state from before it."""
        groupings = self._groupings(batch)
        if len(groupings) < 2:
            return PartsInspection("", False)
        compiled = [
            technique
            for technique in self._trainer.engine.run.techniques
            if technique.name == "compile" and technique.active
        ]
        for technique in compiled:  # it would compile for the shapes of the groups too
            technique.off()
        self._before.take()
        try:
            with (
                JoinedLog(self.board),
                self.exchange.nothing() if self.exchange is not None else contextlib.nullcontext(),
            ):
                return look(self._trainer, self._before, self.step, groupings, gradients, self._terms is None)
        finally:
            self._before.put_back()
            for technique in compiled:
                technique.on()

    def _groupings(self, batch: Any) -> list[list[Group]]:
        """Return the same samples grouped in several ways; no part is larger than those of a real step."""
        size = max(2, self._size())
        if self._counts_terms:  # only the module's split_batch can cut it, in order
            cuts = [
                self._split(batch, width) for width in sorted({size, (size + 1) // 2, max(1, size // 3)}, reverse=True)
            ]
            cuts = [parts for place, parts in enumerate(cuts) if not place or len(parts) != len(cuts[place - 1])]
            return [self._grouped(parts, _places(parts), _itself) for parts in cuts]
        rows = groupings(self.count(batch), size)
        return [self._grouped(parts, parts, functools.partial(chosen, batch)) for parts in rows]

    def _grouped(self, parts: list[Any], rows: Sequence[Sequence[int]], make: Called) -> list[Group]:
        """Return groups that are made when they are needed, with their weights."""
        shares = _shares_of(
            [
                len(places) if self._terms is None else float(self._terms(make(part)))
                for part, places in zip(parts, rows, strict=True)
            ]
        )
        together = zip(parts, shares, rows, strict=True)
        return [Group(functools.partial(make, part), share, places) for part, share, places in together if share]

    def _size(self) -> int:
        """Return the current size of parts; 2 before "auto" has found one."""
        flag = self._trainer.config.microbatch
        return flag if isinstance(flag, int) else self._trainer.progress.microbatch or 2


def _itself(part: Any) -> Any:
    """Return a part that is made already."""
    return part


def _places(parts: list[Any]) -> list[range]:
    """Return the indices of the samples of parts that are in order."""
    ends = list(itertools.accumulate(map(samples_in, parts)))
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _shares_of(terms: Sequence[float]) -> list[float]:
    """Return numbers of terms as shares that add up to 1; equal shares if there are no terms."""
    total = math.fsum(terms)
    return [count / total for count in terms] if total else [1.0 / len(terms)] * len(terms)


class _Tried:
    """Runs a batch whole, or in parts as large as memory has allowed so far, and halves them when it runs out.

    Ranks agree after each attempt, before anything but buffers is exchanged: either all of them are done, or all repeat
    it.
    """

    def __init__(self, trainer: Trainer, parts: _Parts) -> None:
        self._trainer, self._parts = trainer, parts

    def __call__(self, batch: Any, batch_idx: int, first: bool) -> Any:
        parts, progress = self._parts, self._trainer.progress
        before = parts.keep(batch_idx, first)
        if first and progress.microbatch and parts.count(batch) > progress.microbatch:
            parts.look(batch)
        exchange = parts.exchange
        if exchange is not None:
            exchange.begin()
        while True:
            size = min(progress.microbatch or _FINISHED, parts.count(batch) or _FINISHED)
            log = JoinedLog(parts.board)
            output, error = self._try(batch, batch_idx, size, log)
            # On failure, propose half the size, rounded up; 0: a single sample does not fit.
            agreed, have = self._agree(_FINISHED if error is None else size // 2 + size % 2 if size > 1 else 0)
            if agreed == _FINISHED:
                if exchange is not None:
                    exchange.end(have)
                before.drop()
                log.log_merged()
                return output
            if agreed == 0:
                raise HastenError(
                    f"memory runs out with a single sample at a time{'' if error is None else f': {error}'}",
                    'activation_checkpointing=True or precision="bf16-mixed" need less; so does a smaller model',
                )
            output = None
            free_memory()
            before.put_back()
            if exchange is not None:
                exchange.restart()
            self._go_on_with(agreed, batch)

    def _try(self, batch: Any, batch_idx: int, size: int, log: JoinedLog) -> tuple[Any, str | None]:
        """Return the output of training_step and None, or None and the message of an out-of-memory error.

        The error itself is dropped here, and with its frames the activations that they keep alive.
        """
        before = versions(tensors(batch))
        try:
            is_whole = size >= self._parts.count(batch)
            parts = [_Part(batch, 1.0, 0)] if is_whole else self._parts.of(batch, size)
            with log:
                return self._parts.run(parts, batch_idx, log), None
        except HastenError:
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if not self._parts.count(batch):
                split(batch, 1)  # raises an error: the number of samples is unknown
            if versions(tensors(batch)) != before:
                raise HastenError(
                    "memory ran out, and training_step had changed its batch in place by then, so that it cannot be"
                    " tried again with fewer samples",
                    "write x = x / 255 in place of x /= 255; or give microbatch a number",
                ) from error
            return None, str(error).splitlines()[0] if str(error) else type(error).__name__

    def _agree(self, proposal: int) -> tuple[int, list[bool]]:
        """Return the smallest proposal of all ranks, and which parameters have a gradient on any rank."""
        exchange = self._parts.exchange
        return (proposal, []) if exchange is None else exchange.agree(proposal)

    def _go_on_with(self, size: int, batch: Any) -> None:
        """Compute fewer samples at a time from now on; the first time, check that parts add up."""
        trainer = self._trainer
        first = trainer.progress.microbatch is None
        trainer.progress.microbatch = size
        trainer.say(f'microbatch="auto": memory ran out; {size} samples are computed at a time from here on')
        if first:
            self._parts.check(batch, gradients=False)
