"""How far `hasten plan-cluster` is off: against real processes over gloo, and against published tables.

    python benchmarks/plan_cluster.py [--rounds 3] [--json FILE]

1. On this machine, with 1, 2 and 4 processes of one thread over the loopback. In turn, in the same processes:
   all-reduces of several sizes, to which latency and bandwidth are fitted; a step's phases under
   DistributedDataParallel with all processes computing, each in a group of its own, so that cores which they share and
   what DDP does beside sending count as they are; an all-reduce of the gradients' bytes; their exchange as `hasten run
   --devices` does it, packing included, which the planner does not count; a step of DDP that sends. Of each the lower
   quartile is taken, since others disturb. The planner has the first two, and says the others. A loopback has no
   network card: messages are copied by the cores that compute, so a step is also held against messages that travel
   beside nothing. Errors are medians of the rounds, a minute each. On a machine where others work too they say nothing.
2. Against tables of others, each with its source below. The step on one device (of torchtitan: on 8) is theirs; so only
   what more devices add is predicted. What they do not say, and we had to take, stands beside each.
"""

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from hasten.planner.collectives import Network, all_reduce, ring_bytes
from hasten.planner.job import Job
from hasten.planner.strategies import after_backward, ddp, fsdp

SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
WIDTH, DEPTH, BATCH = 640, 8, 64  # 13 MB of gradients
REPEATS = 15

# -- one process of several ------------------------------------------------------------------------------------------


def worker(out: Path) -> None:
    """Measure as one rank of torchrun's; rank 0 writes what it saw."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from hasten.parallel import World
    from hasten.parallel.averaging import Averaging
    from hasten.parallel.meeting import Meeting

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    torch.manual_seed(0)
    layers = [part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers)
    alone = copy.deepcopy(model)
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters())
    groups = [dist.new_group([rank]) for rank in range(world.size)]
    by_itself = nn.parallel.DistributedDataParallel(
        copy.deepcopy(model), process_group=groups[world.rank], gradient_as_bucket_view=True
    )
    its_optimizer = torch.optim.AdamW(by_itself.parameters())
    x = torch.randn(BATCH, WIDTH)
    tensors = {size: torch.zeros(size // 4) for size in SIZES}
    gradients = [torch.zeros(sum(p.numel() for p in model.parameters()))]
    averaging = Averaging(Meeting(world))  # as `hasten run --devices` has it
    averaging.add(alone.parameters())

    def begun() -> float:
        dist.barrier()  # all begin at the same time
        return time.perf_counter()

    def seconds(call: Callable[[], object]) -> float:
        start = begun()
        call()
        return time.perf_counter() - start

    def phases() -> None:
        at = [begun()]
        loss = by_itself(x).square().mean()
        at.append(time.perf_counter())
        loss.backward()
        at.append(time.perf_counter())
        its_optimizer.step()
        at.append(time.perf_counter())
        for name, length in zip(("forward", "backward", "optimizer"), (b - a for a, b in pairwise(at)), strict=True):
            times[name].append(length)
        its_optimizer.zero_grad()

    def step() -> None:
        wrapped(x).square().mean().backward()
        optimizer.step()

    def exchange(number: int) -> float:
        averaging.begins()
        alone(x).square().mean().backward()
        return seconds(lambda: averaging.ends(number, BATCH))

    times: dict[str, list[float]] = defaultdict(list)
    for number in range(REPEATS + 2):  # all in turn, so that what else the machine does disturbs each of them
        if number == 2:  # behind the warm-up
            times.clear()
        for size, tensor in tensors.items():
            times[f"all_reduce {size}"].append(seconds(partial(dist.all_reduce, tensor)))
        phases()
        times["messages"].append(seconds(partial(dist.all_reduce, gradients[0])))
        times["exchange"].append(exchange(number))
        times["step"].append(seconds(step))
        optimizer.zero_grad()
    if world.rank == 0:
        found = {name: statistics.quantiles(every, n=4)[0] for name, every in times.items()}
        out.write_text(json.dumps({"shapes": [list(p.shape) for p in model.parameters()], **found}))
    dist.barrier()
    dist.destroy_process_group()


# -- gloo -------------------------------------------------------------------------------------------------------------


def measure(ranks: int) -> dict[str, Any]:
    """Return what a group of so many processes measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*line, __file__, "--worker", str(out)], check=True, env=env, capture_output=True)
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def fitted(found: dict[str, Any], ranks: int) -> Network:
    """Return the ring's latency and bandwidth by least squares of relative errors."""
    rows = [(1 / found[f"all_reduce {size}"], size / found[f"all_reduce {size}"]) for size in SIZES]
    aa, ab, bb = sum(a * a for a, _ in rows), sum(a * b for a, b in rows), sum(b * b for _, b in rows)
    a1, b1 = sum(a for a, _ in rows), sum(b for _, b in rows)
    fixed = max(0.0, (a1 * bb - b1 * ab) / (aa * bb - ab * ab))
    each = (b1 - fixed * ab) / bb
    return Network(ring_bytes(1, ranks) / each, fixed / (2 * (ranks - 1)), "ring")


