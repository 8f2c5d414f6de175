"""What each layer could become, what that would damage and what it would cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

from headwise import budgets as prices
from headwise.errors import BudgetError, PlanError
from headwise.types import (
    DAMAGE,
    GONE,
    UNIT_OF,
    UNITS,
    Budget,
    Grain,
    LayerKeep,
    LayerShape,
    ModelShape,
    Plan,
    Readings,
    Unit,
    under_time,
)
from headwise.types.unit import Order
from headwise.types.weights import MATRICES, WHOLE

PRICED = tuple(unit for unit in UNITS if unit not in ("rank", "bits", "weights"))  # what any probing prices


class Choice(NamedTuple):
    """One size of one unit: the fields of LayerShape that it sets, and its damage."""

    sizes: tuple[tuple[str, Any], ...]
    damage: float


@dataclass(frozen=True, slots=True)
class LayerMenu:
    """All choices of a layer. Any head count goes with any of the others; damages add up."""

    heads: tuple[Choice, ...]
    qk: tuple[Choice, ...]
    v: tuple[Choice, ...]
    mlp: tuple[Choice, ...]
    weights: dict[str, tuple[Choice, ...]] = field(default_factory=dict)  # bits of matrices, where they are chosen
    whole: tuple[Choice, ...] = ()  # keys and values that are not coded, where others are: both or neither


def ways(readings: Readings) -> tuple[str, ...]:
    """The query/key curves that may compete: rotary pairs only where they were priced by the same probe.

    A measured price beside a merely predicted one would favour the probe with the lower prices.
    """
    projected, pairs = (readings.curve(f"damage.{name}") for name in ("qk_projected", "qk_pairs"))
    comparable = projected is None or pairs is None or projected.probe == pairs.probe
    return ("qk_projected", "qk_pairs") if comparable else ("qk_projected",)


def menus(
    source: ModelShape, readings: Readings, allow: Iterable[str], ways: Iterable[str], whole: bool = False
) -> list[LayerMenu]:
    """The menu of every layer. `ways` names the query/key curves to offer, such as qk_projected and qk_pairs.

    `whole` also offers rows that are not coded, where rows can be.
    """
    allowed, ways = set(allow), tuple(ways)

    def menu(layer: int, shape: LayerShape) -> LayerMenu:
        def priced(unit: Unit) -> list[tuple[int, float]]:
            together = shape.pooled > 1 and unit.allow in ("heads", "kv_heads")  # heads that share a row stay
            reading = readings.curve(unit.kind) if unit.allow in allowed and not together else None
            return [] if reading is None else list(zip(reading.ticks[layer], reading.values[layer], strict=True))[1:]

        found = _menu(shape, ways, source.grain.folds, priced, readings.orders[layer])
        sizes = {"qk": "qk_dim", "v": "v_dim", "mlp": "mlp_width"}
        taken: dict[str, Any] = {of: _taken(getattr(found, of), of, name, source.grain) for of, name in sizes.items()}
        both = (_unchanged(shape, ("qk_width", "qk_dim")), _unchanged(shape, ("v_dim",)))
        coded = whole and any(name == "k_code" for name, _ in found.qk[0].sizes)
        return replace(found, **taken, weights=_bits_of(priced), whole=both if coded else ())

    return [menu(layer, shape) for layer, shape in enumerate(source.layers)]


def _bits_of(priced: Callable[[Unit], list[tuple[int, float]]]) -> dict[str, tuple[Choice, ...]]:
    """The widths of every matrix of a layer whose bits are chosen."""
    offered = {name: priced(UNIT_OF[f"{DAMAGE}w_{name}"]) for name in MATRICES}
    return {name: widths(f"w_{name}", sizes) for name, sizes in offered.items() if sizes}


def widths(field: str, sizes: list[tuple[int, float]]) -> tuple[Choice, ...]:
    """Bits of a matrix, all of them first."""
    return (Choice(((field, WHOLE),), 0.0), *(Choice(((field, bits),), damage) for bits, damage in sizes))


def _taken(choices: tuple[Choice, ...], of: str, name: str, grain: Grain) -> tuple[Choice, ...]:
    """The choices whose size suits the engine that a model is planned for; the layer's own where none does."""
    fitting = tuple(c for c in choices if name not in dict(c.sizes) or grain.takes(of, dict(c.sizes)[name]))
    return fitting or choices[:1]


def pairs(menu: LayerMenu, equal: bool) -> list[tuple[Choice, Choice]]:
    """Sizes of queries and keys with sizes of values; where they must be `equal`, only those that are."""
    every = list(product(menu.qk, menu.v))
    same = [(qk, v) for qk, v in every if dict(qk.sizes).get("qk_dim") == dict(v.sizes).get("v_dim")]
    return same or every[:1] if equal else every


