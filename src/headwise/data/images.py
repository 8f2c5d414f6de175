"""Calibration and evaluation images from any source, prepared by the model's own image processor; seeded.

Pillow is needed where images are read from files; arrays of pixels need nothing more.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from headwise.data import Rows
from headwise.errors import DataError, ModelError

ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"}
COLUMNS = ("image", "img", "pixel_values")
LABELS = ("label", "labels", "fine_label")
SHUFFLED = 1_000  # images of a data set that are held to draw from, as it is read from its beginning
BATCH = 64  # images that are prepared together
MEANING = (
    "a folder of images (class subfolders allowed), an .npz file with x or x_train (N, H, W, C; FILE.npz:test takes "
    "x_test), or a datasets name (name:config:split)"
)


class Picture(NamedTuple):
    """One image as its source has it, a Pillow image or an array (H, W, C), and its class, -1 where unknown."""

    image: Any
    label: int = -1


def read(source: str, processor: Any, count: int, seed: int, labels: Mapping[str, int] | None = None) -> Rows:
    """At most `count` images in a seeded order (N, C, H, W), and their classes where any is known."""
    rows: list[torch.Tensor] = []
    truth: list[int] = []
    waiting: list[Picture] = []
    for picture in _pictures(source, seed, labels or {}):
        waiting.append(picture)
        done = len(truth) + len(waiting) == count
        if len(waiting) == BATCH or done:
            rows.append(prepare([p.image for p in waiting], processor, source))
            truth += [p.label for p in waiting]
            waiting = []
        if done:
            break
    if waiting:
        rows.append(prepare([p.image for p in waiting], processor, source))
        truth += [p.label for p in waiting]
    if not rows:
        raise DataError(f"{source} holds no images. Give {MEANING}.")
    known = torch.tensor(truth)
    return Rows(torch.cat(rows), known if (known >= 0).any() else None)


def prepare(pictures: Sequence[Any], processor: Any, what: str = "these images") -> torch.Tensor:
    """Images as the model reads them."""
    try:
        found: Any = processor(images=[_coloured(p) for p in pictures], return_tensors="pt")
        pixels: torch.Tensor = found["pixel_values"].float()
    except Exception as error:  # processors and Pillow each raise their own kinds
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{what} cannot be prepared by the model's image processor ({reason}).") from None
    return pixels


def blank(processor: Any, config: Any) -> torch.Tensor:
    """One black image as the model reads it: it says how large prepared images are."""
    rows = prepare([np.zeros((64, 64, 3), np.uint8)], processor, "a black image")
    if rows.shape[1] != getattr(config, "num_channels", rows.shape[1]):
        raise ModelError(f"the image processor makes {rows.shape[1]} channels where the model takes another number.")
    return rows


def _coloured(picture: Any) -> Any:
    """Three channels, which every processor takes."""
    if isinstance(picture, np.ndarray):
        picture = picture[..., None] if picture.ndim == 2 else picture
        return np.repeat(picture, 3, -1) if picture.shape[-1] == 1 else picture
    return picture.convert("RGB")


def peek(source: str) -> None:
    """Refuse a source that holds no images; data sets are not asked for."""
    path, _, split = source.partition(".npz:")
    file = Path(f"{path}.npz" if split else source)
    if file.is_dir():
        _pillow()
        found = any(p.suffix.lower() in ENDINGS and p.is_file() for p in file.rglob("*"))
    else:
        found = file.suffix == ".npz" and file.exists() or not (file.exists() or file.suffix or source == "stdlib")
    if not found:
        what = "holds no images" if file.exists() or source == "stdlib" else "does not exist"
        raise DataError(f"{source} {what}. Give {MEANING}.")


def _pictures(source: str, seed: int, labels: Mapping[str, int]) -> Iterator[Picture]:
    path, _, split = source.partition(".npz:")
    if split or source.endswith(".npz"):
        yield from _arrays(Path(f"{path}.npz" if split else source), split, seed)
    elif Path(source).is_dir():
        yield from _folder(Path(source), seed, labels)
    elif Path(source).exists() or Path(source).suffix or source in ("self", "stdlib"):
        what = "holds no images" if source in ("self", "stdlib") or Path(source).exists() else "does not exist"
        raise DataError(f"{source} {what}. Give {MEANING}.")
    else:
        yield from _dataset(source, seed, labels)


def _arrays(path: Path, split: str, seed: int) -> Iterator[Picture]:
    """Images of an .npz file: those of a split, or all, or those meant for training. Nothing in it is unpickled."""
    try:
        with np.load(path, allow_pickle=False) as file:
            ends = [f"_{split}"] if split else ["", "_train", "_test"]
            end = next((end for end in ends if f"x{end}" in file.files), None)
            if end is None:
                wanted = " or ".join(f"x{end}" for end in ends)
                raise DataError(f"{path} holds no {wanted}, but {', '.join(file.files)}. Give {MEANING}.")
            pixels, truth = file[f"x{end}"], file[f"y{end}"] if f"y{end}" in file.files else None
    except DataError:
        raise
    except Exception as error:  # NumPy's reader raises many kinds, those of Python's own parser among them
        raise DataError(f"{path} cannot be read ({error}). Give {MEANING}.") from None
    if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4):
        raise DataError(f"{path}: images are uint8 (N, H, W, C), not {pixels.dtype} {pixels.shape}.")
    if truth is not None and truth.size != len(pixels):
        raise DataError(f"{path}: {len(pixels)} images, but {truth.size} labels.")
    classes = np.full(len(pixels), -1) if truth is None else truth.reshape(-1)
    for index in np.random.default_rng(seed).permutation(len(pixels)):
        yield Picture(pixels[index], int(classes[index]))


def _folder(path: Path, seed: int, labels: Mapping[str, int]) -> Iterator[Picture]:
    """Images below a folder; the name of the folder that an image lies in is its class if the model knows it."""
    opened = _pillow()
    files = sorted(p for p in path.rglob("*") if p.suffix.lower() in ENDINGS and p.is_file())
    random.Random(seed).shuffle(files)
    names = {_plain(name): number for name, number in labels.items()}
    for file in files:
        try:
            with opened(file) as image:
                yield Picture(image.convert("RGB"), names.get(_plain(file.parent.name), -1))
        except (OSError, ValueError) as error:
            raise DataError(f"{file} cannot be read as an image ({error}); remove it or replace it.") from None


def _plain(name: str) -> str:
    return name.strip().lower().replace(" ", "_")


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise DataError("images in files need Pillow: pip install 'headwise[vision]', or give an .npz file.") from None
    return Image.open


def _dataset(name: str, seed: int, labels: Mapping[str, int]) -> Iterator[Picture]:
    try:
        import datasets
    except ImportError:
        raise DataError(f"'{name}' is no folder, and the datasets package is missing: pip install datasets.") from None
    repo, config, split = (*name.split(":"), "", "")[:3]
    try:
        rows = datasets.load_dataset(repo, config or None, split=split or "train", streaming=True)
        classes = _classes(rows.features or {}, labels)
        for row in rows.shuffle(seed=seed, buffer_size=SHUFFLED):
            yield _example(row, name, classes)
    except DataError:
        raise
    except Exception as error:  # the hub's client raises many kinds; all mean the same to the user
        raise DataError(f"'{name}' is neither a folder nor a data set that loads ({error}). Give {MEANING}.") from None


def _classes(features: Mapping[str, Any], labels: Mapping[str, int]) -> dict[int, int] | None:
    """A data set's number of a class -> the model's, by their names; none where either has no names."""
    given = next((getattr(features[column], "names", None) for column in LABELS if column in features), None)
    if not given or all(name.startswith("LABEL_") for name in labels):
        return None
    names = {_plain(name): number for name, number in labels.items()}
    return {number: names[_plain(name)] for number, name in enumerate(given) if _plain(name) in names}


def _example(row: dict[str, Any], name: str, classes: dict[int, int] | None) -> Picture:
    image = next((row[column] for column in COLUMNS if column in row), None)
    if image is None:
        raise DataError(f"'{name}' has no column {' or '.join(COLUMNS[:2])}, but {', '.join(row)}.")
    label = next((row[column] for column in LABELS if isinstance(row.get(column), int)), -1)
    return Picture(image, label if classes is None else classes.get(label, -1))
