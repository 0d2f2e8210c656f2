"""`hasten batch`: the largest batch that fits, where throughput saturates, and what memory goes to."""
