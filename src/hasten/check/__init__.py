"""Check: plain and plan in step, compared tensor by tensor, random state by random state.

One process runs the training as it is and writes a track: what it holds at each moment (a batch, an optimizer's step, a
validation's output). Others run it under a plan and follow that track: at each moment they compare, and, where a
technique may round or draw otherwise, go on from the track's state, so that each step is judged by itself.

The modules: `options` what such a process is told; `state` what a training holds, by name; `track` how it is kept;
`witness` records or follows; `listen` where it listens in torch; `noise` the script's own rounding, by Monte Carlo
arithmetic; `files` what two runs saved; `judge` what the measured differences mean; `halve` which technique it is.
"""
