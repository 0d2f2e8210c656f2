"""Sentences of very different lengths padded to the longest of a random batch."""

# plant: ragged_batches
# also: sample_by_sample, full_precision, python_getitem, allocator
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader


def padded(sentences):
    return pad_sequence(sentences, batch_first=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    lengths = torch.cat([torch.randint(8, 24, (3800,)), torch.randint(200, 256, (200,))])
    sentences = [torch.randint(1, 1000, (int(length),)) for length in lengths]
    loader = DataLoader(
        sentences, batch_size=32, shuffle=True, collate_fn=padded, num_workers=1, persistent_workers=True
    )
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(1000, 64), nn.TransformerEncoder(layer, 2), nn.Linear(64, 1000))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(loader))
    for tokens in loader:
        optimizer.zero_grad()
        out = model(tokens)[:, :-1]
        nn.functional.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0).backward()
        optimizer.step()
        schedule.step()
