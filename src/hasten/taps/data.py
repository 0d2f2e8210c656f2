"""Taps on DataLoaders: apply techniques to them, record their facts and the waits for batches, cut a trial's passes."""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Iterator
from time import perf_counter
from typing import Any

from hasten.evidence import facts
from hasten.taps.after_import import once_imported
from hasten.taps.config import TrialOptions
from hasten.taps.modules import taps_forwards
from hasten.taps.protocol import BuiltLoader, Session
from hasten.taps.step_listeners import NEVER
from hasten.taps.wrapping import tap

STATEFUL = "torchdata.stateful_dataloader.stateful_dataloader"
_LEAST_BATCHES = 6  # fewest batches of a pass that a trial cuts by time


def install(session: Session) -> None:
    """Set the taps on DataLoader, and on torchdata's StatefulDataLoader when it is imported."""
    import torch.utils.data.dataloader as dataloader

    _tap_class(dataloader.DataLoader, session)
    _tap_fetcher(dataloader, session)
    _tap_iterator(dataloader._BaseDataLoaderIter, session)
    # Only the class is tapped: its iterators get batches by torch's `_BaseDataLoaderIter.__next__`, tapped above.
    once_imported(
        session,
        STATEFUL,
        "tap StatefulDataLoader",
        lambda dataloader: _tap_class(dataloader.StatefulDataLoader, session),
    )


def _tap_class(kind: Any, session: Session) -> None:
    signature = inspect.signature(kind.__init__)
    tap(kind, "__init__", lambda build: _building(build, signature, session))
    if "__iter__" in vars(kind):
        tap(kind, "__iter__", lambda begin: _beginning(begin, session))
    if session.trial is not None and session.trial.cut and "_index_sampler" in vars(kind):
        _tap_sampler(kind, session.trial)


def _building(build: Any, signature: inspect.Signature, session: Session) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = changed_options = None
        with session.run.guard("tap DataLoader"):  # wrong arguments fail in `bind`; `build` below says so better
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            options = {name: value for name, value in bound.arguments.items() if name != "self"}
            changed_options = session.run.loader_options(options)
        built = False
        if changed_options is not None and changed_options != options:
            try:
                build(self, **changed_options)
                built = True
            # The techniques' arguments do not suit this loader (a subclass may check them): use the script's own.
            except Exception as error:
                session.run.skip("DataLoader options", error)
                changed_options = options
        if not built:  # outside the `except` block: an error here must not show as raised while handling another
            build(self, *args, **kwargs)
        if options is None or changed_options is None:
            return None
        session.run.loader(self)
        _register(self, changed_options, session)
        return None

    return __init__


def _register(loader: Any, options: dict[str, Any], session: Session) -> None:
    if session.run.recorder is None or "_hasten_index" in loader.__dict__:
        return
    with session.run.guard("facts of a DataLoader"):  # unusual subclasses may raise; the script continues without facts
        session.loaders.append(BuiltLoader(weakref.ref(loader), facts.loader_facts(loader, options, facts.caller())))
        loader.__dict__["_hasten_index"] = len(session.loaders) - 1
    benches = session.config.doctor is not None and session.config.doctor.bench_seconds
    if benches or (session.trial is not None and session.trial.probe):
        # Keep the loader alive until it is measured: `for batch in DataLoader(...)` holds no reference to it.
        session.kept_loaders.append(loader)


def _beginning(begin: Any, session: Session) -> Any:
    begin = _making_samples(begin, session)

    def __iter__(self: Any) -> Any:
        recorder = session.run.recorder
        if recorder is None:
            iterator = begin(self)
        else:
            start = recorder.now()
            iterator = begin(self)
            if "_hasten_index" in self.__dict__:
                iterator.__dict__["_hasten_loader"] = self.__dict__["_hasten_index"]
                recorder.pass_begins(self.__dict__["_hasten_index"], iterator, start, recorder.now())
        if session.run.techniques_at("batches"):
            iterator.__dict__["_hasten_fetch"] = None
        if session.driver is not None:
            iterator.__dict__["_hasten_begin"] = functools.partial(begin, self)
        return iterator

    return __iter__


def _making_samples(make: Any, session: Session) -> Any:
    """Mark calls of `make` as sample making, so that a dataset's own modules do not count as the model's forwards."""
    from hasten.data.making_samples import makes_samples

    return makes_samples(make) if taps_forwards(session) else make


