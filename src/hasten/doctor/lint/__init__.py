"""Findings from source code: check files, write the findings in several formats, and repair the code."""
