"""Every rule: code in which it finds what was planted, on that line; code in which it stays silent."""

# ruff: noqa: E501 -- rows of a table
from __future__ import annotations

from pathlib import Path

import pytest

from hasten.doctor.findings import IN_CODE
from hasten.evidence import HowKnown, Severity
from tests.doctor.lint.scripts import found, script, training

# Rule, code; the planted line ends in `# HERE`.
PLANTED = [
    ("host_sync", training("value = loss.item()  # HERE")),
    ("host_sync", training("value = float(loss)  # HERE")),
    ("host_sync", training("value = out.detach().cpu().numpy()  # HERE")),
    ("host_sync", training("values = out.argmax(1).tolist()  # HERE")),
    ("host_sync", training("print(loss)  # HERE")),
    ("host_sync", training("print(f'{i}: {loss:.3f}')  # HERE")),
    ("host_sync", training("print('%d %f' % (i, loss))  # HERE")),
    ("host_sync", training("print('{}'.format(loss))  # HERE")),
    ("host_sync", training("if loss > 10:  # HERE\n    x = 1")),
    ("host_sync", training("if torch.isnan(loss):  # HERE\n    break")),
    ("host_sync", training("assert not torch.isnan(loss)  # HERE")),
    ("host_sync", training("bad = math.isnan(loss)  # HERE")),
    ("host_sync", training("correct = (out.argmax(1) == y).sum().item()  # HERE")),
    ("host_sync", training("p = out.softmax(1)\nq = p.max()\nr = q.item()  # HERE")),
    ("host_sync", training("if i % 10:\n    a = 1\nelse:\n    a = loss.item()  # HERE")),
    ("host_sync", training("if '%s' % mode == 'full':\n    a = loss.item()  # HERE")),
    (
        "host_sync",
        training("print(loss)  # HERE").replace('torch.device("cuda")', 'f"cuda:{rank}"').replace("device", "place"),
    ),
    ("host_sync", training("match mode:\n    case 'full':\n        a = loss.item()  # HERE")),
    ("retained_graph", training("losses.append(loss)  # HERE", before="losses = []")),
    ("retained_graph", training("total += loss  # HERE", before="total = 0")),
    ("retained_graph", training("total = total + loss  # HERE", before="total = 0")),
    ("retained_graph", training("total += loss * x.size(0)  # HERE", before="total = 0")),
    ("retained_graph", training("log['loss'].append(loss)  # HERE", before="log = {'loss': []}")),
    ("synchronize_in_loop", training("torch.cuda.synchronize()  # HERE")),
    ("cache_emptied", training("torch.cuda.empty_cache()  # HERE")),
    ("garbage_collected", training("gc.collect()  # HERE")),
    ("moved_from_cpu", training("z = torch.zeros(3).to(device)  # HERE")),
    ("moved_from_cpu", training("z = torch.randn(3).cuda()  # HERE")),
    ("tensor_copy", training("z = torch.tensor(x)  # HERE")),
    ("tensor_copy", training("a = np.zeros(3)\nz = torch.tensor(a)  # HERE")),
    ("debug_tools_on", training("", before="torch.autograd.set_detect_anomaly(True)  # HERE")),
    ("debug_tools_on", training("p = torch.autograd.profiler.profile(enabled=True)  # HERE")),
    ("data_parallel", script("model = nn.DataParallel(model)  # HERE")),
    ("zeroed_gradients", training("optimizer.zero_grad(set_to_none=False)  # HERE")),
    ("per_tensor_optimizer", script("o = torch.optim.AdamW(model.parameters(), foreach=False)  # HERE")),
    ("adam_with_l2", script("o = torch.optim.Adam(model.parameters(), weight_decay=1e-4)  # HERE")),
    ("unsafe_load", script("state = torch.load('a.pt', weights_only=False)  # HERE")),
    ("unused_parameters", script("m = DDP(model, find_unused_parameters=True)  # HERE")),
    (
        "accumulation_syncs",
        "m = 1\n" + training("if (i + 1) % 4 == 0:\n    optimizer.step()  # HERE", before="d = DDP(model)"),
    ),
    (
        "workers_zero",
        training("", loader="train_loader") + "train_loader = DataLoader(Files(), 4, shuffle=True)  # HERE\n",
    ),
    (
        "workers_zero",
        script("a, b = torch.utils.data.random_split(Files(), [1, 2])\ntrain_loader = DataLoader(a)  # HERE"),
    ),
    ("workers_zero", training("", loader="data") + "data = DataLoader(Files(), 4, num_workers=0)  # HERE\n"),
    (
        "workers_recreated",
        script("train_loader = DataLoader(Files(), num_workers=4)  # HERE") + training("", loader="train_loader"),
    ),
    (
        "pageable_memory",
        script("train_loader = DataLoader(Files(), num_workers=4)  # HERE") + training("", loader="train_loader"),
    ),
    (
        "blocking_copy",
        script(
            "train_loader = DataLoader(Files(), pin_memory=True)\nfor a, b in train_loader:\n    a = a.to(device)  # HERE"
        ),
    ),
    ("bias_before_norm", script("n = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))  # HERE")),
    (
        "bias_before_norm",
        script(
            """
            class Net(nn.Module):
                def __init__(self):
                    self.conv1 = nn.Conv2d(3, 4, 3)  # HERE
                    self.bn1 = nn.BatchNorm2d(4)
                def forward(self, x):
                    return F.relu(self.bn1(self.conv1(x)))
            """
        ),
    ),
    (
        "bias_before_norm",
        script(
            """
            class Net(nn.Module):
                def __init__(self):
                    self.fc = nn.Linear(3, 4)  # HERE
                    self.bn = nn.BatchNorm1d(4)
                def forward(self, x):
                    x = self.fc(x)
                    x = F.relu(self.bn(x))
                    return x
            """
        ),
    ),
    (
        "validation_graphs",
        script("def validate(model, loader):\n    model.eval()\n    for x, y in loader:  # HERE\n        model(x)\n"),
    ),
    ("validation_graphs", training("", after="model.eval()\nfor x, y in val_loader:  # HERE\n    total = model(x)")),
    (
        "attention_by_hand",
        script(
            """
            def attend(q, k, v, mask):
                att = (q @ k.transpose(-2, -1)) * 0.1
                att = att.masked_fill(mask, float("-inf"))
                att = F.softmax(att, dim=-1)  # HERE
                return att @ v
            """
        ),
    ),
    (
        "no_gradient_clipping",
        training("", before="rnn = nn.LSTM(2, 3)").replace("loss.backward()", "loss.backward()  # HERE"),
    ),
    (
        "constant_rate",
        training("")
        .replace("scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)\n", "")
        .replace("lr=0.1)", "lr=0.1)  # HERE"),
    ),
    (
        "host_sync",  # the loop calls a function that goes backward
        script(
            """
            def one(x, y):
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss.item()  # HERE

            for x, y in loader:
                one(x, y)
                optimizer.step()
            """
        ),
    ),
    (
        "host_sync",
        script(
            """
            class Lit(nn.Module):
                def training_step(self, batch, batch_idx):
                    loss = self.model(batch).mean()
                    self.log("loss", loss.item())  # HERE
                    return loss
            """
        ),
    ),
    (
        "retained_graph",
        script(
            """
            class Lit(nn.Module):
                def training_step(self, batch, batch_idx):
                    loss = self.model(batch).mean()
                    self.losses.append(loss)  # HERE
                    return loss
            """
        ),
    ),
    (
        "retained_graph",
        training("").replace("loss.backward()", "loss.backward(retain_graph=True)  # HERE"),
    ),
]

