"""Samples taken from memory are the samples that would have been read, bit by bit."""

from __future__ import annotations

import pytest

from tests.techniques.conftest import Train, identical

# As torchvision's ImageFolder, which is not installed here: a `loader` function, then random augmentation.
IMAGES = """
    import random, sys
    import numpy as np
    import torch
    from pathlib import Path
    from PIL import Image
    from torch import nn
    from torch.utils.data import DataLoader, Dataset, Subset

    import os, time
    reads = Path("reads")

    def counted(open_image, log=os.open("reads", os.O_WRONLY | os.O_CREAT | os.O_APPEND)):
        return lambda *args: (os.write(log, b"x\\n"), open_image(*args))[1]
    Image.open = counted(Image.open)  # where the cache does not look: what PIL does is PIL's

    def pil_loader(path):
        with open(path, "rb") as file:
            return Image.open(file).convert("RGB")

    class Images(Dataset):
        def __init__(self, folder, augment=True, loader=pil_loader):
            self.samples = sorted(str(path) for path in Path(folder).glob("*.png"))
            self.augment, self.loader, self.scale = augment, loader, 1.0
        def __len__(self):
            return len(self.samples)
        def __getitem__(self, index):
            image = self.loader(self.samples[index])
            if self.augment and random.random() < 0.5:
                image = image.transpose(Image.FLIP_LEFT_RIGHT)
            x = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255 * self.scale
            if self.augment:
                x += torch.rand(1)
            return x, index % 2

    def draw(count=12):
        Path("images").mkdir()
        generator = np.random.default_rng(0)
        for number in range(count):
            Image.fromarray(generator.integers(0, 255, (6, 6, 3), dtype=np.uint8)).save(f"images/{number:02}.png")

    def fit(loaders, epochs=3, between=lambda epoch: None):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for epoch in range(epochs):
            for loader in loaders:
                for x, y in loader:
                    loss = nn.functional.cross_entropy(model(x), y)
                    optimizer.zero_grad(); loss.backward(); optimizer.step()
                    losses.append(loss.item())
            between(epoch)
        read = len(reads.read_text().splitlines())
        left = {"losses": losses, "model": model.state_dict(), "random": torch.rand(1).item(), "read": read}
        torch.save(left, "left.pt")

    random.seed(0); np.random.seed(0); torch.manual_seed(0)
    draw()
    time.sleep(0.03)  # a file that was just written may be written again at the same time
"""


def compared(train: Train, script: str, setting: str) -> tuple[int, int]:
    """How often samples were read without and with the cache, once the results are seen to be the same."""
    plain = train(IMAGES + script)
    changed = train(IMAGES + script, sample_cache=setting)
    assert plain.code == changed.code == 0, plain.err + changed.err
    reads = plain.left.pop("read"), changed.left.pop("read")
    assert identical(plain.left, changed.left)
    assert changed.evidence is not None
    assert changed.evidence.skipped == ()
    return reads


# Samples that are made again to be compared would count as read; the audit has a test of its own below.
NOT_LOOKED_OVER = "import hasten.techniques.data.memoized as kept; kept._AUDITED, kept._LOT = 0, 10**9"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", ["Images('images')", "Subset(Images('images'), [5, 1, 3, 3, 8])"])
def test_decoded_images_keep_their_augmentation(train: Train, workers: int, dataset: str) -> None:
    script = f"""
    {NOT_LOOKED_OVER}
    fit([DataLoader({dataset}, batch_size=4, shuffle=True, num_workers={workers})])
    """
    plain, changed = compared(train, script, "decoded")
    different = 4 if "Subset" in dataset else 12
    assert plain == 3 * (5 if "Subset" in dataset else 12)
    assert different <= changed <= different * max(1, workers)  # two workers may read the same one at the same time


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", ["whole", "Subset(whole, [5, 1, 3, 8])"])
def test_samples_that_repeat_themselves_are_read_once(train: Train, workers: int, dataset: str) -> None:
    script = f"""
    {NOT_LOOKED_OVER}
    whole = Images('images', augment=False)
    fit([DataLoader({dataset}, batch_size=4, shuffle=True, num_workers={workers})])
    """
    plain, changed = compared(train, script, "samples")
    different = 4 if "Subset" in dataset else 12
    assert (plain, changed) == (3 * different, different)


