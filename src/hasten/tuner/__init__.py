"""Trials, search, parity and proof."""
