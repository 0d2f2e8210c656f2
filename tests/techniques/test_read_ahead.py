"""Images read ahead by threads are the images that the training would have read, and its random numbers stay."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

import pytest

from hasten.evidence import Probe
from hasten.techniques import Choices, Refusal
from hasten.techniques.data.read_ahead import ReadAhead
from tests.techniques.conftest import CPU, LOADER, Train, evidence_of, identical
from tests.techniques.test_sample_cache import IMAGES

# How many images threads made and the training took, in place of reading them itself.
TAKEN = """
    import hasten.data.read_ahead as ahead
    taken = [0]
    def counted(self, task, may_give=ahead.ReadFunction._may_give):
        given = may_give(self, task)
        taken[0] += given
        return given
    ahead.ReadFunction._may_give = counted
    def take(self, key, plain=ahead.ReadFunction._take):
        kept = self._ready.get(key)
        if kept: self._feed(kept[0][1]), time.sleep(0.002)  # let a thread begin: it is not luck then
        return plain(self, key)
    ahead.ReadFunction._take = take
"""
MORE = """
    Path("more").mkdir()
    generator = np.random.default_rng(1)
    for number in range(40):
        Image.fromarray(generator.integers(0, 255, (6, 6, 3), dtype=np.uint8)).save(f"more/{number:02}.png")
    time.sleep(0.03)
"""


def compared(train: Train, script: str, plan: dict[str, Any] | None = None) -> tuple[int, str]:
    """How many images were taken from threads, and what the technique says, once results are seen to be the same."""
    plan = plan or {"read_ahead": 2}
    script = (
        textwrap.dedent(IMAGES)
        + textwrap.dedent(MORE)
        + "HERE"
        + textwrap.dedent(script)
        + """
