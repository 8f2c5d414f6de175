"""Whether a run has room where it writes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from headwise import budgets as prices
from headwise import cost
from headwise.errors import OutputError
from headwise.heal._options import Options
from headwise.runfolder import Settings
from headwise.types import Budget, ModelShape

KEPT = {"distill": 12, "blockwise": 4}  # bytes of unfinished healing for every parameter: weights and their averages
CLEARLY = 0.9  # of the estimate: with less than that free, a run cannot end well


def check(settings: Settings, out: Path, shape: ModelShape, budgets: tuple[Budget, ...]) -> None:
    """Refuse a folder that cannot be written, or whose disk is clearly too full."""
    parent = nearest(out)
    if not parent.is_dir():
        raise OutputError(f"{parent} is a file; choose another --out.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"{out} cannot be written (no permission in {parent}); choose another --out.")
    wanted, free = estimate(settings, shape, budgets) - _written(out), free_bytes(parent)
    if free is not None and free < CLEARLY * wanted:
        raise OutputError(
            f"this run writes about {wanted / 1e9:,.2f} GB and {free / 1e9:,.2f} GB are free at {parent}; free some "
            "space, or choose an --out on another disk."
        )


def nearest(path: Path) -> Path:
    """The path itself or the nearest folder above it that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def free_bytes(path: Path) -> int | None:
    """Bytes that can be written there; None where a file system does not say."""
    usage = shutil.disk_usage(path)
    return usage.free if usage.total else None


def estimate(settings: Settings, shape: ModelShape, budgets: tuple[Budget, ...]) -> float:
    """Bytes that a run writes: second moments of every round, the model, and what a healing keeps until it is done."""
    mlp = not settings.only_kv and "mlp" in settings.allow
    moments = sum(
        2 * layer.kv_heads * layer.qk_dim**2 + layer.query_heads * layer.v_dim**2 + mlp * layer.mlp_width**2
        for layer in shape.layers
    )
    total = 4.0 * moments * settings.rounds
    if settings.budgets:
        whole = cost.parameters(shape)
        limits = [budget.limit / prices.price(budget, shape) for budget in budgets if budget.name == "params"]
        kept = whole * min([1.0, *limits])
        whole_weights = Options.parse(settings.heal_options).lora is None
        total += kept * (shape.element_bytes + (KEPT.get(settings.heal, 0) if whole_weights else 0))
    return total


def _written(out: Path) -> int:
    """Bytes that an unfinished run in the folder has written already."""
    return sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) if (out / "run.json").exists() else 0
