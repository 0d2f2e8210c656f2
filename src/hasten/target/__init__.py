"""`hasten tune --allow trajectory --target ...`: find the arguments that reach a quality target soonest."""
