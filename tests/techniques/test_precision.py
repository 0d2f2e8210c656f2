"""Mixed precision: float32 outside, 16 bits inside."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from hasten.evidence import Evidence
from hasten.techniques import CATALOGUE, Choices, Refusal
from hasten.techniques.compute.precision import Precision
from tests.techniques.conftest import CPU, FLAGS, GPU, MODEL, OLD_CPU, Train, close, evidence_of, identical
from tests.techniques.whole_steps import Driven, batches

TRAINING = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        def forward(self, x):
            hidden = self.first(x)
            inside.append(str(hidden.dtype))
            return {"out": self.last(hidden.relu()), "hidden": [hidden], "count": 3}
    inside, dtypes, losses, norms = [], set(), [], []
    model = Net()
    optimizer = torch.optim.OPTIMIZER
    xs, ys = torch.randn(12, 8, 16), torch.randint(0, 4, (12, 8))
    for x, y in zip(xs, ys):
        output = model(x)
        dtypes |= {str(output["out"].dtype), str(output["hidden"][0].dtype)}
        loss = nn.functional.cross_entropy(output["out"], y)
        optimizer.zero_grad(); loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        losses.append(loss.item())
    torch.save({"losses": losses, "norms": norms, "inside": set(inside), "dtypes": dtypes, "model": model.state_dict(),
                "kinds": {str(p.dtype) for p in model.parameters()}}, "left.pt")
"""
SGD = TRAINING.replace("OPTIMIZER", "SGD(model.parameters(), lr=0.1, momentum=0.9)")


@pytest.mark.parametrize(("setting", "inside"), [("bf16-mixed", "torch.bfloat16"), ("16-mixed", "torch.float16")])
def test_outputs_weights_and_gradients_are_float32_and_close(train: Train, setting: str, inside: str) -> None:
    plain, changed = train(SGD), train(SGD, precision=setting)
    assert changed.code == 0, changed.err
    assert (plain.left["inside"], changed.left["inside"]) == ({"torch.float32"}, {inside})
    assert changed.left["dtypes"] == changed.left["kinds"] == {"torch.float32"}
    assert not identical(plain.left["losses"], changed.left["losses"])
    assert close(plain.left["losses"], changed.left["losses"], 0.02)
    assert close(plain.left["norms"], changed.left["norms"], 0.05)  # clipping sees gradients of their true size
    assert close(plain.left["model"], changed.left["model"], 0.02)
    assert changed.installed == {"precision": "model"}


DRAWING = """
    import threading
    import torch
    from torch import nn

    torch.manual_seed(0)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 65), nn.Linear(65, 1)
        def forward(self, x):
            hidden = self.first(x)
            kinds.add(hidden.dtype)
            if others:
                go_on.set()
                others.pop().join()
                kinds.add((self.first(x)).dtype)
            mean, wide = hidden.detach() * 0, torch.ones_like(hidden)
            drawn.extend(one.float() for one in [
                torch.randn_like(hidden), torch.rand_like(hidden), torch.empty_like(hidden).normal_(1.0, 2.0),
                torch.empty_like(hidden).uniform_(-1, 1), torch.empty_like(hidden).exponential_(),
                torch.empty_like(hidden).bernoulli_(0.3), torch.distributions.Normal(mean, wide).rsample(),
                torch.randn(65, dtype=hidden.dtype), torch.randn_like(hidden, dtype=torch.float32),
                torch.bernoulli(wide * 0.5), nn.functional.dropout(wide), nn.functional.gumbel_softmax(mean),
            ])
            states.append(torch.get_rng_state())
            squashed = torch.distributions.TransformedDistribution(
                torch.distributions.Independent(torch.distributions.Normal(hidden, wide), 1),
                [torch.distributions.TanhTransform()],
            )
            return self.last(hidden), squashed, torch.distributions.Categorical(logits=hidden)
    model, drawn, states, kinds, others = Net(), [], [], set(), []
    output, squashed, choice = model(torch.randn(7, 8))
    actions = squashed.rsample(), choice.sample()  # what a policy gives draws behind the forward
    drawn.extend([actions[0], choice.entropy(), choice.probs])
    states.append(torch.get_rng_state())
    (output.sum() + choice.log_prob(actions[1]).sum() + actions[0].sum()).backward()
    given = {output.dtype, actions[0].dtype, choice.logits.dtype, choice.probs.dtype}
    class Other(nn.Linear):  # a forward in another thread, which begins before the model's and ends within it
        def forward(self, x):
            begun.set()
            go_on.wait(60)
            return super().forward(x)
    begun, go_on = threading.Event(), threading.Event()
    others.append(threading.Thread(target=Other(8, 8), args=[torch.ones(1, 8)]))
    others[0].start()
    begun.wait(60)
    model(torch.ones(7, 8))[0].sum().backward()
    torch.save({"drawn": drawn, "states": states, "kinds": kinds, "given": given}, "left.pt")
"""


