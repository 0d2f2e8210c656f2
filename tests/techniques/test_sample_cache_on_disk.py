"""Samples taken from a disk are those that would have been made, in whichever process and run."""

from __future__ import annotations

import dataclasses
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hasten.techniques.data.sample_cache as room_of_cache
from hasten.evidence import Probe, read_evidence
from hasten.plan import Setting
from hasten.taps.config import RunConfig
from hasten.techniques import Choices, Refusal
from hasten.techniques.data.sample_cache import SampleCache
from tests.taps.forks import run_in_fork
from tests.taps.scripts import HASTEN, execute
from tests.techniques.conftest import LOADER, Trained, evidence_of, identical

# Reads are counted where Python tells of them: to put a counting function in the place of `Image.open` would be seen.
IMAGES = """
    import os, random, signal, sys, time
    import numpy as np
    import torch
    from pathlib import Path
    from PIL import Image
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    log = os.open("reads", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    def hear(event, args):
        reads = event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR)
        if reads and str(args[0]).endswith(".png"): os.write(log, b"x\\n")

    def pil_loader(path):
        with open(path, "rb") as file:
            return Image.open(file).convert("RGB")

    class Images(Dataset):
        def __init__(self, folder, augment=False):
            self.samples = sorted(str(path) for path in Path(folder).glob("*.png"))
            self.augment, self.loader, self.scale = augment, pil_loader, 1.0
        def __len__(self):
            return len(self.samples)
        def __getitem__(self, index):
            image = self.loader(self.samples[index])
            if self.augment and random.random() < 0.5:
                image = image.transpose(Image.FLIP_LEFT_RIGHT)
            return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255 * self.scale, index % 2

    def draw(count=12):
        if Path("images").is_dir(): return
        Path("images").mkdir()
        generator = np.random.default_rng(0)
        for number in range(count):
            Image.fromarray(generator.integers(0, 255, (6, 6, 3), dtype=np.uint8)).save(f"images/{number:02}.png")
        time.sleep(0.03)  # a file that was just written may be written again at the same time

    def fit(loader, epochs=3, between=lambda epoch: None):
        sys.addaudithook(hear)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for epoch in range(epochs):
            for x, y in loader:
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad(); loss.backward(); optimizer.step()
                losses.append(loss.item())
            between(epoch)
        left = {"losses": losses, "model": model.state_dict(), "random": [torch.rand(1).item(), random.random()]}
        torch.save(left, "left.pt")
"""
BEGIN = """
    random.seed(0); np.random.seed(0); torch.manual_seed(0)
    draw()
"""
# Samples that are made again to be compared would count as read; the lot is of memory's tests, too.
NOT_LOOKED_OVER = """
    import hasten.techniques.data.memoized as kept, hasten.techniques.data.memoized_on_disk as later
    kept._AUDITED, kept._LOT, later._LOT = 0, 10**9, 10**9
"""

