"""Techniques that relieve memory."""
