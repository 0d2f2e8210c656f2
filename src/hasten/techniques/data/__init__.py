"""Techniques that relieve data."""
