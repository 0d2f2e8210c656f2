"""The taps of a rank of a single-device script: they call `CarriedRank` for what the script builds and does.

`install_inner` sets those that run inside the techniques' taps, before the other taps are set; `install_outer` sets
those around them.
"""

from __future__ import annotations

from typing import Any

from hasten.evidence import facts
from hasten.parallel.batch_shares import LoaderState
from hasten.taps.across import CarriedRank
from hasten.taps.fed import UnsharedPass, why_not_shared
from hasten.taps.protocol import Session
from hasten.taps.rank_files import install as install_files
from hasten.taps.wrapping import tap


def install_inner(session: Session) -> CarriedRank:
    """Set the taps inside those of techniques, and return the CarriedRank that they call.

    Gradients are averaged before a technique sees them: a technique that scales losses must find an overflow on all
    ranks or on none.
    """
    options = session.config.ranks
    assert options is not None
    import torch

    torch.manual_seed(options.seed())  # a script's own `manual_seed` comes later and overrides it
    across = CarriedRank(session, options)
    session.on_model.append(across.before_first_forward)
    _tap_backward(across)
    return across


def install_outer(across: CarriedRank) -> None:
    """Set the taps around those of techniques: they see what the script gets."""
    import torch

    _refuse_distributed_scripts(across)
    _tap_loaders(across)
    _tap_optimizers(across)
    install_files(across)

    def loading(plain: Any) -> Any:
        def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = plain(self, *args, **kwargs)
            across.weights_loaded(self)
            return result

        return load_state_dict

    tap(torch.nn.Module, "load_state_dict", loading)


def _refuse_distributed_scripts(across: CarriedRank) -> None:
    """Refuse a script that is written for several processes: it must be started by torchrun instead.

    nn.DataParallel is allowed, on the rank's one GPU.
    """
    import torch
    import torch.distributed as dist
    from torch.utils.data.distributed import DistributedSampler

    def refusing(reason: str) -> Any:
        def change(plain: Any) -> Any:
            def refused(*args: Any, **kwargs: Any) -> Any:
                if across.joining or not across.in_rank_process:
                    return plain(*args, **kwargs)
                raise across.refuse(
                    f"{facts.caller()} {reason}, so it is written for several processes already",
                    "start it by `hasten run torchrun --nproc-per-node N ...`; of a Trainer, set devices=N instead",
                )

            return refused

        return change

    tap(dist, "init_process_group", refusing("calls torch.distributed.init_process_group"))
    tap(dist.distributed_c10d, "init_process_group", refusing("calls torch.distributed.init_process_group"))
    tap(DistributedSampler, "__init__", refusing("builds a DistributedSampler"))
    tap(torch.nn.parallel.DistributedDataParallel, "__init__", refusing("uses DistributedDataParallel"))

    def paralleling(build: Any) -> Any:
        def __init__(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, dim: int = 0) -> None:
            build(self, module, None, None, dim)  # drop the script's device ids: each rank sees a single GPU

        return __init__

    tap(torch.nn.DataParallel, "__init__", paralleling)


def _tap_loaders(across: CarriedRank) -> None:
    import torch.utils.data.dataloader as dataloader

    kind: Any = dataloader.DataLoader
    full_sampler = kind._index_sampler.fget
    kind._index_sampler = property(lambda loader: across.sampler(loader, full_sampler(loader)))

    def building(build: Any) -> Any:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            build(self, *args, **kwargs)
            if across.in_rank_process:
                self.__dict__["_hasten_across"] = LoaderState(facts.caller())

        return __init__

    def beginning(begin: Any) -> Any:
        def __iter__(self: Any) -> Any:
            if not across.in_rank_process:
                return begin(self)
            across.pass_begins(self)
            iterator = begin(self)
            if reason := why_not_shared(self):
                iterator.__dict__["_hasten_unshared"] = UnsharedPass(reason)
            return iterator

        return __iter__

    def preparing(build: Any) -> Any:
        def __init__(self: Any, loader: Any, *args: Any) -> None:
            build(self, loader, *args)
            # Workers are seeded by `_base_seed`, which is alike on all ranks: shift it, so that the workers of two
            # ranks do not augment alike. It must change the lower 32 bits: torch's CPU generator takes no others.
            if across.in_rank_process:
                self._base_seed += across.meeting().world.rank * 1_000_003

        return __init__

    def giving(give: Any) -> Any:
        def __next__(self: Any) -> Any:
            if not across.in_rank_process:
                return give(self)
            try:
                batch = give(self)
            except StopIteration:
                across.fed_batches.pass_ended(self)
                raise
            across.fed_batches.count_batch(self)
            return batch

        return __next__

    tap(kind, "__init__", building)
    tap(kind, "__iter__", beginning)
    tap(dataloader._BaseDataLoaderIter, "__init__", preparing)
    tap(dataloader._BaseDataLoaderIter, "__next__", giving)


def _tap_backward(across: CarriedRank) -> None:
    import torch

    def averaging(plain: Any) -> Any:
        def backward(*args: Any, **kwargs: Any) -> Any:
            return across.backward(plain, args, kwargs)

        return backward

    def asking(plain: Any) -> Any:
        def grad(*args: Any, **kwargs: Any) -> Any:
            across.refuse_autograd_grad(args[1] if len(args) > 1 else kwargs.get("inputs"))
            return plain(*args, **kwargs)

        return grad

    tap(torch.autograd, "backward", averaging)
    tap(torch.autograd, "grad", asking)


def _tap_optimizers(across: CarriedRank) -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def adding(plain: Any) -> Any:
        def add_param_group(self: Any, param_group: Any) -> None:
            plain(self, param_group)
            if across.in_rank_process:
                if isinstance(self, torch.optim.LBFGS):
                    raise across.refuse("LBFGS decides by the loss of each rank's own share", "use another optimizer")
                across.optimizers += len(self.param_groups) == 1  # the first group: a new optimizer
                across.add(self.param_groups[-1]["params"])

        return add_param_group

    def scheduling(plain: Any) -> Any:
        def step(self: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
            return plain(self, across.metric(metrics) if across.in_rank_process else metrics, *args, **kwargs)

        return step

    tap(torch.optim.Optimizer, "add_param_group", adding)
    tap(torch.optim.lr_scheduler.ReduceLROnPlateau, "step", scheduling)
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: across.before_step(optimizer))