Run = Callable[..., tuple[Trained, int]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a script in one folder, again and again: plain, or with samples on disk; returns also how many it read."""
    folder = tmp_path / "training"
    folder.mkdir()

    def one(script: str, keep: str = "", workers: int = 0, before: str = "", **more: Setting) -> tuple[Trained, int]:
        (folder / "train.py").write_text(textwrap.dedent(IMAGES + script).replace("WORKERS", str(workers)))
        reads, left, evidence = folder / "reads", folder / "left.pt", folder / "evidence.json"
        for path in (reads, left, evidence):
            path.unlink(missing_ok=True)
        plan: dict[str, Setting] = {}
        if keep:
            plan = {"sample_cache": {"keep": keep, "where": "disk", "cache_dir": str(tmp_path / "cache"), **more}}  # type: ignore[dict-item]
        config = RunConfig(techniques=plan, evidence=str(evidence), command=("train.py",))
        out, err = tmp_path / "out", tmp_path / "err"
        code = run_in_fork(folder / "train.py", folder, out, err, config=config if keep else None, before=before)
        found = torch.load(left, weights_only=False) if left.exists() else {}
        heard = read_evidence(evidence) if evidence.exists() else None
        return Trained(code, out.read_text(), err.read_text(), found, heard), reads.read_text().count("x")

    return one


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("keep", ["samples", "decoded"])
def test_the_next_run_reads_nothing_and_trains_the_same(run: Run, keep: str, workers: int) -> None:
    script = (
        f"{NOT_LOOKED_OVER}{BEGIN}"
        f"""
    fit(DataLoader(Images("images", augment={keep == "decoded"}), 4, shuffle=True, num_workers=WORKERS))
    """
    )
    plain, read = run(script, workers=workers)
    first, filled = run(script, keep, workers)
    again, nothing = run(script, keep, workers)
    assert plain.code == first.code == again.code == 0, plain.err + first.err + again.err
    assert identical(plain.left, first.left)
    assert identical(plain.left, again.left)
    assert again.evidence is not None
    assert again.evidence.skipped == ()
    assert again.installed == {"sample_cache": "dataset"}
    assert read == 36
    assert 12 <= filled <= 36  # what waits for a look is written within the epoch, or at its end
    assert nothing == 0


def test_each_process_compares_what_it_finds(run: Run) -> None:
    script = f"""{BEGIN}
    fit(DataLoader(Images("images"), 4), epochs=1)
    """
    run(script, "samples")
    again, read = run(script, "samples")
    assert (again.code, read) == (0, 12)


def test_a_sample_that_is_no_longer_what_is_made_is_found_and_its_file_goes(run: Run, tmp_path: Path) -> None:
    """Changed where no look goes: an object in the place of a library's function."""
    script = f"""{BEGIN}
    fit(DataLoader(Images("images"), 4))
    """
    other = "import numpy as n, functools as f; n.asarray = f.partial(lambda real, x: real(x) + 1, n.asarray)"
    run(script, "samples")
    assert len(list((tmp_path / "cache").glob("*.samples"))) == 1
    plain, _ = run(script, before=other)
    kept, _ = run(script, "samples", before=other)
    assert identical(plain.left, kept.left)
    assert "the same index gave another sample than before" in kept.installed["sample_cache"]
    assert not list((tmp_path / "cache").glob("*.samples"))


def test_of_what_a_former_run_kept_more_is_compared_and_what_went_out_is_said(run: Run) -> None:
    """Of samples that differ where nothing shows it, past those that are compared first."""
    script = f"""{BEGIN}
    import itertools, hasten.techniques.data.memoized as kept
    kept._AUDITED, kept._lot.random = 6, itertools.cycle([0.9, 0.04]).__next__  # one in 20 takes it, one in 200 not
    fit(DataLoader(Images("images"), 4), epochs=2)
    """
    other = (
        "import numpy as n, functools as f, itertools as t; count = t.count()\n"
        "n.asarray = f.partial(lambda real, x: real(x) + (next(count) > 5), n.asarray)"
    )
    run(script, "samples")
    kept, _ = run(script, "samples", before=other)
    assert "gave another sample than before: samples taken from the cache until now may not be what" in kept.err


def test_a_function_put_in_a_librarys_place_is_seen(run: Run) -> None:
    script = f"""{BEGIN}
    real = Image.open
    def mine(file): return real(file)
    Image.open = mine
    fit(DataLoader(Images("images"), 4))
    """
    kept, read = run(script, "samples")
    assert "in the place of PIL.Image.open" in kept.installed["sample_cache"]
    assert read == 36


CHANGES = {
    "an attribute": "data.scale = 1.0 + epoch",
    "an order in place": "data.samples[3], data.samples[7] = data.samples[7], data.samples[3]",
    "a file": "Image.new('RGB', (6, 6), (epoch * 20, 9, 9)).save('images/05.png'); time.sleep(0.03)",
    "a method": "Images.__getitem__ = lambda self, index: (torch.full((3, 6, 6), float(epoch)), 1)",
    "what code reads": "factor = epoch + 2",
}


@pytest.mark.parametrize(("what", "workers"), [*((what, 0) for what in CHANGES), ("an attribute", 1)])
def test_what_changes_between_epochs_changes_the_samples(run: Run, what: str, workers: int) -> None:
    """In the first run and in the next, which meets the states of the first again."""
    script = f"""{BEGIN}
    factor, before = 1, Path("images/05.png").read_bytes()
    class Scaled(Images):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x * factor, y
    data = Scaled("images")
    def between(epoch):
        global factor
        {CHANGES[what]}
    fit(DataLoader(data, 4, num_workers=WORKERS), between=between)
    Path("images/05.png").write_bytes(before)
    """
    plain, _ = run(script, workers=workers)
    for _ in range(2):
        kept, _ = run(script, "samples", workers)
        assert kept.code == 0, kept.err
        assert identical(plain.left, kept.left)
        assert kept.installed == {"sample_cache": "dataset"}


def test_a_script_that_was_edited_gets_samples_of_its_own(run: Run) -> None:
    script = f"""{BEGIN}
    class Brighter(Images):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x + 0.25, y
    fit(DataLoader(Brighter("images"), 4))
    """
    run(script, "samples")
    edited = script.replace("0.25", "0.5")
    assert identical(run(edited)[0].left, run(edited, "samples")[0].left)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("x = x + torch.rand(1)", "samples draw random numbers"),
        ("x = x * float(np.random.rand())", "samples draw random numbers"),
        ("self.count = getattr(self, 'count', 0) + 1", "changes what the dataset holds"),
        ("x = x * (1 + hash(self.samples[index]) % 3)", "differs from process to process"),
        ("x = x * time.time()", "what that does cannot be seen"),
        ("import pickle, io; pickle.loads(pickle.dumps(self))", "unpickles Other, whose code is not looked at"),
    ],
)
def test_what_does_not_repeat_itself_is_refused_with_the_reason(run: Run, tmp_path: Path, line: str, why: str) -> None:
    script = f"""{BEGIN}
    class Other(Images):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            {line}
            return x, y
    fit(DataLoader(Other("images"), 4))
    """
    kept, read = run(script, "samples")
    assert kept.code == 0, kept.err
    assert why in kept.installed["sample_cache"]
    assert kept.err.count("hasten: sample_cache:") == 1
    assert read == 36
    assert not list((tmp_path / "cache").glob("*.samples"))
    if "time" not in line and "hash" not in line:
        assert identical(run(script)[0].left, kept.left)


