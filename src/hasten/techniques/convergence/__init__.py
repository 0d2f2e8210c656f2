"""Techniques that change the optimisation path. They need `--allow trajectory`, or a plan that a person wrote."""
