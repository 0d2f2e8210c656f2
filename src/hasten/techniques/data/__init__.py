"""Techniques that relieve data loading."""
