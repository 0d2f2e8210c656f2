"""What a run's evidence amounts to: the saturated resource, what trying on the spot showed, two runs compared."""