# Rule, code in which it must be silent.
SILENT = [
    ("host_sync", training("if i % 10 == 0:\n    print(loss.item())")),
    ("host_sync", training("if i % 10:\n    continue\nprint(loss.item())")),
    ("host_sync", training("last = i == 99\nif last:\n    print(loss.item())")),
    ("host_sync", training("", after="print(loss.item())")),
    ("host_sync", training("n = x.size(0)\nm = float(n)\nprint(n, x.shape, len(x))")),
    ("host_sync", training("lr = scheduler.get_last_lr()[0]\nprint(lr, float(lr))")),
    ("host_sync", training("if x is None:\n    pass")),
    (
        "host_sync",
        training("print(loss.item())")
        .replace('torch.device("cuda")', "0")
        .replace(".to(device)", "")
        .replace("device = 0", ""),
    ),
    ("host_sync", script("for x, y in loader:\n    out = model(x)\n    print(out.sum().item())")),
    ("host_sync", training("if args.debug:\n    print(loss)")),
    ("host_sync", training("try:\n    pass\nexcept ValueError:\n    print(loss)")),
    ("host_sync", training("with open('a.txt', 'w') as out:\n    print(out)")),
    ("retained_graph", training("losses.append(loss.detach())\nlosses.append(loss.item())", before="losses = []")),
    ("retained_graph", training("total = 0\ntotal += loss")),
    ("retained_graph", training("total += i", before="total = 0")),
    ("retained_graph", training("n, total = 0, 0\ntotal += loss")),
    ("retained_graph", training("correct += (out.argmax(1) == y).sum()", before="correct = 0")),
    ("retained_graph", training("_, best = out.max(1)\nhits += best.sum()", before="hits = 0")),
    ("retained_graph", training("with torch.no_grad():\n    total += F.mse_loss(out, out)", before="total = 0")),
    (
        "retained_graph",  # it goes backward in the end
        script(
            """
            for x in loader:
                terms = []
                loss = 0
                for part in x:
                    terms.append(model(part).sum())
                    loss += model(part).mean()
                (loss + torch.stack(terms).sum()).backward()
                optimizer.step()
            """
        ),
    ),
    (
        "retained_graph",
        training("l2 = model(x).sum()\nl2.backward()").replace("loss.backward()", "loss.backward(retain_graph=True)"),
    ),
    ("synchronize_in_loop", training("if i % 100 == 0:\n    torch.cuda.synchronize()")),
    ("cache_emptied", training("", after="torch.cuda.empty_cache()")),
    ("garbage_collected", script("gc.collect()") + training("")),
    ("moved_from_cpu", script("z = torch.zeros(3).to(device)")),
    ("moved_from_cpu", training("z = torch.zeros(3, device=device)\nw = torch.zeros(3).to(torch.float16)")),
    ("tensor_copy", training("z = torch.tensor(3.0)\nw = torch.tensor([1, 2])")),
    ("tensor_copy", script("a = np.zeros(3)\nz = torch.tensor(a)")),
    ("debug_tools_on", training("", before="if args.anomaly:\n    torch.autograd.set_detect_anomaly(True)")),
    ("debug_tools_on", training("", before="torch.autograd.set_detect_anomaly(False)")),
    ("debug_tools_on", training("p = torch.autograd.profiler.profile(args.profile)")),
    ("data_parallel", script("if isinstance(model, nn.DataParallel):\n    model = model.module")),
    ("zeroed_gradients", training("optimizer.zero_grad(set_to_none=True)\noptimizer.zero_grad()")),
    ("zeroed_gradients", training("optimizer.zero_grad(set_to_none=False)\nnorm = model.weight.grad.norm()")),
    ("per_tensor_optimizer", script("o = torch.optim.AdamW(model.parameters())")),
    (
        "adam_with_l2",
        script("o = torch.optim.Adam(model.parameters())\np = torch.optim.AdamW([model.weight], weight_decay=1)"),
    ),
    ("unsafe_load", script("state = torch.load('a.pt')")),
    ("unused_parameters", script("m = DDP(model)")),
    (
        "accumulation_syncs",
        training("with d.no_sync():\n    pass\nif i % 4 == 0:\n    optimizer.step()", before="d = DDP(model)"),
    ),
    ("workers_zero", script("train_loader = DataLoader(TensorDataset(a, b), 4)") + training("", loader="train_loader")),
    ("workers_zero", script("data = TensorDataset(a, b)\ntrain_loader = DataLoader(data, 4, shuffle=True)")),
    ("workers_zero", script("train_loader = DataLoader(Files(), num_workers=4)\nval_loader = DataLoader(Files())")),
    ("workers_zero", script("train_loader = DataLoader(Files(), **options)")),
    (
        "workers_zero",
        script("a, b = torch.utils.data.random_split(TensorDataset(x), [1, 2])\ntrain_loader = DataLoader(a)"),
    ),
    ("workers_zero", script("train_loader = DataLoader(Files(), num_workers=args.workers)")),
    (
        "workers_recreated",
        script("train_loader = DataLoader(Files(), num_workers=4, persistent_workers=True)")
        + training("", loader="train_loader"),
    ),
    (
        "workers_recreated",
        script("train_loader = DataLoader(Files(), num_workers=4)\nfor x in train_loader:\n    pass"),
    ),
    (
        "pageable_memory",
        script("train_loader = DataLoader(Files(), pin_memory=True)") + training("", loader="train_loader"),
    ),
    ("blocking_copy", training("")),
    (
        "blocking_copy",
        script(
            "train_loader = DataLoader(Files(), pin_memory=True)\n"
            "for a, b in train_loader:\n    a = a.to(device, non_blocking=True)\n    b = b.to(torch.float32)"
        ),
    ),
    ("bias_before_norm", script("n = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4))")),
    ("bias_before_norm", script("n = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4))")),
    ("bias_before_norm", script("n = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4))")),
    (
        "bias_before_norm",
        script(
            """
            class Net(nn.Module):
                def __init__(self):
                    self.conv1 = nn.Conv2d(3, 4, 3)
                    self.bn1 = nn.BatchNorm2d(4)
                def forward(self, x):
                    return self.bn1(F.relu(self.conv1(x)))
            """
        ),
    ),
    (
        "validation_graphs",
        script(
            "@torch.no_grad()\ndef validate(model, loader):\n    model.eval()\n    for x, y in loader:\n        model(x)\n"
        ),
    ),
    (
        "validation_graphs",
        script(
            "def validate(model, loader):\n    for x, y in loader:\n        with torch.inference_mode():\n            model(x)\n"
        ),
    ),
    (
        "validation_graphs",  # called where gradients are off
        script(
            "def validate(model, loader):\n    for x, y in loader:\n        model(x)\n"
            "with torch.no_grad():\n    validate(model, loader)\n"
        ),
    ),
    (
        "validation_graphs",
        script("def attack_test(model, x):\n    for a in x:\n        a.requires_grad = True\n        model(a)\n"),
    ),
    ("validation_graphs", training("")),
    (
        "validation_graphs",  # what it gives goes backward
        script(
            "def infer(x):\n    for step in x:\n        x = model(x)\n    return x\n\n\nloss = infer(x).sum()\nloss.backward()"
        ),
    ),
    (
        "attention_by_hand",
        script("def attend(q, k, v):\n    att = F.softmax(q @ k.transpose(-2, -1), -1)\n    return att @ v, att\n"),
    ),
    ("attention_by_hand", script("def head(x, w):\n    return F.softmax(x @ w, -1)\n")),
    (
        "no_gradient_clipping",
        training("nn.utils.clip_grad_norm_(rnn.parameters(), 1.0)", before="rnn = nn.LSTM(2, 3)"),
    ),
    (
        "no_gradient_clipping",
        training("", before="rnn = nn.LSTM(2, 3)").replace(
            "optimizer = torch.optim.SGD", "optimizer = torch.optim.LBFGS"
        ),
    ),
    ("constant_rate", training("")),
    ("constant_rate", script("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)").replace("scheduler", "other")),
]