def test_a_training_that_is_killed_leaves_what_the_next_may_use(run: Run) -> None:
    """SIGKILL in the middle of an epoch, of training and worker alike."""
    script = f"""{NOT_LOOKED_OVER}
    import hasten.techniques.data.memoized_on_disk as kept_on_disk
    kept_on_disk._EVERY, kept_on_disk._SHARE = 0.0, 0  # written at once
    {BEGIN}
    os.setpgid(0, 0)
    class Dying:
        def __init__(self, loader): self.loader, self.given = loader, 0
        def __iter__(self):
            for batch in self.loader:
                self.given += 1
                if self.given == moment: os.killpg(0, signal.SIGKILL)
                yield batch
    moment = int(Path("moment").read_text())
    fit(Dying(DataLoader(Images("images"), 4, shuffle=True, num_workers=WORKERS)))
    """
    reads = []
    for moment in (1, 2, 5, 99):
        trained, read = run(script, "samples", workers=1, before=f"open('moment', 'w').write('{moment}')")
        assert trained.code == (0 if moment == 99 else -signal.SIGKILL), trained.err
        reads.append(read)
    plain, _ = run(script, workers=1)
    assert identical(plain.left, trained.left)
    assert reads[-1] == 0
    assert sum(reads) < 36


def test_a_folder_that_cannot_be_used_is_said_and_the_training_goes_on(run: Run, tmp_path: Path) -> None:
    script = f"""{BEGIN}
    fit(DataLoader(Images("images"), 4))
    """
    (tmp_path / "file").write_text("")
    kept, read = run(script, "samples", cache_dir=str(tmp_path / "file" / "below"))
    assert kept.code == 0, kept.err
    assert "hasten: sample_cache: samples cannot be kept in" in kept.err
    assert "Not a directory" in kept.installed["sample_cache"]
    assert read == 36


def test_no_more_is_kept_than_the_size_that_was_named(run: Run, tmp_path: Path) -> None:
    script = f"""{BEGIN}
    fit(DataLoader(Images("images"), 4))
    """
    small, read = run(script, "samples", cache_size=4000)
    assert small.code == 0, small.err
    assert sum(path.stat().st_blocks * 512 for path in (tmp_path / "cache").glob("*.samples")) <= 12_000
    assert read > 12
    assert identical(run(script)[0].left, small.left)


SPAWNED = """
    if __name__ == "__main__":
        random.seed(0); np.random.seed(0); torch.manual_seed(0)
        sys.path.insert(0, "")
        draw()
        options = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "spawn"}
        loader = DataLoader(Images("images", augment=AUGMENT), 4, shuffle=True, **options)
        fit(loader, epochs=2)
"""


