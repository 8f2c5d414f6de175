"""Whether a probing priced what budgets need: a plan would never cut what has no price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headwise import budgets as prices
from headwise.strategies._options import applicable, ways
from headwise.types import Budget, ModelShape, Readings


def unpriced(source: ModelShape, readings: Readings, budgets: Sequence[Budget], allow: Sequence[str]) -> str | None:
    """Why these budgets cannot be planned for: something that may be cut for them was not priced. None where all was.

    Probing for the cache alone prices no MLP and no rotary pairs: a plan for parameters would never cut them.
    """
    wanted = [budget for budget in budgets if budget.name != "kv"]
    texts = " ".join(f"--budget {budget.text}" for budget in budgets)
    again = f"probe again: headwise probe {readings.model} {texts} --out NEW_FOLDER, with the same --allow."
    coded = "bits" in applicable(source, allow, budgets) and readings.curve("damage.k_bits") is not None
    if {"qk", "v"} & set(allow) and not coded and bits_alone(readings):
        what = " and ".join(budget.text for budget in budgets)
        return f"{what} needs prices of dimensions, and this probing priced bits of the cache alone; {again}"
    if wanted and not coded and applicable(source, allow, wanted) == ("bits",):
        return f"{wanted[0].text} needs prices of bits of the cache, and this probing has none; {again}"
    if "weights" in applicable(source, allow, budgets) and readings.curve("damage.w_q") is None:
        return f"{wanted[0].text} needs prices of bits of weights, and this probing has none; {again}"
    if "mlp" in allow and any(_counts_mlp(budget, source) for budget in wanted) and not _mlp_priced(source, readings):
        return f"{wanted[0].text} needs prices of MLP widths, and this probing was for the cache alone; {again}"
    if "qk" in allow and wanted and source.grain.rotary and not _pairs_priced(readings):
        return f"{wanted[0].text} needs prices of rotary pairs, and this probing was for the cache alone; {again}"
    if "depth" in allow and readings.curve("damage.depth") is None:
        return f"--allow names depth, and this probing did not price whole layers; {again}"
    return None


def _counts_mlp(budget: Budget, source: ModelShape) -> bool:
    """Whether a narrower MLP is cheaper under a budget."""
    if prices.joint(budget):
        return True
    wide = max(source.layers, key=lambda layer: layer.mlp_width)
    narrow = replace(wide, mlp_width=min(1, wide.mlp_width))
    return prices.layer_price(budget, source, narrow) < prices.layer_price(budget, source, wide)


def bits_alone(readings: Readings) -> bool:
    """Whether bits of the cache were priced and no dimensions."""
    kinds = ("damage.qk_projected", "damage.qk_pairs", "damage.v")
    return readings.curve("damage.k_bits") is not None and not any(readings.curve(kind) for kind in kinds)


def _pairs_priced(readings: Readings) -> bool:
    return readings.curve("damage.qk_pairs") is not None and "qk_pairs" in ways(readings)


def _mlp_priced(source: ModelShape, readings: Readings) -> bool:
    """Whether some layer's MLP has more than one price, or none could."""
    if all(len(source.grain.mlp_sizes(layer.mlp_width)) == 1 for layer in source.layers):
        return True
    reading = readings.curve("damage.mlp")
    return reading is not None and any(len(ticks) > 1 for ticks in reading.ticks)
