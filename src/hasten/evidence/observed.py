"""Observations of `doctor` beyond steps and phases: events by line, layers, operators, inputs, machine use.

Every field has a default, since most runs record only some of these. Series are columns of equal length.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Event:
    """A kind of call that a line of the script made during training, with its count and time.

    Attributes:
        kind: One of `EVENTS`: "item", "tolist", "torch_tensor", "empty_cache", "retained_graph" and so on.
        where: `file:line` of the script, skipping torch and other libraries; "" if unknown.
        count: Number of calls within training steps.
        steps: Number of steps with such calls.
        seconds: Total seconds of these calls, on the CPU's clock.
        device: Type of the tensor's device ("cpu", "cuda"); "" if there is no tensor.
        detail: Further information: a shape, an option, a class.
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
    """One layer that was called in the sampled steps; layers are in order of their first call.

    Attributes:
        path: Module path from the outermost module ("layer1.0.conv1").
        kind: Class name.
        sizes: in_features, out_features; in_channels, out_channels, groups, and kernel_size, stride, padding, dilation
            (of the last dimension); num_embeddings, embedding_dim; input_size, hidden_size, num_layers; num_heads.
        bias: Whether it has a bias.
        shape: Shape of its first tensor argument.
        dtype: Dtype of that tensor ("float32", "bfloat16").
        normed_by: For a layer with a bias: path and kind of the layer that takes its output directly and subtracts each
            channel's mean, so that the bias changes nothing: "layer1.0.bn1 (BatchNorm2d)" (or InstanceNorm); else "".
        calls: Calls per step.
        seconds: Seconds of its forwards per step, if measured.
        where: `file:line` where its class calls or builds it, if known.
        channels_last: Whether that tensor is 4-D in channels_last memory format (and not contiguous as well).
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
class SampledLine:
    """A line of the script at which the training thread was sampled: the innermost line of the script's own code.

    Attributes:
        where: `file:line`.
        function: Qualified name of the line's function; "" outside of every function.
        phase: The phase of the step, one of `PHASES`.
        share: Share of the time within steps, 0 to 1.
        looks: Number of samples.
        in_loop: Whether that function contains the training loop.
        library: Whether the line had called Python code of a library, such as torch.
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
    """One operator over the profiled steps. Times exclude the operators it called, in seconds per step."""

    name: str
    calls: float
    seconds: float
    device_seconds: float = 0.0
    shapes: str = ""


