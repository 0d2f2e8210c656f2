"""Check: run a training plain and under a plan in step, and compare tensors and random states.

One process runs the unchanged training and writes a track: its state at each moment (a batch, an optimizer step, a
validation output). Other processes run it under the plan and follow the track. At each moment they compare their state
with the track's. If a technique may round or draw differently, they then continue from the track's state, so that each
step is judged by itself.

Modules: `options` configures such a process; `state` names the tensors of a training; `track` stores moments;
`witness` records or follows; `listen` hooks it into torch; `noise` measures the script's own rounding by Monte Carlo
arithmetic; `files` compares what two runs saved; `judge` decides what differences mean; `run` conducts a check, and
halves the plan to find the technique to blame.
"""
