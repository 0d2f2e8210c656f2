"""Far more data is fetched from a remote store than is used.

## Why it is slow

gcsfs and s3fs read ahead by megabytes. When a file is read in small scattered pieces, most of the fetched data is
discarded.

## How it is known

The bytes fetched and the bytes used. The worth is the unused share of the reading time.

## Example

```python
file = fsspec.open("s3://bucket/shard.tar").open()
```

## Use instead

```python
file = fsspec.open("s3://bucket/shard.tar", cache_type="none").open()
```

## When the repair is safe

Always safe for the result. Where files are read from front to back, read-ahead is faster.

## Source

- fsspec, caching and block sizes
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hasten.doctor.rule import Rule
from hasten.evidence import Event, Evidence, Finding, HowKnown, severity_of
from hasten.evidence.waiting import faster_loading, stages_of
from hasten.evidence.weigh import LEAST


class RemoteReadAhead(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Iterator[Finding]:
        """Return a finding for each line whose files fetched four times the bytes used, and 4 MiB more."""
        loader = evidence.train_loader
        stages = stages_of(evidence, loader) if loader is not None else None
        for event in evidence.events_of("remote_open"):
            used, fetched, block = _read(event)
            if fetched < 4 * used or fetched - used < 4 << 20:
                continue
            waste = 1 - used / fetched
            share = stages.read / stages.seconds if stages is not None else 0.0
            worth = faster_loading(evidence, loader, share * waste) if loader is not None else 0.0
            blocks = f" in blocks of {block / 2**20:.1f} MiB" if block else ""
            yield cls.finding(
                f"{fetched / 2**20:.0f} MiB were fetched{blocks} from a remote store, of which "
                f"{used / 2**20:.2g} MiB were used, over {event.count} files",
                "open the files with `block_size=` near what is read at a time, or cache_type='none' (or 'first') for "
                "reads here and there",
                severity_of(worth),
                worth if worth >= LEAST else None,
                HowKnown.ESTIMATED,
                place=event.where,
            )


def _read(event: Event) -> tuple[int, int, int]:
    """Return the bytes used, the bytes fetched and the block size (bytes); zeros if the detail does not say.

    A detail reads "s3: blocks of 5242880 bytes, 100 of 5242880 used".
    """
    amounts = re.search(r"(\d+) of (\d+) used", event.detail)
    block = re.search(r"blocks of (\d+)", event.detail)
    return (int(amounts[1]), int(amounts[2]), int(block[1]) if block else 0) if amounts else (0, 0, 0)