@dataclass(frozen=True)
class Sampled:
    """Observations of a few steps under torch's profiler and with hooks on every layer.

    Attributes:
        steps: Numbers (from 0) of the sampled steps; their times do not count.
        operators: The operators with the most time, slowest first, except those that made batches or ran in validation.
        calls: Operators per step, except views and the like.
        launches: Kernels launched per step; None without a GPU.
        device_busy: Share of an ordinary step in which the GPU computed (the kernels' time in the sampled steps divided
            by the length of the other steps), 0 to 1; None without a GPU.
        pointwise_seconds: Seconds per step in pointwise operators (add, mul, relu, dropout...), forward and backward.
        pointwise_calls: Pointwise operators per step.
        graph_breaks: Graph breaks of torch.compile, with the reasons.
        recompilations: Recompilations of torch.compile, with the reasons.
        trace: Path of the Chrome trace; "" if none was written.
        skipped: Why nothing could be sampled, or "".
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
    """Contents of the training loader's first batches, and the shapes of later ones.

    Attributes:
        shapes: Distinct shapes of a batch's first tensor with their counts, most frequent first (at most 64).
        batches: Number of batches whose shapes were counted.
        dtype: Dtype of that tensor.
        mean, std, low, high: Statistics over the first batches, for floating-point and uint8 tensors; else None.
        last_mean, last_std: Greatest |mean| and greatest std of a single feature (last dimension of 2-D inputs,
            channel of 4-D inputs).
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
    """Seconds of a loader's stages, sampled in the process that makes the samples (a worker, if there are any).

    Attributes:
        loader: Index of the loader in the evidence's `loaders`.
        batches: Number of batches sampled.
        read, decode, transform, collate, other: Seconds per batch in one process; `other` is the dataset's own code.
        python: Share of the samples' time in pure Python of the script or dataset, 0 to 1.
        hottest: The `file:line` with most of that time.
        decoder: The decoding library ("PIL", "torchvision", "cv2", "simplejpeg"...); "" if nothing is decoded.
        copies: Share of the time spent passing batches to the training process, if observed.
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
class MachineUse:
    """Use of the machine over time, sampled by the process that watched the training.

    Attributes:
        at: When each sample was taken, in seconds on the evidence's clock.
        cpu: CPU use of the training's processes, in cores (1.7: one core and 70 % of another).
        main: The part of `cpu` used by the process that trains.
        workers: The part of `cpu` used by its loader's workers.
        worker_count: Number of worker processes.
        cores: For each core that the training may use, the share of time it was busy (with any process), 0 to 1.
        rss: Bytes of memory of all the training's processes; `main_rss`: of the process that trains.
        shm: Bytes used in /dev/shm.
        disk_read, disk_write, net_in, net_out: Bytes per second (of the whole machine for network and disk).
        waiting: Share of time that the machine's CPUs waited for disks (iowait), 0 to 1.
        gpus: One entry per GPU.
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
class ProcessEnvironment:
    """The environment of the training process.

    Attributes:
        omp_threads: OMP_NUM_THREADS if it was set, else None.
        threads: torch.get_num_threads() during training.
        interop_threads: torch.get_num_interop_threads() during training.
        processes: Training processes on this machine (LOCAL_WORLD_SIZE).
        preload: LD_PRELOAD; allocator: PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF.
        data_folder: Folder of the dataset's files; "" if unknown or if it has none.
        filesystem: That folder's file system: "ext4", "nfs4", "overlay", "fuse.gcsfuse"; rotational: a spinning disk.
        jpeg: The library with which PIL decodes JPEGs: "libjpeg-turbo", "libjpeg"; "" without PIL.
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
    """Memory at a step: resident bytes of the process, bytes allocated on the GPU (None without a GPU).

    `faults` are the process's minor page faults so far, `system` the kernel's CPU seconds for it so far; None if they
    were not recorded.
    """

    step: int
    rss: int
    gpu: int | None = None
    faults: int | None = None
    system: float | None = None


@dataclass(frozen=True)
class Measurement:
    """One change benchmarked on this machine with the shapes of a run: before and after in turn (A B A B).

    Attributes:
        finding: Name of the rule that suggests it ("odd_sizes").
        what: The change ("Linear 768 -> 50257: out_features 50257 -> 50264").
        where: Module path, operator or place.
        before, after: Median seconds of one forward and backward (or of one optimizer step).
        wins: Share of the turns in which `after` was faster, 0 to 1.
        turns: Number of turns.
        calls: How often it happens in a step.
        detail: The new setting, for the fix ("out_features=50264").
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
        """Seconds saved per call: negative if it got slower, 0 if the turns do not agree.

        They agree if chance alone would hardly split them so: 6 of 6, 8 of 9, 12 of 15, 19 of 25 (a sign test at 1 %).
        """
        significant = abs(2 * self.wins - 1) * self.turns**0.5 >= 2.3
        return self.before - self.after if significant and not self.failed else 0.0

    @property
    def gain(self) -> float:
        """`saved` as a share of `before`."""
        return self.saved / self.before if self.before > 0 else 0.0


@dataclass(frozen=True)
class LiveTrial:
    """A technique switched on and off in the running training: blocks of steps with and without it, in turn.

    Attributes:
        finding: Name of the rule whose cure it is ("full_precision").
        technique: The technique.
        setting: Its setting, as in a plan ("bf16-mixed").
        besides: Techniques that the cure requires to be switched with it, as lines of a plan.
        ratio: Speed-up of a step with it: geometric mean over pairs of neighbouring blocks.
        low, high: 95 % interval of the ratio (Student's t over the pairs).
        blocks: Number of blocks on each side.
        steps: Average number of steps on each side.
        before: Mean seconds of a step without it, excluding validation and checkpoints.
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
        """Share of the step that it saves; negative if a step takes longer."""
        return 1 - 1 / self.ratio if self.ratio > 0 else 0.0
