"""Compiled models keep their names, their identity and, to rounding, their numbers."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor

from hasten.techniques import CATALOGUE, Choices, Refusal, build
from hasten.techniques.compute.compile import Compile, compiler
from tests.techniques.conftest import FLAGS, GPU, MODEL, Train, close, evidence_of, identical

needs_compiler = pytest.mark.skipif(not compiler(), reason="no C++ compiler")


@needs_compiler
def test_a_compiled_training(train: Train) -> None:
    script = """
        import copy, io, pickle
        import torch
        from torch import nn

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        single = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        same, losses = id(model), []
        for number in range(4):
            loss = single(model(torch.randn(4, 4))).pow(2).mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            losses.append(loss.item())
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        twin = copy.deepcopy(model)
        whole = io.BytesIO(); torch.save(model, whole); whole.seek(0)
        again = torch.load(whole, weights_only=False)
        x = torch.ones(1, 4)
        torch.save({"losses": losses, "model": model.state_dict(), "kind": type(model).__name__,
                    "twins": [torch.allclose(model(x), one(x), atol=1e-5) for one in (twin, again)],
                    "compiled": [one._compiled_call_impl is not None for one in (model, single)],
                    "graphs": graphs}, "left.pt")
    """
    plain, changed = train(script), train(script, compile="default")
    assert plain.code == changed.code == 0, changed.err
    assert list(changed.left["model"]) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert changed.left["kind"] == "Sequential"
    assert changed.left["twins"] == [True, True]
    assert (plain.left["compiled"], changed.left["compiled"]) == ([False, False], [True, False])
    assert (plain.left["graphs"], changed.left["graphs"]) == (0, 1)
    assert close(plain.left["losses"], changed.left["losses"], 1e-4)
    assert changed.installed == {"compile": "3 x model"}  # its copies are models of their own


DRAWS = """
    import numpy as np
    import torch
    from torch import nn

    torch.manual_seed(0); np.random.seed(0)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 4))
        def forward(self, x):
            noise = torch.as_tensor(np.random.rand(4), dtype=torch.float32)
            return self.body(x) + noise + 0.1 * torch.randn_like(x) * torch.rand(4)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number in range(4):
        if number == 2:  # a hook set late still runs
            model.body[0].register_forward_hook(lambda module, inputs, output: output * 2)
        loss = model(torch.randn(8, 4)).pow(2).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(loss.item())
    states = [torch.get_rng_state(), np.random.rand()]
    torch.save({"losses": losses, "random": states, "model": model.state_dict()}, "left.pt")
"""


@needs_compiler
def test_the_same_random_numbers_are_drawn_and_late_hooks_run(train: Train) -> None:
    plain, changed = train(DRAWS), train(DRAWS, compile="default")
    assert plain.code == changed.code == 0, changed.err
    assert changed.installed == {"compile": "model"}
    assert identical(plain.left["random"], changed.left["random"])
    assert close(plain.left["model"], changed.left["model"], 1e-5)


@pytest.mark.parametrize("mode", Compile.values)
def test_a_mode_keeps_what_it_means(mode: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    seen: list[dict[str, Any]] = []
    (technique,) = build({"compile": mode}, CATALOGUE)
    with (
        mock.patch("torch.compile", lambda _, **options: seen.append(options)),
        # Other tests' files in this process say create_graph.
        mock.patch("hasten.techniques.compute.compile.differentiates_again", return_value=""),
    ):
        technique.model(model, ())
    expected = {} if mode == "default" else torch._inductor.list_mode_options(mode)
    threads = torch.get_num_threads()  # as by default; a check names its training's
    assert seen == [{"options": {**expected, "fallback_random": True, "cpp.threads": threads}}]


OWN = """
    import random, types
    import torch
    from torch import nn

    torch.manual_seed(0)
    outside, config = random.Random(3), types.SimpleNamespace(rng=random.Random(3), scale=2)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.rng = nn.Sequential(nn.Linear(4, 4), nn.GELU()), None
            SETS
        def forward(self, x):
            return self.body(x) * DRAWS
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number in range(4):
        loss = model(torch.randn(8, 4)).pow(2).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(loss.item())
    torch.save({"losses": losses, "model": model.state_dict()}, "left.pt")