left = torch.load("left.pt") | {"taken": globals().get("taken", [0])[0]}
torch.save(left, "left.pt")
"""
    )
    plain = train(script.replace("HERE", ""))
    changed = train(script.replace("HERE", textwrap.dedent(TAKEN)), **plan)
    assert plain.code == changed.code == 0, plain.err + changed.err
    taken = changed.left.pop("taken"), plain.left.pop("taken")
    plain.left.pop("read", 0), changed.left.pop("read", 0)
    assert identical(plain.left, changed.left)
    assert plain.out == changed.out
    assert changed.evidence is not None
    assert changed.evidence.skipped == ()
    return taken[0], changed.installed.get("read_ahead", "")


@pytest.mark.parametrize(
    "loader",
    [
        "DataLoader(Images('more'), batch_size=4, shuffle=True)",
        "DataLoader(Subset(Images('more'), list(range(39, 3, -1))), batch_size=5, drop_last=True)",
        "DataLoader(Images('more'), 4, sampler=torch.utils.data.WeightedRandomSampler([1.0] * 40, 30))",
        "DataLoader(Images('more'), 4, shuffle=True, generator=torch.Generator().manual_seed(3))",
    ],
)
def test_batches_are_the_same_and_come_from_threads(train: Train, loader: str) -> None:
    taken, said = compared(train, f"fit([{loader}])")
    assert taken > 30, said
    assert said == "3 x pass"


PATHS = {
    "joined": ("self.names = [Path(p).name for p in self.samples]", "self.loader('more/' + self.names[index])"),
    "a Path": ("self.paths = [Path(p) for p in self.samples]", "self.loader(self.paths[index])"),
    "an array": ("self.samples = np.array(self.samples)", "self.loader(str(self.samples[index]))"),
    "in a tuple": (
        "self.rows = [(number, (p)) for number, p in enumerate(self.samples)]",
        "self.loader(self.rows[index][1])",
    ),
}


@pytest.mark.parametrize("where", list(PATHS))
def test_where_a_dataset_keeps_its_paths_is_learnt(train: Train, where: str) -> None:
    keeps, asks = PATHS[where]
    script = f"""
    class Keeping(Images):
        def __init__(self):
            super().__init__("more")
            {keeps}
        def __getitem__(self, index):
            x = torch.from_numpy(np.asarray({asks}).copy()).permute(2, 0, 1).float()
            return x + torch.rand(1), index % 2
    fit([DataLoader(Keeping(), 4, shuffle=True)], epochs=2)
    """
    taken, said = compared(train, script)
    assert taken > 20, said


CHANGES = {
    "a file": "Image.new('RGB', (6, 6), 'red').save(f'more/{step % 40:02}.png')",
    "a file, put in another's place": "Image.new('RGB', (6, 6), 'red').save('new.png'); "
    "os.replace('new.png', f'more/{step % 40:02}.png')",
    "what the function reads": "globals().update(shade=step // 5)",
    "a path": "whole.samples[step % 40] = whole.samples[0]",
    "the function": "whole.loader = pil_loader",
    "the batch size": "loader.batch_sampler.batch_size = 3 + step % 2",
    "random numbers": "random.random(), torch.rand(1), np.random.rand()",
    "a break": "left_out.append(next(iter(loader))[1].tolist())",
    "a fork": "pid = os.fork(); pid or os._exit(len(whole[0]) != 2); assert os.waitpid(pid, 0)[1] == 0",
}


@pytest.mark.parametrize("what", list(CHANGES))
def test_what_changes_during_a_pass_is_seen(train: Train, what: str) -> None:
    script = f"""
    shade, left_out = 0, []
    def shaded(path):
        return pil_loader(path).point([min(255, n + shade) for n in range(256)] * 3)
    whole = Images("more", loader=shaded)
    loader = DataLoader(whole, 4, shuffle=True)
    seen, step = [], 0
    for epoch in range(3):
        for x, y in loader:
            seen.append([x.tolist(), y.tolist()])
            step += 1
            if step > 6:
                {CHANGES[what]}
    torch.save({{"seen": seen, "left_out": left_out, "drawn": [random.random(), torch.rand(1).item()]}}, "left.pt")
    """
    taken, said = compared(train, script)
    assert taken, said


def test_what_threads_read_beside_a_forward_in_another_type_is_read_again(train: Train) -> None:
    """The default type is the whole process's. It is set behind the first images, all of which are compared."""
    script = """
    def scaled(path):
        return torch.from_numpy(np.asarray(pil_loader(path)).copy()).permute(2, 0, 1) / 255  # in the default type
    class Scaled(Images):
        def __getitem__(self, index):
            return self.loader(self.samples[index]), index % 2
    seen = []
    for step, (x, y) in enumerate(DataLoader(Scaled("more", loader=scaled), 2)):
        torch.set_default_dtype(torch.float64 if step > 12 else torch.float32)
        time.sleep(0.02)
        torch.set_default_dtype(torch.float32)
        seen.append([str(x.dtype), x.tolist()])
    torch.save({"seen": seen}, "left.pt")
    """
    _, said = compared(train, script)
    assert "left alone: torch's default dtype is set while threads read" in said


DRAWS = {
    "its function draws": "if random.random() < 0.5: image = image.transpose(Image.FLIP_LEFT_RIGHT)",
    "by NumPy, rarely": "if path.endswith('33.png'): image = image.rotate(90 * np.random.randint(4))",
    "by a transform": "image = roll(image)",
    "it says something": "print(path)",
    "it counts": "counts[0] += 1",
    "it writes": "open('log', 'a').close()",
    "it asks the time": "image = image.rotate(90 if time.time() < 0 else 0)",
}


@pytest.mark.parametrize("what", list(DRAWS))
def test_functions_that_do_more_than_read_are_left_alone(train: Train, what: str) -> None:
    script = f"""
    counts = [0]
    class RandomRoll:
        def __call__(self, image): return image.rotate(90 * int(torch.randint(4, ())))
    roll = RandomRoll()
    def does(path):
        image = pil_loader(path)
        {DRAWS[what]}
        return image
    fit([DataLoader(Images("more", loader=does), 4, shuffle=True)])
    torch.save(torch.load("left.pt") | {{"counts": counts}}, "left.pt")
    """
    taken, said = compared(train, script)
    assert not taken
    assert "left alone: " in said