def applicable(source: ModelShape, allow: Iterable[str], budgets: Sequence[Budget]) -> tuple[str, ...]:
    """The units that help under some budgets: bits where what they are of is limited and has none yet.

    Where time is limited, rows are coded only if no sizes of attention are cut, and weights stay in 16 bits.
    """
    timed, stored = any(b.workload for b in budgets), any(map(prices.of_weights, budgets))
    helps = {
        "bits": source.codable and (timed or any(map(prices.of_cache, budgets))),
        "weights": not timed and source.packable and stored,
        "rank": not timed and not stored,
    }
    return tuple(unit for unit in (under_time(allow) if timed else allow) if helps.get(unit, True))


def legal_menus(source: ModelShape, allow: Iterable[str]) -> list[LayerMenu]:
    """Every legal size of every layer without a price: for new models, where there is nothing to damage yet."""
    allowed = set(allow)

    def menu(shape: LayerShape) -> LayerMenu:
        def free(unit: Unit) -> list[tuple[int, float]]:
            return [(size, 0.0) for size in unit.sizes(shape, source.grain)[1:] if unit.allow in allowed]

        return _menu(shape, ("qk_projected",), True, free)

    return [menu(shape) for shape in source.layers]


def _menu(
    shape: LayerShape,
    ways: tuple[str, ...],
    folds: bool,
    priced: Callable[[Unit], list[tuple[int, float]]],
    order: Order | None = None,
) -> LayerMenu:
    """A layer's choices. `priced` gives every size of a unit below the layer's own, with its damage.

    Where rows can be coded, all choices are codes: the finest does no damage, and one of no bits drops a direction.
    """

    def choices(*curves: str, same: tuple[str, ...]) -> tuple[Choice, ...]:
        units = [UNIT_OF[DAMAGE + curve] for curve in curves]
        cut = [(unit.sets(shape, size, folds, order or {}), damage) for unit in units for size, damage in priced(unit)]
        made = tuple(Choice(tuple(fields.items()), damage) for fields, damage in cut)
        return made if coded else (_unchanged(shape, same), *made)

    coded = bool(priced(UNIT_OF["damage.k_bits"]) and priced(UNIT_OF["damage.v_bits"]))
    keys, values = (("k_bits",), ("v_bits",)) if coded else (ways, ("v",))

    groups = [(shape.kv_heads, 0.0), *priced(UNIT_OF["damage.kv_heads"])]
    sharing = [(shape.queries_per_group, 0.0), *priced(UNIT_OF["damage.heads"])]
    return LayerMenu(
        heads=tuple(Choice((("query_heads", g * n), ("kv_heads", g)), a + b) for g, a in groups for n, b in sharing),
        qk=choices(*keys, same=("qk_width", "qk_dim")),
        v=choices(*values, same=("v_dim",)),
        mlp=(_unchanged(shape, ("mlp_width",)), *_narrower(shape, priced)),
    )


def _narrower(shape: LayerShape, priced: Callable[[Unit], list[tuple[int, float]]]) -> list[Choice]:
    return [Choice((("mlp_width", size),), damage) for size, damage in priced(UNIT_OF["damage.mlp"])]


def _unchanged(shape: LayerShape, fields: tuple[str, ...]) -> Choice:
    return Choice(tuple((name, getattr(shape, name)) for name in fields), 0.0)


def depth_steps(readings: Readings, allow: Iterable[str]) -> list[tuple[tuple[int, ...], float]]:
    """Which layers are gone after 0, 1, 2, ... removals, and what that damages, as far as it was measured."""
    reading = readings.curve("damage.depth") if "depth" in allow else None
    if reading is None:
        return [((), 0.0)]
    return [(readings.depth[:count], reading.at(0, count)) for count in reading.ticks[0]]


def without_layers(offered: list[LayerMenu], gone: Iterable[int]) -> list[LayerMenu]:
    """The menus with nothing to choose where a layer is gone."""
    nothing, lost = _menu(GONE, (), False, lambda unit: []), set(gone)
    return [nothing if index in lost else menu for index, menu in enumerate(offered)]


def with_choices(shape: LayerShape, *choices: Choice) -> LayerShape:
    """The layer with the chosen sizes."""
    sizes: dict[str, Any] = dict(pair for choice in choices for pair in choice.sizes)
    return replace(shape, **sizes)


