"""A word-level language model with nn.LSTM on WikiText-2, through a DataLoader over fixed-length sequences.

    python lstm_text.py --epochs 3 --train-size 1600 --val-size 320

It trains on WikiText-2's small validation file and validates on its test file.
`lstm_text_tuned.py` is the same training as an expert would speed it up by hand.
"""

import argparse
import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

TEXTS = Path(__file__).resolve().parents[3] / "shared" / "data"


def read_words(path: Path) -> list[str]:
    words = []
    for line in path.read_text(encoding="utf-8").splitlines():
        words += [*line.split(), "<eos>"]
    return words


class Vocabulary:
    """The `size` most frequent words; every other word is <unk>."""

    def __init__(self, words: list[str], size: int) -> None:
        frequent = [word for word, _ in Counter(words).most_common(size) if word != "<unk>"]
        self.index = {word: i for i, word in enumerate(["<unk>", *frequent[: size - 1]])}

    def __len__(self) -> int:
        return len(self.index)

    def encode(self, words: list[str]) -> Tensor:
        return torch.tensor([self.index.get(word, 0) for word in words])


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive pieces of the text, with the same piece one word later as target."""

    def __init__(self, tokens: Tensor, length: int, size: int) -> None:
        self.tokens = tokens
        self.length = length
        self.size = min(size, (len(tokens) - 1) // length)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.length
        piece = self.tokens[start : start + self.length + 1]
        return piece[:-1], piece[1:]


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        self.decoder = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.dropout(self.embedding(x)))
        return self.decoder(self.dropout(hidden))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="A word-level language model with an LSTM.")
    parser.add_argument("--data", type=Path, default=TEXTS, help="folder with the WikiText-2 files")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--train-size", type=int, default=10**9, help="sequences per epoch (default: all)")
    parser.add_argument("--val-size", type=int, default=10**9, help="sequences per validation (default: all)")
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--length", type=int, default=35)
    parser.add_argument("--vocabulary", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=200)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("lstm_text.pt"))
    return parser


def main() -> None:
    args = make_parser().parse_args()
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    train_words = read_words(args.data / "wikitext2-valid.txt")
    vocabulary = Vocabulary(train_words, args.vocabulary)
    val_tokens = vocabulary.encode(read_words(args.data / "wikitext2-test.txt"))
    train_set = Sequences(vocabulary.encode(train_words), args.length, args.train_size)
    val_set = Sequences(val_tokens, args.length, args.val_size)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(val_set, batch_size=args.batch_size, drop_last=True)

    model = LanguageModel(len(vocabulary), args.width, args.layers, args.dropout).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        model.train()
        train_loss = 0.0
        for x, y in train_loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = criterion(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            train_loss += loss.item()
        trained = time.perf_counter()

        model.eval()
        val_loss = 0.0
        for x, y in val_loader:
            x, y = x.to(device), y.to(device)
            val_loss += criterion(model(x).flatten(0, 1), y.flatten()).item()
        validated = time.perf_counter()
        print(
            f"epoch {epoch}: {trained - start:.3f} s train, {validated - trained:.3f} s validation, "
            f"loss {train_loss / len(train_loader):.4f}, validation loss {val_loss / len(val_loader):.4f}",
            flush=True,
        )
        torch.save({"epoch": epoch, "model": model.state_dict()}, args.checkpoint)


if __name__ == "__main__":
    main()
