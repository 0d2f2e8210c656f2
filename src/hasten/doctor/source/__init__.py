"""Findings read from source code with libcst; nothing is run."""