def test_random_numbers_are_those_of_float32(train: Train) -> None:
    plain, changed = train(DRAWING), train(DRAWING, precision="bf16-mixed")
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert changed.left["kinds"] == {torch.bfloat16}
    assert changed.installed == {"precision": "2 x model"}
    assert changed.left["given"] == {torch.float32}
    assert identical(plain.left["states"], changed.left["states"])
    for one, other in zip(plain.left["drawn"], changed.left["drawn"], strict=True):
        assert close(one, other, 0.01)


KEPT = """
    import dataclasses
    import torch
    from torch import nn

    class Named(list):
        def __init__(self, name): self.name = name
    @dataclasses.dataclass
    class Node:
        value: object
        parent: object = None
    torch.manual_seed(0)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.cache, self.all, self.node = nn.Linear(8, 8), {}, Named("all"), Node(None)
            self.node.parent = Node([self.node])
        def forward(self, batch):
            hidden = self.layer(batch["x"] + self.cache.get("last", 0))
            self.cache["last"] = hidden.detach()
            self.all.append(hidden)
            self.node.value = batch["y"] = hidden
            return self.cache, self.all, self.node, batch
    net, batch, same, kinds, last = Net(), {"x": torch.randn(2, 8)}, [], set(), []
    for _ in range(3):
        cache, all_, node, back = net(batch)
        same.append([cache is net.cache, all_ is net.all, node is net.node, back is batch])
        same[-1].append(node.parent.value[0] is node)
        kinds |= {one.dtype for one in (net.cache["last"], *net.all, net.node.value, batch["y"])}
        cache["last"] = cache["last"] * 0.5  # the script's change is there in the next forward
        last.append(cache["last"].mean().item())
    torch.save({"same": same, "kinds": kinds, "last": last}, "left.pt")
"""


def test_what_a_model_keeps_and_returns_is_the_same_object(train: Train) -> None:
    plain, changed = train(KEPT), train(KEPT, precision="bf16-mixed")
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert plain.left["same"] == changed.left["same"] == [[True] * 5] * 3
    assert changed.left["kinds"] == {torch.float32}
    assert changed.installed == {"precision": "model"}
    assert not identical(plain.left["last"], changed.left["last"])
    assert close(plain.left["last"], changed.left["last"], 0.01)


ROUTED = """
    import torch
    from torch import nn

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
        def forward(self, x, wrong=False):
            out, chosen = torch.zeros_like(x), x[:, 0] > 0
            if wrong:
                raise RuntimeError("CUDA out of memory")
            out[chosen] = self.layer(x[chosen])
            return out
    torch.manual_seed(0)
    model, ended, kinds = Routed(), [], []
    for step in range(4):
        try:  # as scripts pass over batches for which there is no memory
            kinds.append(model(torch.randn(9, 4), wrong=step == 0).dtype)
        except RuntimeError as error:
            ended.append((step, str(getattr(error, "__notes__", ""))))
    torch.save({"ended": ended, "kinds": kinds}, "left.pt")
"""


@pytest.mark.parametrize("setting", ["bf16-mixed", "16-mixed"])
def test_a_forward_that_cannot_take_16_bits_ends_once_and_not_again(train: Train, setting: str) -> None:
    changed = train(ROUTED, precision=setting)
    assert changed.code == 0, changed.err
    (_, memory), (step, note) = changed.left["ended"]  # and no third one
    assert (memory, step) == ("", 1)
    assert "Take precision out of the plan" in note
    assert changed.left["kinds"] == [torch.float32] * 2
    assert "precision does not act from here on: a forward ended in an error" in changed.err


@pytest.mark.parametrize("setting", ["bf16-mixed", "16-mixed"])
def test_a_script_under_autocast_is_left_as_it_is(train: Train, setting: str) -> None:
    script = SGD.replace("output = model(x)", "with torch.autocast('cpu', torch.bfloat16): output = model(x)").replace(
        "cross_entropy(output[\"out\"], y)", "cross_entropy(output[\"out\"].float(), y)"
    )  # fmt: skip
    plain, changed = train(script), train(script, precision=setting)
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert plain.left["dtypes"] == {"torch.bfloat16"}
    assert identical(plain.left, changed.left)
    assert "under autocast itself" in changed.installed["precision"]


