"""Observers: what `doctor` listens to beyond steps and phases, one file a subject.

Each has `install(session)`, which sets its taps and appends an object to `session.observers`. When the run ends that
object's `facts()` gives fields of the evidence by name. All but `sampled` listen to every step, so what they do per
step must cost well under a microsecond; what they cannot do is skipped and named, and never breaks the script.
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
