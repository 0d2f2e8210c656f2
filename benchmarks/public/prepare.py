"""Prepares the data that the public scripts read, from what lies in `shared/data`.

    python benchmarks/public/prepare.py /work/public/data

The scripts would download their data; there is no network here, so each gets files of the same names and
shapes, made from CIFAR-10, WikiText-2 and tiny Shakespeare. That is right for measuring speed and for
comparing losses of two runs; the losses themselves mean nothing beside those in the scripts' own papers.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()


def cifar(split: str, rows: int | None = None) -> tuple[Pixels, NDArray[np.int64]]:
    """The first `rows` images (height, width, channel) and labels of CIFAR-10."""
    table = pq.read_table(SHARED / f"cifar10-{split}.parquet").slice(0, rows)
    images = [np.asarray(Image.open(io.BytesIO(b)).convert("RGB")) for b in table["image"].to_pylist()]
    return np.stack(images), table["label"].to_numpy()


def mnist(folder: Path, train: int, test: int) -> None:
    """MNIST's four files: grey CIFAR-10 images, 28x28. Above 50,000 the first images come again, mirrored."""
    folder = folder / "MNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, split, count in (("train", "train", train), ("t10k", "test", test)):
        colour, labels = cifar(split, min(count, 50_000))
        grey = colour[:, 2:30, 2:30].mean(axis=3).astype(np.uint8)
        if count > len(grey):
            extra = count - len(grey)
            grey = np.concatenate([grey, grey[:extra, :, ::-1]])
            labels = np.concatenate([labels, labels[:extra]])
        header = struct.pack(">IIII", 0x0803, len(grey), 28, 28)
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(header + grey.tobytes())
        header = struct.pack(">II", 0x0801, len(labels))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(header + labels.astype(np.uint8).tobytes())


def cifar_batches(folder: Path, train: int, test: int) -> None:
    """The pickled batches of the original CIFAR-10 archive."""
    folder = folder / "cifar-10-batches-py"
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = cifar("train", train)
    parts = zip(np.array_split(images, 5), np.array_split(labels, 5), strict=True)
    batches = [(f"data_batch_{i}", *part) for i, part in enumerate(parts, 1)]
    batches.append(("test_batch", *cifar("test", test)))
    for name, pixels, wanted in batches:
        flat = pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)
        (folder / name).write_bytes(pickle.dumps({"data": flat, "labels": wanted.tolist()}, protocol=4))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": CLASSES}, protocol=4))


def image_folder(folder: Path, train: int, val: int, side: int) -> None:
    """`train` and `val` with a folder of JPEG files for each class, each `side` pixels wide and high."""
    for part, split, count in (("train", "train", train), ("val", "test", val)):
        images, labels = cifar(split, count)
        for i, (pixels, label) in enumerate(zip(images, labels, strict=True)):
            path = folder / part / CLASSES[label] / f"{i:05d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).resize((side, side), Image.Resampling.BICUBIC).save(path, quality=90)


def bsds300(folder: Path, train: int, test: int) -> None:
    """Pictures of 481x321 pixels, as in the Berkeley set: mosaics of CIFAR-10 images."""
    for part, count in (("train", train), ("test", test)):
        target = folder / "BSDS300" / "images" / part
        target.mkdir(parents=True, exist_ok=True)
        images, _ = cifar("train" if part == "train" else "test", count * 24)
        for i, tiles in enumerate(images.reshape(count, 4, 6, 32, 32, 3)):
            mosaic = tiles.transpose(0, 2, 1, 3, 4).reshape(128, 192, 3)
            picture = Image.fromarray(mosaic).resize((481, 321), Image.Resampling.BICUBIC)
            picture.save(target / f"{i:05d}.jpg", quality=90)


def wikitext(folder: Path, tokens: int | None = None) -> None:
    """train.txt, valid.txt and test.txt: WikiText-2's validation text and the two halves of its test text."""
    folder.mkdir(parents=True, exist_ok=True)
    first = (SHARED / "wikitext2-valid.txt").read_text()
    second = (SHARED / "wikitext2-test.txt").read_text().splitlines(keepends=True)
    half = len(second) // 2
    texts = {"train": first, "valid": "".join(second[:half]), "test": "".join(second[half:])}
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text("".join(_first_tokens(text, tokens)))


def _first_tokens(text: str, tokens: int | None) -> Iterator[str]:
    seen = 0
    for line in text.splitlines(keepends=True):
        if tokens is not None and seen >= tokens:
            return
        seen += len(line.split()) + 1
        yield line


def shakespeare_characters(folder: Path) -> None:
    """nanoGPT's character-level data: train.bin and val.bin of 16-bit numbers, and meta.pkl."""
    folder.mkdir(parents=True, exist_ok=True)
    text = (SHARED / "tinyshakespeare.txt").read_text()
    letters = sorted(set(text))
    number = {letter: i for i, letter in enumerate(letters)}
    ids = np.array([number[letter] for letter in text], dtype=np.uint16)
    cut = len(ids) * 9 // 10
    ids[:cut].tofile(folder / "train.bin")
    ids[cut:].tofile(folder / "val.bin")
    meta = {"vocab_size": len(letters), "itos": dict(enumerate(letters)), "stoi": number}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


