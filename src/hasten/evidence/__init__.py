"""The evidence of one run: plain data, readable without torch."""

from hasten.evidence.finding import Finding, HowKnown, Severity, severity_of, split_place
from hasten.evidence.loaders import Consumed, LoaderBench, LoaderFacts, Probe, Rate
from hasten.evidence.machine import Machine, this_machine
from hasten.evidence.observed import (
    EVENTS,
    Event,
    GpuUse,
    Inputs,
    Layer,
    SampledLine,
    Measurement,
    MemoryPoint,
    Operator,
    Sampled,
    Stages,
    ProcessEnvironment,
    LiveTrial,
    MachineUse,
)
from hasten.evidence.schema import (
    ASIDE,
    PHASES,
    Evidence,
    Flags,
    ModelFacts,
    OptimizerFacts,
    Pass,
    Phase,
    Validation,
    net_seconds,
    read_evidence,
)

__all__ = [
    "ASIDE", "EVENTS", "PHASES", "Consumed", "Event", "Evidence", "Finding", "Flags", "GpuUse", "HowKnown", "Inputs",
    "Layer", "Line", "LoaderBench", "LoaderFacts", "Machine", "Measurement", "MemoryPoint", "ModelFacts", "Operator",
    "OptimizerFacts", "Pass", "Phase", "Probe", "Rate", "Sampled", "Severity", "Stages", "Surroundings", "TriedLive",
    "Use", "Validation", "net_seconds", "read_evidence", "severity_of", "split_place", "this_machine",
]  # fmt: skip
