"""Larger batches, with the learning rate that goes with them."""

from __future__ import annotations

from typing import Any

from hasten.plan import Setting
from hasten.techniques.base import Resource, Trajectory
from hasten.techniques.convergence.inside_step import InsideStep, scaled
from hasten.techniques.convergence.rates import beta2_for, is_adaptive, rate_factor

_LEAST_BATCHES = 2  # of an epoch, below which a batch is too large for its dataset


class BatchScale(Trajectory):
    """Train with batches so many times as large, and with the rate that goes with them.

    Acts on loaders that shuffle (`shuffle=True`, or a RandomSampler or DistributedSampler); those of validation mostly
    do not. The rate goes with the square root of the factor for Adam and its like, whose beta2 becomes beta2 to the
    power of the factor, so that its average holds as many samples (arXiv 2507.07101); in proportion for SGD (Goyal et
    al. 2017). Both only while the optimizer steps: schedules, logs and checkpoints have the script's own. `len(loader)`
    is that of the larger batches; what a script counts in steps by itself (`max_iters`, warm-up, the length of a
    `OneCycleLR`) is not shortened. Left alone: batch samplers of the script's own, iterable datasets, and datasets that
    would not give two batches; then the rate stays, too. A checkpoint from the middle of an epoch counts batches: go on
    from one at its end. For a script without an argument for its batch; with one, use that.
    """

    name = "batch_scale"
    relieves = Resource.COMPUTE
    sources = ("Kuhn, tip 3", "Goyal et al. 2017", "arXiv 2507.07101")
    values = int
    acts_on = "a DataLoader that shuffles"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._times = int(setting) if isinstance(setting, int) else 1
        self._asked: set[int] = set()
        self._larger = False  # once a loader gives larger batches
        self._adaptive = InsideStep(lambda group: self._change(group, adaptive=True))
        self._others = InsideStep(lambda group: self._change(group, adaptive=False))

    def loader_options(self, options: dict[str, Any]) -> None:
        """Give a loader that shuffles larger batches."""
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
        if batches is None or options.get("batch_size") == size != 1:  # else the batch sampler alone says it
            options["batch_size"] = size * self._times
        if batches is not None:
            options["batch_sampler"] = BatchSampler(batches.sampler, size * self._times, batches.drop_last)
        self._asked.add(size * self._times)

    def loader(self, loader: Any) -> None:
        """Note that there are larger batches: from here on the rate goes with them."""
        if self.active and getattr(loader.batch_sampler, "batch_size", None) in self._asked:
            self._larger = True
            self.did("loader")

    def optimizer(self, optimizer: Any) -> None:
        """Have it step with the rate that goes with the batch."""
        if is_adaptive([type(optimizer).__name__]):
            self._adaptive.wrap(optimizer)
        else:
            self._others.wrap(optimizer)

    def over(self) -> None:
        """Leave steps as they were."""
        self._adaptive.leave()
        self._others.leave()

    def _change(self, group: dict[str, Any], adaptive: bool) -> dict[str, Any]:
        if not self.active or not self._larger or group.get("lr") is None:
            return {}
        changed = {"lr": scaled(group["lr"], rate_factor(self._times, adaptive))}
        betas = group.get("betas")
        if adaptive and isinstance(betas, (tuple, list)) and len(betas) == 2 and isinstance(betas[1], float):
            changed["betas"] = (betas[0], beta2_for(betas[1], self._times))
        return changed


def _shuffles(options: dict[str, Any]) -> bool:
    """Whether a loader draws its samples in another order each time."""
    from torch.utils.data import RandomSampler
    from torch.utils.data.distributed import DistributedSampler

    sampler = getattr(options.get("batch_sampler"), "sampler", options.get("sampler"))
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle)
    return bool(options.get("shuffle")) or isinstance(sampler, RandomSampler)
