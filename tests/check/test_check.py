"""`hasten check`: what parts from the plain run is found and named; what keeps its word is not."""

from __future__ import annotations

import pytest

from benchmarks.exact.trainings import MODELS, training
from hasten.check.result import CheckResult
from hasten.check.runs import CheckTimeoutError
from hasten.errors import HastenError
from tests.check.conftest import Check


def said(found: CheckResult) -> str:
    """What parts first, for messages of failed tests."""
    return f"{found.first} {[(run.level, run.ok, run.note, run.worst_at) for run in found.runs]} {found.files}"


# slow: rows of test_pairs.py check these kinds of model as well, fresh and resumed
SLOW = {"convolutions", "recurrence", "attention"}


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=pytest.mark.slow if model in SLOW else ()) for model in MODELS]
)
def test_a_plan_that_changes_nothing_keeps_its_word(check: Check, model: str) -> None:
    optimizer = "sparse" if model == "sparse" else "adamw"
    found = check(training(model, optimizer, "augmented"), {"leaves_alone": True}, resume=("--resume",))
    assert found.ok, said(found)
    assert [run.level for run in found.runs] == ["exact"]
    assert len(found.resumed) == 2
    counts = found.runs[0].counts
    assert counts["step"] == (24 if model == "sparse" else 12), counts
    assert counts["batch"] == 16
    assert counts["validation"] == 4