def test_passes_that_cannot_be_foreseen_are_left_alone(train: Train) -> None:
    script = """
    from torch.utils.data import RandomSampler, SubsetRandomSampler
    class Own:
        def __len__(self): return 8
        def __iter__(self): return iter(range(8))
    whole = Images("more")
    fit([
        DataLoader(whole, 4, num_workers=1), DataLoader(whole, 4, sampler=Own()),
        DataLoader(whole, 4, sampler=SubsetRandomSampler(range(40))), DataLoader([(torch.rand(3, 6, 6), 1)], 1),
        DataLoader(whole, 4, sampler=RandomSampler(range(40), True)),
    ], epochs=1)
    """
    taken, said = compared(train, script)
    assert not taken
    reasons = ("not made by torch's own loop", "the order of Own", "SubsetRandomSampler", "no `loader` function")
    assert all(reason in said for reason in (*reasons, "goes on drawing")), said


def test_a_file_that_is_broken_raises_what_it_raised_where_it_raised(train: Train) -> None:
    script = """
    import traceback
    Path("more/25.png").write_bytes(Path("more/25.png").read_bytes()[:60])
    time.sleep(0.03)
    seen = []
    try:
        for x, y in DataLoader(Images("more"), 4):
            seen.append(y.tolist())
    except Exception as error:
        frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        seen.append([repr(error), "pil_loader" in frames])
    torch.save({"seen": seen, "drawn": random.random()}, "left.pt")
    """
    taken, _ = compared(train, script)
    assert taken


@pytest.mark.parametrize("plan", [{"sample_cache": "decoded"}, {"sample_cache": "samples"}, {"loader_workers": 1}])
def test_together_with_what_also_acts_on_loaders(train: Train, plan: dict[str, Any]) -> None:
    """A cache is filled by what threads read; workers make whole samples, so nothing is read ahead of them."""
    augment = "loader_workers" not in plan  # which draws other numbers
    script = f"""
    fit([DataLoader(Images("more", augment={augment} and {plan.get("sample_cache") != "samples"}), 4, shuffle=True)])
    """
    order = {"read_ahead": 2} | plan if plan.get("sample_cache") == "samples" else plan | {"read_ahead": 2}
    taken, said = compared(train, script, order)
    assert bool(taken) == ("sample_cache" in plan), said
    if "loader_workers" in plan:  # no reason for a search to ask it no more: the next pass may have no workers
        assert "left alone" not in said


def test_a_pass_is_resumed_with_its_batches_read_ahead(train: Train) -> None:
    script = """
    from hasten.data.position import Position
    from hasten.data import rng
    loader = DataLoader(Images("more"), 4, shuffle=True)
    for x, y in loader: pass
    place = Position(loader)
    iterator = place.begin()
    place.first()
    rest = [next(iterator)[1].tolist() for _ in range(3)]
    state, states = place.state_dict(3), rng.state()
    goes_on = [[x.tolist(), y.tolist()] for x, y in iterator]
    fresh = DataLoader(Images("more"), 4, shuffle=True)
    again = Position(fresh).resume(state)
    rng.restore(states)
    assert [[x.tolist(), y.tolist()] for x, y in again] == goes_on
    torch.save({"seen": rest + goes_on, "own": sorted(state["own"])}, "left.pt")  # no generators but the dataset's
    """
    taken, said = compared(train, script)
    assert taken, said


