"""What the experiments of the second paper train on, from the folder that `experiments._pack` wrote.

The folder is `--assets`, or the environment's HEADWISE_DATA, or `carry/b` of the repository. At the smallest size
nothing is read: stand-ins with a little structure are made on the spot, so that the code can be tried anywhere.
"""

from __future__ import annotations

import io
import json
import lzma
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments._provenance import used
from headwise.errors import DataError

VOCABULARY = 4096
END, MASK, SEPARATOR, PAD, CLASS = range(5)
GLUE = ("CoLA", "SST-2", "MRPC", "RTE")
PATCH = 4
PACKING = "python -m experiments._pack --shared ../shared/data --cifar cifar10.npz --corpus carry/corpus --out carry/b"


def folder(assets: Path | None) -> Path:
    """Where packed data lies."""
    if assets is not None:
        return assets
    here = Path(__file__).resolve().parents[1] / "carry" / "b"
    return Path(os.environ.get("HEADWISE_DATA", here))


def _path(assets: Path | None, name: str) -> Path:
    path = folder(assets) / name
    if not path.is_file():
        raise DataError(f"{path} is missing; pack the data with: {PACKING}; or give --assets or HEADWISE_DATA.")
    return used(path)


class Texts(NamedTuple):
    """Tokens to train on and tokens held out: one text, or rows of their own (two dimensions)."""

    train: Tensor
    valid: Tensor
    vocabulary: int
    true_loss: float | None = None  # nats per token that no model can beat, where a model wrote the text


def texts(kind: str, size: str, assets: Path | None, device: torch.device) -> Texts:
    """Tokens of `text` (novels and film reviews) or `code` (the embedded model's corpus)."""
    if size == "tiny":
        made = _chain(6_000, 64)
        return Texts(made[:5_000].to(device), made[5_000:].to(device), 64)

    def read(part: str) -> Tensor:
        found = np.frombuffer(lzma.decompress(_path(assets, f"{kind}-{part}.u16.xz").read_bytes()), dtype="<u2")
        return torch.from_numpy(found.astype(np.int64)).to(device)

    return Texts(read("train"), read("valid"), VOCABULARY)


def stories(size: str, assets: Path | None, device: torch.device, rows: int, held: int, length: int) -> Texts:
    """Rows of `length` tokens to predict that stories15M wrote."""
    if size == "tiny":
        made = _chain((rows + held) * (length + 1), 64).view(-1, length + 1)
        return Texts(made[:rows].to(device), made[rows:].to(device), 64)
    from experiments._stories import rows_of

    train, valid, loss = rows_of(assets, rows, held, length + 1, device)
    return Texts(train, valid, int(max(train.max(), valid.max())) + 1, loss)


def _chain(count: int, symbols: int) -> Tensor:
    """Text of a random machine: after each symbol one of four is likely."""
    rng = np.random.default_rng(0)
    likely, found = rng.integers(5, symbols, (symbols, 4)), [5]
    for pick in rng.integers(0, 5, count - 1):
        found.append(int(likely[found[-1], pick]) if pick < 4 else int(rng.integers(5, symbols)))
    return torch.tensor(found)


class Images(NamedTuple):
    """Images as bytes (count, 32, 32, 3), with classes: to train on, to choose by, to report."""

    train: Tensor
    train_labels: Tensor
    valid: Tensor
    valid_labels: Tensor
    test: Tensor
    test_labels: Tensor


