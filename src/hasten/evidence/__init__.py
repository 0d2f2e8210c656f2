"""What one run leaves behind: plain data, readable without torch."""

from hasten.evidence.machine import Machine, this_machine
from hasten.evidence.schema import (
    PHASES,
    Evidence,
    Flags,
    LoaderFacts,
    ModelFacts,
    OptimizerFacts,
    Pass,
    Phase,
    Probe,
    Validation,
    read_evidence,
)

__all__ = [
    "PHASES",
    "Evidence",
    "Flags",
    "LoaderFacts",
    "Machine",
    "ModelFacts",
    "OptimizerFacts",
    "Pass",
    "Phase",
    "Probe",
    "Validation",
    "read_evidence",
    "this_machine",
]
