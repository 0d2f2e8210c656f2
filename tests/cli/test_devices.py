"""`hasten run --devices`: a script that knows of one device trains on several, to the same weights. Real processes."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from hasten.evidence import Phase, read_evidence
from tests.taps.forks import forked, launched
from tests.taps.scripts import HASTEN, Done, ctrl_c_works, environment, execute, plain, quick, write

SLOW = pytest.mark.slow  # each starts a launcher, and most two ranks, that import torch: 4 to 10 s

WAYS = """
    import random, sys
    import numpy as np
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

    torch.manual_seed(3); random.seed(3); np.random.seed(3)
    inputs = torch.randn(45, 6)
    labels = (inputs.sum(1) > 0).long()
    data = TensorDataset(inputs, labels)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU())
            self.head = nn.Linear(16, 2)
            self.rare = nn.Linear(16, 2)
            self.never = nn.Linear(16, 2)

        def forward(self, x, rarely=False):
            x = self.body(x)
            return self.rare(x) if rarely else self.head(x)

    def train(name, make, shuffle=True, accumulate=1, clip=None, parallel=False, rare=False, sampler=None, batch=8):
        model = Net()
        if parallel:
            model = nn.DataParallel(model)
        optimizer = make(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        loader = DataLoader(data, batch, shuffle=shuffle, sampler=sampler)
        held = DataLoader(data, 16)
        for epoch in range(2):
            model.train()
            for step, (x, y) in enumerate(loader):
                loss = nn.functional.cross_entropy(model(x, rare and step == 2), y) / accumulate
                loss.backward()
                if (step + 1) % accumulate == 0 or step + 1 == len(loader):
                    if clip:
                        nn.utils.clip_grad_norm_(model.parameters(), clip)
                    optimizer.step()
                    optimizer.zero_grad()
            schedule.step()
            model.eval()
            with torch.no_grad():
                right = sum((model(x).argmax(1) == y).sum().item() for x, y in held)
            print(name, epoch, "right:", right, "of", sum(len(y) for _, y in held), "in", len(loader))
        return {f"{name}.{key}": value for key, value in model.state_dict().items()}

    sgd = lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01)
    adamw = lambda p: torch.optim.AdamW(p, 0.01)
    weights = {
        **train("sgd", sgd),
        **train("adamw", adamw, clip=0.1),
        **train("accumulated", sgd, accumulate=3, clip=0.3),
        **train("in order", adamw, shuffle=False, parallel=True),
        **train("rare", adamw, rare=True, batch=7),
        **train("weighted", sgd, shuffle=None, sampler=WeightedRandomSampler(torch.rand(45), 30)),
        **train("tiny", sgd, batch=11),
    }

    # two optimizers, two backwards a step, a penalty on gradients
    torch.manual_seed(5)
    one, two = Net(), Net()
    first, second = sgd(one.parameters()), adamw(two.parameters())
    for x, y in DataLoader(data, 8, shuffle=True, drop_last=True):
        first.zero_grad()
        x.requires_grad_(True)
        out = one(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (nn.functional.cross_entropy(out, y) + slope.pow(2).sum(1).mean()).backward()
        first.step()
        second.zero_grad()
        nn.functional.cross_entropy(two(x.detach()) + one(x.detach()), y).backward()
        second.step()
    weights |= {f"one.{key}": value for key, value in one.state_dict().items()}
    weights |= {f"two.{key}": value for key, value in two.state_dict().items()}
    torch.save(weights, sys.argv[1])
"""


def on(devices: int, folder: Path, *words: str, options: tuple[str, ...] = (), **more: object) -> Done:
    """Run by `hasten run --devices`."""
    wide = (HASTEN, "run", "--devices", str(devices), "--accelerator", "cpu", *options)
    if more.get("forks"):  # its processes, in place of new Pythons
        return launched(folder, *wide, *words)
    return execute(*wide, *words, cwd=folder, env=quick(), **more)  # type: ignore[arg-type]


def far(one: Path, other: Path) -> float:
    """How far the weights in two files lie apart."""
    a, b = torch.load(one), torch.load(other)
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_weights_are_those_of_one_process(tmp_path: Path) -> None:
    write(tmp_path, "train.py", WAYS)
    alone = forked(tmp_path, "train.py", "alone.pt")
    assert alone.code == 0, alone.err
    wide = on(2, tmp_path, "train.py", "wide.pt", forks=True)
    assert wide.code == 0, wide.err
    assert far(tmp_path / "alone.pt", tmp_path / "wide.pt") < 2e-6
    assert wide.out == alone.out  # accuracy on all of the held samples, lengths of loaders; and by one rank only
    assert "2 processes on the CPU share each batch of the loader at train.py:" in wide.err
    assert "8 samples a step, as in the script, 4 on rank 0 (--batch global)" in wide.err


RESUMED = """
    import os, sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(1)
    data = TensorDataset(torch.randn(45, 6), torch.randn(45, 1))
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    loader = DataLoader(data, 8, shuffle=True, num_workers=int(sys.argv[3]))
    first, until, path = 0, int(sys.argv[1]), sys.argv[2]
    if os.path.exists(path):
        kept = torch.load(path)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        schedule.load_state_dict(kept["schedule"])
        torch.set_rng_state(kept["random"])
        first = kept["epoch"] + 1
    for epoch in range(first, until):
        for number, (x, y) in enumerate(loader):
            (nn.functional.mse_loss(model(x), y) / 2).backward()
            if number % 2 or number + 1 == len(loader):
                nn.utils.clip_grad_norm_(model.parameters(), 0.2)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
        kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save({**kept, "epoch": epoch, "random": torch.get_rng_state()}, path)
    torch.save(model.state_dict(), path + ".weights")
"""


@pytest.mark.timeout(300)
@pytest.mark.slow  # five trainings, one of four processes: 30 s of CPU
def test_resumed_weights_are_those_of_one_process(tmp_path: Path) -> None:
    write(tmp_path, "train.py", RESUMED)
    assert plain(tmp_path, "train.py", "4", "alone.pt", "0").code == 0
    for path, devices, workers in (("two.pt", (2, 2), "0"), ("changed.pt", (4, 2), "2")):
        for until, number in zip("24", devices):
            done = on(number, tmp_path, "train.py", until, path, workers)
            assert done.code == 0, done.err
        assert far(tmp_path / "alone.pt.weights", tmp_path / f"{path}.weights") < 2e-6


LOOP = """
    import os, signal, sys, time
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    rank = int(os.environ.get("RANK", "0"))  # which a script for one device does not ask: for these tests
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(data, 8, shuffle=True{more})

    def step(x, y):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    {before}
    for epoch in range({epochs}):
        for number, (x, y) in enumerate(loader):
            {first}
            step(x, y)
    {after}
"""


def loop(folder: Path, first: str = "pass", after: str = "", before: str = "", epochs: int = 2, more: str = "") -> None:
    """Write a training of the usual kind, with lines of the test's own."""
    write(folder, "train.py", LOOP.format(first=first, after=after, before=before, epochs=epochs, more=more))


@SLOW
def test_a_batch_for_each_device(tmp_path: Path) -> None:
    loop(tmp_path, "print(len(x), len(loader))")
    done = on(2, tmp_path, "train.py", options=("--batch", "per-device"))
    assert done.code == 0, done.err
    assert done.out.splitlines() == ["8 2"] * 4
    assert "2 processes on the CPU take a batch each of the loader at train.py:12: 16 samples a step" in done.err
    assert "BatchNorm counts each one's own share" in done.err


SAVES = """
missing = not os.path.exists("runs")
time.sleep(0.5 * rank)
if missing:
    os.mkdir("runs")
best = f"runs/{rank}.pt"  # as a name with the time in it may differ
torch.save(model.state_dict(), best)
model.load_state_dict(torch.load(best))
torch.save(model.state_dict(), "new.pt")
os.replace("new.pt", "last.pt")
with open("log.txt", "a") as log:
    log.write("end\\n")
time.sleep(0.5 * (rank == 0))
assert os.path.exists("last.pt")
model.load_state_dict(torch.load("last.pt"))
print([p.double().sum().item() for p in model.parameters()], file=sys.stderr)
"""


def test_files_are_written_once_and_checkpoints_are_read_back(tmp_path: Path) -> None:
    loop(tmp_path, after=SAVES.strip().replace("\n", "\n    "))
    done = on(2, tmp_path, "train.py", options=("--quiet",), forks=True)
    assert done.code == 0, done.err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["0.pt", "last.pt", "log.txt", "runs", "train.py"]
    assert (tmp_path / "log.txt").read_text() == "end\n"
    other, one = sorted(done.err.splitlines(), key=lambda line: line.startswith("[rank 1] "))
    assert one == f"[rank 1] {other}"
    assert len(torch.load(tmp_path / "last.pt")) == 9  # not the mark that the other rank left


@pytest.mark.parametrize(
    ("first", "code", "said"),
    [
        ("if rank == 1 and epoch: raise ValueError('no luck')", 1, "rank 1 of 2"),
        pytest.param(
            "if rank == 1 and epoch: os.kill(os.getpid(), signal.SIGKILL)", 137, "signal 9 (SIGKILL)", marks=SLOW
        ),
        pytest.param("if rank == 1 and number == 1: continue", 1, "The ranks have parted", marks=SLOW),
        pytest.param(
            "optimizer.param_groups[0]['lr'] = 0.1 + 0.1 * rank", 1, "The ranks have parted: their weights", marks=SLOW
        ),
        pytest.param("if rank == 1 and epoch: sys.exit()", 1, "The ranks have parted: rank 0 ", marks=SLOW),
    ],
    ids=["raises", "killed", "skips a batch", "other rate", "leaves"],
)
def test_a_rank_that_fails_is_named_and_all_end(tmp_path: Path, first: str, code: int, said: str) -> None:
    loop(tmp_path, first, epochs=1_000_000)
    done = on(2, tmp_path, "train.py", timeout=60)
    assert done.code == code, done.err
    assert said in "".join(done.err.splitlines()[-3:])
    if "ValueError" in first:
        assert "ValueError: no luck" in done.err.splitlines()[-1]


@SLOW
def test_a_plan_acts_in_each_rank_and_evidence_is_that_of_rank_0(tmp_path: Path) -> None:
    write(tmp_path, "hasten.toml", '[techniques]\nprecision = "16-mixed"\nloader_workers = 2\nfused_optimizer = true\n')
    # One sample overflows in fp16: on whichever rank it is, all ranks skip the step.
    loop(tmp_path, before="data.tensors[0][5] = 3e4", epochs=3, after="print(float(model[0].weight.isfinite().all()))")
    done = on(2, tmp_path, "train.py", options=("--evidence", "evidence.json"))
    assert done.code == 0, done.err
    assert done.out == "1.0\n"
    evidence = read_evidence(tmp_path / "evidence.json")
    assert {"precision", "loader_workers", "fused_optimizer"} <= set(evidence.installed)
    assert evidence.steps == 12
    assert evidence.rank == 0
    assert sum(step[Phase.SYNC] for step in evidence.step_phases) > 0


AUGMENTED = """
    import os, sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Noisy(Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, i):
            with open(f"seen-{i}.txt", "w") as file:
                file.write("x")
            return torch.full((1,), float(i)), torch.rand(1)

    if __name__ == "__main__":
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1e-5)
        loader = DataLoader(Noisy(), 8, shuffle=True, num_workers=1, multiprocessing_context=sys.argv[1])
        for x, noise in loader:
            model(x).mean().backward()
            optimizer.step()
        print(*sorted(x.flatten().int().tolist()), "|", *noise.flatten().tolist(), file=sys.stderr)
"""


@SLOW
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_ranks_draw_apart_and_write_apart(tmp_path: Path, start: str) -> None:
    write(tmp_path, "train.py", AUGMENTED)
    done = on(2, tmp_path, "train.py", start, options=("--quiet",))
    assert done.code == 0, done.err
    (one, one_noise), (other, other_noise) = (
        line.removeprefix("[rank 1] ").split(" | ") for line in done.err.splitlines()
    )
    assert not set(one.split()) & set(other.split())
    assert one_noise != other_noise
    assert len(list(tmp_path.glob("seen-*.txt"))) == 8  # of the 16 samples, those that rank 0 has read


@SLOW
def test_two_machines_meet(tmp_path: Path) -> None:
    """Both are this one: each with a launcher of its own, as on two."""
    write(tmp_path, "train.py", RESUMED)
    assert plain(tmp_path, "train.py", "2", "alone.pt", "0").code == 0
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ("--devices", "1", "--accelerator", "cpu", "--nodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}")
    with ThreadPoolExecutor() as machines:
        ends = [
            machines.submit(execute, HASTEN, "run", *words, "train.py", "2", "wide.pt", "0", cwd=tmp_path)
            for _ in range(2)
        ]
        done = [end.result() for end in ends]
    assert [one.code for one in done] == [0, 0], done[0].err + done[1].err
    assert far(tmp_path / "alone.pt.weights", tmp_path / "wide.pt.weights") < 2e-6


@SLOW
def test_machines_that_do_not_meet_are_told_so(tmp_path: Path) -> None:
    loop(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as another:  # a program that listens there, and never answers
        endpoint = f"127.0.0.1:{another.getsockname()[1]}"
        words = ("--devices", "1", "--nodes", "2", "--rdzv-endpoint", endpoint, "--rdzv-conf", "timeout=1")
        done = execute(HASTEN, "run", "--accelerator", "cpu", *words, "train.py", cwd=tmp_path)
    assert done.code == 1
    assert f"the machines did not meet at {endpoint}" in done.err


@SLOW
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_launcher_ends_all(tmp_path: Path, number: signal.Signals) -> None:
    loop(tmp_path, "print(os.getpid(), os.getppid(), flush=True)", epochs=1_000_000)
    words = [HASTEN, "run", "--devices", "2", "--accelerator", "cpu", "train.py"]
    with subprocess.Popen(
        words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=ctrl_c_works,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        everybody = psutil.Process(process.pid).children(recursive=True)
        assert len(everybody) >= 2
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == (128 + number if number != signal.SIGKILL else -number)
    end = time.monotonic() + 30
    while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in everybody):
        assert time.monotonic() < end, "a rank was left behind"
        time.sleep(0.05)


@SLOW
def test_a_second_ctrl_c_ends_ranks_that_answer_no_signal(tmp_path: Path) -> None:
    deaf = "import signal; [signal.signal(one, signal.SIG_IGN) for one in (signal.SIGINT, signal.SIGTERM)]"
    loop(tmp_path, f"{deaf}; print('trains', flush=True)", epochs=1_000_000)
    words = [HASTEN, "run", "--devices", "2", "--accelerator", "cpu", "train.py"]
    with subprocess.Popen(
        words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=ctrl_c_works,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        everybody = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):  # torch's agent waits half a minute for them
            process.wait(2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert process.returncode == 130
    assert not [one for one in everybody if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
