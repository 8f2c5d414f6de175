"""Text that a trained model writes, so that the lowest loss there is on it is known: the writer's own.

Rows are sampled from stories15M at temperature 1, on the device, and kept in the ignored folder `carry/stories`: a
resumed experiment does not write them again. Tokens that never occur are left out of the vocabulary, which
changes no conditional probability that matters and keeps embeddings small.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments._provenance import ROOT, used
from headwise import families
from headwise.data import own_text
from headwise.errors import DataError

SEED = 0
KEPT = ROOT / "carry" / "stories"
AT_ONCE = 64  # rows whose loss is computed together


def rows_of(
    assets: Path | None, count: int, held: int, length: int, device: torch.device
) -> tuple[Tensor, Tensor, float]:
    """Rows to learn from, rows held out (tokens renumbered from 0), and the writer's loss on the latter."""
    folder = None if assets is None else assets / "stories15M"
    if folder is None or not folder.is_dir():
        raise DataError("stories15M is not among the assets; give --assets a folder that holds stories15M.")
    path = KEPT / f"{count}-{held}-{length}-{SEED}.npz"
    if not path.exists():
        model, _ = families.load(str(used(folder)), str(device))
        rows = own_text.written_by(model, count + held, length, SEED)
        save(path, rows.cpu().numpy(), own_loss(model, rows[count:]))
    kept = np.load(used(path))
    rows = torch.from_numpy(kept["rows"].astype(np.int64))
    return rows[:count].to(device), rows[count:].to(device), float(kept["loss"])


def save(path: Path, rows: np.ndarray[Any, Any], loss: float) -> None:
    """Keep rows, renumbered; whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.npz")
    np.savez(part, rows=compact(rows), loss=loss)
    part.replace(path)


def compact(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Tokens renumbered so that those that occur are 0, 1, 2, ...

    >>> compact(np.array([[7, 900], [7, 8]])).tolist()
    [[0, 2], [0, 1]]
    """
    _, numbers = np.unique(rows, return_inverse=True)
    return numbers.reshape(rows.shape).astype(np.uint16)


@torch.no_grad()
def own_loss(model: Any, rows: Tensor) -> float:
    """Nats per token of the writer on rows that it wrote: no model can do better on average."""
    total, count = 0.0, 0
    for batch in rows.to(model.device).split(AT_ONCE):
        logits = model(batch).logits[:, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"))
        count += batch[:, 1:].numel()
    return total / count
