"""A training whose memory goes to activations: torch's own transformer encoder on sentences of different lengths.

python benchmarks/memory/encoder.py --epochs 2
"""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

LONGEST, WORDS = 160, 500


class Tagger(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width, padding_idx=0)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 12)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(words), src_key_padding_mask=words == 0))


def padded(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()
    torch.manual_seed(0)
    lengths = torch.randint(8, LONGEST, (400,)).tolist()
    sentences = [torch.randint(1, WORDS, (length,)) for length in lengths]
    model = Tagger(args.layers, args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for epoch in range(args.epochs):
        for words in DataLoader(sentences, batch_size=16, shuffle=True, collate_fn=padded):
            logits = model(words)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), (words % 12).flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