"""


@pytest.mark.parametrize(
    ("sets", "draws", "name"),
    [
        ("self.rng = random.Random(3)", "self.rng.random()", "rng"),
        ("pass", "outside.uniform(1, 2)", "the name outside"),
        ("pass", "config.rng.randint(1, 9) * config.scale", "the name config"),
    ],
)
def test_numbers_of_a_generator_of_pythons_own_kind_are_not_frozen(
    train: Train, sets: str, draws: str, name: str
) -> None:
    script = OWN.replace("SETS", sets).replace("DRAWS", draws)
    plain, changed = train(script), train(script, compile="default")
    assert plain.code == changed.code == 0, changed.err
    assert identical(plain.left, changed.left)
    assert f"left alone: {name} is a random.Random" in changed.installed["compile"]


def test_a_hook_on_all_modules_runs_where_they_were_compiled_before(train: Train) -> None:
    script = DRAWS.replace(
        "model.body[0].register_forward_hook(lambda module, inputs, output: output * 2)",
        "torch.nn.modules.module.register_module_forward_hook("
        "lambda module, inputs, output: output * 2 if isinstance(module, nn.GELU) else None)",
    ).replace("import torch\n", "import torch\n    COMPILE\n", 1)
    # What torch's compiler makes of a graph does not matter here, and the C++ compiler takes long.
    eager = "plain = torch.compile; torch.compile = lambda f, **_: plain(f, backend='aot_eager')"
    plain = train(script.replace("COMPILE", "pass"))
    changed = train(script.replace("COMPILE", eager), compile="default")
    assert plain.code == changed.code == 0, changed.err
    assert close(plain.left["losses"], changed.left["losses"], 1e-5)
    assert "a hook on all modules is set" in changed.err


@needs_compiler
def test_a_module_whose_step_calls_its_own_forward_is_compiled_once(train: Train) -> None:
    script = """
        import torch
        from torch import nn

        torch.manual_seed(0)
        class Stepping(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0), nn.BatchNorm1d(8), nn.Linear(8, 1))
            def forward(self, x): return self.net(x)
            def training_step(self, batch, number): return self(batch["x"]).pow(2).mean()
            def validation_step(self, batch, number): return self(batch["x"]).mean()
        module = Stepping()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        losses, compiled, names = [], set(), list(module.state_dict())
        for epoch in range(2):
            module.train()
            for number in range(3):
                loss = module.training_step({"x": torch.randn(4, 4)}, number)
                optimizer.zero_grad(); loss.backward(); optimizer.step()
                losses.append(loss.item())
                compiled.add(id(module._compiled_call_impl))
            module.eval()
            with torch.no_grad():
                losses.append(module.validation_step({"x": torch.randn(4, 4)}, 0).item())
        kept = module.state_dict()
        fresh = Stepping()
        assert list(kept) == names == list(fresh.state_dict())
        fresh.load_state_dict(kept)
        torch.save({"losses": losses, "compiled": len(compiled)}, "left.pt")
    """
    plain, changed = train(script), train(script, compile="default")
    assert plain.code == changed.code == 0, changed.err
    assert changed.left["compiled"] == 1
    assert changed.installed == {"compile": "model"}
    assert close(plain.left["losses"], changed.left["losses"], 1e-4)


@needs_compiler
@pytest.mark.parametrize("asks", ["create_graph=True", "**{'create' + '_graph': True}"])
def test_a_gradient_penalty_is_not_compiled(train: Train, asks: str) -> None:
    script = """
        import torch
        from torch import nn
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer, failed = torch.optim.SGD(model.parameters(), 0.1), 0
        for _ in range(3):
            x = torch.randn(8, 4, requires_grad=True)
            gradient, = torch.autograd.grad(model(x).sum(), x, ASKS)
            optimizer.zero_grad()
            try: ((gradient.norm(dim=1) - 1) ** 2).mean().backward()
            except RuntimeError: failed += 1
            else: optimizer.step()
        torch.save({"weights": model.state_dict(), "failed": failed}, "left.pt")
    """.replace("ASKS", asks)
    plain, changed = train(script), train(script, compile="default")
    assert changed.code == 0, changed.err
    assert "gradients are differentiated again (create_graph" in changed.err
    assert identical(plain.left, changed.left)
    if asks == "create_graph=True":
        assert "train.py:9" in changed.err


@pytest.mark.parametrize("asks", ["hessian(loss, x)", "hvp(loss, x, x)[1]", "jvp(loss, x, x)[1]"])
def test_a_hessian_of_a_later_step_is_noticed_before_its_forward(train: Train, asks: str) -> None:
    script = f"""
    import torch
    from torch import nn
    plain = torch.compile
    torch.compile = lambda f, **_: plain(f, backend="aot_eager")
    torch.manual_seed(0)
    from torch.autograd.functional import hessian, hvp, jvp
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer, gives, loss = torch.optim.SGD(model.parameters(), 0.1), [], lambda x: model(x).pow(2).sum()
    for number in range(4):
        x = torch.randn(1, 4)
        optimizer.zero_grad(); loss(x).backward(); optimizer.step()
        if number == 2: gives.append({asks})
    torch.save({{"weights": model.state_dict(), "gives": gives[0]}}, "left.pt")
    """
    plain, changed = train(script), train(script, compile="default")
    assert plain.code == changed.code == 0, changed.err
    assert close(plain.left, changed.left, 1e-5)
    assert "gradients may be differentiated again (torch.autograd.functional)" in changed.err


def test_a_model_that_cannot_be_compiled_runs_as_it_is(train: Train) -> None:
    script = """
        import torch
        from torch import nn
        def broken(graph, inputs): raise RuntimeError("no such backend today")
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        compile_it = model.compile
        model.compile = lambda **options: compile_it(backend=broken)
        torch.save({"shape": list(model(torch.ones(1, 2)).shape)}, "left.pt")
    """
    changed = train(script, compile="default")
    assert changed.code == 0, changed.err
    assert changed.left == {"shape": [1, 2]}


def test_kernels_are_kept_between_runs_unless_the_script_says_where() -> None:
    (technique,) = build({"compile": "default"}, CATALOGUE)
    env: dict[str, str] = {}
    technique.environment(env)
    assert Path(env["TORCHINDUCTOR_CACHE_DIR"]).name == f"torchinductor_hasten_{os.getuid()}"
    env = {"TORCHINDUCTOR_CACHE_DIR": "/mine"}
    technique.environment(env)
    assert env == {"TORCHINDUCTOR_CACHE_DIR": "/mine"}


@pytest.mark.parametrize(
    ("changes", "flags", "expected"),
    [
        ({}, {}, ("default",)),
        ({"device": "cuda"}, {}, ("default", "reduce-overhead")),
        ({"train_calls": 0, "backward_through_eval": True}, {}, ("default",)),
        ({"compiled": True}, {}, "compiles its model already"),
        ({"train_calls": 0}, {}, "no module's forward"),
        ({"name": "Linear", "layers": {"Linear": 1}}, {}, "single layers"),
        ({}, {"anomaly": True}, "see debug_off"),
        ({}, {"compiler": ""}, "no C++ compiler"),
    ],
)
def test_worth_trying(changes: dict[str, Any], flags: dict[str, Any], expected: Any) -> None:
    answer = Compile.settings(
        evidence_of(
            machine=GPU, models=(dataclasses.replace(MODEL, **changes),), flags=dataclasses.replace(FLAGS, **flags)
        )
    )
    if isinstance(expected, str):
        assert isinstance(answer, Refusal)
        assert expected in answer.reason
    else:
        assert isinstance(answer, Choices)
        assert answer.settings == expected


@needs_compiler
@pytest.mark.slow  # compiles C++ twice
@pytest.mark.timeout(320)
def test_a_fork_of_a_process_that_has_compiled_compiles(tmp_path: Path) -> None:
    """As a Trainer's check and `strategy="ddp_fork"` do; torch's pool of threads waited in it for ever."""
    script = tmp_path / "forks.py"
    script.write_text("""
import multiprocessing
import torch
from hasten.techniques.compute.compile import Compile


def step(width):
    technique = Compile("default")
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Softplus(), torch.nn.Linear(width, 1))
    technique.process()
    technique.model(model, ())
    technique.on()
    model(torch.randn(16, width)).sum().backward()

torch.set_num_threads(1)
step(40)
process = multiprocessing.get_context("fork").Process(target=step, args=(48,))
process.start()
process.join(150)
assert process.exitcode == 0, process.exitcode
""")
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "kernels"), "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    subprocess.run([sys.executable, str(script)], env=env, check=True, timeout=300)
