"""Exact recomputation of a forward in its backward, for techniques that keep no activations."""
