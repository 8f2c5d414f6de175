"""Readings and plans of invented models whose cache is coded, for tests of the report."""

from __future__ import annotations

from dataclasses import replace

from headwise import strategies
from headwise.budgets import parse
from headwise.cost import kv_bytes_per_token
from headwise.stages import frontier
from headwise.types import (
    BITS,
    Grain,
    LayerKeep,
    LayerShape,
    ModelShape,
    Plan,
    Reading,
    Readings,
    Sweep,
    code_bytes,
)

ALLOW, ROW, LAYERS = ("qk", "v", "bits"), 256, 3
LAYER = LayerShape(8, 1, ROW, ROW, 128, ROW, pooled=4, v_width=ROW)
GRAIN = Grain(64, 64, 64, 64, 64, 64, False, True)


def code(**counts: int) -> tuple[int, ...]:
    """A code by its widths: code(b4=96, b2=32)."""
    return tuple(counts.get(f"b{width}", 0) for width in BITS)


def codes(layer: int, part: str) -> tuple[tuple[int, ...], ...]:
    """Codes of a row, finest first; every layer and part has others."""
    other = 8 * layer + (24 if part == "v" else 0)
    found = [code(b8=ROW)]
    for width in range(7, 0, -1):
        more = 8 + other
        found.append(
            tuple(map(sum, zip(code(**{f"b{width + 1}": more}), code(**{f"b{width}": ROW - more}), strict=True)))
        )
    return (*found, code(b2=8, b1=64 - other // 2), code(b1=8 + other))


def curve(part: str, probe: str, scale: float) -> Reading:
    ticks, values = [], []
    for layer in range(LAYERS):
        sizes = [code_bytes(one, ROW) for one in codes(layer, part)]
        assert sizes == sorted(set(sizes), reverse=True)
        ticks.append((2 * ROW, *sizes))
        values.append((0.0, *(scale * (layer + 1) * 4.0 ** -(8 * size / ROW) for size in sizes)))
    what = {"k": "keys", "v": "values"}[part]
    return Reading(
        probe, f"damage.{part}_bits", f"bytes of a row's {what}", tuple(ticks), tuple(values), None,
        "nats per token", f"Loss increase with {what} in fewer bits.", 64, 0,
    )  # fmt: skip


def sizes_curve(name: str, axis: str) -> Reading:
    sizes = (256, 192, 128, 64)
    values = tuple(tuple(0.1 * (layer + 1) * (1 - size / ROW) for size in sizes) for layer in range(LAYERS))
    meaning = f"Predicted loss increase by {axis}."
    return Reading("sensitivity", name, axis, (sizes,) * LAYERS, values, None, "nats per token", meaning, 64, 0)


def read(model: str = "acme/coded") -> Readings:
    source = ModelShape("llama", 256, 1000, True, (LAYER,) * LAYERS, GRAIN)
    probed = [curve(part, probe, scale) for probe, scale in (("fisher", 1.0), ("swap", 2.0)) for part in "kv"]
    named = [sizes_curve("damage.qk_projected", "qk_dim"), sizes_curve("damage.v", "v_dim")]
    orders = tuple({f"{part}_bits": codes(layer, part) for part in "kv"} for layer in range(LAYERS))
    return Readings(model, source, (*named, *probed), orders, 64, 0, 1.5)


def coded(budget: str = "kv=25%", model: str = "acme/coded") -> tuple[Readings, Plan, Sweep]:
    readings = read(model)
    plan = strategies.allocate(readings, (parse(budget, readings.source),), "exact", ALLOW)
    sweep = frontier.solve(readings, plan, ALLOW)
    assert sweep is not None
    return readings, plan, sweep


def hand_made() -> Plan:
    """One layer of pooled rows and one without; one that is gone; and one that is not coded."""
    plain = LayerShape(4, 2, 64, 64, 128, 64)
    target = (
        replace(LAYER, k_code=code(b8=8, b4=96), v_code=code(b1=32)),
        replace(plain, k_code=code(b5=64), v_code=code(b3=16)),
        LayerShape(0, 0, 0, 0, 0, 0),
        plain,
    )
    source = ModelShape("llama", 256, 1000, True, (LAYER, plain, plain, plain), GRAIN)
    whole = source.with_layers(target)
    budget = parse("kv=50%", source)
    spent = {"kv": float(kv_bytes_per_token(whole))}
    return Plan("m", source, whole, (LayerKeep(),) * 4, "exact", (budget,), spent, 0.01, 0, 0.0, False, ())
