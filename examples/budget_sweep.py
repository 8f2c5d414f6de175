"""Probe once, then ask what several budgets would cost: planning needs no model and no GPU.

python examples/budget_sweep.py [RUN_FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import headwise


def main(out: Path, **settings: int) -> None:
    """Print the predicted damage of the exact plan and of the same sizes everywhere, for four budgets."""
    if not (out / "readings.json").exists():
        headwise.probe("embedded", out, budgets=("kv=50%",), **settings)
    print("cache   exact    uniform   (predicted damage, nats per token)")
    for share in (90, 75, 60, 50):
        exact, uniform = (headwise.allocate(out, f"kv={share}%", strategy=name) for name in ("exact", "uniform"))
        print(f"{share:4}%   {exact.predicted_damage:.4f}   {uniform.predicted_damage:.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/sweep"))
