"""Cutting in rounds: damage adds up only while it is small, so go part of the way, probe and solve again."""

from dataclasses import replace

from headwise import budgets as prices
from headwise.stages.source import Fitted
from headwise.types import Budget, LayerKeep, LayerShape, ModelShape, Plan


def budgets_of_round(budgets: tuple[Budget, ...], source: ModelShape, number: int, rounds: int) -> tuple[Budget, ...]:
    """The budgets of round `number` (from 1): equal factors from the source's price to the limit."""
    out = []
    for budget in budgets:
        full = prices.source_price(budget, source)
        share = min(1.0, budget.limit / full) ** (number / rounds)
        out.append(budget if number == rounds else replace(budget, limit=share * full))
    return tuple(out)


def joined(earlier: Fitted, later: Fitted) -> Fitted:
    """What two rounds made, one after the other: the later model, one plan for both, all healings."""
    healings = [*earlier.healings, *later.healings]
    return Fitted(later.model, compose(earlier.plan, later.plan), healings, later.rehearsed)


def compose(first: Plan, second: Plan) -> Plan:
    """One plan that does what two plans do one after the other; damages add up."""
    keep, target = list(first.keep), list(first.target.layers)
    for index, source, after, later in zip(
        first.kept_layers, second.source.layers, second.target.layers, second.keep, strict=True
    ):
        target[index] = after
        keep[index] = (
            LayerKeep() if after.gone else _compose_keep(keep[index], later, first.source.layers[index], source)
        )
    return replace(
        second,
        source=first.source,
        target=first.source.with_layers(tuple(target)),
        keep=tuple(keep),
        predicted_damage=first.predicted_damage + second.predicted_damage,
        free_damage=None if second.free_damage is None else (first.free_damage or 0.0) + second.free_damage,
        frontier=first.frontier,
        model=first.model,
    )


def _compose_keep(first: LayerKeep, second: LayerKeep, source: LayerShape, middle: LayerShape) -> LayerKeep:
    def through(before: tuple[int, ...] | None, after: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return before if after is None else after if before is None else tuple(before[i] for i in after)

    groups = second.kv_heads if second.kv_heads is not None else tuple(range(middle.kv_heads))
    pairs = first.rotary_pairs
    if pairs is None and second.rotary_pairs is not None:
        pairs = (tuple(range(source.qk_width // 2)),) * middle.kv_heads
    if pairs is not None:
        pairs = tuple(pairs[g] for g in groups)
        if second.rotary_pairs is not None:
            pairs = tuple(tuple(a[i] for i in b) for a, b in zip(pairs, second.rotary_pairs, strict=True))
    return LayerKeep(
        query_heads=through(first.query_heads, second.query_heads),
        kv_heads=through(first.kv_heads, second.kv_heads),
        rotary_pairs=pairs,
        mlp_channels=through(first.mlp_channels, second.mlp_channels),
    )
