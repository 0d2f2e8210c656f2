"""The cheapest plan under which a training fits into a limit of memory: `hasten tune --memory`."""
