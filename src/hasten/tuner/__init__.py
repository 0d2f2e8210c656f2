"""Tuning of an unchanged script: trials, search, parity and proof."""
