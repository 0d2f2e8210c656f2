"""Techniques that relieve transfer."""
