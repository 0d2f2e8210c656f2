"""The process in which `measure` benchmarks changes: reads jobs from standard input, writes measurements as JSON.

Before and after run in turn, A B A B, so that other load on the machine affects both alike. Each turn repeats the call
until it takes a few milliseconds. The result is the median of each side's turns, and the share of the turns in which
`after` was faster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from hasten.doctor.verdict.measure_cases import NO_TIME, TINY_OPERATORS, Case, Job
from hasten.evidence import Measurement

_TURN_SECONDS = 0.004  # least seconds of a turn
_MOST_SECONDS = 1.2  # most seconds of a job
_MOST_TURNS = 25
_FEWEST_TURNS = 6  # unless they take too long; with fewer than 6 no result is significant


def main() -> None:
    """Run the jobs from standard input and print their measurements."""
    import torch
    from pydantic import TypeAdapter

    request = json.load(sys.stdin)
    jobs = TypeAdapter(list[Job]).validate_python(request["jobs"])
    if request["threads"]:
        torch.set_num_threads(request["threads"])
    torch.manual_seed(0)
    measured = []
    ends = time.perf_counter() + request["seconds"]  # the import of torch, above, does not count
    for index, job in enumerate(jobs):
        remaining = ends - time.perf_counter()
        limit = min(
            _MOST_SECONDS, remaining / (len(jobs) - index)
        )  # time that a quick job saved goes to the jobs after it
        measured.append(dataclasses.asdict(_try(job, request["device"], limit)))
    json.dump(measured, sys.stdout)
    print()


def _try(job: Job, device: str, limit: float) -> Measurement:
    """Time one job within about `limit` seconds; if it fails, return why."""
    result = Measurement(job.finding, job.what, job.where, calls=job.calls, detail=job.detail)
    if limit < 0.05:
        return dataclasses.replace(result, failed=NO_TIME)
    try:
        befores, afters = take_turns(job.before, job.after, device, limit)
    except Exception as error:  # torch may raise anything for these sizes or options: report it, go on with other jobs
        return dataclasses.replace(result, failed=f"{type(error).__name__}: {error}".splitlines()[0])
    afters = [seconds * job.after_factor for seconds in afters]
    wins = sum(after < before for before, after in zip(befores, afters, strict=True)) / len(befores)
    return dataclasses.replace(
        result,
        before=statistics.median(befores) * job.time_factor,
        after=statistics.median(afters) * job.time_factor,
        wins=wins,
        turns=len(befores),
    )


def take_turns(before: Case, after: Case, device: str, limit: float) -> tuple[list[float], list[float]]:
    """Return the seconds per call of each side, turn by turn, within about `limit` seconds.

    There are at least six turns, unless they take over three times the limit.
    """
    wait = _waiter(device)
    calls = [build(case, device) for case in (before, after)]
    repeats = 1
    for case, call in zip((before, after), calls, strict=True):
        with global_settings(case):
            call()  # warm-up: the first call allocates, and chooses kernels
            wait()
            single = -time.perf_counter()
            call()
            wait()
            single += time.perf_counter()
        repeats = max(repeats, min(1000, math.ceil(_TURN_SECONDS / max(single, 1e-7))))
    turns: tuple[list[float], list[float]] = ([], [])
    started = time.perf_counter()
    while len(turns[0]) < _MOST_TURNS:
        elapsed = time.perf_counter() - started
        if elapsed > limit and (len(turns[0]) >= _FEWEST_TURNS or elapsed > 3 * limit):
            break
        for case, call, seconds in zip((before, after), calls, turns, strict=True):
            with global_settings(case):
                wait()
                start = time.perf_counter()
                for _ in range(repeats):
                    call()
                wait()
                seconds.append((time.perf_counter() - start) / repeats)
    return turns


def _waiter(device: str) -> Callable[[], None]:
    """Return a function that waits for the device to finish; on a CPU it does nothing."""
    import torch

    return torch.cuda.synchronize if device == "cuda" else lambda: None


@contextlib.contextmanager
def global_settings(case: Case) -> Iterator[None]:
    """Set the global settings of a case while it runs, and restore them."""
    import torch

    with contextlib.ExitStack() as stack:
        previous = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
        torch.set_float32_matmul_precision(case.matmul_precision)
        torch.backends.cudnn.benchmark = case.cudnn_benchmark
        stack.callback(torch.set_float32_matmul_precision, previous[0])
        stack.callback(setattr, torch.backends.cudnn, "benchmark", previous[1])
        if case.anomaly:
            stack.enter_context(torch.autograd.set_detect_anomaly(True))
        if case.profiler:
            stack.enter_context(torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]))
        yield


def build(case: Case, device: str) -> Callable[[], object]:
    """Return a function that runs a case once: forward and backward, or an optimizer's step."""
    import torch

    if case.parameters:
        return _optimizer(case, device)
    if case.kind == "tiny":
        return _tiny(case, device)
    if case.kind in ("attention", "sdpa"):
        return _attention(case, device)
    dtype = getattr(torch, case.dtype)
    layer = _layer(case).to(device=device, dtype=dtype)
    if case.kind == "Embedding":
        inputs: Any = torch.randint(case.sizes["num_embeddings"], case.shape, device=device)
        targets = list(layer.parameters())
    else:
        inputs = torch.randn(case.shape, device=device, dtype=dtype)
        if case.channels_last:
            layer, inputs = layer.to(memory_format=torch.channels_last), _channels_last(inputs)
        targets = list(layer.parameters()) if case.first else [inputs.requires_grad_(), *layer.parameters()]
    return _differentiated(lambda: layer(inputs), targets, case.autocast, device)


