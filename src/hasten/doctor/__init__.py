"""Doctor says why a training is slow: from a run's evidence, and from source code, to findings and a verdict.

It reads plain data and imports no torch. The exceptions run in other processes: `observe` in the script's, and
`verdict.measure_process` in its own.
"""
