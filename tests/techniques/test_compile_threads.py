"""Models that are compiled, and called in several threads: an actor beside its learner, an evaluation."""

from __future__ import annotations

from tests.techniques.conftest import Train, close
from tests.techniques.test_compile_as_it_was import START, needs_compiler

THREADS = f"""{START}
    import threading
    model, errors, outputs = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), [], []
    optimizer, begun, done = torch.optim.SGD(model.parameters(), 0.1), threading.Event(), threading.Event()
    def act():
        begun.wait(60)
        try: outputs.append(model(torch.ones(2, 4)).detach())
        except RuntimeError as error: errors.append(str(error))
        done.set()
    tracing = torch.fx._symbolic_trace
    for number in range(6):
        if number == 3:
            threading.Thread(target=act).start()
            tracing._is_fx_tracing_flag = True  # as it is for all threads while torch compiles in one of them
            begun.set(); done.wait(60)
            tracing._is_fx_tracing_flag = False
        loss = model(torch.randn(5, 4)).pow(2).mean()
        optimizer.zero_grad(); loss.backward(retain_graph=True); optimizer.step()
        outputs.append(loss.detach())
    def train():
        net = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 3))
        for number in range(3):
            loss = net(torch.randn(5, 4)).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        outputs.extend(p.grad for p in net.parameters())
    thread = threading.Thread(target=train)
    thread.start(); thread.join()
    torch.save({{"errors": errors, "outputs": outputs,
                 "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}}, "left.pt")
"""


@needs_compiler
def test_a_model_is_called_by_other_threads_while_one_compiles(train: Train) -> None:
    plain, changed = train(THREADS), train(THREADS, compile="default")
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert plain.left["errors"] == changed.left["errors"] == []
    assert len(plain.left["outputs"]) == len(changed.left["outputs"]) == 11
    for one, other in zip(plain.left["outputs"], changed.left["outputs"], strict=True):
        assert close(one, other, 1e-5)
    assert changed.left["graphs"] == 2  # the learner's, and that of a training in a thread
    assert "forwards in threads other than that of the first forward are not compiled" in changed.installed["compile"]
