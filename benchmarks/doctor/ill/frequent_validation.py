"""All of the validation set, after every tenth step."""

# plant: frequent_validation
import torch
from torch import nn


def validate(model, rows, targets):
    model.eval()
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum() for x, y in zip(rows.split(256), targets.split(256), strict=True))
    model.train()
    return right.item() / len(rows)


if __name__ == "__main__":
    torch.manual_seed(0)
    rows, targets = torch.randn(6144, 128), torch.randint(0, 10, (6144,))
    held_out = torch.randn(4096, 128), torch.randint(0, 10, (4096,))
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4 * 48)
    step, best = 0, 0.0
    for epoch in range(4):
        for picked in torch.randperm(len(rows)).split(128):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(rows[picked]), targets[picked]).backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step % 10 == 0:
                best = max(best, validate(model, *held_out))
    print(best)
