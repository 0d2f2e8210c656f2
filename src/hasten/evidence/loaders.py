"""A DataLoader of the script: what it was built with, and how fast it goes alone."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.evidence.observed import Stages


@dataclass(frozen=True)
class Probe:
    """Facts about a map-style dataset, from asking it for a few samples.

    Attributes:
        repeatable: The same index gave the same sample under other random states; None: could not be asked.
        sample_seconds: Time of one `dataset[i]`.
        sample_bytes: Size of one sample when kept.
        loader_function: Where the dataset keeps a function that reads one sample, as ImageFolder's `loader`.
        loader_repeatable: That function gave the same for the same argument.
        loader_seconds: Its time per sample.
        loader_bytes: Size of what it returns, when kept.
        in_memory: The dataset is a TensorDataset (or Subset of one), collated by default.
        fork_unsafe: Why worker processes would be unsafe ("holds an open sqlite3.Connection"), or "".
        failed: Why it could not be asked, or "".
        one_thread: How many times as long `dataset[i]` takes where torch has one thread only, as in a worker; 0: not
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
    """One DataLoader that the script built. `role`: train, validation (iterated without backward) or unused."""

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
    """The loader's speed with one number of workers.

    Attributes:
        workers: How many.
        samples_per_s, batches_per_s: Median over windows of steady drawing; 0 where it failed.
        low, high: The slowest and the fastest window, in samples per second.
        windows, batches: How many were measured.
        first_batch: Seconds from the begin of the first pass to its first batch, workers' start included.
        epoch_start: The same for later passes, with workers that stayed; None if there was no later pass.
        error: Why it could not be measured, or "".
        where: `file:line` of that.
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
    """A training's use of its loader, by its evidence. `waited`: share of its steady steps, 0 to 1."""

    samples_per_s: float
    batches_per_s: float
    waited: float
    workers: int


@dataclass(frozen=True)
class LoaderBench:
    """How fast the training loader goes with no training behind it (`hasten doctor --loader`).

    Attributes:
        loader: The training loader as the script built it.
        rates: By number of workers, as far as the bench came.
        stages: Where the time of a batch goes in one process; None if no batch could be sampled.
        stages_workers: With how many workers that was looked at.
        flame: Stacks of a worker under py-spy, folded: "outer;inner 12" a line; "" without one.
        flame_note: Why there is none, and how to get one; or whose it is.
        consumed: What training took, where evidence of one was given.
        notes: What else a person must know about the figures.
        ended: "finished", "stopped" (Ctrl-C), "cut" (it took too long), or "" where the process died meanwhile.
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
        """The rates that were measured."""
        return tuple(rate for rate in self.rates if not rate.error)

    @property
    def best(self) -> Rate | None:
        """The least number of workers that gives, but for 3 %, the most."""
        most = max((rate.samples_per_s for rate in self.measured), default=0.0)
        return next((rate for rate in self.measured if rate.samples_per_s >= 0.97 * most), None)

    def rate_of(self, workers: int) -> Rate | None:
        """The measured rate with so many workers."""
        return next((rate for rate in self.measured if rate.workers == workers), None)
