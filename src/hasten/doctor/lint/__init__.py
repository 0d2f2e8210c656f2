"""Findings of source code: files checked, findings written down, code mended."""
