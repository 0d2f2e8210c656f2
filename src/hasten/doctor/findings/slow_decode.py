"""Images are decoded by a slow library, and the training waits for them.

## Why it is slow

libjpeg-turbo is two to four times as fast as libjpeg, and decoding directly at the needed size (`Image.draft`) saves
as much again.

## How it is known

The measured share of decoding in the time of a batch. The worth assumes that half of it can be saved.

## Example

```python
image = Image.open(path).convert("RGB").resize((224, 224))
```

## Use instead

```python
image = Image.open(path)
image.draft("RGB", (224, 224))
image = image.convert("RGB").resize((224, 224))
```

## When the repair is safe

Pixel values differ slightly where the image is scaled during decoding.

## Source

- Lin, tip 1
- libjpeg-turbo
- Pillow, Image.draft
"""

from __future__ import annotations

from hasten.doctor.figures import sampled_stages
from hasten.doctor.rule import Rule
from hasten.evidence import Evidence, Finding, HowKnown
from hasten.evidence.figures import percent
from hasten.evidence.waiting import data_share, faster_loading, in_ms


class SlowDecode(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if decoding with PIL takes 30 % of a batch's time or more."""
        bound = sampled_stages(evidence)
        if bound is None:
            return None
        loader, stages = bound
        share = stages.decode / stages.seconds
        environment = evidence.surroundings
        plain = environment is not None and environment.jpeg == "libjpeg"
        if share < 0.3 or stages.decoder != "PIL":
            return None
        fix = (
            "install a Pillow that is built with libjpeg-turbo (the wheels of PyPI are), "
            if plain
            else "decode at the size you need (`image.draft('RGB', size)` before it is loaded), "
        )
        return cls.timed(
            f"decoding with PIL{' and the plain libjpeg' if plain else ''} is {percent(share)} of the "
            f"{in_ms(stages.seconds)} "
            f"that a batch takes, and the step waits {percent(data_share(evidence))} of its time for batches",
            fix + "or use torchvision.io.decode_jpeg or simplejpeg, or keep the images decoded and resized",
            faster_loading(evidence, loader, share / 2),
            HowKnown.ESTIMATED,
            place=stages.hottest or loader.where,
            details=("estimated for decoding in half the time",),
        )