def test_two_loaders_of_one_dataset_share_their_samples(train: Train) -> None:
    script = f"""
    {NOT_LOOKED_OVER}
    whole = Images('images', augment=False)
    fit([DataLoader(whole, batch_size=4, shuffle=True), DataLoader(whole, batch_size=3)])
    """
    assert compared(train, script, "samples") == (72, 12)


CHANGES = [
    "whole.scale = 1.0 + epoch",
    "whole.samples = whole.samples[::-1]",
    "whole.samples[3], whole.samples[7] = whole.samples[7], whole.samples[3]",
    "whole.options['scale'] += 1",
    "whole.transform.steps[0].scale += 1",
    "whole.table[3] += 1",
    "whole.tensor[2] += 1",
    "subset.indices = subset.indices[1:]",
    "subset.indices[0] = 9",
]


@pytest.mark.parametrize(
    ("change", "workers"),
    [(change, "num_workers=0") for change in CHANGES]
    + [(CHANGES[0], "num_workers=1"), (CHANGES[0], "num_workers=1, persistent_workers=True")],
)
def test_a_dataset_changed_between_epochs_is_read_anew(train: Train, change: str, workers: str) -> None:
    script = f"""
    class Step:
        scale = 1.0
    class Compose:
        def __init__(self): self.steps = [Step()]
    class Changing(Images):
        def __init__(self):
            super().__init__("images", augment=False)
            self.options, self.transform = {{"scale": 1.0}}, Compose()
            self.table, self.tensor = np.ones(12, dtype=np.float32), torch.ones(12)
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            scale = self.options["scale"] * self.transform.steps[0].scale
            return x * scale * float(self.table[index]) * self.tensor[index], y
    whole = Changing()
    subset = Subset(whole, [2, 3, 5, 7])
    def between(epoch):
        {change}
    fit([DataLoader(subset, batch_size=2, {workers})], between=between)
    """
    plain, changed = compared(train, script, "samples")
    assert changed <= plain


STALE = {
    "one label in 200": "data.labels[epoch * 7] += 1000",
    "a label in mid-pass": "pass",
    "an array by a view": "data.view[epoch] += 5",
    "the signs of a large array": "data.large *= -1",
    ".data": "data.t.data[epoch + 3] += 5",
    "array.array": "data.array[epoch + 5] += 5",
    "a global": "bonus += 1",
    "a closure": "data.add.__closure__[0].cell_contents += 1",
    "a class attribute": "Data.total += 1",
    "one file of 60": "Path(f'files/{epoch + 9}').write_text('77')",
    "a file put in another's place": "Path('new').write_text('88'); os.replace('new', f'files/{epoch + 9}')",
    "a file of the same size and time": "touched = os.stat('files/3'); Path('files/3').write_text('9'); "
    "os.utime('files/3', ns=(touched.st_atime_ns, touched.st_mtime_ns))",
    "a patched method": "Data.__getitem__ = lambda self, index: torch.tensor(float(epoch))",
    "a patched function": "read = lambda path: 55",
}
DOES = {
    "a rare augmentation": "if random.random() < 0.03: x += 1",
    "an augmentation of a few samples": "if index == 150: x += torch.rand(())",
    "NumPy's numbers": "if index == 150: x += np.random.rand()",
    "a generator of its own": "x += float(torch.rand((), generator=self.g))",
    "a counter": "self.count = getattr(self, 'count', 0) + 1",
    "a counter in a list": "self.seen[0] += 1",
    "a counter in a long list": "self.labels[199] += 1",
    "what it says": "print(index)",
    "a file": "open('log', 'a').close()",
    "the time": "x += time.time()",
    "a generator of no seed": "x += np.random.default_rng().random()",
}