def test_a_copy_of_the_dataset_shares_it(run: Run) -> None:
    """As one that is sent to a worker that was not forked."""
    script = f"""{NOT_LOOKED_OVER}{BEGIN}
    import pickle; from hasten.data.stand_in import called_by
    loader = DataLoader(Images("images"), 4)
    fit(loader, epochs=1)
    copied = pickle.loads(pickle.dumps(loader.dataset))
    called_by(loader.dataset.loader).memo.flush()
    kinds = [type(called_by(copied.loader)).__name__, torch.equal(copied[3][0], Images("images")[3][0])]
    torch.save({{"kinds": kinds}}, "left.pt")
    """
    kept, read = run(script, "decoded")
    assert kept.left == {"kinds": ["CachedFunction", True]}, kept.err
    assert read == 12 + 1


# slow: three trainings, each with a worker that imports torch for itself: 12 s of CPU
@pytest.mark.slow
@pytest.mark.parametrize("keep", ["samples", "decoded"])
def test_workers_that_are_not_forked_share_it(tmp_path: Path, keep: str) -> None:
    script = textwrap.dedent(IMAGES + SPAWNED).replace("AUGMENT", str(keep == "decoded"))
    (tmp_path / "train.py").write_text(script.replace("def pil_loader", "sys.addaudithook(hear)\n\ndef pil_loader"))
    plan = f'[techniques]\nsample_cache = {{keep = "{keep}", where = "disk", cache_dir = "{tmp_path}/cache"}}\n'
    (tmp_path / "hasten.toml").write_text(plan)
    left, reads = [], []
    for command in (("run", "--no-plan"), ("run",), ("run",)):
        (tmp_path / "reads").unlink(missing_ok=True)
        done = execute(HASTEN, *command, "train.py", cwd=tmp_path)
        assert done.code == 0, done.err
        left.append(torch.load(tmp_path / "left.pt"))
        reads.append((tmp_path / "reads").read_text().count("x"))
    assert identical(left[0], left[1])
    assert identical(left[0], left[2])
    assert reads == [24, 12 + 12, 16]  # of kept samples each process makes the first 16 again, and compares them


@pytest.mark.parametrize(
    ("setting", "wrong"),
    [
        ({"where": "disk"}, 'needs keep = "decoded", "samples" or "both"'),
        ({"keep": "both", "where": "disk"}, 'where = "disk" goes with keep = "decoded" or "samples"'),
        ({"keep": "all", "where": "disk"}, "needs keep"),
        ({"keep": "samples", "where": "tape"}, 'must be "memory" or "disk"'),
        ({"keep": "samples", "cache_size": 5}, 'cache_size goes with where = "disk"'),
        ({"keep": "samples", "where": "disk", "cache_size": 0}, "whole number of bytes"),
        ({"keep": "samples", "where": "disk", "cache_size": True}, "whole number of bytes"),
        ({"keep": "samples", "where": "disk", "cache_dir": ""}, "the name of a folder"),
        ({"keep": "samples", "where": "disk", "size": 5}, "no option 'size'"),
        ("disk", "must be one of"),
    ],
)
def test_settings_that_mean_nothing_are_refused(setting: Any, wrong: str) -> None:
    assert wrong in SampleCache.check(setting)
    assert SampleCache.check({"keep": "samples", "where": "disk", "cache_dir": "x", "cache_size": 5}) == ""
    assert SampleCache.check({"keep": "decoded"}) == ""


def test_a_disk_is_tried_where_memory_is_short_and_reading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(seconds: float) -> Choices | Refusal:
        probe = Probe(repeatable=True, sample_seconds=seconds, sample_bytes=1 << 20)
        return SampleCache.settings(evidence_of(loaders=(dataclasses.replace(LOADER, probe=probe),)))

    monkeypatch.setattr(room_of_cache, "room", lambda: 1 << 30)
    monkeypatch.setattr(room_of_cache, "room_on_disk", lambda: 8 << 30)
    chosen, refused = answer(0.05), answer(0.003)
    assert isinstance(chosen, Choices)
    assert chosen.settings == ({"keep": "samples", "where": "disk"},)
    assert isinstance(refused, Refusal)
    assert "may take as long" in refused.reason
    monkeypatch.setattr(room_of_cache, "room_on_disk", lambda: 2 << 30)
    none = answer(0.05)
    assert isinstance(none, Refusal)
    assert "nor in the 2.0 GiB" in none.reason
