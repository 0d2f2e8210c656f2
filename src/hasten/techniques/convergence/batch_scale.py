"""The technique `batch_scale`: larger batches, with a learning rate to match."""

from __future__ import annotations

from typing import Any

from hasten.plan import Setting
from hasten.techniques.base import Resource, Trajectory
from hasten.techniques.convergence.inside_step import InsideStep, scaled
from hasten.techniques.convergence.rates import beta2_for, is_adaptive, rate_factor

_LEAST_BATCHES = 2  # batches per epoch: with fewer, the batch is too large for its dataset


class BatchScale(Trajectory):
    """Multiply the batch size by a factor, and scale the learning rate to match.

    It acts on loaders that shuffle (`shuffle=True`, or a RandomSampler or DistributedSampler); validation loaders
    mostly do not. For Adam and similar optimizers the rate is multiplied by the square root of the factor, and beta2 is
    raised to the power of the factor, so that its average covers as many samples (arXiv 2507.07101); for SGD the rate
    is multiplied by the factor (Goyal et al. 2017). Both change only while the optimizer steps: schedules, logs and
    checkpoints see the script's own values. `len(loader)` counts the larger batches; a script's own numbers of steps
    (`max_iters`, warm-up, the length of a `OneCycleLR`) are not shortened. Left alone are the script's own batch
    samplers, iterable datasets, and datasets too small for two batches; then the rate does not change either. A
    checkpoint from the middle of an epoch counts batches: resume from one at the end of an epoch. The technique is for
    scripts without an argument for the batch size; if there is one, use it.
    """

    name = "batch_scale"
    relieves = Resource.COMPUTE
    sources = ("Kuhn, tip 3", "Goyal et al. 2017", "arXiv 2507.07101")
    values = int
    acts_on = "a DataLoader that shuffles"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._times = int(setting) if isinstance(setting, int) else 1
        self._batch_sizes: set[int] = set()  # batch sizes that loaders were given
        self._larger = False  # whether a loader with larger batches exists
        self._adaptive = InsideStep(lambda group: self._change(group, adaptive=True))
        self._not_adaptive = InsideStep(lambda group: self._change(group, adaptive=False))

    def loader_options(self, options: dict[str, Any]) -> None:
        """Multiply the batch size of a loader that shuffles."""
        from torch.utils.data import BatchSampler

        batches = options.get("batch_sampler")
        if not self.active or not _shuffles(options) or not (batches or options.get("batch_size")):
            return
        if batches is not None and type(batches) is not BatchSampler:
            self.refused("a batch sampler of the script's own says what is in a batch")
            return
        size = batches.batch_size if batches is not None else options["batch_size"]
        try:
            samples = len(options["dataset"])
        except (TypeError, NotImplementedError, KeyError):
            self.refused("a dataset without a length")
            return
        if samples < _LEAST_BATCHES * size * self._times:
            self.refused(f"{samples} samples do not make {_LEAST_BATCHES} batches of {size * self._times}")
            return
        # A script passes either a batch size or a batch sampler (and then batch_size is 1 by default, and ignored). A
        # loader that exists already, as under the Trainer, has both: change both.
        if batches is None or options.get("batch_size") == size != 1:
            options["batch_size"] = size * self._times
        if batches is not None:
            options["batch_sampler"] = BatchSampler(batches.sampler, size * self._times, batches.drop_last)
        self._batch_sizes.add(size * self._times)

    def loader(self, loader: Any) -> None:
        """Note that a loader has larger batches. From now on the rate is scaled."""
        if self.active and getattr(loader.batch_sampler, "batch_size", None) in self._batch_sizes:
            self._larger = True
            self.did("loader")

    def optimizer(self, optimizer: Any) -> None:
        """Let the optimizer step with the scaled rate."""
        if is_adaptive([type(optimizer).__name__]):
            self._adaptive.wrap(optimizer)
        else:
            self._not_adaptive.wrap(optimizer)

    def teardown(self) -> None:
        """Stop changing the optimizers' steps."""
        self._adaptive.leave()
        self._not_adaptive.leave()

    def _change(self, group: dict[str, Any], adaptive: bool) -> dict[str, Any]:
        """Return the options of a group to change during a step."""
        if not self.active or not self._larger or group.get("lr") is None:
            return {}
        changed = {"lr": scaled(group["lr"], rate_factor(self._times, adaptive))}
        betas = group.get("betas")
        if adaptive and isinstance(betas, (tuple, list)) and len(betas) == 2 and isinstance(betas[1], float):
            changed["betas"] = (betas[0], beta2_for(betas[1], self._times))
        return changed


def _shuffles(options: dict[str, Any]) -> bool:
    """Return whether a loader draws its samples in a new order in each pass."""
    from torch.utils.data import RandomSampler
    from torch.utils.data.distributed import DistributedSampler

    sampler = getattr(options.get("batch_sampler"), "sampler", options.get("sampler"))
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle)
    return bool(options.get("shuffle")) or isinstance(sampler, RandomSampler)
