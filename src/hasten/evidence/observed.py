"""Observations of `doctor` beyond steps and phases: events by line, layers, operators, inputs, machine use.

Every field has a default, since most runs leave only some of this. Series are columns of equal length.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Event:
    """Something a line of the script did during training, counted.

    Attributes:
        kind: What: "item", "tolist", "torch_tensor", "empty_cache", "retained_graph" and so on (`EVENTS`).
        where: `file:line` of the script, past torch and other libraries; "" where it could not be placed.
        count: How often, within training steps.
        steps: In how many steps.
        seconds: What all of them took together, on the CPU's clock.
        device: Type of the tensor's device ("cpu", "cuda"), "" where there is no tensor.
        detail: What else tells: a shape, an option, a class.
    """

    kind: str
    where: str
    count: int
    steps: int = 0
    seconds: float = 0.0
    device: str = ""
    detail: str = ""


EVENTS = {
    "item": "Tensor.item() and float(), int(), bool() of a tensor, or `if tensor:`",
    "tolist": "Tensor.tolist()",
    "cpu": "Tensor.cpu() and .to('cpu') of a tensor on a device",
    "numpy": "Tensor.numpy()",
    "nonzero": "nonzero, argwhere, unique, one-argument where, masked_select",
    "mask": "indexing with a boolean tensor",
    "print": "a tensor turned into text (print, f-string, repr)",
    "moved": "a tensor that was not a loader's copied from the CPU to a device",
    "blocking_copy": "a loader's tensor copied to a device with the CPU waiting; detail: pageable or pinned",
    "torch_tensor": "torch.tensor() of a tensor or an array; detail: of what",
    "empty_cache": "torch.cuda.empty_cache()",
    "gc_collect": "gc.collect()",
    "synchronize": "torch.cuda.synchronize()",
    "retain_graph": "backward(retain_graph=True)",
    "retained_graph": "losses whose graphs were still alive many steps later; where: their backward; count: how many",
    "zero_grad": "Optimizer.zero_grad(set_to_none=False)",
    "clip": "gradients clipped",
    "anomaly": "a step under anomaly detection",
    "profiler": "a step under a profiler",
    "gradcheck": "torch.autograd.gradcheck or gradgradcheck",
    "data_parallel": "torch.nn.DataParallel built",
    "ddp_sync": "a backward that synchronised gradients although more were to be added before the step",
    "ddp_unused": "DistributedDataParallel(find_unused_parameters=True); detail: 'none unused' when none was",
    "attention": "softmax between two matrix products; detail: shape",
    "large_loss": "cross entropy of 2 million logits or more; detail: rows x classes, bytes of a number",
    "save": "torch.save within the training; seconds: how long the loop stood",
    "log": "a logger or file written to within the training",
    "torch_load": "torch.load with weights_only=False",
    "remote_open": "a file opened by gcsfs or s3fs; detail: block size and bytes used",
}


@dataclass(frozen=True)
class Layer:
    """One layer that was called in the sampled steps, in order of its first call.

    Attributes:
        path: Module path from the outermost module ("layer1.0.conv1").
        kind: Class name.
        sizes: in_features, out_features; in_channels, out_channels, groups, and kernel_size, stride, padding, dilation
            (of the last dimension); num_embeddings, embedding_dim; input_size, hidden_size, num_layers; num_heads.
        bias: It has a bias.
        shape: Of its first tensor argument.
        dtype: Of that tensor ("float32", "bfloat16").
        normed_by: Path and kind of the layer that takes its output directly and subtracts each channel's mean, so that
            a bias changes nothing: "layer1.0.bn1 (BatchNorm2d)" (or InstanceNorm); "" if none. Of layers with a bias.
        calls: Per step.
        seconds: Of its forward per step, where that was measured.
        where: `file:line` where its class calls or builds it, if known.
        channels_last: That tensor is 4-D and lies in memory channels last (and not at the same time contiguous).
    """

    path: str
    kind: str
    sizes: dict[str, int] = field(default_factory=dict)
    bias: bool = False
    shape: tuple[int, ...] = ()
    dtype: str = ""
    normed_by: str = ""
    calls: float = 0.0
    seconds: float = 0.0
    where: str = ""
    channels_last: bool = False


@dataclass(frozen=True)
class Line:
    """A line of the script in which the training thread was seen: the innermost of the script's own.

    Attributes:
        where: `file:line`.
        function: Qualified name of the function it is in; "" outside of every function.
        phase: In which part of the step, one of `PHASES`.
        share: Of the time within steps, 0 to 1.
        looks: How often it was seen there.
        in_loop: That function holds the training loop.
        library: The line had called Python code of a library, torch's for instance.
    """

    where: str
    function: str
    phase: str
    share: float
    looks: int
    in_loop: bool = False
    library: bool = False


@dataclass(frozen=True)
class Operator:
    """One operator over the profiled steps. Times are its own, without what it called, in seconds per step."""

    name: str
    calls: float
    seconds: float
    device_seconds: float = 0.0
    shapes: str = ""


@dataclass(frozen=True)
class Sampled:
    """Observations of a few steps under torch's profiler and with hooks on every layer.

    Attributes:
        steps: Numbers (from 0) of the steps that were looked into; their times do not count.
        operators: Those with the most time, worst first; what ran to make a batch, or in a validation, is left out.
        calls: Operators that ran per step, views and the like left out.
        launches: Kernels launched per step; None without a GPU.
        device_busy: Share of an ordinary step in which the GPU computed (kernels' time in the sampled steps by the
            length of the others), 0 to 1; None without one.
        pointwise_seconds: Per step, in pointwise operators (add, mul, relu, dropout...), forward and backward.
        pointwise_calls: Per step, of these.
        graph_breaks: By torch.compile, with the reasons; recompilations likewise.
        trace: Path of the Chrome trace, "" if none was written.
        skipped: Why nothing could be looked into, or "".
    """

    steps: tuple[int, ...] = ()
    operators: tuple[Operator, ...] = ()
    calls: float = 0.0
    launches: float | None = None
    device_busy: float | None = None
    pointwise_seconds: float = 0.0
    pointwise_calls: float = 0.0
    graph_breaks: tuple[str, ...] = ()
    recompilations: tuple[str, ...] = ()
    trace: str = ""
    skipped: str = ""


@dataclass(frozen=True)
class Inputs:
    """Contents of the training loader's first batches, and which sizes came later.

    Attributes:
        shapes: Distinct shapes of the first tensor, with how often each came, most frequent first (at most 64).
        batches: How many batches were looked at for shapes.
        dtype: Of that tensor.
        mean, std, low, high: Over the first batches, for floating-point and uint8 tensors; None otherwise.
        last_mean, last_std: Greatest |mean| and greatest std of a single feature (last dimension of 2-D inputs,
            channel of 4-D ones).
        padding: Share of an integer 2-D tensor that is one trailing value of each row (padding), 0 to 1.
    """

    shapes: tuple[tuple[tuple[int, ...], int], ...] = ()
    batches: int = 0
    dtype: str = ""
    mean: float | None = None
    std: float | None = None
    low: float | None = None
    high: float | None = None
    last_mean: float | None = None
    last_std: float | None = None
    padding: float = 0.0


@dataclass(frozen=True)
class Stages:
    """Where a loader's time goes, sampled where the samples are made (in the workers, if there are any).

    Attributes:
        loader: Which of the evidence's loaders.
        batches: How many were sampled.
        read, decode, transform, collate, other: Seconds per batch in one process; `other` is the dataset's own code.
        python: Share of the samples' time in pure Python of the script or dataset, 0 to 1.
        hottest: `file:line` in which most of that time was spent.
        decoder: What decodes ("PIL", "torchvision", "cv2", "simplejpeg"...), "" if nothing does.
        copies: Share of the time spent passing batches to the training process, where that was seen.
    """

    loader: int
    batches: int = 0
    read: float = 0.0
    decode: float = 0.0
    transform: float = 0.0
    collate: float = 0.0
    other: float = 0.0
    python: float = 0.0
    hottest: str = ""
    decoder: str = ""
    copies: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds per batch, all stages together."""
        return sum(self.by_name.values())

    @property
    def by_name(self) -> dict[str, float]:
        """Seconds per batch of each stage."""
        return {name: float(getattr(self, name)) for name in ("read", "decode", "transform", "collate", "other")}


