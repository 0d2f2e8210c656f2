"""Findings read from source code with libcst; nothing is run."""

from hasten.doctor.source.check import check, check_paths, findings_in, silenced

__all__ = ["check", "check_paths", "findings_in", "silenced"]
