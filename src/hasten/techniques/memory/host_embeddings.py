"""The technique `host_embeddings`: large embedding tables stay on the host, with gradient and optimizer state.

`Module._apply`, by which `model.to(...)` moves weights, is wrapped to leave large tables out. The forwards of
embeddings are replaced by those in `rows_on_host`, which look up a batch's rows on the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from hasten.errors import HastenError
from hasten.evidence import Evidence
from hasten.plan import Setting
from hasten.techniques import gradient_access
from hasten.techniques.base import Call, Choices, CudaOnly, Effect, Refusal, Resource
from hasten.techniques.replaced import ReplacedFunction

_LEAST = 64  # MiB, with `true`


class HostEmbeddings(CudaOnly):
    """Keep large embedding tables, their gradients and optimizer state on the host; a batch's rows go to the GPU.

    It acts when a model that was built on the host is moved (`model.to("cuda")`, the Trainer): each `nn.Embedding` and
    `nn.EmbeddingBag` of 64 MiB or more (a number sets another size in MiB) keeps its weight there, the same Parameter.
    Its forward gathers the distinct rows of the batch on the host and copies them to the GPU; their gradient is copied
    back, and the script's own optimizer steps the table on the host. So every optimizer of torch is correct, including
    momentum and weight decay of rows that a batch does not contain, and state dicts and checkpoints do not change. A
    dense gradient costs several passes over the whole table in the host's memory at each step; with `sparse=True`, and
    an optimizer that supports it, only the batch's rows are touched. The table is not pinned: the GPU never reads it,
    only the rows that were gathered from it.

    The host's kernels step the table, and its gradient is summed by row first, so results differ by rounding. Left on
    the GPU are tables built there, modules with their own forward, tables that share their weight with a layer there,
    and trainings by several processes. A script must not use the table's device to place its batches, nor read its
    weight elsewhere on the GPU: that ends in torch's error about devices, with a note. With a GradScaler it ends in an
    error. It has not been run on a GPU: it was tested with a CPU in place of the GPU.
    """

    name = "host_embeddings"
    effect = Effect.ROUNDING
    relieves = Resource.MEMORY
    sources = ("SpeedTorch",)
    values = int
    example = "true"
    acts_on = "an nn.Embedding or nn.EmbeddingBag of that size that is moved to a GPU"
    device = "cuda"
    """Type of the device that tables are kept away from; tests set "cpu"."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._least = (_LEAST if setting is True else int(str(setting))) << 20  # bytes
        self._reported: weakref.WeakSet[Any] = weakref.WeakSet()  # modules that were reported
        self._on_host: weakref.WeakSet[Any] = weakref.WeakSet()  # modules whose table stayed on the host
        self._moves: list[ReplacedFunction] = []
        self._forwards: list[ReplacedFunction] = []

    @classmethod
    def check(cls, setting: Setting) -> str:
        """Return what is wrong with a setting: true, or a size in MiB."""
        return "" if setting is True or (type(setting) is int and setting >= 1) else "must be true or a size in MiB"

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Propose nothing: it saves memory and costs time."""
        return cls.refuse_without_gpu(evidence) or Refusal(
            "it saves the GPU's memory and costs time: `host_embeddings = true` in a plan switches it on"
        )

    @classmethod
    def clashes(cls, setting: Setting, plan: Mapping[str, Setting]) -> str:
        """Refuse techniques that need all parameters, or all gradients, on one device."""
        if plan.get("precision") == "16-mixed":
            return 'precision = "16-mixed" looks for overflows on one device'
        if plan.get("optimizer_in_backward", False) is not False:
            return "optimizer_in_backward steps parameters of one device"
        return "compiled code cannot look up rows on the host" if plan.get("compile", False) is not False else ""

    def process(self) -> None:
        """Wrap the function that moves models, so that it leaves tables on the host."""
        from hasten.techniques.memory.rows_on_host import LOOK_UPS, looks_up

        if not self._moves:
            self._moves = [ReplacedFunction(kind, "_apply", self._staying) for kind in LOOK_UPS]
            self._forwards = [
                ReplacedFunction(kind, "forward", lambda plain: looks_up(plain, self.device)) for kind in LOOK_UPS
            ]
        for move in self._moves:
            move.put_in_place()
        gradient_access.watch_scaling(self, HostEmbeddings._scaled)

    def restore(self) -> None:
        """Let models be moved completely again. Tables that stayed on the host still work there, until `teardown`."""
        for move in self._moves:
            move.put_back()
        gradient_access.leave(self)

    def teardown(self) -> None:
        """Restore torch's own forwards, unless a table on the host still needs ours."""
        if not self._on_host:
            for forward in self._forwards:
                forward.put_back()

    def prepare(self, model: Any) -> None:
        """Report which tables stayed on the host, and why others did not."""
        from hasten.techniques.memory.rows_on_host import several_processes, table_of

        for path, module in model.named_modules():
            weight = table_of(module, self._least)
            if weight is None or module in self._reported:
                continue
            if module in self._on_host and weight.device.type == "cpu":
                self.did("table")
            elif several_processes():
                self.refused("several processes train; torchrec shares a table out among them")
            elif weight.device.type == self.device:
                name = path or type(module).__name__
                self.refused(f"{name} was built on the GPU, or shares its weight with a layer there")
            else:
                continue  # not moved yet, under `hasten.setup`
            self._reported.add(module)

    def model(self, model: Any, args: tuple[Any, ...]) -> None:
        """Report the same for a script's model."""
        self.prepare(model)

    def forward(self, call: Call) -> Call:
        """Add a note to errors about devices, which a script gets if it expects the table on the GPU."""

        def noting(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            try:
                return call(module, args, kwargs)
            except (RuntimeError, ValueError) as error:  # DataParallel, and operators that get tensors of two devices
                if len(self._on_host) and "device" in str(error):
                    error.add_note(
                        "hasten: the technique host_embeddings keeps the weight of embeddings on the CPU: use it by "
                        'the embedding alone, send batches to "cuda" by name, or take the technique out of the plan.'
                    )
                raise

        return noting

    def _staying(self, plain: Any) -> Any:
        """Return a `Module._apply` that leaves a large table on the host."""
        from hasten.techniques.memory.rows_on_host import several_processes, staying, table_of

        def _apply(module: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
            # A kept table stays whatever its size: `model.half()` may have made it smaller than the limit.
            weight = table_of(module, 0 if module in self._on_host else self._least)
            if weight is not None and not several_processes():
                stays = staying(fn, weight, self.device)
                if stays is not fn:
                    self._on_host.add(module)
                    for forward in self._forwards:
                        forward.put_in_place()
                fn = stays
            return plain(module, fn, *args, **kwargs)

        return _apply

    def _scaled(self, how: str) -> None:
        """Refuse a GradScaler: torch (2.13) reads its scale on the host before the copy from the GPU has arrived."""
        if len(self._on_host):
            raise HastenError(
                f"host_embeddings cannot act here: {how}, and torch unscales gradients on the host unsafely",
                "use bfloat16, which needs no scaling, or take host_embeddings out of the plan",
            )
