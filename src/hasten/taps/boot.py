"""Start the taps in this process once the script imports torch. Nothing here imports torch itself."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from hasten import messages
from hasten.taps.after_import import after_import, import_without_collections
from hasten.taps.config import VARIABLE, RunConfig
from hasten.taps.late_dynamo import optimizers_without_dynamo
from hasten.taps.tracebacks import describe, hide_our_frames


def boot() -> None:
    """Read this process's configuration, redirect its writes if it is a trial, and wait for torch to be imported."""
    config = RunConfig.from_json(os.environ[VARIABLE])
    if config.trial is not None:
        from hasten.taps.sandbox import confine

        # The two processes of a check exchange data in these folders, which the sandbox must not redirect.
        confine(config.trial.scratch, () if config.witness is None else config.witness.folders())
        from hasten.taps.seeds import fix_seeds

        fix_seeds(config.trial.seed)
    elif config.doctor is not None and config.doctor.scratch:
        from hasten.taps.sandbox import confine

        confine(config.doctor.scratch)
    if config.doctor is not None:
        _note_an_early_end(f"{config.evidence}.error")
    hide_our_frames()
    if config.ranks is not None:
        from hasten.taps.rank_start import begin

        config = begin(config, config.ranks)
    import_without_collections()
    # Doctor measures the script's cost without hasten, where a `gc.collect()` also traverses torch._dynamo's objects.
    if config.doctor is None:
        optimizers_without_dynamo()

    def start() -> None:
        from hasten.taps.session import ProcessSession

        try:
            ProcessSession.start(config)
        except Exception as error:
            if config.ranks is None:
                raise
            # Without taps each rank would train alone on all batches, and all ranks would write the same files.
            messages.tell(f"hasten: a rank cannot be set up, so it ends: {error!r}")
            os._exit(1)

    after_import("torch", start)


def _note_an_early_end(path: str) -> None:
    """Write the error to `path` if the script ends in one before it imports torch, so before evidence is recorded."""
    show = sys.excepthook

    def note_and_show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if "torch" not in sys.modules:
            try:
                with open(path, "w") as file:
                    file.write(describe(error))
            except OSError as refused:
                messages.tell(f"hasten: could not note how the script ended: {refused}")
        show(kind, error, traceback)

    sys.excepthook = note_and_show
