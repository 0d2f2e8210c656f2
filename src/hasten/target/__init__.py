"""`hasten tune --allow trajectory --target ...`: the arguments that bring a training to a quality soonest."""