IN_A_DATASET = """
    import torch
    from torch import nn
    import hasten.data
    from torch.utils.data import DataLoader, Dataset, IterableDataset

    torch.manual_seed(0)
    class Blurred(Dataset):
        def __init__(self):
            self.blur, self.images = nn.Conv2d(3, 3, 5, groups=3), torch.randn(24, 1, 3, 12, 12)
        def __len__(self): return 24
        def __getitem__(self, index):
            with torch.no_grad(): return self.blur(self.images[index])[0]
    class Streamed(IterableDataset):
        def __init__(self, data): self.data = data
        def __iter__(self): return iter([self.data[index] for index in range(24)])
    class Collate(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Conv2d(3, 3, 1)
        @torch.no_grad()
        def forward(self, samples): return self.mix(torch.stack(samples))
    data, inside = Blurred(), set()
    class Net(nn.Sequential):
        def forward(self, x):
            x = self[0](x)
            inside.add(str(x.dtype))
            return self[2](self[1](x))
    model = Net(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 1))
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=1e-3), []
    for loader in (
        DataLoader(data, 8),
        DataLoader(data, 8, num_workers=1, multiprocessing_context="fork"),
        DataLoader(Streamed(data), 8, collate_fn=Collate()),
        hasten.data.DataLoader(data, 8, num_workers=1, workers="thread"),
    ):
        for images in loader:
            seen.append(images)
            optimizer.zero_grad(); model(images).mean().backward(); optimizer.step()
    torch.save({"seen": seen, "inside": inside}, "left.pt")
"""


def test_a_module_of_the_dataset_makes_the_samples_of_float32(train: Train) -> None:
    plain, changed = train(IN_A_DATASET), train(IN_A_DATASET, precision="bf16-mixed", listen=False)
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert (plain.left["inside"], changed.left["inside"]) == ({"torch.float32"}, {"torch.bfloat16"})
    assert identical(plain.left["seen"], changed.left["seen"])


def test_accumulated_gradients_are_those_of_the_whole_batch(train: Train) -> None:
    script = SGD.replace(
        "optimizer.zero_grad(); loss.backward()", "(loss / 3).backward(); scaled = model.first.weight.grad"
    ).replace("optimizer.step()", "len(losses) % 3 == 2 and (optimizer.step(), optimizer.zero_grad())")
    plain, changed = train(script), train(script, precision="16-mixed")
    assert plain.code == changed.code == 0, changed.err
    assert close(plain.left["losses"], changed.left["losses"], 0.02)
    assert close(plain.left["norms"], changed.left["norms"], 0.05)


def test_a_whole_step_under_autocast_is_a_plain_loop_under_autocast_bit_by_bit() -> None:
    driven, plain = Driven(precision="bf16-mixed").fit(batches()), Driven()
    for number, batch in enumerate(batches()):
        with torch.autocast("cpu", torch.bfloat16):
            loss = plain.module.training_step(batch, number)["loss"]
        (loss / 2).backward()
        plain.losses.append(loss.item())
        if number % 2:
            nn.utils.clip_grad_norm_(plain.module.parameters(), 0.1)
            for optimizer, schedule in zip(plain.optimizers, plain.schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
    assert driven.module.seen["output"] is torch.bfloat16
    assert identical(driven.left(), plain.left())


def on_gpu(**changes: Any) -> Evidence:
    model = dataclasses.replace(MODEL, device="cuda")
    return evidence_of(machine=GPU, models=(model,), flags=dataclasses.replace(FLAGS, **changes))


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        (evidence_of(), ("bf16-mixed",)),
        (evidence_of(machine=OLD_CPU), "no instructions"),
        (on_gpu(bf16=True), ("bf16-mixed",)),
        (on_gpu(bf16=False), ("16-mixed",)),
        (on_gpu(grad_scaler=True), "scales its gradients itself"),
        (evidence_of(models=(dataclasses.replace(MODEL, autocast="bfloat16"),)), "under autocast (bfloat16)"),
        (evidence_of(models=(dataclasses.replace(MODEL, dtype="float64"),)), "in float64"),
        (evidence_of(models=(dataclasses.replace(MODEL, layers={"Embedding": 2}),)), "no layer"),
        (evidence_of(models=(dataclasses.replace(MODEL, train_calls=0),)), "no module's forward"),
        (evidence_of(models=()), "no module's forward"),
    ],
)
def test_worth_trying(evidence: Evidence, expected: Any) -> None:
    answer = Precision.settings(evidence)
    if isinstance(expected, str):
        assert isinstance(answer, Refusal)
        assert expected in answer.reason
    else:
        assert isinstance(answer, Choices)
        assert answer.settings == expected


def test_useless_without_the_instructions() -> None:
    precision = CATALOGUE["precision"]
    assert precision.useless("bf16-mixed", CPU) == ""
    assert precision.useless("16-mixed", GPU) == ""
    assert precision.useless("bf16-true", CPU) == ""
    assert "slower" in precision.useless("64-true", GPU)
    assert "slower" in precision.useless("16-true", CPU)
    assert "slower" in precision.useless("16-mixed", CPU)
    assert "slower" in precision.useless("bf16-mixed", OLD_CPU)
