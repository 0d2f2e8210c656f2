"""Recomputation of a forward exactly as it was, for techniques that keep no activations."""
