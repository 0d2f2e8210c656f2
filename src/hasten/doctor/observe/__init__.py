"""Observers: what `doctor` records beyond steps and phases, one file per subject.

Each module has `install(session)`, which sets its taps and appends an object to `session.observers`. When the run ends,
that object's `facts()` returns evidence fields by name. All observers except `sampled` listen to every step, so their
work per step must cost well under a microsecond. An observer that fails is skipped, the skip is recorded with its
reason, and the script goes on.
"""

from hasten.doctor.observe.event_log import EventLog

OBSERVERS = tuple(
    f"{__name__}.{subject}"
    for subject in (
        "events",
        "graphs",
        "optimizing",
        "inputs",
        "stages",
        "process_environment",
        "sampled",
        "lines",
        "unused_gradients",
        "device_clock",
        "live_trials",
    )
)
BENCH = (f"{__name__}.stages", f"{__name__}.bench")

__all__ = ["BENCH", "OBSERVERS", "EventLog"]