@pytest.mark.parametrize("what", [*STALE, *DOES])
def test_a_sample_is_kept_only_while_all_it_was_made_of_stays(train: Train, what: str) -> None:
    """Also rarely: one sample of 200. Passes 2 and 3 take all from the store, and from what was ready to be copied."""
    script = f"""
    import array
    Path("files").mkdir()
    for number in range(60): Path(f"files/{{number}}").write_text(str(number % 10))
    time.sleep(0.03)
    bonus = 0
    def read(path): return int(Path(path).read_text())
    def adder(start): return lambda x: x + start
    class Data(Dataset):
        total = 0
        def __init__(self):
            self.labels, self.array, self.t = [0] * 200, array.array("l", [0] * 200), torch.zeros(200)
            self.view, self.add, self.g, self.seen = np.zeros(200), adder(0), torch.Generator(), [0]
            self.large = np.ones(1_200_000)  # too large for copies of its rows
        def __len__(self): return 200
        def __getitem__(self, index):
            x = torch.tensor(float(read(f"files/{{index % 60}}") + bonus + self.total))
            x += self.labels[index] + self.array[index] + self.t[index] + self.view[index] + self.large[index]
            {DOES.get(what, "pass")}
            return self.add(x)
    data = Data()
    loader = DataLoader(data, batch_size=10)
    seen = []
    for epoch in range(6):
        for number, x in enumerate(loader):
            seen.append(x.tolist() if {what!r} not in ("the time", "a generator of no seed") else 0)
            if {what!r} == "a label in mid-pass" and number == 4 and epoch in (0, 3, 4):
                data.labels[100 + epoch] += 1000
        if epoch in (0, 3, 4):
            {STALE.get(what, "pass")}
        time.sleep(0.03)
    drawn = [random.random(), np.random.rand(), torch.rand(1).item(), data.g.get_state().tolist()]
    torch.save({{"seen": seen, "drawn": drawn, "own": [data.labels, data.seen, vars(data).get("count")]}}, "left.pt")
    """
    plain, changed = train(IMAGES + script), train(IMAGES + script, sample_cache="samples")
    assert plain.code == changed.code == 0, changed.err
    assert identical(plain.left, changed.left)
    assert plain.out == changed.out
    assert ("left alone" in changed.installed["sample_cache"]) == (what in DOES)


def test_kept_samples_are_compared_for_as_long_as_it_trains(train: Train) -> None:
    """By lot, one in 200: what changes where no look goes (an object in the place of a library's function) is said."""
    script = """
    import functools
    shift = [0]
    np.asarray = functools.partial(lambda real, x: real(x) + shift[0], np.asarray)
    loader = DataLoader(Images("images", augment=False), 4)
    for epoch in range(400):
        if epoch == 3:  # past the first samples, each of which is compared
            shift[0] = 1
            print("changed", file=sys.stderr, flush=True)
        for x, y in loader: last = x
    print("over", file=sys.stderr, flush=True)
    torch.save({"last": last}, "left.pt")
    """
    plain, changed = train(IMAGES + script), train(IMAGES + script, sample_cache="samples")
    assert plain.code == changed.code == 0, changed.err
    assert identical(plain.left, changed.left)
    before, _, after = changed.err.partition("changed\n")
    said = (
        "gave another sample than before: samples taken from the cache until now may not be what they would have been"
    )
    assert said not in before
    assert said in after.partition("over\n")[0]


def test_batches_that_a_dataset_gives_whole_are_left_alone(train: Train) -> None:
    script = """
    class Whole(Images):
        def __getitems__(self, indices): return [(torch.zeros(1), 2 * index) for index in indices]
    torch.save({"seen": [y.tolist() for x, y in DataLoader(Whole("images"), batch_size=4)]}, "left.pt")
    """
    plain, changed = train(IMAGES + script), train(IMAGES + script, sample_cache="samples")
    assert plain.left == changed.left
    assert "__getitems__" in changed.installed["sample_cache"]


def test_a_dataset_that_is_gone_leaves_its_room(train: Train) -> None:
    script = """
    from hasten.data.sample_store import _alive
    open_stores = []
    def folds():
        for fold in range(4):
            yield DataLoader(Images('images', augment=False), batch_size=6)
            open_stores.append(len(_alive))
    fit(folds(), epochs=1)
    torch.save({"open": open_stores}, "left.pt")
    """
    left = train(IMAGES + script, sample_cache="samples").left
    assert max(left["open"]) <= 2
    assert left["open"][0] == 1


