"""Compute a batch in parts of fewer samples, with the gradient of the whole: `microbatch=32`, `microbatch="auto"`.

`parts` runs the parts; with "auto" it halves them when memory runs out. `splitting` cuts a batch, `joined` merges
logged values and outputs, `before` restores the state when a step is repeated. The parts' gradients add up only if the
loss is a mean over samples: `means` checks that on some samples, with `same_draws`, `watched`, `attributes` and
`iterated`.
"""

from hasten.trainer.microbatch.parts import in_parts

__all__ = ["in_parts"]
