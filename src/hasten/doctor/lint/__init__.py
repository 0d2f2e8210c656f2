"""Findings of source code: files checked, findings written down, code mended."""

from hasten.doctor.lint.check import check_paths, findings_in, silenced

__all__ = ["check_paths", "findings_in", "silenced"]
