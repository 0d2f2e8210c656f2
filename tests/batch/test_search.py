"""The search for a batch size: attempts of real scripts, and the search's own logic on trainings made of a law."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from hasten import HastenError
from hasten.batch.attempt import Attempt, Attempts, value_of
from hasten.batch.search import BatchSearchResult, MemoryLine, line_through, search
from hasten.batch.words import as_json, lines, rate_factor, rule, split
from hasten.cli.size import size_in_bytes
from hasten.evidence import Evidence
from hasten.tuner.command_line import with_argument
from tests.taps.forked_pythons import forked_pythons
from tests.techniques.conftest import LOADER, evidence_of

MB = 10**6


class Lawful(Attempts):
    """Trainings whose memory and speed follow a law: what a machine would take minutes to show."""

    def law(self, fixed: float, per_sample: float, overhead: float, samples: int, optimizer: str = "SGD") -> Lawful:
        self.fixed, self.per_sample, self.overhead, self.samples = fixed, per_sample, overhead, samples
        self.optimizer = optimizer
        return self

    def run(self, size: int = 0, former: int = 0, lean: bool = False) -> Attempt:
        real = size or 8
        peak = int(self.fixed + self.per_sample * real)
        seconds = self.overhead + 1e-3 * real
        outcome = "ok" if peak <= self.limit else "out of memory"
        attempt = Attempt(
            size,
            outcome,
            peak,
            0,
            seconds,
            split={"parameters": 10 * MB, "gradients": 10 * MB, "optimizer": 20 * MB},
            optimizers=(self.optimizer,),
            evidence=self.seen(),
        )
        if not lean:
            self.attempts.append(attempt)
        return attempt

    def seen(self) -> Evidence:
        return evidence_of(loaders=(dataclasses.replace(LOADER, samples=self.samples, batch_size=8),))


def found_by(limit: int, **law: Any) -> BatchSearchResult:
    values = {"fixed": 200 * MB, "per_sample": 2 * MB, "overhead": 0.03, "samples": 100_000, **law}
    return search(Lawful([], (), Path(), limit).law(**values), 0, lambda line: None)


def test_the_largest_size_within_the_limit_is_found_and_was_run() -> None:
    found = found_by(2000 * MB)
    assert found.bound == "memory"
    assert found.largest == int((0.95 * 2000 - 200) / 2)
    assert found.largest in [one.size for one in found.attempts if one.outcome == "ok"]
    assert all(one.peak <= 2000 * MB for one in found.attempts)


def test_a_data_set_that_fits_whole_bounds_the_size() -> None:
    found = found_by(2000 * MB, samples=300)
    assert (found.largest, found.bound) == (300, "samples")


def test_throughput_saturates_where_more_brings_less_than_5_percent() -> None:
    found = found_by(10_000 * MB)
    rates = {one.size: one.rate for one in found.attempts}
    best = max(rates.values())
    assert rates[found.saturated] >= 0.95 * best
    assert all(rate < 0.95 * best for size, rate in rates.items() if size < found.saturated)


def test_a_limit_below_the_model_is_one_clear_message() -> None:
    with pytest.raises(HastenError, match=r"does not fit into 0\.10 GB with its own batch size") as raised:
        found_by(100 * MB)
    assert "--memory" in str(raised.value.fix)


def test_a_limit_just_above_the_own_batch_keeps_to_it() -> None:
    found = found_by(235 * MB)
    assert 8 <= found.largest <= 12
    assert found.verified.peak <= 235 * MB


def test_a_batch_that_leaves_no_room_is_not_called_safe() -> None:
    found = found_by(203 * MB, per_sample=0.2 * MB)
    assert found.largest == 4
    assert not found.is_safe
    assert lines(found)[0] == "no batch is safe: the smallest that ran, 4, left 2 MB of 203 MB"
    assert as_json(found, ())["largest_safe_batch_size"] is None


def test_the_rate_goes_by_the_kind_of_optimizer_and_is_said_to_be_a_rule() -> None:
    by_sgd, by_adam = found_by(10_000 * MB), found_by(10_000 * MB, optimizer="AdamW")
    times = by_sgd.saturated / by_sgd.own
    assert rate_factor(by_sgd) == round(times, 2)
    assert rate_factor(by_adam) == round(times**0.5, 2)
    assert "rule" in rule(by_sgd)
    assert "beta2" in rule(by_adam)


def test_the_split_adds_up_to_the_peak() -> None:
    found = found_by(2000 * MB)
    assert sum(split(found).values()) == found.verified.peak
    page = "\n".join(lines(found))
    assert f"largest batch that is safe: {found.largest}" in page
    data = as_json(found, ("train.py",))
    assert json.loads(json.dumps(data))["largest_safe_batch_size"] == found.largest


def test_a_line_goes_through_the_two_largest_that_ran() -> None:
    ran = [Attempt(size, "ok", peak * MB) for size, peak in ((1, 300), (10, 310), (20, 330))]
    line = line_through([*ran, Attempt(40, "out of memory", 10 * MB)])
    assert line == MemoryLine(290 * MB, 2 * MB)
    assert line.largest(390 * MB) == 50
    assert line.largest(280 * MB) == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["t.py", "--batch-size", "8", "--x"], ["t.py", "--batch-size", "32", "--x"]),
        (["t.py", "--batch-size=8"], ["t.py", "--batch-size=32"]),
        (["t.py"], ["t.py", "--batch-size", "32"]),
    ],
)
def test_an_argument_is_replaced_or_added(before: list[str], after: list[str]) -> None:
    assert with_argument(before, "--batch-size", 32) == after
    assert value_of(after, "--batch-size") == 32
    assert value_of(["t.py", "--batch-size", "many"], "--batch-size") == 0


def test_sizes_are_read() -> None:
    assert size_in_bytes("8GiB", "--memory") == 8 << 30
    assert size_in_bytes("500 MB", "--memory") == 500 * MB
    assert size_in_bytes("1.5g", "--memory") == 3 << 29
    for wrong in ("many", "0", "8 bits", "-1"):
        with pytest.raises(HastenError, match="not a size"):
            size_in_bytes(wrong, "--memory")


SCRIPT = """
    import sys
    import torch
    from torch.utils.data import DataLoader

    class Sentences(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            return torch.ones(20 if index == 60 else 3, dtype=torch.long)

    def padded(samples):
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)

    if __name__ == "__main__":
        model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 10))
        optimizer = torch.optim.Adam(model.parameters())
        loader = DataLoader(Sentences(), batch_size=4, collate_fn=padded)
        for epoch in range(2):
            for number, words in enumerate(loader):
                if number == 0:
                    print("first batch", tuple(words.shape), file=open(sys.argv[1], "a"), flush=True)
                loss = model(words).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
