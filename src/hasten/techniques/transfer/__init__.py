"""Techniques that relieve the transfer of data to the GPU."""
