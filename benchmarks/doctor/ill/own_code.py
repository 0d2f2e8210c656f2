"""Accuracy by class, counted number by number in Python."""

# plant: own_code
import torch
from torch import nn

CLASSES = 8


def count(table, answers, targets):
    for answer, target in zip(answers, targets):
        table[int(target)][int(answer)] += 1


if __name__ == "__main__":
    torch.manual_seed(0)
    rows, targets = torch.randn(8192, 40), torch.randint(0, CLASSES, (8192,))
    model = nn.Sequential(nn.Linear(40, 128), nn.ReLU(), nn.Linear(128, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5 * 64)
    for epoch in range(5):
        table = [[0] * CLASSES for _ in range(CLASSES)]
        for picked in torch.randperm(len(rows)).split(128):
            optimizer.zero_grad()
            answers = model(rows[picked])
            nn.functional.cross_entropy(answers, targets[picked]).backward()
            optimizer.step()
            schedule.step()
            count(table, answers.argmax(1), targets[picked])
        print(epoch, sum(table[i][i] for i in range(CLASSES)) / len(rows))
