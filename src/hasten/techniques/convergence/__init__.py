"""Techniques that change the optimisation path: only with `--allow trajectory`, or in a plan that a person writes."""
