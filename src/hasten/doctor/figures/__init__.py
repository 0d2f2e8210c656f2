"""Arithmetic on evidence that several findings share."""
