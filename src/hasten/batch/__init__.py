"""`hasten batch`: find the largest batch that fits, where throughput saturates, and what uses the memory."""