def keep_for(shape: LayerShape, target: LayerShape, order: Order, pairs: str = "qk_pairs") -> LayerKeep:
    """Which units stay when a layer goes from `shape` to `target`: the first of each order, by index."""
    if target.gone:
        return LayerKeep()
    groups = sorted(order["kv_heads"][0][: target.kv_heads]) if target.kv_heads < shape.kv_heads else None
    kept_groups = range(shape.kv_heads) if groups is None else groups
    heads = None
    if target.query_heads < shape.query_heads:
        n, per_group = target.queries_per_group, shape.queries_per_group
        heads = tuple(g * per_group + h for g in kept_groups for h in sorted(order["heads"][g][:n]))
    rotary = None
    if target.qk_width < shape.qk_width and pairs in order:
        rotary = tuple(tuple(sorted(order[pairs][g][: target.qk_width // 2])) for g in kept_groups)
    channels = tuple(sorted(order["mlp"][0][: target.mlp_width])) if target.mlp_width < shape.mlp_width else None
    return LayerKeep(
        query_heads=heads,
        kv_heads=None if groups is None else tuple(groups),
        rotary_pairs=rotary,
        mlp_channels=channels,
    )


def by_weight(readings: Readings) -> Readings:
    """Readings with units in the order of the size of their weights, where the probe recorded it."""
    kinds = ("kv_heads", "heads", "mlp")
    orders = tuple({**o, **{k: o[f"{k}_weight"] for k in kinds if f"{k}_weight" in o}} for o in readings.orders)
    return replace(readings, orders=orders)


def finish(
    source: ModelShape,
    readings: Readings,
    targets: list[LayerShape],
    damage: float,
    strategy: str,
    budgets: tuple[Budget, ...],
    seed: int,
    pairs: str = "qk_pairs",
    ends: dict[str, Any] | None = None,
    **more: object,
) -> Plan:
    """A plan from the chosen sizes: what is kept, what is spent. `ends` are the bits of the tables of words."""
    target = replace(source.with_layers(tuple(targets)), **(ends or {}))
    keep = tuple(keep_for(*row, pairs) for row in zip(source.layers, targets, readings.orders, strict=True))
    return Plan(
        model=readings.model,
        source=source,
        target=target,
        keep=keep,
        strategy=strategy,
        budgets=budgets,
        spent={budget.key: prices.price(budget, target) for budget in budgets},
        predicted_damage=damage,
        seed=seed,
        **more,  # type: ignore[arg-type]
    )


def affordable(budgets: tuple[Budget, ...], model: ModelShape) -> bool:
    """Whether a model meets every budget."""
    return all(prices.price(budget, model) <= budget.limit * (1 + 1e-12) for budget in budgets)


def refuse(
    source: ModelShape,
    budgets: tuple[Budget, ...],
    smallest: Sequence[float],
    allow: Sequence[str],
    possible: Sequence[str] = PRICED,
) -> BudgetError:
    """The error for budgets that no plan meets: what is out of reach, how far one can go, what would help.

    `smallest` holds the least that each budget can come to when it is the only one; `possible` what could be allowed.
    Bits need prices of their own, so only a check before probing proposes them.
    """
    allow = [unit for unit in allow if unit != "weights" or any(map(prices.of_weights, budgets))]
    pooled = ("heads", "kv_heads") if any(layer.pooled > 1 for layer in source.layers) else ()  # which go only together
    more = [unit for unit in possible if unit not in (*allow, *pooled)]
    hint = f", or allow more with --allow {','.join([*allow, *more])}" if more else ""
    for budget, least in zip(budgets, smallest, strict=True):
        if least > budget.limit:
            share = least / prices.source_price(budget, source) * 100
            at = "".join(budget.text.partition("@")[1:])  # a share is of the price at that length
            text = f"{budget.name}={-(-share * 10 // 1) / 10:g}%{at}"  # rounded up, so that the proposal can be met
            again = f"Try --budget {text}" if share <= 100 else "Heads that share no rows may be faster: --pool none"
            if "bits" in allow and budget.workload:
                hint = "; or cut sizes of attention and no bits: --allow qk,v,mlp"
            elif "bits" in allow and not prices.of_cache(budget):
                others = ",".join(unit for unit in allow if unit != "bits") or "qk,v,mlp"
                hint += f"; coded rows add parameters, dimensions do not: --allow {others}"
            if source.grain.heads:
                hint += ", or plan with all sizes: leave out --serve"
            return BudgetError(
                f"{budget.text} is out of reach: with everything that may be cut ({', '.join(allow)}) at its smallest "
                f"legal size, {share:.1f}% remains. {again}{hint}."
            )
    texts = " and ".join(budget.text for budget in budgets)
    return BudgetError(f"no plan meets {texts} together, though each alone can be met. Loosen one{hint}.")


def nothing_portable(source: ModelShape) -> PlanError:
    """The error for units of which stock code can follow none."""
    return PlanError(
        f"a portable plan has nothing to cut. {portable_limits(source)} Leave out --portable, or change --allow."
    )


def portable_limits(source: ModelShape) -> str:
    possible = PRICED if source.grain.portable is None else source.grain.portable
    return f"Stock {source.family} code can only follow cuts of: {', '.join(possible) or 'nothing'}."
