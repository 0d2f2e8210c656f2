"""The session of one process: sets the taps, ends a trial at its limits, and writes the evidence."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import gc
import importlib
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from hasten import messages
from hasten.errors import HastenError
from hasten.evidence import Evidence, Phase
from hasten.evidence.live import LiveFile
from hasten.evidence.open_pass import OpenPass
from hasten.evidence.recorder import Recorder
from hasten.files import mark_of
from hasten.switchboard import Switchboard
from hasten.taps.bounds import Bounds
from hasten.taps.built import Built
from hasten.taps.config import RunConfig, TrialOptions
from hasten.taps.evidence import gather, run_of
from hasten.taps.protocol import Session
from hasten.taps.seeds import fix_torch_seeds
from hasten.taps.step_listeners import NEVER
from hasten.taps.tracebacks import describe

if TYPE_CHECKING:
    from hasten.check.witness import Witness
    from hasten.taps.tuned import RunTuner

_COMPILED_BY = 5  # steps after which compilation counts as over, and a trial's seconds begin
_FEWEST = 7  # fewest steps of a trial that its time limit ends: two of warm-up, and enough after them to tell a pace
_POLL = 0.1  # seconds


class ProcessSession(Session):
    """hasten's session in this process, from the import of torch until the process ends."""

    current: ClassVar[ProcessSession | None] = None

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        listens = bool(config.evidence) or config.auto is not None
        # The recorder must see every step if each step's loss is compared (trials) or steps end the run (doctor).
        may_rest = config.trial is None and (config.doctor is None or not config.doctor.steps)
        recorder = Recorder(on_step=self.step_listeners, on_pass=self._on_pass, may_rest=may_rest) if listens else None
        self.run = run_of(config, recorder)
        self.built = Built(self)
        self.bounds = Bounds(self, config.doctor) if config.doctor is not None and listens else None
        self.live = LiveFile(Path(config.live), config.command, config.evidence) if config.live and listens else None
        self.witness: Witness | None = None  # of `hasten check`
        self.auto: RunTuner | None = None  # of `hasten run --auto` and `--replay`
        self._is_fork = False
        self._interrupted = False  # whether a Ctrl-C that the script did not handle ended it
        self._leaving = threading.RLock()
        self._compiled_at: float | None = None  # when compilation was over, on the recorder's clock
        self._trained_passes = 0

    @classmethod
    def start(cls, config: RunConfig) -> None:
        """Start this process's session and set every tap; a tap that cannot be set is skipped and recorded."""
        from hasten.taps import data, modules, no_compile, optimizers, results, sandbox

        session = cls.current = cls(config)
        if config.trial is not None:
            fix_torch_seeds(config.trial.seed)
            if sandbox.unguarded:
                session.run.skipped.append(f"the kernel's guard behind the sandbox: {sandbox.unguarded}")
        session.run.process()
        if config.ranks is None:
            session._tap(data, modules, optimizers, results)
        else:  # outside any guard: without these taps the ranks would train apart, so an error must end the rank
            from hasten.taps import ranks

            across = ranks.install_inner(session)
            session._tap(data, modules, optimizers, results)
            ranks.install_outer(across)
        if config.doctor is not None:
            session._observe()
        if config.witness is not None:
            session._witness()
        session._tap(no_compile)  # last: it marks the functions of all modules that the other taps have imported
        session._watch_the_steps()
        session._drive()
        session._tune_the_run()
        session._watch_the_end()
        if session.bounds is not None:
            session.bounds.start()
        if not session.rank:
            session._begin_live()

    def _begin_live_of_fork(self, _steps: int) -> int:
        self._begin_live()
        return NEVER

    def _begin_live(self) -> None:
        recorder = self.run.recorder
        if self.live is not None and recorder is not None:
            built = functools.partial(self.built.facts, recorder)
            self.live.start(recorder, self.run.skipped, self.listens_to_training, built)

    def _tap(self, *taps: Any) -> None:
        for tap in taps:
            with self.run.guard(f"tap {tap.__name__.rpartition('.')[2]}"):
                tap.install(self)

    def _witness(self) -> None:
        """Let `hasten check` compare this process's tensors, after techniques changed them."""
        import torch

        from hasten.check.listen import listen
        from hasten.check.witness import Witness

        options = self.config.witness
        assert options is not None
        if self.rank:  # each rank is compared with the same rank of the other run
            options = dataclasses.replace(
                options, track=f"{options.track}-{self.rank}", result=f"{options.result}-{self.rank}"
            )
        torch.set_num_threads(1)
        self.witness = Witness(options, self.complete)
        listen(self.witness)
        self._write_before_exit(self.witness)

    def _write_before_exit(self, witness: Any) -> None:
        """Write the witness's result before `os._exit`, which ends a process without running atexit handlers."""
        plain, process = os._exit, os.getpid()

        @functools.wraps(plain)
        def _exit(status: int) -> Any:
            if os.getpid() == process and witness.active:
                self.leave()
            plain(status)

        os._exit = _exit

    def _drive(self) -> None:
        """Start switching techniques while the training runs, if a tune asks for it."""
        board, recorder = self.run, self.run.recorder
        if self.config.warm is None or not isinstance(board, Switchboard) or recorder is None or self.rank:
            return
        from hasten.online.driver import Driver

        # `root`: the tune that started this process also takes CPU when a block is over.
        self.driver = Driver(self.config.warm, board, recorder, self.complete, root=os.getppid())
        self.step_listeners.add(self.driver.on_step)

    def _tune_the_run(self) -> None:
        if self.config.auto is not None:
            from hasten.taps import tuned

            self.auto = tuned.begin(self, self.built)

    def _observe(self) -> None:
        for module in self.config.doctor.observers if self.config.doctor is not None else ():
            with self.run.guard(f"observing {module.rpartition('.')[2]}"):
                importlib.import_module(module).install(self)

    @property
    def rank(self) -> int:
        """Rank of this process, set by its launcher; only rank 0 writes evidence."""
        rank = os.environ.get("RANK", "0")
        return int(rank) if rank.isdecimal() else 0

    def listens_to_training(self) -> bool:
        """Return whether this process has built a loader, a model or an optimizer; a launcher or a worker has not."""
        return bool(self.loaders or self.optimizers or self.run.models)

    def in_step(self) -> int:
        """Return the number (from 0) of the current training step; -1 outside of one, and during validation."""
        recorder = self.run.recorder
        return -1 if recorder is None or self.validating else recorder.step_in_progress()

    def _watch_the_steps(self) -> None:
        if self.run.recorder is not None:
            self.step_listeners.add(self.built.read_facts)
            if self.trial is not None and self.config.warm is None:
                self.step_listeners.add(self._watch_the_trial)

    def _watch_the_end(self) -> None:
        show = sys.excepthook

        def crashed(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
            # Doctor tries changes only after it has its evidence: an error during that may be theirs, not the script's.
            if self.tried is not None and issubclass(kind, Exception):
                self.run.skip("the script, while changes were tried in it", error)
                self.complete()
            self.error = describe(error)
            self._interrupted = issubclass(kind, KeyboardInterrupt)
            show(kind, error, traceback)

        sys.excepthook = crashed
        atexit.register(self._leave_at_exit)
        if self.run.recorder is not None:
            import multiprocessing.util

            os.register_at_fork(after_in_child=self._forked)
            multiprocessing.util.register_after_fork(self, ProcessSession._forked)

    def _forked(self) -> None:
        """Reset the session in a forked child, which may train itself: drop everything its parent recorded."""
        import multiprocessing.util

        self._is_fork, self.tried, self.evidence_before_trials = True, None, None
        if self.live is not None:
            self.live.forked()
        if self.bounds is not None:
            self.bounds.forked()
        self._leaving = threading.RLock()
        recorder = self.run.recorder
        if recorder is not None:
            self.step_listeners.restart()
            self.step_listeners.add(self._begin_live_of_fork)
            # Reset in place: the taps hold references to this recorder.
            recorder.__init__(recorder.now, recorder.on_step, recorder.on_pass, recorder.may_rest)  # type: ignore[misc]
            # multiprocessing's children end by `os._exit`, without atexit handlers, but run their finalizers.
            multiprocessing.util.Finalize(None, self.leave, exitpriority=0)

    # -- the limits of a trial -------------------------------------------------------------------------

    def _on_pass(self, opened: OpenPass, begins: bool) -> None:
        """Pass on that a pass began or ended; end a trial when a training pass beyond its `epochs` begins."""
        if self.bounds is not None:
            self.bounds.on_pass(opened, begins)
        if self.driver is not None:
            self.driver.on_pass(opened, begins)
        if self.auto is not None:
            self.auto.on_pass(opened, begins)
        if not begins:
            if opened.trained:
                self._trained_passes += 1
                self.trained_loaders.add(opened.loader)
        elif self.trial and self._trained_passes >= self.trial.epochs and opened.loader in self.trained_loaders:
            if self._trained_for() >= self.trial.at_least:
                self.complete()

    def _trained_for(self) -> float:
        """Return the seconds since the first step began; 0.0 before that."""
        recorder = self.run.recorder
        if recorder is None or not recorder.kept.start:
            return 0.0
        return recorder.now() - recorder.origin - recorder.kept.start[0]

    def _watch_the_trial(self, steps: int) -> None:
        """End a trial that has enough steps or has run long enough. Called at the end of every step."""
        trial, recorder = self.trial, self.run.recorder
        if trial is None or recorder is None:
            return
        if steps == 1 and trial.most_seconds:
            threading.Thread(target=self._end_in_time, args=(trial, recorder), daemon=True).start()
        enough = trial.steps if recorder.step_of == "optimizer" else 2 * trial.batches + 20
        if steps == _COMPILED_BY:
            self._compiled_at = recorder.now()
        ends_anywhere = self._trained_passes or recorder.step_of == "optimizer"
        # A trial with a loader may end within its first training pass only after four times the seconds.
        bound = trial.seconds if ends_anywhere else 4 * trial.seconds
        late = self._compiled_at is not None and recorder.now() - self._compiled_at > bound
        if (enough <= steps and (recorder.step_of == "optimizer" or not trial.cut)) or (late and steps >= 10):
            self.complete()

    def _end_in_time(self, trial: TrialOptions, recorder: Recorder) -> None:
        """End the trial from a thread of its own when its time is over: a slow step or an evaluation may last long."""
        time.sleep(trial.most_seconds)
        while recorder.steps < _FEWEST:
            time.sleep(_POLL)
        self.complete()

    def complete(self) -> None:
        """Write the evidence and end the process immediately: the trial or doctor has recorded enough."""
        self.ended = "complete"
        self.leave()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # closed by the script, or its reader has ended
                stream.flush()
        if self.bounds is not None:
            self.bounds.wait_for_the_others()
        os._exit(0)

    # -- the evidence ----------------------------------------------------------------------------------

    def leave(self) -> None:
        """Write the evidence, if not written yet, and remove the live file; this process is about to end."""
        # If a DataLoader's iterator is collected now, it waits five seconds for each worker: in a forked process the
        # queue that tells workers to end is closed by now. Without collections the interpreter tears it down instead.
        gc.disable()
        with self._leaving:
            if self.auto is not None:
                self.auto.close()
            if self.bounds is not None:
                self.bounds.ignore_signals()
            if self.witness is not None and (self.listens_to_training() or not self.is_helper()):
                self.witness.end(cut=self.ended == "complete")
            self._leave()
            if self.live is not None:
                self.live.remove()

    def _leave_at_exit(self) -> None:
        self.leave()
        if self._interrupted:
            # CPython ends by SIGINT itself (exit code 130 in a shell) only if the code it last ran from a string was
            # interrupted. Writing the evidence may define dataclasses, which run code from strings and so reset that.
            with contextlib.suppress(KeyboardInterrupt):
                exec("raise KeyboardInterrupt")

    def is_helper(self) -> bool:
        """Return whether this process was forked or spawned by another Python process under hasten."""
        return self._is_fork or multiprocessing.parent_process() is not None

    def _leave(self) -> None:
        if self.run.recorder is None:
            self._tell_what_was_idle()
            return
        recorder, self.run.recorder = self.run.recorder, None
        if not self.config.evidence:
            return
        path = Path(self.config.evidence)
        stuck = self.stopped_at and self.listens_to_training()
        if (
            not recorder.kept.numbers
            and not stuck
            and (self.is_helper() or mark_of(path) not in ("", self.config.earlier_mark))
        ):
            return  # a launcher, a worker or a helper: the process that trained writes the evidence
        if self.rank:
            return
        try:
            before = self.evidence_before_trials
            evidence = self.evidence_of(recorder) if before is None else self._with_trials(before)
            evidence.write(path)
        except HastenError as error:  # must not change the script's exit code
            messages.tell(f"hasten: {error}")
        except Exception as error:
            messages.tell(f"hasten: could not write the evidence {path}: {error!r}")

    def _tell_what_was_idle(self) -> None:
        if self.config.quiet or self.config.auto is not None:
            return
        lines = [f"skipped {line}" for line in self.run.skipped] + self.run.idle() if self.run.models else []
        for line in (*lines, *(() if self._is_fork else self.run.left_alone())):
            messages.tell(f"hasten: {line}")

    def _with_trials(self, evidence: Evidence) -> Evidence:
        """Return the evidence from before doctor switched techniques, with the results of switching them."""
        if self.recorded is not None and self._probes_datasets(self.recorded):
            evidence = dataclasses.replace(evidence, loaders=self.built.facts(self.recorded, True)["loaders"])
        tried = self.tried() if self.tried is not None else ()
        return dataclasses.replace(evidence, tried=tried, skipped=tuple(self.run.skipped))

    def evidence_of(self, recorder: Recorder, may_probe: bool = True) -> Evidence:
        """Close a recorder and return its evidence, with everything else that is known."""
        recorder.close()
        return gather(self, recorder, self.built.facts(recorder, may_probe and self._probes_datasets(recorder)))

    def _probes_datasets(self, recorder: Recorder) -> bool:
        """Return whether to probe datasets for samples that repeat, which makes a few samples.

        True in a trial that asks for it, and under doctor if the training waited for data and ended without an error.
        """
        if self.trial is not None:
            return self.trial.probe
        if self.config.doctor is None or self.error or self.stopped_at:
            return False
        steps = recorder.kept.phases[len(recorder.kept.phases) // 2 :]  # the later half, after any warm-up
        return sum(step[Phase.DATA] for step in steps) > 0.02 * sum(map(sum, steps))
