"""Taps on DataLoaders: what they are built with, when batches are waited for, where a trial cuts a pass."""

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
from hasten.taps.modules import hears_forwards
from hasten.taps.protocol import BuiltLoader, Session
from hasten.taps.steps_over import NEVER
from hasten.taps.wrapping import tap

STATEFUL = "torchdata.stateful_dataloader.stateful_dataloader"
_LEAST_BATCHES = 6  # of a pass that a trial cuts short by time


def install(session: Session) -> None:
    """Set the taps on DataLoader, and on torchdata's StatefulDataLoader when it is imported."""
    import torch.utils.data.dataloader as room

    _tap_class(room.DataLoader, session)
    _tap_fetcher(room, session)
    _tap_iterator(room._BaseDataLoaderIter, session)
    # Its iterators ask torch's own `__next__`, which is tapped.
    once_imported(
        session, STATEFUL, "tap StatefulDataLoader", lambda room: _tap_class(room.StatefulDataLoader, session)
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
        options = wanted = None
        with session.run.guard("tap DataLoader"):  # wrong arguments: the loader itself says so best
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            options = {name: value for name, value in bound.arguments.items() if name != "self"}
            wanted = session.run.loader_options(options)
        built = False
        if wanted is not None and wanted != options:
            try:
                build(self, **wanted)
                built = True
            except Exception as error:  # what hasten chose does not suit this loader: back to what the script chose
                session.run.skip("DataLoader options", error)
                wanted = options
        if not built:  # outside the handlers, so that an error of its own is shown alone
            build(self, *args, **kwargs)
        if options is None or wanted is None:
            return None
        session.run.loader(self)
        _register(self, wanted, session)
        return None

    return __init__


def _register(loader: Any, options: dict[str, Any], session: Session) -> None:
    if session.run.recorder is None or "_hasten_index" in loader.__dict__:
        return
    with session.run.guard("facts of a DataLoader"):  # facts are a convenience; the script goes on without them
        session.loaders.append(BuiltLoader(weakref.ref(loader), facts.loader_facts(loader, options, facts.caller())))
        loader.__dict__["_hasten_index"] = len(session.loaders) - 1
    benches = session.config.doctor is not None and session.config.doctor.bench_seconds
    if benches or (session.trial is not None and session.trial.probe):
        session.kept_loaders.append(loader)  # alive until they are measured; `for batch in DataLoader(...)` keeps none


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
        if session.run.acting("batches"):
            iterator.__dict__["_hasten_fetch"] = None
        if session.driver is not None:
            iterator.__dict__["_hasten_begin"] = functools.partial(begin, self)
        return iterator

    return __iter__


def _making_samples(make: Any, session: Session) -> Any:
    from hasten.data.making_samples import makes_samples

    return makes_samples(make) if hears_forwards(session) else make


def _tap_iterator(kind: Any, session: Session) -> None:
    plain = _making_samples(kind.__next__, session)
    run = session.run
    changes = bool(run.acting("batches"))
    loaders = session.loaders

    def fetch(iterator: Any) -> Any:
        wrapped = iterator.__dict__.get("_hasten_fetch")
        if wrapped is None:
            # By a weak reference: a pass that is left is over at once, as without, and its workers end.
            own = functools.partial(_next_of, weakref.ref(iterator), plain)
            wrapped = iterator.__dict__["_hasten_fetch"] = run.batches(own, iterator)
        return wrapped()

    give = fetch if changes else plain
    if session.config.warm is not None:
        give = _going_on(give, session)
    if run.recorder is None:
        if give is not kind.__next__:
            tap(kind, "__next__", lambda _: give)
        return

    def __next__(self: Any) -> Any:
        recorder = run.recorder
        if recorder is None:
            return give(self)
        if (resting := recorder.resting) is not None and resting.rest and resting.iterator() is self:
            resting.rest -= 1
            try:
                return give(self)
            except BaseException as error:  # no batch came
                resting.rest += 1
                if isinstance(error, StopIteration):
                    recorder.exhausted(self, recorder.now())
                raise
        loader = self.__dict__.get("_hasten_loader")
        if loader is None:
            return give(self)
        now = recorder.now
        start = now()
        recorder.asks(self, start)
        try:
            batch = give(self)
        except StopIteration:
            recorder.exhausted(self, now())
            raise
        recorder.got(self, start, now())
        known = loaders[loader]
        if known.look_in:
            known.look_in -= 1
        else:
            _look(session, loader, known, batch)
        return batch

    tap(kind, "__next__", lambda _: __next__)


def _next_of(iterator: weakref.ref[Any], plain: Any) -> Any:
    return plain(iterator())


def _going_on(give: Any, session: Session) -> Any:
    """In a process that is tuned: when a shortened pass is over, the same batches again, for as long as the whole one.

    Each time by an iterator of its own, as in a pass of its own, which is when workers and caches can be switched.
    """

    def give_or_go_on(iterator: Any) -> Any:
        known = iterator.__dict__
        try:
            return give(known.get("_hasten_inner", iterator))
        except StopIteration:
            driver, recorder = session.driver, session.run.recorder
            begin = known.get("_hasten_begin")
            if driver is None or recorder is None or begin is None or recorder.current.iterator() is not iterator:
                raise
            whole = facts.length_of(begin.args[0])
            if not whole or not driver.goes_on(recorder.current, whole):
                raise
        known["_hasten_inner"] = begin()  # outside the handler: errors are then the script's own
        return give(known["_hasten_inner"])

    return give_or_go_on


def _look(session: Session, index: int, known: BuiltLoader, batch: Any) -> None:
    """Look at a loader's batch, which was due."""
    with session.run.guard("looking at a batch"):  # a batch like no other
        if not known.batch_bytes:
            known.batch_bytes = 1  # should it be a batch like no other
            known.batch_bytes = facts.batch_bytes(batch)
        known.look_in = min((told(index, batch) for told in session.on_batch), default=NEVER)


def _tap_fetcher(room: Any, session: Session) -> None:
    if not session.run.acting("fetcher"):
        return

    def creating(create: Any) -> Any:
        def create_fetcher(*args: Any, **kwargs: Any) -> Any:
            return session.run.fetcher(create(*args, **kwargs))

        return create_fetcher

    tap(room._DatasetKind, "create_fetcher", creating)


def _tap_sampler(kind: Any, trial: TrialOptions) -> None:
    """In a trial: let every pass end early, and repeat the first pass's batches in later ones."""
    whole = kind._index_sampler.fget
    kept: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
    cut = property(lambda loader: _CutSampler(whole(loader), trial, kept.setdefault(loader, [])))
    kind._index_sampler = cut


class _CutSampler:
    """A sampler of which only the first indices are seen, the same ones in every pass."""

    def __init__(self, sampler: Any, trial: TrialOptions, kept: list[Any]) -> None:
        self._sampler = self.hasten_whole = sampler
        self._trial = trial
        self._kept = kept

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __iter__(self) -> Iterator[Any]:
        real = iter(self._sampler)
        if self._kept:
            next(real, None)  # draws from the random state what a pass draws
            yield from self._kept
            return
        until = math.inf
        for _, index in zip(range(self._trial.batches), real, strict=False):
            number = len(self._kept)
            if number == 1 and self._trial.pass_seconds:
                until = perf_counter() + self._trial.pass_seconds  # the first batch may wait for workers to start
            if number >= _LEAST_BATCHES and perf_counter() > until:
                return
            self._kept.append(index)
            yield index
