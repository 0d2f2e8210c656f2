"""Great embedding tables that stay on the host, with their gradient and the optimizer's state."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from hasten.errors import HastenError
from hasten.evidence import Evidence
from hasten.plan import Setting
from hasten.techniques import gradient_access
from hasten.techniques.base import Call, Choices, CudaOnly, Effect, Refusal, Resource
from hasten.techniques.replaced import Replaced

_LEAST = 64  # MiB, with `true`


class HostEmbeddings(CudaOnly):
    """Keep great embedding tables, their gradients and optimizer state on the host; a batch's rows go to the GPU.

    Acts where a model that was built on the host is moved (`model.to("cuda")`, the Trainer): each `nn.Embedding` and
    `nn.EmbeddingBag` of 64 MiB or more (a number sets another size in MiB) keeps its weight there, the same Parameter.
    Its forward gathers the distinct rows of the batch on the host and copies them over; their gradient comes back,
    and the script's own optimizer steps the table on the host. So any optimizer of torch's is right, momentum and
    weight decay of rows that a batch lacks included, and state dicts and checkpoints are as without. The price of a
    dense gradient is several passes over the whole table in the host's memory at each step; with `sparse=True`, and an
    optimizer that takes it, only the batch's rows are touched. The table is not pinned: the GPU never reads it, only
    the rows that were gathered from it.

    The host's kernels step the table, and its gradient is added up by row first, so results differ by rounding. Left
    to the GPU: tables built there, modules with a forward of their own, tables that share their weight with a layer
    there, trainings by several processes. A script must not ask the table for the device of its batches, nor read its
    weight elsewhere on the GPU: that ends in torch's error about devices, with a note. Beside a GradScaler it ends in
    an error. It has not been run on a GPU: its paths were tested with a CPU in the place of the GPU.
    """

    name = "host_embeddings"
    effect = Effect.ROUNDING
    relieves = Resource.MEMORY
    sources = ("SpeedTorch",)
    values = int
    example = "true"
    acts_on = "an nn.Embedding or nn.EmbeddingBag of that size that is moved to a GPU"
    device = "cuda"
    """Type of the device that tables are kept from: tests keep them from a CPU."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._least = (_LEAST if setting is True else int(str(setting))) << 20
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._kept: weakref.WeakSet[Any] = weakref.WeakSet()
        self._moves: list[Replaced] = []
        self._forwards: list[Replaced] = []

    @classmethod
    def check(cls, setting: Setting) -> str:
        """`true`, or MiB."""
        return "" if setting is True or (type(setting) is int and setting >= 1) else "must be true or a size in MiB"

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """None by itself: it saves memory."""
        return cls.refuse_without_gpu(evidence) or Refusal(
            "it saves the GPU's memory and costs time: `host_embeddings = true` in a plan switches it on"
        )

    @classmethod
    def clashes(cls, setting: Setting, plan: Mapping[str, Setting]) -> str:
        """What wants all parameters, or all gradients, on one device."""
        if plan.get("precision") == "16-mixed":
            return 'precision = "16-mixed" looks for overflows on one device'
        if plan.get("optimizer_in_backward", False) is not False:
            return "optimizer_in_backward steps parameters of one device"
        return "compiled code cannot look up rows on the host" if plan.get("compile", False) is not False else ""

    def process(self) -> None:
        """Have models leave their tables on the host when they are moved."""
        from hasten.techniques.memory.rows_on_host import LOOK_UPS, looks_up

        if not self._moves:
            self._moves = [Replaced(kind, "_apply", self._staying) for kind in LOOK_UPS]
            self._forwards = [
                Replaced(kind, "forward", lambda plain: looks_up(plain, self.device)) for kind in LOOK_UPS
            ]
        for move in self._moves:
            move.put_in_place()
        gradient_access.watch_scaling(self, HostEmbeddings._scaled)

    def restore(self) -> None:
        """Let models be moved whole again; tables that are on the host are still found there."""
        for move in self._moves:
            move.put_back()
        gradient_access.leave(self)

    def over(self) -> None:
        """Put torch's own forwards back, unless a table that is still there needs ours."""
        if not self._kept:
            for forward in self._forwards:
                forward.put_back()

    def prepare(self, model: Any) -> None:
        """Note which tables stayed on the host, and why others did not."""
        from hasten.techniques.memory.rows_on_host import several_processes, table_of

        for path, module in model.named_modules():
            weight = table_of(module, self._least)
            if weight is None or module in self._seen:
                continue
            if module in self._kept and weight.device.type == "cpu":
                self.did("table")
            elif several_processes():
                self.refused("several processes train; torchrec shares a table out among them")
            elif weight.device.type == self.device:
                name = path or type(module).__name__
                self.refused(f"{name} was built on the GPU, or shares its weight with a layer there")
            else:
                continue  # not moved yet, under `hasten.setup`
            self._seen.add(module)

    def model(self, model: Any, args: tuple[Any, ...]) -> None:
        """Note it for a script's model."""
        self.prepare(model)

    def forward(self, call: Call) -> Call:
        """Say where the table is, if the script looks for it on the GPU."""

        def noting(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            try:
                return call(module, args, kwargs)
            except (RuntimeError, ValueError) as error:  # DataParallel, and operators that get tensors of two devices
                if len(self._kept) and "device" in str(error):
                    error.add_note(
                        "hasten: the technique host_embeddings keeps the weight of embeddings on the CPU: use it by "
                        'the embedding alone, send batches to "cuda" by name, or take the technique out of the plan.'
                    )
                raise

        return noting

    def _staying(self, plain: Any) -> Any:
        """Return `Module._apply`, which leaves a great table on the host."""
        from hasten.techniques.memory.rows_on_host import several_processes, staying, table_of

        def _apply(module: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
            weight = table_of(module, 0 if module in self._kept else self._least)  # it may be in 16 bits by now
            if weight is not None and not several_processes():
                stays = staying(fn, weight, self.device)
                if stays is not fn:
                    self._kept.add(module)
                    for forward in self._forwards:
                        forward.put_in_place()
                fn = stays
            return plain(module, fn, *args, **kwargs)

        return _apply

    def _scaled(self, how: str) -> None:
        """Refuse a GradScaler: torch (2.13) reads its scale on the host before the copy from the GPU is there."""
        if len(self._kept):
            raise HastenError(
                f"host_embeddings cannot act here: {how}, and torch unscales gradients on the host unsafely",
                "use bfloat16, which needs no scaling, or take host_embeddings out of the plan",
            )
