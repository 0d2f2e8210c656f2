"""A great table, of which a batch looks up few rows, with gradients for all of them."""

# plant: dense_embedding_gradients
import torch
from torch import nn

ITEMS = 200_000


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ITEMS, 16)
        self.head = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, pairs):
        return self.head(self.items(pairs).flatten(1)).squeeze(1)


if __name__ == "__main__":
    torch.manual_seed(0)
    pairs, liked = torch.randint(0, ITEMS, (8192, 2)), torch.rand(8192).round()
    model = Scores()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * 64)
    for epoch in range(3):
        for picked in torch.randperm(len(pairs)).split(128):
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(pairs[picked]), liked[picked]).backward()
            optimizer.step()
            schedule.step()
