"""Probe once, then ask what several budgets would cost: planning needs no model and no GPU.

python examples/budget_sweep.py [RUN_FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import headwise

DIMENSIONS = ("qk", "v")


def main(out: Path, **settings: int) -> None:
    """Print the predicted damage of a cache in fewer bits and of one with fewer dimensions, for five budgets."""
    if not (out / "readings.json").exists():
        headwise.probe("embedded", out, **settings)  # for no budget yet: everything is priced
    print("cache     bits   dimensions   (predicted damage, nats per token)")
    for share in (50, 40, 30, 25, 20):
        bits, dimensions = (headwise.allocate(out, f"kv={share}%", allow=units) for units in (("bits",), DIMENSIONS))
        print(f"{share:4}%   {bits.predicted_damage:.4f}   {dimensions.predicted_damage:10.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/sweep"))