def _channels_last(tensor: Any) -> Any:
    import torch

    return tensor.contiguous(memory_format=torch.channels_last)


def _layer(case: Case) -> Any:
    """Build a case's layer, with its norm if any; sizes that the evidence does not hold get torch's usual values."""
    from torch import nn

    sizes = case.sizes
    layer: Any
    if case.kind == "Linear":
        layer, width = nn.Linear(sizes["in_features"], sizes["out_features"], case.bias), sizes["out_features"]
    elif case.kind == "Embedding":
        return nn.Embedding(sizes["num_embeddings"], sizes["embedding_dim"])
    elif case.kind in ("LSTM", "GRU"):
        layers = sizes.get("num_layers", 1)
        return getattr(nn, case.kind)(case.shape[-1], sizes["hidden_size"], layers, batch_first=True)
    else:
        kernel = sizes.get("kernel_size", 3)
        layer = getattr(nn, case.kind)(
            sizes["in_channels"],
            sizes["out_channels"],
            kernel,
            stride=sizes.get("stride", 1),
            padding=sizes.get("padding", kernel // 2),
            dilation=sizes.get("dilation", 1),
            groups=sizes.get("groups", 1),
            bias=case.bias,
        )
        width = sizes["out_channels"]
    return nn.Sequential(layer, getattr(nn, case.norm)(width)) if case.norm else layer


def _differentiated(forward: Callable[[], Any], targets: list[Any], autocast: str, device: str) -> Callable[[], object]:
    """Return a function that runs forward and backward; it returns the gradients instead of accumulating them."""
    import torch

    context = torch.autocast(device, getattr(torch, autocast)) if autocast else contextlib.nullcontext()
    gradient: list[Any] = []

    def call() -> object:
        with context:
            output = forward()
        output = output[0] if isinstance(output, tuple) else output
        if not gradient:  # built once, at the first call, when the output's shape is known: not part of a timed call
            gradient.append(torch.randn_like(output))
        return torch.autograd.grad(output, targets, gradient[0])

    return call


def _attention(case: Case, device: str) -> Callable[[], object]:
    """Return a function that runs attention, as two matrix products and a softmax or as torch's fused operator."""
    import torch

    query, key, value = (torch.randn(case.shape, device=device, requires_grad=True) for _ in range(3))
    scale = case.shape[-1] ** -0.5

    def by_hand() -> Any:
        return torch.softmax(query @ key.transpose(-2, -1) * scale, -1) @ value

    def fused() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)

    forward = by_hand if case.kind == "attention" else fused
    return _differentiated(forward, [query, key, value], case.autocast, device)


def _tiny(case: Case, device: str) -> Callable[[], object]:
    """Return a function that runs 20 small layers, each with two operators in its forward and four in its backward."""
    import torch

    start = torch.randn(case.shape, device=device, requires_grad=True)
    layers = [torch.nn.Linear(case.shape[-1], case.shape[-1], device=device) for _ in range(TINY_OPERATORS // 6)]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]

    def forward() -> Any:
        value = start
        for layer in layers:
            value = torch.relu(layer(value))
        return value

    return _differentiated(forward, [start, *parameters], "", device)


def _optimizer(case: Case, device: str) -> Callable[[], object]:
    """Return the `step` of an optimizer whose parameters have gradients."""
    import torch

    parameters = [torch.randn(shape, device=device, requires_grad=True) for shape in case.parameters]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    options: dict[str, Any] = {**case.options, "lr": 1e-5}
    # `foreach` is left out with `fused`: torch refuses both together.
    options.update({"fused": True} if case.fused else {"foreach": case.foreach})
    optimizer = getattr(torch.optim, case.kind)(parameters, **options)
    step: Callable[[], object] = optimizer.step
    return step


if __name__ == "__main__":
    main()
