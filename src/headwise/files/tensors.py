"""The one place that reads safetensors files: any of them may be damaged, and every fault is an error of ours."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from headwise.errors import HeadwiseError, PlanError
from headwise.files.json import AGAIN, regular

Tensors = dict[str, torch.Tensor]


class Entry(NamedTuple):
    """What a file's header says of a tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it, such as BF16

    @property
    def numbers(self) -> int:
        """How many it holds."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """How many bytes they take."""
        bits = re.search(r"\d+", self.dtype)
        return self.numbers * (int(bits.group()) if bits else 8) // 8


@contextmanager
def opened(path: Path, error: type[HeadwiseError] = PlanError, advice: str = AGAIN) -> Iterator[Any]:
    """A file whose header holds together: names, sizes and places of all tensors fit each other and the file."""
    regular(path, error, advice)
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError, OverflowError, MemoryError) as problem:
        reason = " ".join(str(problem).split())[:200]
        raise error(f"{path} is not a whole safetensors file ({reason}); {advice}.") from None


def header(path: Path, error: type[HeadwiseError] = PlanError, advice: str = AGAIN) -> dict[str, Entry]:
    """Names and sizes of a file's tensors; no number is read."""
    with opened(path, error, advice) as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: Entry(path, tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}


def metadata(path: Path, error: type[HeadwiseError] = PlanError, advice: str = AGAIN) -> dict[str, str]:
    """The words that a file carries beside its tensors."""
    with opened(path, error, advice) as file:
        return dict(file.metadata() or {})


def read(
    path: Path, device: torch.device | str = "cpu", error: type[HeadwiseError] = PlanError, advice: str = AGAIN
) -> Tensors:
    """Copies of all tensors; nothing stays mapped."""
    with opened(path, error, advice) as file:
        return {name: file.get_tensor(name).clone().to(device) for name in file.keys()}  # noqa: SIM118


def require(
    found: Tensors,
    shapes: Mapping[str, Sequence[int]],
    path: Path,
    error: type[HeadwiseError] = PlanError,
    advice: str = AGAIN,
    integers: bool = False,
) -> None:
    """Refuse tensors that lack one of these names, have it in another size, or hold what is not a finite number.

    Whole numbers are refused too unless `integers` is set.
    """
    for name, shape in shapes.items():
        if name not in found:
            raise error(f"{path} lacks the tensor {name}; {advice}.")
        tensor = found[name]
        if tuple(tensor.shape) != tuple(shape):
            raise error(f"{path}: {name} is {_size(tensor.shape)} where {_size(shape)} belongs; {advice}.")
        if not (tensor.is_floating_point() or integers) or not bool(torch.isfinite(tensor).all()):
            raise error(f"{path}: {name} holds values that are not finite numbers; {advice}.")


def _size(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a single number"
