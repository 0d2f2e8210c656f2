"""`hasten tune --memory`: find the cheapest plan under which a training fits into a memory limit."""
