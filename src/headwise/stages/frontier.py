"""The exact strategy's answer to many limits of a run's first budget: what the report's slider moves along. No torch.

Limits are solved from coarse to fine, so that the answers cover the whole range when time runs out. The remaining ones
are then solved roughly, to a small gap, and exactly when the report is written again.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headwise import budgets as prices
from headwise import strategies
from headwise.errors import HeadwiseError, PlanError
from headwise.runs.dossier import Baseline
from headwise.types import Answer, Budget, LayerShape, ModelShape, Plan, Readings, Sweep

if TYPE_CHECKING:
    from headwise.strategies.exact import Answerer

LEAST = 40  # limits to solve
FLOOR = 3.0  # percent: the least limit where the cache is coded; less is left of keys and values than can be of use
CODED_STEPS = ((15.0, 0.5), (30.0, 1.0), (100.0, 2.0))  # up to so many percent, percent between limits
STEPS = (5.0, 2.0, 1.0, 0.5, 0.25, 0.2, 0.1, 0.05, 0.02, 0.01)  # percent between them: the largest that gives as many
SECONDS = 15.0  # for all exact solves of one call, and again for rough ones; the one that is under way is finished
ROUGH = 1e-3  # relative gap at which a solve may stop when time is short: finer than any drawing shows
METHOD = 1  # raised when the solver would answer otherwise to the same question


def fingerprint(readings: Readings, plan: Plan, allow: tuple[str, ...]) -> str:
    """A hash of everything that the answers depend on; the first budget's limit is not part of it: all are answered."""
    curves = [reading.to_json() for reading in readings.curves if reading.kind.startswith("damage.")]
    first = [(budget.key, budget.length) for budget in plan.budgets[:1]]
    budgets = [*first, *(budget.to_json() for budget in plan.budgets[1:])]
    budgets += [budget.table.to_json() for budget in plan.budgets if budget.table is not None]
    codes = [order[name] for order in readings.orders for name in ("k_bits", "v_bits") if name in order]
    asked = [METHOD, readings.source.to_json(), curves, readings.depth, budgets, allow, *([codes] if codes else [])]
    text = json.dumps(asked, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def stored(path: Path, key: str, layers: int | None = None) -> Sweep | None:
    """The sweep in a file, if it answers the same question for so many layers; a damaged one counts as none."""
    try:
        found = Sweep.read(path)
    except HeadwiseError:
        return None
    fits = layers is None or all(len(answer.layers) == layers for answer in found.answers)
    return found if found.key == key and fits else None


def complete(sweep: Sweep, plan: Plan) -> bool:
    """Whether every limit was solved, that of the plan among them."""
    first = plan.budgets[0]
    full = prices.source_price(first, plan.source)
    return sweep.done and (
        first.limit > full or any(abs(a.share * full - first.limit) < 1e-9 * full for a in sweep.answers)
    )


def solve(
    readings: Readings, plan: Plan, allow: tuple[str, ...], known: Sweep | None = None, seconds: float = SECONDS
) -> Sweep | None:
    """The sweep over the plan's first budget; answers that are known already are kept. None where there is no budget.

    `seconds` limits the time for exact answers, and again for rough ones.
    """
    if not plan.budgets:
        return None
    shape, first = readings.source, plan.budgets[0]
    from headwise.strategies import unpriced
    from headwise.strategies.exact import answers  # brings SciPy, which no --help needs

    if missing := unpriced(shape, readings, plan.budgets, allow):
        raise PlanError(missing)

    least, answer = answers(shape, readings, plan.budgets, allow)
    full, most = prices.source_price(first, shape), _most_coded(first, shape, answer)
    wanted = limits(first, least, shape, most)
    table: dict[LayerShape, int] = {}
    found = {a.text: _place(a, known, table) for a in known.answers} if known else {}
    done = True
    for gap in (0.0, ROUGH):
        started = time.monotonic()
        for text in coarse_first(list(wanted)):
            if text in found and (gap or not found[text].rough):
                continue
            if found and time.monotonic() - started > seconds:
                done = False
                break
            if (new := _ask(answer, text, wanted[text], full, table, gap)) is not None:
                found[text] = new
        if done:
            break
    in_order = tuple(sorted((a for t, a in found.items() if t in wanted), key=lambda a: -a.share))
    others = tuple(budget.text for budget in plan.budgets[1:])
    key = fingerprint(readings, plan, allow)
    return Sweep(key, first.name, others, allow, tuple(table), in_order, len(wanted), done)


def _ask(
    answer: Answerer, text: str, limit: float, full: float, table: dict[LayerShape, int], allowed: float
) -> Answer | None:
    """The answer to one limit, its shapes entered into the table."""
    if (solved := answer(limit, allowed)) is None:
        return None
    damage, gap, layers, ends = solved
    places = tuple(table.setdefault(layer, len(table)) for layer in layers)
    return Answer(text, limit / full, damage, gap, places, rough=allowed > 0, ends=ends)


def _place(answer: Answer, sweep: Sweep, table: dict[LayerShape, int]) -> Answer:
    """A known answer with its shapes in a new table."""
    return replace(answer, layers=tuple(table.setdefault(layer, len(table)) for layer in sweep.target(answer)))


def _most_coded(first: Budget, shape: ModelShape, answer: Answerer) -> float | None:
    """The price of the finest code of the cache, above which more room gains nothing; None where nothing is coded."""
    best = answer(prices.price(first, shape), ROUGH) if first.name == "kv" else None
    if best is None or not any(layer.coded for layer in best[2]):
        return None
    return prices.price(first, shape.with_layers(tuple(best[2])))


def limits(first: Budget, least: float, shape: ModelShape, most: float | None = None) -> dict[str, float]:
    """Budgets as `--budget` takes them, from all down to the least, with the run's own; limits.

    Even percentages or, where the cache is coded, from `most` down and closer where less is left.
    """
    full, at = prices.source_price(first, shape), "".join(first.text.partition("@")[1:])
    low = 100 * least / full if full else 100.0
    grid = _even(low) if most is None else _closer(low, 100 * most / full)
    texts = [f"{first.name}={percent:g}%{at}" for percent in grid]
    tables = () if first.table is None else (first.table,)
    wanted = {text: prices.parse(text, shape, tables).limit for text in texts}
    if first.limit <= full and first.limit not in wanted.values():
        wanted[first.text] = first.limit
    return dict(sorted(wanted.items(), key=lambda pair: -pair[1]))


def _even(low: float) -> list[float]:
    """Percentages down to `low`, at least `LEAST` of them."""
    grid: list[float] = []
    for step in STEPS:
        count = int((100 - low) / step + 1e-9)
        grid = [100 - step * index for index in range(count + 1)]
        if len(grid) >= LEAST:
            break
    return grid


def _closer(low: float, high: float) -> list[float]:
    """Percentages from the first that is not below `low` or `FLOOR` to the first that is not below `high`."""
    grid, place, low = [], 0.0, max(low, FLOOR)
    while place < min(high, 100.0):
        place += next(step for end, step in CODED_STEPS if place < end)
        grid += [place] if place >= low - 1e-9 else []
    return grid[::-1]


def coarse_first(texts: list[str]) -> list[str]:
    """Both ends, then the middle, then the middles of the halves, and so on.

    >>> coarse_first(list("abcde"))
    ['a', 'e', 'c', 'b', 'd']
    """
    if len(texts) < 3:
        return texts
    places, spans = [0, len(texts) - 1], [(0, len(texts) - 1)]
    while spans:
        halves = []
        for low, high in spans:
            if high - low > 1:
                middle = (low + high) // 2
                places.append(middle)
                halves += [(low, middle), (middle, high)]
        spans = halves
    return [texts[place] for place in places]


def rivals(readings: Readings, plan: Plan, allow: tuple[str, ...]) -> tuple[Baseline, ...]:
    """What other strategies would have predicted for the same budgets, where the same probe priced them."""
    found: list[Baseline] = []
    names = {"exact": "exact", "uniform": "uniform"}  # what a rival is called, and the strategy
    names |= {"published": "published"} if "qk_pairs" in strategies.ways(readings) else {}
    names |= {"depth": "depth"} if "depth" in allow and readings.curve("damage.depth") else {}
    names |= {"exact, no bits": "exact"} if any(layer.coded for layer in plan.target.layers) else {}
    pooled = any(layer.pooled > 1 for layer in plan.source.layers)
    sizes = tuple(unit for unit in allow if unit != "bits")
    for name, strategy in names.items():
        if (name == plan.strategy and not plan.portable) or (pooled and strategy not in strategies.POOLING):
            continue
        try:
            units = allow if name == "exact" else sizes
            other = strategies.allocate(readings, plan.budgets, strategy, units, seed=plan.seed)
        except HeadwiseError:
            continue
        found.append(Baseline(name, other.predicted_damage, other.spent))
    return tuple(found)
