"""Calibration and evaluation images from any source, prepared by the model's own image processor.

Pillow is needed where images are read from files; arrays of pixels need nothing more.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from headwise.data import DataRows, from_dataset
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


def read(source: str, processor: Any, count: int, seed: int, labels: Mapping[str, int] | None = None) -> DataRows:
    """At most `count` images in random order (N, C, H, W), and their classes where any is known."""
    rows: list[torch.Tensor] = []
    truth: list[int] = []
    pictures = islice(_pictures(source, seed, labels or {}), count)
    while some := list(islice(pictures, BATCH)):
        rows.append(prepare([picture.image for picture in some], processor, source))
        truth += [picture.label for picture in some]
    if not rows:
        raise DataError(f"{source} holds no images. Give {MEANING}.")
    known = torch.tensor(truth)
    return DataRows(torch.cat(rows), known if (known >= 0).any() else None)


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
    """One black image as the model reads it: it has the size of all prepared images."""
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
    """Refuse a source that holds no images; data sets are not loaded."""
    file, _ = _place(source)
    if file.is_dir():
        _pillow()
        found = any(p.suffix.lower() in ENDINGS and p.is_file() for p in file.rglob("*"))
    else:
        found = file.suffix == ".npz" and file.is_file() or not (file.exists() or file.suffix or source == "stdlib")
    if not found:
        raise _no_images(source, file)


def _place(source: str) -> tuple[Path, str]:
    """The file or folder of a source, and the split that follows an .npz file."""
    path, _, split = source.partition(".npz:")
    return Path(f"{path}.npz" if split else source), split


def _no_images(source: str, file: Path) -> DataError:
    what = "holds no images" if file.exists() or source in ("self", "stdlib") else "does not exist"
    return DataError(f"{source} {what}. Give {MEANING}.")


def _pictures(source: str, seed: int, labels: Mapping[str, int]) -> Iterator[Picture]:
    file, split = _place(source)
    if file.suffix == ".npz":
        return _arrays(file, split, seed)
    if file.is_dir():
        return _folder(file, seed, labels)
    if file.exists() or file.suffix or source in ("self", "stdlib"):
        raise _no_images(source, file)

    def examples(rows: Any) -> Iterator[Picture]:
        classes = _classes(rows.features or {}, labels)
        return (_example(row, source, classes) for row in rows.shuffle(seed=seed, buffer_size=SHUFFLED))

    return from_dataset(source, "folder", MEANING, examples)


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
