"""Conclusions from a run's evidence: the saturated resource, measured changes, and the comparison of two runs."""
