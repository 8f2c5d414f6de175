"""Cutting a trained model by the first paper's rules: its taper, and its theory with measured quantities.

The theory's facts are measured: lags that a layer reads (`lags.contribution`), whether its softmax saturates
(`saturation.slope`), the norm of its Jacobian, and the energy that dimensions carry (`spectrum.*_energy_lost`). Where
early layers end is measured too: the depth that best separates layers that saturate from those that do not. No loss is
ever measured, which is what sets the theory apart from the exact strategy.
"""

from __future__ import annotations

from headwise.errors import PlanError
from headwise.research.designs.bound import Facts, by_theory
from headwise.research.designs.taper import least_steep
from headwise.strategies._options import finish, menus, ways
from headwise.strategies._program import solve
from headwise.types import Budget, ModelShape, Plan, Reading, Readings

SATURATED = -0.5  # slope of the Jacobian's norm against length below which a layer counts as saturating
NEEDED = (
    "lags.contribution",
    "saturation.slope",
    "saturation.jacobian_norm",
    "saturation.logit_growth",
    "spectrum.logit_energy_lost",
    "spectrum.output_energy_lost",
)
Budgets = tuple[Budget, ...]


def taper(
    source: ModelShape, readings: Readings, budgets: Budgets, allow: tuple[str, ...], reverse: bool = False
) -> Plan:
    """The least steep taper that meets every budget; of the two ways to shrink keys the one that damages less.

    `reverse` spares the last layers in place of the first: the same taper of the layers in reverse order.
    """
    turn = slice(None, None, -1 if reverse else 1)
    offered = [menus(source, readings, allow, (way,))[turn] for way in ways(readings)]
    found = least_steep(source.with_layers(source.layers[turn]), offered, budgets, allow)
    name = "reversed taper" if reverse else "taper"
    return finish(source, readings, found.layers[turn], found.damage, name, budgets, 0)


def bound(source: ModelShape, readings: Readings, budgets: Budgets, allow: tuple[str, ...]) -> Plan:
    """The plan of least total bound; its predicted damage is what the probes say, not what the theory says."""
    offered = menus(source, readings, allow, ways(readings))
    found = solve(source, by_theory(source, offered, facts_of(readings)), budgets, allow)
    known = [{c.sizes: c.damage for kind in (m.heads, m.qk, m.v, m.mlp) for c in kind} for m in offered]
    rows = found.choices[:-1]  # without those of the model as a whole
    damage = sum(prices[choice.sizes] for prices, row in zip(known, rows, strict=True) for choice in row)
    return finish(source, readings, found.targets, damage, "bound", budgets, 0, gap=found.gap)


def facts_of(readings: Readings) -> list[Facts]:
    """The measured facts of every layer; readings without them are refused."""
    curves = {kind: readings.curve(kind) for kind in NEEDED}
    if lost := [kind for kind, reading in curves.items() if reading is None]:
        raise PlanError(
            f"the bound needs the reading {lost[0]}, which these readings do not hold; probe again with this version: "
            f"headwise probe {readings.model} --out FOLDER."
        )
    found = {kind: reading for kind, reading in curves.items() if reading is not None}
    slopes = [sum(row) / len(row) for row in found["saturation.slope"].values]
    border = early_layers(slopes)
    return [
        Facts(
            rho=tuple(v for lag, v in _row(found["lags.contribution"], layer).items() if lag > 0),
            late=layer >= border,
            jacobian_norm=_last(found["saturation.jacobian_norm"], layer),
            logit_spread=_last(found["saturation.logit_growth"], layer),
            logits_lost=_row(found["spectrum.logit_energy_lost"], layer),
            outputs_lost=_row(found["spectrum.output_energy_lost"], layer),
        )
        for layer in range(len(slopes))
    ]


def _row(reading: Reading, layer: int) -> dict[int, float]:
    return dict(zip(reading.ticks[layer], reading.values[layer], strict=True))


def _last(reading: Reading, layer: int) -> float:
    """The value at the largest tick."""
    return max(zip(reading.ticks[layer], reading.values[layer], strict=True))[1]


def early_layers(slopes: list[float]) -> int:
    """How many layers count as early: the border with most saturating layers behind it and most others before it.

    >>> early_layers([-0.1, -0.9, -0.2, -0.8, -0.9])
    3
    """
    saturated = [slope < SATURATED for slope in slopes]

    def right(border: int) -> int:
        return saturated[:border].count(False) + saturated[border:].count(True)

    return max(range(len(slopes), -1, -1), key=right)