def images(size: str, assets: Path | None, device: torch.device, held: int = 2_500) -> Images:
    """CIFAR-10; the last `held` training images choose rates and train nothing."""
    if size == "tiny":
        rng = torch.Generator().manual_seed(0)
        labels = torch.randint(10, (160,), generator=rng)
        pictures = torch.randint(0, 256, (10, 32, 32, 3), generator=rng)[labels] // 2
        pictures = (pictures + torch.randint(0, 128, (160, 32, 32, 3), generator=rng)).to(torch.uint8)
        parts = pictures.split((96, 32, 32)), labels.split((96, 32, 32))
        return Images(*(part.to(device) for pair in zip(*parts, strict=True) for part in pair))
    packed = np.load(_path(assets, "cifar.npz"))
    pictures, labels = {}, {}
    for part in ("train", "test"):
        labels[part] = torch.from_numpy(packed[f"{part}_labels"].astype(np.int64)).to(device)
        squares = np.split(packed[f"{part}_images"], packed[f"{part}_ends"][:-1])
        pictures[part] = torch.from_numpy(_pictures(squares)[: len(labels[part])]).to(device)
    border = len(labels["train"]) - held
    return Images(
        pictures["train"][:border],
        labels["train"][:border],
        pictures["train"][border:],
        labels["train"][border:],
        pictures["test"],
        labels["test"],
    )


def _pictures(squares: list[Any]) -> Any:
    """The images of JPEG mosaics."""
    from PIL import Image

    found = []
    for square in squares:
        array = np.asarray(Image.open(io.BytesIO(square.tobytes())))
        side = array.shape[0] // 32
        found.append(array.reshape(side, 32, side, 32, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 32, 32, 3))
    return np.concatenate(found)


def patches(pictures: Tensor) -> Tensor:
    """Patches of 4 x 4 in order, (..., 64, 48), scaled to about unit variance."""
    x = (pictures.float() - 118.0) / 64.0
    x = x.unflatten(-3, (8, PATCH)).unflatten(-2, (8, PATCH))  # (..., 8, 4, 8, 4, 3)
    return x.transpose(-4, -3).flatten(-5, -4).flatten(-3)


class Examples(NamedTuple):
    """Sentences of one task, padded."""

    tokens: Tensor  # (count, length)
    keep: Tensor  # which of them are there
    labels: Tensor

    def rows(self, chosen: Tensor | slice) -> Examples:
        return Examples(*(part[chosen] for part in self))


def glue(task: str, size: str, assets: Path | None, device: torch.device, length: int) -> tuple[Examples, Examples]:
    """A task's training examples and its development set."""
    if size == "tiny":
        rng = torch.Generator().manual_seed(0)
        tokens = torch.randint(5, 64, (96, length), generator=rng)
        labels = tokens[:, 0] // 11 if task == "STS-B" else (tokens[:, 0] > 34).long()
        keep = torch.arange(length) < torch.randint(length // 2, length + 1, (96, 1), generator=rng)
        found = Examples(*(part.to(device) for part in (tokens.where(keep, torch.tensor(PAD)), keep, labels)))
        return found.rows(slice(0, 64)), found.rows(slice(64, 96))
    everything = json.loads(lzma.decompress(_path(assets, "glue.json.xz").read_bytes()))[task]

    def padded(rows: list[Any]) -> Examples:
        tokens = torch.full((len(rows), length), PAD)
        for place, (ids, _) in enumerate(rows):
            tokens[place, : min(length, len(ids))] = torch.tensor(ids[:length])
        labels = torch.tensor([label for _, label in rows])
        return Examples(tokens.to(device), (tokens != PAD).to(device), labels.to(device))

    return padded(everything["train"]), padded(everything["dev"])


def order(seed: int, steps: int, batch: int, count: int) -> Tensor:
    """Which of `count` examples a seed's model sees in every step, (steps, batch): pass after pass, each shuffled."""
    rng = torch.Generator().manual_seed(seed)
    passes = -(-steps * batch // count)
    return torch.cat([torch.randperm(count, generator=rng) for _ in range(passes)])[: steps * batch].view(steps, batch)


def orders(seeds: list[int], steps: int, batch: int, count: int, device: torch.device) -> Tensor:
    """The orders of several seeds, (steps, S, batch); equal seeds have equal orders."""
    made = {seed: order(seed, steps, batch, count) for seed in dict.fromkeys(seeds)}
    return torch.stack([made[seed] for seed in seeds], 1).to(device)