def shakespeare_text(path: Path, characters: int | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((SHARED / "tinyshakespeare.txt").read_text()[:characters])


def cora(folder: Path, papers: int = 2708, words: int = 1433, links: int = 5429) -> None:
    """A citation graph of Cora's sizes, drawn at random: papers cite and use words mostly of their topic."""
    topics = ["Case_Based", "Genetic_Algorithms", "Neural_Networks", "Probabilistic_Methods"]
    topics += ["Reinforcement_Learning", "Rule_Learning", "Theory"]
    draw = np.random.default_rng(0)
    topic = draw.integers(len(topics), size=papers)
    likely = draw.random((len(topics), words)) ** 8
    used = draw.random((papers, words)) < likely[topic] * 18 / (likely[topic].sum(axis=1, keepdims=True))
    used[np.arange(papers), draw.integers(words, size=papers)] = True
    rows = ["\t".join([str(1000 + i), *map(str, used[i].astype(int)), topics[topic[i]]]) for i in range(papers)]
    cites: set[tuple[int, int]] = set()
    while len(cites) < links:
        a, b = (int(i) for i in draw.integers(papers, size=2))
        if a != b and (topic[a] == topic[b] or draw.random() < 0.03):
            cites.add((1000 + a, 1000 + b))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cora.content").write_text("\n".join(rows) + "\n")
    (folder / "cora.cites").write_text("".join(f"{a}\t{b}\n" for a, b in sorted(cites)))


def gpt2_tiny(folder: Path, vocabulary: int = 2048) -> None:
    """A tokenizer of our own text and a small GPT-2's configuration, in the files Transformers reads."""
    from tokenizers import ByteLevelBPETokenizer

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(SHARED / "tinyshakespeare.txt")], vocab_size=vocabulary, special_tokens=["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    end = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1024, **end}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    sizes = {"n_layer": 4, "n_head": 4, "n_embd": 128, "n_positions": 256, "vocab_size": vocabulary}
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    model = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes, **ids}
    (folder / "config.json").write_text(json.dumps(model))


def unet_tiny(folder: Path) -> None:
    """A small UNet's configuration, in the form Diffusers reads."""
    folder.mkdir(parents=True, exist_ok=True)
    channels = [32, 64]
    config = {"_class_name": "UNet2DModel", "sample_size": 32, "in_channels": 3, "out_channels": 3}
    config |= {"layers_per_block": 1, "block_out_channels": channels, "norm_num_groups": 8}
    config |= {"down_block_types": ["DownBlock2D", "AttnDownBlock2D"]}
    config |= {"up_block_types": ["AttnUpBlock2D", "UpBlock2D"]}
    (folder / "config.json").write_text(json.dumps(config))


def vit_tiny(folder: Path) -> None:
    """A small vision transformer with random weights, as if downloaded from the Hub."""
    sys.path.insert(0, str(Path(__file__).resolve().parent / "stand_in"))  # for its import of torchvision
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    sizes = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 192}
    model = ViTForImageClassification(ViTConfig(image_size=32, patch_size=4, num_labels=10, **sizes))
    model.save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)


ACCURACY = """
import datasets
import evaluate


class Accuracy(evaluate.Metric):
    def _info(self):
        number = datasets.Value("int32")
        features = datasets.Features({"predictions": number, "references": number})
        return evaluate.MetricInfo(description="accuracy", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        right = sum(int(a == b) for a, b in zip(predictions, references))
        return {"accuracy": right / len(references)}
"""


def accuracy_metric(folder: Path) -> None:
    """What `evaluate.load("accuracy")` would download: our own, found by it in the working folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "accuracy.py").write_text(ACCURACY.lstrip())


def prepare(folder: Path) -> None:
    mnist(folder / "mnist", 60_000, 10_000)
    mnist(folder / "mnist-30k", 30_000, 2_000)
    mnist(folder / "mnist-10k", 10_000, 2_000)
    mnist(folder / "mnist-2k", 2_000, 1_000)
    mnist(folder / "mnist-500", 500, 100)
    cifar_batches(folder / "cifar10-200", 200, 100)
    cifar_batches(folder / "cifar10-4k", 4_000, 1_000)
    image_folder(folder / "images256", 240, 48, side=256)
    image_folder(folder / "images32", 1_500, 320, side=32)
    bsds300(folder / "bsds300", 64, 16)
    wikitext(folder / "wikitext-2", tokens=60_000)
    wikitext(folder / "wikitext-small", tokens=12_000)
    shakespeare_characters(folder / "shakespeare_char")
    shakespeare_text(folder / "shakespeare" / "input.txt")
    shakespeare_text(folder / "shakespeare" / "short.txt", 200_000)
    cora(folder / "cora")
    gpt2_tiny(folder / "gpt2-tiny")
    unet_tiny(folder / "unet-tiny")
    vit_tiny(folder / "vit-tiny")
    accuracy_metric(folder / "accuracy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the data goes, about 200 MB")
    prepare(parser.parse_args().folder)


if __name__ == "__main__":
    main()