@dataclass(frozen=True)
class GpuUse:
    """One GPU over time (NVML): shares 0 to 1, bytes, watts, MHz, bytes per second."""

    name: str
    memory_total: int = 0
    power_limit: float = 0.0
    busy: tuple[float, ...] = ()
    memory: tuple[int, ...] = ()
    power: tuple[float, ...] = ()
    clock: tuple[float, ...] = ()
    throttled: tuple[str, ...] = ()
    pcie_in: tuple[float, ...] = ()
    pcie_out: tuple[float, ...] = ()


@dataclass(frozen=True)
class Use:
    """The machine over time, as the process that watched the training saw it.

    Attributes:
        at: When each sample was taken, seconds on the evidence's clock.
        cpu: Cores' worth of CPU the training's processes used (1.7: one core and 70 % of another).
        main: Of these, the process that trains.
        workers: Of these, its loader's workers.
        worker_count: How many worker processes there were.
        cores: Per core that the training may use, share busy (whoever used it), 0 to 1, averaged over the training.
        rss: Bytes of memory of all the training's processes; `main_rss` of the one that trains.
        shm: Bytes used in /dev/shm.
        disk_read, disk_write, net_in, net_out: Bytes per second (the network's and the disk's are the machine's).
        waiting: Share of time the machine's CPUs waited for disks (iowait), 0 to 1.
        gpus: One each.
    """

    at: tuple[float, ...] = ()
    cpu: tuple[float, ...] = ()
    main: tuple[float, ...] = ()
    workers: tuple[float, ...] = ()
    worker_count: tuple[int, ...] = ()
    cores: tuple[float, ...] = ()
    rss: tuple[int, ...] = ()
    main_rss: tuple[int, ...] = ()
    shm: tuple[int, ...] = ()
    disk_read: tuple[float, ...] = ()
    disk_write: tuple[float, ...] = ()
    net_in: tuple[float, ...] = ()
    net_out: tuple[float, ...] = ()
    waiting: tuple[float, ...] = ()
    gpus: tuple[GpuUse, ...] = ()


