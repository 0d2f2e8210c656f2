"""The forward and backward of one batch, in parts; with "auto" in smaller ones where memory runs out."""

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
from hasten.trainer.microbatch.before import Before, free_memory, versions
from hasten.trainer.microbatch.iterated import Iterated
from hasten.trainer.microbatch.joined import Log, output_of, without_graph
from hasten.trainer.microbatch.means import Group, Look, groupings, look
from hasten.trainer.microbatch.refusals import refuse
from hasten.trainer.microbatch.splitting import chosen, labels_differ, samples_in, split
from hasten.trainer.outputs import loss_of

if TYPE_CHECKING:
    from hasten.trainer.hooks import Hooks
    from hasten.trainer.trainer import Trainer

Called = Callable[..., Any]

_THROUGH = 1 << 40  # what a rank says that is through with its batch: more samples than there are


def in_parts(trainer: Trainer, hooks: Hooks, training_step: Called, clear: Called, backward: Called) -> Called:
    """Return `(batch, batch_idx, first)` -> what training_step gives for all; gradients are those of the whole batch.

    Args:
        trainer: Its flag `microbatch` says how.
        hooks: Among them the module's `split_batch` and `loss_terms`.
        training_step: `(batch, batch_idx)` -> a loss that is a mean over the batch.
        clear: `(batch_idx)`, which drops gradients at the start of a window.
        backward: `(loss)`, which differentiates.

    Raises:
        HastenError: Parts would not come to the gradient of the whole.
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
    """A part of a batch: how much its loss counts (the sum over the parts is 1), and how many samples it has."""

    batch: Any
    share: float
    samples: int


class _Parts:
    """Runs a batch in parts.

    Args:
        As for `in_parts`.
    """

    def __init__(self, trainer: Trainer, hooks: Hooks, training_step: Called, clear: Called, backward: Called) -> None:
        self.tries = trainer.config.microbatch == "auto"  # and exchanges gradients when all ranks are through
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
        self._iterated = Iterated(trainer.model)
        self._before = Before(trainer.model, trainer.engine.optimizing.optimizers[0], trainer.engine.run.techniques)
        self._looked = 0  # windows whose first batch was split
        self._differed = False  # whether samples of several labels were looked at

    def fixed(self, batch: Any, batch_idx: int, first: bool) -> Any:
        """Differentiate in parts of so many samples as the flag says."""
        parts = self.of(batch, self._size())
        self._begin(batch_idx, first)
        if len(parts) > 1 and first:
            self.look(batch)
        if self.exchange is not None:
            self.exchange.begin()
        if len(parts) == 1:
            return self.run(parts, batch_idx)
        with Log(self.board) as log:
            output = self.run(parts, batch_idx, log)
        log.done()
        return output

    @property
    def board(self) -> LoggedValues:
        """Where values are logged."""
        board = self._trainer.engine.board
        assert board is not None
        return board

    def count(self, batch: Any) -> int:
        """Return how many samples a batch has; where its own `split_batch` alone can tell, at most so many."""
        return samples_in(batch) or (int(self._terms(batch)) if self._counts_terms and self._terms else 0)

    def of(self, batch: Any, size: int) -> list[_Part]:
        """Return the parts of a batch; those that do not count are left out."""
        parts = list(self._split(batch, size))
        if len(parts) == 1:
            return [_Part(batch, 1.0, 0)]
        counts = self._counts(parts, batch, size)
        together = zip(parts, self._shares(parts, counts), counts, strict=True)
        return [_Part(part, share, count) for part, share, count in together if share]

    def _counts(self, parts: list[Any], batch: Any, size: int) -> list[int]:
        """Return how many samples each part has: as it was cut, since a list of one may look like something else."""
        if self._counts_terms:
            return [samples_in(part) for part in parts]
        whole = samples_in(batch)
        return [min(size, whole - start) for start in range(0, whole, size)][: len(parts)]

    def _begin(self, batch_idx: int, first: bool) -> None:
        if first and not self._trainer.engine.optimizing.skips_backward:
            self.clear(batch_idx)

    def keep(self, batch_idx: int, first: bool) -> Before:
        """Begin a batch, and return what it stands on."""
        self._begin(batch_idx, first)
        self._before.take()
        return self._before

    def run(self, parts: list[_Part], batch_idx: int, log: Log | None = None) -> Any:
        """Run the parts, one after the other; what training_step would give for all of them together."""
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
        """Return how much each part's loss counts: by the terms that it is a mean over, or its samples."""
        return _shares_of(counts if self._terms is None else [float(self._terms(part)) for part in parts])

    def look(self, batch: Any) -> None:
        """Look whether parts add up, at the first batch that is split and, ever more rarely, at later ones.

        The 4th, the 16th: sentences of the first may all be of one length. And at the first whose labels differ.
        Call it at the beginning of a window, when there are no gradients that would have to be kept.
        """
        self._looked += 1
        differ = not self._differed and not self._counts_terms and labels_differ(batch)
        self._differed |= differ
        if differ or (self._looked & (self._looked - 1) == 0 and self._looked.bit_length() % 2):
            self.check(batch)

    def check(self, batch: Any, gradients: bool = True) -> None:
        """Compare samples in parts with the same samples in other parts: the loss, and its gradients.

        Args:
            batch: What they are taken of.
            gradients: Whether to compare them; memory may just have run out, which losses need less of.

        Raises:
            HastenError: They do not add up.
        """
        with without_noise():  # under which `hasten check` runs a training to learn its rounding
            found = self._found(batch, gradients and not self._trainer.engine.optimizing.skips_backward)
        if found.wrong:
            over = "samples" if self._terms is None else "what loss_terms counts"
            raise misconfigured(
                f"microbatch: {found.wrong}: training_step does not return a mean over {over}",
                found.fix
                or "return a mean over the samples; over something else (tokens that are not padding), define"
                " loss_terms(self, batch) in the module: how many terms the mean of this batch is over. A loss that"
                " compares the samples of a batch (contrastive) cannot be computed in parts",
            )
        if gradients and not found.gradients and self._terms is None:
            self._trainer.say(
                "microbatch: parts count by their samples, and whether their gradients add up could not be seen (random"
                " numbers, or memory); a loss that is a mean over tokens, or anything else, needs loss_terms(self,"
                " batch) in the module",
                once=True,
            )

    def _found(self, batch: Any, gradients: bool) -> Look:
        groupings = self._groupings(batch)
        if len(groupings) < 2:
            return Look("", False)
        compiled = [one for one in self._trainer.engine.run.techniques if one.name == "compile" and one.active]
        for technique in compiled:  # which would compile for these two shapes as well
            technique.off()
        self._before.take()
        try:
            with Log(self.board), self.exchange.nothing() if self.exchange is not None else contextlib.nullcontext():
                return look(self._trainer, self._before, self.step, groupings, gradients, self._terms is None)
        finally:
            self._before.put_back()
            for technique in compiled:
                technique.on()

    def _groupings(self, batch: Any) -> list[list[Group]]:
        """Return the same samples in parts of several kinds, none larger than what is computed together anyway."""
        size = max(2, self._size())
        if self._counts_terms:  # only the module can cut it, in order
            cuts = [self._split(batch, one) for one in sorted({size, (size + 1) // 2, max(1, size // 3)}, reverse=True)]
            cuts = [parts for place, parts in enumerate(cuts) if not place or len(parts) != len(cuts[place - 1])]
            return [self._grouped(parts, _places(parts), _itself) for parts in cuts]
        rows = groupings(self.count(batch), size)
        return [self._grouped(parts, parts, functools.partial(chosen, batch)) for parts in rows]

    def _grouped(self, parts: list[Any], rows: Sequence[Sequence[int]], make: Called) -> list[Group]:
        """Return parts that are made when they are needed, and how much each counts."""
        shares = _shares_of(
            [
                len(one) if self._terms is None else float(self._terms(make(part)))
                for part, one in zip(parts, rows, strict=True)
            ]
        )
        together = zip(parts, shares, rows, strict=True)
        return [Group(functools.partial(make, part), share, places) for part, share, places in together if share]

    def _size(self) -> int:
        flag = self._trainer.config.microbatch
        return flag if isinstance(flag, int) else self._trainer.progress.microbatch or 2


def _itself(part: Any) -> Any:
    return part


def _places(parts: list[Any]) -> list[range]:
    """Return the places in the batch of the samples of parts that are in order."""
    ends = list(itertools.accumulate(map(samples_in, parts)))
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _shares_of(terms: Sequence[float]) -> list[float]:
    total = math.fsum(terms)
    return [one / total for one in terms] if total else [1.0 / len(terms)] * len(terms)


class _Tried:
    """Runs whole batches, or parts as large as memory allowed so far, and halves them where it runs out.

    Ranks agree after each try, before anything but buffers is exchanged: all of them are through, or all try again.
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
            size = min(progress.microbatch or _THROUGH, parts.count(batch) or _THROUGH)
            log = Log(parts.board)
            output, error = self._try(batch, batch_idx, size, log)
            agreed, have = self._agree(_THROUGH if error is None else size // 2 + size % 2 if size > 1 else 0)
            if agreed == _THROUGH:
                if exchange is not None:
                    exchange.end(have)
                before.drop()
                log.done()
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
                exchange.again()
            self._go_on_with(agreed, batch)

    def _try(self, batch: Any, batch_idx: int, size: int, log: Log) -> tuple[Any, str | None]:
        """Return what training_step gave, and None; or what was said where memory ran out.

        The error itself is let go here, and with its frames the activations that they hold.
        """
        before = versions(tensors(batch))
        try:
            whole = size >= self._parts.count(batch)
            parts = [_Part(batch, 1.0, 0)] if whole else self._parts.of(batch, size)
            with log:
                return self._parts.run(parts, batch_idx, log), None
        except HastenError:
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if not self._parts.count(batch):
                split(batch, 1)  # raises: nobody knows how many samples there are
            if versions(tensors(batch)) != before:
                raise HastenError(
                    "memory ran out, and training_step had changed its batch in place by then, so that it cannot be"
                    " tried again with fewer samples",
                    "write x = x / 255 in place of x /= 255; or give microbatch a number",
                ) from error
            return None, str(error).splitlines()[0] if str(error) else type(error).__name__

    def _agree(self, proposal: int) -> tuple[int, list[bool]]:
        exchange = self._parts.exchange
        return (proposal, []) if exchange is None else exchange.agree(proposal)

    def _go_on_with(self, size: int, batch: Any) -> None:
        """Compute fewer samples at a time from here on, if that comes to the same."""
        trainer = self._trainer
        first = trainer.progress.microbatch is None
        trainer.progress.microbatch = size
        trainer.say(f'microbatch="auto": memory ran out; {size} samples are computed at a time from here on')
        if first:
            self._parts.check(batch, gradients=False)
