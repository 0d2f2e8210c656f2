"""Compute the worth of a finding: seconds as a share of the steady step."""

from __future__ import annotations

from hasten.evidence.figures import percent
from hasten.evidence.finding import HowKnown
from hasten.evidence.observed import Layer, LiveTrial, Measurement
from hasten.evidence.schema import ASIDE, Evidence, Phase

COMPUTE = (Phase.FORWARD, Phase.BACKWARD)
_WIDTHS = {"float64": 8, "bfloat16": 2, "float16": 2}  # bytes per number; other dtypes: 4
LEAST = 0.01
"""Least worth of a finding about time to be reported."""
CERTAIN = 0.05
"""Least share of the step for which layers benchmarked one by one on a CPU predict the gain of the whole step."""


def seconds_of(evidence: Evidence, *phases: Phase) -> float:
    """Return the mean seconds of these phases in a steady step."""
    return sum(evidence.mean(phase) for phase in phases)


def steady_seconds(evidence: Evidence) -> float:
    """Return the mean seconds of a steady step, without validation and checkpoints; 0 without steps."""
    return seconds_of(evidence, *(phase for phase in Phase if phase not in ASIDE))


def share_of(evidence: Evidence, seconds: float) -> float:
    """Return seconds per step as a share of the steady step, 0 to 1; 0 without steps."""
    step = steady_seconds(evidence)
    return min(1.0, max(0.0, seconds / step)) if step > 0 and seconds == seconds else 0.0  # NaN differs from itself


def on_gpu(evidence: Evidence) -> bool:
    """Return whether a model is trained on a GPU; a model that only runs there (a frozen teacher) does not count."""
    trained = [model for model in evidence.models if model.train_calls or model.backward_through_eval]
    # During the first step no model is known to be trained yet: then all models count.
    return any(model.device == "cuda" for model in trained or evidence.models)


def peak_memory(evidence: Evidence) -> tuple[int, int]:
    """Return the memory of the device used for training, and the training's peak there, in bytes; 0 if unknown."""
    if on_gpu(evidence):
        return next((gpu.memory_total for gpu in evidence.used.gpus), 0), evidence.peak_gpu_bytes or 0
    return evidence.machine.memory_bytes, process_peak(evidence)


def process_peak(evidence: Evidence) -> int:
    """Return the peak memory of the training's processes in bytes, as far as it was observed."""
    return max([evidence.peak_memory_bytes, *evidence.used.rss])


def weight_bytes(evidence: Evidence) -> tuple[int, int]:
    """Return the bytes of the trained models' weights, and of their gradients."""
    trained = [(_WIDTHS.get(model.dtype, 4), model) for model in evidence.models if model.train_calls]
    return sum(width * model.parameters for width, model in trained), sum(
        width * model.trained_parameters for width, model in trained
    )


def saved(evidence: Evidence, tried: list[Measurement]) -> float:
    """Return the share of the step that a change saves, given its benchmarks on layers; losses count against gains.

    Only differences beyond the noise count. Layers may be slower in a benchmark than in the run, so their total time
    is scaled down to the run's forward and backward if it exceeds them.
    """
    total = sum(layer.before * layer.calls for layer in tried)
    compute = seconds_of(evidence, *COMPUTE)
    scale = min(1.0, compute / total) if total > 0 else 0.0
    return share_of(evidence, scale * sum(layer.saved * layer.calls for layer in tried))


def switched(
    evidence: Evidence, finding: str, claimed: float, how_known: HowKnown
) -> tuple[float, HowKnown, tuple[str, ...]]:
    """Return a finding's worth, how it is known and a line about it, corrected by switching its cure in the run.

    A certain gain in the run is the worth. If the gain may be due to chance, a claim that was measured otherwise stands
    unless the blocks contradict it; an estimated claim is limited to the gain in the blocks.

    Args:
        evidence: The run's evidence. If its `tried` has no result for the finding, the claim is returned unchanged.
        finding: The finding's name.
        claimed: Its worth as known otherwise, as a share of the step.
        how_known: How that is known.
    """
    tried = evidence.tried_live(finding)
    if tried is None:
        return claimed, how_known, ()
    words = (_in_blocks(tried),)
    if tried.low > 1:
        return tried.saved, HowKnown.MEASURED, words
    if how_known is HowKnown.MEASURED and claimed <= 1 - 1 / tried.high:
        return claimed, how_known, words
    return min(claimed, max(0.0, tried.saved)), HowKnown.ESTIMATED, words


def is_sure(evidence: Evidence, finding: str) -> bool:
    """Return whether switching a finding's cure on and off in the run showed a certain gain."""
    tried = evidence.tried_live(finding)
    return tried is not None and tried.low > 1


def _in_blocks(tried: LiveTrial) -> str:
    interval = f"{tried.ratio:.2f}x [{tried.low:.2f}, {tried.high:.2f}]"
    besides = f", with {' and '.join(tried.besides)}" if tried.besides else ""
    return f"switched on and off in this run, in {tried.blocks} blocks each{besides}: {interval} as fast a step"


def gain_of(tried: list[Measurement]) -> float:
    """Return the share of these layers' total time that a change saves."""
    before = sum(layer.before * layer.calls for layer in tried)
    return 1 - sum(layer.after * layer.calls for layer in tried) / before if before > 0 else 0.0


def place_of(evidence: Evidence, tried: Measurement) -> str:
    """Return the `file:line` of the layer that was measured; "" if unknown."""
    path = tried.where.partition(" and ")[0]
    return next((layer.where for layer in evidence.layers if layer.path == path), "")


def in_words(tried: Measurement) -> str:
    """Format a measurement as a line of a finding's details."""
    times = f"{short(tried.before)} -> {short(tried.after)}, faster in {percent(tried.wins)} of {tried.turns} turns"
    return f"{tried.where}: {tried.what}: {times}" if tried.where else f"{tried.what}: {times}"


def short(seconds: float) -> str:
    """Format seconds in a suitable unit.

    >>> short(0.00123), short(2.5e-5), short(3.0)
    ('1.23 ms', '25 us', '3 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def products(evidence: Evidence, convolutions: bool = True, least: float = 0.0) -> float:
    """Return the seconds per sampled step in operators that tensor cores speed up: matrix products and convolutions.

    Args:
        evidence: The run's evidence.
        convolutions: Whether to count convolutions.
        least: Fewest seconds per call of an operator to be counted.
    """
    if evidence.sampled is None:
        return 0.0
    telling = ("mm", "linear", "matmul", "lstm", "gru", "rnn", *(("conv",) if convolutions else ()))
    return sum(
        operator.device_seconds or operator.seconds
        for operator in evidence.sampled.operators
        if any(word in operator.name.rpartition("::")[2].lower() for word in telling)
        and operator.seconds >= least * operator.calls
    )


def size_of(layer: Layer) -> str:
    """Format a layer with its sizes: "Linear 768 -> 3072", "Conv2d 3 -> 64, 7x7".

    >>> size_of(Layer("head", "Linear", {"in_features": 768, "out_features": 50257}))
    'Linear 768 -> 50257'
    """
    sizes = layer.sizes
    for left, right in (("in_features", "out_features"), ("in_channels", "out_channels")):
        if left in sizes and right in sizes:
            kernel = f", {sizes['kernel_size']}x{sizes['kernel_size']}" if "kernel_size" in sizes else ""
            return f"{layer.kind} {sizes[left]} -> {sizes[right]}{kernel}"
    return " ".join([layer.kind, *(f"{name}={size}" for name, size in sizes.items())])