def _tap_iterator(kind: Any, session: Session) -> None:
    plain = _making_samples(kind.__next__, session)
    run = session.run
    changes = bool(run.techniques_at("batches"))
    loaders = session.loaders

    def fetch(iterator: Any) -> Any:
        wrapped = iterator.__dict__.get("_hasten_fetch")
        if wrapped is None:
            # A weak reference: a strong one would be a cycle, and the workers of a pass that the script leaves by
            # `break` would live until the garbage collector runs.
            own_fetch = functools.partial(_next_of, weakref.ref(iterator), plain)
            wrapped = iterator.__dict__["_hasten_fetch"] = run.batches(own_fetch, iterator)
        return wrapped()

    give = fetch if changes else plain
    if session.config.warm is not None:
        give = _repeating_short_passes(give, session)
    if run.recorder is None:
        if give is not kind.__next__:
            tap(kind, "__next__", lambda _: give)
        return

    def __next__(self: Any) -> Any:
        recorder = run.recorder
        if recorder is None:
            return give(self)
        # The recorder rests in steps of a long run that are not kept: such a batch is only counted.
        if (resting := recorder.resting) is not None and resting.rest_remaining and resting.iterator() is self:
            resting.rest_remaining -= 1
            try:
                return give(self)
            except BaseException as error:  # no batch came: undo the count
                resting.rest_remaining += 1
                if isinstance(error, StopIteration):
                    recorder.exhausted(self, recorder.now())
                raise
        loader = self.__dict__.get("_hasten_loader")
        if loader is None:
            return give(self)
        now = recorder.now
        start = now()
        recorder.batch_requested(self, start)
        try:
            batch = give(self)
        except StopIteration:
            recorder.exhausted(self, now())
            raise
        recorder.batch_received(self, start, now())
        built = loaders[loader]
        if built.skip_batches:
            built.skip_batches -= 1
        else:
            _show_batch(session, loader, built, batch)
        return batch

    tap(kind, "__next__", lambda _: __next__)


def _next_of(iterator: weakref.ref[Any], plain: Any) -> Any:
    return plain(iterator())


def _repeating_short_passes(give: Any, session: Session) -> Any:
    """Repeat a shortened pass in a process that is tuned, until it has as many batches as the full pass.

    Each repetition uses a new iterator, like a new pass, because workers and caches are switched when a pass begins.
    """

    def give_or_repeat(iterator: Any) -> Any:
        state = iterator.__dict__
        try:
            return give(state.get("_hasten_inner", iterator))
        except StopIteration:
            driver, recorder = session.driver, session.run.recorder
            begin = state.get("_hasten_begin")
            if driver is None or recorder is None or begin is None or recorder.current.iterator() is not iterator:
                raise
            full_length = facts.length_of(begin.args[0])
            if not full_length or not driver.goes_on(recorder.current, full_length):
                raise
        # Outside the `except` block: the script's errors must not show as raised while handling StopIteration.
        state["_hasten_inner"] = begin()
        return give(state["_hasten_inner"])

    return give_or_repeat


def _show_batch(session: Session, index: int, built: BuiltLoader, batch: Any) -> None:
    """Show a batch to the `on_batch` callbacks; they return how many batches to skip until the next call."""
    with session.run.guard("looking at a batch"):  # unusual batches may raise
        if not built.batch_bytes:
            built.batch_bytes = 1  # stays if measuring raises, so that it is not tried with every batch
            built.batch_bytes = facts.batch_bytes(batch)
        built.skip_batches = min((look(index, batch) for look in session.on_batch), default=NEVER)


def _tap_fetcher(room: Any, session: Session) -> None:
    if not session.run.techniques_at("fetcher"):
        return

    def creating(create: Any) -> Any:
        def create_fetcher(*args: Any, **kwargs: Any) -> Any:
            return session.run.fetcher(create(*args, **kwargs))

        return create_fetcher

    tap(room._DatasetKind, "create_fetcher", creating)


def _tap_sampler(kind: Any, trial: TrialOptions) -> None:
    """Make every pass of a trial end early, and later passes repeat the first one's batches."""
    full_sampler = kind._index_sampler.fget
    first_passes: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
    cut = property(lambda loader: _CutSampler(full_sampler(loader), trial, first_passes.setdefault(loader, [])))
    kind._index_sampler = cut


class _CutSampler:
    """A sampler that ends after the first indices, and gives the same ones in every pass."""

    def __init__(self, sampler: Any, trial: TrialOptions, first_pass: list[Any]) -> None:
        self._sampler = self.hasten_whole = sampler
        self._trial = trial
        self._first_pass = first_pass

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __iter__(self) -> Iterator[Any]:
        indices = iter(self._sampler)
        if self._first_pass:
            # A shuffling sampler draws its seed here: keep the script's RNG state as in a real pass.
            next(indices, None)
            yield from self._first_pass
            return
        until = math.inf
        for _, index in zip(range(self._trial.batches), indices, strict=False):
            number = len(self._first_pass)
            if number == 1 and self._trial.pass_seconds:
                until = perf_counter() + self._trial.pass_seconds  # the first batch may wait for workers to start
            if number >= _LEAST_BATCHES and perf_counter() > until:
                return
            self._first_pass.append(index)
            yield index
