"""Conclusions from a run's evidence: the saturated resource, what trying on the spot showed, two runs compared."""
