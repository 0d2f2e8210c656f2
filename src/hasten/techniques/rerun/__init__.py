"""A forward run a second time exactly as it was, for techniques that keep no activations."""
