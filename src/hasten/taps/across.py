"""Run a script that was written for one device on several: the taps of `hasten run --devices N`.

Each rank runs the whole script. Every training batch is split among the ranks, and after each backward the gradients
are averaged over all ranks. So weights stay identical on all ranks, and with them everything that the script decides by
them. The ranks meet (a collective that checks that all of them do the same thing) before each joint operation. A script
that cannot be run this way ends with an error: unlike other taps, these must not be skipped.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hasten import messages
from hasten.data.sampler_order import why_not
from hasten.errors import HastenError
from hasten.evidence import Phase, facts
from hasten.parallel.averaging import Averaging
from hasten.parallel.batch_shares import LoaderState, Pass, SharedBatches, shuffles
from hasten.parallel.meeting import Meeting, MeetingTopic
from hasten.parallel.same_data import fingerprint
from hasten.parallel.same_weights import SameWeights
from hasten.parallel.sum_over_batch import sum_over_batch
from hasten.parallel.world import World, has_failed, mark_failed
from hasten.taps.fed import FedBatches, why_not_shared

if TYPE_CHECKING:
    from hasten.taps.config import RankOptions
    from hasten.taps.protocol import Session

_TORCHRUN = "write it for several devices, and start it by `hasten run torchrun --nproc-per-node N ...`"
_BATCH_NORM = nn.modules.batchnorm._BatchNorm


class CarriedRank:
    """One rank's share of the work: splits batches, averages gradients and keeps weights identical across ranks.

    Args:
        session: The process's session.
        options: How the script is run on several devices.
    """

    def __init__(self, session: Session, options: RankOptions) -> None:
        self.session = session
        self.options = options
        self.joining = False
        self.optimizers = 0
        self.backwards = 0
        self.fed_batches = FedBatches()
        self._modules: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self._meeting: Meeting | None = None
        self._averaging: Averaging | None = None
        self._weights: SameWeights | None = None
        self._fingerprints: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._early_parameters: list[torch.Tensor] = []  # parameters of optimizers built before the ranks met
        self._in_backward = False  # whether a backward is running
        self._process = os.getpid()
        self._refusal: HastenError | None = None

    # -- the ranks meet at their first joint operation ------------------------------------------------

    @property
    def in_rank_process(self) -> bool:
        """Whether this is the rank's own process, not a DataLoader worker forked from it."""
        return os.getpid() == self._process

    def meeting(self) -> Meeting:
        """Return the meeting of all ranks; the first call waits for every rank.

        Raises:
            HastenError: The script trains in a thread, or was refused earlier and continued.
        """
        if self._meeting is None:
            self.joining = True
            try:
                on_gpu = bool(self.options.gpus)
                device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
                world = World.from_environment("nccl" if on_gpu else "gloo", device)
            finally:
                self.joining = False
            self._meeting = Meeting(world)
            atexit.register(self._end)  # runs before the world's own handler, which closes the process group
            self._averaging = Averaging(self._meeting)
            self._weights = SameWeights(self._meeting)
            early, self._early_parameters = self._early_parameters, []
            self.add(early)
        if threading.current_thread() is not threading.main_thread():
            raise self.refuse("the script trains in a thread of its own", "train in the main thread")
        if self._refusal is not None:  # the script caught the error and continued
            raise self._refusal
        return self._meeting

    def _end(self) -> None:
        """Meet the other ranks at the end of the script.

        If another rank still trains, both get an error, instead of waiting for each other forever.
        """
        if not self.in_rank_process or self._meeting is None or has_failed():
            return
        try:
            self._meeting.meet(MeetingTopic.END)
        except (HastenError, RuntimeError):  # another rank still trains (its script gets the error there), or failed
            mark_failed()
            return
        try:
            self.weights.agree(self.averaging.averaged)
        except HastenError as error:
            if self._meeting.world.is_zero:
                messages.tell(f"hasten: {error}")

    @property
    def world(self) -> World | None:
        """The process group of the ranks; None before they have met."""
        return None if self._meeting is None else self._meeting.world

    @property
    def averaging(self) -> Averaging:
        """The averaging of this rank's gradients with the other ranks'."""
        self.meeting()
        assert self._averaging is not None
        return self._averaging

    @property
    def weights(self) -> SameWeights:
        """The part that keeps weights identical on all ranks."""
        self.meeting()
        assert self._weights is not None
        return self._weights

    def refuse(self, reason: str, fix: str) -> HastenError:
        """Return an error to raise, and keep it: if the script catches it, the next joint operation raises it again."""
        self._refusal = HastenError(f"this script cannot be carried to several devices: {reason}", fix)
        return self._refusal

    # -- what is built ---------------------------------------------------------------------------------

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Register parameters to keep identical on all ranks, and whose gradients to average."""
        if self._meeting is None:
            self._early_parameters += parameters
        else:
            self.weights.late(self.averaging.add(parameters))

    def before_first_forward(self, module: nn.Module) -> None:
        """Send rank 0's weights of a module to all ranks; called before an outermost module's first forward."""
        if not self.in_rank_process:
            return
        self._modules[module] = None
        self.weights.watch(module)
        self.averaging.add(module.parameters())
        self.meeting().meet(MeetingTopic.MODEL)
        self.weights.spread([*module.parameters(), *module.buffers()])

    def weights_loaded(self, module: nn.Module) -> None:
        """Send rank 0's weights to all ranks again, after the script loaded a module's weights."""
        if self._meeting is not None and self.in_rank_process:
            self.weights.late([*module.parameters(), *module.buffers()])

    # -- passes and batches ----------------------------------------------------------------------------

    def sampler(self, loader: Any, plain: Any) -> Any:
        """Return the sampler that gives a loader's iterators this rank's share of each batch.

        The plain sampler is returned in a worker, and for a loader whose batches cannot be shared out.
        """
        if not self.in_rank_process or why_not_shared(loader):
            return plain
        state = loader.__dict__.setdefault("_hasten_across", LoaderState(facts.caller()))
        try:
            samples = len(loader.dataset)
        except TypeError:  # a dataset without `__len__`: the script's own sampler knows its indices
            samples = 0
        per_device = self.options.batch == "per-device"
        size, ahead = int(os.environ["WORLD_SIZE"]), not why_not(plain)
        return SharedBatches(plain, state, self.meeting, self._pass, size, per_device, samples, ahead)

    def _pass(self, state: LoaderState, batching: Any) -> Pass:
        """Start a pass, assuming a validation if gradients are off or every model is in eval mode."""
        models = list(self._modules)
        validates = not torch.is_grad_enabled() or (bool(models) and not any(model.training for model in models))
        return Pass(state, validates, shuffles(batching) and self.optimizers > 0)

    def pass_begins(self, loader: Any) -> None:
        """Check, at the start of a pass, that all ranks start it over the same data, and that weights still agree.

        Raises:
            HastenError: The dataset differs between ranks.
        """
        if (
            not self.meeting()
            .meet(MeetingTopic.PASS, at=self.fed_batches.count, pattern=self._fingerprint(loader.dataset))
            .same
        ):
            state = loader.__dict__.get("_hasten_across")
            at_line = f" at {state.where}" if state is not None and state.where else ""
            raise HastenError(
                f"The ranks have parted: the dataset of the DataLoader{at_line} does not hold the same on all of them.",
                "Each rank must read the same files in the same order, and split them alike: seed what splits or "
                "shuffles, and sort what lists a folder.",
                code=1,
            )
        self.weights.agree(self.averaging.averaged)

    def _fingerprint(self, dataset: Any) -> int:
        """Return a dataset's fingerprint, taken at its first pass."""
        cached: int | None = None
        with contextlib.suppress(TypeError):  # a list, say, cannot be weakly referenced
            cached = self._fingerprints.get(dataset)
            if cached is None:
                cached = self._fingerprints[dataset] = fingerprint(dataset)
        return fingerprint(dataset) if cached is None else cached

    def _announce(self, state: LoaderState) -> None:
        """Tell the user, on rank 0, how a loader's batches are shared out."""
        world = self.meeting().world
        if not world.is_zero or self.session.config.quiet:
            return
        where = f"the loader at {os.path.basename(state.where)}" if state.where else "a loader"
        kind = "GPUs" if self.options.gpus else "processes on the CPU"
        step = f"{self.fed_batches.all_samples} samples a step"
        if self.options.batch == "global":
            message = f"{world.size} {kind} share each batch of {where}: {step}, as in the script"
        else:
            message = f"{world.size} {kind} take a batch each of {where}: {step}"
        note = (
            "; BatchNorm counts each one's own share"
            if any(isinstance(layer, _BATCH_NORM) for model in self._modules for layer in model.modules())
            else ""
        )
        messages.tell(f"hasten: {message}, {self.fed_batches.samples:g} on rank 0 (--batch {self.options.batch}){note}")

    # -- backward and step -----------------------------------------------------------------------------

    def backward(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run torch.autograd.backward, then average the gradients over the ranks."""
        # Activation checkpointing runs a backward inside the backward.
        if self._in_backward or not self.in_rank_process:
            return plain(*args, **kwargs)
        self._check_batches()
        while self.fed_batches.unannounced:  # not before: the message depends on the models, which are known by now
            self._announce(self.fed_batches.unannounced.pop())
        if not self.backwards:
            self._check_loss(args[0] if args else kwargs.get("tensors"))
        self.averaging.begins()
        self._in_backward = True
        try:
            result = plain(*args, **kwargs)
        finally:
            self._in_backward = False
        start = perf_counter()
        reached = self.averaging.ends(self.fed_batches.count, self.fed_batches.samples)
        if not (reached or self.backwards):
            raise self.refuse(
                f"the backward at {facts.caller()} reaches no parameter of a model or an optimizer",
                "train an nn.Module that is called, or tensors that an optimizer of torch.optim was given",
            )
        recorder = self.session.run.recorder
        if recorder is not None and recorder.resting is None:
            seconds = perf_counter() - start
            recorder.add(Phase.SYNC, seconds)
            recorder.add(Phase.BACKWARD, -seconds)  # the backward's tap, which runs around this, counts it as well
        self.backwards += 1
        return result

    def _check_batches(self) -> None:
        """Check that the coming backward is of batches that are shared out.

        Raises:
            HastenError: No DataLoader gave a batch yet, or the batches cannot be shared out.
        """
        if not self.fed_batches.count:
            raise self.refuse(
                f"{facts.caller()} calls backward before any DataLoader gave a batch",
                "give the samples by a torch.utils.data.DataLoader, whose batches can be shared out; or write it for "
                "several devices and start it by `hasten run torchrun`",
            )
        if reason := self.fed_batches.backward():
            raise self.refuse(f"it trains on batches that cannot be shared out: {reason}", _TORCHRUN)

    def _check_loss(self, loss: Any) -> None:
        """Check that the loss does not sum over the batch: averaged gradients would then be too small.

        A loss function with `reduction="sum"` is refused; a loss that only looks like a sum gets a warning.
        """
        root = loss[0] if isinstance(loss, list | tuple) and loss else loss
        hint = sum_over_batch(root, int(self.fed_batches.samples)) if self.options.batch == "global" else ""
        fix = "make it a mean (and the rate the number of samples times as large), or train with --batch per-device"
        if "reduction" in hint:
            raise self.refuse(
                f"its loss is a sum over the batch ({hint}, {facts.caller()}), of which ranks see parts", fix
            )
        if hint and self.meeting().world.is_zero:
            messages.tell(
                f"hasten: the loss at {facts.caller()} looks like a sum over the batch ({hint}): the ranks' gradients "
                f"are averaged, so it would be too small; {fix}"
            )

    def before_step(self, optimizer: Any) -> None:
        """Check, before an optimizer steps, that its gradients come from a finished backward.

        Raises:
            HastenError: It steps inside a backward, or its gradients were not made by one.
        """
        if not self.in_rank_process:
            return
        if self._in_backward:
            raise self.refuse("an optimizer steps in the middle of a backward", _TORCHRUN)
        if not self.backwards and any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            raise self.refuse("its gradients do not come from backward()", _TORCHRUN)

    def refuse_autograd_grad(self, inputs: Any) -> None:
        """Refuse torch.autograd.grad for parameters: it bypasses `.grad`, so its gradients would not be averaged."""
        tensors = inputs if isinstance(inputs, list | tuple) else (inputs,)
        if self._averaging is not None and not self._in_backward and self.in_rank_process:
            if any(isinstance(tensor, torch.Tensor) and self._averaging.knows(tensor) for tensor in tensors):
                raise self.refuse(
                    f"{facts.caller()} takes gradients of parameters by torch.autograd.grad, past `.grad`", _TORCHRUN
                )

    def metric(self, value: Any) -> Any:
        """Return rank 0's value of a metric for a schedule; it may be the loss of rank 0's own share."""
        meeting = self.meeting()
        meeting.meet(MeetingTopic.METRIC, at=self.fed_batches.count)
        return meeting.world.broadcast(float(value))