@pytest.mark.parametrize("kind", ["torch.arange(4.0)", "np.arange(4.0)"])
def test_parts_of_a_sample_that_share_memory_still_do(train: Train, kind: str) -> None:
    script = f"""
    class Two(Dataset):
        def __len__(self): return 4
        def __getitem__(self, index):
            x = {kind} + index
            return {{"x": x, "head": x[:2]}}
    def collate(samples):
        for sample in samples: sample["head"][:] = 0
        return [sample["x"].tolist() for sample in samples]
    loader = DataLoader(Two(), batch_size=2, collate_fn=collate)
    torch.save({{"seen": [x for epoch in range(3) for x in loader]}}, "left.pt")
    """
    changed = train(IMAGES + script, sample_cache="samples")
    assert train(IMAGES + script).left == changed.left
    assert "share memory" in changed.installed["sample_cache"]


def test_samples_are_the_readers_own(train: Train) -> None:
    script = """
    class Same(Dataset):
        kept = [torch.ones(2) * number for number in range(4)]
        def __len__(self): return 4
        def __getitem__(self, index): return self.kept[index].clone()
    def collate(samples):
        for sample in samples: sample.add_(1)
        return torch.stack(samples)
    loader = DataLoader(Same(), batch_size=2, collate_fn=collate)
    torch.save({"seen": [x.tolist() for epoch in range(3) for x in loader]}, "left.pt")
    """
    assert train(IMAGES + script).left == train(IMAGES + script, sample_cache="samples").left


def test_what_has_no_index_or_no_loader_function_is_left_alone(train: Train) -> None:
    script = """
    from torch.utils.data import IterableDataset
    class Stream(IterableDataset):
        def __iter__(self): return iter(range(6))
    seen = [x.tolist() for epoch in range(2) for x in DataLoader(Stream(), batch_size=2)]
    seen += [x.tolist() for epoch in range(2) for x in DataLoader([1, 2, 3], batch_size=None)]
    seen += [x.tolist() for epoch in range(2) for x in DataLoader([1, 2, 3], batch_size=2)]
    torch.save({"seen": seen}, "left.pt")
    """
    plain = train(IMAGES + script)
    for setting in ("samples", "decoded"):
        changed = train(IMAGES + script, sample_cache=setting)
        assert changed.left == plain.left, changed.err
        assert "sample_cache" not in changed.installed


def test_a_dataset_sent_to_spawned_workers_or_copied_still_reads(train: Train) -> None:
    script = """
    import copy, pickle
    whole = Images('images', augment=False)
    loader = DataLoader(whole, batch_size=4)
    copied = copy.deepcopy(whole)
    fit([loader, DataLoader(copied, batch_size=4)], epochs=2)
    left = torch.load("left.pt")
    left["plain"] = [pickle.loads(pickle.dumps(one.loader)) is pil_loader for one in (whole, copied)]
    torch.save(left, "left.pt")
    """
    compared(train, script, "decoded")


def test_why_it_lets_go_is_said_once_where_a_script_makes_a_dataset_for_each_epoch(train: Train) -> None:
    script = """
        import torch
        from torch.utils.data import DataLoader
        for epoch in range(3):
            for x in DataLoader(list(torch.arange(8.0)), 4): pass
    """
    assert train(script, sample_cache="samples").err.count("sample_cache") == 1


def test_each_dataset_that_is_let_go_is_named(train: Train) -> None:
    script = """
        import torch
        from torch.utils.data import DataLoader
        for rows in (8, 12):
            for x in DataLoader(list(torch.arange(float(rows))), 4): pass
    """
    err = train(script, sample_cache="samples").err
    assert "list of 8 samples" in err
    assert "list of 12 samples" in err


def test_the_cache_adds_no_generator_to_what_a_checkpoint_holds_of_the_dataset(train: Train) -> None:
    script = """
    from hasten.data.position import Position
    loader = DataLoader(Images("images"), batch_size=4)
    for x, y in loader: pass
    torch.save({"own": sorted(Position(loader).state_dict(0)["own"])}, "left.pt")
    """
    assert train(IMAGES + script, sample_cache="decoded").left == train(IMAGES + script).left
