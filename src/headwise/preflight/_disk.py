"""Whether a run has room where it writes."""

import os
import shutil
from pathlib import Path

from headwise import budgets as prices
from headwise import cost
from headwise.errors import OutputError
from headwise.runs.heal_options import Options
from headwise.runs.settings import Settings
from headwise.types import Budget, ModelShape

KEPT = {"distill": 12, "blockwise": 4}  # bytes of unfinished healing for every parameter: weights and their averages
CLEARLY = 0.9  # of the estimate: with less than that free, a run cannot end well


def check(settings: Settings, out: Path, shape: ModelShape, budgets: tuple[Budget, ...]) -> list[str]:
    """Refuse a folder that cannot be written, or whose disk is clearly too full; a note where it may become so."""
    parent = nearest(out)
    if not parent.is_dir():
        raise OutputError(f"{parent} is a file; choose another --out.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"{out} cannot be written (no permission in {parent}); choose another --out.")
    free = free_bytes(parent)
    left, healing = estimate(settings, shape, budgets)
    left -= _written(out)
    if free is None or free >= left + healing:
        return []
    if free < CLEARLY * left:
        raise OutputError(
            f"this run writes about {in_units(left)}, and {in_units(free)} are free at {parent}; free some space, or "
            "choose an --out on another disk."
        )
    return [
        f"this run writes about {in_units(left)}, and while it heals up to {in_units(healing)} more; "
        f"{in_units(free)} are free at {parent}."
    ]


def nearest(path: Path) -> Path:
    """The path itself or the nearest folder above it that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def free_bytes(path: Path) -> int | None:
    """Bytes that can be written there; None where a file system does not say."""
    usage = shutil.disk_usage(path)
    return usage.free if usage.total else None


def estimate(settings: Settings, shape: ModelShape, budgets: tuple[Budget, ...]) -> tuple[float, float]:
    """Bytes that a run writes: second moments of every round and the model; and what a long healing keeps meanwhile."""
    mlp = not settings.only_kv and "mlp" in settings.allow
    moments = sum(
        2 * layer.kv_heads * layer.qk_dim**2 + layer.query_heads * layer.v_dim**2 + mlp * layer.mlp_width**2
        for layer in shape.layers
    )
    total = 4.0 * moments * settings.rounds
    if not settings.budgets:
        return total, 0.0
    limits = [budget.limit / prices.price(budget, shape) for budget in budgets if budget.name == "params"]
    kept = cost.parameters(shape) * min([1.0, *limits])
    whole = Options.parse(settings.heal_options).lora is None
    return total + kept * shape.element_bytes, kept * KEPT.get(settings.heal, 0) * whole


def in_units(count: float) -> str:
    """Bytes in words.

    >>> [in_units(count) for count in (1_234, 56_700_000, 8.9e10)]
    ['1.2 kB', '56.7 MB', '89.0 GB']
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e3:,.1f} kB"


def _written(out: Path) -> int:
    """Bytes that an unfinished run in the folder has written already."""
    return sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) if (out / "run.json").exists() else 0
