"""Reads Python source with libcst, without running it: names, data flow, and the loops that train or validate."""
