"""Techniques that relieve compute."""
