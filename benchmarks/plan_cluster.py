"""How far `hasten plan-cluster` is off: against real processes over gloo, and against published tables.

    python benchmarks/plan_cluster.py [--rounds 3] [--json FILE]

1. On this machine, with 1, 2 and 4 processes of one thread over the loopback. In turn, in the same processes:
   all-reduces of several sizes, to which latency and bandwidth are fitted; a step's phases under
   DistributedDataParallel with all processes computing, each in a group of its own, so that cores which they share and
   what DDP does beside sending count as they are; an all-reduce of the gradients' bytes; their exchange as `hasten run
   --devices` does it, packing included, which the planner does not count; a step of DDP that sends, and one with a
   sharded optimizer. Of each the lower quartile is taken, since others disturb. The planner has the first two, and says
   the others.
   By two clocks: the wall's, which says nothing where others work too, and that of the process's CPU. A loopback has
   no network card: messages are copied by the cores that compute, so CPU time holds them, and nothing runs beside
   anything. Errors are medians of the rounds, a minute each.
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
from hasten.planner.strategies import after_backward, ddp, fsdp, zero1

SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
WIDTH, DEPTH, BATCH = 640, 8, 64  # 13 MB of gradients
REPEATS = 15
CLOCKS = ("wall", "cpu")  # seconds; seconds of CPU of one process, its kernel's part included

# -- one process of several ------------------------------------------------------------------------------------------


def worker(out: Path) -> None:
    """Measure as one rank of torchrun's; rank 0 writes what it saw, by both clocks."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from hasten.parallel import World
    from hasten.parallel.averaging import Averaging
    from hasten.parallel.meeting import Meeting
    from hasten.parallel.zero import ShardedStates

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    groups = [dist.new_group([rank]) for rank in range(world.size)]
    x = torch.randn(BATCH, WIDTH)
    tensors = {f"all_reduce {size}": torch.zeros(size // 4) for size in SIZES}
    tensors["messages"] = torch.zeros(sum(p.numel() for p in model.parameters()))
    times: dict[str, list[list[float]]] = defaultdict(list)

    def made(group: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
        ddp = nn.parallel.DistributedDataParallel(
            copy.deepcopy(model), process_group=group, gradient_as_bucket_view=True
        )
        return ddp, torch.optim.AdamW(ddp.parameters())

    def measured(what: str, *calls: Callable[[], object]) -> None:
        """Measure calls that follow each other, which all ranks begin together."""
        dist.barrier()
        at = [now()]
        for call in calls:
            call()
            at.append(now())
        for number, (before, after) in enumerate(pairwise(at)):
            name = f"{what} {number}" if len(calls) > 1 else what
            times[name].append([b - a for a, b in zip(before, after, strict=True)])

    (alone, alone_optimizer), (ddp, optimizer), (sharded, sharded_optimizer) = made(groups[world.rank]), made(), made()
    if world.size > 1:
        ShardedStates(sharded_optimizer, world)
    plain = copy.deepcopy(model)
    averaging = Averaging(Meeting(world))  # as `hasten run --devices` has it
    averaging.add(plain.parameters())
    for number in range(REPEATS + 2):  # all in turn, so that what else the machine does disturbs each of them
        if number == 2:  # behind the warm-up
            times.clear()
        for name, tensor in tensors.items():
            measured(name, partial(dist.all_reduce, tensor))
        losses: list[Any] = []
        measured(
            "phase",
            lambda: losses.append(alone(x).square().mean()),  # noqa: B023
            lambda: losses[0].backward(),  # noqa: B023
            alone_optimizer.step,
        )
        measured("step", lambda: ddp(x).square().mean().backward() or optimizer.step())
        measured("zero1", lambda: sharded(x).square().mean().backward() or sharded_optimizer.step())
        averaging.begins()
        plain(x).square().mean().backward()
        measured("exchange", lambda: averaging.ends(number, BATCH))  # noqa: B023
        for one in (alone_optimizer, optimizer, sharded_optimizer):
            one.zero_grad()
    if world.rank == 0:
        by_clock = {
            clock: {name: statistics.quantiles([one[at] for one in every], n=4)[0] for name, every in times.items()}
            for at, clock in enumerate(CLOCKS)
        }
        out.write_text(json.dumps({"shapes": [list(p.shape) for p in model.parameters()], **by_clock}))
    dist.barrier()
    dist.destroy_process_group()


def now() -> tuple[float, float]:
    """Return the time by `CLOCKS`."""
    return time.perf_counter(), time.process_time()


# -- gloo -------------------------------------------------------------------------------------------------------------


def measure(ranks: int) -> dict[str, Any]:
    """Return what a group of so many processes measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*line, __file__, "--worker", str(out)], check=True, env=env, capture_output=True)
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def fitted(found: dict[str, float], ranks: int) -> Network:
    """Return the ring's latency and bandwidth by least squares of relative errors."""
    rows = [(1 / found[f"all_reduce {size}"], size / found[f"all_reduce {size}"]) for size in SIZES]
    aa, ab, bb = sum(a * a for a, _ in rows), sum(a * b for a, b in rows), sum(b * b for _, b in rows)
    a1, b1 = sum(a for a, _ in rows), sum(b for _, b in rows)
    fixed = max(0.0, (a1 * bb - b1 * ab) / (aa * bb - ab * ab))
    each = (b1 - fixed * ab) / bb
    return Network(ring_bytes(1, ranks) / each, fixed / (2 * (ranks - 1)), "ring")


def job_of(forward: float, backward: float, optimizer: float, held: int, **more: Any) -> Job:
    """Return a job of these phases (seconds), whose parameters and gradients take so many bytes each, under AdamW."""
    return Job(
        data=0.0,
        transfer=0.0,
        forward=forward,
        backward=backward,
        other=0.0,
        optimizer=optimizer,
        batches=1,
        parameters=held,
        gradients=held,
        states=2 * held,
        beside=None,
        peak=None,
        **more,
    )


def measured_job(shapes: list[list[int]], found: dict[str, float]) -> Job:
    """Return the job of phases and shapes that were measured."""
    held = 4 * (DEPTH * (WIDTH * WIDTH + WIDTH))
    return job_of(*(found[f"phase {number}"] for number in range(3)), held, shapes=tuple(map(tuple, shapes)))


def on_gloo() -> list[dict[str, Any]]:
    """Return a round: for each number of processes and each clock, what was predicted and what was measured."""
    rows: list[dict[str, Any]] = []
    of_two: dict[str, Network] = {}
    for ranks in (1, 2, 4):
        both = measure(ranks)
        for clock in CLOCKS:
            found = both[clock]
            job = measured_job(both["shapes"], found)
            if ranks == 1:
                pairs = {"step": (job.step, found["step"])}
            else:
                network = fitted(found, ranks)
                of_two.setdefault(clock, network)
                pairs = compared(job, found, ranks, network, clock)
                if ranks == 4:
                    told = all_reduce(job.gradients, ranks, of_two[clock])
                    pairs["messages, by the network of 2"] = (told, found["messages"])
            rows += [
                {"clock": clock, "ranks": ranks, "what": name, "predicted": predicted, "measured": measured}
                for name, (predicted, measured) in pairs.items()
            ]
    return rows


def compared(
    job: Job, found: dict[str, float], ranks: int, network: Network, clock: str
) -> dict[str, tuple[float, float]]:
    """Return what the planner says and what was measured, by what it is."""
    print(f"  {ranks} processes, {clock}: {network.bandwidth / 1e9:.2f} GB/s, {network.latency * 1e6:.0f} us a message")
    beside, shared = ddp(job, ranks, network), zero1(job, ranks, network)
    computing = shared.step - shared.waits  # with a share of the optimizer's time
    pairs = {
        "messages": (all_reduce(job.gradients, ranks, network), found["messages"]),
        "messages and packing (run)": (after_backward(job, ranks, network).exchange, found["exchange"]),
        "step, messages beside nothing": (job.step + beside.exchange, found["step"]),
        "zero1, messages beside nothing": (computing + shared.exchange, found["zero1"]),
    }
    if clock == "wall":
        pairs["step"] = (beside.step, found["step"])
    return pairs


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
        told = few_gib - (on_8.memory - on_128.memory) / 2**30
        rows.append(row(f"Llama 3.1 8B, {name}", 128, "GiB", told, many_gib, few_gib, TORCHTITAN))
    return rows


def computing(step: float, parameters: int, number: int = 4, units: int | None = None) -> Job:
    """Return a job whose step is a forward and a backward of twice its length, which we take."""
    return job_of(step / 3, step * 2 / 3, 0.0, parameters * number, number=number, units=units)


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
        what = f"{alike[0]['clock']:4} {alike[0]['ranks']} {alike[0]['what']:32}"
        told = f"{1e3 * middle['predicted']:8.2f} {1e3 * middle['measured']:8.2f} ms {statistics.median(errors):+7.1%}"
        print(f"  {what} {told} ({min(errors):+.1%} to {max(errors):+.1%})")
    if out is not None:
        out.write_text(json.dumps({"published": theirs, "gloo": every, "cores": os.cpu_count()}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    worker(given.worker) if given.worker else main(given.rounds, given.json)
