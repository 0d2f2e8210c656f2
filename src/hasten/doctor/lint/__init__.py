"""Findings of source code: files checked, findings written down, code mended."""

from hasten.doctor.lint.check import findings_in, silenced

__all__ = ["findings_in", "silenced"]