@dataclass(frozen=True)
class Surroundings:
    """The environment of the training process.

    Attributes:
        omp_threads: OMP_NUM_THREADS as it was set, or None.
        threads: What torch.get_num_threads() gave during training.
        interop_threads: Likewise.
        processes: Training processes on this machine (LOCAL_WORLD_SIZE).
        preload: LD_PRELOAD; allocator: PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF.
        data_folder: Where the dataset's files lie, as far as it could be told; "" if it has none.
        filesystem: Of that folder: "ext4", "nfs4", "overlay", "fuse.gcsfuse"; rotational: a spinning disk.
        jpeg: What PIL decodes JPEGs with: "libjpeg-turbo", "libjpeg", "" without PIL.
    """

    omp_threads: int | None = None
    threads: int = 0
    interop_threads: int = 0
    processes: int = 1
    preload: str = ""
    allocator: str = ""
    data_folder: str = ""
    filesystem: str = ""
    rotational: bool | None = None
    jpeg: str = ""


@dataclass(frozen=True)
class MemoryPoint:
    """Memory at a step: resident bytes of the process, bytes allocated on the GPU (None without one).

    `faults` are the pages that the kernel had handed to the process so far (minor page faults), `system` the seconds
    of CPU it had spent for it so far; None where nobody asked.
    """

    step: int
    rss: int
    gpu: int | None = None
    faults: int | None = None
    system: float | None = None


@dataclass(frozen=True)
class Measurement:
    """One change tried on the machine itself, on the very shapes of a run: before and after in turn (A B A B).

    Attributes:
        finding: Name of the rule it is for ("odd_sizes").
        what: What was changed ("Linear 768 -> 50257: out_features 50257 -> 50264").
        where: Module path, operator or place.
        before, after: Median seconds of one forward and backward (or of one optimizer step).
        wins: Share of the turns in which `after` was the faster, 0 to 1.
        turns: How many there were.
        calls: How often this happens in a step.
        detail: What it was changed to, for the fix ("out_features=50264").
        failed: Why it could not be measured, or "".
    """

    finding: str
    what: str
    where: str = ""
    before: float = 0.0
    after: float = 0.0
    wins: float = 0.0
    turns: int = 0
    calls: float = 1.0
    detail: str = ""
    failed: str = ""

    @property
    def saved(self) -> float:
        """Seconds saved each time; below 0 where it got slower, 0 where the turns do not agree.

        They do where chance alone would hardly part them so: 6 of 6, 8 of 9, 12 of 15, 19 of 25 (a sign test at 1 %).
        """
        sure = abs(2 * self.wins - 1) * self.turns**0.5 >= 2.3
        return self.before - self.after if sure and not self.failed else 0.0

    @property
    def gain(self) -> float:
        """`saved` as a share of `before`."""
        return self.saved / self.before if self.before > 0 else 0.0


@dataclass(frozen=True)
class TriedLive:
    """A technique switched on and off in the training while it ran: blocks of steps with and without it, in turn.

    Attributes:
        finding: Name of the rule whose cure it is ("full_precision").
        technique: The technique.
        setting: Its setting, as in a plan ("bf16-mixed").
        besides: What else was switched with it, since the cure says so: lines of a plan.
        ratio: How many times less a step takes with it: geometric mean of the pairs of neighbouring blocks.
        low, high: 95 % interval of that (Student's t over the pairs).
        blocks: How many there were on each side.
        steps: How many steps they had on each side, on average.
        before: Mean seconds of a step without it; validation and checkpoints are left out.
        failed: Why it could not be measured, or "".
    """

    finding: str
    technique: str
    setting: str
    besides: tuple[str, ...] = ()
    ratio: float = 1.0
    low: float = 0.0
    high: float = 0.0
    blocks: int = 0
    steps: float = 0.0
    before: float = 0.0
    failed: str = ""

    @property
    def saved(self) -> float:
        """Share of the step that it saves, below 0 where a step takes longer."""
        return 1 - 1 / self.ratio if self.ratio > 0 else 0.0