def test_every_rule_is_planted_and_has_a_silent_twin() -> None:
    assert {name for name, _ in PLANTED} == set(IN_CODE)
    assert {name for name, _ in SILENT} == set(IN_CODE)


@pytest.mark.parametrize(("name", "code"), PLANTED, ids=[f"{n}-{i}" for i, (n, _) in enumerate(PLANTED)])
def test_planted_is_found_on_its_line(name: str, code: str, tmp_path: Path) -> None:
    lines = [number for number, line in enumerate(code.splitlines(), 1) if line.endswith("# HERE")]
    assert len(lines) == 1
    assert [one.finding.line for one in found(tmp_path, code, name)] == lines


@pytest.mark.parametrize(("name", "code"), SILENT, ids=[f"{n}-{i}" for i, (n, _) in enumerate(SILENT)])
def test_healthy_code_is_left_in_peace(name: str, code: str, tmp_path: Path) -> None:
    assert [one.finding for one in found(tmp_path, code, name)] == []


def test_nothing_is_claimed_to_be_measured(tmp_path: Path) -> None:
    for _, code in PLANTED:
        for one in found(tmp_path, code):
            assert one.finding.how_known is HowKnown.READ
            assert one.finding.worth is None
            assert one.finding.severity in (Severity.MEDIUM, Severity.LOW, Severity.NOTE)
            assert one.finding.fix
            assert not one.finding.what.endswith(".")
            assert one.column >= 1