def job_of(found: dict[str, Any]) -> Job:
    """Return the job of phases and shapes that were measured."""
    shapes = tuple(map(tuple, found["shapes"]))
    held = 4 * (DEPTH * (WIDTH * WIDTH + WIDTH))
    times = {"data": 0.0, "transfer": 0.0, "forward": found["forward"], "backward": found["backward"], "other": 0.0}
    return Job(
        **times,
        optimizer=found["optimizer"],
        batches=1,
        parameters=held,
        gradients=held,
        states=2 * held,
        beside=None,
        peak=None,
        shapes=shapes,
    )


def on_gloo() -> list[dict[str, Any]]:
    """Return a round: for each number of processes, what was predicted and what was measured."""
    rows = []
    of_two = None
    for ranks in (1, 2, 4):
        found = measure(ranks)
        job = job_of(found)
        if ranks == 1:
            rows.append({"ranks": 1, "what": "step", "predicted": job.step, "measured": found["step"]})
            continue
        network = fitted(found, ranks)
        of_two = of_two or network
        print(f"{ranks} processes: {network.bandwidth / 1e9:.2f} GB/s, {network.latency * 1e6:.0f} us a message")
        sent = all_reduce(job.gradients, ranks, network)
        predicted = {
            "messages": (sent, found["messages"]),
            "messages and packing (run)": (after_backward(job, ranks, network).exchange, found["exchange"]),
            "step (ddp)": (ddp(job, ranks, network).step, found["step"]),
            "step, if nothing overlaps": (job.step + ddp(job, ranks, network).exchange, found["step"]),
        }
        if ranks == 4:
            predicted["messages, by the network of 2"] = (all_reduce(job.gradients, 4, of_two), found["messages"])
        rows += [{"ranks": ranks, "what": name, "predicted": p, "measured": m} for name, (p, m) in predicted.items()]
    return rows


# -- published --------------------------------------------------------------------------------------------------------

DLPERF = (
    "github.com/Oneflow-Inc/DLPerf, reports/dlperf_benchmark_test_report_v1.md (4 machines of 8 V100, 100 Gb/s each)"
)
# BERT-Base, fp32, NVIDIA's DeepLearningExamples (apex's DDP with message_size=250000000: one message behind the
# backward); NVIDIADeepLearningExamples/PyTorch/BERT/README.md: batch of a GPU -> sentences a second on 1, 16, 32 GPUs.
# Its rows in fp16 are left out: which type gradients have there is not said.
BERT = {32: {1: 119.6, 16: 1499.4, 32: 2885.81}, 48: {1: 121.94, 16: 1584.32, 32: 3039.3}}
BERT_PARAMETERS = 110_106_428  # of BertForPreTraining with bert-base-uncased's configuration
# ResNet-50 v1.5, pytorch/examples with torch 1.6's DDP, fp32, batch 128, 48 workers; PyTorch/resnet50v1.5/README.md.
# Its tables with 8 workers are bound by the loader (13.45x on 32), which is no matter of the network, and left out.
RESNET = {"DataLoader": {1: 348.62, 16: 5115.4, 32: 10021.29}, "DALI": {1: 350.66, 16: 5193.09, 32: 10032.72}}
RESNET_PARAMETERS = 25_557_032
V100S = Network(12.5e9, 5e-6)  # one card of 100 Gb/s for the 8 GPUs of a machine; the latency is ours

TORCHTITAN = (
    "github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3 (H100, 400 Gb/s a GPU)"
)
# Llama 3.1 8B under FSDP, 2 sequences of 8192 a GPU: tokens per second of a GPU and GiB, on 8 and on 128. The rows with
# float8 are left out: in which format parameters travel there is not said.
LLAMA = {"FSDP": ((5762, 82.4), (5605, 67.0)), "FSDP + torch.compile": ((6667, 77.0), (6514, 62.0))}
LLAMA_PARAMETERS = 8_030_261_248
H100S = Network(50e9, 5e-6)  # one card a GPU, though a ring may use all of a machine's; the latency is ours


