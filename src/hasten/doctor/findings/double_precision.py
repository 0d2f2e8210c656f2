"""Layers compute in float64.

## Why it is slow

A float64 number takes twice the memory of a float32 number, and consumer GPUs compute float64 up to 64 times slower.
Arrays from NumPy and pandas are float64 by default.

## How it is known

hasten times the costliest layers after the run in both dtypes and applies their gain to the whole forward and
backward. Where that was not done, it assumes half of the time of forward and backward.

## Example

```python
features = torch.from_numpy(table.values)
model = nn.Linear(20, 1).double()
```

## Use instead

```python
features = torch.from_numpy(table.values.astype(np.float32))
model = nn.Linear(20, 1)
```

## When the repair is safe

Safe unless the result needs more than 7 digits, as in numerical solvers.

## Source

- PyTorch, Numerical accuracy
"""

from __future__ import annotations

from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown
from hasten.evidence.figures import percent
from hasten.evidence.weigh import COMPUTE, gain_of, in_words, place_of, seconds_of, share_of, size_of


class DoublePrecision(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return one finding if layers were called with float64 inputs."""
        double = [layer for layer in evidence.layers if layer.dtype == "float64"]
        if not double:
            return None
        tried = evidence.measured_for(cls.name)
        compute = share_of(evidence, seconds_of(evidence, *COMPUTE))
        worth = compute * gain_of(tried) if tried else compute / 2
        layers = tried[0].what.partition(":")[0] if tried else size_of(double[0])
        return cls.timed(
            f"{layers} and the like compute in float64"
            + (f"; in float32 they take {percent(gain_of(tried))} less time" if tried else ""),
            "train in float32, unless the result needs 15 digits: make the data float32 once (`.float()`, "
            "`np.float32`), and take `.double()` and `set_default_dtype(torch.float64)` out",
            worth,
            HowKnown.ESTIMATED,
            place=place_of(evidence, tried[0]) if tried else double[0].where,
            where=tried[0].where if tried else double[0].path,
            details=tuple(map(in_words, tried)),
        )
