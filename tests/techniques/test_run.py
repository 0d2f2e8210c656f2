"""The Run: a technique that fails is skipped and named, and the training goes on as if it were not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hasten.cli.findings import findings_page
from hasten.cli.techniques import catalogue_page
from hasten.run import Run
from hasten.techniques import CATALOGUE, Effect, Resource, Technique, build, overrides, toml_value
from tests.techniques.conftest import Train, close

PLACES = (
    "process",
    "loader_options",
    "fetcher",
    "batches",
    "model",
    "forward",
    "backward",
    "optimizer",
)


class Broken(Technique):
    """Fails wherever it acts, after it has spoilt what it was given."""

    name = "broken"
    effect = Effect.EXACT
    relieves = Resource.DATA
    acts_on = "a thing"

    def process(self) -> None:
        raise RuntimeError("process")

    def loader_options(self, options: dict[str, Any]) -> None:
        options.clear()
        raise RuntimeError("loader_options")

    def fetcher(self, fetcher: Any) -> Any:
        raise RuntimeError("fetcher")

    def batches(self, fetch: Any, iterator: Any) -> Any:
        raise RuntimeError("batches")

    def model(self, model: Any, args: Any) -> None:
        raise RuntimeError("model")

    def forward(self, call: Any) -> Any:
        raise RuntimeError("forward\nwith more lines")

    def backward(self, call: Any) -> Any:
        raise RuntimeError("backward")

    def optimizer(self, optimizer: Any) -> None:
        raise RuntimeError("optimizer")


class Works(Broken):
    """Does something in every place."""

    name = "works"

    def process(self) -> None:
        self.did("process")

    def loader_options(self, options: dict[str, Any]) -> None:
        options["num_workers"] += 1

    def fetcher(self, fetcher: Any) -> Any:
        return ("fetcher", fetcher)

    def batches(self, fetch: Any, iterator: Any) -> Any:
        return lambda: ("batch", fetch())

    def model(self, model: Any, args: Any) -> None:
        self.did("model")

    def forward(self, call: Any) -> Any:
        return lambda *args: ("forward", call(*args))

    def backward(self, call: Any) -> Any:
        return lambda *args: ("backward", call(*args))

    def optimizer(self, optimizer: Any) -> None:
        self.did("optimizer")


@pytest.mark.parametrize("order", [("works", "broken"), ("broken", "works")])
def test_a_broken_technique_is_named_and_the_others_act(order: tuple[str, ...]) -> None:
    catalogue: dict[str, type[Technique]] = {"works": Works, "broken": Broken}
    run = Run(build(dict.fromkeys(order, True), catalogue))
    model = nn.Linear(1, 1)
    options = {"num_workers": 1}
    for _ in range(2):
        run.process()
        assert run.loader_options(options) == {"num_workers": 2}
        assert run.fetcher("f") == ("fetcher", "f")
        assert run.batches(lambda: 1, None)() == ("batch", 1)
        run.model(model, ())
        assert run.wrap("forward", lambda x: x)(3) == ("forward", 3)
        assert run.wrap("backward", lambda x: x)(4) == ("backward", 4)
        run.optimizer("o")
    assert options == {"num_workers": 1}
    assert sorted(run.skipped) == sorted(f"broken: RuntimeError: {place}" for place in PLACES)  # each said once
    assert run.installed() == {"works": "2 x process, model, 2 x optimizer"}
    assert run.idle() == ["broken found no thing to act on"]


def test_each_model_is_changed_once() -> None:
    run = Run(build({"works": True}, {"works": Works}))
    models = [nn.Linear(1, 1), nn.Linear(1, 1)]
    for model in (*models, *models):
        run.model(model, ())
    assert run.installed() == {"works": "2 x model"}


def test_a_technique_that_is_off_costs_nothing() -> None:
    run = Run(build({"cudnn_benchmark": True, "precision": False}, CATALOGUE))
    assert [technique.name for technique in run.techniques_at("process")] == ["cudnn_benchmark"]
    for place in PLACES[1:]:
        assert run.techniques_at(place) == []

    def call() -> None: ...

    assert run.wrap("forward", call) is call


def test_all_together_with_nobody_listening(train: Train) -> None:
    script = """
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, Dataset, TensorDataset

        class Images(Dataset):
            def __len__(self): return 12
            def __getitem__(self, index): return torch.full((3, 6, 6), index / 12), index % 2

        torch.manual_seed(0)
        torch.autograd.set_detect_anomaly(True)
        wide = [nn.Linear(64, 17000), nn.Linear(17000, 2)]  # gradients that are worth dropping
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), *wide)
        optimizer = torch.optim.Adam(model.parameters(), 0.0001)
        losses = []
        tensors = TensorDataset(torch.rand(8, 3, 6, 6), torch.randint(0, 2, (8,)))
        loaders = [DataLoader(Images(), 4, shuffle=True), DataLoader(tensors, 4)]
        for epoch in range(2):
            for loader in loaders:
                model.train()
                for x, y in loader:
                    loss = nn.functional.cross_entropy(model(x), y)
                    optimizer.zero_grad(set_to_none=False); loss.backward(); optimizer.step()
                    losses.append(loss.item())
                model.eval()
                losses += [nn.functional.cross_entropy(model(x), y).item() for x, y in loader]
        torch.save({"losses": losses, "model": model.state_dict()}, "left.pt")
    """
    plan: dict[str, Any] = {
        "sample_cache": "samples",
        "batched_fetch": True,
        "loader_workers": 1,
        "debug_off": True,
        "no_grad_validation": True,
        "cudnn_benchmark": True,
        "matmul_precision": "medium",
        "fused_optimizer": True,
        "set_to_none": True,
        "precision": "bf16-mixed",
        "channels_last": True,
    }
    plain, changed = train(script), train(script, False, **plan)
    assert plain.code == changed.code == 0, changed.err
    assert changed.err == ""  # nothing was skipped, and everything found something to act on
    assert changed.evidence is None
    # The orders of later epochs are others (loader_workers is `sampling`); the first loader's first epoch is not.
    assert close(plain.left["losses"][:3], changed.left["losses"][:3], 0.05)
    assert max(changed.left["losses"]) < 5


def test_every_technique_says_what_it_is() -> None:
    acting = {*PLACES, "environment", "loader"}
    for name, kind in CATALOGUE.items():
        assert kind.name == name
        assert isinstance(kind.effect, Effect)
        assert isinstance(kind.relieves, Resource)
        assert kind.sources
        assert kind.__doc__
        assert kind.settings.__func__ is not Technique.settings.__func__
        values = kind.values if isinstance(kind.values, tuple) else (2,)
        assert any(overrides(kind(values[0]), place) for place in acting)


def test_the_page_of_findings_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "findings.md"
    assert page.read_text() == findings_page(), "it is out of date: hasten findings --markdown > docs/findings.md"


def test_the_catalogue_page_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "catalogue.md"
    assert page.read_text() == catalogue_page(), "it is out of date: hasten techniques --markdown > docs/catalogue.md"


def test_settings_are_shown_as_they_stand_in_a_plan() -> None:
    shown = [toml_value(value) for value in (True, 2, "x", {"num_workers": 2, "persistent_workers": False})]
    assert shown == ["true", "2", '"x"', "{num_workers = 2, persistent_workers = false}"]
