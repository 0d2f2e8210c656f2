"""Facts of a script's DataLoaders: their options, a probe of their dataset, and their speed without training."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.evidence.observed import Stages


@dataclass(frozen=True)
class Probe:
    """Facts about a map-style dataset, found by making a few of its samples.

    Attributes:
        repeatable: Whether the same index gave the same sample under another RNG state; None if unknown.
        sample_seconds: Seconds of one `dataset[i]`.
        sample_bytes: Bytes of one sample in a cache.
        loader_function: Where the dataset keeps its function that reads one sample, like ImageFolder's `loader`.
        loader_repeatable: Whether that function returned the same for the same argument.
        loader_seconds: Seconds of that function per sample.
        loader_bytes: Bytes of that function's result in a cache.
        in_memory: Whether the dataset is a TensorDataset (or a Subset of one) with the default collate function.
        fork_unsafe: Why worker processes would be unsafe ("holds an open sqlite3.Connection"), or "".
        failed: Why the dataset could not be probed, or "".
        one_thread: How many times as long `dataset[i]` takes if torch has a single thread, as in a worker; 0: not
            measured.
    """

    repeatable: bool | None = None
    sample_seconds: float = 0.0
    sample_bytes: int = 0
    loader_function: str = ""
    loader_repeatable: bool = False
    loader_seconds: float = 0.0
    loader_bytes: int = 0
    in_memory: bool = False
    fork_unsafe: str = ""
    failed: str = ""
    one_thread: float = 0.0


@dataclass(frozen=True)
class LoaderFacts:
    """One DataLoader that the script built. `role`: "train", "validation" (iterated without backward) or "unused"."""

    dataset: str
    where: str
    iterable: bool
    batches: int | None
    samples: int | None
    batch_size: int | None
    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory: bool
    start_method: str
    default_collate: bool
    own_worker_init: bool
    role: str = "unused"
    batch_bytes: int = 0
    probe: Probe | None = None


@dataclass(frozen=True)
class Rate:
    """The loader's speed with a certain number of workers.

    Attributes:
        workers: Number of workers.
        samples_per_s: Samples per second, median over windows of steady iteration; 0 if it failed.
        batches_per_s: The same in batches per second.
        low: Samples per second of the slowest window.
        high: Samples per second of the fastest window.
        windows: Number of windows measured.
        batches: Number of batches measured.
        first_batch: Seconds from the start of the first pass to its first batch, including the start of workers.
        epoch_start: The same for later passes, with persistent workers; None if there was no later pass.
        error: Why it could not be measured, or "".
        where: `file:line` of that error.
    """

    workers: int
    samples_per_s: float = 0.0
    batches_per_s: float = 0.0
    low: float = 0.0
    high: float = 0.0
    windows: int = 0
    batches: int = 0
    first_batch: float = 0.0
    epoch_start: float | None = None
    error: str = ""
    where: str = ""


@dataclass(frozen=True)
class Consumed:
    """A training's use of its loader, from its evidence. `waited`: share of its steady steps, 0 to 1."""

    samples_per_s: float
    batches_per_s: float
    waited: float
    workers: int


@dataclass(frozen=True)
class LoaderBench:
    """The speed of the training loader without training (`hasten doctor --loader`).

    Attributes:
        loader: The training loader as the script built it.
        rates: The speed by number of workers, as far as the bench got.
        stages: Where the time of a batch goes in one process; None if no batch could be sampled.
        stages_workers: The number of workers with which `stages` were sampled.
        flame: A worker's stacks under py-spy, folded: one "outer;inner 12" per line; "" if there are none.
        flame_note: Why `flame` is missing and how to get it; or which process it shows.
        consumed: How much a training takes, if its evidence was given.
        notes: Further remarks that the user needs to read the figures.
        ended: "finished", "stopped" (Ctrl-C), "cut" (it took too long), or "" if the process died during the bench.
    """

    loader: LoaderFacts
    rates: tuple[Rate, ...] = ()
    stages: Stages | None = None
    stages_workers: int = 0
    flame: str = ""
    flame_note: str = "no flame graph: the time was over before it"
    consumed: Consumed | None = None
    notes: tuple[str, ...] = ()
    ended: str = ""

    @property
    def measured(self) -> tuple[Rate, ...]:
        """The rates that could be measured."""
        return tuple(rate for rate in self.rates if not rate.error)

    @property
    def best(self) -> Rate | None:
        """The rate of the fewest workers that come within 3 % of the fastest rate; None if none was measured."""
        most = max((rate.samples_per_s for rate in self.measured), default=0.0)
        return next((rate for rate in self.measured if rate.samples_per_s >= 0.97 * most), None)

    def rate_of(self, workers: int) -> Rate | None:
        """Return the measured rate with this number of workers; None if it was not measured."""
        return next((rate for rate in self.measured if rate.workers == workers), None)