def test_a_pass_that_is_left_is_over_at_once(train: Train) -> None:
    """Its workers end and its generators close there, also where no garbage is collected."""
    script = """
import gc
import multiprocessing
import torch
from torch.utils.data import DataLoader, IterableDataset
gc.disable()
class Stream(IterableDataset):
    def __iter__(self):
        try:
            yield from range(100)
        finally:
            print("closed")
for batch in DataLoader(Stream(), batch_size=4):
    break
print("left", batch)
for batch in DataLoader(list(range(100)), batch_size=4, num_workers=2):
    break
print("left", batch, len(multiprocessing.active_children()))
torch.save({}, "left.pt")
"""
    plain, changed = train(script), train(script, read_ahead=2)
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert plain.out.split("left")[0] == "closed\n"
    assert plain.out.endswith(" 0\n")
    assert changed.out == plain.out


@pytest.mark.parametrize("plan", [{"read_ahead": 2}, {"sample_cache": "decoded"}], ids=str)
def test_a_copy_of_the_dataset_has_its_own_function_and_threads_end_with_it(train: Train, plan: dict[str, Any]) -> None:
    script = """
    import copy, gc, pickle, threading
    whole = Images("more")
    fit([DataLoader(whole, 4)])
    left = torch.load("left.pt")
    left["plain"] = [one.loader is pil_loader for one in (copy.deepcopy(whole), pickle.loads(pickle.dumps(whole)))]
    left["needs hasten"] = b"hasten" in pickle.dumps(whole)
    del whole
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("hasten-ahead"): thread.join(20)
    left["threads"] = [thread.name for thread in threading.enumerate() if thread.name.startswith("hasten-ahead")]
    torch.save(left, "left.pt")
    """
    compared(train, script, plan)


def test_images_in_memory_are_bounded_and_let_go_with_their_sample(train: Train) -> None:
    """A budget of five images: no more were made before their turn. When the step runs, none of its batch is left."""
    script = """
    import gc
    from PIL import Image as Images_
    try:
        import hasten.data.read_ahead as ahead
        ahead._MOST_BYTES = 5 * 6 * 6 * 4
    except ImportError: pass  # plain
    def images(): return sum(isinstance(one, Images_.Image) for one in gc.get_objects())
    whole, seen, most = Images("more"), [], []
    for epoch in range(3):
        for x, y in DataLoader(whole, 8, shuffle=True):
            time.sleep(0.02)  # threads make what they have room for
            most.append(images())
            seen.append([x.tolist(), y.tolist()])
    assert max(most) <= 5 + 2, most  # each thread may hold the file that it is opening, too
    torch.save({"seen": seen}, "left.pt")
    """
    taken, said = compared(train, script)
    assert taken > 30, said


PROBE = {"loader_function": "default_loader", "loader_repeatable": True, "loader_seconds": 1e-3}


@pytest.mark.parametrize(
    ("loader", "probe", "share", "answer"),
    [
        ({}, PROBE, 0.5, (4, 2)),
        ({}, PROBE, 0.01, "waits 1% of its time"),
        ({}, {}, 0.5, "no `loader` function"),
        ({}, PROBE | {"loader_repeatable": False}, 0.5, "another sample each time"),
        ({}, PROBE | {"loader_seconds": 1e-5}, 0.5, "no more than a thread costs"),
        ({"num_workers": 2}, PROBE, 0.5, "worker processes"),
        ({"iterable": True}, PROBE, 0.5, "iterable"),
    ],
)
def test_what_is_worth_trying(loader: Any, probe: Any, share: float, answer: Any) -> None:
    facts = dataclasses.replace(LOADER, **loader, probe=Probe(repeatable=False, sample_seconds=2e-3, **probe))
    choices = ReadAhead.settings(evidence_of(loaders=(facts,), data_share=share))
    if isinstance(answer, str):
        assert isinstance(choices, Refusal)
        assert answer in choices.reason.replace(" %", "%")
    else:
        assert isinstance(choices, Choices)
        assert choices.settings == answer
    assert ReadAhead.useless(17, CPU)
    assert not ReadAhead.useless(4, CPU)