DEFECTS = {
    "scales_a_gradient": ("gradient: Sequential.0.weight", "optimizer step 1"),
    "drops_a_batch": ("sample 0 of part 0", "batch 5 of loader 1"),
    "draws_once": ("random state of Python", "optimizer step 3"),
    "draws_once_from_numpy": ("random state of NumPy", "optimizer step 3"),
    "draws_once_from_torch": ("random state of torch", "optimizer step 3"),
    "adds_to_the_loss": ("loss: 0", "optimizer step 1"),
    "spoils_a_moment": ("optimizer state: Sequential.0.weight, exp_avg_sq", "optimizer step 2"),
    "turns_the_rate": ("options of optimizer 0, group 0", "optimizer step 2"),
    "validates_otherwise": ("output 0 of Sequential", "validation forward 1 of Sequential"),
    "leaves_a_file": ("more.txt", "what was saved"),
    "steps_twice": ("course of the training", "optimizer step 5"),
    "saves_other_options": ("last.pt", "what was saved"),
    "fails": ("the script", "the run"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_found_and_named(check: Check, defect: str) -> None:
    found = check(training(), {"leaves_alone": True, defect: True})
    assert found.ok is False
    assert found.first is not None
    assert (found.first.what, found.first.place) == DEFECTS[defect], said(found)
    assert found.culprits == (defect,)


def test_a_difference_that_was_seen_is_told_though_the_time_is_over_then(check: Check) -> None:
    plan = {"leaves_alone": True, "draws_once": True}
    with pytest.raises(CheckTimeoutError):
        check(training(), plan, runs_in_time=2)  # whether the script repeats itself is not known
    found = check(training(), plan, runs_in_time=3)
    assert found.ok is False
    assert found.first is not None
    assert found.first.what == DEFECTS["draws_once"][0]
    assert found.culprits == ()
    assert any("before it was known which technique it is" in note for note in found.notes)


# slow: twice the operators, each with its noise
@pytest.mark.parametrize(
    ("model", "weight"),
    [("mlp", "Sequential.0.weight"), pytest.param("convolutions", "Net.stem.0.weight", marks=pytest.mark.slow)],
)
def test_a_gradient_scaled_by_nine_tenths_is_found_under_bf16(check: Check, model: str, weight: str) -> None:
    found = check(training(model), {"precision": "bf16-mixed", "scales_a_gradient": True})
    assert found.ok is False
    assert found.culprits == ("scales_a_gradient",), said(found)
    agreed = found.runs[-1].agreed
    assert agreed is not None
    assert agreed.worst == weight
    assert agreed.allowed is not None
    assert agreed.allowed < agreed.gradient_gap == pytest.approx(0.1, abs=0.03)


def test_weights_kept_in_bf16_are_found(check: Check) -> None:
    found = check(training("mlp"), {"narrow_weights": True})
    assert found.ok is False
    assert found.first is not None
    assert found.first.what.startswith("weight: "), said(found)


def test_buffers_that_stand_still_are_found(check: Check) -> None:
    found = check(training("convolutions"), {"freezes_buffers": True})
    assert found.ok is False
    assert found.first is not None
    assert found.first.what.startswith("buffer: "), said(found)


def test_two_techniques_that_part_only_together_are_both_named(check: Check) -> None:
    plan = {"leaves_alone": True, "only_together": True, "batched_fetch": True, "only_together_too": True}
    found = check(training(), plan)
    assert found.ok is False
    assert found.culprits == ("only_together", "only_together_too")


# slow: four times the operators, each with its noise
@pytest.mark.parametrize("model", ["mlp", pytest.param("attention", marks=pytest.mark.slow)])
def test_rounding_is_held_to_the_scripts_own(check: Check, model: str) -> None:
    plan = {"precision": "bf16-mixed", "fused_optimizer": True}
    found = check(training(model), plan)
    assert found.ok, said(found)
    single, whole = found.runs
    assert single.plan == {"fused_optimizer": True}
    # 16 bits let more pass than 24 do, but not everything.
    assert 0 < single.sees < 2e-4 < whole.sees < 0.1


TURNS = """
import torch

torch.manual_seed(0)
torch.set_num_threads(1)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(32, 16)
        self.linear.weight.data.abs_()  # and inputs above zero: sums in which nothing cancels
        self.gain = torch.nn.Parameter(torch.zeros(16))

    def forward(self, x):
        h = self.linear(x)
        # What NumPy computes takes no part in rounding: six units are left, of which nobody can know the sign.
        exact = x[0].numpy().astype("float64") @ self.linear.weight[0].detach().numpy().astype("float64")
        exact += self.linear.bias[0].item()
        left = (h[0, 0].detach() - exact * (1 - 6 * 2.0**-23)).float()
        slope = torch.cat([torch.ones(15), left[None]])
        return h.square().mean() + (self.gain * slope).sum()


class SignSGD(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.01 * parameter.grad.sign()


net = Net()
optimizer = SignSGD(net.parameters())
for batch in torch.utils.data.DataLoader(torch.rand(48, 32), batch_size=8):
    optimizer.zero_grad()
    net(batch).backward()
    optimizer.step()
"""


def test_what_turns_on_a_rounding_error_is_not_held_against_a_plan(check: Check) -> None:
    """Adam's first step, too, goes by the sign of a gradient: of one that is nothing but rounding, rounding decides."""
    found = check(TURNS, {"rounds_down": True})
    assert found.ok, said(found)
    found = check(TURNS, {"rounds_down": True, "scales_a_gradient": True})
    assert found.ok is False, "what is no rounding is found beside it"
    assert found.culprits == ("scales_a_gradient",), said(found)


def test_what_draws_otherwise_is_said_and_the_rest_still_compared(check: Check) -> None:
    found = check(training("mlp", data="augmented"), {"loader_workers": 1})
    assert found.ok, said(found)
    assert found.runs[-1].level == "sampling"
    assert {"random state of Python", "random state of NumPy", "random state of torch"} <= set(found.runs[-1].moved)
    found = check(training("mlp", data="augmented"), {"loader_workers": 1, "scales_a_gradient": True})
    assert found.ok is False


def test_a_bias_that_a_batch_norm_takes_away_is_noise_and_so_is_its_square(check: Check) -> None:
    """Its gradient is what rounding left of zero: channels_last sums otherwise, and parted by Adam's second moment."""
    script = """
        import torch
        from torch import nn
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * 8 * 8, 5))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(3):
            images, labels = 0.2 * torch.rand(32, 3, 32, 32), torch.randint(0, 5, (32,))
            for image, label in zip(images, labels):
                image[:, 4 * label + 2 : 4 * label + 7, 5:25] += 0.6
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    """
    found = check(script, {"channels_last": True})
    assert found.ok, said(found)


def test_noise_that_is_longer_in_each_step_is_not_held_against_a_plan(check: Check) -> None:
    """Rounding errors of zero are longer under channels_last, in each step, which says nothing of the training."""
    script = """
        import torch
        from torch import nn
        torch.manual_seed(0)
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv, self.norm, self.drop = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Dropout(0.1)
            def forward(self, x): return x + self.drop(self.norm(self.conv(x)).relu())
        body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *(Block() for _ in range(4)))
        model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        images, labels = torch.randn(192, 3, 16, 16), torch.randint(0, 5, (192,))
        for chosen in torch.arange(192).split(16):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
    """
    found = check(script, {"channels_last": True})
    assert found.ok, said(found)


OBJECTS = """
import collections, dataclasses
import numpy as np, torch
from torch.utils.data import DataLoader, Dataset

@dataclasses.dataclass
class Batch:
    x: object
    y: object
    names: list

class Encoding(collections.UserDict):
    pass

class Graph:
    def __init__(self, x, y):
        self.x, self.y, self.made = x, y, object()

class Rows(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        x = torch.full((4,), i / 48)
        return x, x.sum()

def collate(samples):
    x, y = (torch.stack(part) for part in zip(*samples))
    return {form}

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Rows(), batch_size=6, shuffle=True, collate_fn=collate)
for epoch in range(2):
    for batch in loader:
        x, y = torch.as_tensor({x}), torch.as_tensor({y})
        optimizer.zero_grad()
        (model(x).squeeze(1) - y).pow(2).mean().backward()
        optimizer.step()
"""
FORMS = {
    "a dataclass": ("Batch(x, y, ['a'] * 6)", "batch.x", "batch.y"),
    "a mapping": ("Encoding(x=x, y=y)", "batch['x']", "batch['y']"),
    "an object": ("Graph(x, y)", "batch.x", "batch.y"),
    "arrays": ("(x.numpy(), y.numpy())", "batch[0]", "batch[1]"),
}


@pytest.mark.parametrize("form", FORMS)
def test_samples_are_compared_whatever_a_batch_is_made_of(check: Check, form: str) -> None:
    made, x, y = FORMS[form]
    script = OBJECTS.replace("{form}", made).replace("{x}", x).replace("{y}", y)
    found = check(script, {"drops_a_batch": True})
    assert found.first is not None
    assert (found.first.what, found.first.place) == DEFECTS["drops_a_batch"], said(found)


def test_a_script_that_does_not_repeat_itself_is_not_blamed_on_the_plan(check: Check) -> None:
    script = training(prelude="torch.manual_seed(int.from_bytes(open('/dev/urandom', 'rb').read(4), 'big'))")
    found = check(script, {"leaves_alone": True})
    assert found.ok is None
    assert found.repeatable is False
    assert "does not repeat itself" in found.runs[0].note


def test_a_training_without_an_optimizer_is_compared_at_each_backward(check: Check) -> None:
    script = """
        import os
        import torch
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        for step in range(8):
            loss = model(torch.randn(8, 4)).pow(2).mean()
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        # as TensorBoard names its files: a short process id is in it
        open(f"events.{os.getpid() % 997}.0", "w").close()
    """
    found = check(script, {"leaves_alone": True})
    assert found.runs[0].counts["step"] == 8
    assert found.ok, said(found)
    changed = script.replace("0.1 * parameter.grad", "0.11 * parameter.grad")
    found = check(script, {"leaves_alone": True}, under_plan=changed)
    assert found.ok is False
    assert found.first is not None
    assert found.first.place == "optimizer step 2", said(found)


def test_a_script_that_ends_by_os_exit_is_compared_to_its_end(check: Check) -> None:
    ends = training() + "\nimport os\nos._exit(0)\n"
    assert check(ends, {"leaves_alone": True}).ok
    found = check(ends, {"scales_a_gradient": True})
    assert found.culprits == ("scales_a_gradient",), said(found)


def test_workers_hand_over_batches_below_a_temporary_folder_with_a_long_name(check: Check) -> None:
    script = training().replace("shuffle=True", "shuffle=True, num_workers=1")
    assert "num_workers=1" in script
    found = check(script, {"leaves_alone": True}, below="long" * 20)
    assert found.ok, said(found)


def test_a_graph_that_outlives_another_optimizers_step_is_left_whole(check: Check) -> None:
    """A GAN: the generator's graph is made before the discriminator steps, and differentiated behind it."""
    script = """
        import torch
        from torch import nn
        torch.manual_seed(0)
        makes, judges = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 8)), nn.Linear(8, 1)
        optimizers = [torch.optim.Adam(model.parameters()) for model in (judges, makes)]
        for _ in range(4):
            made = makes(torch.randn(8, 4))
            for optimizer, loss in zip(optimizers, (lambda: judges(made.detach()), lambda: -judges(made))):
                optimizer.zero_grad()
                loss().mean().backward()
                optimizer.step()
    """
    found = check(script, {"fused_optimizer": True})
    assert found.ok, said(found)
    assert found.runs[-1].level == "rounding"


def test_a_resume_that_loses_a_state_is_found(check: Check) -> None:
    script = training(optimizer="sgd")
    forgets = script.replace("one.load_state_dict(state)", "pass")
    found = check(script, {"leaves_alone": True}, resume=("--resume",), under_plan=forgets)
    assert all(run.ok for run in found.runs)
    assert [run.ok for _, run in found.resumed] == [False, True]
    assert found.ok is False


def test_a_script_that_reads_nothing_back_cannot_be_resumed(check: Check) -> None:
    with pytest.raises(HastenError, match="read none of the files it had saved"):
        check(training(), {"leaves_alone": True}, resume=())


def test_no_training_and_a_failing_script_are_said(check: Check) -> None:
    with pytest.raises(HastenError, match="no training was found"):
        check("import torch; torch.ones(2)", {"leaves_alone": True})
    with pytest.raises(HastenError, match=r"fails without any plan.*planted"):
        check("import torch\nraise RuntimeError('planted')", {"leaves_alone": True})
    with pytest.raises(HastenError, match="native code or a subprocess writes outside the scratch folder is refused"):
        check("import torch\nopen('/nowhere/table.h5')", {"leaves_alone": True})


def test_what_is_lost_on_resume_is_blamed_on_its_technique(check: Check) -> None:
    plan = {"leaves_alone": True, "loads_other_options": True, "batched_fetch": True}
    found = check(training(), plan, resume=("--resume",))
    assert found.ok is False
    assert all(run.ok for run in found.runs)
    assert found.culprits == ("loads_other_options",)
