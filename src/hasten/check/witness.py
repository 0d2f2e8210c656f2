"""Witness: observe a training's state at each moment, and record it or compare it with another run's record."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hasten.check import state
from hasten.check.difference import WeightStep, difference_in_words, explained_by_gradient, measure_difference
from hasten.check.options import RECORDS, WitnessOptions
from hasten.check.track import Moment, Track
from hasten.data import rng
from hasten.evidence.parts import parts
from hasten.files import write_whole

_MOST_OF_A_BATCH = 64 << 20  # bytes: larger batches are not stored for runs that draw other ones
_MOST_OF_AN_OUTPUT = 1 << 20  # elements of a validation output that are kept


class Diverged(Exception):  # noqa: N818 - a signal, not an error: the run has shown a difference and can end
    """Signal that the run differs from its track. The first difference is noted."""


class Witness:
    """Observes one run of a training.

    Args:
        options: Whether to record a track or follow one, and how.
        leave: Ends the process, once a run that must be exact differs.
    """

    def __init__(self, options: WitnessOptions, leave: Callable[[], None]) -> None:
        self.options = options
        self.records = options.role == RECORDS
        self.track = Track(options.track)
        self.names = state.StateNames()
        self.active = True
        # Number of the process that created this witness. Processes of `mp.spawn` have other numbers later; a fork of
        # `Trainer.check` creates its own witness, so there it is the run's number.
        self._born_in = "-".join(map(str, multiprocessing.current_process()._identity))
        self._claimed: bool | None = None  # whether the track belongs to this process; None until it trains
        self.failed = ""  # error of the check itself
        self._leave = leave
        self._losses: list[torch.Tensor] = []
        self._weights_before: dict[str, torch.Tensor] = {}
        self._gradients: dict[str, torch.Tensor] | None = None
        self._counts = {"batch": 0, "step": 0, "validation": 0}
        self._step_bytes = 0
        self._stride = 1
        self.first_difference: dict[str, Any] | None = None  # the first difference
        self.measured: list[dict[str, Any]] = []  # for each moment with values: name -> result of `measure_difference`
        self.moved: dict[str, str] = {}  # random stream -> place of its first difference
        self.roundoff = 2.0**-23  # of the narrowest dtype that the script itself computes in
        self.files_read: set[str] = set()  # files of an earlier run that the script opened

    # -- events of the training ----------------------------------------------------------------------------

    def batch(self, loader: str, indices: Any, batch: Any) -> Any:
        """Note a batch. Return the batch to continue with: this one, or the track's."""
        if not self._claims():
            return batch
        texts, digests = state.random_states(), {}
        if indices is not None:
            texts["order of samples"] = repr(indices)
        leaves, texts["form of the batch"] = parts(batch)
        for number, leaf in enumerate(leaves):
            digests.update(_samples(number, leaf))
        moment = Moment("batch", self._next_place("batch", f"of {loader}"), texts, digests)
        if self.records:
            moment.carried, moment.random = _pickled(batch), rng.state()
            self.track.write(moment)
            return batch
        return self._follow(moment, batch)

    def backward(self, roots: Any) -> None:
        """Note the losses from which a backward starts."""
        for root in (roots,) if isinstance(roots, torch.Tensor) else roots:
            if isinstance(root, torch.Tensor) and root.numel() == 1:
                self._losses.append(root.detach().reshape(()).clone())

    def after_backward(self) -> None:
        """Note a step if there is no optimizer: then the training updates its weights by hand after each backward."""
        if not self.names.optimizers:
            self._weights_before = {}
            self.after_step(None)

    def before_step(self, closure: bool) -> None:
        """Note weights and gradients before a step. With a closure, gradients exist only after it."""
        self._weights_before = {
            name: state.cpu_copy(value) for name, value in state.weights(self.names, state.BEFORE).items()
        }
        self._gradients = None if closure else self._cpu_copies(state.gradients(self.names))

    def after_step(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Note the state after an optimizer's step; None in a training without an optimizer."""
        gradients = self._gradients
        values = dict(self._weights_before)
        values.update(gradients if gradients is not None else self._cpu_copies(state.gradients(self.names)))
        values.update({f"loss: {number}": loss.cpu() for number, loss in enumerate(self._losses)})
        values.update(self._cpu_copies(state.weights(self.names)))
        values.update(self._cpu_copies(state.buffers(self.names)))
        values.update(self._cpu_copies(state.optimizer_state(self.names)))
        self._losses, self._weights_before, self._gradients = [], {}, None
        texts = {**state.random_states(), **state.options_of(self.names)}
        several = optimizer is not None and len(self.names.optimizers) > 1
        which = f"of optimizer {self.names.number(optimizer)}" if several and optimizer is not None else ""
        self._note(Moment("step", self._next_place("step", which), texts, values=values))

    def validation(self, model: torch.nn.Module, output: Any) -> None:
        """Note a model's output in eval mode or without gradients."""
        leaves, form = parts(output)
        tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        name = next((name for name, module in self.names.models.items() if module is model), type(model).__name__)
        values = {
            f"output {number} of {name}": state.cpu_copy(_subsampled(tensor)) for number, tensor in enumerate(tensors)
        }
        texts = {"form of the output": form}
        self._note(Moment("validation", self._next_place("validation", f"of {name}"), texts, values=values))

    def end(self, cut: bool) -> None:
        """Note the final state, and write the result. `cut`: the check's bounds ended the run."""
        if not self.active:
            return
        result = Path(self.options.result)
        if not any(self._counts.values()) and any(result.parent.glob(f"{result.name}*")):
            self.active = False  # a launcher, whose child process has trained and written a result
            return
        self._leave = lambda: None  # the process is ending anyway, with its own exit code
        values = {**self._cpu_copies(state.weights(self.names)), **self._cpu_copies(state.buffers(self.names))}
        with contextlib.suppress(Diverged):
            self._note(Moment("end", "the end", state.random_states(), values=values, cut=cut))
        self.finish()

    def finish(self) -> None:
        """Write the result, and note nothing after that."""
        self.active = False
        if self.records:
            self.track.close()
        result = {
            "pid": os.getpid(),
            "failed": self.failed,
            "first": self.first_difference,
            "moved": self.moved,
            "counts": self._counts,
            "measured": self.measured,
            "roundoff": self.roundoff,
            "stride": self._stride,
            "read": sorted(self.files_read),
        }
        write_whole(self.options.result, json.dumps(result), durable=False)

    def computes_in(self, dtype: torch.dtype) -> None:
        """Note a dtype in which a model computes."""
        if dtype in (torch.bfloat16, torch.float16):
            self.roundoff = max(self.roundoff, 2.0**-8 if dtype is torch.bfloat16 else 2.0**-10)

    # -- recording and following ----------------------------------------------------------------------------

    def _claims(self) -> bool:
        """Claim the track when this process first trains. Return whether it belongs to this process.

        A script may start further processes that train too. Those of `mp.spawn` have tracks of their own, by their
        number; of other processes only the first that trains is compared.
        """
        if self._claimed is None:
            number = "-".join(map(str, multiprocessing.current_process()._identity))
            if number != self._born_in:
                track, result = f"{self.options.track}-p{number}", f"{self.options.result}-p{number}"
                self.options = replace(self.options, track=track, result=result)
                self.track = Track(track)
            result_path = Path(self.options.result)
            try:
                result_path.with_name(f"claims-{result_path.name}").touch(exist_ok=False)
                self._claimed = True
            except FileExistsError:
                self._claimed = self.active = False
        return self._claimed

    def _note(self, moment: Moment) -> None:
        if not self._claims():
            return
        assert moment.values is not None
        if self.records or self.options.exact:  # otherwise values are measured, not compared by digest
            moment.digests = {name: state.digest(value) for name, value in moment.values.items()}
        if not self.records:
            self._follow(moment, None)
            return
        if not self._keeps_values(moment):
            moment.values = None
        moment.random = rng.state()
        self.track.write(moment)

    def _keeps_values(self, moment: Moment) -> bool:
        """Return whether to keep a moment's values: in a large training, only every n-th step's are kept."""
        if moment.kind != "step" or moment.values is None:
            return True
        if not self._step_bytes:
            self._step_bytes = sum(value.nbytes for value in moment.values.values() if not value.is_sparse)
            track_bytes = self._step_bytes * self.options.expected_steps
            self._stride = max(1, -(-track_bytes // self.options.most_bytes))
        return (self._counts["step"] - 1) % self._stride == 0

    def _follow(self, moment: Moment, batch: Any) -> Any:
        recorded = self.track.read()
        if recorded is not None and recorded.kind == "end" != moment.kind and recorded.cut:
            self._quit()  # the check's bounds ended the plain run at an earlier moment
        if recorded is None or recorded.kind != moment.kind:
            recorded_place = "it has ended" if recorded is None else recorded.place
            self._note_difference(
                moment.place, "course of the training", f"as it is: {recorded_place}; under the plan: {moment.place}"
            )
        assert recorded is not None
        self._compare_texts(moment, recorded)
        if self.options.redraws and recorded.random is not None:
            rng.restore(recorded.random)
        if moment.kind == "batch":
            return self._follow_batch(moment, recorded, batch)
        if self.options.exact:
            self._compare_bits(moment, recorded)
        elif (values := self.track.values()) is not None:
            self._measure(moment, values)
            self._go_on_from(values)
        return None

    def _compare_texts(self, moment: Moment, recorded: Moment) -> None:
        for name in (*recorded.texts, *(name for name in moment.texts if name not in recorded.texts)):
            plan_text, plain_text = moment.texts.get(name, "nothing"), recorded.texts.get(name, "nothing")
            if plan_text == plain_text:
                continue
            if self.options.redraws and name.startswith(("random state", "form of the batch")):
                self.moved.setdefault(name, moment.place)
                continue
            how = (
                "drew other numbers"
                if name.startswith("random")
                else f"as it is {plain_text}; under the plan {plan_text}"
            )
            self._note_difference(moment.place, name, how)

    def _follow_batch(self, moment: Moment, recorded: Moment, batch: Any) -> Any:
        differing = [name for name, digest in recorded.digests.items() if moment.digests.get(name) != digest]
        if not differing:
            return batch
        if not self.options.redraws:
            self._note_difference(moment.place, differing[0], "other values")
        self.moved.setdefault(differing[0].partition(" of ")[0], moment.place)
        if recorded.carried is None:
            self.failed = self.failed or "batches are too large, or of a kind, that cannot be carried over"
            return batch
        return pickle.loads(recorded.carried)

    def _compare_bits(self, moment: Moment, recorded: Moment) -> None:
        names = (*recorded.digests, *(name for name in moment.digests if name not in recorded.digests))
        for name in names:
            plan_digest, plain_digest = moment.digests.get(name), recorded.digests.get(name)
            if plan_digest == plain_digest:
                continue
            if plan_digest is None or plain_digest is None:
                self._note_difference(
                    moment.place, name, "there only as it is" if plan_digest is None else "there only under the plan"
                )
            difference = "other bits"
            if moment.values is not None and (values := self.track.values()) is not None:
                difference = difference_in_words(measure_difference(moment.values[name], values[name]))
            self._note_difference(moment.place, name, difference)

    def _measure(self, moment: Moment, recorded_values: dict[str, torch.Tensor]) -> None:
        plan_values = moment.values or {}
        apart: dict[str, Any] = {}
        for name, plain_value in recorded_values.items():
            if name not in plan_values:
                self._note_difference(moment.place, name, "there only as it is")
            plain_before = self._reference_before(name, recorded_values)
            plan_before = None if plain_before is None else plan_values.get(name.replace(state.WEIGHT, state.BEFORE, 1))
            explained = None if plain_before is None else self._explained(name, plan_values, recorded_values)
            apart[name] = measure_difference(plan_values[name], plain_value, plan_before, plain_before, explained)
        if extra := next((name for name in plan_values if name not in recorded_values), None):
            self._note_difference(moment.place, extra, "there only under the plan")
        self.measured.append({"kind": moment.kind, "place": moment.place, "apart": apart})

    @staticmethod
    def _reference_before(name: str, recorded_values: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """Return a weight's value before the step, as a weight is judged by how far the step moved it; else None."""
        if not name.startswith(f"{state.WEIGHT}: "):
            return None
        return recorded_values.get(name.replace(state.WEIGHT, state.BEFORE, 1))

    def _explained(
        self, name: str, plan_values: dict[str, torch.Tensor], recorded_values: dict[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """Return where a weight's step differs no more than its gradient; None if there is no gradient to compare.

        Adam divides a gradient by its size, so where it is almost zero, rounding moves a whole step: in the first step
        by its sign, in the next ones by its share. Such elements are judged by their gradients alone.
        """
        plan, plain = _step_of(name, plan_values), _step_of(name, recorded_values)
        if plan is None or plain is None or len({tensor.shape for tensor in (*plan, *plain)}) > 1:
            return None
        # What noise moves sets the bound: nothing but steps that turned around is left out of it.
        return explained_by_gradient(plan, plain, only_turned=self.options.noise > 0)

    def _go_on_from(self, recorded_values: dict[str, torch.Tensor]) -> None:
        """Take over the track's weights, buffers and optimizer state, so that the next step is judged by itself."""
        current = {**state.weights(self.names), **state.buffers(self.names), **state.optimizer_state(self.names)}
        with torch.no_grad():
            for name, value in current.items():
                if name in recorded_values and value.shape == recorded_values[name].shape and not value.is_sparse:
                    # Equal tensors are not written to: a graph may still need them (a GAN's generator while the
                    # discriminator steps), and its backward would refuse a tensor that was changed in place.
                    if not torch.equal(state.local(value), recorded_values[name].to(value.device)):
                        state.local(value).copy_(recorded_values[name])

    def _note_difference(self, place: str, what: str, how: str) -> None:
        self.first_difference = self.first_difference or {"place": place, "what": what, "how": how}
        self._quit()

    def _quit(self) -> None:
        self.finish()
        self._leave()
        raise Diverged

    # -- helpers ----------------------------------------------------------------------------------------------

    def _next_place(self, kind: str, suffix: str) -> str:
        self._counts[kind] += 1
        label = {"batch": "batch", "step": "optimizer step", "validation": "validation forward"}[kind]
        return f"{label} {self._counts[kind]} {suffix}".strip()

    @staticmethod
    def _cpu_copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: state.cpu_copy(value) for name, value in tensors.items()}


def _step_of(weight: str, values: dict[str, torch.Tensor]) -> WeightStep | None:
    """Return a weight's step; None if it has no dense gradient."""
    keys = (weight.replace(state.WEIGHT, kind, 1) for kind in (state.GRADIENT, state.BEFORE, state.WEIGHT))
    tensors = [values[key] for key in keys if key in values and not values[key].is_sparse]
    return WeightStep(*tensors) if len(tensors) == len(WeightStep._fields) else None


def _samples(number: int, leaf: Any) -> dict[str, str]:
    """Return digests of a part of a batch, sample by sample, so that the first difference can be named."""
    if isinstance(leaf, torch.Tensor):
        if leaf.dim() and 0 < len(leaf) <= 65536 and not leaf.is_sparse:
            return {f"sample {index} of part {number}": state.digest(row) for index, row in enumerate(leaf)}
        return {f"part {number}": state.digest(leaf)}
    return {f"part {number}": repr(leaf)} if isinstance(leaf, int | float | str | bytes | None) else {}


def _subsampled(tensor: torch.Tensor) -> torch.Tensor:
    """Return every n-th element of a large output."""
    flat = tensor.reshape(-1)
    return tensor if flat.numel() <= _MOST_OF_AN_OUTPUT else flat[:: flat.numel() // _MOST_OF_AN_OUTPUT + 1]


def _pickled(batch: Any) -> bytes | None:
    try:
        packed = pickle.dumps(batch, protocol=5)
    except Exception:  # a batch that cannot be pickled is not stored; reported if it turns out to be needed
        return None
    return packed if len(packed) <= _MOST_OF_A_BATCH else None