"""


def attempts_of(script: str, folder: Path, *arguments: str, limit: int = 8 << 30) -> Attempts:
    (folder / "scratch").mkdir()
    (folder / "train.py").write_text(textwrap.dedent(script))
    command = [sys.executable, str(folder / "train.py"), *arguments]
    return Attempts(command, ("train.py",), folder / "scratch", limit)


def test_an_attempt_trains_with_the_longest_samples_and_says_what_memory_went_to(tmp_path: Path) -> None:
    attempt = attempts_of(SCRIPT, tmp_path, "/dev/null").run(16, 4)
    assert attempt.outcome == "ok", attempt.reason
    assert attempt.split["parameters"] == 4 * (10 * 8 + 8 * 10 + 10)
    assert attempt.split["gradients"] == attempt.split["parameters"]
    assert attempt.split["optimizer"] >= 2 * attempt.split["parameters"]
    assert attempt.optimizers == ("Adam",)
    assert attempt.peak > 50 * MB
    assert attempt.evidence is not None
    facts = attempt.evidence.train_loader
    assert facts is not None
    assert facts.batch_size == 16
    assert facts.batch_bytes == 16 * 20 * 8  # padded to the one long sentence, number 60 in order
    assert not list((tmp_path / "scratch").iterdir())


def test_an_attempt_above_the_limit_is_ended_and_that_is_its_result(tmp_path: Path) -> None:
    attempt = attempts_of(SCRIPT, tmp_path, "/dev/null", limit=60 * MB).run()
    assert (attempt.outcome, attempt.reason) == ("out of memory", "ended at the limit")


def test_a_script_without_a_loader_is_told_to_name_its_argument(tmp_path: Path) -> None:
    script = """
        import torch
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(40):
            model(torch.ones(8, 4)).sum().backward()
            optimizer.step()
    """
    with forked_pythons(), pytest.raises(HastenError, match="trains without a DataLoader") as raised:
        search(attempts_of(script, tmp_path), 0, lambda line: None)
    assert "--argument --batch-size" in str(raised.value.fix)


def test_a_batch_sampler_of_the_scripts_own_is_refused_before_its_size_is_believed(tmp_path: Path) -> None:
    script = """
        import torch
        from torch.utils.data import BatchSampler, DataLoader, RandomSampler
        data = torch.randn(96, 4)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for epoch in range(9):
            for x in DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 8, False)):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
    """
    with forked_pythons(), pytest.raises(HastenError, match="to give batches of 32, and gave 8, with") as raised:
        search(attempts_of(script, tmp_path), 0, lambda line: None)
    assert "--argument --batch-size" in str(raised.value.fix)


def test_a_data_set_of_batches_is_refused_and_one_of_rows_that_are_one_is_not(tmp_path: Path) -> None:
    script = """
        import torch
        from torch.utils.data import DataLoader
        data = torch.randn(96, ROWS, 4)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x in DataLoader(list(data), collate_fn=lambda items: items[0]):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    """
    for rows in (8, 1):
        (folder := tmp_path / str(rows)).mkdir()
        attempts = attempts_of(script.replace("ROWS", str(rows)), folder)
        with forked_pythons():
            first = attempts.run()
        if rows == 1:
            assert attempts.own_size(first, 0) == (1, 96)
            continue
        with pytest.raises(HastenError, match="the model gets 8 rows of each: an item is a batch already") as raised:
            attempts.own_size(first, 0)
        assert "--argument --batch-size" in str(raised.value.fix)


def test_a_script_that_fails_is_named_with_its_error(tmp_path: Path) -> None:
    with forked_pythons(), pytest.raises(HastenError, match="ZeroDivisionError"):
        search(attempts_of("import torch\n1 / 0\n", tmp_path), 0, lambda line: None)


@pytest.mark.slow  # a process for each size
def test_the_command_finds_and_writes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    line = [sys.executable, "-m", "hasten", "batch", "--json", "b.json", "train.py", "log"]
    ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "largest batch that is safe: 64   (that is the whole data set; it has 4 now)" in ended.stdout
    assert json.loads((tmp_path / "b.json").read_text())["schema"] == "hasten-batch/1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.json", "train.py"]


@pytest.mark.slow  # a process for each size
def test_ctrl_c_while_gradients_are_compared_keeps_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT).replace("range(2)", "range(9999)"))
    line = [sys.executable, "-m", "hasten", "batch", "--noise-at", "9999", "--json", "b.json", "train.py", "/dev/null"]
    running = subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    assert any("gradients of 16 batches of 4" in said for said in running.stderr)
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "largest batch that is safe: 64" in out
    assert "critical batch: not measured: stopped by Ctrl-C" in out
    assert json.loads((tmp_path / "b.json").read_text())["critical_batch"]["looks"] == []
