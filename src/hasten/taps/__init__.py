"""Taps: places where hasten listens to, and may change, what an unmodified script builds.

`hasten run` starts the very Python command a person would have typed, with `taps/site` first on PYTHONPATH. Its
`sitecustomize` starts the taps before the script's first line, in the process itself and in every Python child
it has (spawned workers, torchrun's ranks). Nothing is imported until the script imports torch.
"""
