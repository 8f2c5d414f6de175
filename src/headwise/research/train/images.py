"""Labelled images from an .npz file: x_train, y_train, x_test, y_test; bytes, rows x height x width x channels."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from headwise.errors import DataError
from headwise.research.train._source import Draws, TrainingRows, surprise
from headwise.research.train.settings import TrainSettings

MARGIN = 8  # images are moved by up to this part of their side
HELD_OUT = 0.1  # of the images, where the file has none to test on
MEANING = "an .npz file with x_train (uint8, images x height x width x channels) and y_train, x_test and y_test"


def read(source: str) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a file, each of the right kind."""
    if not Path(source).is_file():
        raise DataError(f"{source} does not exist; give {MEANING}.")
    try:
        with np.load(source, allow_pickle=False) as file:
            found = {name: file[name] for name in ("x_train", "y_train", "x_test", "y_test") if name in file}
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{source} cannot be read ({error}); give {MEANING}.") from None
    for name, images in ((n, found.get(n)) for n in ("x_train", "x_test") if n in found or n == "x_train"):
        labels = found.get(name.replace("x", "y"))
        if images is None or labels is None or images.dtype != np.uint8 or images.ndim != 4:
            raise DataError(f"{source} has no {name} of bytes in four dimensions, or no labels for it; give {MEANING}.")
        if not len(images) or len(images) != labels.size:
            raise DataError(f"{source} has {len(images)} images in {name} and {labels.size} labels; give {MEANING}.")
    return found


class Images(TrainingRows):
    """Images on the device as bytes; moved, turned over and normalised there."""

    default_rows = 128

    def __init__(self, settings: TrainSettings, patch: int, device: torch.device) -> None:
        found = read(settings.data)
        if settings.eval is not None:
            other = read(settings.eval)
            found["x_test"], found["y_test"] = (other.get(f"{n}_test", other[f"{n}_train"]) for n in "xy")
        if "x_test" not in found:
            order = np.random.default_rng(settings.seed).permutation(len(found["x_train"]))
            held, rest = np.split(order, [max(1, int(len(order) * HELD_OUT))])
            found["x_test"], found["y_test"] = found["x_train"][held], found["y_train"][held]
            found["x_train"], found["y_train"] = found["x_train"][rest], found["y_train"][rest]
        self.augment = settings.augment
        self.train, self.held = (self._part(found, name, device) for name in ("train", "test"))
        images, labels = self.train
        self.classes = int(max(labels.max(), self.held[1].max())) + 1
        some = images[:: max(1, len(images) // 10_000)].double() / 255
        self.mean, self.deviation = some.mean((0, 1, 2)).float(), some.std((0, 1, 2)).clamp_min(1e-3).float()
        self.train_rows, self.eval_rows = len(images), len(self.held[0])
        self.side, self.channels = tuple(images.shape[1:3]), int(images.shape[3])
        self.row_tokens = (self.side[0] // patch) * (self.side[1] // patch) + 1

    @staticmethod
    def _part(found: dict[str, Any], name: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Images (N, H, W, C) as bytes and class numbers (N,)."""
        labels = found[f"y_{name}"].reshape(-1).astype(np.int64)
        return torch.from_numpy(found[f"x_{name}"]).to(device), torch.from_numpy(labels).to(device)

    def draw(self, rows: int, generator: torch.Generator) -> Draws:
        """By how much images are moved down and right, and whether they are turned over."""
        if not self.augment:
            return ()
        return (torch.rand((rows, 3), generator=generator, device=generator.device),)

    def take(self, part: Any, rows: torch.Tensor, draws: Draws) -> Any:
        """Normalised pixels (B, C, H, W) and labels."""
        images, labels = (tensor[rows.to(tensor.device)] for tensor in part)
        images = _moved(images, draws[0]) if draws else images
        return ((images.float() / 255 - self.mean) / self.deviation).permute(0, 3, 1, 2).contiguous(), labels

    def scores(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Surprise at the label, and whether it was the best."""
        logits = model(pixel_values=batch[0]).logits
        return {"loss": surprise(logits, batch[1]), "accuracy": (logits.argmax(-1) == batch[1]).float()}

    def processor(self) -> dict[str, Any]:
        """What a transformers image processor must know to do the same to an image."""
        return {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "size": {"height": self.side[0], "width": self.side[1]},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": self.mean.tolist(),
            "image_std": self.deviation.tolist(),
        }


def _moved(images: torch.Tensor, draw: torch.Tensor) -> torch.Tensor:
    """Every image moved by its own whole number of pixels, with black at the edges, and half of them turned over."""
    count, height, width, _ = images.shape
    margin = max(1, min(height, width) // MARGIN)
    padded = nn.functional.pad(images, (0, 0, margin, margin, margin, margin))
    down, right = ((draw[:, i] * (2 * margin + 1)).long() for i in (0, 1))
    rows = down[:, None] + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device).expand(count, -1)
    columns = right[:, None] + torch.where(draw[:, 2:] < 0.5, columns, width - 1 - columns)
    return padded[torch.arange(count, device=images.device)[:, None, None], rows[:, :, None], columns[:, None, :]]