def published() -> list[dict[str, Any]]:
    """Return predicted and published steps, in seconds, and memory, in GiB."""
    rows: list[dict[str, Any]] = []
    for batch, rates in BERT.items():
        alone = computing(batch / rates[1], BERT_PARAMETERS)
        for ranks in (16, 32):
            told = after_backward(alone, ranks, V100S).step
            theirs = batch * ranks / rates[ranks]
            rows.append(row(f"BERT-Base, batch {batch}", ranks, "step", told, theirs, alone.step, DLPERF))
    for loader, rates in RESNET.items():
        alone = computing(128 / rates[1], RESNET_PARAMETERS)
        for ranks in (16, 32):
            told = ddp(alone, ranks, V100S).step
            theirs = 128 * ranks / rates[ranks]
            rows.append(row(f"ResNet-50, {loader}", ranks, "step", told, theirs, alone.step, DLPERF))
    for name, ((few, few_gib), (many, many_gib)) in LLAMA.items():
        # torchtitan gathers in bfloat16, adds in float32, keeps parameters, gradients and AdamW's states in float32.
        alone = computing(2 * 8192 / few, LLAMA_PARAMETERS, number=2, units=33)
        at_128 = fsdp(alone, 128, H100S)
        assert at_128 is not None
        theirs = 2 * 8192 / many
        rows.append(row(f"Llama 3.1 8B, {name}", 128, "step", at_128.step, theirs, alone.step, TORCHTITAN))
        kept = computing(1.0, LLAMA_PARAMETERS, number=4, units=33)
        on_8, on_128 = fsdp(kept, 8, H100S), fsdp(kept, 128, H100S)
        assert on_8 is not None
        assert on_128 is not None
        told = few_gib - (on_8.held - on_128.held) / 2**30
        rows.append(row(f"Llama 3.1 8B, {name}", 128, "GiB", told, many_gib, few_gib, TORCHTITAN))
    return rows


def computing(step: float, parameters: int, number: int = 4, units: int | None = None) -> Job:
    """Return a job whose step is a forward and a backward of twice its length, which we take."""
    held = parameters * number
    return Job(
        data=0.0,
        transfer=0.0,
        forward=step / 3,
        backward=step * 2 / 3,
        other=0.0,
        optimizer=0.0,
        batches=1,
        parameters=held,
        gradients=held,
        states=2 * held,
        beside=None,
        peak=None,
        number=number,
        units=units,
    )


def row(
    name: str, ranks: int, what: str, predicted: float, theirs: float, before: float, source: str
) -> dict[str, Any]:
    """Return a line of the result; `before`: what it is on fewer devices, which costs nothing to predict."""
    figures = {"predicted": predicted, "published": theirs, "on_fewer": before}
    return {"name": name, "ranks": ranks, "what": what, **figures, "source": source}


def main(rounds: int, out: Path | None) -> None:
    """Measure, print and write."""
    theirs = published()
    print("published tables: predicted, published, error (and that of taking the figure on fewer devices)")
    for one in theirs:
        error, without = (one[name] / one["published"] - 1 for name in ("predicted", "on_fewer"))
        shown = f"{one['predicted']:8.4g} {one['published']:8.4g} {one['what']:5} {error:+7.1%} ({without:+.1%})"
        print(f"  {one['name']:35} {one['ranks']:4}  {shown}")
    every = []
    for number in range(rounds):
        print(f"gloo, round {number}")
        every.append(on_gloo())
    print("gloo on this machine: predicted, measured, error (median of the rounds, lowest and highest)")
    for alike in zip(*every, strict=True):
        errors = [one["predicted"] / one["measured"] - 1 for one in alike]
        middle = sorted(alike, key=lambda one: one["predicted"] / one["measured"])[len(alike) // 2]
        told = f"{1e3 * middle['predicted']:8.2f} {1e3 * middle['measured']:8.2f} ms {statistics.median(errors):+7.1%}"
        print(f"  {alike[0]['ranks']} {alike[0]['what']:32} {told} ({min(errors):+.1%} to {max(errors):+.1%})")
    if out is not None:
        out.write_text(json.dumps({"published": theirs, "gloo": every, "cores": os.cpu_count()}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    worker(given.worker) if given.worker else main(given.rounds, given.json)
