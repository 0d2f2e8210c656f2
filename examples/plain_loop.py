"""`python examples/plain_loop.py [--bf16] [--resume]`: what `hasten.Trainer` does, as a loop that reads top to bottom.

Its weights are those of the Trainer with the same flags, to the bit: see tests/examples/test_plain_loop.py.
"""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(epochs=3, accumulate=4, bf16=False, checkpoint="build/plain_loop.pt", resume=False):
    points = torch.randn(5000, 2, generator=torch.Generator().manual_seed(1)) * 2
    rings = points.norm(dim=1).long().clamp(max=3)  # which of four rings a point lies in
    train = DataLoader(TensorDataset(points[:4500], rings[:4500]), batch_size=32, shuffle=True)
    val = DataLoader(TensorDataset(points[4500:], rings[4500:]), batch_size=250)

    torch.manual_seed(0)  # from here on: first the weights are drawn, then the order of samples and the dropout
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = epochs * -(-len(train) // accumulate)  # an epoch's last step may have fewer batches
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
    parts, first_epoch = {"model": model, "optimizer": optimizer, "schedule": schedule}, 0
    if resume:
        saved = torch.load(checkpoint)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        first_epoch = saved["epoch"] + 1
        torch.set_rng_state(saved["random"])  # last: nothing may draw between here and the first batch

    for epoch in range(first_epoch, epochs):
        model.train()
        for index, (inputs, labels) in enumerate(train):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = F.cross_entropy(model(inputs), labels) / accumulate
            loss.backward()  # outside of autocast: each gradient has the type its forward had
            if (index + 1) % accumulate == 0 or index + 1 == len(train):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the sum: once per step, not per batch
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()

        model.eval()  # no dropout; and no graphs below, which would only take memory
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            correct = sum((model(inputs).argmax(1) == labels).sum().item() for inputs, labels in val)
        print(f"epoch {epoch}: accuracy {correct / len(val.dataset):.1%}")

        os.makedirs(os.path.dirname(checkpoint) or ".", exist_ok=True)
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**states, "epoch": epoch, "random": torch.get_rng_state()}, checkpoint + ".new")
        os.replace(checkpoint + ".new", checkpoint)  # a kill while writing leaves the one before whole
    return model


if __name__ == "__main__":
    main(bf16="--bf16" in sys.argv, resume="--resume" in sys.argv)
